/* SPDX-License-Identifier: Apache-2.0 */
/* Casts between F16, BF16, F32 and F64, bit for bit as torch's CPU kernels on x86 (AVX2 and
 * AVX-512).
 *
 * Every pair goes through F32 where torch does (F64 -> F16 rounds twice, like
 * `static_cast<float>`). What torch makes of a NaN depends on the machine and on where in the
 * tensor it lies (its vector body and its scalar tail differ); we give what its vector body gives,
 * everywhere:
 *
 *     F32, F64 -> BF16   0xffff                      BF16 -> F32       the same bits, also of a
 * signalling NaN F16 -> BF16        0x7fc0                      all others        sign and leading
 * payload, made quiet
 *
 * The loops are plain C that the compiler vectorises; for F16 x86 has an instruction. */
#include "tensor/dtype.h"

#include <assert.h>
#include <string.h>

#include "tensor/dtype_bits.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define HAVE_X86 1
#include <cpuid.h>
#include <immintrin.h>
#endif

#define ALWAYS_INLINE static inline __attribute__((always_inline))

/* Elements at any address, of any buffer. */
typedef uint16_t __attribute__((aligned(1), may_alias)) u16;
typedef uint32_t __attribute__((aligned(1), may_alias)) u32;
typedef float __attribute__((aligned(1), may_alias)) f32;
typedef double __attribute__((aligned(1), may_alias)) f64;

/* ---- loops ---- */

ALWAYS_INLINE void bf16_f32(u16 *dst, const u32 *src, size_t n, uint16_t nan)
{
    for (size_t i = 0; i < n; i++)
        dst[i] = ckpt_bf16_of_bits(src[i], nan);
}

ALWAYS_INLINE void f32_bf16(u32 *dst, const u16 *src, size_t n)
{
    for (size_t i = 0; i < n; i++)
        dst[i] = (uint32_t)src[i] << 16;
}

ALWAYS_INLINE void f32_f64(f32 *dst, const f64 *src, size_t n)
{
    for (size_t i = 0; i < n; i++)
        dst[i] = (float)src[i];
}

ALWAYS_INLINE void f64_f32(f64 *dst, const f32 *src, size_t n)
{
    for (size_t i = 0; i < n; i++)
        dst[i] = (double)src[i];
}

static void f16_f32(u16 *dst, const u32 *src, size_t n)
{
    for (size_t i = 0; i < n; i++)
        dst[i] = ckpt_f16_of_bits(src[i]);
}

static void f32_f16(u32 *dst, const u16 *src, size_t n)
{
    for (size_t i = 0; i < n; i++)
        dst[i] = ckpt_bits_of_f16(src[i]);
}

/* The loops for F16, the only ones that are written twice. */
struct f16_loops {
    void (*f16_f32)(u16 *dst, const u32 *src, size_t n);
    void (*f32_f16)(u32 *dst, const u16 *src, size_t n);
};

ALWAYS_INLINE void to_f32(struct f16_loops f16, void *dst, const void *src, enum ckpt_dtype from,
                          size_t n)
{
    if (from == CKPT_F16)
        f16.f32_f16(dst, src, n);
    else if (from == CKPT_BF16)
        f32_bf16(dst, src, n);
    else
        f32_f64(dst, src, n);
}

ALWAYS_INLINE void from_f32(struct f16_loops f16, void *dst, enum ckpt_dtype to, const void *src,
                            size_t n, uint16_t bf16_nan)
{
    if (to == CKPT_F16)
        f16.f16_f32(dst, src, n);
    else if (to == CKPT_BF16)
        bf16_f32(dst, src, n, bf16_nan);
    else
        f64_f32(dst, src, n);
}

/* Compiled once for each instruction set. */
ALWAYS_INLINE void cast_by(struct f16_loops f16, void *dst, enum ckpt_dtype to, const void *src,
                           enum ckpt_dtype from, size_t n)
{
    const uint16_t bf16_nan = from == CKPT_F16 ? 0x7fc0 : 0xffff;
    float block[1024]; /* stays in the first-level cache */
    size_t dsize = ckpt_dtype_size(to), ssize = ckpt_dtype_size(from);

    if (from == CKPT_F32) {
        from_f32(f16, dst, to, src, n, bf16_nan);
        return;
    }
    if (to == CKPT_F32) {
        to_f32(f16, dst, src, from, n);
        return;
    }
    for (size_t i = 0, m; i < n; i += m) {
        m = n - i < 1024 ? n - i : 1024;
        to_f32(f16, block, (const char *)src + i * ssize, from, m);
        from_f32(f16, (char *)dst + i * dsize, to, block, m, bf16_nan);
    }
}

#ifdef HAVE_X86
#define AVX2 __attribute__((target("avx2,f16c")))

AVX2 static void f16_f32_avx2(u16 *dst, const u32 *src, size_t n)
{
    size_t i = 0;
    for (; n - i >= 8; i += 8)
        _mm_storeu_si128(
            (__m128i *)(dst + i),
            _mm256_cvtps_ph(_mm256_loadu_ps((const void *)(src + i)), _MM_FROUND_TO_NEAREST_INT));
    f16_f32(dst + i, src + i, n - i);
}

AVX2 static void f32_f16_avx2(u32 *dst, const u16 *src, size_t n)
{
    size_t i = 0;
    for (; n - i >= 8; i += 8)
        _mm256_storeu_ps((void *)(dst + i),
                         _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(src + i))));
    f32_f16(dst + i, src + i, n - i);
}

AVX2 static void cast_avx2(void *dst, enum ckpt_dtype to, const void *src, enum ckpt_dtype from,
                           size_t n)
{
    cast_by((struct f16_loops){f16_f32_avx2, f32_f16_avx2}, dst, to, src, from, n);
}

/* Compilers whose __builtin_cpu_supports does not know it ask the processor each time, which takes
 * microseconds in a virtual machine. */
static bool has_f16c(void)
{
#if defined(__clang__) ? __clang_major__ >= 15 : __GNUC__ >= 11
    return __builtin_cpu_supports("f16c");
#else
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
#endif
}
#endif

void ckpt_dtype_cast(void *dst, enum ckpt_dtype to, const void *src, enum ckpt_dtype from, size_t n)
{
    assert(ckpt_dtype_is_castable(to) && ckpt_dtype_is_castable(from));
    if (n == 0)
        return;
#ifdef HAVE_X86
    if (to != from && __builtin_cpu_supports("avx2") && has_f16c()) {
        cast_avx2(dst, to, src, from, n);
        return;
    }
#endif
    ckpt_dtype_cast_plain(dst, to, src, from, n);
}

void ckpt_dtype_cast_plain(void *dst, enum ckpt_dtype to, const void *src, enum ckpt_dtype from,
                           size_t n)
{
    if (to == from)
        memcpy(dst, src, n * ckpt_dtype_size(to));
    else
        cast_by((struct f16_loops){f16_f32, f32_f16}, dst, to, src, from, n);
}
