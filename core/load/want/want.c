/* SPDX-License-Identifier: Apache-2.0 */
/* Tables of wants: building, queries, serialization. */
#include "load/want/want.h"

#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "base/ckd.h"
#include "base/map.h"
#include "base/mem.h"
#include "base/str.h"
#include "io/cursor.h"

enum { MAGIC = 3 }; /* the version */

void ckpt_wants_release(struct ckpt_wants *w)
{
    ckpt_vec_release(&w->boxes);
    for (size_t i = 0; i < w->grids.len && !w->form; i++)
        free(w->grids.ptr[i].rank);
    if (!w->form) {
        ckpt_vec_release(&w->grids);
        ckpt_vec_release(&w->specs);
        ckpt_vec_release(&w->entries);
    }
    *w = (struct ckpt_wants){0};
}

/* ---- building ---- */

static bool same_grid(const struct ckpt_grid *g, uint32_t ndim, const uint32_t *dim,
                      const uint32_t *rank, uint32_t nrank)
{
    return g->ndim == ndim && g->nrank == nrank && memcmp(g->dim, dim, ndim * sizeof *dim) == 0 &&
           memcmp(g->rank, rank, nrank * sizeof *rank) == 0;
}

/* If the ranks are runs of the same length at the same distance, ckpt_grid_find can compute the
 * place of a rank instead of searching for it. */
static void find_runs(struct ckpt_grid *g)
{
    uint32_t run = 1;

    while (run < g->nrank && g->rank[run] == g->rank[0] + run)
        run++;
    g->run = run;
    g->step = run < g->nrank ? g->rank[run] - g->rank[0] : run;
    for (uint32_t i = 0; i < g->nrank && g->run; i++)
        if (g->step < run || g->rank[i] != g->rank[0] + (uint64_t)(i / run) * g->step + i % run)
            g->run = 0;
}

uint32_t ckpt_wants_grid(struct ckpt_wants *w, uint32_t ndim, const uint32_t *dim,
                         const uint32_t *rank, struct ckpt_err *err)
{
    struct ckpt_grid g = {.ndim = ndim, .nrank = 1};

    for (uint32_t d = 0; d < ndim; d++) {
        g.dim[d] = dim[d];
        g.nrank *= dim[d];
    }
    for (size_t i = w->grids.len; i-- > 0;)
        if (same_grid(&w->grids.ptr[i], ndim, dim, rank, g.nrank))
            return (uint32_t)i;
    if (ckpt_vec_reserve(&w->grids, 1) < 0 ||
        !(g.rank = malloc((g.nrank + !g.nrank) * sizeof *rank)))
        return (void)ckpt_nomem(err), CKPT_NONE;
    memcpy(g.rank, rank, g.nrank * sizeof *rank);
    find_runs(&g);
    w->grids.ptr[w->grids.len++] = g;
    return (uint32_t)w->grids.len - 1;
}

static bool same_spec(const struct ckpt_spec *a, const struct ckpt_spec *b)
{
    if (a->grid != b->grid || a->ncut != b->ncut)
        return false;
    for (uint32_t i = 0; i < a->ncut; i++)
        if (a->cut[i].dim != b->cut[i].dim || a->cut[i].axis != b->cut[i].axis)
            return false;
    return true;
}

uint32_t ckpt_wants_spec(struct ckpt_wants *w, const struct ckpt_spec *spec, struct ckpt_err *err)
{
    for (size_t i = w->specs.len; i-- > 0;)
        if (same_spec(&w->specs.ptr[i], spec))
            return (uint32_t)i;
    if (ckpt_vec_push(&w->specs, *spec) < 0)
        return (void)ckpt_nomem(err), CKPT_NONE;
    return (uint32_t)w->specs.len - 1;
}

int ckpt_wants_add(struct ckpt_wants *w, const struct ckpt_catalog *cat, uint32_t tensor,
                   uint32_t spec, const struct ckpt_box *box, struct ckpt_err *err)
{
    struct ckpt_want e = {tensor, spec, 0, (uint32_t)w->boxes.len, CKPT_NONE};

    if (ckpt_vec_reserve(&w->boxes, 2 * CKPT_MAX_RANK) < 0)
        return ckpt_nomem(err);
    for (uint32_t d = 0; box && d < box->rank; d++)
        if (box->n[d] != cat->tensors.ptr[tensor].dim[d]) {
            e.dims |= 1u << d;
            w->boxes.ptr[w->boxes.len++] = box->lo[d];
            w->boxes.ptr[w->boxes.len++] = box->n[d];
        }
    return ckpt_vec_push(&w->entries, e) < 0 ? ckpt_nomem(err) : 0;
}

/* ---- queries ---- */

/* The number of words of an entry's box: two for each interval. */
static uint32_t words(const struct ckpt_want *e)
{
    return 2 * (uint32_t)__builtin_popcount(e->dims);
}

uint32_t ckpt_grid_find(const struct ckpt_grid *g, uint32_t rank)
{
    if (g->run) {
        const uint64_t off = (uint64_t)rank - g->rank[0];
        const uint64_t at = off / g->step * g->run + off % g->step;
        return rank >= g->rank[0] && off % g->step < g->run && at < g->nrank ? (uint32_t)at
                                                                             : CKPT_NONE;
    }
    for (uint32_t i = 0; i < g->nrank; i++)
        if (g->rank[i] == rank)
            return i;
    return CKPT_NONE;
}

bool ckpt_grid_index(const struct ckpt_grid *g, uint32_t rank, uint32_t index[CKPT_GRID_DIMS])
{
    uint32_t at = ckpt_grid_find(g, rank);

    if (at == CKPT_NONE)
        return false;
    for (uint32_t d = g->ndim; d-- > 0; at /= g->dim[d])
        index[d] = at % g->dim[d];
    return true;
}

uint32_t ckpt_spec_part(const struct ckpt_wants *w, const struct ckpt_spec *s, uint32_t rank)
{
    const struct ckpt_grid *g = &w->grids.ptr[s->grid];
    uint32_t index[CKPT_GRID_DIMS], part = 0;

    if (!ckpt_grid_index(g, rank, index))
        return CKPT_NONE;
    for (uint32_t i = 0; i < s->ncut; i++)
        part = part * g->dim[s->cut[i].axis] + index[s->cut[i].axis];
    return part;
}

/* Keep the index-th of `parts` parts of a box along a dimension, as torch.chunk divides it. */
static void cut_box(struct ckpt_box *box, uint32_t dim, uint32_t parts, uint32_t index)
{
    uint64_t n = box->n[dim], chunk = (n + parts - 1) / parts;
    uint64_t lo = ckpt_min_u64(n, chunk * index);

    box->lo[dim] += lo;
    box->n[dim] = ckpt_min_u64(chunk, n - lo);
}

/* The box of an entry before its placement divides it. */
static void undivided(const struct ckpt_wants *w, const struct ckpt_want *e,
                      const struct ckpt_tensor *t, struct ckpt_box *ret)
{
    const uint64_t *word = e->dims ? w->boxes.ptr + e->box : NULL;

    ret->rank = t->rank;
    for (uint32_t d = 0; d < t->rank; d++) {
        const bool given = e->dims >> d & 1;
        ret->lo[d] = given ? *word++ : 0;
        ret->n[d] = given ? *word++ : t->dim[d];
    }
}

/* A walk through the parts of a placement that overlap with a box, one cut at a time. */
struct part_walk {
    const struct ckpt_grid *grid;
    const struct ckpt_spec *spec;
    const struct ckpt_box *with;
    int (*fn)(void *ctx, uint32_t part, const struct ckpt_box *box);
    void *ctx;
};

static int walk_parts(struct part_walk *k, uint32_t cut, uint32_t part, const struct ckpt_box *box)
{
    struct ckpt_box both;

    if (!ckpt_box_intersect(box, k->with, &both))
        return 0;
    if (cut == k->spec->ncut)
        return k->fn(k->ctx, part, box);
    const uint32_t dim = k->spec->cut[cut].dim, parts = k->grid->dim[k->spec->cut[cut].axis];
    const uint64_t chunk = (box->n[dim] + parts - 1) / parts, from = both.lo[dim] - box->lo[dim];
    const uint64_t last = (from + both.n[dim] - 1) / chunk;
    int rc = 0;
    for (uint64_t i = from / chunk; i <= last && rc == 0; i++) {
        struct ckpt_box sub = *box;
        cut_box(&sub, dim, parts, (uint32_t)i);
        rc = walk_parts(k, cut + 1, part * parts + (uint32_t)i, &sub);
    }
    return rc;
}

int ckpt_wants_parts(const struct ckpt_wants *w, const struct ckpt_want *e,
                     const struct ckpt_tensor *t, const struct ckpt_box *with,
                     int (*fn)(void *ctx, uint32_t part, const struct ckpt_box *box), void *ctx)
{
    static const struct ckpt_spec none = {0};
    struct part_walk k = {.spec = &none, .with = with, .fn = fn, .ctx = ctx};
    struct ckpt_box box;

    undivided(w, e, t, &box);
    if (e->spec != CKPT_NONE) {
        k.spec = &w->specs.ptr[e->spec];
        k.grid = &w->grids.ptr[k.spec->grid];
    }
    return walk_parts(&k, 0, 0, &box);
}

int ckpt_spec_ranks(const struct ckpt_wants *w, const struct ckpt_spec *s, uint32_t part,
                    int (*fn)(void *ctx, uint32_t rank), void *ctx)
{
    const struct ckpt_grid *g = &w->grids.ptr[s->grid];
    uint32_t index[CKPT_GRID_DIMS] = {0};
    bool fixed[CKPT_GRID_DIMS] = {false};

    for (uint32_t i = s->ncut; i-- > 0; part /= g->dim[s->cut[i].axis]) {
        index[s->cut[i].axis] = part % g->dim[s->cut[i].axis];
        fixed[s->cut[i].axis] = true;
    }
    for (;;) {
        uint32_t at = 0, d = g->ndim;
        for (uint32_t k = 0; k < g->ndim; k++)
            at = at * g->dim[k] + index[k];
        int rc = fn(ctx, g->rank[at]);
        while (rc == 0 &&
               d-- > 0) { /* the next coordinates, in the dimensions that are not fixed */
            if (fixed[d])
                continue;
            if (++index[d] < g->dim[d])
                break;
            index[d] = 0;
        }
        if (rc != 0 || d == UINT32_MAX)
            return rc;
    }
}

bool ckpt_wants_box(const struct ckpt_wants *w, const struct ckpt_want *e,
                    const struct ckpt_tensor *t, uint32_t rank, struct ckpt_box *ret)
{
    undivided(w, e, t, ret);
    if (e->spec != CKPT_NONE) {
        const struct ckpt_spec *s = &w->specs.ptr[e->spec];
        const struct ckpt_grid *g = &w->grids.ptr[s->grid];
        uint32_t index[CKPT_GRID_DIMS];
        if (!ckpt_grid_index(g, rank, index))
            return false;
        for (uint32_t i = 0; i < s->ncut; i++)
            cut_box(ret, s->cut[i].dim, g->dim[s->cut[i].axis], index[s->cut[i].axis]);
    }
    for (uint32_t d = 0; d < ret->rank; d++)
        if (ret->n[d] == 0)
            return false;
    return true;
}

int ckpt_wants_meet(const struct ckpt_wants *w, const struct ckpt_wants *own,
                    const struct ckpt_catalog *cat, uint32_t rank, bool *ret, struct ckpt_err *err)
{
    const size_t n = own->entries.len, ntensor = cat->tensors.len;
    ckpt_cleanup(ckpt_freep) uint32_t *entry = malloc((ntensor + n + 1) * sizeof *entry);
    struct ckpt_box a, b, both;

    if (!entry)
        return ckpt_nomem(err);
    memset(entry, 0xff, ntensor * sizeof *entry); /* of each tensor: its last entry, or CKPT_NONE */
    uint32_t *before = entry + ntensor;           /* of each entry: the one before of its tensor */
    for (uint32_t i = 0; i < n; i++) {
        before[i] = entry[own->entries.ptr[i].tensor];
        entry[own->entries.ptr[i].tensor] = i;
    }
    *ret = false;
    for (size_t k = 0; k < w->entries.len && !*ret; k++) {
        const uint32_t t = w->entries.ptr[k].tensor;
        undivided(w, &w->entries.ptr[k], &cat->tensors.ptr[t], &a);
        for (uint32_t i = entry[t]; i != CKPT_NONE && !*ret; i = before[i])
            *ret = ckpt_wants_box(own, &own->entries.ptr[i], &cat->tensors.ptr[t], rank, &b) &&
                   ckpt_box_intersect(&a, &b, &both);
    }
    return 0;
}

uint64_t ckpt_wants_numel(const struct ckpt_wants *w, const struct ckpt_want *e,
                          const struct ckpt_tensor *t, const uint32_t *index)
{
    const struct ckpt_spec *s = e->spec == CKPT_NONE ? NULL : &w->specs.ptr[e->spec];
    struct ckpt_box box;

    undivided(w, e, t, &box);
    for (uint32_t i = 0; s && i < s->ncut; i++)
        cut_box(&box, s->cut[i].dim, w->grids.ptr[s->grid].dim[s->cut[i].axis],
                index[s->cut[i].axis]);
    return ckpt_box_numel(&box);
}

/* ---- serialization: numbers of 7 bits a byte, the lowest first; the last byte of a number has
 * its highest bit clear ---- */

static void put(struct ckpt_str *s, uint64_t v)
{
    for (; v > 127; v >>= 7)
        ckpt_str_putc(s, (char)(v | 128));
    ckpt_str_putc(s, (char)v);
}

static uint64_t take(struct ckpt_cursor *c)
{
    uint64_t v = 0;

    for (uint32_t shift = 0; shift < 64; shift += 7) {
        const uint64_t byte = ckpt_cursor_u8(c);
        v |= (byte & 127) << shift;
        if (byte < 128)
            break;
    }
    return v;
}

/* A number of 32 bits; CKPT_NONE, which is none of those that are allowed, for a larger one. */
static uint32_t take32(struct ckpt_cursor *c) { return (uint32_t)ckpt_min_u64(take(c), CKPT_NONE); }

/* Equal boxes of tensors of one shape are written once. Which these are is the same on all ranks
 * that cut the tensors alike, so that their tables get one form. ret[i] becomes the place of entry
 * i's box in `boxes`. */
static int place_boxes(const struct ckpt_wants *w, const struct ckpt_catalog *cat, uint32_t *ret,
                       struct ckpt_str *boxes, struct ckpt_err *err)
{
    const uint32_t n = (uint32_t)w->entries.len;
    ckpt_cleanup(ckpt_freep) uint64_t(*key)[2] = calloc((size_t)n + 1, sizeof *key);
    ckpt_cleanup(ckpt_freep) uint32_t *first = calloc((size_t)n + 1, sizeof *first);
    uint32_t nbox, place = 0;

    if (!key || !first)
        return ckpt_nomem(err);
    for (uint32_t i = 0; i < n; i++) {
        const struct ckpt_want *e = &w->entries.ptr[i];
        const struct ckpt_tensor *t = &cat->tensors.ptr[e->tensor];
        const XXH64_hash_t shape = XXH3_64bits_withSeed(t->dim, t->rank * sizeof *t->dim, e->dims);
        const XXH128_hash_t hash =
            XXH3_128bits_withSeed(w->boxes.ptr + e->box, words(e) * sizeof(uint64_t), shape);
        memcpy(key[i], &hash, sizeof hash);
    }
    if (ckpt_map_number((const uint64_t(*)[2])key, n, ret, first, &nbox) < 0)
        return ckpt_nomem(err);
    for (uint32_t b = 0; b < nbox; b++) {
        const struct ckpt_want *e = &w->entries.ptr[first[b]];
        first[b] = place; /* from here on */
        for (uint32_t k = 0; k < words(e); k++, place++)
            put(boxes, w->boxes.ptr[e->box + k]);
    }
    for (uint32_t i = 0; i < n; i++)
        ret[i] = first[ret[i]];
    return 0;
}

static void put_form(const struct ckpt_wants *w, const uint32_t *place, struct ckpt_str *s)
{
    put(s, MAGIC);
    put(s, w->grids.len);
    put(s, w->specs.len);
    put(s, w->entries.len);
    for (size_t i = 0; i < w->grids.len; i++) {
        const struct ckpt_grid *g = &w->grids.ptr[i];
        put(s, g->ndim);
        for (uint32_t d = 0; d < g->ndim; d++)
            put(s, g->dim[d]);
        for (uint32_t k = 0; k < g->nrank; k++)
            put(s, g->rank[k]);
    }
    for (size_t i = 0; i < w->specs.len; i++) {
        const struct ckpt_spec *p = &w->specs.ptr[i];
        put(s, p->grid);
        put(s, p->ncut);
        for (uint32_t k = 0; k < p->ncut; k++) {
            put(s, p->cut[k].dim);
            put(s, p->cut[k].axis);
        }
    }
    for (size_t i = 0; i < w->entries.len; i++) {
        const struct ckpt_want *e = &w->entries.ptr[i];
        put(s, e->tensor);
        put(s, e->spec + 1); /* 0 for CKPT_NONE */
        put(s, e->dims);
        put(s, place[i]);
        put(s, e->dtype + 1);
    }
}

int ckpt_wants_dump(const struct ckpt_wants *w, const struct ckpt_catalog *cat,
                    struct ckpt_table *ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) uint32_t *place = calloc(w->entries.len + 1, sizeof *place);
    ckpt_cleanup(ckpt_str_release) struct ckpt_str s = {0}, boxes = {0};

    if (!place)
        return ckpt_nomem(err);
    if (place_boxes(w, cat, place, &boxes, err) < 0)
        return -1;
    put_form(w, place, &s);
    ret->form = s.len;
    ckpt_str_append(&s, boxes.ptr, boxes.len);
    s.failed |= boxes.failed;
    ret->len = s.len;
    if (s.failed)
        return ckpt_nomem(err);
    ret->data = (unsigned char *)ckpt_steal(&s.ptr);
    return 0;
}

static int bad(struct ckpt_err *err, const char *what)
{
    return ckpt_fail(err, CKPT_FORMAT, "the wants of another rank are damaged (%s)", what);
}

static int parse_grid(struct ckpt_cursor *c, struct ckpt_wants *w, uint32_t nrank,
                      struct ckpt_err *err)
{
    uint32_t ndim = take32(c), dim[CKPT_GRID_DIMS], n = 1;
    ckpt_cleanup(ckpt_freep) uint32_t *rank = NULL;

    if (ndim > CKPT_GRID_DIMS)
        return bad(err, "dimensions of a mesh");
    for (uint32_t d = 0; d < ndim; d++) {
        dim[d] = take32(c);
        if (ckd_mul(&n, n, dim[d]))
            return bad(err, "size of a mesh");
    }
    if (n == 0 || n > ckpt_cursor_left(c))
        return bad(err, "ranks of a mesh");
    if (!(rank = malloc(n * sizeof *rank)))
        return ckpt_nomem(err);
    ckpt_cleanup(ckpt_freep) uint8_t *seen = calloc(nrank + 1, sizeof *seen);
    if (!seen)
        return ckpt_nomem(err);
    for (uint32_t i = 0; i < n; i++)
        if ((rank[i] = take32(c)) >= nrank || seen[rank[i]]++)
            return bad(err, "a rank of a mesh");
    return ckpt_wants_grid(w, ndim, dim, rank, err) == CKPT_NONE ? -1 : 0;
}

static int parse_spec(struct ckpt_cursor *c, struct ckpt_wants *w, struct ckpt_err *err)
{
    struct ckpt_spec s;

    s.grid = take32(c);
    s.ncut = take32(c);
    if (s.grid >= w->grids.len || s.ncut > CKPT_SPEC_CUTS)
        return bad(err, "a placement");
    for (uint32_t k = 0; k < s.ncut; k++) {
        s.cut[k].dim = take32(c);
        s.cut[k].axis = take32(c);
        if (s.cut[k].dim >= CKPT_MAX_RANK || s.cut[k].axis >= w->grids.ptr[s.grid].ndim)
            return bad(err, "a cut");
        for (uint32_t i = 0; i < k; i++)
            if (s.cut[i].axis == s.cut[k].axis)
                return bad(err, "two cuts along one axis");
    }
    return ckpt_vec_push(&w->specs, s) < 0 ? ckpt_nomem(err) : 0;
}

static int parse_entry(struct ckpt_cursor *c, struct ckpt_wants *w, const struct ckpt_catalog *cat,
                       struct ckpt_err *err)
{
    struct ckpt_want e;

    e.tensor = take32(c);
    e.spec = take32(c) - 1;
    e.dims = take32(c);
    e.box = take32(c);
    e.dtype = take32(c) - 1;
    if (e.tensor >= cat->tensors.len || (e.spec != CKPT_NONE && e.spec >= w->specs.len) ||
        e.dims >> cat->tensors.ptr[e.tensor].rank ||
        (e.dtype != CKPT_NONE && e.dtype >= CKPT_NDTYPE))
        return bad(err, "a want");
    for (uint32_t k = 0; e.spec != CKPT_NONE && k < w->specs.ptr[e.spec].ncut; k++)
        if (w->specs.ptr[e.spec].cut[k].dim >= cat->tensors.ptr[e.tensor].rank)
            return bad(err, "a cut of a dimension that its tensor lacks");
    return ckpt_vec_push(&w->entries, e) < 0 ? ckpt_nomem(err) : 0;
}

static int parse_form(struct ckpt_cursor *c, struct ckpt_wants *w, const struct ckpt_catalog *cat,
                      uint32_t nrank, struct ckpt_err *err)
{
    const uint32_t magic = take32(c), ngrid = take32(c), nspec = take32(c), nentry = take32(c);
    int rc = magic == MAGIC ? 0 : bad(err, "its first word");

    for (uint32_t i = 0; i < ngrid && rc == 0 && !c->failed; i++)
        rc = parse_grid(c, w, nrank, err);
    for (uint32_t i = 0; i < nspec && rc == 0 && !c->failed; i++)
        rc = parse_spec(c, w, err);
    for (uint32_t i = 0; i < nentry && rc == 0 && !c->failed; i++)
        rc = parse_entry(c, w, cat, err);
    if (rc == 0)
        rc = ckpt_cursor_report(c, err);
    return rc == 0 && w->grids.len != ngrid ? bad(err, "the same mesh twice") : rc;
}

/* Parse the boxes, which are the rest of the bytes, and check those of all entries. */
static int parse_boxes(struct ckpt_cursor *c, struct ckpt_wants *w, const struct ckpt_catalog *cat,
                       struct ckpt_err *err)
{
    size_t n = 0;

    for (const unsigned char *at = c->at; at < c->end; at++)
        n += *at < 128;
    if (ckpt_vec_reserve(&w->boxes, n + !n) < 0)
        return ckpt_nomem(err);
    while (w->boxes.len < n)
        w->boxes.ptr[w->boxes.len++] = take(c);
    ckpt_vec_shrink(&w->boxes);
    if (ckpt_cursor_left(c))
        return bad(err, "its end");
    for (size_t i = 0; i < w->entries.len; i++) {
        const struct ckpt_want *e = &w->entries.ptr[i];
        const struct ckpt_tensor *t = &cat->tensors.ptr[e->tensor];
        struct ckpt_box box;
        if (!ckpt_range_ok(e->box, words(e), n))
            return bad(err, "the place of a box");
        undivided(w, e, t, &box);
        if (!ckpt_box_within(&box, t->dim, t->rank))
            return bad(err, "a box outside of its tensor");
    }
    return 0;
}

int ckpt_wants_parse(const void *data, size_t len, const struct ckpt_catalog *cat, uint32_t nrank,
                     const struct ckpt_wants *form, struct ckpt_wants *ret, struct ckpt_err *err)
{
    struct ckpt_cursor c;
    struct ckpt_wants w = {0};

    if (form) {
        w = *form;
        w.form = form;
        memset(&w.boxes, 0, sizeof w.boxes);
    }
    ckpt_cursor_init(&c, data, len, 0, "the wants of another rank");
    int rc = form ? 0 : parse_form(&c, &w, cat, nrank, err);
    if (rc == 0)
        rc = parse_boxes(&c, &w, cat, err);
    if (rc < 0)
        ckpt_wants_release(&w);
    else
        *ret = w;
    return rc;
}

uint64_t ckpt_wants_memory(const struct ckpt_wants *w)
{
    uint64_t bytes = sizeof *w + w->boxes.cap * sizeof *w->boxes.ptr;

    for (size_t i = 0; i < w->grids.len && !w->form; i++)
        bytes += w->grids.ptr[i].nrank * sizeof(uint32_t);
    return w->form
               ? bytes
               : bytes + w->grids.cap * sizeof *w->grids.ptr + w->specs.cap * sizeof *w->specs.ptr +
                     w->entries.cap * sizeof *w->entries.ptr;
}
