/* SPDX-License-Identifier: Apache-2.0 */
/* Box -> the part of each piece that lies in it -> strided regions. */
#include "tensor/boxes.h"

#include <stdlib.h>
#include <string.h>

#include "base/ckd.h"
#include "base/mem.h"
#include "tensor/region.h"
#include "tensor/value.h"

/* Bytes of a computed tensor that are made at once. */
enum { CHUNK_BYTES = 1024 * 1024 };

/* ---- stored tensors ---- */

/* The axes of a piece, dimension by dimension, clipped to a box. */
struct clipped {
    const struct ckpt_piece *piece;
    uint32_t first[CKPT_MAX_RANK + 1]; /* axes first[d] .. first[d+1] belong to dimension d */
    uint64_t at[CKPT_MAX_RANK];        /* index of the piece's first element */
    uint32_t axis[CKPT_MAX_AXES];      /* in the piece */
    uint64_t step[CKPT_MAX_AXES];      /* indices per tuple along that dimension */
    const struct ckpt_span *span[CKPT_MAX_RANK];
    size_t nspan[CKPT_MAX_RANK];
    /* of all dimensions: at most 2 an axis, 1 a dimension; and what ckpt_axes_clip may touch */
    struct ckpt_span spans[2 * CKPT_MAX_AXES + CKPT_MAX_RANK + CKPT_MAX_SPANS];
};

struct box_request {
    const struct ckpt_catalog *cat;
    const struct ckpt_box_read *read;
    struct ckpt_region_reader reader;
    uint64_t stride[CKPT_MAX_RANK]; /* of the buffer, in bytes */
    struct clipped clip;
};

/* False: nothing of the piece lies in the box. An axis belongs to the dimension within which it
 * steps (tensor/piece.h). */
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
    return true;
}

/* Read the product of one span per dimension. */
static int read_product(struct box_request *r, const struct ckpt_span *const *span,
                        struct ckpt_err *err)
{
    const struct clipped *c = &r->clip;
    const struct ckpt_box *box = &r->read->box;
    struct ckpt_step_axis axis[CKPT_MAX_AXES];
    uint64_t dst = 0, src = c->piece->src;

    for (uint32_t d = 0; d < box->rank; d++) {
        uint64_t index = c->at[d];
        for (uint32_t k = c->first[d]; k < c->first[d + 1]; k++) {
            const struct ckpt_axis *a = &c->piece->axis[c->axis[k]];
            uint64_t lo = span[d]->lo[k - c->first[d]];
            index += lo * c->step[k];
            src += lo * a->src;
            axis[k] = (struct ckpt_step_axis){span[d]->n[k - c->first[d]],
                                              c->step[k] * r->stride[d], a->src};
        }
        dst += (index - box->lo[d]) * r->stride[d];
    }
    return ckpt_region_read(&r->reader, r->cat->sources.ptr[c->piece->source], axis,
                            c->first[box->rank], (unsigned char *)r->read->buf + dst, src, err);
}

static int read_spans(struct box_request *r, const struct ckpt_span **span, uint32_t d,
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

/* The first and one past the last element of a box, row-major. */
static void box_range(const uint64_t *dim, const struct ckpt_box *box, uint64_t *ret_lo,
                      uint64_t *ret_hi)
{
    uint64_t unit[CKPT_MAX_RANK], lo = 0, last = 0;

    ckpt_shape_strides(dim, box->rank, unit);
    for (uint32_t d = 0; d < box->rank; d++) {
        lo += box->lo[d] * unit[d];
        last += (box->lo[d] + box->n[d] - 1) * unit[d];
    }
    *ret_lo = lo;
    *ret_hi = last + 1;
}

static void dense_strides(const struct ckpt_box *box, size_t esize, uint64_t *stride)
{
    ckpt_shape_strides(box->n, box->rank, stride);
    for (uint32_t d = 0; d < box->rank; d++)
        stride[d] *= esize;
}

static int read_stored(struct box_request *r, struct ckpt_err *err)
{
    const struct ckpt_tensor *t = r->read->tensor;
    const struct ckpt_span *span[CKPT_MAX_RANK];
    uint64_t lo, hi;

    box_range(t->dim, &r->read->box, &lo, &hi);
    dense_strides(&r->read->box, r->reader.esize, r->stride);
    for (size_t i = ckpt_tensor_first_piece(t, lo); i < t->npiece && t->piece[i].dst < hi; i++)
        if (clip_piece(&r->clip, &t->piece[i], t->dim, &r->read->box) &&
            read_spans(r, span, 0, err) < 0)
            return -1;
    return 0;
}

/* ---- computed tensors ---- */

/* A cast: the box of what is stored, then each element. */
static int read_cast(const struct ckpt_catalog *cat, const struct ckpt_tensor *from,
                     struct ckpt_reading *rd, const struct ckpt_box_read *read,
                     const struct ckpt_box_cost *cost, struct ckpt_err *err)
{
    const uint64_t numel = ckpt_box_numel(&read->box);
    ckpt_cleanup(ckpt_freep) void *raw = malloc(numel * ckpt_dtype_size(from->dtype));
    const struct ckpt_box_read inner = {from, read->box, raw};

    if (!raw)
        return ckpt_nomem(err);
    if (ckpt_boxes_pread(cat, rd, &inner, 1, cost, err) < 0)
        return -1;
    ckpt_dtype_cast(read->buf, read->tensor->dtype, raw, from->dtype, numel);
    return 0;
}

/* The innermost dimension of which the box has only a part; 0 if it has all of all. */
static uint32_t split_dim(const struct ckpt_tensor *t, const struct ckpt_box *box)
{
    uint32_t d = box->rank;

    while (d > 1 && box->n[d - 1] == t->dim[d - 1])
        d--;
    return d ? d - 1 : 0;
}

/* Other values are made row by row: whole rows of the dimensions that the box has only a part of,
 * several at once, of which the box's part is kept. */
static int read_rows(const struct ckpt_catalog *cat, struct ckpt_reading *rd,
                     const struct ckpt_box_read *read, struct ckpt_err *err)
{
    const struct ckpt_tensor *t = read->tensor;
    const struct ckpt_box *box = &read->box;
    const size_t esize = ckpt_dtype_size(t->dtype);
    uint64_t unit[CKPT_MAX_RANK + 1], dense[CKPT_MAX_RANK], index[CKPT_MAX_RANK] = {0};
    const uint32_t d = split_dim(t, box), outer = d ? d - 1 : 0;
    unsigned char *out = read->buf;

    ckpt_shape_strides(t->dim, box->rank, unit);
    dense_strides(box, esize, dense);
    if (box->rank == 0 || d == 0) { /* one range */
        uint64_t lo, hi;
        box_range(t->dim, box, &lo, &hi);
        return ckpt_tensor_pread(cat, t, rd, out, (hi - lo) * esize, lo * esize, err);
    }
    const uint64_t row = unit[outer] * esize; /* a step of `outer`, of which the box has a part */
    const uint64_t step = ckpt_max_u64(1, CHUNK_BYTES / row);
    ckpt_cleanup(ckpt_freep) unsigned char *rows = malloc(ckpt_min_u64(step, box->n[outer]) * row);
    if (!rows)
        return ckpt_nomem(err);
    for (;;) {
        uint64_t n = ckpt_min_u64(step, box->n[outer] - index[outer]), lo = 0;
        struct ckpt_step_axis axis[2] = {{n, dense[outer], row},
                                         {box->n[d] * unit[d], esize, esize}};
        struct ckpt_ndcopy copy;
        for (uint32_t k = 0; k <= outer; k++)
            lo += (box->lo[k] + index[k]) * unit[k];
        if (ckpt_tensor_pread(cat, t, rd, rows, n * row, lo * esize, err) < 0)
            return -1;
        ckpt_ndcopy_init(&copy, axis, 2, esize);
        ckpt_ndcopy_run(&copy, out, rows + box->lo[d] * unit[d] * esize);
        out += n * dense[outer];
        index[outer] += n;
        for (uint32_t k = outer; index[k] == box->n[k];) {
            if (k == 0)
                return 0;
            index[k--] = 0;
            index[k]++;
        }
    }
}

/* ---- both ---- */

const struct ckpt_tensor *ckpt_tensor_stored(const struct ckpt_catalog *cat,
                                             const struct ckpt_tensor *t,
                                             const struct ckpt_catalog **ret_cat)
{
    *ret_cat = cat;
    if (t->value && ckpt_value_is_cast(t->value)) {
        *ret_cat = t->value->arg[0].cat;
        return t->value->arg[0].tensor;
    }
    return t;
}

bool ckpt_tensor_place(const struct ckpt_tensor *t, uint64_t at, uint32_t *ret_source,
                       uint64_t *ret_off)
{
    struct ckpt_span span[CKPT_MAX_SPANS];
    uint64_t n[CKPT_MAX_AXES], stride[CKPT_MAX_AXES];

    for (size_t i = ckpt_tensor_first_piece(t, at); i < t->npiece && t->piece[i].dst <= at; i++) {
        const struct ckpt_piece *p = &t->piece[i];
        for (uint32_t j = 0; j < p->naxis; j++) {
            n[j] = p->axis[j].n;
            stride[j] = p->axis[j].dst;
        }
        if (ckpt_axes_clip(n, stride, p->naxis, at - p->dst, at - p->dst + 1, span) == 0)
            continue;
        *ret_source = p->source;
        *ret_off = p->src;
        for (uint32_t j = 0; j < p->naxis; j++)
            *ret_off += span[0].lo[j] * p->axis[j].src;
        return true;
    }
    return false;
}

static int read_one(const struct ckpt_catalog *cat, struct ckpt_reading *rd,
                    const struct ckpt_box_read *read, const struct ckpt_box_cost *cost,
                    struct box_request *r, struct ckpt_err *err)
{
    const struct ckpt_catalog *from;
    const struct ckpt_tensor *stored = ckpt_tensor_stored(cat, read->tensor, &from);

    if (ckpt_box_numel(&read->box) == 0)
        return 0;
    if (stored != read->tensor)
        return read_cast(from, stored, rd, read, cost, err);
    if (read->tensor->value)
        return read_rows(cat, rd, read, err);
    r->read = read;
    r->reader.esize = ckpt_dtype_size(read->tensor->dtype);
    return read_stored(r, err);
}

static int read_all(const struct ckpt_catalog *cat, struct ckpt_reading *rd,
                    const struct ckpt_box_read *read, size_t n, const struct ckpt_box_cost *cost,
                    bool cached, struct ckpt_err *err)
{
    struct ckpt_batch batch;
    struct ckpt_region_cache cache = {0};
    struct box_request r;
    int result = 0;

    r.cat = cat;
    r.reader = (struct ckpt_region_reader){&batch, 1, cost->gap, cost->bound, cost->run, &cache};
    ckpt_batch_init(&batch);
    batch.cached = cached;
    batch.route = cost->route;
    for (size_t i = 0; i < n && result == 0; i++)
        result = read_one(cat, rd, &read[i], cost, &r, err);
    if (result == 0)
        result = ckpt_batch_finish(&batch, err);
    if (result < 0 && batch.missed)
        result = 1;
    if (rd && rd->stats && result <= 0) {
        atomic_fetch_add_explicit(&rd->stats->source_reads, batch.nread, memory_order_relaxed);
        atomic_fetch_add_explicit(&rd->stats->source_bytes, batch.nbyte, memory_order_relaxed);
    }
    ckpt_batch_release(&batch);
    ckpt_region_cache_release(&cache);
    return result;
}

int ckpt_boxes_pread(const struct ckpt_catalog *cat, struct ckpt_reading *rd,
                     const struct ckpt_box_read *read, size_t n, const struct ckpt_box_cost *cost,
                     struct ckpt_err *err)
{
    return read_all(cat, rd, read, n, cost, false, err);
}

int ckpt_boxes_pread_cached(const struct ckpt_catalog *cat, struct ckpt_reading *rd,
                            const struct ckpt_box_read *read, size_t n,
                            const struct ckpt_box_cost *cost, struct ckpt_err *err)
{
    for (size_t i = 0; i < n; i++)
        if (read[i].tensor->value)
            return 1;
    return read_all(cat, rd, read, n, cost, true, err);
}
