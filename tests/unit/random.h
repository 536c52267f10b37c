/* SPDX-License-Identifier: Apache-2.0 */
/* A small reproducible generator of random numbers for property tests (xorshift64*). */
#ifndef CKPT_TESTS_UNIT_RANDOM_H
#define CKPT_TESTS_UNIT_RANDOM_H

#include <stdint.h>

static inline uint64_t random_next(uint64_t *state)
{
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return *state * 0x2545f4914f6cdd1dULL;
}

/* Uniform enough in [lo, hi). */
static inline uint64_t random_range(uint64_t *state, uint64_t lo, uint64_t hi)
{
    return lo + random_next(state) % (hi - lo);
}

#endif
