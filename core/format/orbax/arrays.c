/* SPDX-License-Identifier: Apache-2.0 */
/* The arrays of an item: their descriptions and chunks are values of a database under the keys
 * NAME/zarr.json and NAME/c/0/1 (zarr 2: NAME/.zarray and NAME/0.1), or files of these names. */
#include <inttypes.h>
#include <string.h>

#include "base/par.h"
#include "base/str.h"
#include "container/ocdbt.h"
#include "format/orbax/load.h"
#include "format/zarr_parts.h"

enum {
    MAX_CHUNKS = 1 << 20, /* of an array */
};

struct array {
    const struct ckpt_orbax_leaf *leaf;
    const char *name; /* in the catalogue */
    struct ckpt_zarr z;
    struct ckpt_zarr_parts parts;
    uint64_t nchunk; /* that are stored */
    char *why;       /* the reason why it is left out; or NULL */
};

struct load {
    struct ckpt_dir *item;
    const struct ckpt_orbax_tree *tree;
    const struct ckpt_reader_options *opt;
    struct ckpt_ocdbt db;
    struct ckpt_decoded *decoded;
    struct ckpt_map files; /* of the catalogue */
    struct ckpt_arena names;
    CKPT_VEC(struct array) arrays;
    struct ckpt_catalog *cat;
};

static void array_release(struct array *a)
{
    ckpt_zarr_parts_release(&a->parts);
    free(a->why);
}

static void load_release(struct load *l)
{
    for (size_t i = 0; i < l->arrays.len; i++)
        array_release(&l->arrays.ptr[i]);
    ckpt_vec_release(&l->arrays);
    ckpt_map_release(&l->files);
    ckpt_arena_release(&l->names);
    ckpt_decoded_unref(l->decoded);
    ckpt_ocdbt_release(&l->db);
}

/* ---- where values are ---- */

/* The value under a key: of the database, or a file. The source, which is new, has nothing else if
 * it is a file. MISSING: there is none. */
static int find_value(const struct load *l, const char *key, struct ckpt_source **ret_source,
                      struct ckpt_zarr_stored *ret, struct ckpt_err *err)
{
    if (l->tree->ocdbt) {
        const struct ckpt_ocdbt_value *v = ckpt_ocdbt_find(&l->db, key);
        if (!v)
            return ckpt_fail(err, CKPT_MISSING, "'%s/" CKPT_OCDBT_MANIFEST "' has no value of '%s'",
                             ckpt_dir_path(l->item), key);
        *ret_source = ckpt_source_ref(v->source);
        *ret = (struct ckpt_zarr_stored){v->source, v->off, v->len};
        return 0;
    }
    if (ckpt_source_file_new(l->item, key, l->opt->pool, ret_source, err) < 0)
        return -1;
    *ret = (struct ckpt_zarr_stored){*ret_source, 0, (*ret_source)->size};
    return 0;
}

static bool has_value(const struct load *l, const char *key)
{
    return l->tree->ocdbt ? ckpt_ocdbt_find(&l->db, key) != NULL : ckpt_dir_has_file(l->item, key);
}

/* ---- an array ---- */

static int read_head(const struct load *l, struct array *a, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *key =
        ckpt_asprintf("%s/%s", a->leaf->name, l->tree->zarr3 ? CKPT_ZARR3_HEAD : CKPT_ZARR2_HEAD);
    ckpt_cleanup(ckpt_source_unrefp) struct ckpt_source *source = NULL;
    struct ckpt_zarr_stored at;
    char text[CKPT_ZARR_MAX_BYTES];

    if (!key)
        return ckpt_nomem(err);
    if (find_value(l, key, &source, &at, err) < 0)
        return -1;
    if (at.len > sizeof text)
        return ckpt_fail(err, CKPT_LIMIT, "'%s' has %" PRIu64 " bytes, at most %d are read", key,
                         at.len, CKPT_ZARR_MAX_BYTES);
    if (ckpt_source_pread(at.source, text, (size_t)at.len, at.off, err) < 0)
        return -1;
    return (l->tree->zarr3 ? ckpt_zarr3_parse(text, (size_t)at.len, &a->z, err)
                           : ckpt_zarr_parse(text, (size_t)at.len, &a->z, err)) < 0
               ? ckpt_err_in(err, "'%s'", key)
               : 0;
}

static int read_chunk(const struct load *l, struct array *a, const uint64_t *index,
                      struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_source_unrefp) struct ckpt_source *source = NULL;
    ckpt_cleanup(ckpt_str_release) struct ckpt_str key = {0};
    struct ckpt_zarr_stored at;

    ckpt_str_printf(&key, "%s/", a->leaf->name);
    ckpt_zarr_chunk_name(&a->z, index, &key);
    if (key.failed)
        return ckpt_nomem(err);
    if (!l->tree->every_chunk && !has_value(l, key.ptr)) {
        struct ckpt_zarr_part fill = {.source = NULL};
        ckpt_zarr_chunk_box(&a->z, index, &fill.box);
        return ckpt_zarr_parts_keep(&a->parts, &fill, err);
    }
    if (find_value(l, key.ptr, &source, &at, err) < 0)
        return ckpt_err_in(err, "chunk '%s' (the save says that it stored every chunk)", key.ptr);
    a->nchunk++;
    if (ckpt_zarr_chunk_parts(&a->z, index, &at, l->decoded, ckpt_zarr_parts_keep, &a->parts, err) <
        0) {
        ckpt_cleanup(ckpt_freep) char *name = ckpt_source_name(source);
        return ckpt_err_in(err, "chunk '%s' in '%s'", key.ptr, name);
    }
    return 0;
}

static int read_chunks(const struct load *l, struct array *a, struct ckpt_err *err)
{
    uint64_t index[CKPT_MAX_RANK] = {0}, numel, n;

    if (!ckpt_shape_numel(a->z.dim, a->z.rank, &numel))
        return ckpt_fail(err, CKPT_LIMIT, "its shape has more than 2^64 elements");
    if (!numel)
        return 0;
    if (!ckpt_shape_numel(a->z.count, a->z.rank, &n) || n > MAX_CHUNKS)
        return ckpt_fail(err, CKPT_LIMIT,
                         "its shape %s has more than %d chunks of %s, which is not supported",
                         ckpt_shape_text(a->z.dim, a->z.rank).text, MAX_CHUNKS,
                         ckpt_shape_text(a->z.chunk, a->z.rank).text);
    do {
        if (read_chunk(l, a, index, err) < 0)
            return -1;
    } while (ckpt_zarr_next(&a->z, index));
    return 0;
}

/* Fail if the database has other values under the array's name: they belong to another array, or
 * the description is damaged. */
static int check_surplus(const struct load *l, const struct array *a, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *begin = ckpt_asprintf("%s/", a->leaf->name);
    uint64_t found = 0;

    if (!begin)
        return ckpt_nomem(err);
    for (size_t i = ckpt_ocdbt_at_least(&l->db, begin);
         i < l->db.values.len && ckpt_has_prefix(l->db.values.ptr[i].key, begin); i++)
        found++;
    if (found == a->nchunk + 1)
        return 0;
    return ckpt_fail(err, CKPT_CONFLICT,
                     "'%s/" CKPT_OCDBT_MANIFEST "' has %" PRIu64 " values below '%s', by the shape "
                     "%s there are a description and %" PRIu64 " chunks",
                     ckpt_dir_path(l->item), found, begin,
                     ckpt_shape_text(a->z.dim, a->z.rank).text, a->nchunk);
}

static int read_array(void *ctx, size_t i, struct ckpt_err *err)
{
    struct load *l = ctx;
    struct array *a = &l->arrays.ptr[i];
    struct ckpt_err e = {0};

    if (read_head(l, a, &e) == 0 && read_chunks(l, a, &e) == 0 &&
        (!l->tree->ocdbt || check_surplus(l, a, &e) == 0))
        return 0;
    const bool left_out = (e.code == CKPT_MISSING && l->opt->allow_partial) ||
                          (e.code == CKPT_UNSUPPORTED && l->opt->raw);
    if (left_out && (a->why = strdup(e.text)))
        return 0;
    (void)ckpt_err_move(err, &e);
    return ckpt_err_in(err, "'%s': array '%s'", ckpt_dir_path(l->item), a->leaf->name);
}

/* ---- tensors ---- */

/* Warn of arrays of the database that the tree lacks. */
static void warn_strays(struct load *l)
{
    const char *suffix = l->tree->zarr3 ? "/" CKPT_ZARR3_HEAD : "/" CKPT_ZARR2_HEAD;
    struct ckpt_map known = {0};

    for (size_t i = 0; i < l->tree->leaves.len; i++)
        (void)ckpt_map_add(&known, l->tree->leaves.ptr[i].name, 0);
    for (size_t i = 0; i < l->db.values.len; i++) {
        const char *key = l->db.values.ptr[i].key;
        uint32_t ignored;
        if (ckpt_has_suffix(key, suffix) &&
            !ckpt_map_get(&known, key, strlen(key) - strlen(suffix), &ignored))
            ckpt_catalog_warn(l->cat,
                              "left out: array '%.*s', which is stored, but which " CKPT_ORBAX_TREE
                              " does not list",
                              (int)(strlen(key) - strlen(suffix)), key);
    }
    ckpt_map_release(&known);
}

static int open_data(void *ctx, const char *path, struct ckpt_source **ret, struct ckpt_err *err)
{
    const struct load *l = ctx;

    return ckpt_source_file_new(l->item, path, l->opt->pool, ret, err);
}

static int choose(struct load *l, ckpt_orbax_name_fn *name, void *ctx, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_str_release) struct ckpt_str buf = {0};

    for (size_t i = 0; i < l->tree->leaves.len; i++) {
        const struct ckpt_orbax_leaf *leaf = &l->tree->leaves.ptr[i];
        struct array *a;
        ckpt_str_clear(&buf);
        const char *own = leaf->is_array ? name(ctx, leaf, &buf) : NULL;
        if (buf.failed)
            return ckpt_nomem(err);
        if (!own)
            continue;
        if (ckpt_vec_add(&l->arrays, &a) < 0 || !(a->name = ckpt_arena_strdup(&l->names, own)))
            return ckpt_nomem(err);
        a->leaf = leaf;
    }
    return 0;
}

int ckpt_orbax_arrays(struct ckpt_dir *item, const struct ckpt_orbax_tree *tree,
                      const struct ckpt_reader_options *opt, ckpt_orbax_name_fn *name, void *ctx,
                      struct ckpt_catalog *cat, struct ckpt_err *err)
{
    ckpt_cleanup(load_release) struct load l = {.item = item, .tree = tree, .opt = opt, .cat = cat};

    if (tree->ocdbt && ckpt_ocdbt_read(open_data, &l, &l.db, err) < 0)
        return ckpt_err_in(err, "'%s'", ckpt_dir_path(item));
    for (size_t i = 0; i < l.db.files.len;
         i++) /* small values are in the nodes, which these have */
        if (ckpt_zarr_file(&l.db.files.ptr[i].source, &l.files, cat, err) == UINT32_MAX)
            return -1;
    if (choose(&l, name, ctx, err) < 0 ||
        ckpt_decoded_new(CKPT_DECODED_BUDGET, opt->spill, &l.decoded, err) < 0 ||
        ckpt_parallel(l.arrays.len, 0, read_array, &l, err) < 0)
        return -1;
    for (size_t i = 0; i < l.arrays.len; i++) {
        struct array *a = &l.arrays.ptr[i];
        if (a->why)
            ckpt_catalog_warn(cat, "left out: tensor '%s': %s", a->name, a->why);
        else if (ckpt_zarr_parts_catalog(&a->parts, &a->z, a->name, &l.files, cat, err) < 0)
            return -1;
    }
    warn_strays(&l);
    return 0;
}
