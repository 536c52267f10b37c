/* SPDX-License-Identifier: Apache-2.0 */
/* Box algebra: shapes, intersection, coverage, and clipping of mixed-radix axes. */
#include "tensor/box.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/ckd.h"
#include "base/sort.h"

bool ckpt_shape_numel(const uint64_t *dim, uint32_t rank, uint64_t *ret)
{
    uint64_t n = 1;
    bool over = false;

    for (uint32_t d = 0; d < rank; d++) {
        if (dim[d] == 0) {
            *ret = 0;
            return true;
        }
        over |= ckd_mul(&n, n, dim[d]);
    }
    *ret = n;
    return !over;
}

void ckpt_shape_strides(const uint64_t *dim, uint32_t rank, uint64_t *stride)
{
    uint64_t n = 1;

    for (uint32_t d = rank; d-- > 0;) {
        stride[d] = n;
        n *= dim[d];
    }
}

struct ckpt_shape_text ckpt_shape_text(const uint64_t *dim, uint32_t rank)
{
    struct ckpt_shape_text s = {"["};
    size_t len = 1;

    for (uint32_t d = 0; d < rank && len < sizeof s.text; d++)
        len += (size_t)snprintf(s.text + len, sizeof s.text - len, "%s%" PRIu64, d ? ", " : "",
                                dim[d]);
    if (len < sizeof s.text)
        (void)snprintf(s.text + len, sizeof s.text - len, "]");
    return s;
}

struct ckpt_box ckpt_box_whole(const uint64_t *dim, uint32_t rank)
{
    struct ckpt_box box = {.rank = rank};

    memcpy(box.n, dim, rank * sizeof *dim);
    return box;
}

uint64_t ckpt_box_numel(const struct ckpt_box *b)
{
    uint64_t n = 1;

    for (uint32_t d = 0; d < b->rank; d++)
        n *= b->n[d];
    return n;
}

bool ckpt_box_eq(const struct ckpt_box *a, const struct ckpt_box *b)
{
    return a->rank == b->rank && memcmp(a->lo, b->lo, a->rank * sizeof *a->lo) == 0 &&
           memcmp(a->n, b->n, a->rank * sizeof *a->n) == 0;
}

bool ckpt_box_within(const struct ckpt_box *b, const uint64_t *dim, uint32_t rank)
{
    if (b->rank != rank)
        return false;
    for (uint32_t d = 0; d < rank; d++)
        if (!ckpt_range_ok(b->lo[d], b->n[d], dim[d]))
            return false;
    return true;
}

void ckpt_box_range(const struct ckpt_box *b, const uint64_t *dim, uint64_t *ret_lo,
                    uint64_t *ret_hi)
{
    uint64_t unit[CKPT_MAX_RANK], lo = 0, last = 0;

    ckpt_shape_strides(dim, b->rank, unit);
    for (uint32_t d = 0; d < b->rank; d++) {
        lo += b->lo[d] * unit[d];
        last += (b->lo[d] + b->n[d] - 1) * unit[d];
    }
    *ret_lo = lo;
    *ret_hi = last + 1;
}

void ckpt_box_strides(const struct ckpt_box *b, size_t esize, uint64_t *stride)
{
    ckpt_shape_strides(b->n, b->rank, stride);
    for (uint32_t d = 0; d < b->rank; d++)
        stride[d] *= esize;
}

bool ckpt_box_intersect(const struct ckpt_box *a, const struct ckpt_box *b, struct ckpt_box *out)
{
    out->rank = a->rank;
    for (uint32_t d = 0; d < a->rank; d++) {
        uint64_t lo = ckpt_max_u64(a->lo[d], b->lo[d]);
        uint64_t hi = ckpt_min_u64(a->lo[d] + a->n[d], b->lo[d] + b->n[d]);
        if (lo >= hi)
            return false;
        out->lo[d] = lo;
        out->n[d] = hi - lo;
    }
    return true;
}

/* ---- coverage ---- */

/* Frameworks divide tensors into grids, often with a different grid for each part. So the boxes are
 * sorted along a dimension; if the intervals form separate groups, each group is checked alone, by
 * the next dimension; if no dimension separates a group, its boxes are compared pairwise, within a
 * budget.
 *
 *     +-------+
 *     |   0   |     by rows: {0}, {1, 2}
 *     +---+---+
 *     | 1 | 2 |     {1, 2} by columns: {1}, {2}
 *     +---+---+
 *
 * Disjoint boxes cover the tensor if they have as many elements as it has. */
struct cover {
    const struct ckpt_box *box;
    size_t nbox;
    const uint64_t *dim; /* of the tensor */
    uint32_t rank;
    uint64_t pairs_left;
    size_t bad; /* a box that overlaps an earlier one */
};

enum { MAX_PAIRS = 100 * 1000 * 1000 };

struct edge {
    uint64_t lo, hi;
    size_t index;
};

static int edge_cmp(const void *pa, const void *pb)
{
    const struct edge *a = pa, *b = pb;
    const int c = ckpt_u64_cmp(a->lo, b->lo);

    return c ? c : ckpt_u64_cmp(a->index, b->index);
}

enum outcome { DISJOINT, OVERLAP, TOO_MANY };

static enum outcome pairwise(struct cover *c, const struct edge *e, size_t n)
{
    struct ckpt_box out;

    for (size_t i = 0; i < n; i++)
        for (size_t j = i + 1; j < n && e[j].lo < e[i].hi; j++) {
            if (c->pairs_left-- == 0)
                return TOO_MANY;
            if (ckpt_box_intersect(&c->box[e[i].index], &c->box[e[j].index], &out)) {
                c->bad = ckpt_max_u64(e[i].index, e[j].index);
                return OVERLAP;
            }
        }
    return DISJOINT;
}

/* Are the boxes disjoint? The last `tried` dimensions did not separate them. */
static enum outcome disjoint(struct cover *c, struct edge *e, size_t n, uint32_t dim,
                             uint32_t tried)
{
    enum outcome result = DISJOINT;

    if (n < 2)
        return DISJOINT;
    if (tried == c->rank)
        return pairwise(c, e, n);
    for (size_t i = 0; i < n; i++) {
        e[i].lo = c->box[e[i].index].lo[dim];
        e[i].hi = e[i].lo + c->box[e[i].index].n[dim];
    }
    qsort(e, n, sizeof *e, edge_cmp);
    for (size_t begin = 0, end; begin < n && result == DISJOINT; begin = end) {
        uint64_t reach = e[begin].hi;
        for (end = begin + 1; end < n && e[end].lo < reach; end++)
            reach = ckpt_max_u64(reach, e[end].hi);
        bool separated = begin > 0 || end < n;
        result =
            disjoint(c, e + begin, end - begin, (dim + 1) % c->rank, separated ? 1 : tried + 1);
    }
    return result;
}

/* Is there a range of indices along some dimension that no box touches? */
static bool find_hole(const struct cover *c, struct edge *e, uint32_t d, uint64_t *ret_lo,
                      uint64_t *ret_hi)
{
    uint64_t reach = 0;

    for (size_t i = 0; i < c->nbox; i++)
        e[i] = (struct edge){c->box[i].lo[d], c->box[i].lo[d] + c->box[i].n[d], i};
    qsort(e, c->nbox, sizeof *e, edge_cmp);
    for (size_t i = 0; i < c->nbox; i++) {
        if (e[i].lo > reach) {
            *ret_lo = reach;
            *ret_hi = e[i].lo;
            return true;
        }
        reach = ckpt_max_u64(reach, e[i].hi);
    }
    *ret_lo = reach;
    *ret_hi = c->dim[d];
    return reach < c->dim[d];
}

static int fail_gap(const struct cover *c, struct edge *e, uint64_t missing, struct ckpt_err *err)
{
    uint64_t lo, hi, numel = 0;

    for (uint32_t d = 0; d < c->rank; d++)
        if (find_hole(c, e, d, &lo, &hi))
            return ckpt_fail(err, CKPT_MISSING,
                             "%s %" PRIu64 "..%" PRIu64 " of %" PRIu64 " are in no shard",
                             d == 0   ? "rows"
                             : d == 1 ? "columns"
                                      : "indices",
                             lo, hi, c->dim[d]);
    (void)ckpt_shape_numel(c->dim, c->rank, &numel);
    return ckpt_fail(err, CKPT_MISSING, "%" PRIu64 " of %" PRIu64 " elements are in no shard",
                     missing, numel);
}

int ckpt_boxes_cover(const uint64_t *dim, uint32_t rank, const struct ckpt_box *box, size_t nbox,
                     size_t *ret_bad, struct ckpt_err *err)
{
    struct cover c = {.box = box, .nbox = nbox, .dim = dim, .rank = rank, .pairs_left = MAX_PAIRS};
    uint64_t numel = 0, covered = 0;
    struct edge *e;
    size_t n = 0;
    int result = 0;

    *ret_bad = SIZE_MAX;
    (void)ckpt_shape_numel(dim, rank, &numel);
    if (!(e = malloc((nbox + 1) * sizeof *e)))
        return ckpt_nomem(err);
    for (size_t i = 0; i < nbox; i++)
        if (ckpt_box_numel(&box[i]) > 0)
            e[n++] = (struct edge){0, 1, i};
    switch (rank == 0 ? pairwise(&c, e, n) : disjoint(&c, e, n, 0, 0)) {
    case OVERLAP:
        *ret_bad = c.bad;
        result = ckpt_fail(err, CKPT_CONFLICT, "two shards hold the same elements");
        break;
    case TOO_MANY:
        result = ckpt_fail(err, CKPT_LIMIT, "its %zu shards form no regular layout", nbox);
        break;
    case DISJOINT:
        for (size_t i = 0; i < nbox; i++)
            covered += ckpt_box_numel(&box[i]);
        if (covered != numel)
            result = fail_gap(&c, e, numel - covered, err);
        break;
    }
    free(e);
    return result;
}

/* ---- axes ---- */

struct clip {
    const uint64_t *n, *stride;
    uint64_t width[CKPT_MAX_AXES + 1]; /* width[j]: largest sum over axes j.. plus 1 */
    uint32_t k;
    struct ckpt_span *out;
    size_t nout;
    uint64_t at[CKPT_MAX_AXES]; /* indices fixed so far */
};

/* Axis j runs over [lo, hi), slower ones are fixed, faster ones are full. */
static void emit(struct clip *c, uint32_t j, uint64_t lo, uint64_t hi)
{
    struct ckpt_span *s = &c->out[c->nout++];

    for (uint32_t a = 0; a < c->k; a++) {
        s->lo[a] = a < j ? c->at[a] : a == j ? lo : 0;
        s->n[a] = a < j ? 1 : a == j ? hi - lo : c->n[a];
    }
}

/* Add the tuples of axes j.. whose sums lie in [lo, hi), where lo < width[j], hi > 0 and lo < hi.
 * Of 4 x 3 indices with strides 4 and 1, for example, [5, 13) is a head, a body and a tail:
 *
 *      0   1   2
 *      4 [ 5   6 ]     head: index 1 of the slow axis, cut at its low end
 *    [ 8   9  10 ]     body: the indices of the slow axis that lie inside as a whole, one span
 *    [12] 13  14       tail: index 3, cut at its high end
 *
 * Head and tail are the same question about the faster axes. The head is cut at its low end only
 * and the tail at its high end only, so each adds one span per axis: with the body at most 2k - 1.
 * If both ends lie in one index, one of the two is all there is. */
static void clip_from(struct clip *c, uint32_t j, uint64_t lo, uint64_t hi)
{
    uint64_t s, inner, first, end;

    if (lo == 0 && hi >= c->width[j]) {
        emit(c, j, 0, j < c->k ? c->n[j] : 0);
        return;
    }
    /* not everything, so there is an axis to cut */
    s = c->stride[j];
    inner = c->width[j + 1];
    first = lo / s;
    if (lo % s != 0) { /* index `first` is cut at its low end */
        if (first < c->n[j] && lo % s < inner && first * s < hi) {
            c->at[j] = first;
            clip_from(c, j + 1, lo % s, hi - first * s);
        }
        first++;
    }
    end = hi < inner ? 0 : (hi - inner) / s + 1; /* indices below it end before hi */
    end = ckpt_min_u64(end, c->n[j]);
    if (first < end)
        emit(c, j, first, end);
    end = ckpt_max_u64(first, end);
    if (end < c->n[j] && end * s < hi) { /* cut at its high end */
        c->at[j] = end;
        clip_from(c, j + 1, 0, hi - end * s);
    }
}

size_t ckpt_axes_clip(const uint64_t *n, const uint64_t *stride, uint32_t k, uint64_t lo,
                      uint64_t hi, struct ckpt_span out[CKPT_MAX_SPANS])
{
    struct clip c = {.n = n, .stride = stride, .k = k, .out = out};

    c.width[k] = 1;
    for (uint32_t j = k; j-- > 0;) {
        if (n[j] == 0)
            return 0;
        c.width[j] = (n[j] - 1) * stride[j] + c.width[j + 1];
    }
    if (lo >= hi || lo >= c.width[0])
        return 0;
    clip_from(&c, 0, lo, hi);
    return c.nout;
}
