/* What updates are told; `atomtrain.native.library` has the same in Python. */
#ifndef ATOM_UPDATES_H
#define ATOM_UPDATES_H

#include <stdint.h>

enum { BLOCK = 128 }; /* elements that pass at once, and that share a scale of 8 bit moments */

enum values { FLOAT32_VALUES, BFLOAT16_WHOLE, BFLOAT16_SPLIT, FLOAT16_WHOLE };
enum gradients { FLOAT32_GRADIENT, BFLOAT16_GRADIENT, FLOAT16_GRADIENT };
enum moments { FLOAT32_MOMENTS, BFLOAT16_MOMENTS, INT8_MOMENTS };

/* A parameter in memory, and what belongs to it; all contiguous, of `count` elements. Float32 values
   have float32 gradients and the factor 1. */
struct parameter {
    int64_t count;
    int32_t values_kind, gradient_kind, moments_kind;
    int32_t clipped;   /* whether the gradient is multiplied by `coefficient` */
    float coefficient; /* in the gradient's own type, to which the product is rounded */
    float factor;      /* multiplies it after that, in float32 */
    void *values;      /* float32, or the stream of 16 bits */
    void *master;      /* float32, or the int16 rest of a split one; unused without a stream */
    const void *gradient;
    void *first, *second; /* moments; SGD's momentum is the first */
    float *first_scale, *second_scale;
};

struct adamw {
    float keep;            /* 1 - lr * weight_decay */
    float weight1;         /* 1 - beta1 */
    float beta2, weight2;  /* weight2 = 1 - beta2 */
    float root_correction; /* sqrt(1 - beta2^t) */
    float eps;
    float step; /* lr / (1 - beta1^t) */
};

struct sgd {
    float lr, weight_decay, momentum;
    float share; /* 1 - dampening */
    int32_t nesterov, first_step;
};

/* Random numbers of both moments, from the first element of a slice on. */
struct random {
    const uint16_t *first, *second;
};

/* The slices of a parameter, each with its own numbers; `elements` of one are a multiple of BLOCK.
   Moments in float32 have a single slice without numbers. */
struct slices {
    int64_t elements;
    const struct random *random;
};

/* Update elements `begin` to `end`; `begin` is a multiple of BLOCK, `end` too or the count. */
void atom_adamw(const struct parameter *p, const struct adamw *a, const struct slices *s,
                int64_t begin, int64_t end);
void atom_sgd(const struct parameter *p, const struct sgd *a, int64_t begin, int64_t end);

/* Write the Euclidean norm of a gradient of this kind; `wide` takes it as if it were float32. */
void atom_norm(const void *gradient, int64_t count, int32_t kind, int32_t wide, float *out);

#endif
