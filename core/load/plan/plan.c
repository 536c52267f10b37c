/* SPDX-License-Identifier: Apache-2.0 */
/* Makes a plan: boxes of groups -> units -> readers -> pieces -> windows. */
#include "load/plan/plan.h"

#include <assert.h>
#include <stdlib.h>
#include <xxhash.h>

#include "base/ckd.h"
#include "base/mem.h"
#include "base/sort.h"
#include "load/want/regions.h"
#include "tensor/read.h"

enum {
    MAX_UNITS = 1 << 28,
    LEAST_UNIT = 256 << 10, /* bytes; units are not made smaller than this to give a reader more */
    LEAST_READ = 1 << 20,   /* bytes for which another reader is worth it, */
    FEW = 64,               /* but in groups of at most so many members */
    FEW_READ = 16 << 10,    /* so few bytes are enough */
    READS_AHEAD = 4,        /* units that each reader should have, at least */
};

void ckpt_plan_free(struct ckpt_plan *p)
{
    if (!p)
        return;
    for (size_t g = 0; p->broadcast && g < p->groups.len; g++)
        ckpt_broadcast_release(&p->broadcast[g]);
    free(p->broadcast);
    free(p->family);
    ckpt_groups_release(&p->groups);
    ckpt_vec_release(&p->regions);
    ckpt_vec_release(&p->units);
    ckpt_vec_release(&p->pieces);
    ckpt_vec_release(&p->windows);
    ckpt_vec_release(&p->own);
    free(p);
}

static void plan_freep(struct ckpt_plan **p) { ckpt_plan_free(*p); }

uint64_t ckpt_plan_memory(const struct ckpt_plan *p)
{
    uint64_t bytes = sizeof *p + p->regions.cap * sizeof *p->regions.ptr +
                     p->units.cap * sizeof *p->units.ptr + p->pieces.cap * sizeof *p->pieces.ptr +
                     p->windows.cap * sizeof *p->windows.ptr + p->own.cap * sizeof *p->own.ptr;

    for (size_t g = 0; g < p->groups.len; g++)
        bytes += sizeof *p->groups.ptr + sizeof *p->broadcast +
                 (uint64_t)p->groups.ptr[g].n * 4 * sizeof(uint32_t);
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

static uint64_t region_bytes(const struct ckpt_plan *p, const struct ckpt_region *r)
{
    return ckpt_box_numel(&r->box) * region_esize(p, r);
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

/* Choose cut, step and parts so that a unit has at most `size` bytes: take single indices of the
 * outer dimensions until a range of the next one is small enough. */
static int cut_region(const struct ckpt_plan *p, struct ckpt_region *r, uint64_t size,
                      struct ckpt_err *err)
{
    const uint32_t rank = r->box.rank;
    uint64_t inner = ckpt_box_numel(&r->box) * region_esize(p, r), count = 1;

    r->cut = 0;
    r->step = r->parts = 1;
    for (uint32_t k = 0; k < rank; k++) {
        const uint64_t n = r->box.n[r->order[k]];
        r->cut = (uint8_t)k;
        inner /= n;
        if (inner <= size || k + 1 == rank) {
            uint64_t most = ckpt_max_u64(1, inner ? size / inner : n);
            r->parts = (n + most - 1) / most;
            r->step = (n + r->parts - 1) / r->parts;
            r->parts = (n + r->step - 1) / r->step;
            break;
        }
        count *= n;
    }
    if (ckd_mul(&count, count, r->parts) || count > MAX_UNITS)
        return ckpt_fail(err, CKPT_LIMIT, "tensor '%s' would be read in too many small parts",
                         p->job_wants->cat->tensors.ptr[r->tensor].name);
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

/* Find the file and offset of a unit's first element (of a computed tensor: of the tensor that is
 * read for it). If it has none, `off` becomes a key that keeps such units in order. */
static void place_unit(const struct ckpt_plan *p, uint32_t unit, struct ckpt_unit *u)
{
    const struct ckpt_tensor *t = ckpt_tensor_stored(ckpt_plan_unit_tensor(p, unit));
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
    u->len = (uint32_t)((bytes + CKPT_UNIT_ALIGN - 1) / CKPT_UNIT_ALIGN * CKPT_UNIT_ALIGN);
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

/* The number of readers of a group of n ranks that wants this many bytes. */
static uint32_t readers_of(uint32_t n, uint64_t bytes)
{
    return (uint32_t)ckpt_max_u64(1, ckpt_min_u64(n, bytes / (n > FEW ? LEAST_READ : FEW_READ)));
}

/* The limit of a unit's bytes in a group: small enough that each reader has several units. */
static uint64_t unit_of(const struct ckpt_plan *p, uint32_t n, uint64_t bytes)
{
    if (n == 1)
        return p->sizes.unit;
    const uint64_t part = bytes / ((uint64_t)readers_of(n, bytes) * READS_AHEAD);
    return ckpt_min_u64(p->sizes.unit, ckpt_max_u64(part, LEAST_UNIT));
}

/* Cut all regions into units, and sort the units by group and place in the files. */
static int cut_units(struct ckpt_plan *p, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) uint64_t *bytes = calloc(p->groups.len + 1, sizeof *bytes);
    uint64_t total = 0;

    if (!bytes)
        return ckpt_nomem(err);
    for (size_t i = 0; i < p->regions.len; i++)
        bytes[p->regions.ptr[i].group] += region_bytes(p, &p->regions.ptr[i]);
    for (size_t i = 0; i < p->regions.len; i++) {
        struct ckpt_region *r = &p->regions.ptr[i];
        order_dims(p->job_wants->cat, r);
        if (cut_region(p, r, unit_of(p, p->groups.ptr[r->group].n, bytes[r->group]), err) < 0)
            return -1;
        total += r->nunit;
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
    return 0;
}

/* ---- readers and pieces ---- */

struct share_out {
    struct ckpt_plan *p;
    uint32_t group, nreader;
    uint32_t turns; /* number of windows that have one piece of each reader between them */
    struct ckpt_err *err;
};

/* Cut one reader's run of units into pieces. Readers are spread evenly over the group's members,
 * and thus over nodes. */
static int cut_pieces(const struct share_out *s, uint32_t reader, uint32_t lo, uint32_t hi)
{
    const uint32_t n = s->p->groups.ptr[s->group].n;
    struct ckpt_piece_plan piece = {.group = s->group,
                                    .reader = (uint32_t)((uint64_t)reader * n / s->nreader)};
    uint32_t count = 0;

    for (uint32_t u = lo; u < hi; u = piece.hi) {
        piece.lo = piece.hi = u;
        piece.len = 0;
        while (piece.hi < hi &&
               (piece.hi == u ||
                (uint64_t)piece.len + s->p->units.ptr[piece.hi].len <= s->p->sizes.piece))
            piece.len += s->p->units.ptr[piece.hi++].len;
        piece.number = count++ * s->turns + reader % s->turns;
        if (ckpt_vec_push(&s->p->pieces, piece) < 0)
            return ckpt_nomem(s->err);
    }
    return 0;
}

/* Divide a group's units among its readers: a reader gets the units whose middle is in its part of
 * the group's bytes. */
static int share_out(struct ckpt_plan *p, uint32_t group, uint32_t lo, uint32_t hi,
                     struct ckpt_err *err)
{
    const uint64_t at_once = ckpt_max_u64(1, p->sizes.window / p->sizes.piece);
    struct share_out s = {.p = p, .group = group, .err = err};
    uint64_t total = 0, done = 0;

    for (uint32_t u = lo; u < hi; u++)
        total += p->units.ptr[u].len;
    s.nreader = readers_of(p->groups.ptr[group].n, total);
    s.turns = (uint32_t)((s.nreader + at_once - 1) / at_once);
    for (uint32_t reader = 0, u = lo; reader < s.nreader; reader++) {
        const uint32_t first = u;
        while (u < hi && (reader + 1 == s.nreader || (double)(done + p->units.ptr[u].len / 2) <
                                                         (double)total * (reader + 1) / s.nreader))
            done += p->units.ptr[u++].len;
        if (cut_pieces(&s, reader, first, u) < 0)
            return -1;
    }
    return 0;
}

static int piece_cmp(const void *pa, const void *pb)
{
    const struct ckpt_piece_plan *a = pa, *b = pb;
    int c = ckpt_u64_cmp(a->number, b->number);

    c = c ? c : ckpt_u64_cmp(a->group, b->group);
    return c ? c : ckpt_u64_cmp(a->reader, b->reader);
}

/* List the windows and this rank's own pieces; the pieces are sorted. */
static int list_windows(struct ckpt_plan *p, struct ckpt_err *err)
{
    for (uint32_t i = 0; i < p->pieces.len; i++) {
        const struct ckpt_piece_plan *piece = &p->pieces.ptr[i];
        const struct ckpt_group *g = &p->groups.ptr[piece->group];
        struct ckpt_window *last = p->windows.len ? &p->windows.ptr[p->windows.len - 1] : NULL;
        if (piece->reader == g->self && ckpt_vec_push(&p->own, i) < 0)
            return ckpt_nomem(err);
        if (g->n == 1)
            continue;
        if (last && last->hi == i && last->group == piece->group && last->number == piece->number) {
            last->hi++;
            continue;
        }
        const struct ckpt_window window = {piece->group, piece->number, i, i + 1};
        if (ckpt_vec_push(&p->windows, window) < 0)
            return ckpt_nomem(err);
    }
    return 0;
}

static int make_pieces(struct ckpt_plan *p, struct ckpt_err *err)
{
    for (uint32_t lo = 0, hi; lo < p->units.len; lo = hi) {
        const uint32_t group = p->regions.ptr[p->units.ptr[lo].region].group;
        for (hi = lo; hi < p->units.len && p->regions.ptr[p->units.ptr[hi].region].group == group;)
            hi++;
        if (share_out(p, group, lo, hi, err) < 0)
            return -1;
    }
    if (p->pieces.len)
        qsort(p->pieces.ptr, p->pieces.len, sizeof *p->pieces.ptr, piece_cmp);
    return list_windows(p, err);
}

/* ---- the whole ---- */

/* The size of boxes in the dtype of the tensor that is read for them, such as a cast's operand. */
static uint64_t stored_bytes(const struct ckpt_job_wants *job_wants,
                             const struct ckpt_wanted_box *box, size_t n)
{
    uint64_t bytes = 0;

    for (size_t i = 0; i < n; i++)
        bytes +=
            ckpt_box_numel(&box[i].box) *
            ckpt_dtype_size(ckpt_tensor_stored(&job_wants->cat->tensors.ptr[box[i].tensor])->dtype);
    return bytes;
}

int ckpt_plan_bytes(const struct ckpt_job_wants *job_wants, const uint32_t *rank, uint32_t nrank,
                    uint64_t *ret, struct ckpt_err *err)
{
    ckpt_wanted_boxes boxes = {0};
    int rc = ckpt_regions_of(job_wants, rank, nrank, &boxes, err);

    if (rc == 0)
        *ret = stored_bytes(job_wants, boxes.ptr, boxes.len);
    ckpt_vec_release(&boxes);
    return rc;
}

static int find_regions(struct ckpt_plan *p, const struct ckpt_sharing *sharing,
                        struct ckpt_err *err)
{
    ckpt_group_boxes boxes = {0};
    int rc = ckpt_groups_find(p->job_wants, p->self, sharing, &p->groups, &boxes, err);

    if (rc == 0 && ckpt_vec_reserve(&p->regions, boxes.len + 1) < 0)
        rc = ckpt_nomem(err);
    for (size_t i = 0; i < boxes.len && rc == 0; i++)
        p->regions.ptr[p->regions.len++] = (struct ckpt_region){
            .box = boxes.ptr[i].box, .tensor = boxes.ptr[i].tensor, .group = boxes.ptr[i].group};
    ckpt_vec_release(&boxes);
    return rc;
}

int ckpt_plan_new(const struct ckpt_job_wants *job_wants, uint32_t self,
                  const struct ckpt_sharing *sharing, bool star,
                  const struct ckpt_plan_sizes *sizes, struct ckpt_plan **ret, struct ckpt_err *err)
{
    ckpt_cleanup(plan_freep) struct ckpt_plan *p = calloc(1, sizeof *p);

    assert(sizes->unit > 0 && sizes->piece >= sizes->unit);
    if (!p)
        return ckpt_nomem(err);
    p->job_wants = job_wants;
    p->self = self;
    p->sizes = *sizes;
    if (find_regions(p, sharing, err) < 0)
        return -1;
    p->family = calloc(p->groups.len + 1, sizeof *p->family);
    if (!p->family || !(p->broadcast = calloc(p->groups.len + 1, sizeof *p->broadcast)))
        return ckpt_nomem(err);
    for (size_t g = 0; g < p->groups.len; g++)
        if (ckpt_broadcast_init(&p->broadcast[g], &p->groups.ptr[g], sharing->node, star, err) < 0)
            return -1;
    if (cut_units(p, err) < 0 || make_pieces(p, err) < 0)
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

int ckpt_plan_claim(const struct ckpt_plan *p, uint64_t *ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) uint64_t *h = malloc((p->groups.len + 1) * sizeof *h);
    uint64_t sum = 0;

    if (!h)
        return ckpt_nomem(err);
    for (size_t g = 0; g < p->groups.len; g++)
        h[g] = XXH3_64bits_withSeed(p->groups.ptr[g].rank, p->groups.ptr[g].n * sizeof(uint32_t),
                                    XXH3_64bits(&p->sizes, sizeof p->sizes));
    for (size_t i = 0; i < p->pieces.len; i++) {
        const struct ckpt_piece_plan *piece = &p->pieces.ptr[i];
        const uint32_t word[4] = {piece->number, piece->reader, piece->hi - piece->lo, piece->len};
        uint64_t *its = &h[piece->group];
        if (p->groups.ptr[piece->group].n == 1)
            continue;
        *its = XXH3_64bits_withSeed(word, sizeof word, *its);
        for (uint32_t u = piece->lo; u < piece->hi; u++)
            *its = unit_digest(p, u, *its);
    }
    /* what the first member takes away, the others add */
    for (size_t g = 0; g < p->groups.len; g++)
        sum += p->groups.ptr[g].self == 0 ? (1 - (uint64_t)p->groups.ptr[g].n) * h[g] : h[g];
    *ret = sum;
    return 0;
}

/* ---- the wants in a unit ---- */

int ckpt_plan_wanted(const struct ckpt_plan *p, uint32_t unit, const struct ckpt_box *unit_box,
                     ckpt_parts *out, struct ckpt_err *err)
{
    const struct ckpt_job_wants *r = p->job_wants;
    const uint32_t tensor = p->regions.ptr[p->units.ptr[unit].region].tensor;
    const uint32_t class = r->class_of[p->self];
    const struct ckpt_tensor *t = &r->cat->tensors.ptr[tensor];
    const struct ckpt_wants *w = &r->table[class];
    uint64_t i, end = ckpt_job_wants_uses(r, tensor, class, &i);

    for (; i < end; i++) {
        struct ckpt_part part = {.entry = r->use[i].entry};
        struct ckpt_box box;
        if (!ckpt_wants_box(w, &w->entries.ptr[part.entry], t, p->self, &box) ||
            !ckpt_box_intersect(&box, unit_box, &part.box))
            continue;
        part.bytes = ckpt_box_numel(&part.box) * ckpt_dtype_size(t->dtype);
        if (ckpt_vec_push(out, part) < 0)
            return ckpt_nomem(err);
    }
    return 0;
}
