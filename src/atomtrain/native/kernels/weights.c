/* Weights in 8 or 4 bits made wide, in one pass; `models/quantised.py` says what the codes are. */
#include "bits.h"
#include "updates.h"

enum { MOST = 64 }; /* elements of a block of weights at most */

void atom_dequantise(const void *codes, const float *scales, int64_t blocks, int64_t block,
                     const float *levels, int32_t count, int32_t signs, int32_t kind, void *out);

/* Also of NaN, which stays what it is. */
INLINE uint16_t to_bfloat16(float value) {
    uint32_t bits = bits_of(nearest_bfloat16(value)) >> 16;
    return (uint16_t)(value != value ? 0x7FC0 : bits);
}

/* Multiply a block by its scale and store it; `kind` is a constant wherever this is used. */
INLINE void store(const float *restrict unit, int n, float scale, int64_t at, int kind,
                  void *restrict out) {
    float *wide = (float *)out + at;
    uint16_t *narrow = (uint16_t *)out + at;
    for (int i = 0; i < n; i++) {
        float value = unit[i] * scale;
        if (kind == FLOAT32_GRADIENT)
            wide[i] = value;
        else
            narrow[i] = kind == BFLOAT16_GRADIENT ? to_bfloat16(value) : to_float16(value);
    }
}

struct pair {
    float low, high;
};

INLINE void dequantise(const void *codes, const float *scales, int64_t blocks, int block,
                       const struct pair *pairs, const float *bytes, int signs, int kind,
                       void *out) {
    for (int64_t index = 0, at = 0; index < blocks; index++, at += block) {
        float unit[MOST], scale = scales[index];
        uint32_t word = bits_of(scale);
        int whole = signs && !pairs && word >> 23 == 0x1FF; /* a NaN with a sign */
        int steps = signs && !whole && scale < 0.0f;
        if (whole) {
            const int8_t *in = (const int8_t *)codes + at;
            int zero = (int)(word & 255) - 128;
            for (int i = 0; i < block; i++) unit[i] = (float)(in[i] - zero);
            scale = from_float16(word >> 8 & 0x7FFF);
        } else if (pairs && steps) {
            const uint8_t *in = (const uint8_t *)codes + at / 2;
            int zero = (int)(word & 15u);
            for (int i = 0; i < block / 2; i++) {
                unit[2 * i] = (float)((in[i] & 15) - zero);
                unit[2 * i + 1] = (float)((in[i] >> 4) - zero);
            }
            scale = float_of(word & ~15u);
        } else if (pairs) {
            const uint8_t *in = (const uint8_t *)codes + at / 2;
            for (int i = 0; i < block / 2; i++) memcpy(unit + 2 * i, pairs + in[i], sizeof *pairs);
        } else if (bytes && !steps) {
            const uint8_t *in = (const uint8_t *)codes + at;
            for (int i = 0; i < block; i++) unit[i] = bytes[in[i]];
        } else {
            const int8_t *in = (const int8_t *)codes + at;
            for (int i = 0; i < block; i++) unit[i] = (float)in[i] / 127.0f;
        }
        store(unit, block, steps ? -scale : scale, at, kind, out);
    }
}

/* Most blocks are full: for these the number of elements is known. */
#define DEQUANTISE(KIND)                                                                           \
    (block == MOST ? dequantise(codes, scales, blocks, MOST, four, bytes, signs, KIND, out)        \
                   : dequantise(codes, scales, blocks, (int)block, four, bytes, signs, KIND, out))

/* Write `blocks` blocks, each of an even number of elements. `levels` are what the codes mean:
   `count` is 16 for codes of 4 bits, 256 for those of 8 bits, 0 where those are equal steps. With
   `signs` codes are equal steps where a block's scale is negative; of 4 bits, less the zero point
   that the lowest bits of the scale have; and of 8 bits whole numbers less one where the scale is a
   NaN with a sign, which has both. `kind` is that of a gradient. */
void atom_dequantise(const void *codes, const float *scales, int64_t blocks, int64_t block,
                     const float *levels, int32_t count, int32_t signs, int32_t kind, void *out) {
    struct pair pairs[256]; /* what a byte stands for */
    const struct pair *four = count == 16 ? pairs : 0;
    const float *bytes = count == 256 ? levels : 0;
    for (int byte = 0; four && byte < 256; byte++)
        pairs[byte] = (struct pair){levels[byte & 15], levels[byte >> 4]};
    if (kind == FLOAT32_GRADIENT)
        DEQUANTISE(FLOAT32_GRADIENT);
    else if (kind == BFLOAT16_GRADIENT)
        DEQUANTISE(BFLOAT16_GRADIENT);
    else
        DEQUANTISE(FLOAT16_GRADIENT);
}
