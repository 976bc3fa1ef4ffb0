/* Numbers of 16 bits as float32 and back, by integer arithmetic that becomes vector instructions. */
#ifndef ATOM_BITS_H
#define ATOM_BITS_H

#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

/* Tells the compiler that a loop's elements do not overlap in memory. */
#ifdef __clang__
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define INDEPENDENT _Pragma("GCC ivdep")
#endif

INLINE uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

INLINE float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE float from_bfloat16(uint16_t narrow) { return float_of((uint32_t)narrow << 16); }

/* The nearest bfloat16, ties to even. NaN must have come from a bfloat16: then its lower half is
   zero, and it stays what it is. */
INLINE float nearest_bfloat16(float value) {
    uint32_t bits = bits_of(value);
    /* Adds 0x7FFF, and 1 to an odd one: so written, AVX-512 takes four instructions, not five. */
    return float_of((bits - ((bits >> 16 & 1) ^ 0xFFFF8001)) & 0xFFFF0000);
}

/* Nearest, ties away from zero: what streams of masters are. */
INLINE uint16_t to_stream(float value) { return (uint16_t)((bits_of(value) + 0x8000) >> 16); }

INLINE float from_float16(uint16_t narrow) {
    uint32_t magnitude = (uint32_t)(narrow & 0x7FFF) << 13;
    /* The exponents' biases differ by 112; the product is exact, of subnormals too. */
    uint32_t finite = bits_of(float_of(magnitude) * 0x1p112f);
    uint32_t special = magnitude | 0x7F800000;
    uint32_t bits = magnitude >= (0x7C00u << 13) ? special : finite;
    return float_of(bits | (uint32_t)(narrow & 0x8000) << 16);
}

/* Nearest, ties to even. */
INLINE uint16_t to_float16(float value) {
    uint32_t bits = bits_of(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7FFFFFFF;
    uint32_t normal = (magnitude - (112u << 23) + 0xFFF + (magnitude >> 13 & 1)) >> 13;
    /* A unit in the last place of 0.5 is the least float16, so the sum is rounded as that is. */
    uint32_t small = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
    uint32_t special = magnitude > 0x7F800000 ? 0x7E00 : 0x7C00;
    uint32_t finite = magnitude < (113u << 23) ? small : normal;
    return (uint16_t)(sign | (magnitude >= 0x477FF000 ? special : finite)); /* 65520 and above */
}

/* PyTorch's vectors fuse where the processor can, and their plain loops do not. */
#if defined(__FMA__) || defined(__aarch64__)
#define FUSES 1
INLINE float multiply_add(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#else
#define FUSES 0
INLINE float multiply_add(float a, float b, float c) { return a * b + c; }
#endif

#endif
