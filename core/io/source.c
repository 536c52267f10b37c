/* SPDX-License-Identifier: Apache-2.0 */
/* What all sources share: counting, and the range check before every read. */
#include "io/source.h"

#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>

#include "base/ckd.h"
#include "base/mem.h"
#include "io/iov.h"

struct ckpt_source *ckpt_source_ref(struct ckpt_source *s)
{
    atomic_fetch_add(&s->refs, 1);
    return s;
}

void ckpt_source_unref(struct ckpt_source *s)
{
    if (s && atomic_fetch_sub(&s->refs, 1) == 1)
        s->ops->free(s);
}

void ckpt_source_unrefp(struct ckpt_source **s)
{
    ckpt_source_unref(*s);
    *s = NULL;
}

int ckpt_source_preadv(struct ckpt_source *s, struct iovec *iov, int n, uint64_t off,
                       struct ckpt_err *err)
{
    const uint64_t len = ckpt_iov_len(iov, n);

    if (!ckpt_range_ok(off, len, s->size)) {
        ckpt_cleanup(ckpt_freep) char *name = ckpt_source_name(s);
        return ckpt_fail(err, CKPT_FORMAT,
                         "'%s': needs bytes %" PRIu64 " to %" PRIu64 ", the file has %" PRIu64,
                         name, off, off + len, s->size);
    }
    return len == 0 ? 0 : s->ops->preadv(s, iov, n, off, err);
}

bool ckpt_source_preadv_cached(struct ckpt_source *s, struct iovec *iov, int n, uint64_t off)
{
    return s->ops->preadv_cached && ckpt_range_ok(off, ckpt_iov_len(iov, n), s->size) &&
           s->ops->preadv_cached(s, iov, n, off);
}

bool ckpt_source_gather_cached(struct ckpt_source *s, const struct ckpt_source_run *run, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (!ckpt_range_ok(run[i].off, run[i].len, s->size))
            return false;
    return s->ops->gather_cached && s->ops->gather_cached(s, run, n);
}

int ckpt_source_preadv_by(struct ckpt_source *s, struct iovec *iov, int n, uint64_t off,
                          const struct ckpt_route *route, struct ckpt_err *err)
{
    const uint64_t len = ckpt_iov_len(iov, n);

    if (s->ops->preadv_direct && route->bounce && route->bounce->len &&
        ckpt_range_ok(off, len, s->size) && s->ops->preadv_direct(s, iov, n, len, off, route))
        return 0;
    if (s->ops->preadv_exactly && route->arrived && ckpt_range_ok(off, len, s->size))
        return s->ops->preadv_exactly(s, iov, n, off, err);
    return ckpt_source_preadv(s, iov, n, off, err);
}

int ckpt_source_pread(struct ckpt_source *s, void *buf, size_t len, uint64_t off,
                      struct ckpt_err *err)
{
    struct iovec iov = {.iov_base = buf, .iov_len = len};
    return ckpt_source_preadv(s, &iov, 1, off, err);
}

bool ckpt_source_soon(struct ckpt_source *s, uint64_t off, uint64_t len)
{
    return !s->ops->soon || off >= s->size ||
           s->ops->soon(s, off, ckpt_min_u64(len, s->size - off));
}

bool ckpt_source_same(const struct ckpt_source *a, const struct ckpt_source *b)
{
    return a == b || (a->ops == b->ops && a->size == b->size && a->ops->same && a->ops->same(a, b));
}

int ckpt_source_check(struct ckpt_source *s, struct ckpt_err *err)
{
    return s->ops->check ? s->ops->check(s, err) : 0;
}

char *ckpt_source_name(const struct ckpt_source *s) { return s->ops->name(s); }
