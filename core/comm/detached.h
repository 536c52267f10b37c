/* SPDX-License-Identifier: Apache-2.0 */
/* Detached tasks with a timeout: calls of the operating system or of a library that may never
 * return. The waiter may give up; the last user of the shared state frees it, which is the waiter
 * if the thread has returned in time. */
#pragma once

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"

/* Users embed this first. */
struct ckpt_detached {
    pthread_mutex_t lock; /* protects what follows, and what the thread changes */
    pthread_cond_t news;
    uint32_t users; /* the waiter, and the thread if it runs */
    bool runs;      /* the thread does */
    void (*run)(struct ckpt_detached *e);
    void (*free)(struct ckpt_detached *e); /* frees the struct that embeds this one, too */
};

/* The caller is the first user. */
void ckpt_detached_init(struct ckpt_detached *e, void (*run)(struct ckpt_detached *e),
                        void (*free)(struct ckpt_detached *e));

/* Run the task in a thread. NOMEM: none could be started. */
int ckpt_detached_start(struct ckpt_detached *e, struct ckpt_err *err);

/* Wait at most ms milliseconds. True: the thread has returned. Hold the lock to look at what it
 * has written, if it has not. */
bool ckpt_detached_wait(struct ckpt_detached *e, uint64_t ms);

/* The caller uses the task no more. */
void ckpt_detached_unref(struct ckpt_detached *e);
