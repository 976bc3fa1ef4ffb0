/* Norms of gradients, with the bits of PyTorch's kernel: some lanes add squares in float32, in the
   order of the elements; then the lanes are added, and what does not fill a step of them. A norm is
   infinite or NaN if an element is, so that it also tells of overflows. */
#include <math.h>

#include "bits.h"
#include "updates.h"

/* That kernel has eight on every x86, AVX-512 included. On Arm its compiler fused square and sum. */
#if defined(__aarch64__)
enum { LANES = 4, FUSED = 1 };
#else
enum { LANES = 8, FUSED = 0 };
#endif

INLINE float element(const void *gradient, int64_t at, int kind) {
    if (kind == FLOAT32_GRADIENT) return ((const float *)gradient)[at];
    uint16_t narrow = ((const uint16_t *)gradient)[at];
    return kind == BFLOAT16_GRADIENT ? from_bfloat16(narrow) : from_float16(narrow);
}

typedef float vector __attribute__((vector_size(LANES * sizeof(float))));

/* `kind`, and `n` but for the last elements, are constants wherever this is used. */
INLINE void add_squares(vector *lanes, const void *gradient, int64_t at, int n, int kind) {
    float terms[BLOCK];
    vector some;
    for (int i = 0; i < n; i++) {
        float value = element(gradient, at + i, kind);
        terms[i] = FUSED ? value : value * value;
    }
    for (int i = 0; i < n; i += LANES) {
        memcpy(&some, terms + i, sizeof some);
        if (FUSED)
            for (int lane = 0; lane < LANES; lane++)
                (*lanes)[lane] = multiply_add(some[lane], some[lane], (*lanes)[lane]);
        else
            *lanes += some;
    }
}

INLINE float norm(const void *gradient, int64_t count, int64_t step, int kind) {
    const int64_t whole = count - count % step;
    vector lanes = {0.0f};
    int64_t at = 0;
    for (; at + BLOCK <= whole; at += BLOCK) add_squares(&lanes, gradient, at, BLOCK, kind);
    add_squares(&lanes, gradient, at, (int)(whole - at), kind);
    float sum = lanes[0];
    for (int lane = 1; lane < LANES; lane++) sum += lanes[lane];
    /* As its compiler made it: four by a vector's product, and the last ones fused. */
    const int64_t fours = count - (count - whole) % 4;
    for (at = whole; at < count; at++) {
        float value = element(gradient, at, kind);
        sum = at < fours ? sum + value * value : multiply_add(value, value, sum);
    }
    return sqrtf(sum);
}

void atom_norm(const void *gradient, int64_t count, int32_t kind, int32_t wide, float *out) {
    /* PyTorch takes two steps at once of what comes as bfloat16. */
    const int64_t step = kind == BFLOAT16_GRADIENT && !wide ? 2 * LANES : LANES;
    *out = kind == FLOAT32_GRADIENT    ? norm(gradient, count, step, FLOAT32_GRADIENT)
           : kind == BFLOAT16_GRADIENT ? norm(gradient, count, step, BFLOAT16_GRADIENT)
                                       : norm(gradient, count, step, FLOAT16_GRADIENT);
}
