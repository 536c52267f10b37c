/* SPDX-License-Identifier: Apache-2.0 */
/* All sources share what is here: counting, and the range check before every read. */
#include "io/source.h"

#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/ckd.h"
#include "io/iov.h"

struct ckpt_source *ckpt_source_ref(struct ckpt_source *s)
{
    atomic_fetch_add(&s->refs, 1);
    return s;
}

void ckpt_source_unref(struct ckpt_source *s)
{
    if (!s || atomic_fetch_sub(&s->refs, 1) != 1)
        return;
    if (s->guard)
        s->guard->free(s->guard);
    s->ops->free(s);
}

/* Check that a run lies inside the source, and add its length to *len. */
static int check_run(struct ckpt_source *s, const struct ckpt_source_run *run, uint64_t *len,
                     struct ckpt_err *err)
{
    const uint64_t own = ckpt_iov_len(run->iov, run->n);

    if (!ckpt_range_ok(run->off, own, s->size)) {
        ckpt_cleanup(ckpt_freep) char *name = ckpt_source_name(s);
        return ckpt_fail(err, CKPT_FORMAT,
                         "'%s': needs bytes %" PRIu64 " to %" PRIu64 ", the file has %" PRIu64,
                         name, run->off, run->off + own, s->size);
    }
    *len += own;
    return 0;
}

/* ckpt_source_read, of runs that were checked, without asking the guard. */
static int read_runs(struct ckpt_source *s, const struct ckpt_source_way *way,
                     const struct ckpt_source_run *run, size_t n, struct ckpt_err *err)
{
    if (s->ops->read)
        return s->ops->read(s, way, run, n, err);
    if (way->how == CKPT_READ_CACHED || way->how == CKPT_READ_PREFETCH)
        return way->how == CKPT_READ_CACHED;
    for (size_t i = 0; i < n; i++)
        if (s->ops->preadv(s, run[i].iov, run[i].n, run[i].off, err) < 0)
            return -1;
    return 0;
}

/* Read likewise, and let the guard look at the bytes. What is read alone and for a plan is read
 * first, while what the guard needs is on its way; of what was fetched ahead, the guard's look
 * comes first, as parts of that may go when their last bytes were read. */
static int read_guarded(struct ckpt_source *s, const struct ckpt_source_way *way,
                        const struct ckpt_source_run *run, size_t n, struct ckpt_err *err)
{
    struct ckpt_source_guard *g = s->guard;
    const bool waits = ckpt_read_waits(way->how);
    int rc = 0;

    if (n == 1 && way->how == CKPT_READ_EXACT) {
        const uint64_t off = run->off, end = off + ckpt_iov_len(run->iov, run->n);
        g->begin(g, s, off, end);
        rc = read_runs(s, way, run, n, err);
        return rc ? rc : g->look(g, s, waits, off, end, err);
    }
    for (size_t i = 0; i < n && rc == 0; i++) {
        const uint64_t end = run[i].off + ckpt_iov_len(run[i].iov, run[i].n);
        if (waits)
            g->begin(g, s, run[i].off, end);
        rc = g->look(g, s, waits, run[i].off, end, err);
    }
    return rc ? rc : read_runs(s, way, run, n, err);
}

int ckpt_source_read(struct ckpt_source *s, const struct ckpt_source_way *way,
                     const struct ckpt_source_run *run, size_t n, struct ckpt_err *err)
{
    uint64_t len = 0;

    for (size_t i = 0; i < n; i++)
        if (check_run(s, &run[i], &len, err) < 0)
            return -1;
    if (len == 0)
        return 0;
    return s->guard && way->how != CKPT_READ_PREFETCH ? read_guarded(s, way, run, n, err)
                                                      : read_runs(s, way, run, n, err);
}

int ckpt_source_preadv(struct ckpt_source *s, struct iovec *iov, int n, uint64_t off,
                       struct ckpt_err *err)
{
    const struct ckpt_source_way way = {CKPT_READ_AHEAD, NULL};
    const struct ckpt_source_run run = {off, iov, n};

    return ckpt_source_read(s, &way, &run, 1, err);
}

int ckpt_source_pread(struct ckpt_source *s, void *buf, size_t len, uint64_t off,
                      struct ckpt_err *err)
{
    struct iovec iov = {.iov_base = buf, .iov_len = len};
    return ckpt_source_preadv(s, &iov, 1, off, err);
}

void ckpt_source_widen(struct ckpt_source *s, uint64_t *off, uint64_t *end)
{
    if (s->guard)
        s->guard->widen(s->guard, s, off, end);
}

bool ckpt_source_prefetch(struct ckpt_source *s, uint64_t off, uint64_t len)
{
    const struct ckpt_source_way way = {CKPT_READ_PREFETCH, NULL};
    struct iovec iov = {.iov_base = NULL};
    const struct ckpt_source_run run = {off, &iov, 1};

    if (off >= s->size)
        return true;
    iov.iov_len = ckpt_min_u64(len, s->size - off);
    return ckpt_source_read(s, &way, &run, 1, NULL) != 1;
}

bool ckpt_source_same(const struct ckpt_source *a, const struct ckpt_source *b)
{
    return a == b || (a->ops == b->ops && a->size == b->size && a->ops->same && a->ops->same(a, b));
}

int ckpt_source_check(struct ckpt_source *s, struct ckpt_err *err)
{
    return s->ops->check ? s->ops->check(s, err) : 0;
}

enum ckpt_prepared ckpt_source_prepare(struct ckpt_source *s)
{
    return s->ops->prepare ? s->ops->prepare(s) : CKPT_PREPARED_BEFORE;
}

char *ckpt_source_name(const struct ckpt_source *s) { return s->ops->name(s); }

/* ---- bytes in memory ---- */

struct source_mem {
    struct ckpt_source source;
    char *name;
    unsigned char data[];
};

static int mem_preadv(struct ckpt_source *s, struct iovec *iov, int n, uint64_t off,
                      struct ckpt_err *err)
{
    struct ckpt_iov_cursor to = {iov, 0};

    (void)err;
    ckpt_iov_put(&to, ((struct source_mem *)s)->data + off, ckpt_iov_len(iov, n));
    return 0;
}

static char *mem_name(const struct ckpt_source *s)
{
    return strdup(((const struct source_mem *)s)->name);
}

static void mem_free(struct ckpt_source *s)
{
    free(((struct source_mem *)s)->name);
    free(s);
}

static const struct ckpt_source_ops mem_ops = {
    .preadv = mem_preadv, .name = mem_name, .free = mem_free};

static int new_mem(const struct ckpt_source_ops *ops, const char *name, size_t len, uint64_t size,
                   struct source_mem **ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) struct source_mem *m = NULL;
    size_t bytes;

    if (ckd_add(&bytes, offsetof(struct source_mem, data), len) || !(m = calloc(1, bytes)) ||
        !(m->name = strdup(name)))
        return ckpt_nomem(err);
    m->source.ops = ops;
    m->source.size = size;
    atomic_init(&m->source.refs, 1);
    *ret = ckpt_steal(&m);
    return 0;
}

int ckpt_source_mem_new(const char *name, const void *data, size_t len, struct ckpt_source **ret,
                        struct ckpt_err *err)
{
    struct source_mem *m;

    if (new_mem(&mem_ops, name, len, len, &m, err) < 0)
        return -1;
    if (len)
        memcpy(m->data, data, len);
    *ret = &m->source;
    return 0;
}

/* ---- bytes that do not exist ---- */

static int nowhere_preadv(struct ckpt_source *s, struct iovec *iov, int n, uint64_t off,
                          struct ckpt_err *err)
{
    (void)iov;
    (void)n;
    (void)off;
    return ckpt_fail(err, CKPT_MISSING, "%s", ((struct source_mem *)s)->name);
}

static const struct ckpt_source_ops nowhere_ops = {
    .preadv = nowhere_preadv, .name = mem_name, .free = mem_free};

int ckpt_source_nowhere_new(const char *why, struct ckpt_source **ret, struct ckpt_err *err)
{
    struct source_mem *m;

    if (new_mem(&nowhere_ops, why, 0, INT64_MAX, &m, err) < 0)
        return -1;
    *ret = &m->source;
    return 0;
}

bool ckpt_source_is_nowhere(const struct ckpt_source *s) { return s->ops == &nowhere_ops; }

/* ---- a range of another source: a member of an archive, a file behind a header ---- */

struct source_window {
    struct ckpt_source source;
    struct ckpt_source *of;
    uint64_t off;
};

static struct source_window *self(const struct ckpt_source *s) { return (struct source_window *)s; }

static int window_read(struct ckpt_source *s, const struct ckpt_source_way *way,
                       const struct ckpt_source_run *run, size_t n, struct ckpt_err *err)
{
    enum { AT_ONCE = 64 };
    struct ckpt_source_run moved[AT_ONCE];
    int rc = 0;

    for (size_t done = 0; done < n && rc == 0;) {
        size_t k = 0;
        for (; k < AT_ONCE && done < n; k++, done++) {
            moved[k] = run[done];
            moved[k].off += self(s)->off;
        }
        rc = ckpt_source_read(self(s)->of, way, moved, k, err);
    }
    return rc;
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

static const struct ckpt_source_ops window_ops = {.read = window_read,
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

/* ---- what a guard reads ---- */

static struct ckpt_source *of_bare(const struct ckpt_source *s)
{
    return ((const struct ckpt_source_bare *)s)->of;
}

static int bare_read(struct ckpt_source *s, const struct ckpt_source_way *way,
                     const struct ckpt_source_run *run, size_t n, struct ckpt_err *err)
{
    const struct ckpt_source_way look = {ckpt_read_waits(way->how) ? CKPT_READ_LOOK : way->how,
                                         way->route};

    return read_runs(of_bare(s), &look, run, n, err);
}

static char *bare_name(const struct ckpt_source *s) { return ckpt_source_name(of_bare(s)); }

static void bare_free(struct ckpt_source *s) { (void)s; }

static const struct ckpt_source_ops bare_ops = {
    .read = bare_read, .name = bare_name, .free = bare_free};

void ckpt_source_bare_init(struct ckpt_source_bare *b, struct ckpt_source *of)
{
    *b = (struct ckpt_source_bare){.source = {.ops = &bare_ops, .size = of->size}, .of = of};
    atomic_init(&b->source.refs, 1);
}

void ckpt_source_set_guard(struct ckpt_source *s, struct ckpt_source_guard *guard)
{
    assert(!s->guard);
    s->guard = guard;
}

struct ckpt_source *ckpt_source_window_of(struct ckpt_source *s)
{
    return s->ops == &window_ops ? self(s)->of : NULL;
}
