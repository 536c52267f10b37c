/* SPDX-License-Identifier: Apache-2.0 */
/* The mean of several tensors: the sum in F64, in the order of the operands, one division, and a
 * cast as torch does it. The loops are plain C that the compiler vectorises. */
#include <assert.h>
#include <string.h>

#include "base/err.h"
#include "tensor/catalog.h"
#include "tensor/value.h"

enum { BLOCK = 1024 }; /* elements that are summed at once: they stay in the first-level cache */

/* Elements at any address, of any buffer. */
typedef uint16_t __attribute__((aligned(1), may_alias)) u16;
typedef float __attribute__((aligned(1), may_alias)) f32;
typedef double __attribute__((aligned(1), may_alias)) f64;

#define ALWAYS_INLINE static inline __attribute__((always_inline))

ALWAYS_INLINE void add_floats(double *sum, const f32 *x, size_t n)
{
    for (size_t i = 0; i < n; i++)
        sum[i] += (double)x[i];
}

ALWAYS_INLINE void add_doubles(double *sum, const f64 *x, size_t n)
{
    for (size_t i = 0; i < n; i++)
        sum[i] += x[i];
}

/* BF16 is the upper half of an F32. */
ALWAYS_INLINE void add_bf16(double *sum, const u16 *x, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        const union {
            uint32_t bits;
            float f;
        } wide = {(uint32_t)x[i] << 16};
        sum[i] += (double)wide.f;
    }
}

ALWAYS_INLINE void divide(double *sum, double by, size_t n)
{
    for (size_t i = 0; i < n; i++)
        sum[i] /= by;
}

/* The loops, compiled once for each instruction set. */
struct loops {
    void (*add_floats)(double *sum, const f32 *x, size_t n);
    void (*add_doubles)(double *sum, const f64 *x, size_t n);
    void (*add_bf16)(double *sum, const u16 *x, size_t n);
    void (*divide)(double *sum, double by, size_t n);
};

static void add_floats_any(double *sum, const f32 *x, size_t n) { add_floats(sum, x, n); }
static void add_doubles_any(double *sum, const f64 *x, size_t n) { add_doubles(sum, x, n); }
static void add_bf16_any(double *sum, const u16 *x, size_t n) { add_bf16(sum, x, n); }
static void divide_any(double *sum, double by, size_t n) { divide(sum, by, n); }
static const struct loops any = {add_floats_any, add_doubles_any, add_bf16_any, divide_any};

#if defined(__x86_64__) && defined(__GNUC__)
#define AVX2 __attribute__((target("avx2")))
AVX2 static void add_floats_avx2(double *sum, const f32 *x, size_t n) { add_floats(sum, x, n); }
AVX2 static void add_doubles_avx2(double *sum, const f64 *x, size_t n) { add_doubles(sum, x, n); }
AVX2 static void add_bf16_avx2(double *sum, const u16 *x, size_t n) { add_bf16(sum, x, n); }
AVX2 static void divide_avx2(double *sum, double by, size_t n) { divide(sum, by, n); }
static const struct loops avx2 = {add_floats_avx2, add_doubles_avx2, add_bf16_avx2, divide_avx2};

static const struct loops *loops(void) { return __builtin_cpu_supports("avx2") ? &avx2 : &any; }
#else
static const struct loops *loops(void) { return &any; }
#endif

/* Add n elements, at most a block, of any castable dtype. */
static void add(const struct loops *l, double *sum, const void *src, enum ckpt_dtype from, size_t n)
{
    float x[BLOCK];

    switch (from) {
    case CKPT_F64:
        l->add_doubles(sum, src, n);
        return;
    case CKPT_F32:
        l->add_floats(sum, src, n);
        return;
    case CKPT_BF16:
        l->add_bf16(sum, src, n);
        return;
    default:
        ckpt_dtype_cast(x, CKPT_F32, src, from, n);
        l->add_floats(sum, x, n);
    }
}

static void mean(void *dst, enum ckpt_dtype to, const void *const *src,
                 const struct ckpt_tensor *const *arg, uint32_t narg, size_t n)
{
    const struct loops *l = loops();
    double sum[BLOCK];

    for (size_t at = 0, len; at < n; at += len) {
        len = n - at < BLOCK ? n - at : BLOCK;
        memset(sum, 0, len * sizeof *sum);
        for (uint32_t i = 0; i < narg; i++) {
            const enum ckpt_dtype from = arg[i]->dtype;
            add(l, sum, (const char *)src[i] + at * ckpt_dtype_size(from), from, len);
        }
        l->divide(sum, narg, len);
        ckpt_dtype_cast((char *)dst + at * ckpt_dtype_size(to), to, sum, CKPT_F64, len);
    }
}

static const struct ckpt_value_ops mean_ops = {.name = "mean", .combine = mean, .rounds = true};

int ckpt_value_mean(struct ckpt_catalog *cat, size_t index, const struct ckpt_tensor *const *arg,
                    uint32_t n, struct ckpt_err *err)
{
    struct ckpt_tensor *t = &cat->tensors.ptr[index];
    struct ckpt_value *v = ckpt_arena_alloc(&cat->arena, sizeof *v);

    assert(ckpt_dtype_is_castable(t->dtype));
    if (!v)
        return ckpt_nomem(err);
    *v = (struct ckpt_value){.ops = &mean_ops, .narg = n, .arg = arg};
    return ckpt_tensor_compute(t, v, t->dtype, err);
}
