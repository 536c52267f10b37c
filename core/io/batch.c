/* SPDX-License-Identifier: Apache-2.0 */
/* Collecting, merging and checking the reads of one request. */
#include "io/batch.h"

#include <string.h>

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

void ckpt_batch_release(struct ckpt_batch *b) { ckpt_vec_release(&b->touched); }

int ckpt_batch_add(struct ckpt_batch *b, struct ckpt_source *s, void *buf, size_t len, uint64_t off,
                   struct ckpt_err *err)
{
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
