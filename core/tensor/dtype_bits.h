/* SPDX-License-Identifier: Apache-2.0 */
/* Casts of one floating element, on its bits alone: the same on a CPU and on a GPU, whose own
 * conversions give other NaNs. dtype_cast.c says what is meant; it has the loops. */
#pragma once

#include <stdint.h>

#ifdef __CUDACC__
#define CKPT_BITS static __device__ __forceinline__
#else
#define CKPT_BITS static inline __attribute__((always_inline, unused))
#endif

/* nan: what becomes of one. */
CKPT_BITS uint16_t ckpt_bf16_of_bits(uint32_t u, uint16_t nan)
{
    uint32_t rounded = (u + 0x7fffu + (u >> 16 & 1)) >> 16;
    return (u & 0x7fffffffu) > 0x7f800000u ? nan : (uint16_t)rounded;
}

/* To nearest, ties to even, also among F16's subnormals; what does not fit is infinity. */
CKPT_BITS uint16_t ckpt_f16_of_bits(uint32_t u)
{
    uint32_t sign = u >> 16 & 0x8000u, abs = u & 0x7fffffffu;

    if (abs > 0x7f800000u)
        return (uint16_t)(sign | 0x7e00u | (abs >> 13 & 0x3ffu));
    if (abs >= 0x47800000u) /* 2^16 */
        return (uint16_t)(sign | 0x7c00u);
    if (abs >=
        0x38800000u) /* 2^-14, the least normal; the carry of a mantissa goes into the exponent */
        return (uint16_t)(sign | (abs - 0x38000000u + 0xfffu + (abs >> 13 & 1)) >> 13);
    if (abs < 0x33000000u) /* below 2^-25: half of the least subnormal */
        return (uint16_t)sign;
    uint32_t shift = 126 - (abs >> 23), mant = (abs & 0x7fffffu) | 0x800000u;
    uint32_t half = 1u << (shift - 1), kept = mant >> shift;
    return (uint16_t)(sign | (kept + ((mant & (2 * half - 1)) + (kept & 1) > half)));
}

CKPT_BITS uint32_t ckpt_bits_of_f16(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, exp = h >> 10 & 0x1fu, mant = h & 0x3ffu;

    if (exp == 0x1f)
        return sign | 0x7f800000u | (mant ? 0x400000u | mant << 13 : 0);
    if (exp)
        return sign | (exp + 112) << 23 | mant << 13;
    union {
        float f;
        uint32_t u;
    } subnormal = {(float)mant * 0x1p-24f}; /* exact */
    return sign | subnormal.u;
}
