/* SPDX-License-Identifier: Apache-2.0 */
/* Slices of pieces: the axes in the dimension are clipped, all others stay. */
#include "tensor/slice.h"

#include <string.h>

#include "tensor/value.h"

struct slice {
    struct ckpt_catalog *cat;
    const struct ckpt_tensor *t;
    uint32_t dim;
    uint64_t from[CKPT_MAX_RANK], to[CKPT_MAX_RANK]; /* strides in elements, of t and the slice */
    CKPT_VEC(struct ckpt_piece_draft) out;
};

static void slice_release(struct slice *s) { ckpt_vec_release(&s->out); }

/* The dimension in which an axis steps; axes of one element step nowhere. */
static uint32_t dim_of(const struct slice *s, const struct ckpt_axis *a)
{
    uint32_t d = 0;

    while (d + 1 < s->t->rank && (s->t->dim[d] == 1 || a->dst < s->from[d]))
        d++;
    return d;
}

/* Begin a piece without its axes in the dimension. */
static void begin(const struct slice *s, const struct ckpt_piece *p, struct ckpt_piece_draft *out)
{
    *out = (struct ckpt_piece_draft){.src = p->src, .source = p->source};
    for (uint32_t d = 0; d < s->t->rank; d++)
        if (d != s->dim)
            out->dst += p->dst / s->from[d] % s->t->dim[d] * s->to[d];
}

/* The part of a piece in one span of its axes in the dimension; `at` is the place in the slice of
 * the span's origin, possibly before it. */
static int add_span(struct slice *s, const struct ckpt_piece *p, const struct ckpt_span *span,
                    uint64_t at, struct ckpt_err *err)
{
    struct ckpt_piece_draft *out;
    uint32_t k = 0;

    if (ckpt_vec_add(&s->out, &out) < 0)
        return ckpt_nomem(err);
    begin(s, p, out);
    for (uint32_t a = 0; a < p->naxis; a++) {
        const struct ckpt_axis *axis = &p->axis[a];
        const uint32_t d = dim_of(s, axis);
        struct ckpt_axis mine = {axis->n, axis->dst / s->from[d] * s->to[d], axis->src};
        if (axis->n > 1 && d == s->dim) {
            at += span->lo[k] * (axis->dst / s->from[d]);
            out->src += span->lo[k] * axis->src;
            mine.n = span->n[k++];
        }
        out->axis[out->naxis++] = mine;
    }
    out->dst += at * s->to[s->dim];
    return 0;
}

/* Add the indices [part->lo, part->lo + part->n) of a piece, which begin at `at` in the slice. */
static int add_part(struct slice *s, const struct ckpt_piece *p, const struct ckpt_interval *part,
                    uint64_t at, struct ckpt_err *err)
{
    const uint64_t base = p->dst / s->from[s->dim] % s->t->dim[s->dim], end = part->lo + part->n;
    struct ckpt_span span[CKPT_MAX_SPANS];
    uint64_t n[CKPT_MAX_AXES], step[CKPT_MAX_AXES];
    uint32_t k = 0;

    if (end <= base)
        return 0;
    for (uint32_t a = 0; a < p->naxis; a++)
        if (p->axis[a].n > 1 && dim_of(s, &p->axis[a]) == s->dim) {
            n[k] = p->axis[a].n;
            step[k++] = p->axis[a].dst / s->from[s->dim];
        }
    const size_t nspan =
        ckpt_axes_clip(n, step, k, part->lo > base ? part->lo - base : 0, end - base, span);
    for (size_t i = 0; i < nspan; i++) /* the sum may be below 0 for a moment: it wraps */
        if (add_span(s, p, &span[i], at + base - part->lo, err) < 0)
            return -1;
    return 0;
}

static int slice_stored(struct slice *s, const struct ckpt_interval *part, size_t npart,
                        struct ckpt_tensor *ret, struct ckpt_err *err)
{
    uint64_t at = 0;

    for (size_t i = 0; i < npart; at += part[i++].n)
        for (size_t k = 0; k < s->t->npiece && part[i].n; k++)
            if (add_part(s, &s->t->piece[k], &part[i], at, err) < 0)
                return -1;
    return ckpt_tensor_set_pieces(s->cat, ret, s->out.ptr, s->out.len, err);
}

/* An operator that is applied to each element is applied to those of the slice. */
static int slice_value(struct slice *s, const struct ckpt_interval *part, size_t npart,
                       struct ckpt_tensor *ret, struct ckpt_err *err)
{
    const struct ckpt_value *of = s->t->value;
    struct ckpt_value *v = ckpt_arena_alloc(&s->cat->arena, sizeof *v);
    const struct ckpt_tensor **arg = ckpt_arena_alloc(&s->cat->arena, of->narg * sizeof *arg);
    struct ckpt_tensor *operand = ckpt_arena_alloc(&s->cat->arena, of->narg * sizeof *operand);
    bool good = of->ops->elements || of->ops->combine;

    if (!v || !arg || !operand)
        return ckpt_nomem(err);
    for (uint32_t i = 0; i < of->narg; i++)
        good &= of->arg[i]->cat == s->cat;
    if (!good)
        return ckpt_fail(err, CKPT_UNSUPPORTED,
                         "'%s' is computed (%s): it can't be divided along dimension %u",
                         s->t->name, of->ops->name, s->dim);
    for (uint32_t i = 0; i < of->narg; i++) {
        if (ckpt_tensor_slice(s->cat, of->arg[i], s->dim, part, npart, &operand[i], err) < 0)
            return -1;
        arg[i] = &operand[i];
    }
    *v = *of;
    v->arg = arg;
    ret->value = v;
    return 0;
}

int ckpt_tensor_slice(struct ckpt_catalog *cat, const struct ckpt_tensor *t, uint32_t dim,
                      const struct ckpt_interval *part, size_t npart, struct ckpt_tensor *ret,
                      struct ckpt_err *err)
{
    ckpt_cleanup(slice_release) struct slice s = {.cat = cat, .t = t, .dim = dim};
    uint64_t *own = ckpt_arena_alloc(&cat->arena, t->rank * sizeof *own);
    struct ckpt_tensor out = *t;

    if (!own)
        return ckpt_nomem(err);
    memcpy(own, t->dim, t->rank * sizeof *own);
    own[dim] = 0;
    for (size_t i = 0; i < npart; i++)
        own[dim] += part[i].n;
    out.dim = own;
    out.piece = NULL;
    out.npiece = 0;
    (void)ckpt_shape_numel(own, t->rank, &out.numel); /* not more than t has */
    ckpt_shape_strides(t->dim, t->rank, s.from);
    ckpt_shape_strides(own, t->rank, s.to);
    if (out.numel && (t->value ? slice_value(&s, part, npart, &out, err)
                               : slice_stored(&s, part, npart, &out, err)) < 0)
        return -1;
    *ret = out;
    return 0;
}
