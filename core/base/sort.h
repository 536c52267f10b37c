/* SPDX-License-Identifier: Apache-2.0 */
/* Sorting arrays, and what comparators have in common. */
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* qsort() of n items, of which there may be none. */
#define ckpt_sort(ptr, n, cmp) ((n) ? qsort((ptr), (n), sizeof *(ptr), (cmp)) : (void)0)

/* Compare two numbers: negative, 0 or positive, as comparators return it. */
static inline int ckpt_u64_cmp(uint64_t a, uint64_t b) { return (a > b) - (a < b); }

/* The comparators of arrays of numbers. */
static inline int ckpt_u32s_cmp(const void *a, const void *b)
{
    return ckpt_u64_cmp(*(const uint32_t *)a, *(const uint32_t *)b);
}

static inline int ckpt_u64s_cmp(const void *a, const void *b)
{
    return ckpt_u64_cmp(*(const uint64_t *)a, *(const uint64_t *)b);
}

/* Searches n structs of `size` bytes, which are sorted by a number (that of the first is *number),
 * for the last one whose number is at most `at`. Returns its index; 0 if there is none. */
static inline size_t ckpt_last_at(const uint64_t *number, size_t size, size_t n, uint64_t at)
{
    size_t lo = 0, hi = n;

    while (hi - lo > 1) {
        const size_t mid = lo + (hi - lo) / 2;
        if (*(const uint64_t *)((const char *)number + mid * size) <= at)
            lo = mid;
        else
            hi = mid;
    }
    return lo;
}

/* The comparator of an array of strings (const char *), by bytes. */
static inline int ckpt_strings_cmp(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}
