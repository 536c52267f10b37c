/* SPDX-License-Identifier: Apache-2.0 */
/* Building and searching catalogues. */
#include "tensor/catalog.h"

#include <assert.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/ckd.h"
#include "base/sort.h"

/* ---- pieces ---- */

void ckpt_piece_from_box(const uint64_t *dim, const struct ckpt_box *b, uint32_t source,
                         uint64_t src, const uint64_t *src_stride, struct ckpt_piece_draft *out)
{
    uint64_t stride[CKPT_MAX_RANK];

    ckpt_shape_strides(dim, b->rank, stride);
    out->source = source;
    out->src = src;
    out->dst = 0;
    out->naxis = b->rank;
    for (uint32_t d = 0; d < b->rank; d++) {
        out->dst += b->lo[d] * stride[d];
        out->axis[d] = (struct ckpt_axis){.n = b->n[d], .dst = stride[d], .src = src_stride[d]};
    }
}

bool ckpt_piece_box(const struct ckpt_piece *p, const uint64_t *dim, uint32_t rank,
                    struct ckpt_box *out)
{
    uint64_t stride[CKPT_MAX_RANK], at = p->dst;

    if (p->naxis != rank)
        return false;
    ckpt_shape_strides(dim, rank, stride);
    out->rank = rank;
    for (uint32_t d = 0; d < rank; d++) {
        if (p->axis[d].dst != stride[d])
            return false;
        out->lo[d] = at / stride[d];
        out->n[d] = p->axis[d].n;
        at %= stride[d];
    }
    return true;
}

/* The last element + 1. */
static uint64_t dst_end(const struct ckpt_piece *p)
{
    uint64_t end = p->dst + 1;

    for (uint32_t j = 0; j < p->naxis; j++)
        end += (p->axis[j].n - 1) * p->axis[j].dst;
    return end;
}

uint64_t ckpt_piece_numel(const struct ckpt_piece *p)
{
    uint64_t n = 1;

    for (uint32_t j = 0; j < p->naxis; j++)
        n *= p->axis[j].n;
    return n;
}

bool ckpt_piece_src_end(const struct ckpt_axis *axis, uint32_t naxis, uint64_t src, uint64_t esize,
                        uint64_t *ret)
{
    uint64_t end;

    if (ckd_add(&end, src, esize))
        return false;
    for (uint32_t j = 0; j < naxis; j++) {
        uint64_t more;
        if (axis[j].n == 0) {
            *ret = src;
            return true;
        }
        if (ckd_mul(&more, axis[j].n - 1, axis[j].src) || ckd_add(&end, end, more))
            return false;
    }
    *ret = end;
    return true;
}

/* ---- the table ---- */

enum { MAX_WARNINGS = 1000 };

int ckpt_catalog_new(struct ckpt_catalog **ret, struct ckpt_err *err)
{
    struct ckpt_catalog *cat = calloc(1, sizeof *cat);

    if (!cat || !(cat->about = json_object()) || !(cat->warnings = json_array())) {
        ckpt_catalog_free(cat);
        return ckpt_nomem(err);
    }
    *ret = cat;
    return 0;
}

int ckpt_catalog_new_like(const struct ckpt_catalog *of, struct ckpt_catalog **ret,
                          struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_catalog_freep) struct ckpt_catalog *cat = NULL;

    if (ckpt_catalog_new(&cat, err) < 0 || ckpt_catalog_add_sources(cat, of, err) < 0)
        return -1;
    if (json_object_update_new(cat->about, json_deep_copy(of->about)) < 0 ||
        (json_array_size(of->warnings) && json_array_extend(cat->warnings, of->warnings) < 0) ||
        (of->config && !(cat->config = json_deep_copy(of->config))))
        return ckpt_nomem(err);
    *ret = ckpt_steal(&cat);
    return 0;
}

void ckpt_catalog_free(struct ckpt_catalog *cat)
{
    if (!cat)
        return;
    for (size_t i = 0; i < cat->sources.len; i++)
        ckpt_source_unref(cat->sources.ptr[i]);
    for (size_t i = 0; i < cat->kept.len; i++)
        ckpt_catalog_free(cat->kept.ptr[i]);
    ckpt_vec_release(&cat->kept);
    ckpt_vec_release(&cat->sources);
    ckpt_vec_release(&cat->tensors);
    ckpt_map_release(&cat->by_name);
    ckpt_arena_release(&cat->arena);
    json_decref(cat->config);
    json_decref(cat->about);
    json_decref(cat->warnings);
    free(cat);
}

uint32_t ckpt_catalog_add_source(struct ckpt_catalog *cat, struct ckpt_source *s,
                                 struct ckpt_err *err)
{
    if (cat->sources.len >= UINT32_MAX - 1 || ckpt_vec_push(&cat->sources, s) < 0) {
        (void)ckpt_nomem(err);
        return UINT32_MAX;
    }
    (void)ckpt_source_ref(s);
    return (uint32_t)(cat->sources.len - 1);
}

int ckpt_catalog_add_sources(struct ckpt_catalog *cat, const struct ckpt_catalog *from,
                             struct ckpt_err *err)
{
    for (size_t i = 0; i < from->sources.len; i++)
        if (ckpt_catalog_add_source(cat, from->sources.ptr[i], err) == UINT32_MAX)
            return -1;
    return 0;
}

int ckpt_catalog_alias(const struct ckpt_catalog *cat, struct ckpt_catalog **ret,
                       struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_catalog_freep) struct ckpt_catalog *alias = NULL;

    if (ckpt_catalog_new(&alias, err) < 0 || ckpt_catalog_add_sources(alias, cat, err) < 0)
        return -1;
    if (ckpt_vec_reserve(&alias->tensors, cat->tensors.len) < 0)
        return ckpt_nomem(err);
    for (size_t i = 0; i < cat->tensors.len; i++)
        alias->tensors.ptr[alias->tensors.len++] = cat->tensors.ptr[i];
    *ret = ckpt_steal(&alias);
    return 0;
}

int ckpt_catalog_add(struct ckpt_catalog *cat, const char *name, enum ckpt_dtype dtype,
                     const uint64_t *dim, uint32_t rank, size_t *ret_index, struct ckpt_err *err)
{
    struct ckpt_tensor t = {.cat = cat, .dtype = (uint8_t)dtype, .rank = (uint8_t)rank};
    const uint32_t at = (uint32_t)cat->tensors.len;
    uint64_t nbytes;

    if (rank > CKPT_MAX_RANK)
        return ckpt_fail(err, CKPT_LIMIT, "tensor '%s' has %u dimensions, at most %d are supported",
                         name, rank, CKPT_MAX_RANK);
    if (!ckpt_shape_numel(dim, rank, &t.numel) ||
        ckd_mul(&nbytes, t.numel, (uint64_t)ckpt_dtype_size(dtype)) || nbytes > INT64_MAX)
        return ckpt_fail(err, CKPT_LIMIT, "tensor '%s' claims 2^63 bytes or more", name);
    if (cat->tensors.len >= UINT32_MAX - 1)
        return ckpt_fail(err, CKPT_LIMIT, "more than 2^32 tensors");

    char *own = ckpt_arena_strdup(&cat->arena, name);
    const unsigned pack = ckpt_dtype_pack(dtype);
    uint64_t *own_dim = ckpt_arena_alloc(&cat->arena, (pack == 1 ? 1 : 2) * rank * sizeof *dim);
    const uint32_t known = own && own_dim && ckpt_vec_reserve(&cat->tensors, 1) == 0
                               ? ckpt_map_add(&cat->by_name, own, at)
                               : CKPT_NONE;
    if (known == CKPT_NONE)
        return ckpt_nomem(err);
    if (known != at)
        return ckpt_fail(err, CKPT_CONFLICT, "tensor '%s' is listed twice", name);
    if (rank)
        memcpy(own_dim, dim, rank * sizeof *dim);
    if (pack != 1 && rank) {
        memcpy(own_dim + rank, dim, rank * sizeof *dim);
        own_dim[2 * rank - 1] *= pack ? pack : 1;
    }
    t.name = own;
    t.dim = own_dim;
    *ret_index = cat->tensors.len;
    cat->tensors.ptr[cat->tensors.len++] = t;
    return 0;
}

static int check_piece(const struct ckpt_catalog *cat, const struct ckpt_tensor *t,
                       const struct ckpt_piece_draft *p, struct ckpt_err *err)
{
    uint64_t end;

    assert(p->source < cat->sources.len);
    const struct ckpt_source *s = cat->sources.ptr[p->source];
    if (!ckpt_piece_src_end(p->axis, p->naxis, p->src, ckpt_dtype_size(t->dtype), &end) ||
        end > s->size) {
        ckpt_cleanup(ckpt_freep) char *name = ckpt_source_name(s);
        return ckpt_fail(err, CKPT_FORMAT,
                         "'%s' has %" PRIu64
                         " bytes, but tensor '%s' needs more of it (from byte %" PRIu64 " on)",
                         name ? name : "?", s->size, t->name, p->src);
    }
    return 0;
}

int ckpt_tensor_set_pieces(struct ckpt_catalog *cat, struct ckpt_tensor *t,
                           const struct ckpt_piece_draft *piece, size_t npiece,
                           struct ckpt_err *err)
{
    struct ckpt_piece *own = ckpt_arena_alloc(&cat->arena, npiece * sizeof *own);
    uint64_t max_span = 0;
    size_t naxes = 0;
    bool sorted = true;

    for (size_t i = 0; i < npiece; i++) {
        if (check_piece(cat, t, &piece[i], err) < 0)
            return -1;
        naxes += piece[i].naxis;
    }
    struct ckpt_axis *axis = ckpt_arena_alloc(&cat->arena, naxes * sizeof *axis);
    if (!own || !axis)
        return ckpt_nomem(err);
    for (size_t i = 0; i < npiece; i++) {
        const struct ckpt_piece_draft *p = &piece[i];
        own[i] = (struct ckpt_piece){p->dst, p->src, axis, p->naxis, p->source};
        memcpy(axis, p->axis, p->naxis * sizeof *axis);
        axis += p->naxis;
        sorted &= i == 0 || own[i - 1].dst <= own[i].dst;
        max_span = ckpt_max_u64(max_span, dst_end(&own[i]) - own[i].dst);
    }
    if (!sorted)
        qsort(own, npiece, sizeof *own, ckpt_u64s_cmp); /* by the first member */
    t->cat = cat;
    t->piece = own;
    t->npiece = npiece;
    t->max_span = max_span;
    return 0;
}

int ckpt_tensor_copy_pieces(struct ckpt_catalog *cat, struct ckpt_tensor *to,
                            const struct ckpt_tensor *from, uint32_t first_source,
                            struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) struct ckpt_piece_draft *draft =
        malloc((from->npiece + 1) * sizeof *draft);

    if (!draft)
        return ckpt_nomem(err);
    for (size_t i = 0; i < from->npiece; i++) {
        const struct ckpt_piece *p = &from->piece[i];
        draft[i] = (struct ckpt_piece_draft){
            .dst = p->dst, .src = p->src, .naxis = p->naxis, .source = first_source + p->source};
        memcpy(draft[i].axis, p->axis, p->naxis * sizeof *p->axis);
    }
    return ckpt_tensor_set_pieces(cat, to, draft, from->npiece, err);
}

int ckpt_catalog_copy(struct ckpt_catalog *cat, const struct ckpt_tensor *t, uint32_t first_source,
                      struct ckpt_err *err)
{
    size_t index;

    if (ckpt_catalog_add(cat, t->name, t->dtype, t->dim, t->rank, &index, err) < 0 ||
        ckpt_tensor_copy_pieces(cat, &cat->tensors.ptr[index], t, first_source, err) < 0)
        return -1;
    cat->tensors.ptr[index].ranks = t->ranks;
    cat->tensors.ptr[index].wanted = t->wanted;
    return 0;
}

int ckpt_catalog_keep(struct ckpt_catalog *cat, struct ckpt_catalog *other, struct ckpt_err *err)
{
    return ckpt_vec_push(&cat->kept, other) < 0 ? ckpt_nomem(err) : 0;
}

int ckpt_catalog_set_state(struct ckpt_catalog *cat, size_t index, const struct ckpt_state *state,
                           struct ckpt_err *err)
{
    struct ckpt_state *own = ckpt_arena_alloc(&cat->arena, sizeof *own);

    if (!own || !(own->kind = ckpt_arena_strdup(&cat->arena, state->kind)) ||
        !(own->parameter = ckpt_arena_strdup(&cat->arena, state->parameter)))
        return ckpt_nomem(err);
    own->weight = state->weight ? ckpt_arena_strdup(&cat->arena, state->weight) : NULL;
    if (state->weight && !own->weight)
        return ckpt_nomem(err);
    cat->tensors.ptr[index].state = own;
    return 0;
}

int ckpt_catalog_set_pieces(struct ckpt_catalog *cat, size_t index,
                            const struct ckpt_piece_draft *piece, size_t npiece,
                            struct ckpt_err *err)
{
    return ckpt_tensor_set_pieces(cat, &cat->tensors.ptr[index], piece, npiece, err);
}

int ckpt_catalog_add_whole(struct ckpt_catalog *cat, const char *name, enum ckpt_dtype dtype,
                           const uint64_t *dim, uint32_t rank, uint32_t source, uint64_t src,
                           struct ckpt_err *err)
{
    struct ckpt_piece_draft piece;
    uint64_t stride[CKPT_MAX_RANK];
    size_t index;

    if (ckpt_catalog_add(cat, name, dtype, dim, rank, &index, err) < 0)
        return -1;
    if (cat->tensors.ptr[index].numel == 0)
        return 0;
    const struct ckpt_box all = ckpt_box_whole(dim, rank);
    ckpt_box_strides(&all, ckpt_dtype_size(dtype), stride);
    ckpt_piece_from_box(dim, &all, source, src, stride, &piece);
    return ckpt_catalog_set_pieces(cat, index, &piece, 1, err);
}

int ckpt_catalog_add_opaque(struct ckpt_catalog *cat, const char *name, const char *word,
                            const uint64_t *shape, uint32_t rank, uint64_t nbytes, uint32_t source,
                            uint64_t src, struct ckpt_err *err)
{
    uint64_t dim[CKPT_MAX_RANK];
    const size_t at = cat->tensors.len;

    if (rank == 0 || rank > CKPT_MAX_RANK)
        return ckpt_fail(err, CKPT_UNSUPPORTED,
                         "tensor '%s' has dtype '%s', which is not known, and %u dimensions", name,
                         word, rank);
    for (uint32_t d = 0; d < rank; d++)
        dim[d] = d ? 1 : nbytes;
    if (ckpt_catalog_add_whole(cat, name, CKPT_OPAQUE, dim, rank, source, src, err) < 0)
        return -1;
    struct ckpt_tensor *t = &cat->tensors.ptr[at];
    uint64_t *both = ckpt_arena_alloc(&cat->arena, 2 * rank * sizeof *both);
    if (!both || !(t->opaque = ckpt_arena_strdup(&cat->arena, word)))
        return ckpt_nomem(err);
    memcpy(both, dim, rank * sizeof *dim);
    memcpy(both + rank, shape, rank * sizeof *shape);
    t->dim = both;
    return 0;
}

uint64_t ckpt_tensor_elements(const struct ckpt_tensor *t)
{
    const unsigned pack = ckpt_dtype_pack((enum ckpt_dtype)t->dtype);
    uint64_t n;

    if (pack)
        return t->numel * pack;
    return ckpt_shape_numel(ckpt_tensor_shape(t), t->rank, &n) ? n : 0;
}

const char **ckpt_catalog_names(const struct ckpt_catalog *cat)
{
    const char **name = malloc((cat->tensors.len + 1) * sizeof *name);

    for (size_t i = 0; name && i < cat->tensors.len; i++)
        name[i] = cat->tensors.ptr[i].name;
    return name;
}

int ckpt_catalog_select(struct ckpt_catalog *cat, const char *const *name, struct ckpt_err *err)
{
    size_t kept = 0;

    ckpt_map_release(&cat->by_name);
    for (size_t i = 0; i < cat->tensors.len; i++) {
        struct ckpt_tensor t = cat->tensors.ptr[i];
        if (!name[i])
            continue;
        t.name = name[i];
        const uint32_t at = ckpt_map_add(&cat->by_name, t.name, (uint32_t)kept);
        if (at == CKPT_NONE)
            return ckpt_nomem(err);
        if (at != kept)
            return ckpt_fail(err, CKPT_CONFLICT, "two tensors have the name '%s'", name[i]);
        cat->tensors.ptr[kept++] = t;
    }
    cat->tensors.len = kept;
    return 0;
}

int ckpt_catalog_reserve(struct ckpt_catalog *cat, size_t n, struct ckpt_err *err)
{
    return ckpt_vec_reserve(&cat->tensors, n) < 0 || ckpt_map_reserve(&cat->by_name, n) < 0
               ? ckpt_nomem(err)
               : 0;
}

void ckpt_catalog_shrink(struct ckpt_catalog *cat)
{
    ckpt_vec_shrink(&cat->sources);
    ckpt_vec_shrink(&cat->tensors);
}

const struct ckpt_tensor *ckpt_catalog_find(const struct ckpt_catalog *cat, const char *name)
{
    const uint32_t i = ckpt_map_find(&cat->by_name, name);

    return i != CKPT_NONE ? &cat->tensors.ptr[i] : NULL;
}

static void add_line(json_t *lines, const char *fmt, va_list ap)
{
    size_t n = json_array_size(lines), i;
    struct ckpt_err printable = {0};
    char text[CKPT_ERR_TEXT];
    json_t *old;

    if (n > MAX_WARNINGS)
        return;
    (void)vsnprintf(text, sizeof text, fmt, ap);
    (void)ckpt_fail(&printable, CKPT_USAGE, "%s", n < MAX_WARNINGS ? text : "... and more");
    json_array_foreach(lines, i, old)
        if (strcmp(json_string_value(old), printable.text) == 0)
            return;
    (void)json_array_append_new(lines, json_string(printable.text));
}

void ckpt_catalog_warn(struct ckpt_catalog *cat, const char *fmt, ...)
{
    va_list ap;

    va_start(ap, fmt);
    add_line(cat->warnings, fmt, ap);
    va_end(ap);
}

void ckpt_catalog_note(struct ckpt_catalog *cat, const char *fmt, ...)
{
    va_list ap;

    if (!json_object_get(cat->about, "notes"))
        (void)json_object_set_new(cat->about, "notes", json_array());
    va_start(ap, fmt);
    add_line(json_object_get(cat->about, "notes"), fmt, ap);
    va_end(ap);
}

uint64_t ckpt_tensor_nbytes(const struct ckpt_tensor *t)
{
    return t->numel * ckpt_dtype_size(t->dtype);
}

size_t ckpt_tensor_first_piece(const struct ckpt_tensor *t, uint64_t lo)
{
    uint64_t from = lo >= t->max_span ? lo - t->max_span + 1 : 0;
    size_t a = 0, b = t->npiece;

    while (a < b) {
        size_t mid = a + (b - a) / 2;
        if (t->piece[mid].dst < from)
            a = mid + 1;
        else
            b = mid;
    }
    return a;
}
