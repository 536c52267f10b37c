/* SPDX-License-Identifier: Apache-2.0 */
/* A range of another source as a source: a member of an archive, a file behind a header. */
#include <inttypes.h>
#include <stdlib.h>

#include "base/ckd.h"
#include "base/mem.h"
#include "io/source.h"

struct source_window {
    struct ckpt_source source;
    struct ckpt_source *of;
    uint64_t off;
};

static struct source_window *self(const struct ckpt_source *s) { return (struct source_window *)s; }

static int window_preadv(struct ckpt_source *s, struct iovec *iov, int n, uint64_t off,
                         struct ckpt_err *err)
{
    return ckpt_source_preadv(self(s)->of, iov, n, self(s)->off + off, err);
}

static bool window_soon(struct ckpt_source *s, uint64_t off, uint64_t len)
{
    return ckpt_source_soon(self(s)->of, self(s)->off + off, len);
}

static bool window_gather_cached(struct ckpt_source *s, const struct ckpt_source_run *run, size_t n)
{
    enum { AT_ONCE = 64 };
    struct ckpt_source_run part[AT_ONCE];

    for (size_t done = 0; done < n;) {
        size_t k = 0;
        for (; k < AT_ONCE && done < n; k++, done++) {
            part[k] = run[done];
            part[k].off += self(s)->off;
        }
        if (!ckpt_source_gather_cached(self(s)->of, part, k))
            return false;
    }
    return true;
}

static int window_check(struct ckpt_source *s, struct ckpt_err *err)
{
    return ckpt_source_check(self(s)->of, err);
}

static char *window_name(const struct ckpt_source *s) { return ckpt_source_name(self(s)->of); }

static void window_free(struct ckpt_source *s)
{
    ckpt_source_unref(self(s)->of);
    free(s);
}

static bool window_same(const struct ckpt_source *a, const struct ckpt_source *b)
{
    return self(a)->off == self(b)->off && ckpt_source_same(self(a)->of, self(b)->of);
}

static const struct ckpt_source_ops window_ops = {.preadv = window_preadv,
                                                  .gather_cached = window_gather_cached,
                                                  .soon = window_soon,
                                                  .check = window_check,
                                                  .name = window_name,
                                                  .free = window_free,
                                                  .same = window_same};

int ckpt_source_window_new(struct ckpt_source *of, uint64_t off, uint64_t len,
                           struct ckpt_source **ret, struct ckpt_err *err)
{
    if (!ckpt_range_ok(off, len, of->size)) {
        ckpt_cleanup(ckpt_freep) char *name = ckpt_source_name(of);
        return ckpt_fail(err, CKPT_FORMAT,
                         "'%s': %" PRIu64 " bytes at %" PRIu64 " do not fit into %" PRIu64, name,
                         len, off, of->size);
    }
    struct source_window *w = calloc(1, sizeof *w);
    if (!w)
        return ckpt_nomem(err);
    w->source.ops = &window_ops;
    w->source.size = len;
    atomic_init(&w->source.refs, 1);
    w->of = ckpt_source_ref(of);
    w->off = off;
    *ret = &w->source;
    return 0;
}

struct ckpt_source *ckpt_source_window_of(struct ckpt_source *s)
{
    return s->ops == &window_ops ? self(s)->of : NULL;
}
