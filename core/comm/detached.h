/* SPDX-License-Identifier: Apache-2.0 */
/* Detached tasks with a timeout: calls of the operating system or of a library that may never
 * return. The waiter may give up; the last user of the shared state frees it, which is the waiter
 * if all threads have returned in time. */
#pragma once

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

/* Users embed this first. */
struct ckpt_detached {
    pthread_mutex_t lock; /* protects what follows, and what the threads change */
    pthread_cond_t news;
    uint32_t users; /* the waiter, and threads that run */
    uint32_t left;  /* threads that run */
    bool late;      /* the waiter has given up */
    void (*run)(struct ckpt_detached *e);
    void (*free)(struct ckpt_detached *e); /* frees the struct that embeds this one, too */
};

/* The caller is the first user. */
void ckpt_detached_init(struct ckpt_detached *e, void (*run)(struct ckpt_detached *e),
                        void (*free)(struct ckpt_detached *e));

/* Run the task in n threads. Returns how many could be started; 0: none, and errno says why. */
uint32_t ckpt_detached_start(struct ckpt_detached *e, uint32_t n);

/* Wait at most ms milliseconds. True: all threads have returned. Hold the lock to look at what they
 * have written, if they have not. */
bool ckpt_detached_wait(struct ckpt_detached *e, uint64_t ms);

/* The caller uses the task no more. */
void ckpt_detached_unref(struct ckpt_detached *e);
