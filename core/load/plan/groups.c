/* SPDX-License-Identifier: Apache-2.0 */
/* Finds the groups of one rank, tensor by tensor: which parts of which entries overlap with the
 * boxes that the rank wants, where the set of these parts changes, and which ranks have them. */
#include "load/plan/groups.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "base/ckd.h"
#include "base/mem.h"
#include "base/sort.h"
#include "tensor/read.h"

enum {
    MAX_CELLS = 1 << 20, /* of one tensor */
    WIDE_PART = 64,      /* a request longer than this part of a dimension is kept apart */
};

/* A request: one part of an entry of a class's table, that is, a box and (by class, entry and part)
 * the ranks that want it. */
struct request {
    uint32_t class, entry, part;
    uint32_t ranks; /* index in ckpt_rank_lists.parts */
    struct ckpt_box box;
    uint64_t reach; /* along dimension finder.order: the furthest end of a box so far, except wide
                       ones */
};

struct finder {
    const struct ckpt_job_wants *job_wants;
    uint32_t self;
    struct ckpt_rank_lists members;
    bool *sharing_class; /* per class: some rank of it shares with this rank */
    ckpt_groups *groups;
    ckpt_group_boxes *boxes;
    /* of the current tensor: */
    uint32_t tensor, class, entry;
    bool whole; /* it is read for all ranks that want any of it */
    CKPT_VEC(struct request) requests;
    struct ckpt_known_lists seen; /* sets of requests whose boxes have been emitted */
    uint32_t order;               /* the dimension along which requests are sorted */
    ckpt_numbers wide;            /* requests that are long in that dimension */
    uint64_t cells;
    struct ckpt_err *err;
};

void ckpt_groups_release(ckpt_groups *groups)
{
    for (size_t i = 0; i < groups->len; i++)
        free(groups->ptr[i].rank);
    ckpt_vec_release(groups);
}

/* ---- requests ---- */

/* The group of all ranks that have one of these requests; CKPT_NONE and *f->err: no memory. */
static uint32_t group_of(struct finder *f, const uint32_t *request, size_t n)
{
    ckpt_cleanup(ckpt_vec_cleanup) ckpt_numbers part = {0};

    if (ckpt_vec_reserve(&part, n + 1) < 0)
        return (void)ckpt_nomem(f->err), CKPT_NONE;
    for (size_t i = 0; i < n; i++)
        part.ptr[part.len++] = f->requests.ptr[request[i]].ranks;
    ckpt_sort(part.ptr, part.len, ckpt_u32s_cmp);
    return ckpt_rank_lists_group(&f->members, &part);
}

static int add_request(void *ctx, uint32_t part, const struct ckpt_box *box)
{
    struct finder *f = ctx;
    const struct request d = {f->class, f->entry, part, CKPT_NONE, *box, 0};

    return ckpt_vec_push(&f->requests, d) < 0 ? ckpt_nomem(f->err) : 0;
}

/* Add to f->requests the parts of all entries that overlap with one of this rank's boxes. */
static int collect(struct finder *f, const struct ckpt_box *own)
{
    const struct ckpt_job_wants *r = f->job_wants;
    const struct ckpt_tensor *t = &r->cat->tensors.ptr[f->tensor];

    for (uint64_t i = r->first[f->tensor]; i < r->first[f->tensor + 1]; i++) {
        f->entry = r->use[i].entry;
        for (f->class = r->use[i].class; f->class != CKPT_NONE; f->class = r->next[f->class])
            if (f->sharing_class[f->class] &&
                ckpt_wants_parts(&r->table[f->class], &r->table[f->class].entries.ptr[f->entry], t,
                                 own, add_request, f) < 0)
                return -1;
    }
    return 0;
}

static int identity_cmp(const void *pa, const void *pb)
{
    const struct request *a = pa, *b = pb;
    int c = ckpt_u64_cmp(a->class, b->class);

    c = c ? c : ckpt_u64_cmp(a->entry, b->entry);
    return c ? c : ckpt_u64_cmp(a->part, b->part);
}

/* Remove duplicates (requests that overlap with several boxes of this rank) and requests of no rank
 * that shares with this one. */
static int tidy(struct finder *f)
{
    size_t out = 0;

    qsort(f->requests.ptr, f->requests.len, sizeof *f->requests.ptr, identity_cmp);
    for (size_t i = 0; i < f->requests.len; i++) {
        struct request *d = &f->requests.ptr[i];
        if (out && identity_cmp(&f->requests.ptr[out - 1], d) == 0)
            continue;
        d->ranks = ckpt_rank_lists_part(&f->members, d->class, d->entry, d->part);
        if (d->ranks == CKPT_NONE)
            return -1;
        if (f->members.parts.ptr[d->ranks]->rank.len)
            f->requests.ptr[out++] = *d;
    }
    f->requests.len = out;
    return 0;
}

static int emit(struct finder *f, const struct ckpt_box *box, uint32_t group)
{
    const struct ckpt_group_box b = {*box, f->tensor, group};

    if (group == CKPT_NONE)
        return -1;
    return ckpt_vec_push(f->boxes, b) < 0 ? ckpt_nomem(f->err) : 0;
}

/* ---- overlapping boxes are cut into cells, so that a request covers a cell whole or not at all
 * ---- */

static int along_cmp(const void *pa, const void *pb, void *dimension)
{
    const struct request *a = pa, *b = pb;
    const uint32_t d = *(const uint32_t *)dimension;
    const int c = ckpt_u64_cmp(a->box.lo[d], b->box.lo[d]);

    return c ? c : identity_cmp(a, b);
}

/* Fill in request.reach and f->wide, for binary search: the requests are sorted by their beginnings
 * along f->order, and so their reaches ascend, too. */
static int find_reach(struct finder *f)
{
    const uint64_t limit = f->job_wants->cat->tensors.ptr[f->tensor].dim[f->order] / WIDE_PART;
    uint64_t reach = 0;

    f->wide.len = 0;
    for (uint32_t i = 0; i < f->requests.len; i++) {
        struct request *d = &f->requests.ptr[i];
        const uint64_t n = d->box.n[f->order];
        assert(i == 0 || d[-1].box.lo[f->order] <= d->box.lo[f->order]);
        if (n > limit && ckpt_vec_push(&f->wide, i) < 0)
            return ckpt_nomem(f->err);
        if (n <= limit)
            reach = ckpt_max_u64(reach, d->box.lo[f->order] + n);
        d->reach = reach;
    }
    return 0;
}

/* Sort the requests along the dimension in which their boxes have the most different beginnings. */
static int sort_requests(struct finder *f)
{
    const size_t n = f->requests.len;
    ckpt_cleanup(ckpt_freep) uint64_t *edge = malloc((n + 1) * sizeof *edge);
    size_t most = 0;

    if (!edge)
        return ckpt_nomem(f->err);
    f->order = 0;
    for (uint32_t d = 0; d < f->requests.ptr->box.rank; d++) {
        size_t different = 1;
        for (size_t i = 0; i < n; i++)
            edge[i] = f->requests.ptr[i].box.lo[d];
        qsort(edge, n, sizeof *edge, ckpt_u64s_cmp);
        for (size_t i = 1; i < n; i++)
            different += edge[i] != edge[i - 1];
        if (different > most) {
            most = different;
            f->order = d;
        }
    }
    qsort_r(f->requests.ptr, n, sizeof *f->requests.ptr, along_cmp, &f->order);
    return find_reach(f);
}

/* Append the indices of the requests that overlap with a box, ascending. */
static int overlapping(const struct finder *f, const struct ckpt_box *box, ckpt_numbers *out)
{
    const uint32_t d = f->order;
    size_t lo = 0, hi = f->requests.len;
    struct ckpt_box both;

    while (lo < hi) {
        const size_t mid = lo + (hi - lo) / 2;
        if (f->requests.ptr[mid].reach <= box->lo[d])
            lo = mid + 1;
        else
            hi = mid;
    }
    for (size_t i = 0; i < f->wide.len && f->wide.ptr[i] < lo; i++)
        if (ckpt_box_intersect(&f->requests.ptr[f->wide.ptr[i]].box, box, &both) &&
            ckpt_vec_push(out, f->wide.ptr[i]) < 0)
            return ckpt_nomem(f->err);
    for (; lo < f->requests.len && f->requests.ptr[lo].box.lo[d] < box->lo[d] + box->n[d]; lo++)
        if (ckpt_box_intersect(&f->requests.ptr[lo].box, box, &both) &&
            ckpt_vec_push(out, (uint32_t)lo) < 0)
            return ckpt_nomem(f->err);
    return 0;
}

/* A walk over the cells of a box. */
struct sweep {
    struct finder *f;
    const struct ckpt_box *within;                                   /* the box */
    struct ckpt_box cell;                                            /* the current cell */
    int (*leaf)(struct sweep *s, const uint32_t *request, size_t n); /* called for each cell */
    /* for keep_cell: */
    const ckpt_numbers *set; /* the requests that must cover a cell */
    uint32_t group;
    struct ckpt_box run; /* neighbouring cells that together are one box */
    bool running;        /* there is a run */
};

/* Cut the cell along dimension d at every edge of these requests (ascending indices), and for each
 * interval go on to the next dimension with the requests that cover the interval. */
static int sweep(struct sweep *s, uint32_t d, const uint32_t *request, size_t n)
{
    const struct request *all = s->f->requests.ptr;

    if (n == 0)
        return 0;
    if (d == s->within->rank)
        return ++s->f->cells > MAX_CELLS
                   ? ckpt_fail(s->f->err, CKPT_LIMIT,
                               "tensor '%s': the wanted boxes overlap in too many ways",
                               s->f->job_wants->cat->tensors.ptr[s->f->tensor].name)
                   : s->leaf(s, request, n);
    const uint64_t begin = s->within->lo[d], end = begin + s->within->n[d];
    ckpt_cleanup(ckpt_freep) uint64_t *edge = malloc((2 * n + 2) * sizeof *edge);
    ckpt_cleanup(ckpt_freep) uint32_t *cover = malloc(n * sizeof *cover);
    size_t nedge = 2, ncover = 0, next = 0;
    int rc = 0;
    if (!edge || !cover)
        return ckpt_nomem(s->f->err);
    edge[0] = begin;
    edge[1] = end;
    for (size_t i = 0; i < n; i++) {
        const struct ckpt_box *b = &all[request[i]].box;
        if (b->lo[d] > begin && b->lo[d] < end)
            edge[nedge++] = b->lo[d];
        if (b->lo[d] + b->n[d] > begin && b->lo[d] + b->n[d] < end)
            edge[nedge++] = b->lo[d] + b->n[d];
    }
    qsort(edge, nedge, sizeof *edge, ckpt_u64s_cmp);
    const bool sorted = d == s->f->order; /* then requests begin in ascending order */
    for (size_t i = 0; i + 1 < nedge && rc == 0; i++) {
        if (edge[i] == edge[i + 1])
            continue;
        s->cell.lo[d] = edge[i];
        s->cell.n[d] = edge[i + 1] - edge[i];
        if (!sorted)
            next = ncover = 0;
        size_t still = 0;
        for (size_t k = 0; k < ncover; k++)
            if (all[cover[k]].box.lo[d] + all[cover[k]].box.n[d] > edge[i])
                cover[still++] = cover[k];
        for (; next < n && (!sorted || all[request[next]].box.lo[d] <= edge[i]); next++) {
            const struct ckpt_box *b = &all[request[next]].box;
            if (b->lo[d] <= edge[i] && b->lo[d] + b->n[d] > edge[i])
                cover[still++] = request[next];
        }
        ncover = still;
        /* no request ends within the interval, as all edges cut: it covers a cell whole or not at
         * all */
        for (size_t k = 0; k < ncover; k++)
            assert(all[cover[k]].box.lo[d] + all[cover[k]].box.n[d] >= edge[i + 1]);
        rc = sweep(s, d + 1, cover, ncover);
    }
    return rc;
}

static int end_run(struct sweep *s)
{
    const bool any = s->running;

    s->running = false;
    return any ? emit(s->f, &s->run, s->group) : 0;
}

/* A leaf of emit_set: if exactly the requests of the set cover the cell, it belongs to a box of the
 * group. */
static int keep_cell(struct sweep *s, const uint32_t *request, size_t n)
{
    const uint32_t last = s->within->rank - 1;
    bool follows = s->running && s->run.lo[last] + s->run.n[last] == s->cell.lo[last];

    if (n != s->set->len || memcmp(request, s->set->ptr, n * sizeof *request) != 0)
        return end_run(s);
    for (uint32_t d = 0; d < last && follows; d++)
        follows = s->run.lo[d] == s->cell.lo[d] && s->run.n[d] == s->cell.n[d];
    if (follows) {
        s->run.n[last] += s->cell.n[last];
        return 0;
    }
    if (end_run(s) < 0)
        return -1;
    s->run = s->cell;
    s->running = true;
    return 0;
}

/* Emit the boxes that exactly these requests cover: their intersection, without the parts that
 * other requests cover, too. That does not depend on which rank plans, so all ranks of the group
 * find the same boxes. */
static int emit_set(struct finder *f, const ckpt_numbers *set)
{
    struct ckpt_box meet = f->requests.ptr[set->ptr[0]].box, both;
    struct sweep s = {.f = f, .within = &meet, .leaf = keep_cell, .set = set};
    ckpt_cleanup(ckpt_vec_cleanup) ckpt_numbers overlap = {0};

    for (size_t i = 1; i < set->len; i++) {
        const bool meets = ckpt_box_intersect(&meet, &f->requests.ptr[set->ptr[i]].box, &both);
        assert(meets); /* all of them cover the cell with which the set was found */
        (void)meets;
        meet = both;
    }
    s.group = group_of(f, set->ptr, set->len);
    if (s.group == CKPT_NONE || overlapping(f, &meet, &overlap) < 0)
        return -1;
    if (overlap.len == set->len)
        return emit(f, &meet, s.group);
    s.cell = meet;
    return sweep(&s, 0, overlap.ptr, overlap.len) < 0 ? -1 : end_run(&s);
}

/* The other leaf, for the cells of this rank's own boxes: emit the boxes of the set of requests
 * that cover the cell, unless it has been met before. */
static int see_set(struct sweep *s, const uint32_t *request, size_t n)
{
    struct finder *f = s->f;
    bool new;

    if (ckpt_lists_know(&f->seen, request, n, 0, &new) < 0)
        return ckpt_nomem(f->err);
    if (!new)
        return 0;
    const ckpt_numbers set = {f->seen.list.ptr[f->seen.list.len - 1], n, n};
    return emit_set(f, &set);
}

/* ---- one tensor ---- */

typedef CKPT_VEC(struct ckpt_box) box_vec;

/* List the boxes of the current tensor that this rank wants. */
static int own_boxes(struct finder *f, box_vec *out)
{
    const struct ckpt_job_wants *r = f->job_wants;
    const uint32_t class = r->class_of[f->self];
    const struct ckpt_tensor *t = &r->cat->tensors.ptr[f->tensor];
    uint64_t i, end = ckpt_job_wants_uses(r, f->tensor, class, &i);
    struct ckpt_box box;

    out->len = 0;
    for (; i < end && t->numel > 0; i++)
        if (ckpt_wants_box(&r->table[class], &r->table[class].entries.ptr[r->use[i].entry], t,
                           f->self, &box) &&
            ckpt_vec_push(out, box) < 0)
            return ckpt_nomem(f->err);
    if (out->len && f->whole) {
        out->len = 1;
        memset(out->ptr->lo, 0, sizeof out->ptr->lo);
        memcpy(out->ptr->n, t->dim, t->rank * sizeof *t->dim);
    }
    return 0;
}

/* True if every request that overlaps with this rank's box covers all of it: then it need not be
 * cut. */
static bool all_alike(const struct finder *f, const struct ckpt_box *own)
{
    struct ckpt_box both;

    for (size_t i = 0; i < f->requests.len; i++)
        if (!ckpt_box_intersect(own, &f->requests.ptr[i].box, &both) || !ckpt_box_eq(&both, own))
            return false;
    return true;
}

static int find_in_tensor(struct finder *f, box_vec *own)
{
    ckpt_cleanup(ckpt_vec_cleanup) ckpt_numbers all = {0};

    f->whole = f->members.sharing->readers != CKPT_READERS_EACH &&
               ckpt_tensor_is_decoded(&f->job_wants->cat->tensors.ptr[f->tensor]);
    if (own_boxes(f, own) < 0)
        return -1;
    f->requests.len = 0;
    ckpt_lists_forget(&f->seen);
    for (size_t i = 0; i < own->len; i++)
        if (collect(f, &own->ptr[i]) < 0)
            return -1;
    if (own->len == 0)
        return 0;
    if (tidy(f) < 0)
        return -1;
    if (own->ptr->rank == 0)
        own->len = 1;
    if (own->len == 1 && (f->whole || all_alike(f, own->ptr))) {
        for (size_t i = 0; i < f->requests.len; i++)
            if (ckpt_vec_push(&all, (uint32_t)i) < 0)
                return ckpt_nomem(f->err);
        return emit(f, own->ptr, group_of(f, all.ptr, all.len));
    }
    f->cells = 0;
    if (sort_requests(f) < 0)
        return -1;
    for (size_t i = 0; i < own->len; i++) {
        struct sweep s = {.f = f, .within = &own->ptr[i], .cell = own->ptr[i], .leaf = see_set};
        all.len = 0;
        if (overlapping(f, &own->ptr[i], &all) < 0 || sweep(&s, 0, all.ptr, all.len) < 0)
            return -1;
    }
    return 0;
}

/* ---- all tensors ---- */

static int group_cmp(const void *pa, const void *pb)
{
    const struct ckpt_group *a = pa, *b = pb;
    int c = ckpt_u64_cmp(a->n, b->n);

    for (uint32_t i = 0; i < a->n && c == 0; i++)
        c = ckpt_u64_cmp(a->rank[i], b->rank[i]);
    return c;
}

/* Groups were found in an order that depends on this rank's wants: sort them into one on which all
 * ranks agree. */
static int sort_groups(struct finder *f)
{
    const size_t n = f->groups->len;
    ckpt_cleanup(ckpt_freep) uint32_t *place = malloc((n + 1) * sizeof *place);

    if (!place)
        return ckpt_nomem(f->err);
    ckpt_sort(f->groups->ptr, n, group_cmp);
    for (uint32_t i = 0; i < n; i++) {
        const struct ckpt_group *g = &f->groups->ptr[i];
        assert(g->self < g->n && g->rank[g->self] == f->self);
        place[g->found] = i;
    }
    for (size_t i = 0; i < f->boxes->len; i++)
        f->boxes->ptr[i].group = place[f->boxes->ptr[i].group];
    return 0;
}

/* Mark the classes with ranks that share with this one. */
static int find_sharing_classes(struct finder *f)
{
    const struct ckpt_sharing *sharing = f->members.sharing;

    if (!(f->sharing_class = calloc((size_t)f->job_wants->nclass + 1, sizeof *f->sharing_class)))
        return ckpt_nomem(f->err);
    for (uint32_t r = 0; r < f->job_wants->nrank; r++)
        if (ckpt_sharing_number(sharing, r) == ckpt_sharing_number(sharing, f->self))
            f->sharing_class[f->job_wants->class_of[r]] = true;
    return 0;
}

int ckpt_groups_find(const struct ckpt_job_wants *job_wants, uint32_t self,
                     const struct ckpt_sharing *sharing, ckpt_groups *groups,
                     ckpt_group_boxes *boxes, struct ckpt_err *err)
{
    struct finder f = {
        .job_wants = job_wants, .self = self, .groups = groups, .boxes = boxes, .err = err};
    box_vec own = {0};

    f.members = (struct ckpt_rank_lists){
        .job_wants = job_wants, .sharing = sharing, .self = self, .groups = groups, .err = err};
    int rc = find_sharing_classes(&f);

    for (f.tensor = 0; f.tensor < job_wants->cat->tensors.len && rc == 0; f.tensor++)
        rc = job_wants->skip && job_wants->skip[f.tensor] ? 0 : find_in_tensor(&f, &own);
    if (rc == 0)
        rc = sort_groups(&f);
    ckpt_rank_lists_release(&f.members);
    ckpt_lists_forget(&f.seen);
    ckpt_vec_release(&f.requests);
    ckpt_vec_release(&f.wide);
    ckpt_vec_release(&own);
    free(f.sharing_class);
    return rc;
}
