/* SPDX-License-Identifier: Apache-2.0 */
/* Computes unions of boxes. The parts of most tensors that the ranks want are together the whole
 * tensor: that is found once per class and placement, not once per tensor. Other boxes that overlap
 * are cut along all edges. */
#include "load/want/regions.h"

#include <stdlib.h>
#include <string.h>

#include "base/ckd.h"
#include "base/mem.h"
#include "base/sort.h"

enum { MAX_CELLS = 1 << 20 };

typedef CKPT_VEC(struct ckpt_box) box_vec;

struct merge {
    const struct ckpt_job_wants *job_wants;
    const uint32_t *rank;  /* the ranks, ordered by class */
    const uint32_t *first; /* class c has rank[first[c]] .. rank[first[c + 1] - 1] */
    uint8_t **complete;    /* per class and spec: is_complete */
    box_vec boxes;         /* of the current tensor */
    ckpt_wanted_boxes *out;
    struct ckpt_err *err;
};

/* True if each part of a placement is some rank's: then the parts together are the whole box. */
static bool is_complete(const struct ckpt_wants *w, const struct ckpt_spec *s, const uint32_t *rank,
                        uint32_t nrank, bool *seen)
{
    const struct ckpt_grid *g = &w->grids.ptr[s->grid];
    uint32_t parts = 1, found = 0;

    for (uint32_t i = 0; i < s->ncut; i++) {
        if (g->dim[s->cut[i].axis] > nrank / parts)
            return false;
        parts *= g->dim[s->cut[i].axis];
    }
    memset(seen, 0, parts * sizeof *seen);
    for (uint32_t k = 0; k < nrank; k++) {
        const uint32_t part = ckpt_spec_part(w, s, rank[k]);
        if (part == CKPT_NONE)
            continue;
        found += !seen[part];
        seen[part] = true;
    }
    return found == parts;
}

static bool inside(const struct ckpt_box *a, const struct ckpt_box *b)
{
    for (uint32_t d = 0; d < a->rank; d++)
        if (a->lo[d] < b->lo[d] || a->lo[d] + a->n[d] > b->lo[d] + b->n[d])
            return false;
    return true;
}

static int add_box(struct merge *m, const struct ckpt_box *box)
{
    return ckpt_vec_push(&m->boxes, *box) < 0 ? ckpt_nomem(m->err) : 0;
}

/* If box b continues box a along one dimension, make a their union. */
static bool grow(struct ckpt_box *a, const struct ckpt_box *b)
{
    uint32_t differ = 0, dim = 0;

    for (uint32_t d = 0; d < b->rank; d++)
        if (b->lo[d] != a->lo[d] || b->n[d] != a->n[d]) {
            differ++;
            dim = d;
        }
    if (differ != 1 || a->lo[dim] + a->n[dim] != b->lo[dim])
        return false;
    a->n[dim] += b->n[dim];
    return true;
}

/* Add a box, or make the last one larger if the new one continues it. */
static int add_part(struct merge *m, const struct ckpt_box *box)
{
    if (m->boxes.len && grow(&m->boxes.ptr[m->boxes.len - 1], box))
        return 0;
    return add_box(m, box);
}

/* Collect the boxes that the ranks want by one entry of a class's table. */
static int collect(struct merge *m, const struct ckpt_tensor *t, const struct ckpt_use *use)
{
    const struct ckpt_wants *w = &m->job_wants->table[use->class];
    const struct ckpt_want *e = &w->entries.ptr[use->entry];
    const uint32_t lo = m->first[use->class], hi = m->first[use->class + 1];
    struct ckpt_box box;

    if (lo == hi)
        return 0;
    if (e->spec == CKPT_NONE || m->complete[use->class][e->spec]) {
        const struct ckpt_want whole = {e->tensor, CKPT_NONE, e->box};
        return ckpt_wants_box(w, &whole, t, 0, &box) ? add_box(m, &box) : 0;
    }
    for (uint32_t k = lo; k < hi; k++)
        if (ckpt_wants_box(w, e, t, m->rank[k], &box) && add_part(m, &box) < 0)
            return -1;
    return 0;
}

static int emit(struct merge *m, uint32_t tensor, const struct ckpt_box *box)
{
    struct ckpt_wanted_box r = {.tensor = tensor, .box = *box};

    return ckpt_vec_push(m->out, r) < 0 ? ckpt_nomem(m->err) : 0;
}

/* The edges of all boxes along dimension d, ascending, each once. */
static size_t edges_of(const struct merge *m, uint32_t d, uint64_t *edge)
{
    size_t n = 0, out = 0;

    for (size_t i = 0; i < m->boxes.len; i++) {
        edge[n++] = m->boxes.ptr[i].lo[d];
        edge[n++] = m->boxes.ptr[i].lo[d] + m->boxes.ptr[i].n[d];
    }
    qsort(edge, n, sizeof *edge, ckpt_u64s_cmp);
    for (size_t i = 0; i < n; i++)
        if (out == 0 || edge[out - 1] != edge[i])
            edge[out++] = edge[i];
    return out;
}

/* Cut overlapping boxes along every edge of every box, and emit the cells; cells that follow each
 * other along the last dimension become one box. */
static int emit_cells(struct merge *m, uint32_t tensor)
{
    const uint32_t rank = m->boxes.ptr[0].rank;
    ckpt_cleanup(ckpt_freep) uint64_t *edges = malloc(rank * 2 * m->boxes.len * sizeof *edges);
    const uint64_t *edge[CKPT_MAX_RANK];
    size_t nedge[CKPT_MAX_RANK], index[CKPT_MAX_RANK] = {0};
    uint64_t cells = 1;
    struct ckpt_wanted_box *run = NULL;

    if (!edges)
        return ckpt_nomem(m->err);
    for (uint32_t d = 0; d < rank; d++) {
        uint64_t *at = edges + d * 2 * m->boxes.len;
        nedge[d] = edges_of(m, d, at);
        edge[d] = at;
        if (ckd_mul(&cells, cells, nedge[d] - 1) || cells > MAX_CELLS)
            return ckpt_fail(m->err, CKPT_LIMIT,
                             "tensor '%s': the wanted boxes overlap in too many ways",
                             m->job_wants->cat->tensors.ptr[tensor].name);
    }
    for (uint64_t c = 0; c < cells; c++) {
        struct ckpt_box cell = {.rank = rank};
        bool wanted = false;
        for (uint32_t d = 0; d < rank; d++) {
            cell.lo[d] = edge[d][index[d]];
            cell.n[d] = edge[d][index[d] + 1] - cell.lo[d];
        }
        for (size_t i = 0; i < m->boxes.len && !wanted; i++)
            wanted = inside(&cell, &m->boxes.ptr[i]);
        if (!wanted)
            run = NULL;
        else if (run)
            run->box.n[rank - 1] += cell.n[rank - 1];
        else if (emit(m, tensor, &cell) < 0)
            return -1;
        else
            run = &m->out->ptr[m->out->len - 1];
        for (uint32_t d = rank; d-- > 0;) {
            if (++index[d] < nedge[d] - 1)
                break;
            index[d] = 0;
            run = NULL;
        }
    }
    return 0;
}

/* ---- boxes are sorted along one dimension, and only those that overlap in it are compared */

static int along_cmp(const void *pa, const void *pb, void *dimension)
{
    const struct ckpt_box *a = pa, *b = pb;
    const uint32_t first = *(const uint32_t *)dimension;

    int c = ckpt_u64_cmp(a->lo[first], b->lo[first]);

    c = c ? c : ckpt_u64_cmp(b->n[first], a->n[first]); /* the larger one first */
    for (uint32_t d = 0; d < a->rank && c == 0; d++)
        c = ckpt_u64_cmp(a->lo[d], b->lo[d]);
    for (uint32_t d = 0; d < a->rank && c == 0; d++)
        c = ckpt_u64_cmp(b->n[d], a->n[d]);
    return c;
}

/* The dimension in which the boxes have the most different edges; `edge` is room for them. */
static uint32_t most_divided(const struct merge *m, uint64_t *edge)
{
    uint32_t best = 0;
    size_t most = 0;

    for (uint32_t d = 0; d < m->boxes.ptr[0].rank; d++) {
        const size_t n = edges_of(m, d, edge);
        if (n > most) {
            most = n;
            best = d;
        }
    }
    return best;
}

/* Remove boxes that are inside others. *ret_overlap tells whether any of the rest overlap. */
static void sweep(struct merge *m, uint32_t dim, uint32_t *active, bool *ret_overlap)
{
    struct ckpt_box *box = m->boxes.ptr, both;
    size_t nactive = 0, out = 0;

    *ret_overlap = false;
    for (size_t i = 0; i < m->boxes.len; i++) {
        bool in = false, over = false;
        size_t still = 0;
        for (size_t k = 0; k < nactive; k++) {
            const struct ckpt_box *a = &box[active[k]];
            if (a->lo[dim] + a->n[dim] <= box[i].lo[dim])
                continue; /* it ends before this box and all later ones begin */
            active[still++] = active[k];
            in |= inside(&box[i], a);
            over |= ckpt_box_intersect(&box[i], a, &both);
        }
        nactive = still;
        if (in)
            continue;
        *ret_overlap |= over;
        box[out] = box[i];
        active[nactive++] = (uint32_t)out++;
    }
    m->boxes.len = out;
}

/* Unite neighbouring boxes that continue each other. */
static void join(struct merge *m)
{
    size_t out = 0;

    for (size_t i = 1; i < m->boxes.len; i++)
        if (!grow(&m->boxes.ptr[out], &m->boxes.ptr[i]))
            m->boxes.ptr[++out] = m->boxes.ptr[i];
    m->boxes.len = out + 1;
}

/* Sort the boxes, remove those inside others, and unite neighbours if none overlap. */
static int tidy(struct merge *m, bool *ret_overlap)
{
    const size_t n = m->boxes.len;
    ckpt_cleanup(ckpt_freep) uint64_t *edge = malloc(2 * n * sizeof *edge);
    ckpt_cleanup(ckpt_freep) uint32_t *active = malloc(n * sizeof *active);

    if (!edge || !active)
        return ckpt_nomem(m->err);
    if (m->boxes.ptr[0].rank == 0) { /* a scalar is one box, however often it is wanted */
        m->boxes.len = 1;
        return 0;
    }
    uint32_t dim = most_divided(m, edge);
    qsort_r(m->boxes.ptr, n, sizeof *m->boxes.ptr, along_cmp, &dim);
    sweep(m, dim, active, ret_overlap);
    if (!*ret_overlap)
        join(m);
    return 0;
}

static int regions_of_tensor(struct merge *m, uint32_t tensor)
{
    const struct ckpt_job_wants *r = m->job_wants;
    const struct ckpt_tensor *t = &r->cat->tensors.ptr[tensor];

    bool overlap = false;

    m->boxes.len = 0;
    if (t->numel == 0)
        return 0;
    for (uint64_t i = r->first[tensor]; i < r->first[tensor + 1]; i++)
        if (collect(m, t, &r->use[i]) < 0)
            return -1;
    if (m->boxes.len > 1 && tidy(m, &overlap) < 0)
        return -1;
    if (overlap)
        return emit_cells(m, tensor);
    for (size_t i = 0; i < m->boxes.len; i++)
        if (emit(m, tensor, &m->boxes.ptr[i]) < 0)
            return -1;
    return 0;
}

/* Sort the ranks by class, and find out which placements are complete. */
static int prepare(struct merge *m, const uint32_t *rank, uint32_t nrank, uint32_t *sorted,
                   uint32_t *first, bool *seen)
{
    const struct ckpt_job_wants *r = m->job_wants;

    for (uint32_t k = 0; k < nrank; k++)
        first[r->class_of[rank[k]] + 1]++;
    for (uint32_t c = 0; c < r->nclass; c++)
        first[c + 1] += first[c];
    for (uint32_t k = nrank;
         k-- > 0;) /* first[c + 1] goes from the end of class c back to its beginning */
        sorted[--first[r->class_of[rank[k]] + 1]] = rank[k];
    for (uint32_t c = 0; c < r->nclass; c++)
        first[c] = first[c + 1];
    first[r->nclass] = nrank;
    for (uint32_t c = 0; c < r->nclass; c++) {
        const struct ckpt_wants *w = &r->table[c];
        if (!(m->complete[c] = calloc(w->specs.len + 1, 1)))
            return ckpt_nomem(m->err);
        for (size_t s = 0; s < w->specs.len; s++)
            m->complete[c][s] =
                is_complete(w, &w->specs.ptr[s], sorted + first[c], first[c + 1] - first[c], seen);
    }
    return 0;
}

int ckpt_regions_of(const struct ckpt_job_wants *job_wants, const uint32_t *rank, uint32_t nrank,
                    ckpt_wanted_boxes *out, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) uint32_t *sorted = malloc((nrank + 1) * sizeof *sorted);
    ckpt_cleanup(ckpt_freep) uint32_t *first = calloc(job_wants->nclass + 1, sizeof *first);
    ckpt_cleanup(ckpt_freep) bool *seen = malloc((nrank + 1) * sizeof *seen);
    struct merge m = {
        .job_wants = job_wants, .rank = sorted, .first = first, .out = out, .err = err};
    int rc = 0;

    m.complete = calloc(job_wants->nclass + 1, sizeof *m.complete);
    if (!sorted || !first || !seen || !m.complete)
        rc = ckpt_nomem(err);
    if (rc == 0)
        rc = prepare(&m, rank, nrank, sorted, first, seen);
    for (uint32_t t = 0; t < job_wants->cat->tensors.len && rc == 0; t++)
        rc = regions_of_tensor(&m, t);
    for (uint32_t c = 0; m.complete && c < job_wants->nclass; c++)
        free(m.complete[c]);
    free(m.complete);
    ckpt_vec_release(&m.boxes);
    return rc;
}
