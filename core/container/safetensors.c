/* SPDX-License-Identifier: Apache-2.0 */
/* The safetensors header, read and checked; and written. */
#include "container/safetensors.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "base/ckd.h"
#include "base/json.h"
#include "base/sort.h"
#include "base/vec.h"
#include "container/stand_in.h"
#include "io/cursor.h"
#include "tensor/box.h"

/* The header of a file of one tensor is less than this. Ranks that open a checkpoint together send
 * each other what was read, so more would be sent for nothing. */
enum { FIRST_READ = 1024 };

void ckpt_st_release(struct ckpt_st *st)
{
    ckpt_arena_release(&st->arena);
    free(st->tensor);
    ckpt_st_forget_metadata(st);
    *st = (struct ckpt_st){0};
}

/* The header's text; one read where it is small, as in files of one tensor. */
static int read_text(struct ckpt_source *s, char **ret_text, size_t *ret_len, struct ckpt_err *err)
{
    unsigned char first[FIRST_READ];
    size_t got = (size_t)ckpt_min_u64(s->size, sizeof first);
    struct ckpt_cursor c;

    if (ckpt_source_pread(s, first, got, 0, err) < 0 || ckpt_refuse_stand_in(first, got, err) < 0)
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

static int fail_twice(const char *key, struct ckpt_err *err)
{
    return ckpt_fail(err, CKPT_FORMAT, "header: not valid JSON: duplicate object key '%s'", key);
}

struct named {
    uint64_t hash; /* of the name */
    const char *name;
};

static int named_cmp(const void *a, const void *b)
{
    const struct named *p = a, *q = b;
    const int c = ckpt_u64_cmp(p->hash, q->hash);

    return c ? c : strcmp(p->name, q->name);
}

/* FORMAT if two of n structs of `size` bytes, which begin with their names, have the same one. They
 * are sorted by hashes first: sorting a million names would take a second. */
static int check_names(const void *items, size_t size, size_t n, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) struct named *all = malloc((n + 1) * sizeof *all);

    if (!all)
        return ckpt_nomem(err);
    for (size_t i = 0; i < n; i++) {
        const char *name = *(const char *const *)((const char *)items + i * size);
        all[i] = (struct named){XXH3_64bits(name, strlen(name)), name};
    }
    qsort(all, n, sizeof *all, named_cmp);
    for (size_t i = 1; i < n; i++)
        if (named_cmp(&all[i - 1], &all[i]) == 0)
            return fail_twice(all[i].name, err);
    return 0;
}

/* ---- one tensor ---- */

/* The members of a tensor's entry, in any order. */
struct said {
    char dtype[16];
    uint64_t dim[CKPT_MAX_RANK], offset[2];
    size_t rank, noffset, bad_dim; /* SIZE_MAX: none */
    bool has_dtype, has_shape, has_offsets;
};

/* The numbers of an array, of which *ret_n counts all; *ret_bad is the first that is no size, or
 * SIZE_MAX. */
static void read_numbers(struct ckpt_json_pull *p, uint64_t *ret, size_t cap, size_t *ret_n,
                         size_t *ret_bad)
{
    uint64_t v;

    *ret_n = 0;
    *ret_bad = SIZE_MAX;
    for (; ckpt_json_pull_element(p); ++*ret_n) {
        if (!ckpt_json_pull_u64(p, &v) && *ret_bad == SIZE_MAX)
            *ret_bad = *ret_n;
        else if (*ret_n < cap)
            ret[*ret_n] = v;
    }
}

static void read_dtype(struct ckpt_json_pull *p, struct said *t)
{
    if (ckpt_json_pull_peek(p) != '"') {
        ckpt_json_pull_skip(p);
        return;
    }
    const char *text = ckpt_json_pull_string(p);
    t->has_dtype = text != NULL;
    (void)snprintf(t->dtype, sizeof t->dtype, "%s", text ? text : "");
}

/* Does an array begin? Another value is skipped. */
static bool begins_array(struct ckpt_json_pull *p)
{
    if (ckpt_json_pull_peek(p) == '[')
        return ckpt_json_pull_array(p);
    ckpt_json_pull_skip(p);
    return false;
}

/* Read the members of one tensor's object. */
static int read_said(struct ckpt_json_pull *p, struct said *t, struct ckpt_err *err)
{
    const char *key;
    size_t bad;

    *t = (struct said){0};
    if (ckpt_json_pull_peek(p) != '{') {
        ckpt_json_pull_skip(p);
        return 0;
    }
    (void)ckpt_json_pull_object(p);
    for (unsigned seen = 0, bit; (key = ckpt_json_pull_member(p)); seen |= bit) {
        bit = strcmp(key, "dtype") == 0          ? 1
              : strcmp(key, "shape") == 0        ? 2
              : strcmp(key, "data_offsets") == 0 ? 4
                                                 : 0;
        if (seen & bit)
            return fail_twice(key, err);
        if (bit == 1) {
            read_dtype(p, t);
        } else if (bit == 2 && begins_array(p)) {
            t->has_shape = true;
            read_numbers(p, t->dim, CKPT_MAX_RANK, &t->rank, &t->bad_dim);
        } else if (bit == 4 && begins_array(p)) {
            read_numbers(p, t->offset, 2, &t->noffset, &bad);
            t->has_offsets = t->noffset == 2 && bad == SIZE_MAX;
        } else if (bit == 0) {
            ckpt_json_pull_skip(p);
        }
    }
    return 0;
}

static int take_dtype(struct ckpt_st *st, const char *name, const struct said *said,
                      struct ckpt_st_tensor *t, struct ckpt_err *err)
{
    if (!said->has_dtype)
        return ckpt_fail(err, CKPT_FORMAT, "tensor '%s' has no dtype", name);
    t->opaque = NULL;
    if (ckpt_dtype_parse(said->dtype, strlen(said->dtype), &t->dtype) &&
        strcmp(said->dtype, ckpt_dtype_name(t->dtype)) == 0)
        return 0;
    if (!st->keep_unknown || strlen(said->dtype) + 1 == sizeof said->dtype) /* it may be cut */
        return ckpt_fail(err, CKPT_UNSUPPORTED, "tensor '%s' has dtype '%s', which is not known",
                         name, said->dtype);
    t->dtype = CKPT_OPAQUE;
    t->opaque = ckpt_arena_strdup(&st->arena, said->dtype);
    return t->opaque ? 0 : ckpt_nomem(err);
}

/* Turn a shape in elements into one in packs. */
static int count_packs(const char *name, enum ckpt_dtype dtype, uint64_t *dim, size_t rank,
                       struct ckpt_err *err)
{
    const unsigned pack = ckpt_dtype_pack(dtype);

    if (pack <= 1)
        return 0;
    if (rank == 0 || dim[rank - 1] % pack)
        return ckpt_fail(err, CKPT_UNSUPPORTED,
                         "tensor '%s' is %s with %" PRIu64 " elements in its last dimension: only "
                         "rows of whole bytes are supported, %u elements each",
                         name, ckpt_dtype_name(dtype), rank ? dim[rank - 1] : 1, pack);
    dim[rank - 1] /= pack;
    return 0;
}

static int take_shape(struct ckpt_st *st, const char *name, const struct said *said,
                      struct ckpt_st_tensor *t, struct ckpt_err *err)
{
    if (!said->has_shape)
        return ckpt_fail(err, CKPT_FORMAT, "tensor '%s' has no shape", name);
    if (said->rank > CKPT_MAX_RANK)
        return ckpt_fail(err, CKPT_LIMIT,
                         "tensor '%s' has %zu dimensions, at most %d are supported", name,
                         said->rank, CKPT_MAX_RANK);
    if (said->bad_dim != SIZE_MAX)
        return ckpt_fail(err, CKPT_FORMAT, "tensor '%s': dimension %zu is not a size", name,
                         said->bad_dim);
    uint64_t *dim = ckpt_arena_alloc(&st->arena, said->rank * sizeof *dim);
    if (!dim)
        return ckpt_nomem(err);
    memcpy(dim, said->dim, said->rank * sizeof *dim);
    t->dim = dim;
    t->rank = (uint32_t)said->rank;
    return count_packs(name, t->dtype, dim, said->rank, err);
}

static int take_offsets(const char *name, const struct said *said, struct ckpt_st_tensor *t,
                        struct ckpt_err *err)
{
    uint64_t numel, need;

    if (!said->has_offsets || said->offset[1] < said->offset[0])
        return ckpt_fail(err, CKPT_FORMAT, "tensor '%s': data_offsets are not [begin, end]", name);
    t->off = said->offset[0];
    t->len = said->offset[1] - t->off;
    if (t->opaque)
        return 0; /* any number of bytes may be right */
    if (!ckpt_shape_numel(t->dim, t->rank, &numel) ||
        ckd_mul(&need, numel, (uint64_t)ckpt_dtype_size(t->dtype)))
        return ckpt_fail(err, CKPT_FORMAT, "tensor '%s': its shape is larger than any file", name);
    if (need != t->len)
        return ckpt_fail(err, CKPT_FORMAT,
                         "tensor '%s': offsets span %" PRIu64 " bytes, its shape needs %" PRIu64,
                         name, t->len, need);
    return 0;
}

static int parse_tensor(struct ckpt_json_pull *p, struct ckpt_st *st, const char *name,
                        struct ckpt_st_tensor *t, struct ckpt_err *err)
{
    struct said said;

    if (strlen(name) > CKPT_ST_MAX_NAME)
        return ckpt_fail(err, CKPT_LIMIT, "a tensor's name has %zu bytes, at most %d are supported",
                         strlen(name), CKPT_ST_MAX_NAME);
    if (read_said(p, &said, err) < 0 || (p->failed && ckpt_json_pull_end(p, err) < 0))
        return -1;
    if (take_dtype(st, name, &said, t, err) < 0 || take_shape(st, name, &said, t, err) < 0 ||
        take_offsets(name, &said, t, err) < 0)
        return -1;
    t->name = ckpt_arena_strdup(&st->arena, name);
    return t->name ? 0 : ckpt_nomem(err);
}

/* ---- metadata ---- */

typedef CKPT_VEC(struct ckpt_st_meta) metas;

static int add_metadata(struct ckpt_json_pull *p, const char *key, metas *all, struct ckpt_err *err)
{
    if (ckpt_json_pull_peek(p) != '"')
        return ckpt_fail(err, CKPT_FORMAT, "__metadata__: '%s' is not a string", key);
    const struct ckpt_st_meta one = {key, ckpt_json_pull_string(p)};
    return ckpt_vec_push(all, one) < 0 ? ckpt_nomem(err) : 0;
}

static int parse_metadata(struct ckpt_json_pull *p, struct ckpt_st *st, struct ckpt_err *err)
{
    metas all = {0};
    const char *key;
    int rc = 0;

    st->has_metadata = true;
    if (ckpt_json_pull_peek(p) != '{')
        return ckpt_fail(err, CKPT_FORMAT, "__metadata__ is not an object");
    (void)ckpt_json_pull_object(p);
    while (rc == 0 && (key = ckpt_json_pull_member(p)))
        rc = add_metadata(p, key, &all, err);
    st->metadata = all.ptr;
    st->nmetadata = all.len;
    return rc;
}

const char *ckpt_st_metadata(const struct ckpt_st *st, const char *key)
{
    for (size_t i = 0; i < st->nmetadata; i++)
        if (strcmp(st->metadata[i].key, key) == 0)
            return st->metadata[i].value;
    return NULL;
}

void ckpt_st_forget_metadata(struct ckpt_st *st)
{
    free(st->metadata);
    free(st->text);
    st->metadata = NULL;
    st->text = NULL;
    st->nmetadata = 0;
}

/* ---- the header ---- */

static int by_offset(const void *a, const void *b)
{
    const struct ckpt_st_tensor *p = a, *q = b;
    const int c = ckpt_u64_cmp(p->off, q->off);

    return c ? c : ckpt_u64_cmp(p->len, q->len);
}

/* Offsets become positions in the file. */
static int check_tiling(struct ckpt_st *st, uint64_t begin, uint64_t size, struct ckpt_err *err)
{
    uint64_t at = 0;

    ckpt_sort(st->tensor, st->ntensor, by_offset);
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

typedef CKPT_VEC(struct ckpt_st_tensor) tensors;

static int parse_member(struct ckpt_json_pull *p, struct ckpt_st *st, const char *name,
                        tensors *all, struct ckpt_err *err)
{
    struct ckpt_st_tensor t;

    if (strcmp(name, "__metadata__") == 0)
        return st->has_metadata ? fail_twice(name, err) : parse_metadata(p, st, err);
    if (parse_tensor(p, st, name, &t, err) < 0)
        return -1;
    return ckpt_vec_push(all, t) < 0 ? ckpt_nomem(err) : 0;
}

static int parse_members(struct ckpt_st *st, size_t len, struct ckpt_err *err)
{
    struct ckpt_json_pull p;
    tensors all = {0};
    const char *name;
    int rc = 0;

    ckpt_json_pull_init(&p, st->text, len, "header");
    if (ckpt_json_pull_peek(&p) && ckpt_json_pull_peek(&p) != '{') {
        ckpt_json_pull_skip(&p);
        return ckpt_json_pull_end(&p, err) < 0
                   ? -1
                   : ckpt_fail(err, CKPT_FORMAT, "header is not a JSON object");
    }
    (void)ckpt_json_pull_object(&p);
    while (rc == 0 && (name = ckpt_json_pull_member(&p)))
        rc = parse_member(&p, st, name, &all, err);
    if (rc == 0)
        rc = ckpt_json_pull_end(&p, err);
    ckpt_vec_shrink(&all);
    st->tensor = all.ptr;
    st->ntensor = all.len;
    return rc;
}

static int parse(struct ckpt_source *s, struct ckpt_st *st, struct ckpt_err *err)
{
    size_t len;

    if (read_text(s, &st->text, &len, err) < 0 || parse_members(st, len, err) < 0)
        return -1;
    if (check_names(st->tensor, sizeof *st->tensor, st->ntensor, err) < 0 ||
        check_names(st->metadata, sizeof *st->metadata, st->nmetadata, err) < 0)
        return -1;
    if (st->nmetadata == 0)
        ckpt_st_forget_metadata(st);
    return check_tiling(st, 8 + len, s->size, err);
}

int ckpt_st_read(struct ckpt_source *s, struct ckpt_st *ret, struct ckpt_err *err)
{
    struct ckpt_st st = {.keep_unknown = ret->keep_unknown};

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
    return t->opaque ? ckpt_catalog_add_opaque(cat, t->name, t->opaque, t->dim, t->rank, t->len,
                                               source, t->off, err)
                     : ckpt_catalog_add_whole(cat, t->name, t->dtype, t->dim, t->rank, source,
                                              t->off, err);
}

/* ---- writing, in serde_json's spelling ---- */

int ckpt_st_check_name(const char *name, struct ckpt_err *err)
{
    if (!ckpt_utf8_ok(name))
        return ckpt_fail(err, CKPT_FORMAT, "tensor '%s': the name is not UTF-8", name);
    if (strcmp(name, "__metadata__") == 0)
        return ckpt_fail(err, CKPT_FORMAT, "a tensor cannot be named '%s' in a safetensors file",
                         name);
    return 0;
}

/* serde_json escapes what it must and nothing else: DEL and non-ASCII stay as they are. */
void ckpt_st_put_string(struct ckpt_str *out, const char *s)
{
    static const char short_escape[] = "\"\\\b\f\n\r\t", letter[] = "\"\\bfnrt";

    ckpt_str_putc(out, '"');
    while (*s) {
        size_t plain = 0;
        while ((unsigned char)s[plain] >= 0x20 && s[plain] != '"' && s[plain] != '\\')
            plain++;
        ckpt_str_append(out, s, plain);
        s += plain;
        if (!*s)
            break;
        const char *esc = strchr(short_escape, *s);
        if (esc)
            ckpt_str_printf(out, "\\%c", letter[esc - short_escape]);
        else
            ckpt_str_printf(out, "\\u%04x", (unsigned char)*s);
        s++;
    }
    ckpt_str_putc(out, '"');
}

int ckpt_st_cmp(const struct ckpt_tensor *a, const struct ckpt_tensor *b)
{
    return a->dtype != b->dtype ? (int)b->dtype - (int)a->dtype : strcmp(a->name, b->name);
}

void ckpt_st_header_begin(struct ckpt_str *out, bool bare)
{
    if (bare)
        ckpt_str_putc(out, '{');
    else
        ckpt_st_header_begin_with(out, NULL);
}

static void put_metadata(struct ckpt_str *out, const char *key, const char *value, bool first)
{
    if (!first)
        ckpt_str_putc(out, ',');
    ckpt_st_put_string(out, key);
    ckpt_str_putc(out, ':');
    ckpt_st_put_string(out, value);
}

void ckpt_st_header_begin_with(struct ckpt_str *out, const json_t *entries)
{
    const char *key;
    json_t *value;
    bool first = true;

    ckpt_str_puts(out, "{\"__metadata__\":{");
    json_object_foreach((json_t *)entries, key, value) {
        put_metadata(out, key, json_string_value(value), first);
        first = false;
    }
    if (!ckpt_json_str(entries, "format"))
        put_metadata(out, "format", "pt", first);
    ckpt_str_putc(out, '}');
}

void ckpt_st_header_part(struct ckpt_str *out, const struct ckpt_tensor *t, const uint64_t *dim,
                         uint64_t off, uint64_t len, bool first)
{
    if (!first)
        ckpt_str_putc(out, ',');
    ckpt_st_put_string(out, t->name);
    ckpt_str_puts(out, ":{\"dtype\":\"");
    ckpt_str_puts(out, ckpt_tensor_dtype_name(t));
    ckpt_str_puts(out, "\",\"shape\":[");
    for (unsigned d = 0; d < t->rank; d++) {
        if (d)
            ckpt_str_putc(out, ',');
        const uint64_t pack = d + 1 == t->rank ? ckpt_dtype_pack(t->dtype) : 1;
        ckpt_str_put_u64(out, t->opaque ? ckpt_tensor_shape(t)[d] : dim[d] * pack);
    }
    ckpt_str_puts(out, "],\"data_offsets\":[");
    ckpt_str_put_u64(out, off);
    ckpt_str_putc(out, ',');
    ckpt_str_put_u64(out, off + len);
    ckpt_str_puts(out, "]}");
}

void ckpt_st_header_tensor(struct ckpt_str *out, const struct ckpt_tensor *t, uint64_t off,
                           bool first)
{
    ckpt_st_header_part(out, t, t->dim, off, ckpt_tensor_nbytes(t), first);
}

void ckpt_st_header_end(struct ckpt_str *out) { ckpt_str_putc(out, '}'); }

size_t ckpt_st_header_bound(const struct ckpt_tensor *t)
{
    size_t bound = sizeof ",\"\":{\"dtype\":\"F8_E4M3FNUZ\",\"shape\":[],\"data_offsets\":[,]}";

    for (const char *s = t->name; *s; s++)
        bound += (unsigned char)*s < 0x20 ? 6 : *s == '"' || *s == '\\' ? 2 : 1;
    return bound + 21 * ((size_t)t->rank + 2); /* 20 digits and a comma */
}

size_t ckpt_st_header_pad(uint64_t len) { return (size_t)(-len % 8); }

const void *ckpt_st_header_mem(struct ckpt_str *text, struct ckpt_arena *arena, uint64_t *ret_len)
{
    unsigned char *mem;

    for (size_t pad = ckpt_st_header_pad(text->len); pad > 0; pad--)
        ckpt_str_putc(text, ' ');
    if (text->failed || !(mem = ckpt_arena_alloc(arena, 8 + text->len)))
        return NULL;
    for (int i = 0; i < 8; i++)
        mem[i] = (unsigned char)((uint64_t)text->len >> 8 * i);
    memcpy(mem + 8, text->ptr, text->len);
    *ret_len = 8 + text->len;
    return mem;
}
