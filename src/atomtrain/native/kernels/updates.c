/* AdamW and SGD in one pass over memory, in the formats of `atomtrain.optimizers`.

   Elements pass in blocks that stay in the first cache: each block is widened to float32, updated
   and narrowed by loops of one kind each, which is as fast as one loop for each combination of
   formats and does not need so many. The bits are those of `torch._fused_adamw_`,
   `torch._fused_sgd_` and the PyTorch operations around them. */

#include "updates.h"

#include <math.h>

#include "bits.h"

/* Elements that PyTorch's float32 loops take at once. The last elements of a parameter that are
   fewer go through a plain loop there, which its compiler fused in another way; not on Arm (NEON),
   where AdamW's vectors are as that loop. With AVX-512 it is not 16: its compiler made vectors of 8
   of the plain loop that follows those of 16. */
#if defined(__aarch64__)
enum { VECTOR = 4, ALIKE = 1 };
#else
enum { VECTOR = 8, ALIKE = 0 };
#endif

struct wide {
    float values[BLOCK], gradient[BLOCK], first[BLOCK], second[BLOCK];
    float root[BLOCK]; /* of the second moment: its code needs it, too, and roots take long */
} __attribute__((aligned(64)));

INLINE float joined(uint16_t stream, uint16_t rest) {
    return float_of(((uint32_t)stream << 16) + (uint32_t)(int32_t)(int16_t)rest);
}

/* The factor is 1 unless a loss is scaled, and then nothing is clipped in 16 bits: so a clipped
   gradient costs one multiplication, too. */
INLINE void load_gradient(const struct parameter *p, int64_t at, int n, float *restrict out) {
    const float by = p->clipped ? p->coefficient : p->factor;
    const float *wide = (const float *)p->gradient + at;
    const uint16_t *in = (const uint16_t *)p->gradient + at;
    if (p->gradient_kind == FLOAT32_GRADIENT)
        for (int i = 0; i < n; i++) out[i] = wide[i] * by;
    else if (p->gradient_kind == BFLOAT16_GRADIENT && p->clipped)
        for (int i = 0; i < n; i++) out[i] = nearest_bfloat16(from_bfloat16(in[i]) * by);
    else if (p->gradient_kind == BFLOAT16_GRADIENT)
        for (int i = 0; i < n; i++) out[i] = from_bfloat16(in[i]) * by;
    else if (p->clipped)
        for (int i = 0; i < n; i++) out[i] = from_float16(to_float16(from_float16(in[i]) * by));
    else
        for (int i = 0; i < n; i++) out[i] = from_float16(in[i]) * by;
    if (p->clipped && p->factor != 1.0f)
        for (int i = 0; i < n; i++) out[i] *= p->factor;
}

#define LOWER 0xFFFFu
#define UPPER 0xFFFF0000u

/* Words of two elements of 16 bits. */
INLINE uint32_t word(const uint16_t *from, int index) {
    uint32_t value;
    memcpy(&value, from + 2 * index, sizeof value);
    return value;
}

INLINE void set_word(uint16_t *to, int index, uint32_t value) {
    memcpy(to + 2 * index, &value, sizeof value);
}

/* A whole block's gradient, even elements apart from odd ones. */
INLINE void load_gradient_pairs(const struct parameter *p, int64_t at, float *restrict even,
                                float *restrict odd) {
    const float by = p->clipped ? p->coefficient : p->factor;
    const uint16_t *in = (const uint16_t *)p->gradient + at;
    if (p->gradient_kind != BFLOAT16_GRADIENT || (p->clipped && p->factor != 1.0f)) {
        float all[BLOCK];
        load_gradient(p, at, BLOCK, all);
        for (int i = 0; i < BLOCK / 2; i++) even[i] = all[2 * i];
        for (int i = 0; i < BLOCK / 2; i++) odd[i] = all[2 * i + 1];
    } else if (p->clipped) {
        for (int i = 0; i < BLOCK / 2; i++) {
            even[i] = nearest_bfloat16(float_of(word(in, i) << 16) * by);
            odd[i] = nearest_bfloat16(float_of(word(in, i) & UPPER) * by);
        }
    } else {
        for (int i = 0; i < BLOCK / 2; i++) {
            even[i] = float_of(word(in, i) << 16) * by;
            odd[i] = float_of(word(in, i) & UPPER) * by;
        }
    }
}

INLINE void load_values(const struct parameter *p, int64_t at, int n, float *restrict out) {
    if (p->values_kind == BFLOAT16_SPLIT) {
        const uint16_t *stream = (const uint16_t *)p->values + at;
        const int16_t *rest = (const int16_t *)p->master + at;
        for (int i = 0; i < n; i++)
            out[i] = float_of(((uint32_t)stream[i] << 16) + (uint32_t)(int32_t)rest[i]);
        return;
    }
    const float *in = (const float *)(p->values_kind == FLOAT32_VALUES ? p->values : p->master) + at;
    for (int i = 0; i < n; i++) out[i] = in[i];
}

INLINE void store_values(const struct parameter *p, int64_t at, int n, const float *restrict in) {
    uint16_t *stream = (uint16_t *)p->values + at;
    if (p->values_kind == BFLOAT16_SPLIT) {
        uint16_t *rest = (uint16_t *)p->master + at;
        for (int i = 0; i < n; i++) {
            stream[i] = to_stream(in[i]);
            rest[i] = (uint16_t)bits_of(in[i]);
        }
        return;
    }
    float *out = (float *)(p->values_kind == FLOAT32_VALUES ? p->values : p->master) + at;
    for (int i = 0; i < n; i++) out[i] = in[i];
    if (p->values_kind == BFLOAT16_WHOLE)
        for (int i = 0; i < n; i++) stream[i] = to_stream(in[i]);
    if (p->values_kind == FLOAT16_WHOLE)
        for (int i = 0; i < n; i++) stream[i] = to_float16(in[i]);
}

/* 8 bit moments: `optimizers/companding.py` says what the codes are. */

INLINE void decode_first(const int8_t *restrict codes, float scale, int n, float *restrict out) {
    const float unit = scale / (127.0f * 127.0f);
    for (int i = 0; i < n; i++) {
        int32_t code = codes[i], magnitude = code < 0 ? -code : code;
        out[i] = (float)(magnitude * code) * unit;
    }
}

INLINE void decode_second(const int8_t *restrict codes, float scale, int n, float *restrict out) {
    const float unit = scale / (256.0f * 256.0f);
    for (int i = 0; i < n; i++) {
        int32_t root = codes[i] + 129;
        out[i] = (float)(root * root) * unit;
    }
}

/* Magnitudes compare as their bits do, and NaN is above all. */
INLINE float largest(const float *restrict values, int n) {
    int32_t most = 0;
    for (int i = 0; i < n; i++) {
        int32_t magnitude = (int32_t)(bits_of(values[i]) & 0x7FFFFFFF);
        most = magnitude > most ? magnitude : most;
    }
    return float_of((uint32_t)most);
}

/* What scales roots to 1 at the block's largest; 1.2e-38 is the least normal float32. */
INLINE float root_factor(float scale) {
    return 1.0f / sqrtf(scale < 1.2e-38f ? 1.2e-38f : scale);
}

/* 256 and the middle of one of 4096 parts of 0 to 1, by its lower bits: the last place is 2^-15. */
INLINE float fraction(uint16_t lower) { return float_of(0x43800000u | lower); }

INLINE void encode_first(const float *restrict in, int n, const uint16_t *restrict random,
                         int8_t *restrict codes, float *restrict scale) {
    *scale = largest(in, n);
    const float factor = root_factor(*scale);
    for (int i = 0; i < n; i++) {
        float root = sqrtf(float_of(bits_of(in[i]) & 0x7FFFFFFF));
        root = float_of(bits_of(root) | (bits_of(in[i]) & 0x80000000));
        int32_t whole = (int32_t)multiply_add(127.0f * root, factor, fraction(random[i]));
        codes[i] = (int8_t)(uint8_t)whole;
    }
}

INLINE void encode_second(const float *restrict in, const float *restrict root, int n,
                          const uint16_t *restrict random, int8_t *restrict codes,
                          float *restrict scale) {
    *scale = largest(in, n);
    const float factor = 256.0f * root_factor(*scale);
    for (int i = 0; i < n; i++) {
        int32_t whole = (int32_t)multiply_add(root[i], factor, fraction(random[i]));
        whole = whole < 257 ? 257 : whole > 512 ? 512 : whole; /* no code is zero */
        codes[i] = (int8_t)(uint8_t)(whole + 127);
    }
}

/* Less than a unit is added to the magnitude, whatever the sign; then it is cut off. */
INLINE uint16_t to_bfloat16_at_random(float value, uint16_t random) {
    return (uint16_t)((bits_of(value) + random) >> 16);
}

/* A number by which many are divided. A division takes several times as long as `quotient`. */
struct divisor {
    float by, reciprocal, rest; /* 1 / by, rounded, and what the rounding left */
};

INLINE struct divisor divisor_of(float by) {
    const float reciprocal = 1.0f / by;
    return (struct divisor){by, reciprocal, multiply_add(-by, reciprocal, 1.0f) * reciprocal};
}

/* `root / d.by`, with the same bits. The first quotient is one of the two numbers next to the exact
   one, so its remainder is exact, and Markstein's theorem (IBM Journal of Research and Development
   34-1, 1990) says that the corrected quotient is the nearest number. Roots of float32 and what
   they are divided by are far from what overflows or is subnormal. Infinity and NaN stay as they
   are. */
INLINE float quotient(float root, struct divisor d) {
#if FUSES
    const float near = multiply_add(root, d.reciprocal, root * d.rest);
    const float remainder = multiply_add(-near, d.by, root);
    const float nearest = multiply_add(remainder, d.reciprocal, near);
    return root < INFINITY ? nearest : root;
#else
    return root / d.by;
#endif
}

/* AdamW's arithmetic for one element; returns the new value, and the second moment's root. */
INLINE float adamw_element(struct adamw a, struct divisor correction, float value, float gradient,
                           float *first, float *second, float *root, int tail) {
    /* As PyTorch interpolates: from the nearer end. */
    const int near = fabsf(a.weight1) < 0.5f;
    /* The plain loop subtracts, so 0 has another sign there. */
    const float far = tail ? -(1.0f - a.weight1) : a.weight1 - 1.0f;
    const float weight = near ? a.weight1 : far;
    *first = multiply_add(weight, gradient - *first, near ? *first : gradient);
    float square = a.weight2 * gradient;
    *second = tail || ALIKE ? multiply_add(*second, a.beta2, square * gradient)
                            : multiply_add(square, gradient, *second * a.beta2);
    *root = sqrtf(*second);
    float denominator = quotient(*root, correction) + a.eps;
    return value * a.keep + -a.step * *first / denominator;
}

/* Update elements `from` to `to` of a block, of which the memory begins at `at`; `values`, `moments`
   and `tail` are constants wherever this is used. */
INLINE void adamw(const struct parameter *p, const struct adamw *a, struct random r,
                  int64_t at, int from, int to, struct wide *restrict w, int values, int moments,
                  int tail) {
    float *restrict wide = (float *)(values == FLOAT32_VALUES ? p->values : p->master) + at;
    uint16_t *restrict stream = (uint16_t *)p->values + at, *restrict rest = (uint16_t *)p->master + at;
    float *restrict first32 = (float *)p->first + at, *restrict second32 = (float *)p->second + at;
    uint16_t *restrict first16 = (uint16_t *)p->first + at;
    uint16_t *restrict second16 = (uint16_t *)p->second + at;
    const uint16_t *restrict random1 = moments == BFLOAT16_MOMENTS ? r.first : 0;
    const uint16_t *restrict random2 = moments == BFLOAT16_MOMENTS ? r.second : 0;
    const float *restrict gradient32 = (const float *)p->gradient + at;
    const float by = p->clipped ? p->coefficient : 1.0f;
    const struct adamw numbers = *a; /* else they are read again after each write */
    const struct divisor correction = divisor_of(numbers.root_correction);
    INDEPENDENT
    for (int i = from; i < to; i++) {
        float value = values == BFLOAT16_SPLIT ? joined(stream[i], rest[i]) : wide[i];
        float first = moments == FLOAT32_MOMENTS    ? first32[i]
                      : moments == BFLOAT16_MOMENTS ? from_bfloat16(first16[i])
                                                    : w->first[i];
        float second = moments == FLOAT32_MOMENTS    ? second32[i]
                       : moments == BFLOAT16_MOMENTS ? from_bfloat16(second16[i])
                                                     : w->second[i];
        float gradient = values == FLOAT32_VALUES ? gradient32[i] * by : w->gradient[i];
        float root;
        value = adamw_element(numbers, correction, value, gradient, &first, &second, &root, tail);
        if (values == BFLOAT16_SPLIT) {
            stream[i] = to_stream(value);
            rest[i] = (uint16_t)bits_of(value);
        } else {
            wide[i] = value;
            if (values == BFLOAT16_WHOLE) stream[i] = to_stream(value);
            if (values == FLOAT16_WHOLE) stream[i] = to_float16(value);
        }
        if (moments == FLOAT32_MOMENTS) {
            first32[i] = first;
            second32[i] = second;
        } else if (moments == BFLOAT16_MOMENTS) {
            first16[i] = to_bfloat16_at_random(first, random1[i]);
            second16[i] = to_bfloat16_at_random(second, random2[i]);
        } else {
            w->first[i] = first;
            w->second[i] = second;
            w->root[i] = root;
        }
    }
}

/* The same for a whole block where all is of 16 bits: each word has an even element in its lower
   half and an odd one in its upper half, so nothing has to be widened, packed or shuffled. */
INLINE void adamw_pairs(const struct parameter *p, const struct adamw *a, struct random r,
                        int64_t at) {
    float even[BLOCK / 2], odd[BLOCK / 2];
    const struct adamw numbers = *a;
    const struct divisor correction = divisor_of(numbers.root_correction);
    uint16_t *streams = (uint16_t *)p->values + at, *rests = (uint16_t *)p->master + at;
    uint16_t *firsts = (uint16_t *)p->first + at, *seconds = (uint16_t *)p->second + at;
    load_gradient_pairs(p, at, even, odd);
    INDEPENDENT
    for (int i = 0; i < BLOCK / 2; i++) {
        uint32_t stream = word(streams, i), rest = word(rests, i);
        uint32_t first = word(firsts, i), second = word(seconds, i);
        uint32_t random1 = word(r.first, i), random2 = word(r.second, i);
        float value0 = float_of((stream << 16) + (uint32_t)((int32_t)(rest << 16) >> 16));
        float value1 = float_of((stream & UPPER) + (uint32_t)((int32_t)rest >> 16));
        float first0 = float_of(first << 16), first1 = float_of(first & UPPER);
        float second0 = float_of(second << 16), second1 = float_of(second & UPPER);
        float root;
        value0 = adamw_element(numbers, correction, value0, even[i], &first0, &second0, &root, 0);
        value1 = adamw_element(numbers, correction, value1, odd[i], &first1, &second1, &root, 0);
        uint32_t bits0 = bits_of(value0), bits1 = bits_of(value1);
        set_word(streams, i, (bits0 + 0x8000) >> 16 | ((bits1 + 0x8000) & UPPER));
        set_word(rests, i, (bits0 & LOWER) | bits1 << 16);
        set_word(firsts, i, (bits_of(first0) + (random1 & LOWER)) >> 16 |
                                ((bits_of(first1) + (random1 >> 16)) & UPPER));
        set_word(seconds, i, (bits_of(second0) + (random2 & LOWER)) >> 16 |
                                 ((bits_of(second1) + (random2 >> 16)) & UPPER));
    }
}

/* Narrow moments pass through scratch that is filled up to whole vectors. */
INLINE int whole_vectors(const struct parameter *p, int64_t at, int n) {
    const int64_t stop = p->count - p->count % VECTOR;
    return p->moments_kind == FLOAT32_MOMENTS && at + n > stop ? (int)(stop - at) : n;
}

/* Ask for memory some blocks ahead: the processor's own prefetching stops at each page. Newer ones
   with AVX-512 do better alone, by up to a third, unless arithmetic keeps them busy. */
#if defined(__AVX512F__)
enum { FETCH_ALL = 0 };
#else
enum { FETCH_ALL = 1 };
#endif

INLINE void fetch(const void *memory, int64_t at, int bytes) {
    const char *ahead = (const char *)memory + (at + 4 * BLOCK) * bytes;
    for (int line = 0; line < BLOCK * bytes; line += 64) __builtin_prefetch(ahead + line);
}

INLINE void fetch_block(const struct parameter *p, int64_t at, int values, int moments) {
    const int each = moments == FLOAT32_MOMENTS ? 4 : moments == BFLOAT16_MOMENTS ? 2 : 1;
    fetch(p->values, at, values == FLOAT32_VALUES ? 4 : 2);
    if (values != FLOAT32_VALUES) fetch(p->master, at, values == BFLOAT16_SPLIT ? 2 : 4);
    fetch(p->first, at, each);
    fetch(p->second, at, each);
    if (p->gradient_kind == FLOAT32_GRADIENT)
        fetch(p->gradient, at, 4);
    else
        fetch(p->gradient, at, 2);
}

INLINE void adamw_block(const struct parameter *p, const struct adamw *a, struct random r,
                        int64_t at, int n, int values, int moments) {
    if (n == BLOCK && (FETCH_ALL || moments == INT8_MOMENTS)) fetch_block(p, at, values, moments);
    if (n == BLOCK && values == BFLOAT16_SPLIT && moments == BFLOAT16_MOMENTS) {
        adamw_pairs(p, a, r, at);
        return;
    }
    struct wide w;
    const int whole = n == BLOCK ? n : whole_vectors(p, at, n);
    int8_t *first = (int8_t *)p->first + at, *second = (int8_t *)p->second + at;
    if (values != FLOAT32_VALUES) load_gradient(p, at, n, w.gradient);
    if (moments == INT8_MOMENTS) {
        decode_first(first, p->first_scale[at / BLOCK], n, w.first);
        decode_second(second, p->second_scale[at / BLOCK], n, w.second);
    }
    adamw(p, a, r, at, 0, whole, &w, values, moments, 0);
    if (whole < n) adamw(p, a, r, at, whole, n, &w, values, moments, 1);
    if (moments == INT8_MOMENTS) {
        encode_first(w.first, n, r.first, first, p->first_scale + at / BLOCK);
        encode_second(w.second, w.root, n, r.second, second, p->second_scale + at / BLOCK);
    }
}

INLINE void adamw_range(const struct parameter *p, const struct adamw *a, const struct slices *s,
                        int64_t begin, int64_t end, int values, int moments) {
    for (int64_t at = begin, n; at < end; at += n) {
        struct random r = {0, 0};
        int64_t left = end - at;
        if (moments != FLOAT32_MOMENTS) {
            const struct random *of = s->random + at / s->elements;
            int64_t within = at % s->elements;
            r = (struct random){of->first + within, of->second + within};
            left = left < s->elements - within ? left : s->elements - within;
        }
        n = left < BLOCK ? left : BLOCK;
        if (n == BLOCK)
            adamw_block(p, a, r, at, BLOCK, values, moments);
        else
            adamw_block(p, a, r, at, (int)n, values, moments);
    }
}

#define ADAMW(VALUES, MOMENTS)                                                                     \
    static void adamw_##VALUES##_##MOMENTS(const struct parameter *p, const struct adamw *a,       \
                                           const struct slices *s, int64_t begin, int64_t end) {   \
        adamw_range(p, a, s, begin, end, VALUES, MOMENTS);                                         \
    }
#define EACH_MOMENTS(VALUES)                                                                       \
    ADAMW(VALUES, FLOAT32_MOMENTS)                                                                 \
    ADAMW(VALUES, BFLOAT16_MOMENTS)                                                                \
    ADAMW(VALUES, INT8_MOMENTS)
EACH_MOMENTS(FLOAT32_VALUES)
EACH_MOMENTS(BFLOAT16_WHOLE)
EACH_MOMENTS(BFLOAT16_SPLIT)
EACH_MOMENTS(FLOAT16_WHOLE)

#define TABLE(VALUES)                                                                              \
    {adamw_##VALUES##_FLOAT32_MOMENTS, adamw_##VALUES##_BFLOAT16_MOMENTS,                          \
     adamw_##VALUES##_INT8_MOMENTS}

void atom_adamw(const struct parameter *p, const struct adamw *a, const struct slices *s,
                int64_t begin, int64_t end) {
    static void (*const kinds[][3])(const struct parameter *, const struct adamw *,
                                    const struct slices *, int64_t, int64_t) = {
        TABLE(FLOAT32_VALUES), TABLE(BFLOAT16_WHOLE), TABLE(BFLOAT16_SPLIT), TABLE(FLOAT16_WHOLE)};
    const struct parameter parameter = *p;
    const struct adamw numbers = *a;
    kinds[p->values_kind][p->moments_kind](&parameter, &numbers, s, begin, end);
}

INLINE void sgd(struct wide *restrict w, const struct sgd *a, int from, int to, int tail) {
    for (int i = from; i < to; i++) {
        float gradient = w->gradient[i], momentum = w->first[i];
        if (a->weight_decay != 0.0f)
            gradient = multiply_add(w->values[i], a->weight_decay, gradient);
        if (a->momentum != 0.0f) {
            float kept = tail ? multiply_add(momentum, a->momentum, gradient * a->share)
                              : multiply_add(gradient, a->share, momentum * a->momentum);
            momentum = a->first_step ? gradient : kept;
            gradient = a->nesterov ? multiply_add(momentum, a->momentum, gradient) : momentum;
        }
        w->first[i] = momentum;
        w->values[i] = multiply_add(gradient, -a->lr, w->values[i]);
    }
}

INLINE void sgd_block(const struct parameter *p, const struct sgd *a, int64_t at, int n) {
    struct wide w;
    float *momentum = (float *)p->first + at;
    const int whole = n == BLOCK ? n : whole_vectors(p, at, n), moves = a->momentum != 0.0f;
    load_gradient(p, at, n, w.gradient);
    load_values(p, at, n, w.values);
    for (int i = 0; i < n; i++) w.first[i] = moves ? momentum[i] : 0.0f;
    sgd(&w, a, 0, whole, 0);
    sgd(&w, a, whole, n, 1);
    store_values(p, at, n, w.values);
    for (int i = 0; moves && i < n; i++) momentum[i] = w.first[i];
}

void atom_sgd(const struct parameter *p, const struct sgd *n, int64_t begin, int64_t end) {
    const struct parameter parameter = *p;
    const struct sgd numbers = *n;
    int64_t at = begin;
    for (; at + BLOCK <= end; at += BLOCK) sgd_block(&parameter, &numbers, at, BLOCK);
    if (at < end) sgd_block(&parameter, &numbers, at, (int)(end - at));
}
