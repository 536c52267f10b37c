/* SPDX-License-Identifier: Apache-2.0 */
/* Regions -> units -> owners -> windows, and who sends what to whom. */
#include "load/plan.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "base/ckd.h"
#include "base/mem.h"
#include "load/regions.h"
#include "tensor/boxes.h"

enum { MAX_UNITS = 1 << 28 };

void ckpt_plan_free(struct ckpt_plan *p)
{
    if (!p)
        return;
    free(p->owner);
    ckpt_vec_release(&p->regions);
    ckpt_vec_release(&p->units);
    free(p->region_unit_first);
    free(p->region_unit);
    free(p->tensor_region);
    free(p->owner_unit);
    free(p->piece_first);
    ckpt_vec_release(&p->piece_unit);
    free(p->common);
    free(p);
}

static void plan_freep(struct ckpt_plan **p) { ckpt_plan_free(*p); }

const struct ckpt_tensor *ckpt_plan_unit_tensor(const struct ckpt_plan *p, uint32_t unit)
{
    return &p->roster->cat->tensors.ptr[p->regions.ptr[p->units.ptr[unit].region].tensor];
}

static size_t region_esize(const struct ckpt_plan *p, const struct ckpt_region *r)
{
    return ckpt_dtype_size(p->roster->cat->tensors.ptr[r->tensor].dtype);
}

/* ---- units ---- */

/* Along each dimension, the widest step in the file of the first piece. A tensor that is stored
 * transposed is cut as it is stored. */
static void order_dims(const struct ckpt_catalog *cat, struct ckpt_region *r)
{
    const struct ckpt_tensor *t =
        ckpt_tensor_stored(cat, &cat->tensors.ptr[r->tensor], &(const struct ckpt_catalog *){0});
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
    for (uint32_t i = 1; i < t->rank; i++) /* insertion sort, stable; size 1 goes to the front */
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

/* Fix dimensions from the outermost on until a step along the next one is small enough. */
static int cut_region(const struct ckpt_plan *p, struct ckpt_region *r, struct ckpt_err *err)
{
    const uint32_t rank = r->box.rank;
    uint64_t inner = ckpt_box_numel(&r->box) * region_esize(p, r), count = 1;

    r->cut = 0;
    r->step = r->parts = 1;
    for (uint32_t k = 0; k < rank; k++) {
        const uint64_t n = r->box.n[r->order[k]];
        r->cut = (uint8_t)k;
        inner /= n;
        if (inner <= p->sizes.unit || k + 1 == rank) {
            uint64_t most = ckpt_max_u64(1, inner ? p->sizes.unit / inner : n);
            r->parts = (n + most - 1) / most;
            r->step = (n + r->parts - 1) / r->parts;
            r->parts = (n + r->step - 1) / r->step;
            break;
        }
        count *= n;
    }
    if (ckd_mul(&count, count, r->parts) || count > MAX_UNITS)
        return ckpt_fail(err, CKPT_LIMIT, "tensor '%s' would be read in too small parts",
                         p->roster->cat->tensors.ptr[r->tensor].name);
    r->nunit = (uint32_t)count;
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
    lo = at % r->parts * r->step;
    at /= r->parts;
    ret->lo[d] += lo;
    ret->n[d] = ckpt_min_u64(r->step, r->box.n[d] - lo);
    for (uint32_t k = r->cut; k-- > 0;) {
        const uint32_t f = r->order[k];
        ret->lo[f] += at % r->box.n[f];
        ret->n[f] = 1;
        at /= r->box.n[f];
    }
}

static uint64_t unit_bytes(const struct ckpt_plan *p, uint32_t unit)
{
    struct ckpt_box box;

    ckpt_plan_unit_box(p, unit, &box);
    return ckpt_box_numel(&box) * region_esize(p, &p->regions.ptr[p->units.ptr[unit].region]);
}

/* Where the first element of a unit lies; computed tensors where their first operand does. */
static void place_unit(const struct ckpt_plan *p, uint32_t unit, struct ckpt_unit *u)
{
    const struct ckpt_catalog *cat;
    const struct ckpt_tensor *t =
        ckpt_tensor_stored(p->roster->cat, ckpt_plan_unit_tensor(p, unit), &cat);
    uint64_t stride[CKPT_MAX_RANK], at = 0;
    struct ckpt_box box;

    ckpt_plan_unit_box(p, unit, &box);
    ckpt_shape_strides(t->dim, t->rank, stride);
    for (uint32_t d = 0; d < t->rank; d++)
        at += box.lo[d] * stride[d];
    if (ckpt_tensor_place(t, at, &u->source, &u->off))
        return;
    u->source = UINT32_MAX;
    u->off = (uint64_t)p->regions.ptr[u->region].tensor << 32 | u->ordinal;
}

static int unit_cmp(const void *pa, const void *pb)
{
    const struct ckpt_unit *a = pa, *b = pb;

    if (a->source != b->source)
        return a->source < b->source ? -1 : 1;
    if (a->off != b->off)
        return a->off < b->off ? -1 : 1;
    if (a->region != b->region)
        return a->region < b->region ? -1 : 1;
    return (a->ordinal > b->ordinal) - (a->ordinal < b->ordinal);
}

static int cut_units(struct ckpt_plan *p, struct ckpt_err *err)
{
    uint64_t total = 0;

    for (size_t i = 0; i < p->regions.len; i++) {
        order_dims(p->roster->cat, &p->regions.ptr[i]);
        if (cut_region(p, &p->regions.ptr[i], err) < 0)
            return -1;
        total += p->regions.ptr[i].nunit;
    }
    if (total > MAX_UNITS)
        return ckpt_fail(err, CKPT_LIMIT, "the plan would have more than %d reads", MAX_UNITS);
    if (ckpt_vec_reserve(&p->units, total) < 0)
        return ckpt_nomem(err);
    for (size_t i = 0; i < p->regions.len; i++)
        for (uint32_t k = 0; k < p->regions.ptr[i].nunit; k++) {
            struct ckpt_unit *u = &p->units.ptr[p->units.len++];
            *u = (struct ckpt_unit){.region = (uint32_t)i, .ordinal = k};
            place_unit(p, (uint32_t)p->units.len - 1, u);
        }
    if (p->units.len)
        qsort(p->units.ptr, p->units.len, sizeof *p->units.ptr, unit_cmp);
    return 0;
}

/* tensor -> regions -> units. */
static int index_units(struct ckpt_plan *p, struct ckpt_err *err)
{
    const size_t ntensor = p->roster->cat->tensors.len;
    uint64_t at = 0;

    p->tensor_region = calloc(ntensor + 1, sizeof *p->tensor_region);
    p->region_unit_first = malloc((p->regions.len + 1) * sizeof *p->region_unit_first);
    p->region_unit = malloc((p->units.len + 1) * sizeof *p->region_unit);
    if (!p->tensor_region || !p->region_unit_first || !p->region_unit)
        return ckpt_nomem(err);
    for (size_t i = 0; i < p->regions.len; i++) {
        p->tensor_region[p->regions.ptr[i].tensor + 1]++;
        p->region_unit_first[i] = at;
        at += p->regions.ptr[i].nunit;
    }
    p->region_unit_first[p->regions.len] = at;
    for (size_t t = 0; t < ntensor; t++)
        p->tensor_region[t + 1] += p->tensor_region[t];
    for (size_t u = 0; u < p->units.len; u++)
        p->region_unit[p->region_unit_first[p->units.ptr[u].region] + p->units.ptr[u].ordinal] =
            (uint32_t)u;
    return 0;
}

/* ---- owners and windows ---- */

/* Owner o gets the units whose middle lies in its part of all bytes. */
static int share_out(struct ckpt_plan *p, struct ckpt_err *err)
{
    uint64_t done = 0, total = 0;
    uint32_t o = 0;

    if (!(p->owner_unit = malloc((p->nowner + 1) * sizeof *p->owner_unit)))
        return ckpt_nomem(err);
    p->owner_unit[0] = 0;
    for (uint32_t u = 0; u < p->units.len; u++)
        total += unit_bytes(p, u);
    for (uint32_t u = 0; u < p->units.len; u++) {
        uint64_t bytes = unit_bytes(p, u);
        while (o + 1 < p->nowner &&
               (double)(done + bytes / 2) >= (double)total * (o + 1) / p->nowner)
            p->owner_unit[++o] = u;
        done += bytes;
    }
    while (o < p->nowner)
        p->owner_unit[++o] = (uint32_t)p->units.len;
    return 0;
}

static uint32_t max_u32(uint32_t a, uint32_t b) { return a > b ? a : b; }

static uint32_t turns_of(const struct ckpt_plan *p)
{
    return p->sizes.turns > 1 ? (uint32_t)p->sizes.turns : 1;
}

/* The window of an owner's piece: owners of one turn are spread over the domain, thus over nodes.
 */
static uint32_t window_of(const struct ckpt_plan *p, uint32_t owner, uint32_t piece)
{
    return piece * turns_of(p) + owner % turns_of(p);
}

static int cut_windows(struct ckpt_plan *p, struct ckpt_err *err)
{
    if (!(p->piece_first = malloc((p->nowner + 1) * sizeof *p->piece_first)))
        return ckpt_nomem(err);
    for (uint32_t o = 0; o < p->nowner; o++) {
        uint64_t filled = 0;
        uint32_t count = 0;
        p->piece_first[o] = (uint32_t)p->piece_unit.len;
        for (uint32_t u = p->owner_unit[o]; u < p->owner_unit[o + 1]; u++) {
            uint64_t bytes = unit_bytes(p, u);
            if (count == 0 || filled + bytes > p->sizes.piece) {
                if (ckpt_vec_push(&p->piece_unit, u) < 0)
                    return ckpt_nomem(err);
                count++;
                filled = 0;
            }
            filled += bytes;
        }
        if (ckpt_vec_push(&p->piece_unit, p->owner_unit[o + 1]) < 0)
            return ckpt_nomem(err);
        if (count)
            p->nwindow = max_u32(p->nwindow, window_of(p, o, count - 1) + 1);
    }
    p->piece_first[p->nowner] = (uint32_t)p->piece_unit.len;
    return 0;
}

void ckpt_plan_piece(const struct ckpt_plan *p, uint32_t o, uint32_t window, uint32_t *ret_lo,
                     uint32_t *ret_hi)
{
    const uint32_t first = p->piece_first[o], n = p->piece_first[o + 1] - first - 1;
    const uint32_t *unit = &p->piece_unit.ptr[first], turns = turns_of(p);
    const uint32_t piece = window % turns == o % turns ? window / turns : n;

    *ret_lo = unit[piece < n ? piece : n];
    *ret_hi = unit[piece < n ? piece + 1 : n];
}

/* The last of v[0..n) that is not above x; v[0] <= x. */
static uint32_t last_not_above(const uint32_t *v, uint32_t n, uint32_t x)
{
    uint32_t a = 0, b = n;

    while (b - a > 1) {
        uint32_t mid = a + (b - a) / 2;
        if (v[mid] <= x)
            a = mid;
        else
            b = mid;
    }
    return a;
}

void ckpt_plan_find(const struct ckpt_plan *p, uint32_t unit, uint32_t *ret_owner,
                    uint32_t *ret_window)
{
    uint32_t o = last_not_above(p->owner_unit, p->nowner, unit), first = p->piece_first[o];

    *ret_owner = o;
    *ret_window = window_of(
        p, o, last_not_above(&p->piece_unit.ptr[first], p->piece_first[o + 1] - first - 1, unit));
}

/* ---- what everybody wants ---- */

/* Does a class want all of the box, whatever the rank? */
static bool class_wants(const struct ckpt_roster *r, uint32_t class, uint32_t tensor,
                        const struct ckpt_box *box)
{
    const struct ckpt_wants *w = &r->table[class];
    const struct ckpt_tensor *t = &r->cat->tensors.ptr[tensor];

    uint64_t i, end = ckpt_roster_uses(r, tensor, class, &i);

    for (; i < end; i++) {
        const struct ckpt_want *e = &w->entries.ptr[r->use[i].entry];
        struct ckpt_box want, both;
        if (e->spec == CKPT_NONE && ckpt_wants_box(w, e, t, 0, &want) &&
            ckpt_box_intersect(&want, box, &both) && ckpt_box_numel(&both) == ckpt_box_numel(box))
            return true;
    }
    return false;
}

static int mark_common(struct ckpt_plan *p, struct ckpt_err *err)
{
    const struct ckpt_roster *r = p->roster;
    ckpt_cleanup(ckpt_freep) bool *class = calloc(r->nclass + 1, sizeof *class);

    p->common = calloc(p->units.len + 1, sizeof *p->common);
    if (!class || !p->common)
        return ckpt_nomem(err);
    for (uint32_t o = 0; o < p->nowner; o++)
        class[r->class_of[p->owner[o]]] = true;
    for (uint32_t u = 0; u < p->units.len; u++) {
        struct ckpt_box box;
        bool all = true;
        ckpt_plan_unit_box(p, u, &box);
        for (uint32_t c = 0; c < r->nclass && all; c++)
            all =
                !class[c] || class_wants(r, c, p->regions.ptr[p->units.ptr[u].region].tensor, &box);
        p->common[u] = all;
    }
    return 0;
}

bool ckpt_plan_common_run(const struct ckpt_plan *p, uint32_t lo, uint32_t hi, uint32_t *ret_lo,
                          uint32_t *ret_hi)
{
    while (lo < hi && !ckpt_plan_is_common(p, lo))
        lo++;
    *ret_lo = lo;
    while (lo < hi && ckpt_plan_is_common(p, lo))
        lo++;
    *ret_hi = lo;
    return *ret_lo < *ret_hi;
}

/* ---- the whole ---- */

/* As they lie in storage: a cast's operand. */
static uint64_t regions_bytes(const struct ckpt_roster *roster, const struct ckpt_region *region,
                              size_t n)
{
    const struct ckpt_catalog *cat;
    uint64_t bytes = 0;

    for (size_t i = 0; i < n; i++)
        bytes += ckpt_box_numel(&region[i].box) *
                 ckpt_dtype_size(ckpt_tensor_stored(
                                     roster->cat, &roster->cat->tensors.ptr[region[i].tensor], &cat)
                                     ->dtype);
    return bytes;
}

int ckpt_plan_bytes(const struct ckpt_roster *roster, const uint32_t *rank, uint32_t nrank,
                    uint64_t *ret, struct ckpt_err *err)
{
    ckpt_regions regions = {0};
    int rc = ckpt_regions_of(roster, rank, nrank, &regions, err);

    if (rc == 0)
        *ret = regions_bytes(roster, regions.ptr, regions.len);
    ckpt_vec_release(&regions);
    return rc;
}

int ckpt_plan_new(const struct ckpt_roster *roster, const uint32_t *rank, uint32_t nrank,
                  const struct ckpt_plan_sizes *sizes, struct ckpt_plan **ret, struct ckpt_err *err)
{
    ckpt_cleanup(plan_freep) struct ckpt_plan *p = calloc(1, sizeof *p);
    ckpt_regions regions = {0};

    assert(nrank > 0 && sizes->unit > 0 && sizes->piece >= sizes->unit);
    if (!p || !(p->owner = malloc(nrank * sizeof *rank)))
        return ckpt_nomem(err);
    p->roster = roster;
    p->nowner = nrank;
    memcpy(p->owner, rank, nrank * sizeof *rank);
    p->sizes = *sizes;
    int rc = ckpt_regions_of(roster, rank, nrank, &regions, err);
    p->regions.ptr = regions.ptr;
    p->regions.len = regions.len;
    p->regions.cap = regions.cap;
    if (rc < 0)
        return -1;
    p->bytes = regions_bytes(roster, p->regions.ptr, p->regions.len);
    if (cut_units(p, err) < 0 || index_units(p, err) < 0 || share_out(p, err) < 0 ||
        cut_windows(p, err) < 0 || (sizes->common && nrank > 1 && mark_common(p, err) < 0))
        return -1;
    *ret = ckpt_steal(&p);
    return 0;
}

uint64_t ckpt_plan_digest(const struct ckpt_plan *p)
{
    uint64_t h = XXH3_64bits(p->owner, p->nowner * sizeof *p->owner);

    h = XXH3_64bits_withSeed(&p->sizes, sizeof p->sizes, h);
    for (size_t i = 0; i < p->regions.len; i++) {
        const struct ckpt_region *r = &p->regions.ptr[i];
        const uint64_t head[4] = {r->tensor, r->nunit, r->step, r->parts};
        h = XXH3_64bits_withSeed(head, sizeof head, h);
        h = XXH3_64bits_withSeed(r->box.lo, r->box.rank * sizeof *r->box.lo, h);
        h = XXH3_64bits_withSeed(r->box.n, r->box.rank * sizeof *r->box.n, h);
    }
    for (size_t i = 0; i < p->units.len; i++) {
        const uint32_t u[2] = {p->units.ptr[i].region, p->units.ptr[i].ordinal};
        h = XXH3_64bits_withSeed(u, sizeof u, h);
    }
    h = XXH3_64bits_withSeed(p->owner_unit, (p->nowner + 1) * sizeof *p->owner_unit, h);
    return XXH3_64bits_withSeed(p->piece_unit.ptr, p->piece_unit.len * sizeof *p->piece_unit.ptr,
                                h);
}

/* ---- who wants what ---- */

int ckpt_plan_wanted(const struct ckpt_plan *p, uint32_t rank, uint32_t unit,
                     const struct ckpt_box *unit_box, ckpt_parts *out, struct ckpt_err *err)
{
    const struct ckpt_roster *r = p->roster;
    const uint32_t tensor = p->regions.ptr[p->units.ptr[unit].region].tensor;
    const struct ckpt_tensor *t = &r->cat->tensors.ptr[tensor];
    const struct ckpt_wants *w = &r->table[r->class_of[rank]];

    uint64_t i, end = ckpt_roster_uses(r, tensor, r->class_of[rank], &i);

    for (; i < end; i++) {
        struct ckpt_part part = {.peer = rank, .unit = unit, .entry = r->use[i].entry};
        struct ckpt_box box;
        if (!ckpt_wants_box(w, &w->entries.ptr[part.entry], t, rank, &box) ||
            !ckpt_box_intersect(&box, unit_box, &part.box))
            continue;
        part.bytes = ckpt_box_numel(&part.box) * ckpt_dtype_size(t->dtype);
        if (ckpt_vec_push(out, part) < 0)
            return ckpt_nomem(err);
    }
    return 0;
}

static int part_cmp(const void *pa, const void *pb)
{
    const struct ckpt_part *a = pa, *b = pb;

    if (a->window != b->window)
        return a->window < b->window ? -1 : 1;
    if (a->peer != b->peer)
        return a->peer < b->peer ? -1 : 1;
    if (a->unit != b->unit)
        return a->unit < b->unit ? -1 : 1;
    return (a->entry > b->entry) - (a->entry < b->entry);
}

int ckpt_plan_sends(const struct ckpt_plan *p, uint32_t self, uint32_t lo, uint32_t hi,
                    ckpt_parts *out, struct ckpt_err *err)
{
    const size_t before = out->len;
    uint32_t owner;

    for (uint32_t u = lo; u < hi; u++) {
        struct ckpt_box box;
        if (ckpt_plan_is_common(p, u))
            continue;
        ckpt_plan_unit_box(p, u, &box);
        for (uint32_t k = 0; k < p->nowner; k++)
            if (p->owner[k] != self && ckpt_plan_wanted(p, p->owner[k], u, &box, out, err) < 0)
                return -1;
    }
    for (size_t i = before; i < out->len; i++)
        ckpt_plan_find(p, out->ptr[i].unit, &owner, &out->ptr[i].window);
    if (out->len > before)
        qsort(out->ptr + before, out->len - before, sizeof *out->ptr, part_cmp);
    return 0;
}

/* Parts of one region that the box wants. */
static int receive_region(const struct ckpt_plan *p, uint32_t self, uint32_t region, uint32_t entry,
                          const struct ckpt_box *want, ckpt_parts *out, struct ckpt_err *err)
{
    const struct ckpt_region *r = &p->regions.ptr[region];
    const size_t esize = region_esize(p, r);
    struct ckpt_box box;

    if (!ckpt_box_intersect(want, &r->box, &box))
        return 0;
    for (uint32_t k = 0; k < r->nunit; k++) {
        struct ckpt_part part = {.unit = p->region_unit[p->region_unit_first[region] + k],
                                 .entry = entry};
        uint32_t owner;
        ckpt_plan_find(p, part.unit, &owner, &part.window);
        if (p->owner[owner] == self || ckpt_plan_is_common(p, part.unit))
            continue;
        ckpt_plan_unit_box(p, part.unit, &box);
        if (!ckpt_box_intersect(want, &box, &part.box))
            continue;
        part.peer = p->owner[owner];
        part.bytes = ckpt_box_numel(&part.box) * esize;
        if (ckpt_vec_push(out, part) < 0)
            return ckpt_nomem(err);
    }
    return 0;
}

int ckpt_plan_receives(const struct ckpt_plan *p, uint32_t self, ckpt_parts *out,
                       struct ckpt_err *err)
{
    const struct ckpt_wants *w = &p->roster->table[p->roster->class_of[self]];
    const size_t before = out->len;

    if (p->nowner == 1)
        return 0;
    for (uint32_t e = 0; e < w->entries.len; e++) {
        const uint32_t tensor = w->entries.ptr[e].tensor;
        struct ckpt_box want;
        if (!ckpt_wants_box(w, &w->entries.ptr[e], &p->roster->cat->tensors.ptr[tensor], self,
                            &want))
            continue;
        for (uint32_t i = p->tensor_region[tensor]; i < p->tensor_region[tensor + 1]; i++)
            if (receive_region(p, self, i, e, &want, out, err) < 0)
                return -1;
    }
    if (out->len > before)
        qsort(out->ptr + before, out->len - before, sizeof *out->ptr, part_cmp);
    return 0;
}
