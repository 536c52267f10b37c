/* SPDX-License-Identifier: Apache-2.0 */
/* Checked integer arithmetic with C23's names: true when the result did not fit. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#ifndef ckd_add
#define ckd_add(r, a, b) __builtin_add_overflow(a, b, r)
#define ckd_sub(r, a, b) __builtin_sub_overflow(a, b, r)
#define ckd_mul(r, a, b) __builtin_mul_overflow(a, b, r)
#endif

/* [off, off+len) lies inside [0, size). Cannot wrap. */
static inline bool ckpt_range_ok(uint64_t off, uint64_t len, uint64_t size)
{
    return off <= size && len <= size - off;
}

static inline uint64_t ckpt_min_u64(uint64_t a, uint64_t b) { return a < b ? a : b; }

static inline uint64_t ckpt_max_u64(uint64_t a, uint64_t b) { return a > b ? a : b; }
