/* SPDX-License-Identifier: Apache-2.0 */
/* Strided regions of sources: big reads, one copy. */
#include "tensor/strided.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "base/ckd.h"
#include "base/sort.h"

/* ---- collecting, merging and checking the reads of one request ---- */

void ckpt_batch_init(struct ckpt_batch *b, enum ckpt_read_how how)
{
    memset(b, 0, offsetof(struct ckpt_batch, iov));
    b->how = how;
}

static int touch(struct ckpt_batch *b, struct ckpt_source *s, struct ckpt_err *err)
{
    for (size_t i = b->touched.len; i-- > 0;)
        if (b->touched.ptr[i] == s)
            return 0;
    return ckpt_vec_push(&b->touched, s) < 0 ? ckpt_nomem(err) : 0;
}

static void count(struct ckpt_batch *b, struct ckpt_source *s, uint64_t len)
{
    b->nbyte += len;
    if (ckpt_source_is_elsewhere(s))
        b->nasked += len;
    if (b->route.arrived)
        atomic_fetch_add_explicit(b->route.arrived, len, memory_order_relaxed);
}

/* Read runs of a source. With CKPT_READ_CACHED an error is an answer: they would have to be waited
 * for. */
static int read_runs(struct ckpt_batch *b, struct ckpt_source *s, const struct ckpt_source_run *run,
                     size_t n, enum ckpt_read_how how, struct ckpt_err *err)
{
    const struct ckpt_source_way way = {how, &b->route};

    return how == CKPT_READ_CACHED ? ckpt_source_read(s, &way, run, n, NULL) != 0
                                   : ckpt_source_read(s, &way, run, n, err);
}

/* Read what is pending. With CKPT_READ_CACHED, -1 without an error if that would have to wait. */
static int batch_flush(struct ckpt_batch *b, struct ckpt_err *err)
{
    const struct ckpt_source_run run = {b->off, b->iov, b->niov};
    struct ckpt_source *s = b->source;

    if (!s)
        return 0;
    b->source = NULL;
    b->nread++;
    const int rc = read_runs(b, s, &run, 1, b->how, err);
    count(b, s, b->len);
    b->missed = rc > 0;
    return rc ? -1 : 0;
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

/* Let the source fetch a run in parts that end at multiples of `part`; the last one takes a small
 * rest. */
static bool fetch_run(const struct ckpt_batch_run *r, uint64_t part)
{
    bool good = true;

    for (uint64_t off = r->off, stop; good && off < r->end; off = stop) {
        stop = part ? (off / part + 1) * part : r->end;
        if (stop + part / 4 >= r->end)
            stop = r->end;
        good = ckpt_source_prefetch(r->source, off, stop - off);
    }
    return good;
}

bool ckpt_batch_fetch(struct ckpt_batch *b, uint64_t gap)
{
    struct ckpt_batch_run *r = b->runs.ptr;
    size_t n = 0;

    for (size_t i = 0; i < b->runs.len; i++)
        ckpt_source_widen(r[i].source, &r[i].off, &r[i].end);
    ckpt_sort(r, b->runs.len, by_place);
    for (size_t i = 0; i < b->runs.len; i++)
        if (n && r[n - 1].source == r[i].source && r[i].off <= r[n - 1].end + gap) {
            r[n - 1].end = ckpt_max_u64(r[n - 1].end, r[i].end);
            r[n - 1].n = ckpt_min_u64(r[n - 1].n, r[i].n);
        } else {
            r[n++] = r[i];
        }
    ckpt_sort(r, n, by_turn);
    b->runs.len = n;
    for (size_t i = 0; i < n; i++)
        if (!fetch_run(&r[i], b->part))
            return false;
    return true;
}

int ckpt_batch_add(struct ckpt_batch *b, struct ckpt_source *s, void *buf, size_t len, uint64_t off,
                   struct ckpt_err *err)
{
    if (b->how == CKPT_READ_PREFETCH)
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
    if (batch_flush(b, err) < 0 || touch(b, s, err) < 0)
        return -1;
    b->source = s;
    b->off = off;
    b->len = len;
    b->niov = 1;
    b->iov[0] = (struct iovec){.iov_base = buf, .iov_len = len};
    return 0;
}

int ckpt_batch_finish(struct ckpt_batch *b, struct ckpt_err *err)
{
    if (batch_flush(b, err) < 0)
        return -1;
    for (size_t i = 0; i < b->touched.len; i++)
        if (ckpt_source_check(b->touched.ptr[i], err) < 0)
            return -1;
    return 0;
}

/* ---- strided regions ---- */

enum {
    SCATTER_RUN = 512, /* shorter runs are read together and copied, not scattered */
    SMALL_HOLE = 16,   /* a hole is small if it is less than 1/16 of what lies between */
};

/* The memory for the destination's byte at dst; NULL: nothing is read. */
static unsigned char *memory_at(const struct ckpt_strided_reader *r, uint64_t dst)
{
    return r->buf ? r->buf + dst : NULL;
}

/* Runs that are neighbours in the source and not too short land in place with one scatter read. */
static bool scatters(const struct ckpt_ndcopy *c)
{
    return c->naxis == 0 || (c->naxis == 1 && c->axis[0].src == c->run && c->run >= SCATTER_RUN);
}

static int read_scattered(const struct ckpt_strided_reader *r, struct ckpt_source *s,
                          const struct ckpt_ndcopy *c, uint64_t dst, uint64_t src,
                          struct ckpt_err *err)
{
    uint64_t n = c->naxis ? c->axis[0].n : 1, step = c->naxis ? c->axis[0].dst : 0;

    for (uint64_t i = 0; i < n; i++)
        if (ckpt_batch_add(r->batch, s, memory_at(r, dst + i * step), c->run, src + i * c->run,
                           err) < 0)
            return -1;
    return 0;
}

void ckpt_strided_cache_release(struct ckpt_strided_cache *c)
{
    free(c->data);
    *c = (struct ckpt_strided_cache){0};
}

static int cache_reserve(struct ckpt_strided_cache *c, size_t len, struct ckpt_err *err)
{
    if (len <= c->cap)
        return 0;
    unsigned char *data = realloc(c->data, len);
    if (!data)
        return ckpt_nomem(err);
    c->data = data;
    c->cap = len;
    return 0;
}

/* Make bytes [off, off+len) of s available in memory; *ret_data is valid until the next call. Bytes
 * that are not cached are read; a range that continues the cached one extends it, up to
 * CKPT_STRIDED_KEPT times the bound. */
static int cache_read(const struct ckpt_strided_reader *r, struct ckpt_source *s, size_t len,
                      uint64_t off, const unsigned char **ret_data, struct ckpt_err *err)
{
    struct ckpt_strided_cache *c = r->cache;
    const uint64_t end = off + len;

    if (c->source != s || off < c->off || off > c->off + c->len ||
        end - c->off > CKPT_STRIDED_KEPT * r->bound) {
        c->source = s;
        c->off = off;
        c->len = 0;
    }
    if (end > c->off + c->len) {
        const size_t have = c->len;
        c->len = 0; /* a failure leaves nothing */
        if (cache_reserve(c, (size_t)(end - c->off), err) < 0 ||
            ckpt_batch_add(r->batch, s, c->data + have, (size_t)(end - c->off) - have,
                           c->off + have, err) < 0 ||
            batch_flush(r->batch, err) < 0)
            return -1;
        c->len = (size_t)(end - c->off);
    }
    assert(c->source == s && c->off <= off && end <= c->off + c->len && c->len <= c->cap);
    *ret_data = c->data + (off - c->off);
    return 0;
}

static int read_bound(const struct ckpt_strided_reader *r, struct ckpt_source *s,
                      const struct ckpt_ndcopy *c, uint64_t dst, uint64_t src, struct ckpt_err *err)
{
    const unsigned char *data;

    if (!r->buf)
        return ckpt_batch_add(r->batch, s, NULL, (size_t)ckpt_ndcopy_src_span(c), src, err);
    if (cache_read(r, s, (size_t)ckpt_ndcopy_src_span(c), src, &data, err) < 0)
        return -1;
    ckpt_ndcopy_run(c, r->buf + dst, data);
    return 0;
}

static uint32_t widest_axis(const struct ckpt_ndcopy *c)
{
    uint32_t at = 0;

    for (uint32_t j = 1; j < c->naxis; j++)
        if (c->axis[j].src > c->axis[at].src)
            at = j;
    return at;
}

/* A region is divided along the axis with the widest steps in the source. What one step takes
 * (`inner`) may have holes of faster axes; between the steps there is a hole, too, unless they
 * overlap:
 *
 *      [ inner ]   hole   [ inner ]   hole   [ inner ]
 *      |---- a->src -----|
 *
 * How many steps of the widest axis may be read in one bounding range: 1 when the holes between
 * them are large. */
static uint64_t steps_at_once(const struct ckpt_strided_reader *r, const struct ckpt_ndcopy *c,
                              uint32_t widest)
{
    const struct ckpt_step_axis *a = &c->axis[widest];
    uint64_t inner = ckpt_ndcopy_src_span(c) - (a->n - 1) * a->src;

    if (a->src > inner &&
        (a->src - inner > r->gap || (inner >= r->run && a->src - inner > inner / SMALL_HOLE)))
        return 1;
    if (a->src == 0 || inner >= r->bound)
        return inner >= r->bound ? 1 : a->n;
    return ckpt_min_u64(a->n, (r->bound - inner) / a->src + 1);
}

/* ---- runs that the page cache has ---- */

enum { GATHER_AT_ONCE = 128 };

struct gather {
    const struct ckpt_strided_reader *reader;
    struct ckpt_source *source;
    const struct ckpt_ndcopy *copy;
    size_t n;
    bool all; /* the page cache had all runs so far */
    struct ckpt_source_run run[GATHER_AT_ONCE];
    struct iovec iov[GATHER_AT_ONCE]; /* of each run its memory */
};

/* Read the runs now, if the page cache has all of them; otherwise their memory is undefined. */
static int gather_flush(struct gather *g, struct ckpt_err *err)
{
    struct ckpt_batch *b = g->reader->batch;
    const size_t n = g->n;

    g->n = 0;
    if (touch(b, g->source, err) < 0)
        return -1;
    g->all = read_runs(b, g->source, g->run, n, CKPT_READ_CACHED, NULL) == 0;
    if (g->all)
        count(b, g->source, n * g->copy->run);
    return 0;
}

static int gather_axes(struct gather *g, uint32_t j, uint64_t dst, uint64_t src,
                       struct ckpt_err *err)
{
    if (j == g->copy->naxis) {
        g->iov[g->n] = (struct iovec){g->reader->buf + dst, g->copy->run};
        g->run[g->n] = (struct ckpt_source_run){src, &g->iov[g->n], 1};
        g->n++;
        return g->n == GATHER_AT_ONCE ? gather_flush(g, err) : 0;
    }
    const struct ckpt_step_axis *a = &g->copy->axis[j];
    for (uint64_t i = 0; i < a->n && g->all; i++)
        if (gather_axes(g, j + 1, dst + i * a->dst, src + i * a->src, err) < 0)
            return -1;
    return 0;
}

/* Are the holes so large that a system call for each run costs less than copying them? */
static bool has_large_holes(const struct ckpt_strided_reader *r, const struct ckpt_ndcopy *c)
{
    const uint64_t span = ckpt_ndcopy_src_span(c), bytes = ckpt_ndcopy_bytes(c);

    return r->hot_hole && span > bytes && span - bytes >= bytes / c->run * r->hot_hole;
}

/* Does the cached range have all of it, or at least the beginning? */
static bool begins_in_cache(const struct ckpt_strided_reader *r, const struct ckpt_source *s,
                            uint64_t src)
{
    return r->cache->source == s && src >= r->cache->off && src < r->cache->off + r->cache->len;
}

/* Read each run alone if the page cache has all of them. Returns 1 if it has, 0 if not. */
static int read_runs_cached(const struct ckpt_strided_reader *r, struct ckpt_source *s,
                            const struct ckpt_ndcopy *c, uint64_t dst, uint64_t src,
                            struct ckpt_err *err)
{
    struct gather g;

    if (!r->buf || !has_large_holes(r, c) || begins_in_cache(r, s, src))
        return 0;
    g.reader = r;
    g.source = s;
    g.copy = c;
    g.n = 0;
    g.all = true;
    if (gather_axes(&g, 0, dst, src, err) < 0 || (g.all && g.n && gather_flush(&g, err) < 0))
        return -1;
    if (g.all)
        r->batch->nread++;
    return g.all;
}

/* Set *ret to a copy of n steps along the widest axis, which lie `inner` bytes apart in the source.
 */
static void steps_copy(const struct ckpt_strided_reader *r, const struct ckpt_ndcopy *c,
                       uint32_t widest, uint64_t n, uint64_t inner, struct ckpt_ndcopy *ret)
{
    struct ckpt_step_axis axis[CKPT_MAX_AXES + 1];

    memcpy(axis, c->axis, c->naxis * sizeof *axis);
    axis[widest].n = n;
    axis[widest].src = inner;
    axis[c->naxis] = (struct ckpt_step_axis){c->run / r->esize, r->esize, r->esize};
    ckpt_ndcopy_init(ret, axis, c->naxis + 1, r->esize);
}

/* Read what each step along the widest axis takes alone, without the holes between the steps, if
 * the page cache has all of it: of a transposed tensor a run in the source is no run in memory, and
 * one layer of many is a small part of the range in which it lies. Returns as read_runs_cached. */
static int read_steps_cached(const struct ckpt_strided_reader *r, struct ckpt_source *s,
                             const struct ckpt_ndcopy *c, uint64_t dst, uint64_t src,
                             struct ckpt_err *err)
{
    const uint32_t widest = widest_axis(c);
    const struct ckpt_step_axis *a = &c->axis[widest];
    const uint64_t inner = ckpt_ndcopy_src_span(c) - (a->n - 1) * a->src;
    struct ckpt_source_run run[GATHER_AT_ONCE];
    struct iovec iov[GATHER_AT_ONCE];

    if (!r->buf || !r->hot_hole || a->src < inner + r->hot_hole || 2 * inner > r->bound ||
        begins_in_cache(r, s, src))
        return 0;
    const uint64_t most = ckpt_min_u64(GATHER_AT_ONCE, r->bound / inner);
    r->cache->source = NULL; /* its memory is used */
    if (cache_reserve(r->cache, (size_t)(most * inner), err) < 0 || touch(r->batch, s, err) < 0)
        return -1;
    for (uint64_t i = 0, n; i < a->n; i += n) {
        struct ckpt_ndcopy part;
        n = ckpt_min_u64(most, a->n - i);
        for (uint64_t k = 0; k < n; k++) {
            iov[k] = (struct iovec){r->cache->data + k * inner, (size_t)inner};
            run[k] = (struct ckpt_source_run){src + (i + k) * a->src, &iov[k], 1};
        }
        if (read_runs(r->batch, s, run, n, CKPT_READ_CACHED, NULL) != 0)
            return 0;
        count(r->batch, s, n * inner);
        steps_copy(r, c, widest, n, inner, &part);
        ckpt_ndcopy_run(&part, r->buf + dst + i * a->dst, r->cache->data);
    }
    r->batch->nread++;
    return 1;
}

/* axis[j].src is a stride in the source, axis[j].dst one in memory, both in bytes, slowest first;
 * dst and src say where element 0 is, in r->buf and in the source. The bytes are there after
 * ckpt_batch_finish. */
static int strided_read(const struct ckpt_strided_reader *r, struct ckpt_source *s,
                        const struct ckpt_step_axis *axis, uint32_t naxis, uint64_t dst,
                        uint64_t src, struct ckpt_err *err)
{
    struct ckpt_ndcopy c;
    int result;

    ckpt_ndcopy_init(&c, axis, naxis, r->esize);
    if (scatters(&c))
        return read_scattered(r, s, &c, dst, src, err);
    if ((result = read_runs_cached(r, s, &c, dst, src, err)) != 0 ||
        (result = read_steps_cached(r, s, &c, dst, src, err)) != 0)
        return result < 0 ? -1 : 0;

    uint32_t widest = widest_axis(&c);
    struct ckpt_step_axis whole = c.axis[widest];
    uint64_t step = steps_at_once(r, &c, widest);
    assert(step > 0 && step <= whole.n && c.naxis <= CKPT_MAX_AXES);
    if (step == whole.n)
        return read_bound(r, s, &c, dst, src, err);

    struct ckpt_step_axis part[CKPT_MAX_AXES + 1];
    memcpy(part, c.axis, c.naxis * sizeof *part);
    part[c.naxis] = (struct ckpt_step_axis){c.run / r->esize, r->esize, r->esize};
    for (uint64_t i = 0; i < whole.n; i += step) {
        part[widest].n = ckpt_min_u64(step, whole.n - i);
        if (strided_read(r, s, part, c.naxis + 1, dst + i * whole.dst, src + i * whole.src, err) <
            0)
            return -1;
    }
    return 0;
}

/* ---- stored tensors: box -> the part of each piece that lies in it -> strided regions ---- */

/* The axes of a piece, dimension by dimension, clipped to a box. */
struct clipped {
    const struct ckpt_piece *piece;
    uint32_t first[CKPT_MAX_RANK + 1]; /* axes first[d] .. first[d+1] belong to dimension d */
    uint64_t at[CKPT_MAX_RANK];        /* index of the piece's first element */
    uint32_t axis[CKPT_MAX_AXES];      /* in the piece */
    uint64_t step[CKPT_MAX_AXES];      /* indices per tuple along that dimension */
    const struct ckpt_span *span[CKPT_MAX_RANK];
    size_t nspan[CKPT_MAX_RANK];
    /* spans of all dimensions: at most 2 per axis and 1 per dimension, and the space that
     * ckpt_axes_clip may write */
    struct ckpt_span spans[2 * CKPT_MAX_AXES + CKPT_MAX_RANK + CKPT_MAX_SPANS];
};

struct request {
    const struct ckpt_strided_reader *reader;
    const struct ckpt_box_read *read;
    uint64_t stride[CKPT_MAX_RANK]; /* of the buffer, in bytes */
    struct clipped clip;
};

/* The shape to which the box refers: the tensor's, or one dimension with all elements. */
static const uint64_t *shape_of(const struct ckpt_tensor *t, const struct ckpt_box *box)
{
    assert(box->rank == t->rank || box->rank == 1);
    return box->rank == t->rank ? t->dim : &t->numel;
}

/* False: nothing of the piece lies in the box. An axis belongs to the dimension within which it
 * steps (tensor/catalog.h). */
static bool clip_piece(struct clipped *c, const struct ckpt_piece *p, const uint64_t *dim,
                       const struct ckpt_box *box)
{
    uint64_t unit[CKPT_MAX_RANK], rest = p->dst;
    uint32_t j = 0, k = 0;
    struct ckpt_span *next = c->spans;

    c->piece = p;
    ckpt_shape_strides(dim, box->rank, unit);
    for (uint32_t d = 0; d < box->rank; d++) {
        uint64_t n[CKPT_MAX_AXES];
        c->at[d] = rest / unit[d];
        rest %= unit[d];
        c->first[d] = k;
        for (; j < p->naxis && (p->axis[j].n == 1 || p->axis[j].dst >= unit[d]); j++) {
            if (p->axis[j].n == 1)
                continue;
            n[k - c->first[d]] = p->axis[j].n;
            c->axis[k] = j;
            c->step[k++] = p->axis[j].dst / unit[d];
        }
        uint64_t end = box->lo[d] + box->n[d];
        if (end <= c->at[d])
            return false;
        c->nspan[d] =
            ckpt_axes_clip(n, &c->step[c->first[d]], k - c->first[d],
                           box->lo[d] > c->at[d] ? box->lo[d] - c->at[d] : 0, end - c->at[d], next);
        if (c->nspan[d] == 0)
            return false;
        c->span[d] = next;
        next += c->nspan[d];
    }
    c->first[box->rank] = k;
    /* each axis steps within one dimension, and they are in the order of the dimensions */
    assert(box->rank == 0 || j == p->naxis);
    assert(next <= c->spans + 2 * CKPT_MAX_AXES + CKPT_MAX_RANK);
    return true;
}

/* Along dimension d, the first index and the first byte of a span, relative to the piece's. */
static void span_begin(const struct clipped *c, uint32_t d, const struct ckpt_span *span,
                       uint64_t *ret_index, uint64_t *ret_src)
{
    *ret_index = *ret_src = 0;
    for (uint32_t k = c->first[d]; k < c->first[d + 1]; k++) {
        const uint64_t lo = span->lo[k - c->first[d]];
        *ret_index += lo * c->step[k];
        *ret_src += lo * c->piece->axis[c->axis[k]].src;
    }
}

/* Read the product of one span per dimension. */
static int read_product(struct request *r, const struct ckpt_span *const *span,
                        struct ckpt_err *err)
{
    const struct clipped *c = &r->clip;
    const struct ckpt_box *box = &r->read->box;
    struct ckpt_step_axis axis[CKPT_MAX_AXES];
    uint64_t dst = 0, src = c->piece->src;

    for (uint32_t d = 0; d < box->rank; d++) {
        uint64_t index, off;
        span_begin(c, d, span[d], &index, &off);
        assert(c->at[d] + index >= box->lo[d] && c->at[d] + index < box->lo[d] + box->n[d]);
        src += off;
        dst += (c->at[d] + index - box->lo[d]) * r->stride[d];
        for (uint32_t k = c->first[d]; k < c->first[d + 1]; k++)
            axis[k] =
                (struct ckpt_step_axis){span[d]->n[k - c->first[d]], c->step[k] * r->stride[d],
                                        c->piece->axis[c->axis[k]].src};
    }
    return strided_read(r->reader, r->read->tensor->cat->sources.ptr[c->piece->source], axis,
                        c->first[box->rank], dst, src, err);
}

static int read_spans(struct request *r, const struct ckpt_span **span, uint32_t d,
                      struct ckpt_err *err)
{
    if (d == r->read->box.rank)
        return read_product(r, span, err);
    for (size_t i = 0; i < r->clip.nspan[d]; i++) {
        span[d] = &r->clip.span[d][i];
        if (read_spans(r, span, d + 1, err) < 0)
            return -1;
    }
    return 0;
}

int ckpt_stored_read(struct ckpt_strided_reader *reader, const struct ckpt_box_read *read,
                     struct ckpt_err *err)
{
    const struct ckpt_tensor *t = read->tensor;
    const uint64_t *dim = shape_of(t, &read->box);
    struct request r;
    const struct ckpt_span *span[CKPT_MAX_RANK];
    uint64_t lo, hi;

    assert((reader->batch->how == CKPT_READ_PREFETCH) == !read->buf);
    reader->esize = ckpt_dtype_size(t->dtype);
    reader->buf = read->buf;
    r.reader = reader;
    r.read = read;
    ckpt_box_range(&read->box, dim, &lo, &hi);
    ckpt_box_strides(&read->box, reader->esize, r.stride);
    for (size_t i = ckpt_tensor_first_piece(t, lo); i < t->npiece && t->piece[i].dst < hi; i++)
        if (clip_piece(&r.clip, &t->piece[i], dim, &read->box) && read_spans(&r, span, 0, err) < 0)
            return -1;
    return 0;
}

uint64_t ckpt_piece_count(const struct ckpt_tensor *t, const struct ckpt_piece *piece,
                          const struct ckpt_box *box)
{
    struct clipped c;
    uint64_t count = 1;

    if (!clip_piece(&c, piece, t->dim, box))
        return 0;
    for (uint32_t d = 0; d < box->rank; d++) {
        uint64_t along = 0; /* indices of dimension d that it has */
        for (size_t i = 0; i < c.nspan[d]; i++) {
            uint64_t n = 1;
            for (uint32_t k = c.first[d]; k < c.first[d + 1]; k++)
                n *= c.span[d][i].n[k - c.first[d]];
            along += n;
        }
        count *= along;
    }
    return count;
}

bool ckpt_tensor_place(const struct ckpt_tensor *t, uint64_t at, uint32_t *ret_source,
                       uint64_t *ret_off)
{
    const struct ckpt_box box = {.rank = 1, .lo = {at}, .n = {1}};
    struct clipped c;
    uint64_t index, off;

    for (size_t i = ckpt_tensor_first_piece(t, at); i < t->npiece && t->piece[i].dst <= at; i++) {
        if (!clip_piece(&c, &t->piece[i], &t->numel, &box))
            continue;
        span_begin(&c, 0, c.span[0], &index, &off);
        *ret_source = t->piece[i].source;
        *ret_off = t->piece[i].src + off;
        return true;
    }
    return false;
}
