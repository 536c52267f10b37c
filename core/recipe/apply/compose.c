/* SPDX-License-Identifier: Apache-2.0 */
/* Taking pieces apart into boxes, and folding boxes into pieces. */
#include "recipe/apply/instance.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "base/sort.h"
#include "tensor/box.h"
#include "tensor/catalog.h"

enum { MOST_BOXES = 1 << 20 };

/* ---- boxes ---- */

/* Which dimension an axis steps in; `rank` if none. Dimensions of size 1 have no steps. */
static uint32_t dim_of(uint64_t step, const uint64_t *unit, const uint64_t *dim, uint32_t rank)
{
    for (uint32_t d = 0; d < rank; d++)
        if (dim[d] > 1 && step >= unit[d] && step < unit[d] * dim[d])
            return d;
    return rank;
}

/* The piece, with its axes divided: one of unit step for each dimension, and the others, whose
 * values are counted through. */
struct parts {
    struct ckpt_axis box[CKPT_MAX_RANK], rest[CKPT_MAX_AXES];
    uint32_t nrest;
    uint64_t nbox;
};

static bool divide(const struct ckpt_piece *piece, const uint64_t *dim, uint32_t rank,
                   struct parts *out)
{
    uint64_t unit[CKPT_MAX_RANK];

    ckpt_shape_strides(dim, rank, unit);
    out->nrest = 0;
    out->nbox = 1;
    for (uint32_t d = 0; d < rank; d++)
        out->box[d] = (struct ckpt_axis){1, unit[d], 0};
    for (uint32_t a = 0; a < piece->naxis; a++) {
        const struct ckpt_axis *axis = &piece->axis[a];
        const uint32_t d = axis->n > 1 ? dim_of(axis->dst, unit, dim, rank) : rank;
        if (axis->n == 1)
            continue;
        if (d == rank)
            return false;
        if (axis->dst == unit[d] && out->box[d].n == 1) {
            out->box[d] = *axis;
            continue;
        }
        out->rest[out->nrest++] = *axis;
        if (axis->n > MOST_BOXES || (out->nbox *= axis->n) > MOST_BOXES)
            return false;
    }
    return true;
}

int ckpt_compose_boxes(const struct ckpt_tensor *t, const struct ckpt_piece *piece,
                       int (*take)(void *ctx, const struct ckpt_piece *box, struct ckpt_err *err),
                       void *ctx, struct ckpt_err *err)
{
    struct parts parts;

    if (!divide(piece, t->dim, t->rank, &parts))
        return ckpt_fail(err, CKPT_UNSUPPORTED,
                         "tensor '%s' has a piece that is not made of boxes, or of more than %d",
                         t->name, MOST_BOXES);
    for (uint64_t i = 0; i < parts.nbox; i++) {
        struct ckpt_piece box = {.dst = piece->dst,
                                 .src = piece->src,
                                 .axis = parts.box,
                                 .naxis = t->rank,
                                 .source = piece->source};
        uint64_t left = i;
        for (uint32_t a = parts.nrest; a-- > 0; left /= parts.rest[a].n) {
            box.dst += left % parts.rest[a].n * parts.rest[a].dst;
            box.src += left % parts.rest[a].n * parts.rest[a].src;
        }
        if (take(ctx, &box, err) < 0)
            return -1;
    }
    return 0;
}

/* ---- folding ---- */

static bool same_axes(const struct ckpt_piece_draft *a, const struct ckpt_piece_draft *b)
{
    return a->source == b->source && a->naxis == b->naxis &&
           memcmp(a->axis, b->axis, a->naxis * sizeof *a->axis) == 0;
}

/* Does b follow a by the same steps as c follows b? */
static bool same_step(const struct ckpt_piece_draft *a, const struct ckpt_piece_draft *b,
                      const struct ckpt_piece_draft *c)
{
    return c->dst - b->dst == b->dst - a->dst && c->src - b->src == b->src - a->src;
}

/* The pieces from p on that differ by equal steps; they are a piece with one axis more. */
static size_t run_length(const struct ckpt_piece_draft *p, size_t n)
{
    size_t k = 1;

    if (n < 2 || !same_axes(&p[0], &p[1]) || p[1].dst <= p[0].dst || p[1].src < p[0].src ||
        p->naxis == CKPT_MAX_AXES)
        return 1;
    for (k = 2; k < n && same_axes(&p[0], &p[k]) && same_step(&p[k - 2], &p[k - 1], &p[k]);)
        k++;
    return k;
}

/* Two axes that count on from each other within one dimension are one. */
static void join_axes(struct ckpt_piece_draft *p, const uint64_t *unit, const uint64_t *dim,
                      uint32_t rank)
{
    uint32_t n = 0;

    for (uint32_t a = 0; a < p->naxis; a++) {
        const struct ckpt_axis next = p->axis[a];
        struct ckpt_axis *last = n ? &p->axis[n - 1] : NULL;
        if (last && next.n == 1 && p->naxis > 1)
            continue;
        if (last && last->n == 1) {
            *last = next;
            continue;
        }
        if (last && last->dst == next.n * next.dst && last->src == next.n * next.src &&
            dim_of(last->dst, unit, dim, rank) == dim_of(next.dst, unit, dim, rank)) {
            *last = (struct ckpt_axis){last->n * next.n, next.dst, next.src};
            continue;
        }
        p->axis[n++] = next;
    }
    p->naxis = n;
}

/* Add the axis where it nests, slowest first. False: it does not, or steps in no dimension. */
static bool add_axis(struct ckpt_piece_draft *p, struct ckpt_axis axis, const uint64_t *unit,
                     const uint64_t *dim, uint32_t rank)
{
    const uint32_t d = dim_of(axis.dst, unit, dim, rank);
    uint32_t at = 0;

    if (d == rank ||
        p->dst / unit[d] % dim[d] * unit[d] + (axis.n - 1) * axis.dst >= unit[d] * dim[d])
        return false;
    while (at < p->naxis && p->axis[at].n > 1 && p->axis[at].dst > axis.dst)
        at++;
    if (at > 0 && p->axis[at - 1].dst < axis.n * axis.dst)
        return false;
    for (uint32_t a = at; a < p->naxis; a++)
        if (p->axis[a].n > 1 && axis.dst < p->axis[a].n * p->axis[a].dst)
            return false;
    memmove(&p->axis[at + 1], &p->axis[at], (p->naxis - at) * sizeof *p->axis);
    p->axis[at] = axis;
    p->naxis++;
    join_axes(p, unit, dim, rank);
    return true;
}

static int draft_cmp(const void *a, const void *b)
{
    const struct ckpt_piece_draft *x = a, *y = b;

    return ckpt_u64_cmp(x->dst, y->dst);
}

/* Does b go on where a ends, in the tensor and in the source, along the slowest axis of both? */
static bool goes_on(const struct ckpt_piece_draft *a, const struct ckpt_piece_draft *b,
                    const uint64_t *unit, const uint64_t *dim, uint32_t rank)
{
    const struct ckpt_axis *x = &a->axis[0], *y = &b->axis[0];

    if (a->source != b->source || a->naxis != b->naxis || x->dst != y->dst || x->src != y->src ||
        b->dst != a->dst + x->n * x->dst || b->src != a->src + x->n * x->src ||
        memcmp(&a->axis[1], &b->axis[1], (a->naxis - 1) * sizeof *x) != 0)
        return false;
    const uint32_t d = dim_of(x->dst, unit, dim, rank);
    return d < rank &&
           a->dst / unit[d] % dim[d] * unit[d] + (x->n + y->n - 1) * x->dst < unit[d] * dim[d];
}

/* Join pieces that follow each other, as the queries, keys and values of a group. */
static size_t join_neighbours(struct ckpt_piece_draft *piece, size_t n, const uint64_t *unit,
                              const uint64_t *dim, uint32_t rank)
{
    size_t kept = n ? 1 : 0;

    ckpt_sort(piece, n, draft_cmp);
    for (size_t i = 1; i < n; i++) {
        struct ckpt_piece_draft *last = &piece[kept - 1];
        if (last->naxis && piece[i].naxis && goes_on(last, &piece[i], unit, dim, rank))
            last->axis[0].n += piece[i].axis[0].n;
        else
            piece[kept++] = piece[i];
    }
    return kept;
}

/* One round over all pieces. Pieces of equal axes whose distances are equal become one piece with
 * an axis more; the next round may find such a row of rows:
 *
 *      tensor   0    8   16  |  64   72   80        round 1: two pieces of 3 steps (8, 100)
 *      source   0  100  200  | 900 1000 1100        round 2: one piece of 2 steps (64, 900) of
 * those
 */
static size_t fold_once(struct ckpt_piece_draft *piece, size_t n, const uint64_t *unit,
                        const uint64_t *dim, uint32_t rank)
{
    size_t kept = 0;

    for (size_t i = 0, k; i < n; i += k) {
        struct ckpt_piece_draft p = piece[i];
        k = run_length(&piece[i], n - i);
        if (k > 1 && !add_axis(&p,
                               (struct ckpt_axis){k, piece[i + 1].dst - piece[i].dst,
                                                  piece[i + 1].src - piece[i].src},
                               unit, dim, rank))
            k = 1;
        piece[kept++] = p;
    }
    return kept;
}

size_t ckpt_compose_fold(struct ckpt_piece_draft *piece, size_t n, const uint64_t *dim,
                         uint32_t rank)
{
    uint64_t unit[CKPT_MAX_RANK];
    size_t before;

    ckpt_shape_strides(dim, rank, unit);
    n = join_neighbours(piece, n, unit, dim, rank);
    do {
        before = n;
        n = fold_once(piece, n, unit, dim, rank);
    } while (n < before);
    return n;
}
