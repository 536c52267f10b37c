/* SPDX-License-Identifier: Apache-2.0 */
/* Work in threads that may never come back, from the operating system or a library: whoever waits
 * for them goes on without, and whoever is last frees what they share: the waiter, if all came
 * back in time. */
#ifndef CKPT_LOAD_ERRAND_H
#define CKPT_LOAD_ERRAND_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

/* Users embed this first. */
struct ckpt_errand {
    pthread_mutex_t lock; /* of all below, and of what the threads change */
    pthread_cond_t news;
    uint32_t users, left; /* left: threads */
    bool late;            /* nobody waits any more */
    void (*run)(struct ckpt_errand *e);
    void (*free)(struct ckpt_errand *e); /* what embeds it, too */
};

/* Whoever calls this is the first user. */
void ckpt_errand_init(struct ckpt_errand *e, void (*run)(struct ckpt_errand *e),
                      void (*free)(struct ckpt_errand *e));

/* Run it in n threads, or as many as there can be: how many (0: errno). */
uint32_t ckpt_errand_start(struct ckpt_errand *e, uint32_t n);

/* Have all come back within ms? What they did by then is under the lock. */
bool ckpt_errand_wait(struct ckpt_errand *e, uint64_t ms);

void ckpt_errand_unref(struct ckpt_errand *e);

#endif
