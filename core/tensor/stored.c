/* SPDX-License-Identifier: Apache-2.0 */
/* Box -> the part of each piece that lies in it -> strided regions. */
#include "tensor/stored.h"

#include <assert.h>

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
        src += off;
        dst += (c->at[d] + index - box->lo[d]) * r->stride[d];
        for (uint32_t k = c->first[d]; k < c->first[d + 1]; k++)
            axis[k] =
                (struct ckpt_step_axis){span[d]->n[k - c->first[d]], c->step[k] * r->stride[d],
                                        c->piece->axis[c->axis[k]].src};
    }
    return ckpt_strided_read(r->reader, r->read->tensor->cat->sources.ptr[c->piece->source], axis,
                             c->first[box->rank], (unsigned char *)r->read->buf + dst, src, err);
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

    reader->esize = ckpt_dtype_size(t->dtype);
    r.reader = reader;
    r.read = read;
    ckpt_box_range(&read->box, dim, &lo, &hi);
    ckpt_box_strides(&read->box, reader->esize, r.stride);
    for (size_t i = ckpt_tensor_first_piece(t, lo); i < t->npiece && t->piece[i].dst < hi; i++)
        if (clip_piece(&r.clip, &t->piece[i], dim, &read->box) && read_spans(&r, span, 0, err) < 0)
            return -1;
    return 0;
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
