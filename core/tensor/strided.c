/* SPDX-License-Identifier: Apache-2.0 */
/* Strided regions of sources: big reads, one copy. */
#include "tensor/strided.h"

#include <stdlib.h>
#include <string.h>

#include "base/ckd.h"

enum {
    SCATTER_RUN = 512, /* shorter runs are read together and copied, not scattered */
    SMALL_HOLE = 16,   /* a hole is small if it is less than 1/16 of what lies between */
};

/* Runs that are neighbours in the source and not too short land in place with one scatter read. */
static bool scatters(const struct ckpt_ndcopy *c)
{
    return c->naxis == 0 || (c->naxis == 1 && c->axis[0].src == c->run && c->run >= SCATTER_RUN);
}

static int read_scattered(const struct ckpt_strided_reader *r, struct ckpt_source *s,
                          const struct ckpt_ndcopy *c, unsigned char *dst, uint64_t src,
                          struct ckpt_err *err)
{
    uint64_t n = c->naxis ? c->axis[0].n : 1, step = c->naxis ? c->axis[0].dst : 0;

    for (uint64_t i = 0; i < n; i++)
        if (ckpt_batch_add(r->batch, s, dst + i * step, c->run, src + i * c->run, err) < 0)
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
            ckpt_batch_flush(r->batch, err) < 0)
            return -1;
        c->len = (size_t)(end - c->off);
    }
    *ret_data = c->data + (off - c->off);
    return 0;
}

static int read_bound(const struct ckpt_strided_reader *r, struct ckpt_source *s,
                      const struct ckpt_ndcopy *c, unsigned char *dst, uint64_t src,
                      struct ckpt_err *err)
{
    const unsigned char *data;

    if (r->batch->soon)
        return ckpt_batch_add(r->batch, s, NULL, (size_t)ckpt_ndcopy_src_span(c), src, err);
    if (cache_read(r, s, (size_t)ckpt_ndcopy_src_span(c), src, &data, err) < 0)
        return -1;
    ckpt_ndcopy_run(c, dst, data);
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
};

static int gather_flush(struct gather *g, struct ckpt_err *err)
{
    const size_t n = g->n;

    g->n = 0;
    return ckpt_batch_gather_cached(g->reader->batch, g->source, g->run, n, &g->all, err);
}

static int gather_axes(struct gather *g, uint32_t j, unsigned char *dst, uint64_t src,
                       struct ckpt_err *err)
{
    if (j == g->copy->naxis) {
        g->run[g->n++] = (struct ckpt_source_run){dst, g->copy->run, src};
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
                            const struct ckpt_ndcopy *c, unsigned char *dst, uint64_t src,
                            struct ckpt_err *err)
{
    struct gather g;

    if (!has_large_holes(r, c) || begins_in_cache(r, s, src) || r->batch->soon)
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

int ckpt_strided_read(const struct ckpt_strided_reader *r, struct ckpt_source *s,
                      const struct ckpt_step_axis *axis, uint32_t naxis, unsigned char *dst,
                      uint64_t src, struct ckpt_err *err)
{
    struct ckpt_ndcopy c;
    int result;

    ckpt_ndcopy_init(&c, axis, naxis, r->esize);
    if (scatters(&c))
        return read_scattered(r, s, &c, dst, src, err);
    if ((result = read_runs_cached(r, s, &c, dst, src, err)) != 0)
        return result < 0 ? -1 : 0;

    uint32_t widest = widest_axis(&c);
    struct ckpt_step_axis whole = c.axis[widest];
    uint64_t step = steps_at_once(r, &c, widest);
    if (step == whole.n)
        return read_bound(r, s, &c, dst, src, err);

    struct ckpt_step_axis part[CKPT_MAX_AXES + 1];
    memcpy(part, c.axis, c.naxis * sizeof *part);
    part[c.naxis] = (struct ckpt_step_axis){c.run / r->esize, r->esize, r->esize};
    for (uint64_t i = 0; i < whole.n; i += step) {
        part[widest].n = ckpt_min_u64(step, whole.n - i);
        if (ckpt_strided_read(r, s, part, c.naxis + 1, dst + i * whole.dst, src + i * whole.src,
                              err) < 0)
            return -1;
    }
    return 0;
}
