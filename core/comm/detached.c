/* SPDX-License-Identifier: Apache-2.0 */
/* Detached threads, and who uses what they share. */
#include "comm/detached.h"

#include <errno.h>
#include <string.h>

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
    e->runs =
        false; /* with the same lock as `users`: the thread that waits leaves after this one */
    (void)pthread_cond_signal(&e->news);
    leave(e);
    return NULL;
}

int ckpt_detached_start(struct ckpt_detached *e, struct ckpt_err *err)
{
    pthread_attr_t detached;
    pthread_t id;

    (void)pthread_attr_init(&detached);
    (void)pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    (void)pthread_mutex_lock(&e->lock);
    const int rc = pthread_create(&id, &detached, go, e);
    e->runs = rc == 0;
    e->users += e->runs;
    (void)pthread_mutex_unlock(&e->lock);
    (void)pthread_attr_destroy(&detached);
    return rc == 0 ? 0
                   : ckpt_fail(err, CKPT_NOMEM, "a thread could not be started: %s", strerror(rc));
}

bool ckpt_detached_wait(struct ckpt_detached *e, uint64_t ms)
{
    const struct timespec until = ckpt_deadline(ms);

    (void)pthread_mutex_lock(&e->lock);
    while (e->runs && pthread_cond_timedwait(&e->news, &e->lock, &until) != ETIMEDOUT)
        ;
    const bool over = !e->runs;
    (void)pthread_mutex_unlock(&e->lock);
    return over;
}
