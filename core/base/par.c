/* SPDX-License-Identifier: Apache-2.0 */
/* Threads that draw the next index from one counter. */
#include "base/par.h"

#include <pthread.h>
#include <stdatomic.h>

enum { DEFAULT_THREADS = 8, MAX_THREADS = 64, CHUNK = 16 };

static atomic_uint default_threads = DEFAULT_THREADS;

struct par {
    int (*fn)(void *ctx, size_t i, struct ckpt_err *err);
    void *ctx;
    size_t n;
    size_t chunk;
    atomic_size_t next;
    atomic_size_t failed_at; /* lowest failed index so far; n when none */
    pthread_mutex_t lock;    /* err */
    struct ckpt_err err;
};

static void note_failure(struct par *p, size_t i, const struct ckpt_err *err)
{
    (void)pthread_mutex_lock(&p->lock);
    if (i < atomic_load(&p->failed_at)) {
        atomic_store(&p->failed_at, i);
        p->err = *err;
    }
    (void)pthread_mutex_unlock(&p->lock);
}

static void *work(void *arg)
{
    struct par *p = arg;

    for (;;) {
        size_t lo = atomic_fetch_add(&p->next, p->chunk);
        if (lo >= p->n)
            return NULL;
        size_t hi = p->n - lo < p->chunk ? p->n : lo + p->chunk;
        for (size_t i = lo; i < hi && i < atomic_load(&p->failed_at); i++) {
            struct ckpt_err err = {0};
            if (p->fn(p->ctx, i, &err) < 0)
                note_failure(p, i, &err);
        }
    }
}

void ckpt_parallel_default(unsigned n) { atomic_store(&default_threads, n); }

int ckpt_parallel(size_t n, unsigned nthread, int (*fn)(void *ctx, size_t i, struct ckpt_err *err),
                  void *ctx, struct ckpt_err *err)
{
    struct par p = {.fn = fn, .ctx = ctx, .n = n, .lock = PTHREAD_MUTEX_INITIALIZER};
    pthread_t thread[MAX_THREADS];
    unsigned started = 0;

    if (nthread == 0)
        nthread = atomic_load(&default_threads);
    if (nthread > MAX_THREADS)
        nthread = MAX_THREADS;
    p.chunk = n / nthread < CHUNK ? 1 : CHUNK;
    if (n < nthread)
        nthread = (unsigned)n;
    atomic_store(&p.failed_at, n);
    while (started + 1 < nthread && pthread_create(&thread[started], NULL, work, &p) == 0)
        started++;
    (void)work(&p); /* the caller helps; alone, if no thread could be had */
    while (started > 0)
        (void)pthread_join(thread[--started], NULL);
    (void)pthread_mutex_destroy(&p.lock);
    if (atomic_load(&p.failed_at) == n)
        return 0;
    return ckpt_err_move(err, &p.err);
}
