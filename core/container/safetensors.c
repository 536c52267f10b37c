/* SPDX-License-Identifier: Apache-2.0 */
/* The safetensors header, read and checked. */
#include "container/safetensors.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "base/ckd.h"
#include "base/json_members.h"
#include "io/cursor.h"
#include "tensor/box.h"

enum { FIRST_READ = 4096 };

void ckpt_st_release(struct ckpt_st *st)
{
    ckpt_arena_release(&st->arena);
    free(st->tensor);
    json_decref(st->metadata);
    *st = (struct ckpt_st){0};
}

/* The header's text; one read where it is small, as in files of one tensor. */
static int read_text(struct ckpt_source *s, char **ret_text, size_t *ret_len, struct ckpt_err *err)
{
    unsigned char first[FIRST_READ];
    size_t got = (size_t)ckpt_min_u64(s->size, sizeof first);
    struct ckpt_cursor c;

    if (ckpt_source_pread(s, first, got, 0, err) < 0)
        return -1;
    ckpt_cursor_init(&c, first, got, 0, "file");
    uint64_t len = ckpt_cursor_le64(&c);
    if (c.failed)
        return ckpt_fail(err, CKPT_FORMAT,
                         "has %" PRIu64 " bytes, a safetensors file begins with 8 bytes of length",
                         s->size);
    if (len > CKPT_ST_MAX_HEADER)
        return ckpt_fail(err, CKPT_FORMAT,
                         "header claims %" PRIu64
                         " bytes, at most %d are allowed (not a safetensors file?)",
                         len, CKPT_ST_MAX_HEADER);
    if (len > s->size - 8)
        return ckpt_fail(err, CKPT_FORMAT,
                         "header claims %" PRIu64 " bytes, the file has %" PRIu64
                         " after the length",
                         len, s->size - 8);
    char *text = malloc((size_t)len + 1);
    if (!text)
        return ckpt_nomem(err);
    size_t have = (size_t)ckpt_min_u64(len, ckpt_cursor_left(&c));
    memcpy(text, ckpt_cursor_take(&c, have), have);
    if (ckpt_source_pread(s, text + have, (size_t)len - have, 8 + have, err) < 0) {
        free(text);
        return -1;
    }
    text[len] = '\0';
    *ret_text = text;
    *ret_len = (size_t)len;
    return 0;
}

static int parse_shape(struct ckpt_st *st, const char *name, const json_t *shape,
                       struct ckpt_st_tensor *t, struct ckpt_err *err)
{
    if (!json_is_array(shape))
        return ckpt_fail(err, CKPT_FORMAT, "tensor '%s' has no shape", name);
    size_t rank = json_array_size(shape);
    if (rank > CKPT_MAX_RANK)
        return ckpt_fail(err, CKPT_LIMIT,
                         "tensor '%s' has %zu dimensions, at most %d are supported", name, rank,
                         CKPT_MAX_RANK);
    uint64_t *dim = ckpt_arena_alloc(&st->arena, rank * sizeof *dim);
    if (!dim)
        return ckpt_nomem(err);
    for (size_t d = 0; d < rank; d++) {
        const json_t *v = json_array_get(shape, d);
        if (!json_is_integer(v) || json_integer_value(v) < 0)
            return ckpt_fail(err, CKPT_FORMAT, "tensor '%s': dimension %zu is not a size", name, d);
        dim[d] = (uint64_t)json_integer_value(v);
    }
    t->dim = dim;
    t->rank = (uint32_t)rank;
    return 0;
}

static int parse_offsets(const char *name, const json_t *offsets, struct ckpt_st_tensor *t,
                         struct ckpt_err *err)
{
    const json_t *b = json_array_get(offsets, 0), *e = json_array_get(offsets, 1);
    uint64_t numel, need;

    if (json_array_size(offsets) != 2 || !json_is_integer(b) || !json_is_integer(e) ||
        json_integer_value(b) < 0 || json_integer_value(e) < json_integer_value(b))
        return ckpt_fail(err, CKPT_FORMAT, "tensor '%s': data_offsets are not [begin, end]", name);
    t->off = (uint64_t)json_integer_value(b);
    t->len = (uint64_t)json_integer_value(e) - t->off;
    if (!ckpt_shape_numel(t->dim, t->rank, &numel) ||
        ckd_mul(&need, numel, (uint64_t)ckpt_dtype_size(t->dtype)))
        return ckpt_fail(err, CKPT_FORMAT, "tensor '%s': its shape is larger than any file", name);
    if (need != t->len)
        return ckpt_fail(err, CKPT_FORMAT,
                         "tensor '%s': offsets span %" PRIu64 " bytes, its shape needs %" PRIu64,
                         name, t->len, need);
    return 0;
}

static int parse_tensor(struct ckpt_st *st, const char *name, const json_t *value,
                        struct ckpt_err *err)
{
    struct ckpt_st_tensor *t = &st->tensor[st->ntensor];
    const char *dtype = ckpt_json_str(value, "dtype");

    if (strlen(name) > CKPT_ST_MAX_NAME)
        return ckpt_fail(err, CKPT_LIMIT, "a tensor's name has %zu bytes, at most %d are supported",
                         strlen(name), CKPT_ST_MAX_NAME);
    if (!dtype)
        return ckpt_fail(err, CKPT_FORMAT, "tensor '%s' has no dtype", name);
    if (!ckpt_dtype_parse(dtype, strlen(dtype), &t->dtype) ||
        strcmp(dtype, ckpt_dtype_name(t->dtype)) != 0)
        return ckpt_fail(err, CKPT_UNSUPPORTED, "tensor '%s' has dtype '%s', which is not known",
                         name, dtype);
    if (parse_shape(st, name, json_object_get(value, "shape"), t, err) < 0 ||
        parse_offsets(name, json_object_get(value, "data_offsets"), t, err) < 0)
        return -1;
    if (!(t->name = ckpt_arena_strdup(&st->arena, name)))
        return ckpt_nomem(err);
    st->ntensor++;
    return 0;
}

static int parse_metadata(struct ckpt_st *st, json_t *value, struct ckpt_err *err)
{
    const char *key;
    json_t *v;

    if (!json_is_object(value))
        return ckpt_fail(err, CKPT_FORMAT, "__metadata__ is not an object");
    json_object_foreach(value, key, v)
        if (!json_is_string(v))
            return ckpt_fail(err, CKPT_FORMAT, "__metadata__: '%s' is not a string", key);
    st->metadata = json_incref(value);
    return 0;
}

static int by_offset(const void *a, const void *b)
{
    const struct ckpt_st_tensor *p = a, *q = b;
    return p->off != q->off ? (p->off < q->off ? -1 : 1) : (p->len > q->len) - (p->len < q->len);
}

/* Offsets become positions in the file. */
static int check_tiling(struct ckpt_st *st, uint64_t begin, uint64_t size, struct ckpt_err *err)
{
    uint64_t at = 0;

    if (st->ntensor)
        qsort(st->tensor, st->ntensor, sizeof *st->tensor, by_offset);
    for (size_t i = 0; i < st->ntensor; i++) {
        struct ckpt_st_tensor *t = &st->tensor[i];
        if (t->off < at)
            return ckpt_fail(err, CKPT_FORMAT, "tensor '%s' overlaps tensor '%s'", t->name,
                             i ? st->tensor[i - 1].name : "");
        if (t->off > at)
            return ckpt_fail(err, CKPT_FORMAT,
                             "bytes %" PRIu64 "..%" PRIu64
                             " before tensor '%s' belong to no tensor",
                             at, t->off, t->name);
        if (!ckpt_range_ok(t->off, t->len, size - begin))
            return ckpt_fail(err, CKPT_FORMAT,
                             "is truncated: it has %" PRIu64
                             " bytes of data, tensor '%s' ends at %" PRIu64,
                             size - begin, t->name, t->off + t->len);
        at = t->off + t->len;
        t->off += begin;
    }
    if (at != size - begin)
        return ckpt_fail(err, CKPT_FORMAT, "%" PRIu64 " bytes after the last tensor",
                         size - begin - at);
    return 0;
}

/* The keys seen so far, by their hashes: of a million names a quarter of what a map would take. */
struct keys {
    uint64_t *slot; /* 0: empty */
    size_t cap;     /* a power of two */
};

static void keys_release(struct keys *k) { free(k->slot); }

static int keys_init(struct keys *k, size_t n, struct ckpt_err *err)
{
    for (k->cap = 16; k->cap < 2 * n;)
        k->cap *= 2;
    k->slot = calloc(k->cap, sizeof *k->slot);
    return k->slot ? 0 : ckpt_nomem(err);
}

/* Has the header so far a tensor of this name? Looks for itself only where a hash came before. */
static bool is_twice(struct keys *k, const struct ckpt_st *st, const char *name)
{
    const uint64_t h = XXH3_64bits(name, strlen(name)) | 1;
    size_t i = (size_t)(h >> 1) & (k->cap - 1);

    while (k->slot[i] && k->slot[i] != h)
        i = (i + 1) & (k->cap - 1);
    if (k->slot[i])
        return ckpt_st_find(st, name) != NULL;
    k->slot[i] = h;
    return false;
}

static int parse_member(struct ckpt_st *st, const char *name, json_t *value, struct keys *keys,
                        struct ckpt_err *err)
{
    const bool is_metadata = strcmp(name, "__metadata__") == 0;

    if (is_metadata ? st->metadata != NULL : is_twice(keys, st, name))
        return ckpt_fail(err, CKPT_FORMAT, "header: not valid JSON: duplicate object key '%s'",
                         name);
    return is_metadata ? parse_metadata(st, value, err) : parse_tensor(st, name, value, err);
}

static int parse_members(struct ckpt_st *st, struct ckpt_json_members *m, struct ckpt_err *err)
{
    ckpt_cleanup(keys_release) struct keys keys = {0};
    const size_t n = ckpt_json_members_count(m);
    const char *name;
    json_t *value;
    int rc;

    if (!(st->tensor = calloc(n + 1, sizeof *st->tensor)))
        return ckpt_nomem(err);
    if (keys_init(&keys, n, err) < 0)
        return -1;
    while ((rc = ckpt_json_members_next(m, &name, &value, err)) > 0)
        if (parse_member(st, name, value, &keys, err) < 0)
            return -1;
    return rc;
}

static int parse(struct ckpt_source *s, struct ckpt_st *st, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *text = NULL;
    ckpt_cleanup(ckpt_json_members_release) struct ckpt_json_members m = {0};
    size_t len;

    if (read_text(s, &text, &len, err) < 0 ||
        ckpt_json_members_begin(&m, text, len, "header", err) < 0 || parse_members(st, &m, err) < 0)
        return -1;
    return check_tiling(st, 8 + len, s->size, err);
}

int ckpt_st_read(struct ckpt_source *s, struct ckpt_st *ret, struct ckpt_err *err)
{
    struct ckpt_st st = {0};

    if (parse(s, &st, err) < 0) {
        ckpt_cleanup(ckpt_freep) char *name = ckpt_source_name(s);
        ckpt_st_release(&st);
        return ckpt_err_in(err, "'%s'", name ? name : "?");
    }
    *ret = st;
    return 0;
}

const struct ckpt_st_tensor *ckpt_st_find(const struct ckpt_st *st, const char *name)
{
    for (size_t i = 0; i < st->ntensor; i++)
        if (strcmp(st->tensor[i].name, name) == 0)
            return &st->tensor[i];
    return NULL;
}

int ckpt_st_catalog(const struct ckpt_st_tensor *t, uint32_t source, struct ckpt_catalog *cat,
                    struct ckpt_err *err)
{
    struct ckpt_piece_draft piece;
    struct ckpt_box box = {.rank = t->rank};
    uint64_t stride[CKPT_MAX_RANK];
    size_t index;

    if (ckpt_catalog_add(cat, t->name, t->dtype, t->dim, t->rank, &index, err) < 0)
        return -1;
    if (t->len == 0)
        return 0;
    ckpt_shape_strides(t->dim, t->rank, stride);
    for (uint32_t d = 0; d < t->rank; d++) {
        box.n[d] = t->dim[d];
        stride[d] *= ckpt_dtype_size(t->dtype);
    }
    ckpt_piece_from_box(t->dim, &box, source, t->off, stride, &piece);
    return ckpt_catalog_set_pieces(cat, index, &piece, 1, err);
}
