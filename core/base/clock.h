/* SPDX-License-Identifier: Apache-2.0 */
/* The monotonic clock, and waiting with it. */
#pragma once

#include <pthread.h>
#include <stdint.h>
#include <time.h>

static inline uint64_t ckpt_now_ns(void)
{
    struct timespec t;

    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
}

static inline uint64_t ckpt_now_ms(void) { return ckpt_now_ns() / 1000000; }

static inline void ckpt_pause_ms(uint64_t ms)
{
    const struct timespec t = {(time_t)(ms / 1000), (long)(ms % 1000) * 1000000};

    (void)nanosleep(&t, NULL);
}

/* The moment ms from now, for conditions of ckpt_cond_init. */
static inline struct timespec ckpt_deadline(uint64_t ms)
{
    const uint64_t ns = ckpt_now_ns() + ms * 1000000;

    return (struct timespec){(time_t)(ns / 1000000000), (long)(ns % 1000000000)};
}

/* A condition whose deadlines are of this clock. */
static inline void ckpt_cond_init(pthread_cond_t *cond)
{
    pthread_condattr_t monotonic;

    (void)pthread_condattr_init(&monotonic);
    (void)pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    (void)pthread_cond_init(cond, &monotonic);
    (void)pthread_condattr_destroy(&monotonic);
}
