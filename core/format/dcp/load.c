/* SPDX-License-Identifier: Apache-2.0 */
/* From .metadata and __RANK_N.distcp files of items to a catalogue.
 *
 *     metadata -> files -> boxes and lengths checked -> items' headers, in parallel -> pieces
 *
 * An item is a torch.save archive of one tensor (or, with SerializationFormat.SAFETENSORS, all
 * tensors of a file are one safetensors blob). Items that hold other objects are never read. */
#include "format/dcp/load.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/ckd.h"
#include "base/par.h"
#include "base/str.h"
#include "container/torch_file.h"
#include "format/pieces.h"
#include "tensor/box.h"

#define METADATA ".metadata"

enum {
    SNIFF_BYTES = 4096,
    MOST_NAMED = 4, /* number of files that an error lists */
};

struct file {
    struct ckpt_source *source; /* NULL: the file does not exist */
    size_t nchunk;
    uint32_t index; /* in the catalogue */
};

struct load {
    struct ckpt_dir *dir;
    const struct ckpt_reader_options *opt;
    const struct ckpt_dcp_format *format;
    struct ckpt_dcp_metadata m;
    CKPT_VEC(const char *)
    names; /* names in the catalogue, in the order of m.tensors; NULL: left out */
    CKPT_VEC(struct file) files; /* in the order of m.files */
    struct ckpt_dcp_items items;
    struct ckpt_catalog *cat;
};

static void load_release(struct load *l)
{
    for (size_t i = 0; i < l->files.len; i++)
        ckpt_source_unref(l->files.ptr[i].source);
    ckpt_vec_release(&l->files);
    ckpt_vec_release(&l->names);
    ckpt_dcp_metadata_release(&l->m);
    ckpt_dcp_items_release(&l->items);
}

/* ---- metadata ---- */

/* Is it the name of a rank's metadata, such as "__12.metadata"? */
static bool is_rank_metadata(const char *name)
{
    unsigned long long rank;
    size_t len = strlen(name), tail = strlen(METADATA);

    return ckpt_has_prefix(name, "__") && ckpt_has_suffix(name, METADATA) && len > tail + 2 &&
           ckpt_parse_u64(name + 2, len - tail - 2, &rank);
}

struct names {
    CKPT_VEC(const char *) rank_metadata;
    bool has_data;
};

static void names_release(struct names *n) { ckpt_vec_release(&n->rank_metadata); }

static int list_names(struct ckpt_dir *dir, struct names *ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_entries_release) struct ckpt_entries entries = {0};
    struct ckpt_entry e;

    if (ckpt_entries_read(dir, &entries, err) < 0)
        return -1;
    while (ckpt_entries_next(&entries, &e)) {
        const bool found = e.kind != CKPT_ENTRY_DIR && is_rank_metadata(e.name);
        const char *own = found ? ckpt_dir_intern(dir, e.name) : NULL;
        ret->has_data |= ckpt_has_prefix(e.name, "__") && ckpt_has_suffix(e.name, ".distcp");
        if (found && (!own || ckpt_vec_push(&ret->rank_metadata, own) < 0))
            return ckpt_nomem(err);
    }
    return 0;
}

static int add_metadata(struct load *l, const char *name, bool rank_local, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_source_unrefp) struct ckpt_source *s = NULL;

    return ckpt_source_file_new(l->dir, name, l->opt->pool, &s, err) < 0
               ? -1
               : ckpt_dcp_metadata_add(&l->m, s, rank_local, err);
}

static int read_metadata(struct load *l, struct ckpt_err *err)
{
    ckpt_cleanup(names_release) struct names names = {0};

    if (ckpt_dir_has_file(l->dir, METADATA)) {
        if (add_metadata(l, METADATA, false, err) < 0)
            return -1;
    } else {
        if (list_names(l->dir, &names, err) < 0)
            return -1;
        if (names.rank_metadata.len == 0)
            return ckpt_fail(err, CKPT_MISSING,
                             "'%s' is incomplete: it has data files but no " METADATA
                             " (an interrupted save?)",
                             ckpt_dir_path(l->dir));
        for (size_t i = 0; i < names.rank_metadata.len; i++)
            if (add_metadata(l, names.rank_metadata.ptr[i], true, err) < 0)
                return -1;
    }
    return ckpt_dcp_metadata_finish(&l->m, err) < 0
               ? ckpt_err_in(err, "'%s'", ckpt_dir_path(l->dir))
               : 0;
}

/* Name the tensors. Those that do not belong to the model are dropped before any file is opened. */
static int name_tensors(struct load *l, struct ckpt_err *err)
{
    const struct ckpt_dcp_format *f = l->format;

    for (size_t i = 0; i < l->m.tensors.len; i++) {
        struct ckpt_dcp_tensor *t = &l->m.tensors.ptr[i];
        const char *name = f->tensor ? f->tensor(f->ctx, t->name) : t->name;
        if (ckpt_vec_push(&l->names, name) < 0)
            return ckpt_nomem(err);
        if (!name)
            t->nchunk = 0;
    }
    return 0;
}

/* ---- files ---- */

static int open_one(void *ctx, size_t i, struct ckpt_err *err)
{
    struct load *l = ctx;
    struct file *f = &l->files.ptr[i];
    struct ckpt_err e = {0};

    if (f->nchunk == 0) {
        /* it has only items that are not read */
    } else if (ckpt_source_file_open(f->source, &e) == 0) {
        return 0;
    } else if (e.code != CKPT_MISSING) {
        return ckpt_err_move(err, &e);
    }
    ckpt_source_unrefp(&f->source);
    return 0;
}

static int open_files(struct load *l, struct ckpt_err *err)
{
    for (size_t i = 0; i < l->m.files.len; i++) {
        struct file *f;
        if (ckpt_vec_add(&l->files, &f) < 0)
            return ckpt_nomem(err);
        if (ckpt_source_file_prepare(l->dir, l->m.files.ptr[i], l->opt->pool, &f->source, err) < 0)
            return -1;
    }
    for (size_t i = 0; i < l->m.tensors.len; i++) {
        const struct ckpt_dcp_tensor *t = &l->m.tensors.ptr[i];
        for (size_t k = t->first; k < t->first + t->nchunk; k++)
            if (l->m.chunks.ptr[k].file != CKPT_DCP_NOWHERE)
                l->files.ptr[l->m.chunks.ptr[k].file].nchunk++;
    }
    for (size_t i = 0; i < l->m.objects.len; i++)
        l->files.ptr[l->m.objects.ptr[i].file].nchunk++;
    return ckpt_parallel(l->files.len, 0, open_one, l, err);
}

/* Report all missing files in one line, so that they can be copied from the node that has them. */
static int fail_missing(const struct load *l, const char *tensor, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_str_release) struct ckpt_str list = {0};
    size_t n = 0;

    for (size_t i = 0; i < l->files.len; i++) {
        if (l->files.ptr[i].source || l->files.ptr[i].nchunk == 0)
            continue;
        if (n++ < MOST_NAMED)
            ckpt_str_printf(&list, "%s'%s'", n > 1 ? ", " : "", l->m.files.ptr[i]);
    }
    return ckpt_fail(err, CKPT_MISSING,
                     "'%s' is in a file that does not exist; missing: %s%s (%zu of %zu "
                     "files that %s names)",
                     tensor, ckpt_str_get(&list), n > MOST_NAMED ? " ..." : "", n, l->files.len,
                     METADATA);
}

/* ---- boxes ---- */

static int box_of(const struct ckpt_dcp_metadata *m, const struct ckpt_dcp_tensor *t,
                  const struct ckpt_dcp_chunk *c, struct ckpt_box *ret, struct ckpt_err *err)
{
    uint32_t rank = ckpt_dcp_rank(m, t->dim);

    if (ckpt_dcp_rank(m, c->lo) != rank || ckpt_dcp_rank(m, c->n) != rank)
        return ckpt_fail(err, CKPT_FORMAT, "a chunk has %u and %u dimensions, the tensor %u",
                         ckpt_dcp_rank(m, c->lo), ckpt_dcp_rank(m, c->n), rank);
    ret->rank = rank;
    memcpy(ret->lo, ckpt_dcp_ints(m, c->lo), rank * sizeof *ret->lo);
    memcpy(ret->n, ckpt_dcp_ints(m, c->n), rank * sizeof *ret->n);
    if (!ckpt_box_within(ret, ckpt_dcp_ints(m, t->dim), rank))
        return ckpt_fail(err, CKPT_FORMAT, "a chunk lies outside of the tensor");
    return 0;
}

/* Check the place of the item of a non-empty chunk. */
static int check_place(const struct load *l, const struct ckpt_dcp_tensor *t,
                       const struct ckpt_dcp_chunk *c, const struct ckpt_box *box,
                       struct ckpt_err *err)
{
    if (c->file == CKPT_DCP_NOWHERE)
        return ckpt_fail(
            err, CKPT_MISSING, "storage_data has no entry for the chunk of size %s at %s",
            ckpt_shape_text(box->n, box->rank).text, ckpt_shape_text(box->lo, box->rank).text);
    const struct ckpt_source *s = l->files.ptr[c->file].source;
    if (!s)
        return fail_missing(l, t->name, err);
    /* torch's own codec; the number is its version, of which the first part must be 1 */
    if (t->codec && strcmp(t->codec, "stream.zstd/1") != 0 &&
        !ckpt_has_prefix(t->codec, "stream.zstd/1."))
        return ckpt_fail(err, CKPT_UNSUPPORTED,
                         "its items are transformed by %s, which is not supported", t->codec);
    if (!ckpt_range_ok(c->off, c->len, s->size))
        return ckpt_fail(err, CKPT_FORMAT,
                         "'%s' is too short: it has %" PRIu64 " bytes, an item begins at %" PRIu64
                         " and has %" PRIu64,
                         l->m.files.ptr[c->file], s->size, c->off, c->len);
    return 0;
}

static int check_tensor(const struct load *l, const struct ckpt_dcp_tensor *t, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) struct ckpt_box *box = malloc((t->nchunk + 1) * sizeof *box);
    const uint64_t *dim = ckpt_dcp_ints(&l->m, t->dim);
    const uint32_t rank = ckpt_dcp_rank(&l->m, t->dim);
    uint64_t numel;
    size_t n = 0, bad;

    if (!box)
        return ckpt_nomem(err);
    if (!ckpt_shape_numel(dim, rank, &numel))
        return ckpt_fail(err, CKPT_LIMIT, "it claims more than 2^64 elements");
    for (size_t i = 0; i < t->nchunk; i++) {
        const struct ckpt_dcp_chunk *c = &l->m.chunks.ptr[t->first + i];
        if (box_of(&l->m, t, c, &box[n], err) < 0)
            return -1;
        if (ckpt_box_numel(&box[n]) == 0)
            continue;
        if (check_place(l, t, c, &box[n], err) < 0)
            return -1;
        n++;
    }
    return ckpt_boxes_cover(dim, rank, box, n, &bad, err);
}

/* Check everything about a tensor that can be checked without reading an item. */
static int check_one(void *ctx, size_t i, struct ckpt_err *err)
{
    struct load *l = ctx;
    struct ckpt_dcp_tensor *t = &l->m.tensors.ptr[i];

    if (!l->names.ptr[i] || check_tensor(l, t, err) == 0)
        return 0;
    t->nchunk = 0;
    l->names.ptr[i] = NULL;
    if (!strstr(err->text, t->name))
        (void)ckpt_err_in(err, "tensor '%s'", t->name);
    if (!l->format->optional || !l->format->optional(l->format->ctx, t->name))
        return -1;
    ckpt_catalog_warn(l->cat, "left out: %s", err->text);
    return 0;
}

/* ---- items ---- */

static int read_items(struct load *l, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) struct ckpt_source **source =
        calloc(l->files.len + 1, sizeof(struct ckpt_source *));

    if (!source)
        return ckpt_nomem(err);
    for (size_t i = 0; i < l->files.len; i++) {
        struct file *f = &l->files.ptr[i];
        if (f->source && (f->index = ckpt_catalog_add_source(l->cat, f->source, err)) == UINT32_MAX)
            return -1;
        source[i] = f->source;
    }
    return ckpt_dcp_items_read(&l->items, &l->m, source, err);
}

/* ---- tensors ---- */

static int add_tensor(struct load *l, const struct ckpt_dcp_tensor *t, const char *name,
                      struct ckpt_err *err)
{
    const struct ckpt_dcp_metadata *m = &l->m;
    const uint64_t *dim = ckpt_dcp_ints(m, t->dim);
    ckpt_cleanup(ckpt_pieces_release) struct ckpt_pieces pieces = {0};

    for (size_t i = t->first; i < t->first + t->nchunk; i++) {
        const struct ckpt_dcp_chunk *c = &m->chunks.ptr[i];
        uint64_t stride[CKPT_MAX_RANK];
        struct ckpt_box box;
        if (box_of(m, t, c, &box, err) < 0)
            return -1;
        if (ckpt_box_numel(&box) == 0)
            continue;
        const uint32_t source =
            c->plain ? ckpt_catalog_add_source(l->cat, l->items.plain.ptr[c->plain - 1], err)
                     : l->files.ptr[c->file].index;
        if (source == UINT32_MAX)
            return -1;
        ckpt_dcp_strides(&l->items, c, &box, ckpt_dtype_size(t->dtype), stride);
        if (ckpt_pieces_add(&pieces, dim, &box, source, c->data, stride, err) < 0)
            return -1;
    }
    return ckpt_pieces_catalog(&pieces, l->cat, name, t->dtype, dim, ckpt_dcp_rank(m, t->dim), err);
}

static int add_tensors(struct load *l, struct ckpt_err *err)
{
    for (size_t i = 0; i < l->m.tensors.len; i++) {
        const uint32_t k = l->m.order[i];
        if (l->names.ptr[k] && (ckpt_foreign_tensor(l->names.ptr[k], err) < 0 ||
                                add_tensor(l, &l->m.tensors.ptr[k], l->names.ptr[k], err) < 0))
            return -1;
    }
    return 0;
}

/* Read the pickled objects, of which each is compressed if it begins like that. */
static int read_objects(struct load *l, struct ckpt_err *err)
{
    for (size_t i = 0; i < l->m.objects.len; i++) {
        const struct ckpt_dcp_object *o = &l->m.objects.ptr[i];
        struct ckpt_source *s = l->files.ptr[o->file].source;
        if (!s)
            return fail_missing(l, o->name, err);
        if (!ckpt_range_ok(o->off, o->len, s->size))
            return ckpt_fail(err, CKPT_FORMAT, "'%s' is too short for object '%s'",
                             l->m.files.ptr[o->file], o->name);
        ckpt_cleanup(ckpt_source_unrefp) struct ckpt_source *own = NULL;
        if (ckpt_dcp_decompress(&l->items, s, o->off, o->len, CKPT_TORCH_MAX_PICKLE, &own, err) <
                0 ||
            (!own && ckpt_source_window_new(s, o->off, o->len, &own, err) < 0) ||
            l->format->object(l->format->ctx, o->name, own, err) < 0)
            return ckpt_err_in(err, "object '%s' in '%s'", o->name, l->m.files.ptr[o->file]);
    }
    return 0;
}

/* Facts for people and for choosing names. */
static void describe(struct load *l)
{
    json_t **about = &l->cat->about, *roots = json_array();

    for (size_t i = 0; i < l->m.roots.len; i++) {
        ckpt_json_append(&roots, json_string(l->m.roots.ptr[i]));
        if (ckpt_has_prefix(l->m.roots.ptr[i], "optim"))
            ckpt_json_set(about, "optimizer", json_true());
    }
    ckpt_json_set(about, "format", json_string(l->format->name));
    ckpt_json_set(about, "objects", json_integer((json_int_t)l->m.nbytes_entry));
    if (l->m.has_planner_data)
        ckpt_json_set(about, "roots", roots);
    else
        json_decref(roots);
}

/* ---- the whole ---- */

/* Does .metadata begin like the pickle of a DCP? Other tools use the same file name. */
static bool sniff(const struct ckpt_dir *dir, const char *name)
{
    unsigned char head[SNIFF_BYTES];
    size_t n = ckpt_dir_read_head(dir, name, head, sizeof head);

    return n > 2 && head[0] == 0x80 && head[1] >= 2 && head[1] <= 5 &&
           memmem(head, n, "Metadata", strlen("Metadata"));
}

enum ckpt_evidence ckpt_dcp_evidence(struct ckpt_dir *dir)
{
    ckpt_cleanup(names_release) struct names names = {0};

    if (ckpt_dir_has_file(dir, METADATA) && sniff(dir, METADATA))
        return CKPT_BY_MAGIC;
    if (list_names(dir, &names, NULL) < 0)
        return CKPT_NOT_MINE;
    if (names.rank_metadata.len && sniff(dir, names.rank_metadata.ptr[0]))
        return CKPT_BY_MAGIC;
    return names.has_data ? CKPT_BY_NAMES : CKPT_NOT_MINE;
}

int ckpt_dcp_load(struct ckpt_dir *dir, const struct ckpt_reader_options *opt,
                  const struct ckpt_dcp_format *format, struct ckpt_catalog *cat,
                  struct ckpt_err *err)
{
    static const struct ckpt_dcp_format plain = {.name = "dcp"};
    ckpt_cleanup(load_release) struct load l = {
        .dir = dir, .opt = opt, .format = format ? format : &plain, .cat = cat};

    ckpt_dcp_items_init(&l.items);
    l.items.spill = opt->spill;
    l.m.format = l.format;
    l.m.values_are_enough = opt->states;
    if (read_metadata(&l, err) < 0 || name_tensors(&l, err) < 0 || open_files(&l, err) < 0)
        return -1;
    if (ckpt_reader_add_each(opt, cat, l.m.tensors.len, check_one, &l, err) < 0 ||
        read_items(&l, err) < 0 || add_tensors(&l, err) < 0 || read_objects(&l, err) < 0)
        return ckpt_err_in(err, "'%s'", ckpt_dir_path(dir));
    describe(&l);
    return 0;
}
