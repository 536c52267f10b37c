/* SPDX-License-Identifier: Apache-2.0 */
/* Megatron's zarr checkpoints: a directory of chunk files for each tensor. Each file becomes a
 * piece. */
#include <inttypes.h>
#include <string.h>

#include "base/par.h"
#include "format/megatron/load.h"
#include "format/zarr_parts.h"

struct array {
    const char *folder;
    const char *name; /* name in the catalogue */
    struct ckpt_zarr z;
    struct ckpt_zarr_parts parts;
    bool state;   /* it belongs to the optimizer's state */
    bool missing; /* left out */
};

struct load {
    struct ckpt_dir *dir;
    const struct ckpt_reader_options *opt;
    const struct ckpt_megatron_state *st;
    struct ckpt_arena names;
    struct ckpt_str buf;
    CKPT_VEC(struct array) arrays;
    struct ckpt_decoded *decoded; /* compressed chunks when they are read */
    struct ckpt_map files;        /* of the catalogue */
    struct ckpt_catalog *cat;
};

static void load_release(struct load *l)
{
    for (size_t i = 0; i < l->arrays.len; i++)
        ckpt_zarr_parts_release(&l->arrays.ptr[i].parts);
    ckpt_vec_release(&l->arrays);
    ckpt_map_release(&l->files);
    ckpt_decoded_unref(l->decoded);
    ckpt_arena_release(&l->names);
    ckpt_str_release(&l->buf);
}

/* ---- arrays ---- */

static int add_folder(struct load *l, const char *folder, struct ckpt_err *err)
{
    static const struct ckpt_megatron_place whole = {0};
    const bool state = ckpt_megatron_is_state(folder);
    struct array *a;

    if (state ? !l->opt->states : !ckpt_megatron_name(folder, &whole, &l->buf))
        return 0;
    if (state) {
        ckpt_str_clear(&l->buf);
        ckpt_str_puts(&l->buf, folder);
    }
    if (l->buf.failed || ckpt_vec_add(&l->arrays, &a) < 0)
        return ckpt_nomem(err);
    a->state = state;
    a->folder = ckpt_dir_intern(l->dir, folder);
    a->name = ckpt_arena_strdup(&l->names, ckpt_str_get(&l->buf));
    return a->folder && a->name ? 0 : ckpt_nomem(err);
}

/* Are these chunks that Megatron's ShardedTensor.max_allowed_chunks makes: of each dimension, the
 * dimension divided by the number of its shards, rounded down? A damaged shape or chunk size rarely
 * is. */
static int check_chunks(const struct ckpt_zarr *z, struct ckpt_err *err)
{
    for (uint32_t d = 0; d < z->rank; d++) {
        const uint64_t dim = z->dim[d], shards = dim / z->chunk[d];
        if (dim && (!shards || dim / shards != z->chunk[d]))
            return ckpt_fail(err, CKPT_UNSUPPORTED,
                             "dimension %" PRIu32 " of %" PRIu64 " in chunks of %" PRIu64
                             ": Megatron does not write such an array",
                             d, dim, z->chunk[d]);
    }
    return 0;
}

/* Read the description of an array. A directory without one has pickled objects, or is not
 * Megatron's. */
static int read_head(struct load *l, struct array *a, bool *ret_is_array, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *file = ckpt_asprintf("%s/.zarray", a->folder), *text = NULL;
    size_t len;

    if (!file)
        return ckpt_nomem(err);
    if (!(*ret_is_array = ckpt_dir_has_file(l->dir, file)))
        return 0;
    if (ckpt_dir_read_file(l->dir, file, CKPT_ZARR_MAX_BYTES, &text, &len, err) < 0 ||
        ckpt_zarr_parse(text, len, &a->z, err) < 0 || check_chunks(&a->z, err) < 0)
        return ckpt_err_in(err, "'%s/%s'", ckpt_dir_path(l->dir), file);
    const char *params = l->st->args ? ckpt_json_str(l->st->args, "params_dtype") : NULL;
    if (a->z.opaque && params && strcmp(params, "torch.bfloat16") != 0)
        return ckpt_fail(err, CKPT_CONFLICT,
                         "'%s': elements of two bytes without a type ('V2') are bfloat16's, but "
                         "the run's params_dtype is %s",
                         a->folder, params);
    return 0;
}

static int open_chunk(struct load *l, struct array *a, const uint64_t *index, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_source_unrefp) struct ckpt_source *s = NULL;
    ckpt_cleanup(ckpt_str_release) struct ckpt_str file = {0};

    ckpt_str_printf(&file, "%s/", a->folder);
    ckpt_zarr_chunk_name(&a->z, index, &file);
    if (file.failed)
        return ckpt_nomem(err);
    if (ckpt_source_file_new(l->dir, file.ptr, l->opt->pool, &s, err) < 0)
        return ckpt_err_in(err, "tensor '%s': chunk '%s' (a missing chunk has no value)", a->name,
                           file.ptr);
    if (!a->z.zstd && s->size != a->z.nbyte)
        return ckpt_fail(err, CKPT_FORMAT,
                         "'%s/%s' has %" PRIu64 " bytes, a chunk of '%s' has %" PRIu64,
                         ckpt_dir_path(l->dir), file.ptr, s->size, a->name, a->z.nbyte);
    const struct ckpt_zarr_stored at = {s, 0, s->size};
    return ckpt_zarr_chunk_parts(&a->z, index, &at, l->decoded, ckpt_zarr_parts_keep, &a->parts,
                                 err) < 0
               ? ckpt_err_in(err, "'%s/%s'", ckpt_dir_path(l->dir), file.ptr)
               : 0;
}

/* Fail if there are chunk files outside of the shape: they belong to another array, or the
 * description is damaged. */
static int check_surplus(struct load *l, const struct array *a, struct ckpt_err *err)
{
    const char set[] = {'0', '1', '2', '3', '4', '5', '6', '7', '8', '9', a->z.separator, '\0'};
    ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *dir = NULL;
    ckpt_cleanup(ckpt_entries_release) struct ckpt_entries entries = {0};
    uint64_t n = 1, found = 0;
    struct ckpt_entry e;

    for (uint32_t d = 0; d < a->z.rank; d++)
        n *= a->z.separator == '.' || d == 0 ? a->z.count[d] : 1;
    if (ckpt_dir_open_below(l->dir, a->folder, &dir, err) < 0 ||
        ckpt_entries_read(dir, &entries, err) < 0)
        return -1;
    while (ckpt_entries_next(&entries, &e))
        found += e.name[strspn(e.name, set)] == '\0';
    if (found <= n)
        return 0;
    return ckpt_fail(err, CKPT_CONFLICT,
                     "'%s' holds %" PRIu64 " chunks, by the shape in its '.zarray' it has %" PRIu64,
                     ckpt_dir_path(dir), found, n);
}

static int open_chunks(struct load *l, struct array *a, struct ckpt_err *err)
{
    uint64_t index[CKPT_MAX_RANK] = {0}, numel;

    if (!ckpt_shape_numel(a->z.dim, a->z.rank, &numel))
        return ckpt_fail(err, CKPT_LIMIT, "tensor '%s' claims more than 2^64 elements", a->name);
    if (check_surplus(l, a, err) < 0)
        return -1;
    if (numel == 0)
        return 0;
    do {
        if (open_chunk(l, a, index, err) < 0)
            return -1;
    } while (ckpt_zarr_next(&a->z, index));
    return 0;
}

static int read_array(void *ctx, size_t i, struct ckpt_err *err)
{
    struct load *l = ctx;
    struct array *a = &l->arrays.ptr[i];
    struct ckpt_err e = {0};
    bool is_array = false;

    if (read_head(l, a, &is_array, a->state ? NULL : err) < 0) {
        a->missing = true;
        return a->state ? 0 : -1;
    }
    a->missing = !is_array;
    if (!is_array || open_chunks(l, a, &e) == 0)
        return 0;
    if (!a->state && (!l->opt->allow_partial || e.code != CKPT_MISSING))
        return ckpt_err_move(err, &e);
    a->missing = true;
    return 0;
}

/* ---- tensors ---- */

int ckpt_megatron_load_zarr(struct ckpt_dir *dir, const struct ckpt_reader_options *opt,
                            struct ckpt_megatron_state *st, struct ckpt_catalog *cat,
                            struct ckpt_err *err)
{
    ckpt_cleanup(load_release) struct load l = {.dir = dir, .opt = opt, .st = st, .cat = cat};

    ckpt_cleanup(ckpt_entries_release) struct ckpt_entries entries = {0};
    struct ckpt_entry e;

    if (ckpt_decoded_new(CKPT_DECODED_BUDGET, opt->spill, &l.decoded, err) < 0 ||
        ckpt_entries_read(dir, &entries, err) < 0)
        return -1;
    while (ckpt_entries_next(&entries, &e))
        if (e.kind == CKPT_ENTRY_DIR && e.name[0] != '.' && !ckpt_has_suffix(e.name, ".sync") &&
            add_folder(&l, e.name, err) < 0)
            return -1;
    if (ckpt_parallel(l.arrays.len, 0, read_array, &l, err) < 0)
        return -1;
    for (size_t i = 0; i < l.arrays.len; i++) {
        const struct array *a = &l.arrays.ptr[i];
        if (a->missing && a->z.nbyte)
            ckpt_catalog_warn(cat, "left out: tensor '%s' has a missing chunk", a->name);
        if (!a->missing &&
            ckpt_zarr_parts_catalog(&a->parts, &a->z, a->name, &l.files, cat, err) < 0)
            return -1;
    }
    return 0;
}
