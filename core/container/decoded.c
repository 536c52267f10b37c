/* SPDX-License-Identifier: Apache-2.0 */
/* A part goes to the file when it is first read; other threads that want it wait. A part for which
 * the file has no room is kept in memory like those of a place without a file. */
#include "container/decoded.h"

#include <assert.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "base/ckd.h"
#include "base/mem.h"
#include "tensor/slab.h"

enum { UNMADE, MAKING, KEPT, REFUSED }; /* states of a part */

struct ckpt_decoded {
    atomic_uint refs;
    size_t budget;
    atomic_ullong total; /* bytes of all parts */
    struct ckpt_slabs *slabs;
    struct ckpt_spill *spill; /* or NULL */
    pthread_mutex_t lock;     /* of the parts' states, but KEPT and REFUSED are final */
    pthread_cond_t made;
};

int ckpt_decoded_new(size_t budget, struct ckpt_spill *spill, struct ckpt_decoded **ret,
                     struct ckpt_err *err)
{
    struct ckpt_decoded *d = calloc(1, sizeof *d);

    if (!d)
        return ckpt_nomem(err);
    if (ckpt_slabs_new(budget, &d->slabs, err) < 0) {
        free(d);
        return -1;
    }
    atomic_init(&d->refs, 1);
    d->budget = budget;
    d->spill = spill ? ckpt_spill_ref(spill) : NULL;
    (void)pthread_mutex_init(&d->lock, NULL);
    (void)pthread_cond_init(&d->made, NULL);
    *ret = d;
    return 0;
}

struct ckpt_decoded *ckpt_decoded_ref(struct ckpt_decoded *d)
{
    atomic_fetch_add(&d->refs, 1);
    return d;
}

void ckpt_decoded_unref(struct ckpt_decoded *d)
{
    if (!d || atomic_fetch_sub(&d->refs, 1) != 1)
        return;
    ckpt_slabs_unref(d->slabs);
    ckpt_spill_unref(d->spill);
    (void)pthread_cond_destroy(&d->made);
    (void)pthread_mutex_destroy(&d->lock);
    free(d);
}

size_t ckpt_decoded_bytes(struct ckpt_decoded *d) { return ckpt_slabs_bytes(d->slabs); }

void ckpt_decoded_add(struct ckpt_decoded *d, const struct ckpt_decoded_part *part)
{
    atomic_fetch_add(&d->total, part->len);
}

/* ---- in memory ---- */

struct filling {
    char *at;
    size_t left;
};

static bool put_memory(void *to, const void *buf, size_t len)
{
    struct filling *f = to;

    assert(len <= f->left);
    memcpy(f->at, buf, len);
    f->at += len;
    f->left -= len;
    return true;
}

static int fill(const void *ctx, void *buf, size_t len, uint64_t slab, struct ckpt_err *err)
{
    const struct ckpt_decoded_part *part = ctx;
    struct filling f = {buf, len};

    (void)slab;
    if (part->decode(part, put_memory, &f, err) < 0)
        return -1;
    assert(f.left == 0);
    return 0;
}

static struct ckpt_slab slab_of(const struct ckpt_decoded_part *part)
{
    return (struct ckpt_slab){
        .scope = part, .owner = part, .len = (size_t)part->len, .fill = fill, .ctx = part};
}

static int read_memory(struct ckpt_decoded *d, struct ckpt_decoded_part *part,
                       const struct ckpt_source_run *run, struct ckpt_err *err)
{
    const struct ckpt_slab slab = slab_of(part);
    uint64_t off = run->off;

    ckpt_slabs_need(d->slabs, slab.len);
    for (int i = 0; i < run->n; off += run->iov[i++].iov_len)
        if (run->iov[i].iov_len && ckpt_slabs_read(d->slabs, &slab, run->iov[i].iov_base,
                                                   run->iov[i].iov_len, (size_t)off, err) < 0)
            return -1;
    return 0;
}

/* ---- in the file ---- */

struct spilling {
    struct ckpt_spill *spill;
    uint64_t off;
};

static bool put_file(void *to, const void *buf, size_t len)
{
    struct spilling *s = to;
    const uint64_t off = s->off;

    s->off += len;
    return ckpt_spill_write(s->spill, buf, len, off);
}

/* Decode a part into the file. The state that it has then; UNMADE: it can't be decoded. */
static int make(struct ckpt_decoded *d, struct ckpt_decoded_part *part, struct ckpt_err *err)
{
    struct spilling s = {.spill = d->spill};

    if (!ckpt_spill_take(d->spill, part->len, &part->off))
        return REFUSED;
    s.off = part->off;
    const int rc = part->decode(part, put_file, &s, err);
    if (rc == 0)
        return KEPT;
    ckpt_spill_give(d->spill, part->len, part->off);
    return rc < 0 ? UNMADE : REFUSED;
}

/* The state of a part, which is not MAKING if the caller waits. One that was UNMADE is MAKING now:
 * the caller makes it (make_mine). */
static int claim(struct ckpt_decoded *d, struct ckpt_decoded_part *part, bool waits)
{
    (void)pthread_mutex_lock(&d->lock);
    while (waits && atomic_load(&part->state) == MAKING)
        (void)pthread_cond_wait(&d->made, &d->lock);
    const int state = atomic_load(&part->state);
    if (state == UNMADE)
        atomic_store(&part->state, MAKING);
    (void)pthread_mutex_unlock(&d->lock);
    return state;
}

/* Make a part that the caller has claimed. -1: it can't be decoded. */
static int make_mine(struct ckpt_decoded *d, struct ckpt_decoded_part *part, struct ckpt_err *err)
{
    const int state = make(d, part, err);

    (void)pthread_mutex_lock(&d->lock);
    atomic_store(&part->state, state);
    (void)pthread_cond_broadcast(&d->made);
    (void)pthread_mutex_unlock(&d->lock);
    return state == UNMADE ? -1 : 0;
}

/* Is the part in the file? It is put there if it is not. -1: it can't be decoded. */
static int put_there(struct ckpt_decoded *d, struct ckpt_decoded_part *part, struct ckpt_err *err)
{
    if (atomic_load(&part->state) < KEPT && claim(d, part, true) == UNMADE &&
        make_mine(d, part, err) < 0)
        return -1;
    return atomic_load(&part->state) == KEPT;
}

/* ---- reading ---- */

static bool uses_file(const struct ckpt_decoded *d)
{
    return d->spill && atomic_load(&d->total) > d->budget && ckpt_spill_is_mine(d->spill);
}

int ckpt_decoded_read(struct ckpt_decoded *d, struct ckpt_decoded_part *part,
                      const struct ckpt_source_way *way, const struct ckpt_source_run *run,
                      size_t n, struct ckpt_err *err)
{
    const bool cached = way->how == CKPT_READ_CACHED;
    int there = uses_file(d);

    if (way->how == CKPT_READ_PREFETCH)
        return 0;
    if (there)
        there = cached ? atomic_load(&part->state) == KEPT : put_there(d, part, err);
    if (there < 0 || (cached && !there))
        return there < 0 ? -1 : 1;
    for (size_t i = 0; i < n; i++) {
        const int rc = there ? ckpt_spill_read(d->spill, run[i].iov, run[i].n,
                                               part->off + run[i].off, cached, err)
                             : read_memory(d, part, &run[i], err);
        if (rc)
            return rc;
    }
    return 0;
}

enum ckpt_prepared ckpt_decoded_prepare(struct ckpt_decoded *d, struct ckpt_decoded_part *part)
{
    if (!uses_file(d)) {
        const struct ckpt_slab slab = slab_of(part);
        return ckpt_slabs_prepare(d->slabs, &slab);
    }
    switch (atomic_load(&part->state) < KEPT ? claim(d, part, false) : KEPT) {
    case UNMADE:
        return make_mine(d, part, NULL) < 0 ? CKPT_PREPARED_NOT : CKPT_PREPARED_NOW;
    case MAKING:
        return CKPT_PREPARED_BUSY;
    default:
        return CKPT_PREPARED_BEFORE;
    }
}

void ckpt_decoded_forget(struct ckpt_decoded *d, struct ckpt_decoded_part *part)
{
    ckpt_slabs_forget(d->slabs, part);
    if (atomic_load(&part->state) == KEPT)
        ckpt_spill_give(d->spill, part->len, part->off);
}
