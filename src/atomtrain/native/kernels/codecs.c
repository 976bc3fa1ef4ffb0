/* Codecs of the swarm. The layouts, and the same arithmetic in PyTorch, are in swarm/codecs.

Arguments are addresses of contiguous arrays; bytes that travel may lie at any address. Encoders
write, where `sent` or `lost` is not NULL, also what their bytes decode to, and how far that is
from the values; `sent` may be the values themselves, `lost` may not. No value is NaN or infinite.
Loops are simple, and have no calls, so that compilers turn them into vector instructions.
*/
#include <math.h>
#include <stdint.h>
#include <string.h>

enum { BLOCK = 256, SPARSE_BLOCK = 4096, KEPT = SPARSE_BLOCK / 32, SCALE_BYTES = 4 };

static const float LEAST_SCALE = 0x1p-126f;
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
void atom_sparse_scatter(const uint8_t *there, int64_t n, const float *room, float *out);

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

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Magnitudes are compared as integers, which have the same order. */
static float largest_magnitude(const float *values, int64_t n) {
    int32_t most = 0;
    for (int64_t i = 0; i < n; i++) {
        int32_t size = (int32_t)(bits_of(values[i]) & 0x7fffffff);
        most = size > most ? size : most;
    }
    return float_of((uint32_t)most);
}

/* Writes at most SPARSE_BLOCK values that are known to be elsewhere than `sent`. */
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

void atom_half_encode(const float *values, int64_t n, uint8_t *data, float *sent) {
    float scale = largest_magnitude(values, n), divisor = scale > 0 ? scale : 1.0f;
    memcpy(data, &scale, SCALE_BYTES);
    for (int64_t start = 0; start < n; start += BLOCK) {
        int64_t count = least(BLOCK, n - start);
        uint16_t halves[BLOCK];
        float decoded[BLOCK];
        for (int64_t i = 0; i < count; i++)
            halves[i] = to_half(values[start + i] / divisor);
        memcpy(data + SCALE_BYTES + 2 * start, halves, (size_t)count * 2);
        if (!sent)
            continue;
        for (int64_t i = 0; i < count; i++)
            decoded[i] = from_half(halves[i]) * scale;
        memcpy(sent + start, decoded, (size_t)count * sizeof *sent);
    }
}

void atom_half_decode(const uint8_t *data, int64_t n, float *out) {
    float scale = load(data);
    for (int64_t start = 0; start < n; start += BLOCK) {
        int64_t count = least(BLOCK, n - start);
        uint16_t halves[BLOCK];
        memcpy(halves, data + SCALE_BYTES + 2 * start, (size_t)count * 2);
        for (int64_t i = 0; i < count; i++)
            out[start + i] = from_half(halves[i]) * scale;
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

/* Returns the largest number that at least `count` of the sizes reach, or a smaller one that the
same sizes reach. It is found bit by bit, from the highest. */
static int32_t threshold(const int32_t *sizes, int64_t width, int64_t count) {
    int32_t found = 0;
    for (int32_t bit = 1 << 30; bit; bit >>= 1) {
        int32_t tried = found | bit, reach = 0;
        for (int64_t i = 0; i < width; i++)
            reach += sizes[i] >= tried;
        if (reach >= count)
            found = tried;
        if (reach == count)
            break;
    }
    return found;
}

/* Writes the positions of the `count` largest, rising; of equal ones the earlier count. */
static void select_largest(const int32_t *sizes, int64_t width, int64_t count, int32_t *chosen) {
    int32_t found[SPARSE_BLOCK], limit = threshold(sizes, width, count);
    int64_t reach = 0, above = 0, kept = 0;
    for (int64_t i = 0; i < width; i++) {
        found[reach] = (int32_t)i;
        reach += sizes[i] >= limit;
        above += sizes[i] > limit;
    }
    int64_t equals = reach == count ? reach - above : count - above;
    for (int64_t i = 0; i < reach; i++) {
        int equal = sizes[found[i]] == limit;
        if (equal && !equals)
            continue;
        equals -= equal;
        chosen[kept++] = found[i];
    }
}

/* Writes the means of the sizes up to their mean, and above it; sums in order, in double. */
static void two_levels(const float *sizes, int64_t count, float *levels, uint8_t *above) {
    double sum = 0.0, sums[2] = {0.0, 0.0};
    int64_t counts[2] = {0, 0};
    for (int64_t i = 0; i < count; i++)
        sum += sizes[i];
    double mean = sum / (double)count;
    for (int64_t i = 0; i < count; i++) {
        above[i] = sizes[i] > mean;
        sums[above[i]] += sizes[i];
        counts[above[i]]++;
    }
    for (int i = 0; i < 2; i++) {
        levels[i] = counts[i] ? (float)(sums[i] / (double)counts[i]) : 0.0f;
        levels[i] = levels[i] < LEAST_SCALE ? 0.0f : levels[i];
    }
}

static void pack_12_bits(const int32_t *positions, int64_t count, uint8_t *data) {
    for (int64_t i = 0; i < count; i += 2, data += 3) {
        int32_t first = positions[i], second = i + 1 < count ? positions[i + 1] : 0;
        data[0] = (uint8_t)first;
        data[1] = (uint8_t)(first >> 8 | (second & 15) << 4);
        data[2] = (uint8_t)(second >> 4);
    }
}

static void pack_2_bits(const uint8_t *codes, int64_t count, uint8_t *data) {
    memset(data, 0, (size_t)(count + 3) / 4);
    for (int64_t i = 0; i < count; i++)
        data[i / 4] |= (uint8_t)(codes[i] << i % 4 * 2);
}

static void largest_of_block(const float *values, int64_t width, uint8_t *scales,
                             uint8_t *positions, uint8_t *data, float *sent, float *lost) {
    int64_t count = (width + 31) / 32;
    int32_t sizes[SPARSE_BLOCK], chosen[KEPT];
    float picked[KEPT], magnitudes[KEPT], levels[2];
    uint8_t codes[KEPT];
    for (int64_t i = 0; i < width; i++)
        sizes[i] = (int32_t)(bits_of(values[i]) & 0x7fffffff);
    select_largest(sizes, width, count, chosen);
    for (int64_t i = 0; i < count; i++) {
        picked[i] = values[chosen[i]];
        magnitudes[i] = float_of((uint32_t)sizes[chosen[i]]);
    }
    two_levels(magnitudes, count, levels, codes);
    memcpy(scales, levels, sizeof levels);
    pack_12_bits(chosen, count, positions);
    if (lost)
        memcpy(lost, values, (size_t)width * sizeof *lost);
    if (sent)
        memset(sent, 0, (size_t)width * sizeof *sent);
    for (int64_t i = 0; i < count; i++) {
        float level = levels[codes[i]], value = picked[i] < 0 ? -level : level;
        codes[i] = (uint8_t)(codes[i] + 2 * (picked[i] < 0));
        if (lost)
            lost[chosen[i]] = picked[i] - value;
        if (sent)
            sent[chosen[i]] = value;
    }
    pack_2_bits(codes, count, data);
}

void atom_largest_encode(const float *values, int64_t rows, int64_t width, uint8_t *scales,
                         uint8_t *positions, uint8_t *codes, float *sent, float *lost) {
    int64_t count = (width + 31) / 32;
    for (int64_t row = 0; row < rows; row++) {
        int64_t start = row * width;
        largest_of_block(values + start, width, scales + row * 2 * SCALE_BYTES,
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

/* Writes the bits, in units of 32, and the first `most` of the elements that are not zero. Returns
how many there are. */
int64_t atom_sparse_gather(const float *values, int64_t n, uint8_t *there, float *room,
                           int64_t most) {
    int64_t found = 0;
    for (int64_t start = 0; start < n; start += 32) {
        int64_t count = least(32, n - start);
        uint32_t bits = 0;
        for (int64_t i = 0; i < count; i++)
            bits |= (uint32_t)(values[start + i] != 0) << i;
        for (int i = 0; i < 4; i++)
            there[start / 8 + i] = (uint8_t)(bits >> 8 * i);
        for (; bits; bits &= bits - 1, found++)
            if (found < most)
                room[found] = values[start + __builtin_ctz(bits)];
    }
    return found;
}

/* `room` holds as many values as there are bits, none of them beyond the elements. */
void atom_sparse_scatter(const uint8_t *there, int64_t n, const float *room, float *out) {
    memset(out, 0, (size_t)n * sizeof *out);
    for (int64_t start = 0; start < n; start += 32) {
        uint32_t bits = 0;
        for (int i = 0; i < 4; i++)
            bits |= (uint32_t)there[start / 8 + i] << 8 * i;
        for (; bits; bits &= bits - 1)
            out[start + __builtin_ctz(bits)] = *room++;
    }
}
