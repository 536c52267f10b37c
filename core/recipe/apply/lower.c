/* SPDX-License-Identifier: Apache-2.0 */
/* Converting the terms of a rule's instance to boxes of its sources. The work depends on the number
 * of boxes, not of elements. */
#include "recipe/apply/instance.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_PIECES = 1 << 20 };

/* One dimension of one tensor in one term: offset and free axes, slowest first. */
struct line {
    uint64_t offset;
    uint32_t k;
    uint8_t axis[CKPT_MAX_AXES];
    uint64_t n[CKPT_MAX_AXES], stride[CKPT_MAX_AXES];
};

/* Positions of a term's axes in the source, while boxes are cut. */
struct ckpt_cutter {
    struct ckpt_instance *in;
    const struct ckpt_source_use *use; /* NULL: of no source, zeros */
    uint32_t rank;                     /* of the target */
    uint64_t unit[CKPT_MAX_RANK];      /* strides of the target in elements */
    struct line to[CKPT_MAX_RANK], from[CKPT_MAX_RANK];
    struct {
        uint8_t dim, index; /* in `from` */
    } where[CKPT_ALL_AXES];
    struct ckpt_span span[CKPT_MAX_RANK][CKPT_MAX_SPANS];
    size_t nspan[CKPT_MAX_RANK];
    uint64_t esize;
    ckpt_drafts *out;
    uint64_t numel; /* number of elements so far */
    bool composed;  /* a piece of a source was made by an earlier recipe, not by a reader */
};

static bool fixed_at(const struct ckpt_cutter *c, uint32_t axis, uint64_t *ret)
{
    if (axis >= CKPT_REST_AXIS)
        return false;
    if (c->in->bound >> axis & 1)
        *ret = c->in->at[axis];
    else if (c->use && c->use->bound >> axis & 1)
        *ret = c->use->at[axis];
    else
        return false;
    return true;
}

static int line_of(const struct ckpt_cutter *c, const struct ckpt_dims *d, uint32_t k,
                   const struct ckpt_term *term, struct line *out, struct ckpt_err *err)
{
    struct ckpt_layout lay = {.n = 1};
    uint64_t at, size;

    if (d->d[k].f)
        ckpt_factor_layout(d->d[k].f, term, &c->in->sizes, &lay);
    else
        lay.at[0] = (struct ckpt_layout_axis){1, (uint8_t)(CKPT_REST_AXIS + d->d[k].rest)};
    out->offset = lay.offset;
    out->k = 0;
    for (uint32_t i = 0; i < lay.n; i++) {
        uint32_t axis = lay.at[i].axis;
        if (fixed_at(c, axis, &at)) {
            out->offset += at * lay.at[i].stride;
            continue;
        }
        if (axis >= CKPT_REST_AXIS)
            size = c->in->rest[axis - CKPT_REST_AXIS];
        else if (!ckpt_axis_size(&c->in->sizes, axis, &size))
            return ckpt_fail(err, CKPT_MISSING, "'%s': the size of axis '%s' is not known",
                             c->in->target, c->in->rule->scope->axis[axis].name);
        if (out->k == CKPT_MAX_AXES)
            return ckpt_fail(err, CKPT_LIMIT, "'%s': more than %d axes in one dimension",
                             c->in->target, CKPT_MAX_AXES);
        out->axis[out->k] = (uint8_t)axis;
        out->n[out->k] = size;
        out->stride[out->k++] = lay.at[i].stride;
    }
    return 0;
}

static int push_axis(const struct ckpt_cutter *c, struct ckpt_piece_draft *p, struct ckpt_axis axis,
                     struct ckpt_err *err)
{
    if (p->naxis == CKPT_MAX_AXES)
        return ckpt_fail(err, CKPT_LIMIT, "'%s' would need more than %d axes", c->in->target,
                         CKPT_MAX_AXES);
    p->axis[p->naxis++] = axis;
    return 0;
}

/* Add the elements of one span in each source dimension: span which[d] of dimension d. A dimension
 * is made of axes, and a box of the source has an interval of it, which ckpt_axes_clip has divided
 * into spans, each a box of axis values. Of a dimension "(h d)" with h 2 and d 3, and a box with
 * the indices [1, 5):
 *
 *      d 0   1   2
 *   h 0  0 [ 1   2 ]     span 0: h = 0, d = 1, 2
 *   h 1 [3   4 ] 5       span 1: h = 1, d = 0, 1
 *
 * The choice of one span for each dimension is a box of axis values, too. All of its elements are
 * one piece: an axis of the rule steps through its target dimension and its source dimension at
 * once, whatever the order in which the two sides name the axes. Axes of a target dimension that
 * continue each other on both sides become one. */
static int emit(struct ckpt_cutter *c, const struct ckpt_piece *piece, const struct ckpt_box *box,
                const size_t *which, struct ckpt_err *err)
{
    struct ckpt_piece_draft *p;
    uint64_t numel = 1;

    if (c->out->len == MAX_PIECES)
        return ckpt_fail(err, CKPT_LIMIT, "'%s' would need more than %d pieces", c->in->target,
                         MAX_PIECES);
    if (ckpt_vec_reserve(c->out, 1) < 0)
        return ckpt_nomem(err);
    p = &c->out->ptr[c->out->len];
    p->source = piece->source;
    p->src = piece->src;
    p->dst = 0;
    p->naxis = 0;
    for (uint32_t d = 0; d < box->rank; d++) {
        const struct line *l = &c->from[d];
        uint64_t index = l->offset;
        for (uint32_t i = 0; i < l->k; i++)
            index += c->span[d][which[d]].lo[i] * l->stride[i];
        p->src += (index - box->lo[d]) * piece->axis[d].src;
    }
    for (uint32_t t = 0; t < c->rank; t++) {
        const struct line *l = &c->to[t];
        const uint32_t first = p->naxis;
        uint64_t index = l->offset;
        for (uint32_t i = 0; i < l->k; i++) {
            const uint32_t d = c->where[l->axis[i]].dim, j = c->where[l->axis[i]].index;
            const struct ckpt_span *sp = &c->span[d][which[d]];
            const struct ckpt_axis a = {sp->n[j], l->stride[i] * c->unit[t],
                                        c->from[d].stride[j] * piece->axis[d].src};
            struct ckpt_axis *last = p->naxis > first ? &p->axis[p->naxis - 1] : NULL;
            index += sp->lo[j] * l->stride[i];
            numel *= a.n;
            if (a.n == 1)
                continue;
            if (last && last->dst == a.n * a.dst && last->src == a.n * a.src) {
                *last = (struct ckpt_axis){last->n * a.n, a.dst, a.src};
                continue;
            }
            if (push_axis(c, p, a, err) < 0)
                return -1;
        }
        p->dst += index * c->unit[t];
        const struct ckpt_axis one = {1, c->unit[t], c->unit[t] * c->esize};
        if (p->naxis == first && push_axis(c, p, one, err) < 0)
            return -1;
    }
    c->numel += numel;
    c->out->len++;
    return 0;
}

/* Add all elements of the term that are in one box of the source. */
static int cut_box(void *ctx, const struct ckpt_piece *piece, struct ckpt_err *err)
{
    struct ckpt_cutter *c = ctx;
    const struct ckpt_tensor *t = c->use->tensor;
    struct ckpt_box box;
    size_t which[CKPT_MAX_RANK] = {0};

    if (!ckpt_piece_box(piece, t->dim, t->rank, &box))
        return ckpt_fail(err, CKPT_UNSUPPORTED, "tensor '%s' has a piece that is not a box",
                         t->name);
    for (uint32_t d = 0; d < t->rank; d++) {
        const struct line *l = &c->from[d];
        uint64_t lo = box.lo[d] > l->offset ? box.lo[d] - l->offset : 0;
        uint64_t hi = box.lo[d] + box.n[d];
        if (hi <= l->offset)
            return 0;
        c->nspan[d] = ckpt_axes_clip(l->n, l->stride, l->k, lo, hi - l->offset, c->span[d]);
        if (c->nspan[d] == 0)
            return 0;
    }
    for (;;) {
        if (emit(c, piece, &box, which, err) < 0)
            return -1;
        uint32_t d = t->rank;
        while (d > 0 && ++which[d - 1] == c->nspan[d - 1])
            which[--d] = 0;
        if (d == 0)
            return 0;
    }
}

static int cut_term(struct ckpt_cutter *c, struct ckpt_err *err)
{
    const struct ckpt_tensor *t = c->use->tensor;
    uint64_t unit[CKPT_MAX_RANK], first = 0, last = 0;
    struct ckpt_box box;

    ckpt_shape_strides(t->dim, t->rank, unit);
    for (uint32_t d = 0; d < t->rank; d++) {
        const struct line *l = &c->from[d];
        uint64_t end = l->offset;
        for (uint32_t i = 0; i < l->k; i++) {
            if (l->n[i] == 0)
                return 0;
            end += (l->n[i] - 1) * l->stride[i];
            c->where[l->axis[i]].dim = (uint8_t)d;
            c->where[l->axis[i]].index = (uint8_t)i;
        }
        first += l->offset * unit[d];
        last += end * unit[d];
    }
    for (size_t i = ckpt_tensor_first_piece(t, first); i < t->npiece && t->piece[i].dst <= last;
         i++) {
        const bool is_box = ckpt_piece_box(&t->piece[i], t->dim, t->rank, &box);
        c->composed |= !is_box;
        if ((is_box ? cut_box(c, &t->piece[i], err)
                    : ckpt_compose_boxes(t, &t->piece[i], cut_box, c, err)) < 0)
            return -1;
    }
    return 0;
}

static int cut_use(struct ckpt_cutter *c, const struct ckpt_term *to, struct ckpt_err *err)
{
    const struct ckpt_side *from = &c->in->rule->from[to->side];
    const struct ckpt_term *term = &from->pattern.term[to->partner];
    struct ckpt_dims d;

    if (!ckpt_dims_of(&c->in->rule->to[c->in->side], 0, c->rank, &d))
        return ckpt_fail(err, CKPT_CONFLICT, "'%s': rank", c->in->target);
    for (uint32_t k = 0; k < c->rank; k++)
        if (line_of(c, &d, k, to, &c->to[k], err) < 0)
            return -1;
    if (!ckpt_dims_of(from, c->use->spelling, c->use->tensor->rank, &d))
        return ckpt_instance_rank_error(c->in, c->use, err);
    for (uint32_t k = 0; k < c->use->tensor->rank; k++)
        if (line_of(c, &d, k, term, &c->from[k], err) < 0)
            return -1;
    return cut_term(c, err);
}

/* Add the elements of a term that no source has: zeros. */
static int fill_term(struct ckpt_cutter *c, const struct ckpt_term *to, struct ckpt_err *err)
{
    struct ckpt_piece_draft *p;
    uint64_t numel = 1;
    struct ckpt_dims d;

    if (!ckpt_dims_of(&c->in->rule->to[c->in->side], 0, c->rank, &d))
        return ckpt_fail(err, CKPT_CONFLICT, "'%s': rank", c->in->target);
    if (ckpt_vec_add(c->out, &p) < 0)
        return ckpt_nomem(err);
    *p = (struct ckpt_piece_draft){.source = c->in->zeros};
    for (uint32_t k = 0; k < c->rank; k++) {
        struct line *l = &c->to[k];
        if (line_of(c, &d, k, to, l, err) < 0)
            return -1;
        p->dst += l->offset * c->unit[k];
        for (uint32_t i = 0; i < l->k; i++) {
            const struct ckpt_axis axis = {l->n[i], l->stride[i] * c->unit[k], 0};
            if (push_axis(c, p, axis, err) < 0)
                return -1;
            numel *= l->n[i];
        }
        if (l->k == 0 && p->naxis < CKPT_MAX_AXES)
            p->axis[p->naxis++] = (struct ckpt_axis){1, c->unit[k], 0};
    }
    if (numel == 0)
        c->out->len--;
    c->numel += numel;
    c->in->padded += numel;
    return 0;
}

void ckpt_instance_release(struct ckpt_instance *in)
{
    ckpt_vec_release(&in->use);
    free(in->cutter);
    in->cutter = NULL;
}

int ckpt_instance_lower(struct ckpt_instance *in, const uint64_t *dim, uint32_t rank,
                        ckpt_drafts *out, struct ckpt_err *err)
{
    const struct ckpt_pattern *p = &in->rule->to[in->side].pattern;
    uint64_t numel;

    if (!in->cutter && !(in->cutter = malloc(sizeof *in->cutter)))
        return ckpt_nomem(err);
    struct ckpt_cutter *c = in->cutter;
    if (!ckpt_shape_numel(dim, rank, &numel))
        return ckpt_fail(err, CKPT_LIMIT, "the size of '%s' overflows", in->target);
    c->in = in;
    c->rank = rank;
    c->out = out;
    c->numel = 0;
    c->composed = false;
    ckpt_shape_strides(dim, rank, c->unit);
    in->padded = 0;
    for (uint32_t k = 0; k < p->nterm && numel > 0; k++) {
        c->use = NULL;
        if (p->term[k].side == UINT16_MAX && fill_term(c, &p->term[k], err) < 0)
            return -1;
        for (size_t i = 0; i < in->use.len; i++) {
            if (in->use.ptr[i].side != p->term[k].side)
                continue;
            c->use = &in->use.ptr[i];
            c->esize = ckpt_dtype_size(c->use->tensor->dtype);
            if (cut_use(c, &p->term[k], err) < 0)
                return -1;
        }
    }
    if (numel > 0 && c->numel != numel)
        return ckpt_fail(err, CKPT_MISSING,
                         "'%s' has %" PRIu64 " elements; its sources give %" PRIu64 " of them",
                         in->target, numel, c->numel);
    if (c->composed || in->pad_to)
        out->len = ckpt_compose_fold(out->ptr, out->len, dim, rank);
    return 0;
}
