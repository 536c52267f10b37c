/* SPDX-License-Identifier: Apache-2.0 */
/* Measuring what devices do: uploads by all ranks at once, exchanges as those of a load's windows.
 * Ranks go into an exchange only when all can. */
#include "load/rates.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/ckd.h"
#include "base/clock.h"
#include "base/err.h"
#include "load/device.h"
#include "load/xport.h"

enum {
    PINNED = 4 << 20, /* uploaded so many times: */
    UPLOADS = 8,
    EXCHANGED = 32 << 20, /* by all ranks together, if a rank's part of it is not too small: */
    LEAST_PART = 64 << 10,
    ROUNDS = 4, /* the best counts: the first makes connections, others may be late */
    LOOK_NS = 20000,
};

struct trial {
    const struct ckpt_rates_site *site;
    struct ckpt_comm *comm;
    struct ckpt_device *d;
    unsigned char *host, *mem; /* PINNED bytes; a part for each rank, at least PINNED bytes */
    uint64_t part;
    uint32_t local; /* ranks of this node */
};

static double rate_of(double bytes, uint64_t begin_ns)
{
    const uint64_t ns = ckpt_now_ns() - begin_ns;

    return bytes * 1e9 / (double)(ns ? ns : 1);
}

static int prepare(struct trial *t, struct ckpt_err *err)
{
    const struct ckpt_device_ops *ops = t->d->ops;
    const uint32_t n = t->comm->x->size;
    void *host, *mem;

    t->part = ckpt_max_u64(EXCHANGED / n, LEAST_PART);
    if (ops->pin(t->d, PINNED, &host, err) < 0)
        return -1;
    t->host = host;
    memset(t->host, 1, PINNED);
    if (ops->alloc(t->d, ckpt_max_u64(t->part * n, PINNED), &mem, err) < 0)
        return -1;
    t->mem = mem;
    return 0;
}

static void release(struct trial *t)
{
    if (t->mem)
        t->d->ops->dealloc(t->d, t->mem);
    if (t->host)
        t->d->ops->unpin(t->d, t->host);
}

/* ---- waiting ---- */

typedef int look_fn(struct trial *t, struct ckpt_err *err); /* 1: not yet */

static int look_exchange(struct trial *t, struct ckpt_err *err)
{
    return t->d->ops->exchanged(t->d, err);
}

static int look_mark(struct trial *t, struct ckpt_err *err)
{
    return t->d->ops->reached(t->d, 0, err);
}

/* 1: another rank has failed, and won't do its part. */
static int await(struct trial *t, look_fn *look, struct ckpt_err *err)
{
    const struct timespec nap = {0, LOOK_NS};
    const uint64_t until = ckpt_now_ms() + t->site->timeout_ms;

    for (;;) {
        int rc = look(t, err);
        if (rc <= 0)
            return rc;
        if ((rc = ckpt_comm_look(t->comm, err)) != 0)
            return rc;
        ckpt_comm_alive(t->comm, t->site->timeout_ms);
        if (ckpt_now_ms() > until)
            return ckpt_fail(err, CKPT_TIMEOUT, "measuring what the devices do: nothing for %.1f s",
                             t->site->timeout_ms / 1000.0);
        (void)nanosleep(&nap, NULL);
    }
}

static int await_work(struct trial *t, struct ckpt_err *err)
{
    return t->d->ops->mark(t->d, 0, err) < 0 ? -1 : await(t, look_mark, err);
}

/* ---- uploads ---- */

static int upload(struct trial *t, double *ret, struct ckpt_err *err)
{
    const uint64_t begin = ckpt_now_ns();

    for (int i = 0; i < UPLOADS; i++)
        if (t->d->ops->upload(t->d, t->mem, t->host, PINNED, err) < 0)
            return -1;
    const int rc = t->d->ops->fence(t->d, err) < 0 ? -1 : await_work(t, err);
    if (rc == 0)
        *ret = rate_of((double)UPLOADS * PINNED, begin);
    return rc;
}

/* ---- exchanges ---- */

/* A part from every rank to all. */
static size_t list_all(const struct trial *t, struct ckpt_exchange *x)
{
    const uint32_t n = t->comm->x->size;

    for (uint32_t r = 0; r < n; r++)
        x[r] = (struct ckpt_exchange){CKPT_BROADCAST, r, t->mem + r * t->part, t->part};
    return n;
}

/* A part to the next of this node's ranks, around. */
static size_t list_ring(const struct trial *t, struct ckpt_exchange *x)
{
    const uint32_t n = t->comm->x->size, self = t->comm->x->rank;
    uint32_t next = self, last = self;

    do
        next = (next + 1) % n;
    while (t->site->node[next] != t->site->node[self]);
    do
        last = (last + n - 1) % n;
    while (t->site->node[last] != t->site->node[self]);
    if (next == self)
        return 0;
    x[0] = (struct ckpt_exchange){CKPT_SEND, next, t->mem, t->part};
    x[1] = (struct ckpt_exchange){CKPT_RECEIVE, last, t->mem + t->part, t->part};
    return 2;
}

/* Seconds; 0: there is nobody to exchange with. */
static int exchange(struct trial *t, const struct ckpt_exchange *list, size_t n, double *ret,
                    struct ckpt_err *err)
{
    double best = 0;

    for (int i = 0; i < ROUNDS && n; i++) {
        const uint64_t begin = ckpt_now_ns();
        int rc = t->d->ops->exchange(t->d, list, n, err);
        if (rc == 1)
            rc = await(t, look_exchange, err);
        if (rc == 0)
            rc = await_work(t, err);
        if (rc != 0)
            return rc;
        const double s = (double)(ckpt_now_ns() - begin) / 1e9;
        best = i == 0 || s < best ? s : best;
    }
    *ret = best;
    return 0;
}

/* What a rank gets from the others of its node, and its node from other nodes. */
static int links(struct trial *t, struct ckpt_rates *ret, struct ckpt_err *err)
{
    const uint32_t n = t->comm->x->size;
    ckpt_cleanup(ckpt_freep) struct ckpt_exchange *list = malloc(n * sizeof *list);
    const double part = (double)t->part;
    double all = 0, ring = 0;

    if (!list)
        return ckpt_nomem(err);
    int rc = exchange(t, list, list_all(t, list), &all, err);
    if (rc != 0)
        return rc;
    if (t->site->nnode == 1) {
        ret->local_link = part * (n - 1) / all;
        return 0;
    }
    ret->network = part * (n - t->local) * t->local / all;
    if ((rc = exchange(t, list, list_ring(t, list), &ring, err)) == 0)
        ret->local_link = ring > 0 ? part / ring : 0;
    return rc;
}

static int measure(struct trial *t, struct ckpt_rates *ret, struct ckpt_err *err)
{
    double first = 0, second = 0;
    int rc = upload(t, &first, err);

    if (rc == 0)
        rc = upload(t, &second, err);
    if (rc == 0)
        rc = links(t, ret, err);
    ret->copy = second > first ? second : first;
    return rc;
}

int ckpt_rates_of_devices(const struct ckpt_rates_site *site, struct ckpt_rates *ret,
                          struct ckpt_err *err)
{
    struct trial t = {.site = site, .comm = site->comm, .d = site->comm->x->device};
    struct ckpt_xport *x = site->comm->x;

    for (uint32_t r = 0; r < x->size; r++)
        t.local += site->node[r] == site->node[x->rank];
    int rc = ckpt_comm_agree(t.comm, prepare(&t, err), site->timeout_ms, err);
    if (rc == 0 && (rc = ckpt_comm_agree(t.comm, measure(&t, ret, err) < 0 ? -1 : 0,
                                         site->timeout_ms, err)) < 0) {
        t.comm->broken = x->ops->one_shot;
        if (!x->ops->cancel(x))
            return -1; /* what is queued may still use the memory */
    }
    release(&t);
    return rc;
}
