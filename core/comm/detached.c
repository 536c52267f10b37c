/* SPDX-License-Identifier: Apache-2.0 */
/* Detached threads, counted. */
#include "comm/detached.h"

#include <errno.h>

#include "base/clock.h"

void ckpt_detached_init(struct ckpt_detached *e, void (*run)(struct ckpt_detached *e),
                        void (*free)(struct ckpt_detached *e))
{
    *e = (struct ckpt_detached){.users = 1, .run = run, .free = free};
    (void)pthread_mutex_init(&e->lock, NULL);
    ckpt_cond_init(&e->news);
}

/* With the lock held, which is given up. */
static void leave(struct ckpt_detached *e)
{
    const bool last = --e->users == 0;

    (void)pthread_mutex_unlock(&e->lock);
    if (!last)
        return;
    (void)pthread_mutex_destroy(&e->lock);
    (void)pthread_cond_destroy(&e->news);
    e->free(e);
}

void ckpt_detached_unref(struct ckpt_detached *e)
{
    (void)pthread_mutex_lock(&e->lock);
    leave(e);
}

static void *go(void *arg)
{
    struct ckpt_detached *e = arg;

    e->run(e);
    (void)pthread_mutex_lock(&e->lock);
    e->left--; /* with the same lock as `users`: the thread that waits leaves after this one */
    (void)pthread_cond_signal(&e->news);
    leave(e);
    return NULL;
}

uint32_t ckpt_detached_start(struct ckpt_detached *e, uint32_t n)
{
    pthread_attr_t detached;
    pthread_t id;
    int rc = 0;

    (void)pthread_attr_init(&detached);
    (void)pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    (void)pthread_mutex_lock(&e->lock);
    for (uint32_t i = 0; i < n && rc == 0; i++)
        if ((rc = pthread_create(&id, &detached, go, e)) == 0) {
            e->users++;
            e->left++;
        }
    const uint32_t started = e->left;
    (void)pthread_mutex_unlock(&e->lock);
    (void)pthread_attr_destroy(&detached);
    errno = rc;
    return started;
}

bool ckpt_detached_wait(struct ckpt_detached *e, uint64_t ms)
{
    const struct timespec until = ckpt_deadline(ms);

    (void)pthread_mutex_lock(&e->lock);
    while (e->left && pthread_cond_timedwait(&e->news, &e->lock, &until) != ETIMEDOUT)
        ;
    e->late = true;
    const bool all = e->left == 0;
    (void)pthread_mutex_unlock(&e->lock);
    return all;
}
