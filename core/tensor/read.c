/* SPDX-License-Identifier: Apache-2.0 */
/* Byte range -> elements -> spans of pieces -> strided regions of sources -> big reads and one
 * copy. */
#include "tensor/read.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "base/ckd.h"
#include "base/mem.h"
#include "io/batch.h"
#include "tensor/region.h"
#include "tensor/value.h"

enum {
    SLAB_MIN_TENSOR = 1024 * 1024, /* smaller transposed tensors are read whole anyway */
    SLAB_BYTES = 64 * 1024 * 1024, /* most that one slab of a transposed tensor holds */
};

/* One request against stored bytes. */
struct request {
    const struct ckpt_catalog *cat;
    const struct ckpt_tensor *t;
    unsigned char *buf; /* element `lo` goes here */
    uint64_t lo, hi;
    struct ckpt_region_reader reader;
};

static int read_piece(struct request *r, const struct ckpt_piece *p, struct ckpt_err *err)
{
    struct ckpt_span span[CKPT_MAX_SPANS];
    uint64_t n[CKPT_MAX_AXES], stride[CKPT_MAX_AXES];
    uint64_t lo = r->lo > p->dst ? r->lo - p->dst : 0;

    if (r->hi <= p->dst)
        return 0;
    for (uint32_t j = 0; j < p->naxis; j++) {
        n[j] = p->axis[j].n;
        stride[j] = p->axis[j].dst;
    }
    size_t nspan = ckpt_axes_clip(n, stride, p->naxis, lo, r->hi - p->dst, span);
    for (size_t i = 0; i < nspan; i++) {
        struct ckpt_step_axis axis[CKPT_MAX_AXES];
        const size_t esize = r->reader.esize;
        uint64_t dst = p->dst - r->lo,
                 src = p->src; /* dst may wrap below zero here, not in the sum */
        for (uint32_t j = 0; j < p->naxis; j++) {
            dst += span[i].lo[j] * p->axis[j].dst;
            src += span[i].lo[j] * p->axis[j].src;
            axis[j] = (struct ckpt_step_axis){span[i].n[j], p->axis[j].dst * esize, p->axis[j].src};
        }
        if (ckpt_region_read(&r->reader, r->cat->sources.ptr[p->source], axis, p->naxis,
                             r->buf + dst * esize, src, err) < 0)
            return -1;
    }
    return 0;
}

static int read_stored(const struct ckpt_catalog *cat, const struct ckpt_tensor *t,
                       struct ckpt_reading *rd, void *buf, uint64_t lo, uint64_t hi,
                       struct ckpt_err *err)
{
    struct ckpt_batch batch;
    struct request r = {cat, t, buf, lo, hi, CKPT_REGION_READER(&batch, ckpt_dtype_size(t->dtype))};
    int result = 0;

    ckpt_batch_init(&batch);
    for (size_t i = ckpt_tensor_first_piece(t, lo);
         i < t->npiece && t->piece[i].dst < hi && result == 0; i++)
        result = read_piece(&r, &t->piece[i], err);
    if (result == 0)
        result = ckpt_batch_finish(&batch, err);
    if (rd && rd->stats) {
        atomic_fetch_add_explicit(&rd->stats->source_reads, batch.nread, memory_order_relaxed);
        atomic_fetch_add_explicit(&rd->stats->source_bytes, batch.nbyte, memory_order_relaxed);
    }
    ckpt_batch_release(&batch);
    return result < 0 ? ckpt_err_in(err, "tensor '%s'", t->name) : 0;
}

/* ---- slabs: spans that are dear to make ---- */

/* Do neighbours along the innermost axis lie apart in the source, row after row? Then a request's
 * bounding range is most of the tensor. */
static bool is_transposed(const struct ckpt_tensor *t)
{
    if (t->npiece == 0 || ckpt_tensor_nbytes(t) <= SLAB_MIN_TENSOR)
        return false;
    const struct ckpt_piece *p = &t->piece[0];
    for (uint32_t j = p->naxis; j-- > 0;)
        if (p->axis[j].n > 1)
            return p->axis[j].src > ckpt_dtype_size(t->dtype);
    return false;
}

/* 0: the tensor is made as it is read. */
static size_t slab_bytes(const struct ckpt_tensor *t)
{
    if (t->value)
        return t->value->ops->slab_bytes;
    return is_transposed(t) ? SLAB_BYTES : 0;
}

static int make_elements(const struct ckpt_catalog *cat, const struct ckpt_tensor *t,
                         struct ckpt_reading *rd, void *buf, uint64_t lo, uint64_t hi,
                         struct ckpt_err *err)
{
    if (t->value)
        return t->value->ops->compute(t->value, t, rd, buf, lo, hi, err);
    return read_stored(cat, t, rd, buf, lo, hi, err);
}

struct slab_ctx {
    const struct ckpt_catalog *cat;
    const struct ckpt_tensor *t;
    struct ckpt_reading *rd;
    uint64_t slab_numel;
};

static int fill_slab(void *arg, void *buf, size_t len, uint64_t slab, struct ckpt_err *err)
{
    const struct slab_ctx *c = arg;
    uint64_t lo = slab * c->slab_numel;

    return make_elements(c->cat, c->t, c->rd, buf, lo, lo + len / ckpt_dtype_size(c->t->dtype),
                         err);
}

/* A kept slab is good only as long as its shards are what they were. */
static int check_sources(const struct ckpt_catalog *cat, const struct ckpt_tensor *t,
                         struct ckpt_err *err)
{
    for (size_t i = 0; i < t->npiece; i++)
        if ((i == 0 || t->piece[i].source != t->piece[i - 1].source) &&
            ckpt_source_check(cat->sources.ptr[t->piece[i].source], err) < 0)
            return ckpt_err_in(err, "tensor '%s'", t->name);
    for (uint32_t i = 0; t->value && i < t->value->narg; i++)
        if (check_sources(t->value->arg[i].cat, t->value->arg[i].tensor, err) < 0)
            return -1;
    return 0;
}

static int read_slabs(const struct ckpt_catalog *cat, const struct ckpt_tensor *t,
                      struct ckpt_reading *rd, size_t most, unsigned char *buf, uint64_t lo,
                      uint64_t hi, struct ckpt_err *err)
{
    size_t esize = ckpt_dtype_size(t->dtype);
    struct slab_ctx c = {cat, t, rd, most / esize};

    while (lo < hi) {
        uint64_t slab = lo / c.slab_numel, begin = slab * c.slab_numel;
        uint64_t end = ckpt_min_u64(begin + c.slab_numel, t->numel);
        uint64_t upto = ckpt_min_u64(hi, end);
        if (ckpt_slabs_read(rd->slabs, rd, t, slab, (size_t)(end - begin) * esize, fill_slab, &c,
                            buf, (size_t)(upto - lo) * esize, (size_t)(lo - begin) * esize,
                            err) < 0)
            return -1;
        buf += (upto - lo) * esize;
        lo = upto;
    }
    return check_sources(cat, t, err);
}

/* ---- whole elements, then bytes ---- */

static int read_elements(const struct ckpt_catalog *cat, const struct ckpt_tensor *t,
                         struct ckpt_reading *rd, void *buf, uint64_t lo, uint64_t hi,
                         struct ckpt_err *err)
{
    const size_t slab = rd && rd->slabs ? slab_bytes(t) : 0;

    if (lo == hi)
        return 0;
    if (slab)
        return read_slabs(cat, t, rd, slab, buf, lo, hi, err);
    return make_elements(cat, t, rd, buf, lo, hi, err);
}

/* A range within one element. */
static int read_part(const struct ckpt_catalog *cat, const struct ckpt_tensor *t,
                     struct ckpt_reading *rd, void *buf, size_t len, uint64_t off,
                     struct ckpt_err *err)
{
    unsigned char element[16];
    size_t esize = ckpt_dtype_size(t->dtype);

    if (read_elements(cat, t, rd, element, off / esize, off / esize + 1, err) < 0)
        return -1;
    memcpy(buf, element + off % esize, len);
    return 0;
}

int ckpt_tensor_pread(const struct ckpt_catalog *cat, const struct ckpt_tensor *t,
                      struct ckpt_reading *rd, void *buf, size_t len, uint64_t off,
                      struct ckpt_err *err)
{
    size_t esize = ckpt_dtype_size(t->dtype);
    unsigned char *at = buf;

    assert(ckpt_range_ok(off, len, ckpt_tensor_nbytes(t)));
    if (rd && rd->stats) {
        atomic_fetch_add_explicit(&rd->stats->requests, 1, memory_order_relaxed);
        atomic_fetch_add_explicit(&rd->stats->bytes, len, memory_order_relaxed);
    }
    if (off % esize && len) {
        size_t n = (size_t)ckpt_min_u64(len, esize - off % esize);
        if (read_part(cat, t, rd, at, n, off, err) < 0)
            return -1;
        at += n;
        off += n;
        len -= n;
    }
    if (read_elements(cat, t, rd, at, off / esize, off / esize + len / esize, err) < 0)
        return -1;
    if (len % esize == 0)
        return 0;
    at += len - len % esize;
    return read_part(cat, t, rd, at, len % esize, off + len - len % esize, err);
}
