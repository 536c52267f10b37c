/* SPDX-License-Identifier: Apache-2.0 */
/* Makes a plan: boxes of groups -> units -> streams -> spans -> chunks and windows. */
#include "load/plan/plan.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "base/ckd.h"
#include "base/mem.h"
#include "base/sort.h"
#include "load/plan/holders.h"
#include "tensor/read.h"
#include "tensor/strided.h"

enum { MAX_UNITS = 1 << 28 };

void ckpt_plan_free(struct ckpt_plan *p)
{
    if (!p)
        return;
    for (size_t g = 0; p->broadcast && g < p->groups.len; g++)
        ckpt_broadcast_release(&p->broadcast[g]);
    for (size_t g = 0; p->stream && g < p->groups.len; g++) {
        free(p->stream[g].members);
        free(p->stream[g].span);
    }
    free(p->broadcast);
    free(p->stream);
    free(p->again);
    ckpt_groups_release(&p->groups);
    ckpt_vec_release(&p->regions);
    ckpt_vec_release(&p->units);
    ckpt_vec_release(&p->chunks);
    ckpt_vec_release(&p->windows);
    free(p);
}

uint64_t ckpt_plan_memory(const struct ckpt_plan *p)
{
    uint64_t bytes = ckpt_job_wants_memory(p->job_wants) + sizeof *p +
                     p->regions.cap * sizeof *p->regions.ptr + p->units.cap * sizeof *p->units.ptr +
                     p->chunks.cap * sizeof *p->chunks.ptr +
                     p->windows.cap * sizeof *p->windows.ptr;

    for (size_t g = 0; g < p->groups.len; g++)
        bytes += sizeof *p->groups.ptr + sizeof *p->broadcast + sizeof *p->stream +
                 (uint64_t)p->groups.ptr[g].n * 4 * sizeof(uint32_t) +
                 (p->stream[g].span ? (p->groups.ptr[g].n + (uint64_t)1) * sizeof(uint64_t) : 0);
    return bytes;
}

const struct ckpt_tensor *ckpt_plan_unit_tensor(const struct ckpt_plan *p, uint32_t unit)
{
    return &p->job_wants->cat->tensors.ptr[p->regions.ptr[p->units.ptr[unit].region].tensor];
}

static size_t region_esize(const struct ckpt_plan *p, const struct ckpt_region *r)
{
    return ckpt_dtype_size(p->job_wants->cat->tensors.ptr[r->tensor].dtype);
}

static uint64_t align(uint64_t len)
{
    return (len + CKPT_UNIT_ALIGN - 1) / CKPT_UNIT_ALIGN * CKPT_UNIT_ALIGN;
}

/* ---- units ---- */

/* Order the dimensions by their stride in the file, which the tensor's first piece tells: a tensor
 * that is stored transposed is cut as it is stored. */
static void order_dims(const struct ckpt_catalog *cat, struct ckpt_region *r)
{
    const struct ckpt_tensor *t = ckpt_tensor_stored(&cat->tensors.ptr[r->tensor]);
    uint64_t widest[CKPT_MAX_RANK] = {0}, unit[CKPT_MAX_RANK];

    for (uint32_t d = 0; d < t->rank; d++)
        r->order[d] = (uint8_t)d;
    if (t->npiece == 0)
        return;
    ckpt_shape_strides(t->dim, t->rank, unit);
    for (uint32_t j = 0, d = 0; j < t->piece[0].naxis; j++) {
        const struct ckpt_axis *a = &t->piece[0].axis[j];
        if (a->n == 1)
            continue;
        while (d + 1 < t->rank && a->dst < unit[d])
            d++;
        widest[d] = ckpt_max_u64(widest[d], a->src);
    }
    for (uint32_t i = 1; i < t->rank;
         i++) /* stable insertion sort; dimensions of size 1 come first */
        for (uint32_t k = i; k > 0; k--) {
            uint8_t a = r->order[k - 1], b = r->order[k];
            uint64_t wa = r->box.n[a] == 1 ? UINT64_MAX : widest[a];
            uint64_t wb = r->box.n[b] == 1 ? UINT64_MAX : widest[b];
            if (wa >= wb)
                break;
            r->order[k - 1] = b;
            r->order[k] = a;
        }
}

/* Are the region's runs in the file so short that the holes between them are read, too? */
static bool reads_holes(const struct ckpt_catalog *cat, const struct ckpt_region *r)
{
    const struct ckpt_tensor *t = ckpt_tensor_stored(&cat->tensors.ptr[r->tensor]);
    uint64_t run = ckpt_dtype_size(t->dtype);

    for (uint32_t k = t->rank; k-- > 0;) {
        const uint32_t d = r->order[k];
        run *= r->box.n[d];
        if (r->box.n[d] != t->dim[d])
            return k > 0 && run < CKPT_STRIDED_LONG_RUN;
    }
    return false;
}

int ckpt_plan_find_again(struct ckpt_plan *p, const struct ckpt_file_use *use, struct ckpt_err *err)
{
    const size_t n = p->job_wants->cat->sources.len;

    if (!(p->again = calloc(n + 1, sizeof *p->again)))
        return ckpt_nomem(err);
    for (size_t i = 0; i < n; i++)
        p->again[i] = use[i].again > use[i].wanted / 32;
    return 0;
}

bool ckpt_plan_reads_again(const struct ckpt_plan *p, uint32_t unit)
{
    const struct ckpt_unit *u = &p->units.ptr[unit];

    return p->again && ((u->source < p->job_wants->cat->sources.len && p->again[u->source]) ||
                        p->regions.ptr[u->region].holes);
}

/* Choose cut, step and nrange so that a unit has at most `size` bytes: take single indices of the
 * outer dimensions until a range of the next one is small enough. */
static int cut_region(const struct ckpt_plan *p, struct ckpt_region *r, uint64_t size,
                      struct ckpt_err *err)
{
    const uint32_t rank = r->box.rank;
    uint64_t inner = ckpt_box_numel(&r->box) * region_esize(p, r), count = 1;

    r->cut = 0;
    r->step = r->nrange = 1;
    for (uint32_t k = 0; k < rank; k++) {
        const uint64_t n = r->box.n[r->order[k]];
        r->cut = (uint8_t)k;
        inner /= n;
        if (inner <= size || k + 1 == rank) {
            uint64_t most = ckpt_max_u64(1, inner ? size / inner : n);
            r->nrange = (n + most - 1) / most;
            r->step = (n + r->nrange - 1) / r->nrange;
            r->nrange = (n + r->step - 1) / r->step;
            break;
        }
        count *= n;
    }
    if (ckd_mul(&count, count, r->nrange) || count > MAX_UNITS)
        return ckpt_fail(err, CKPT_LIMIT, "tensor '%s' would be read in too many small parts",
                         p->job_wants->cat->tensors.ptr[r->tensor].name);
    r->nunit = (uint32_t)count;
    assert(rank == 0 || (r->step * r->nrange >= r->box.n[r->order[r->cut]] &&
                         r->step * (r->nrange - 1) < r->box.n[r->order[r->cut]]));
    return 0;
}

void ckpt_plan_unit_box(const struct ckpt_plan *p, uint32_t unit, struct ckpt_box *ret)
{
    const struct ckpt_unit *u = &p->units.ptr[unit];
    const struct ckpt_region *r = &p->regions.ptr[u->region];
    uint64_t at = u->ordinal, lo;

    *ret = r->box;
    if (ret->rank == 0)
        return;
    const uint32_t d = r->order[r->cut];
    lo = at % r->nrange * r->step;
    at /= r->nrange;
    ret->lo[d] += lo;
    ret->n[d] = ckpt_min_u64(r->step, r->box.n[d] - lo);
    for (uint32_t k = r->cut; k-- > 0;) {
        const uint32_t f = r->order[k];
        ret->lo[f] += at % r->box.n[f];
        ret->n[f] = 1;
        at /= r->box.n[f];
    }
}

/* Find the file and offset of a unit's first element (of a computed tensor: of the tensor that is
 * read for it). If it has none, `off` becomes a key that keeps such units in order. */
static void place_unit(const struct ckpt_plan *p, uint32_t unit, struct ckpt_unit *u)
{
    const struct ckpt_tensor *t = ckpt_tensor_stored(ckpt_plan_unit_tensor(p, unit));
    uint64_t first, end;
    struct ckpt_box box;

    ckpt_plan_unit_box(p, unit, &box);
    ckpt_box_range(&box, t->dim, &first, &end);
    if (ckpt_tensor_place(t, first, &u->source, &u->off))
        return;
    u->source = UINT32_MAX;
    u->off = (uint64_t)p->regions.ptr[u->region].tensor << 32 | u->ordinal;
}

/* Compute the length and place of a unit. */
static int make_unit(const struct ckpt_plan *p, uint32_t unit, struct ckpt_err *err)
{
    struct ckpt_unit *u = &p->units.ptr[unit];
    struct ckpt_box box;

    ckpt_plan_unit_box(p, unit, &box);
    const uint64_t bytes = ckpt_box_numel(&box) * region_esize(p, &p->regions.ptr[u->region]);
    if (bytes > UINT32_MAX - CKPT_UNIT_ALIGN)
        return ckpt_fail(err, CKPT_LIMIT, "tensor '%s' would be read in parts of 4 GiB or more",
                         ckpt_plan_unit_tensor(p, unit)->name);
    u->len = (uint32_t)align(bytes);
    place_unit(p, unit, u);
    return 0;
}

/* An order on which all ranks of a group agree; the indices of regions differ from rank to rank. */
static int region_cmp(const struct ckpt_region *a, const struct ckpt_region *b)
{
    int c = ckpt_u64_cmp(a->tensor, b->tensor);

    for (uint32_t d = 0; d < a->box.rank && c == 0; d++)
        c = ckpt_u64_cmp(a->box.lo[d], b->box.lo[d]);
    return c;
}

static int unit_cmp(const void *pa, const void *pb, void *regions)
{
    const struct ckpt_unit *a = pa, *b = pb;
    const struct ckpt_region *r = regions;
    int c = ckpt_u64_cmp(r[a->region].group, r[b->region].group);

    c = c ? c : ckpt_u64_cmp(a->source, b->source);
    c = c ? c : ckpt_u64_cmp(a->off, b->off);
    if (c == 0 && a->region != b->region)
        c = region_cmp(&r[a->region], &r[b->region]);
    return c ? c : ckpt_u64_cmp(a->ordinal, b->ordinal);
}

/* Sort n units of a group of so many members by the members that were chosen for them, and leave
 * them in their order otherwise. Each member's units are its span. */
static int sort_by_member(struct ckpt_unit *unit, const struct ckpt_held *held, uint32_t n,
                          uint32_t nmember, uint64_t **ret_span, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) struct ckpt_unit *copy = malloc(n * sizeof *copy);
    ckpt_cleanup(ckpt_freep) uint32_t *at = calloc((size_t)nmember + 1, sizeof *at);
    ckpt_cleanup(ckpt_freep) uint64_t *span = calloc((size_t)nmember + 1, sizeof *span);

    if (!copy || !at || !span)
        return ckpt_nomem(err);
    memcpy(copy, unit, n * sizeof *copy);
    for (uint32_t i = 0; i < n; i++) {
        at[held[i].member + 1]++;
        span[held[i].member + 1] += held[i].len;
    }
    for (uint32_t i = 0; i < nmember; i++) {
        at[i + 1] += at[i];
        span[i + 1] += span[i];
    }
    for (uint32_t i = 0; i < n; i++)
        unit[at[held[i].member]++] = copy[i];
    *ret_span = ckpt_steal(&span);
    return 0;
}

/* Reorder n units of a group so that members read their own files. */
static int prefer_own(struct ckpt_plan *p, uint32_t group, const struct ckpt_holders *holders,
                      struct ckpt_unit *unit, uint32_t n, struct ckpt_err *err)
{
    const struct ckpt_group *g = &p->groups.ptr[group];
    ckpt_cleanup(ckpt_freep) struct ckpt_held *held = malloc(n * sizeof *held);
    bool any;

    if (!held)
        return ckpt_nomem(err);
    for (uint32_t i = 0; i < n; i++)
        held[i] = (struct ckpt_held){unit[i].source, unit[i].len, CKPT_NONE};
    if (ckpt_holders_choose(holders, g, held, n, &any, err) < 0)
        return -1;
    return any ? sort_by_member(unit, held, n, g->n, &p->stream[group].span, err) : 0;
}

/* Where ranks have different files, those read a group's units that have them. */
static int prefer_holders(struct ckpt_plan *p, const struct ckpt_holders *holders,
                          struct ckpt_err *err)
{
    size_t hi;

    for (size_t lo = 0; lo < p->units.len; lo = hi) {
        const uint32_t group = p->regions.ptr[p->units.ptr[lo].region].group;
        for (hi = lo + 1; hi < p->units.len; hi++)
            if (p->regions.ptr[p->units.ptr[hi].region].group != group)
                break;
        if (p->groups.ptr[group].n > 1 &&
            prefer_own(p, group, holders, p->units.ptr + lo, (uint32_t)(hi - lo), err) < 0)
            return -1;
    }
    return 0;
}

/* Cut all regions into units, and sort the units by group and place in the files. */
static int cut_units(struct ckpt_plan *p, const struct ckpt_holders *holders, struct ckpt_err *err)
{
    uint64_t total = 0;

    for (size_t i = 0; i < p->regions.len; i++) {
        order_dims(p->job_wants->cat, &p->regions.ptr[i]);
        p->regions.ptr[i].holes = reads_holes(p->job_wants->cat, &p->regions.ptr[i]);
        if (cut_region(p, &p->regions.ptr[i], p->sizes.unit, err) < 0)
            return -1;
        total += p->regions.ptr[i].nunit;
    }
    if (total > MAX_UNITS)
        return ckpt_fail(err, CKPT_LIMIT, "the plan would have more than %d reads", MAX_UNITS);
    if (ckpt_vec_reserve(&p->units, total) < 0)
        return ckpt_nomem(err);
    for (size_t i = 0; i < p->regions.len; i++)
        for (uint32_t k = 0; k < p->regions.ptr[i].nunit; k++) {
            p->units.ptr[p->units.len++] = (struct ckpt_unit){.region = (uint32_t)i, .ordinal = k};
            if (make_unit(p, (uint32_t)p->units.len - 1, err) < 0)
                return -1;
        }
    if (p->units.len)
        qsort_r(p->units.ptr, p->units.len, sizeof *p->units.ptr, unit_cmp, p->regions.ptr);
    return holders && holders->ranks.len ? prefer_holders(p, holders, err) : 0;
}

/* ---- streams ---- */

/* Lay the units of each group end to end. They are sorted by group, so those of one are neighbours
 * in the list. */
static void lay_out(struct ckpt_plan *p)
{
    for (uint32_t u = 0; u < p->units.len; u++) {
        struct ckpt_unit *unit = &p->units.ptr[u];
        struct ckpt_stream *s = &p->stream[p->regions.ptr[unit->region].group];
        assert(unit->len > 0 && unit->len % CKPT_UNIT_ALIGN == 0);
        assert(s->len == 0 || s->hi == u);
        if (s->len == 0)
            s->lo = u;
        s->hi = u + 1;
        unit->at = s->len;
        s->len += unit->len;
    }
}

/* The length of the longest of n spans. */
static uint64_t longest_span(const struct ckpt_stream *s, uint32_t n)
{
    uint64_t most = s->span ? 0 : align((s->len + n - 1) / n);

    for (uint32_t i = 0; i < n && s->span; i++)
        most = ckpt_max_u64(most, s->span[i + 1] - s->span[i]);
    return most;
}

/* Equal slices, and equal spans unless members have different files; as few windows as the limits
 * permit. */
static void cut_spans(const struct ckpt_plan *p, struct ckpt_stream *s, uint32_t n)
{
    const uint64_t span = longest_span(s, n);
    const uint64_t limit = ckpt_min_u64(p->sizes.slice, p->sizes.window / n);
    const uint64_t most = ckpt_max_u64(limit / CKPT_UNIT_ALIGN, 1) * CKPT_UNIT_ALIGN;
    const uint64_t count = (span + most - 1) / most;

    s->slice = (uint32_t)align((span + count - 1) / count);
    s->nwindow = (uint32_t)((span + s->slice - 1) / s->slice);
    /* the slices of a span are its bytes, and perhaps some more: no window is empty for all members
     * (the first one with the longest span has something in each), and the spans together are at
     * least the stream */
    assert(s->slice <= most && (uint64_t)(s->nwindow - 1) * s->slice < s->len);
    assert((uint64_t)n * s->nwindow * s->slice >= s->len);
}

static struct ckpt_collective step_of(const struct ckpt_plan *p, const struct ckpt_stream *s,
                                      uint32_t n, const uint32_t *rank)
{
    struct ckpt_collective step = {.n = n, .rank = rank, .division = CKPT_DIVISION_NONE};

    for (; rank[step.self] != p->self; step.self++)
        assert(step.self + 1 < n); /* a rank plans only the groups that it is in */
    if (n == p->job_wants->nrank && !s->pairs)
        step.division = CKPT_DIVISION_ALL;
    return step;
}

/* All-gathers move as many bytes of each member as the longest span has. On devices they are still
 * better than pairs as long as that is at most twice what there is; or, between nodes, what pairs
 * would move, which send it to each member of a node. In host memory, where pairs are the trees of
 * broadcast.h, which send it to each node once, they are not. */
static bool needs_pairs(const struct ckpt_plan *p, const struct ckpt_broadcast *b,
                        const struct ckpt_stream *s, uint32_t n)
{
    const uint64_t moved = (uint64_t)n * s->nwindow * s->slice;
    const uint64_t most = b->nnode > 1 ? ckpt_max_u64(2, n / b->nnode) : 2;

    return s->span && (!p->sizes.device || moved > most * s->len);
}

/* Two steps if every node has the same number of members, and more than one, else one. */
static int choose_steps(struct ckpt_plan *p, uint32_t group, struct ckpt_err *err)
{
    const struct ckpt_group *g = &p->groups.ptr[group];
    const struct ckpt_broadcast *b = &p->broadcast[group];
    struct ckpt_stream *s = &p->stream[group];
    const uint32_t local = g->n / b->nnode;
    bool regular = b->nnode > 1 && local > 1;

    s->pairs = needs_pairs(p, b, s, g->n);
    regular &= !s->pairs;

    for (uint32_t k = 0; k <= b->nnode && regular; k++)
        regular = b->node[k] == k * local;
    s->nstep = regular ? 2 : 1;
    if (!regular) {
        s->step[0] = step_of(p, s, g->n, g->rank);
        return 0;
    }
    if (!(s->members = malloc(b->nnode * sizeof *s->members)))
        return ckpt_nomem(err);
    s->step[1] = step_of(p, s, local, b->member + b->node[b->own]);
    for (uint32_t k = 0; k < b->nnode; k++)
        s->members[k] = b->member[k * local + s->step[1].self];
    s->step[0] = step_of(p, s, b->nnode, s->members);
    return 0;
}

uint32_t ckpt_plan_place(const struct ckpt_plan *p, uint32_t group, uint32_t member)
{
    const struct ckpt_stream *s = &p->stream[group];

    if (s->nstep != 2)
        return member;
    const uint32_t seat = p->broadcast[group].place[member], local = s->step[1].n;
    return seat % local * s->step[0].n + seat / local; /* rails one after the other */
}

uint32_t ckpt_plan_unit_at(const struct ckpt_plan *p, uint32_t group, uint64_t at)
{
    uint32_t lo = p->stream[group].lo, hi = p->stream[group].hi;

    while (lo < hi) {
        const uint32_t mid = lo + (hi - lo) / 2;
        if (p->units.ptr[mid].at + p->units.ptr[mid].len <= at)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

int ckpt_plan_boxes(const struct ckpt_plan *p, uint32_t unit, uint64_t lo, uint64_t hi,
                    ckpt_plan_box_fn *fn, void *ctx)
{
    const struct ckpt_unit *u = &p->units.ptr[unit];
    const size_t esize = ckpt_dtype_size(ckpt_plan_unit_tensor(p, unit)->dtype);
    uint64_t stride[CKPT_MAX_RANK];
    struct ckpt_span span[CKPT_MAX_SPANS];
    struct ckpt_box box, part;

    /* an element never lies in two slices, and a slice's bytes are whole elements */
    assert(u->at % CKPT_UNIT_ALIGN == 0 && CKPT_UNIT_ALIGN % esize == 0);
    ckpt_plan_unit_box(p, unit, &box);
    const uint64_t numel = ckpt_box_numel(&box);
    const uint64_t first = lo > u->at ? (lo - u->at) / esize : 0;
    const uint64_t end = hi > u->at ? ckpt_min_u64(numel, (hi - u->at) / esize) : 0;
    if (first == 0 && end == numel)
        return fn(ctx, unit, &box, u->at);
    ckpt_shape_strides(box.n, box.rank, stride);
    const size_t n = ckpt_axes_clip(box.n, stride, box.rank, first, end, span);
    part.rank = box.rank;
    for (size_t i = 0; i < n; i++) {
        uint64_t at = 0;
        for (uint32_t d = 0; d < box.rank; d++) {
            at += span[i].lo[d] * stride[d];
            part.lo[d] = box.lo[d] + span[i].lo[d];
            part.n[d] = span[i].n[d];
        }
        const int rc = fn(ctx, unit, &part, u->at + at * esize);
        if (rc != 0)
            return rc;
    }
    return 0;
}

static int make_streams(struct ckpt_plan *p, struct ckpt_err *err)
{
    lay_out(p);
    for (uint32_t g = 0; g < p->groups.len; g++) {
        if (p->groups.ptr[g].n == 1)
            continue;
        cut_spans(p, &p->stream[g], p->groups.ptr[g].n);
        if (choose_steps(p, g, err) < 0)
            return -1;
    }
    return 0;
}

/* ---- chunks and windows ---- */

void ckpt_plan_span(const struct ckpt_plan *p, uint32_t group, uint32_t member, uint64_t *ret_lo,
                    uint64_t *ret_hi)
{
    const struct ckpt_stream *s = &p->stream[group];
    const uint64_t each = s->nstep ? (uint64_t)s->nwindow * s->slice : s->len;

    *ret_lo = s->span ? s->span[member] : ckpt_min_u64(member * each, s->len);
    *ret_hi = s->span ? s->span[member + 1] : ckpt_min_u64(*ret_lo + each, s->len);
}

uint32_t ckpt_plan_reader(const struct ckpt_plan *p, uint32_t group, uint64_t at)
{
    const struct ckpt_stream *s = &p->stream[group];

    assert(at < s->len);
    if (s->span) /* the last of those that begin there: the others are empty */
        return (uint32_t)ckpt_last_at(s->span, sizeof *s->span, p->groups.ptr[group].n, at);
    return s->nstep ? (uint32_t)(at / ((uint64_t)s->nwindow * s->slice)) : 0;
}

void ckpt_plan_slice(const struct ckpt_plan *p, const struct ckpt_window *w, uint32_t member,
                     uint64_t *ret_lo, uint64_t *ret_hi)
{
    const struct ckpt_stream *s = &p->stream[w->group];

    if (s->nstep == 0) {
        *ret_lo = p->chunks.ptr[w->chunk].lo;
        *ret_hi = *ret_lo + p->chunks.ptr[w->chunk].len;
        return;
    }
    uint64_t lo, hi;
    ckpt_plan_span(p, w->group, member, &lo, &hi);
    *ret_lo = ckpt_min_u64(lo + (uint64_t)w->number * s->slice, hi);
    *ret_hi = ckpt_min_u64(*ret_lo + s->slice, hi);
}

static int add_chunk(struct ckpt_plan *p, uint32_t group, uint32_t number, uint64_t lo, uint64_t hi,
                     struct ckpt_err *err)
{
    const struct ckpt_chunk chunk = {group, number, lo, (uint32_t)(hi - lo)};

    assert(lo < hi && hi <= p->stream[group].len && hi - lo <= UINT32_MAX);
    return ckpt_vec_push(&p->chunks, chunk) < 0 ? ckpt_nomem(err) : 0;
}

/* Cut the stream of this rank alone into chunks of whole units. */
static int cut_alone(struct ckpt_plan *p, uint32_t group, struct ckpt_err *err)
{
    const struct ckpt_stream *s = &p->stream[group];
    uint64_t lo = 0;
    uint32_t number = 0;

    for (uint32_t u = s->lo; u < s->hi; u++) {
        const uint64_t end = p->units.ptr[u].at + p->units.ptr[u].len;
        const bool more = u + 1 < s->hi && end + p->units.ptr[u + 1].len - lo <= p->sizes.chunk;
        if (more)
            continue;
        if (add_chunk(p, group, number++, lo, end, err) < 0)
            return -1;
        lo = end;
    }
    return 0;
}

/* Cut this rank's span into chunks. `whole`: chunks of several slices, which are held for several
 * windows. */
static int cut_own_span(struct ckpt_plan *p, uint32_t group, bool whole, struct ckpt_err *err)
{
    const struct ckpt_stream *s = &p->stream[group];
    const uint32_t most = whole ? (uint32_t)(p->sizes.chunk / s->slice) : 1;
    const uint32_t each = (uint32_t)ckpt_max_u64(1, ckpt_min_u64(most, s->nwindow));
    uint64_t begin, end;

    ckpt_plan_span(p, group, p->groups.ptr[group].self, &begin, &end);
    for (uint32_t k = 0; k < s->nwindow; k += each) {
        const uint64_t lo = ckpt_min_u64(begin + (uint64_t)k * s->slice, end);
        const uint64_t hi = ckpt_min_u64(lo + (uint64_t)each * s->slice, end);
        if (hi > lo && add_chunk(p, group, k, lo, hi, err) < 0)
            return -1;
    }
    return 0;
}

static int chunk_cmp(const void *pa, const void *pb)
{
    const struct ckpt_chunk *a = pa, *b = pb;
    const int c = ckpt_u64_cmp(a->number, b->number);

    return c ? c : ckpt_u64_cmp(a->group, b->group);
}

static int window_cmp(const void *pa, const void *pb)
{
    const struct ckpt_window *a = pa, *b = pb;
    const int c = ckpt_u64_cmp(a->number, b->number);

    return c ? c : ckpt_u64_cmp(a->group, b->group);
}

/* Cut what this rank reads. A chunk of several slices keeps its buffer for several windows, so
 * there must be more buffers than groups. */
static int make_chunks(struct ckpt_plan *p, struct ckpt_err *err)
{
    uint32_t shared = 0;

    for (uint32_t g = 0; g < p->groups.len; g++)
        shared += p->groups.ptr[g].n > 1;
    p->exchanges = shared > 0;
    const bool whole = shared > 0 && shared < p->sizes.ahead;
    p->held = whole ? shared + 1 : 1;
    for (uint32_t g = 0; g < p->groups.len; g++)
        if ((p->groups.ptr[g].n == 1 ? cut_alone(p, g, err) : cut_own_span(p, g, whole, err)) < 0)
            return -1;
    ckpt_sort(p->chunks.ptr, p->chunks.len, chunk_cmp);
    return 0;
}

uint32_t ckpt_plan_fed(const struct ckpt_plan *p, const struct ckpt_chunk *chunk)
{
    const struct ckpt_stream *s = &p->stream[chunk->group];

    return s->nstep ? (chunk->len + s->slice - 1) / s->slice : p->sizes.device;
}

/* List the windows: those that a chunk of this rank feeds, and those beyond its last byte. */
static int list_windows(struct ckpt_plan *p, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) uint32_t *fed = calloc(p->groups.len + 1, sizeof *fed);
    int rc = fed ? 0 : -1;

    for (uint32_t i = 0; i < p->chunks.len && rc == 0; i++) {
        const struct ckpt_chunk *chunk = &p->chunks.ptr[i];
        const uint32_t n = ckpt_plan_fed(p, chunk);
        /* each chunk of a group begins where the windows end that the one before feeds */
        assert(!p->stream[chunk->group].nstep || fed[chunk->group] == chunk->number);
        for (uint32_t k = 0; k < n && rc == 0; k++)
            rc = ckpt_vec_push(&p->windows,
                               ((struct ckpt_window){chunk->group, chunk->number + k, i}));
        fed[chunk->group] = chunk->number + n;
    }
    for (uint32_t g = 0; g < p->groups.len && rc == 0; g++)
        for (uint32_t k = fed[g]; k < p->stream[g].nwindow && rc == 0; k++)
            rc = ckpt_vec_push(&p->windows, ((struct ckpt_window){g, k, CKPT_NONE}));
    if (rc < 0)
        return ckpt_nomem(err);
    ckpt_sort(p->windows.ptr, p->windows.len, window_cmp);
    return 0;
}

/* ---- the wants in a region ---- */

/* Append the overlaps of a box with the wants of this rank, and look at every want of the tensor.
 */
static int find_overlaps(const struct ckpt_plan *p, uint32_t tensor, const struct ckpt_box *within,
                         ckpt_overlaps *out, struct ckpt_err *err)
{
    const struct ckpt_job_wants *r = p->job_wants;
    const uint32_t class = r->class_of[p->self];
    const struct ckpt_tensor *t = &r->cat->tensors.ptr[tensor];
    const struct ckpt_wants *w = &r->table[class];
    uint64_t i, end = ckpt_job_wants_uses(r, tensor, class, &i);

    for (; i < end; i++) {
        struct ckpt_overlap overlap = {.entry = r->use[i].entry};
        struct ckpt_box box;
        if (!ckpt_wants_box(w, &w->entries.ptr[overlap.entry], t, p->self, &box) ||
            !ckpt_box_intersect(&box, within, &overlap.box))
            continue;
        overlap.bytes = ckpt_box_numel(&overlap.box) * ckpt_dtype_size(t->dtype);
        if (ckpt_vec_push(out, overlap) < 0)
            return ckpt_nomem(err);
    }
    return 0;
}

int ckpt_plan_wanted(const struct ckpt_plan *p, uint32_t unit, const struct ckpt_box *box,
                     ckpt_overlaps *out, struct ckpt_err *err)
{
    const struct ckpt_region *r = &p->regions.ptr[p->units.ptr[unit].region];
    const struct ckpt_overlap all = {r->entry, ckpt_box_numel(box) * region_esize(p, r), *box};

    if (r->entry == CKPT_NONE)
        return find_overlaps(p, r->tensor, box, out, err);
    return ckpt_vec_push(out, all) < 0 ? ckpt_nomem(err) : 0;
}

/* Usually exactly one want of this rank has a region, and has all of it. */
static int find_entry(const struct ckpt_plan *p, struct ckpt_region *r, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_vec_cleanup) ckpt_overlaps found = {0};
    const int rc = find_overlaps(p, r->tensor, &r->box, &found, err);

    r->entry =
        found.len == 1 && ckpt_box_eq(&found.ptr->box, &r->box) ? found.ptr->entry : CKPT_NONE;
    return rc;
}

/* ---- the whole ---- */

static int add_region(struct ckpt_plan *p, const struct ckpt_group_box *of,
                      const struct ckpt_box *box, struct ckpt_err *err)
{
    const struct ckpt_region region = {.box = *box, .tensor = of->tensor, .group = of->group};

    return ckpt_vec_push(&p->regions, region) < 0 ? ckpt_nomem(err) : 0;
}

/* Make regions of a box of which different ranks have parts: one for each piece of the tensor in
 * it, so that no unit lies in several files. *ret_done is false, and nothing is made, if the same
 * ranks have all of it, or its pieces are no boxes. */
static int split_box(struct ckpt_plan *p, const struct ckpt_holders *h,
                     const struct ckpt_group_box *of, bool *ret_done, struct ckpt_err *err)
{
    const struct ckpt_tensor *t = ckpt_tensor_stored(&p->job_wants->cat->tensors.ptr[of->tensor]);
    const size_t before = p->regions.len;
    uint64_t begin, end, left = ckpt_box_numel(&of->box);
    uint32_t set = CKPT_NONE;
    bool differs = false;
    struct ckpt_box piece, both;

    ckpt_box_range(&of->box, t->dim, &begin, &end);
    for (size_t i = ckpt_tensor_first_piece(t, begin); i < t->npiece && t->piece[i].dst < end;
         i++) {
        if (!ckpt_piece_box(&t->piece[i], t->dim, t->rank, &piece))
            break; /* then something is left */
        if (!ckpt_box_intersect(&of->box, &piece, &both))
            continue;
        differs |= p->regions.len > before && ckpt_holders_set(h, t->piece[i].source) != set;
        set = ckpt_holders_set(h, t->piece[i].source);
        left -= ckpt_box_numel(&both);
        if (add_region(p, of, &both, err) < 0)
            return -1;
    }
    *ret_done = differs && left == 0;
    if (!*ret_done)
        p->regions.len = before;
    return 0;
}

static int find_regions(struct ckpt_plan *p, const struct ckpt_sharing *sharing,
                        struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_vec_cleanup) ckpt_group_boxes boxes = {0};
    const struct ckpt_holders *h = sharing->holders;

    if (ckpt_groups_find(p->job_wants, p->self, sharing, &p->groups, &boxes, err) < 0)
        return -1;
    if (ckpt_vec_reserve(&p->regions, boxes.len + 1) < 0)
        return ckpt_nomem(err);
    for (size_t i = 0; i < boxes.len; i++) {
        const struct ckpt_group_box *b = &boxes.ptr[i];
        const struct ckpt_tensor *t = &p->job_wants->cat->tensors.ptr[b->tensor];
        bool done = false;
        if (h && h->ranks.len && p->groups.ptr[b->group].n > 1 && t->rank > 0 &&
            !ckpt_tensor_is_decoded(t) && split_box(p, h, b, &done, err) < 0)
            return -1;
        if (!done && add_region(p, b, &b->box, err) < 0)
            return -1;
    }
    return 0;
}

int ckpt_plan_new(const struct ckpt_job_wants *job_wants, uint32_t self,
                  const struct ckpt_sharing *sharing, bool star,
                  const struct ckpt_plan_sizes *sizes, struct ckpt_plan **ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_plan_freep) struct ckpt_plan *p = calloc(1, sizeof *p);

    assert(sizes->unit > 0 && sizes->chunk > 0 && sizes->slice >= CKPT_UNIT_ALIGN);
    if (!p)
        return ckpt_nomem(err);
    p->job_wants = job_wants;
    p->self = self;
    p->sizes = *sizes;
    if (find_regions(p, sharing, err) < 0)
        return -1;
    for (size_t i = 0; i < p->regions.len; i++)
        if (find_entry(p, &p->regions.ptr[i], err) < 0)
            return -1;
    p->stream = calloc(p->groups.len + 1, sizeof *p->stream);
    p->broadcast = calloc(p->groups.len + 1, sizeof *p->broadcast);
    if (!p->stream || !p->broadcast)
        return ckpt_nomem(err);
    for (size_t g = 0; g < p->groups.len; g++)
        if (ckpt_broadcast_init(&p->broadcast[g], &p->groups.ptr[g], sharing->node, star, err) < 0)
            return -1;
    if (cut_units(p, sharing->holders, err) < 0 || make_streams(p, err) < 0 ||
        make_chunks(p, err) < 0 || list_windows(p, err) < 0)
        return -1;
    *ret = ckpt_steal(&p);
    return 0;
}

static uint64_t unit_digest(const struct ckpt_plan *p, uint32_t unit, uint64_t h)
{
    struct ckpt_box box;

    ckpt_plan_unit_box(p, unit, &box);
    h = XXH3_64bits_withSeed(&p->regions.ptr[p->units.ptr[unit].region].tensor, sizeof(uint32_t),
                             h);
    h = XXH3_64bits_withSeed(box.lo, box.rank * sizeof *box.lo, h);
    return XXH3_64bits_withSeed(box.n, box.rank * sizeof *box.n, h);
}

/* Everything in which the members of a group must agree. */
static uint64_t group_digest(const struct ckpt_plan *p, uint32_t group)
{
    const struct ckpt_group *g = &p->groups.ptr[group];
    const struct ckpt_stream *s = &p->stream[group];
    const uint64_t word[6] = {p->sizes.unit, p->sizes.slice, p->sizes.window,
                              s->len,        s->slice,       s->nwindow};
    uint64_t h =
        XXH3_64bits_withSeed(g->rank, g->n * sizeof *g->rank, XXH3_64bits(word, sizeof word));

    for (uint32_t u = s->lo; u < s->hi && g->n > 1; u++)
        h = unit_digest(p, u, h);
    return s->span ? XXH3_64bits_withSeed(s->span, (g->n + (size_t)1) * sizeof *s->span, h) : h;
}

uint64_t ckpt_plan_claim(const struct ckpt_plan *p)
{
    uint64_t sum = 0;

    /* what the first member takes away, the others add */
    for (uint32_t g = 0; g < p->groups.len; g++) {
        const uint64_t h = group_digest(p, g), others = p->groups.ptr[g].n - 1;
        sum += p->groups.ptr[g].self == 0 ? 0 - others * h : h;
    }
    return sum;
}
