/* Codecs of the swarm. The layouts, and the same arithmetic in PyTorch, are in swarm/codecs.

Arguments are addresses of contiguous arrays; bytes that travel may lie at any address. Encoders
write, where `sent` or `lost` is not NULL, also what their bytes decode to, and how far that is
from the values; `sent` may be the values themselves, `lost` may not. No value is NaN or infinite.
Loops are simple, and have no calls, so that compilers turn them into vector instructions.
*/
#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __F16C__
#include <immintrin.h>
#endif

enum { BLOCK = 256, SPARSE_BLOCK = 4096, KEPT = SPARSE_BLOCK / 32, SCALE_BYTES = 4, AT_ONCE = 4 };

static const float LEAST_SCALE = 0x1p-126f;
/* By what a block's limit is lowered for the next one: to 0.8 of it or a little more. */
static const int32_t LOWER = 1 << 21;
static const float TO_WHOLE = 0x1.8p23f; /* added to a small number, it leaves no fraction bits */

void atom_half_encode(const float *values, int64_t n, uint8_t *data, float *sent);
void atom_half_decode(const uint8_t *data, int64_t n, float *out);
void atom_blocks_encode(const float *values, int64_t n, int64_t bits, const uint32_t *keys,
                        uint8_t *data, float *sent, float *lost);
void atom_blocks_decode(const uint8_t *data, int64_t n, int64_t bits, float *out);
void atom_largest_encode(const float *values, int64_t rows, int64_t width, uint8_t *scales,
                         uint8_t *positions, uint8_t *codes, float *sent, float *lost);
int64_t atom_largest_decode(const uint8_t *scales, const uint8_t *positions, const uint8_t *codes,
                            int64_t rows, int64_t width, float *out);
int64_t atom_sparse_gather(const float *values, int64_t n, uint8_t *there, float *room,
                           int64_t most);
int64_t atom_sparse_scatter(const uint8_t *there, int64_t n, const float *room, int64_t most,
                            float *out);

static inline uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline float load(const uint8_t *data) {
    float value;
    memcpy(&value, data, sizeof value);
    return value;
}

/* Magnitudes have the order of these integers. */
static inline int32_t size_of(float value) { return (int32_t)(bits_of(value) & 0x7fffffff); }

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Returns a bit for each of at most 32 values: whether its size reaches the limit. */
static inline uint32_t reaching_bits(const float *values, int64_t n, int32_t limit) {
    uint32_t bits = 0;
#ifdef __AVX512F__ /* compares sixteen at once, which compilers do not see */
    if (n == 32) {
        const __m512i least_size = _mm512_set1_epi32(limit), sizes = _mm512_set1_epi32(0x7fffffff);
        for (int i = 0; i < 2; i++) {
            __m512i size = _mm512_and_epi32(_mm512_loadu_si512(values + 16 * i), sizes);
            bits |= (uint32_t)_mm512_cmpge_epi32_mask(size, least_size) << 16 * i;
        }
        return bits;
    }
#endif
    if (n == 32)
        for (int i = 0; i < 32; i++) /* a known number, for vector instructions */
            bits |= (uint32_t)(size_of(values[i]) >= limit) << i;
    else
        for (int64_t i = 0; i < n; i++)
            bits |= (uint32_t)(size_of(values[i]) >= limit) << i;
    return bits;
}

/* Writes where bits are set, and up to AT_ONCE numbers more: so loops are hardly ever left at
another turn than a processor expects. */
static inline void write_places(uint32_t bits, int64_t start, uint16_t *places) {
    do {
        for (int i = 0; i < AT_ONCE; i++, bits &= bits - 1)
            *places++ = (uint16_t)(start + __builtin_ctz(bits | 1u << 31));
    } while (bits);
}

static float largest_magnitude(const float *values, int64_t n) {
    int32_t most = 0;
    for (int64_t i = 0; i < n; i++) {
        int32_t size = size_of(values[i]);
        most = size > most ? size : most;
    }
    return float_of((uint32_t)most);
}

/* `decoded` is not `sent`, which may be the values. */
static void tell(const float *values, const float *decoded, int64_t n, float *sent, float *lost) {
    if (lost)
        for (int64_t i = 0; i < n; i++)
            lost[i] = values[i] - decoded[i];
    if (sent)
        memcpy(sent, decoded, (size_t)n * sizeof *sent);
}

/* ---- float16: a scale, then halves of magnitudes up to 1 ---- */

/* Rounds to nearest even; below the smallest normal half, the sum with 0.5 does the rounding. */
static inline uint16_t to_half(float value) {
    uint32_t bits = bits_of(value), size = bits & 0x7fffffff;
    uint32_t normal = (size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13;
    uint32_t small = bits_of(float_of(size) + 0.5f) - 0x3f000000;
    return (uint16_t)((size < 0x38800000 ? small : normal) | (bits >> 16 & 0x8000));
}

/* Any half, since it may come from a stranger: infinite and NaN too. */
static inline float from_half(uint16_t half) {
    uint32_t size = half & 0x7fffu;
    uint32_t normal = (size << 13) + 0x38000000;
    uint32_t small = bits_of(float_of(0x3f000000 + size) - 0.5f);
    uint32_t endless = size << 13 | 0x7f800000;
    uint32_t found = size < 0x400 ? small : size < 0x7c00 ? normal : endless;
    return float_of(found | (uint32_t)(half & 0x8000u) << 16);
}

static void to_halves(const float *values, int64_t n, float divisor, uint16_t *halves) {
    int64_t i = 0;
#ifdef __F16C__ /* has instructions that do the same */
    for (; i + 8 <= n; i += 8) {
        __m256 unit = _mm256_div_ps(_mm256_loadu_ps(values + i), _mm256_set1_ps(divisor));
        _mm_storeu_si128((__m128i *)(halves + i), _mm256_cvtps_ph(unit, _MM_FROUND_TO_NEAREST_INT));
    }
#endif
    for (; i < n; i++)
        halves[i] = to_half(values[i] / divisor);
}

static void from_halves(const uint16_t *halves, int64_t n, float scale, float *out) {
    int64_t i = 0;
#ifdef __F16C__
    for (; i + 8 <= n; i += 8) {
        __m256 unit = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(halves + i)));
        _mm256_storeu_ps(out + i, _mm256_mul_ps(unit, _mm256_set1_ps(scale)));
    }
#endif
    for (; i < n; i++)
        out[i] = from_half(halves[i]) * scale;
}

void atom_half_encode(const float *values, int64_t n, uint8_t *data, float *sent) {
    float scale = largest_magnitude(values, n), divisor = scale > 0 ? scale : 1.0f;
    memcpy(data, &scale, SCALE_BYTES);
    for (int64_t start = 0; start < n; start += BLOCK) {
        int64_t count = least(BLOCK, n - start);
        uint16_t halves[BLOCK];
        to_halves(values + start, count, divisor, halves);
        memcpy(data + SCALE_BYTES + 2 * start, halves, (size_t)count * 2);
        if (sent)
            from_halves(halves, count, scale, sent + start);
    }
}

void atom_half_decode(const uint8_t *data, int64_t n, float *out) {
    float scale = load(data);
    for (int64_t start = 0; start < n; start += BLOCK) {
        int64_t count = least(BLOCK, n - start);
        uint16_t halves[BLOCK];
        memcpy(halves, data + SCALE_BYTES + 2 * start, (size_t)count * 2);
        from_halves(halves, count, scale, out + start);
    }
}

/* ---- int8 and int4: scales of blocks, then integers ---- */

/* A number in [0, 1) with 24 bits, of a position and two keys. */
static inline float uniform(uint32_t position, uint32_t first, uint32_t second) {
    uint32_t x = position + first;
    x = (x ^ x >> 16) * 0x7feb352d;
    x = ((x ^ x >> 15) + second) * 0x846ca68b;
    x ^= x >> 16;
    return (float)(int32_t)(x >> 8) * 0x1p-24f;
}

static void round_to_nearest(const float *values, int64_t n, float divisor, int8_t *whole) {
    for (int64_t i = 0; i < n; i++)
        whole[i] = (int8_t)(bits_of(values[i] / divisor + TO_WHOLE) - bits_of(TO_WHOLE));
}

static void round_at_random(const float *values, int64_t n, float divisor, const uint32_t *keys,
                            int64_t start, int32_t most, int8_t *whole) {
    uint32_t first = keys[0] + (uint32_t)start, second = keys[1];
    for (int64_t i = 0; i < n; i++) {
        float unit = values[i] / divisor + uniform((uint32_t)i, first, second);
        int32_t below = (int32_t)unit; /* towards zero */
        below -= (float)below > unit;
        below = below < -most ? -most : below;
        whole[i] = (int8_t)(below > most ? most : below);
    }
}

/* Two integers a byte, the earlier one in the low half; beside an odd last one there is a zero. */
static void pack_halves(int8_t *whole, int64_t n, uint8_t *data) {
    if (n & 1)
        whole[n] = 0;
    for (int64_t i = 0; i < (n + 1) / 2; i++)
        data[i] = (uint8_t)((whole[2 * i] + 8) | (whole[2 * i + 1] + 8) << 4);
}

static void blocks_values(const uint8_t *data, int64_t n, int64_t bits, float scale, float *out) {
    if (bits == 8) {
        for (int64_t i = 0; i < n; i++)
            out[i] = (float)(int8_t)data[i] * scale;
        return;
    }
    for (int64_t i = 0; i < n / 2; i++) {
        out[2 * i] = (float)((data[i] & 15) - 8) * scale;
        out[2 * i + 1] = (float)((data[i] >> 4) - 8) * scale;
    }
    if (n & 1)
        out[n - 1] = (float)((data[n / 2] & 15) - 8) * scale;
}

void atom_blocks_encode(const float *values, int64_t n, int64_t bits, const uint32_t *keys,
                        uint8_t *data, float *sent, float *lost) {
    uint8_t *body = data + (n + BLOCK - 1) / BLOCK * SCALE_BYTES;
    int32_t most = (1 << (bits - 1)) - 1;
    for (int64_t start = 0; start < n; start += BLOCK) {
        int64_t count = least(BLOCK, n - start);
        const float *block = values + start;
        float scale = largest_magnitude(block, count) / (float)most;
        scale = scale < LEAST_SCALE ? 0.0f : scale;
        float divisor = scale > 0 ? scale : INFINITY;
        int8_t whole[BLOCK];
        if (keys)
            round_at_random(block, count, divisor, keys, start, most, whole);
        else
            round_to_nearest(block, count, divisor, whole);
        memcpy(data + start / BLOCK * SCALE_BYTES, &scale, SCALE_BYTES);
        if (bits == 8)
            memcpy(body + start, whole, (size_t)count);
        else
            pack_halves(whole, count, body + start / 2);
        float decoded[BLOCK];
        if (sent || lost) {
            for (int64_t i = 0; i < count; i++)
                decoded[i] = (float)whole[i] * scale;
            tell(block, decoded, count, sent ? sent + start : NULL, lost ? lost + start : NULL);
        }
    }
}

void atom_blocks_decode(const uint8_t *data, int64_t n, int64_t bits, float *out) {
    const uint8_t *body = data + (n + BLOCK - 1) / BLOCK * SCALE_BYTES;
    for (int64_t start = 0; start < n; start += BLOCK) {
        float scale = load(data + start / BLOCK * SCALE_BYTES);
        blocks_values(body + start * bits / 8, least(BLOCK, n - start), bits, scale, out + start);
    }
}

/* ---- top-k: two magnitudes a block, positions of 12 bits, codes of 2 bits ---- */

static int64_t above(const float *values, int64_t n, int32_t limit) {
    int32_t count = 0;
    for (int64_t i = 0; i < n; i++)
        count += size_of(values[i]) > limit;
    return count;
}

/* Lifts the limit bit by bit, from the highest, while at least `count` of the values reach it.
Stops where at most `enough` do. */
static void lift(const float *values, int64_t n, int64_t count, int64_t enough, int32_t *limit) {
    int64_t reach = n;
    for (int32_t bit = 1 << 30; bit && reach > enough; bit >>= 1) {
        int64_t tried = above(values, n, (*limit | bit) - 1);
        if (tried >= count) {
            *limit |= bit;
            reach = tried;
        }
    }
}

/* Writes the `count` values of largest size, and their positions, rising; of equal ones the
earlier count. First few values are left that it can be, then these are looked at closely. `guess`
is a limit that may leave few; the next block's comes back. There is room for one value more. */
static void select_largest(const float *values, int64_t width, int64_t count, int32_t *guess,
                           uint16_t *chosen, float *picked) {
    uint16_t found[SPARSE_BLOCK + AT_ONCE];
    float reach[SPARSE_BLOCK];
    int32_t limit = *guess;
    int64_t n = 0, kept = 0, guessed = above(values, width, limit - 1);
    if (guessed < count || guessed > 4 * count) {
        limit = 0;
        lift(values, width, count, 4 * count, &limit);
    }
    for (int64_t start = 0; start < width; start += 32) {
        uint32_t bits = reaching_bits(values + start, least(32, width - start), limit);
        write_places(bits, start, found + n);
        n += __builtin_popcount(bits);
    }
    for (int64_t i = 0; i < n; i++)
        reach[i] = values[found[i]];
    limit = 0;
    lift(reach, n, count, count, &limit);
    int64_t equals = count - above(reach, n, limit);
    for (int64_t i = 0; i < n; i++) { /* without branches, which nobody could foretell */
        int32_t size = size_of(reach[i]), equal = size == limit && equals > 0;
        chosen[kept] = found[i];
        picked[kept] = reach[i];
        kept += equal | (size > limit);
        equals -= equal;
    }
    *guess = limit > LOWER ? limit - LOWER : 0;
}

/* Writes the means of the sizes up to their mean, and above it; sums in order, in double. */
static void two_levels(const float *picked, int64_t count, float *levels, uint8_t *large) {
    double sum = 0.0, sums[2] = {0.0, 0.0};
    int64_t high = 0;
    for (int64_t i = 0; i < count; i++)
        sum += fabsf(picked[i]);
    double mean = sum / (double)count;
    for (int64_t i = 0; i < count; i++) {
        double size = fabsf(picked[i]);
        large[i] = size > mean;
        high += large[i];
        sums[0] += large[i] ? 0.0 : size;
        sums[1] += large[i] ? size : 0.0;
    }
    for (int i = 0; i < 2; i++) {
        int64_t those = i ? high : count - high;
        levels[i] = those ? (float)(sums[i] / (double)those) : 0.0f;
        levels[i] = levels[i] < LEAST_SCALE ? 0.0f : levels[i];
    }
}

static void pack_12_bits(const uint16_t *positions, int64_t count, uint8_t *data) {
    for (int64_t i = 0; i < count; i += 2, data += 3) {
        int32_t first = positions[i], second = i + 1 < count ? positions[i + 1] : 0;
        data[0] = (uint8_t)first;
        data[1] = (uint8_t)(first >> 8 | (second & 15) << 4);
        data[2] = (uint8_t)(second >> 4);
    }
}

/* There are zeros behind the codes, up to a multiple of four. */
static void pack_2_bits(const uint8_t *codes, int64_t count, uint8_t *data) {
    for (int64_t i = 0; i < (count + 3) / 4; i++, codes += 4)
        data[i] = (uint8_t)(codes[0] | codes[1] << 2 | codes[2] << 4 | codes[3] << 6);
}

static void largest_of_block(const float *values, int64_t width, int32_t *guess, uint8_t *scales,
                             uint8_t *positions, uint8_t *data, float *sent, float *lost) {
    int64_t count = (width + 31) / 32;
    uint16_t chosen[KEPT + 1];
    uint8_t codes[KEPT] = {0};
    float picked[KEPT + 1], levels[4];
    select_largest(values, width, count, guess, chosen, picked);
    two_levels(picked, count, levels, codes);
    memcpy(scales, levels, 2 * SCALE_BYTES);
    levels[2] = -levels[0];
    levels[3] = -levels[1];
    for (int64_t i = 0; i < count; i++)
        codes[i] = (uint8_t)(codes[i] + 2 * (picked[i] < 0));
    pack_12_bits(chosen, count, positions);
    pack_2_bits(codes, count, data);
    if (lost)
        memcpy(lost, values, (size_t)width * sizeof *lost);
    if (sent)
        memset(sent, 0, (size_t)width * sizeof *sent);
    for (int64_t i = 0; i < count; i++) {
        if (lost)
            lost[chosen[i]] = picked[i] - levels[codes[i]];
        if (sent)
            sent[chosen[i]] = levels[codes[i]];
    }
}

void atom_largest_encode(const float *values, int64_t rows, int64_t width, uint8_t *scales,
                         uint8_t *positions, uint8_t *codes, float *sent, float *lost) {
    int64_t count = (width + 31) / 32;
    int32_t guess = 0;
    for (int64_t row = 0; row < rows; row++) {
        int64_t start = row * width;
        largest_of_block(values + start, width, &guess, scales + row * 2 * SCALE_BYTES,
                         positions + row * ((count + 1) / 2 * 3), codes + row * ((count + 3) / 4),
                         sent ? sent + start : NULL, lost ? lost + start : NULL);
    }
}

/* Returns 0, or 1 as soon as positions do not rise or lie outside their block. */
int64_t atom_largest_decode(const uint8_t *scales, const uint8_t *positions, const uint8_t *codes,
                            int64_t rows, int64_t width, float *out) {
    int64_t count = (width + 31) / 32;
    memset(out, 0, (size_t)(rows * width) * sizeof *out);
    for (int64_t row = 0; row < rows; row++, out += width, scales += 2 * SCALE_BYTES) {
        float low = load(scales), high = load(scales + SCALE_BYTES);
        float levels[4] = {low, high, -low, -high};
        int32_t last = -1;
        for (int64_t i = 0; i < count; i++) {
            const uint8_t *three = positions + i / 2 * 3;
            int32_t position = i & 1 ? three[1] >> 4 | three[2] << 4
                                     : three[0] | (three[1] & 15) << 8;
            if (position <= last || position >= width)
                return 1;
            out[position] = levels[codes[i / 4] >> i % 4 * 2 & 3];
            last = position;
        }
        positions += (count + 1) / 2 * 3;
        codes += (count + 3) / 4;
    }
    return 0;
}

/* ---- sparse means: a bit for each element says whether it is there ---- */

/* Writes those of 32 values that the bits name, and up to AT_ONCE or 15 numbers more. */
static inline void gather(const float *values, uint32_t bits, float *room) {
#ifdef __AVX512F__
    for (; bits; room += __builtin_popcount(bits & 0xffff), bits >>= 16, values += 16)
        _mm512_storeu_ps(room, _mm512_maskz_compress_ps((__mmask16)bits, _mm512_loadu_ps(values)));
#else
    while (bits)
        for (int i = 0; i < AT_ONCE; i++, bits &= bits - 1)
            *room++ = values[__builtin_ctz(bits | 1u << 31)];
#endif
}

/* Writes 32 values, zeros but where the bits say; may read one number of `room` more. */
static inline void scatter(const float *room, uint32_t bits, float *out) {
#ifdef __AVX512F__
    for (int i = 0; i < 2; i++, room += __builtin_popcount(bits & 0xffff), bits >>= 16)
        _mm512_storeu_ps(out + 16 * i, _mm512_maskz_expandloadu_ps((__mmask16)bits, room));
#else
    float block[33] = {0}; /* the last is for what is too many */
    for (; bits;)
        for (int i = 0; i < AT_ONCE; i++, room += bits != 0, bits &= bits - 1)
            block[__builtin_ctzll(bits | 1ull << 32)] = *room;
    memcpy(out, block, 32 * sizeof *out);
#endif
}

/* Writes the bits, in units of 32, and the first `most` of the elements that are not zero. Returns
how many there are. */
int64_t atom_sparse_gather(const float *values, int64_t n, uint8_t *there, float *room,
                           int64_t most) {
    int64_t found = 0;
    for (int64_t start = 0; start < n; start += 32) {
        uint32_t bits = reaching_bits(values + start, least(32, n - start), 1);
        for (int i = 0; i < 4; i++)
            there[start / 8 + i] = (uint8_t)(bits >> 8 * i);
        if (n - start >= 32 && most - found >= 48)
            gather(values + start, bits, room + found);
        else
            for (uint32_t rest = bits, at = 0; rest && found + at < most; rest &= rest - 1, at++)
                room[found + at] = values[start + __builtin_ctz(rest)];
        found += __builtin_popcount(bits);
    }
    return found;
}

/* Returns 0, or 1 where bits name more than the `most` values of `room`, or lie beyond the end. */
int64_t atom_sparse_scatter(const uint8_t *there, int64_t n, const float *room, int64_t most,
                            float *out) {
    for (int64_t start = 0; start < n; start += 32) {
        int64_t count = least(32, n - start);
        uint32_t bits = 0;
        for (int i = 0; i < 4; i++)
            bits |= (uint32_t)there[start / 8 + i] << 8 * i;
        int64_t named = __builtin_popcount(bits);
        if (named > most || (uint64_t)bits >> count)
            return 1;
        if (count == 32 && most > 32)
            scatter(room, bits, out + start);
        else {
            memset(out + start, 0, (size_t)count * sizeof *out);
            for (const float *next = room; bits; bits &= bits - 1)
                out[start + __builtin_ctz(bits)] = *next++;
        }
        room += named;
        most -= named;
    }
    return 0;
}
