/* SPDX-License-Identifier: Apache-2.0 */
/* Collecting, merging and checking the reads of one request. */
#include "io/batch.h"

#include <stdlib.h>
#include <string.h>

#include "base/ckd.h"
#include "base/sort.h"

void ckpt_batch_init(struct ckpt_batch *b) { memset(b, 0, offsetof(struct ckpt_batch, iov)); }

static int touch(struct ckpt_batch *b, struct ckpt_source *s, struct ckpt_err *err)
{
    for (size_t i = b->touched.len; i-- > 0;)
        if (b->touched.ptr[i] == s)
            return 0;
    return ckpt_vec_push(&b->touched, s) < 0 ? ckpt_nomem(err) : 0;
}

static void count(struct ckpt_batch *b, uint64_t len)
{
    b->nbyte += len;
    if (b->route.arrived)
        atomic_fetch_add_explicit(b->route.arrived, len, memory_order_relaxed);
}

int ckpt_batch_flush(struct ckpt_batch *b, struct ckpt_err *err)
{
    struct ckpt_source *s = b->source;
    int rc = 0;

    if (!s)
        return 0;
    b->source = NULL;
    b->nread++;
    if (b->cached)
        b->missed = !ckpt_source_preadv_cached(s, b->iov, b->niov, b->off);
    else
        rc = ckpt_source_preadv_by(s, b->iov, b->niov, b->off, &b->route, err);
    count(b, b->len);
    return b->missed ? -1 : rc;
}

void ckpt_batch_release(struct ckpt_batch *b)
{
    ckpt_vec_release(&b->touched);
    ckpt_vec_release(&b->runs);
}

static int by_place(const void *a, const void *b)
{
    const struct ckpt_batch_run *p = a, *q = b;
    const int c = ckpt_u64_cmp((uintptr_t)p->source, (uintptr_t)q->source);

    return c ? c : ckpt_u64_cmp(p->off, q->off);
}

static int by_turn(const void *a, const void *b)
{
    return ckpt_u64_cmp(((const struct ckpt_batch_run *)a)->n,
                        ((const struct ckpt_batch_run *)b)->n);
}

bool ckpt_batch_fetch(struct ckpt_batch *b, uint64_t gap)
{
    struct ckpt_batch_run *r = b->runs.ptr;
    size_t n = 0;

    if (b->runs.len)
        qsort(r, b->runs.len, sizeof *r, by_place);
    for (size_t i = 0; i < b->runs.len; i++)
        if (n && r[n - 1].source == r[i].source && r[i].off <= r[n - 1].end + gap) {
            r[n - 1].end = ckpt_max_u64(r[n - 1].end, r[i].end);
            r[n - 1].n = ckpt_min_u64(r[n - 1].n, r[i].n);
        } else {
            r[n++] = r[i];
        }
    if (n)
        qsort(r, n, sizeof *r, by_turn);
    for (size_t i = 0; i < n; i++)
        if (!ckpt_source_soon(r[i].source, r[i].off, r[i].end - r[i].off))
            return false;
    return true;
}

int ckpt_batch_add(struct ckpt_batch *b, struct ckpt_source *s, void *buf, size_t len, uint64_t off,
                   struct ckpt_err *err)
{
    if (b->soon)
        return ckpt_vec_push(&b->runs, ((struct ckpt_batch_run){s, off, off + len, b->runs.len})) <
                       0
                   ? ckpt_nomem(err)
                   : 0;
    if (b->source == s && off == b->off + b->len) {
        struct iovec *last = &b->iov[b->niov - 1];
        if ((char *)last->iov_base + last->iov_len == (char *)buf) {
            last->iov_len += len;
            b->len += len;
            return 0;
        }
        if (b->niov < CKPT_BATCH_IOV) {
            b->iov[b->niov++] = (struct iovec){.iov_base = buf, .iov_len = len};
            b->len += len;
            return 0;
        }
    }
    if (ckpt_batch_flush(b, err) < 0 || touch(b, s, err) < 0)
        return -1;
    b->source = s;
    b->off = off;
    b->len = len;
    b->niov = 1;
    b->iov[0] = (struct iovec){.iov_base = buf, .iov_len = len};
    return 0;
}

int ckpt_batch_gather_cached(struct ckpt_batch *b, struct ckpt_source *s,
                             const struct ckpt_source_run *run, size_t n, bool *ret_all,
                             struct ckpt_err *err)
{
    if (touch(b, s, err) < 0)
        return -1;
    *ret_all = ckpt_source_gather_cached(s, run, n);
    for (size_t i = 0; i < n && *ret_all; i++)
        count(b, run[i].len);
    return 0;
}

int ckpt_batch_finish(struct ckpt_batch *b, struct ckpt_err *err)
{
    if (ckpt_batch_flush(b, err) < 0)
        return -1;
    for (size_t i = 0; i < b->touched.len; i++)
        if (ckpt_source_check(b->touched.ptr[i], err) < 0)
            return -1;
    return 0;
}
