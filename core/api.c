/* SPDX-License-Identifier: Apache-2.0 */
/* The public face of views: nodes, tensors and facts. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include <ckptfs/ckptfs.h>

#include "base/ckd.h"
#include "base/mem.h"
#include "base/option.h"
#include "base/sized.h"
#include "base/str.h"
#include "format/changes.h"
#include "format/writer.h"
#include "model/describe.h"
#include "model/opening.h"
#include "run/checkpoint.h"
#include "run/save.h"
#include "tensor/read.h"
#include "tensor/value.h"
#include "view/ahead.h"

const char *ckpt_version(void) { return CKPT_VERSION; }

/* ---- nodes: struct ckpt_node is the view layer's struct ckpt_vnode ---- */

static const struct ckpt_vnode *vnode(const struct ckpt_node *n)
{
    return (const struct ckpt_vnode *)n;
}

static const struct ckpt_node *node(const struct ckpt_vnode *v)
{
    return (const struct ckpt_node *)v;
}

const struct ckpt_node *ckpt_view_root(const struct ckpt_view *view)
{
    return node(ckpt_vtree_root(view->tree));
}

const struct ckpt_node *ckpt_view_find(const struct ckpt_view *view, const char *path)
{
    return node(ckpt_vtree_find(view->tree, path));
}

const char *ckpt_node_name(const struct ckpt_node *n) { return vnode(n)->name; }

bool ckpt_node_is_dir(const struct ckpt_node *n) { return vnode(n)->kind == CKPT_NODE_DIR; }

uint64_t ckpt_node_size(const struct ckpt_node *n) { return vnode(n)->size; }

int64_t ckpt_node_mtime_ns(const struct ckpt_node *n) { return vnode(n)->mtime_ns; }

size_t ckpt_node_children(const struct ckpt_node *n) { return vnode(n)->nchild; }

const struct ckpt_node *ckpt_node_child(const struct ckpt_node *n, size_t i)
{
    return node(vnode(n)->child[i]);
}

/* The first error of a run, and the first of a view that says that a shard changed, are worth a
 * line; the rest of a storm is counted. Storage that gives no answer may be back soon: who reads
 * says so, and when it is. */
static int note_failure(struct ckpt_view *view, const struct ckpt_err *err)
{
    atomic_fetch_add(&view->shared->errors, 1);
    if (err->code == CKPT_TIMEOUT)
        return -1;
    const bool first = !atomic_exchange(&view->shared->told, true);
    if (err->code == CKPT_STALE ? !atomic_exchange(&view->stale, true) : first)
        ckpt_logf(&view->shared->opt->log, CKPT_LOG_ERROR, "%s", err->text);
    return -1;
}

int ckpt_node_pread(struct ckpt_view *view, const struct ckpt_node *file, void *buf, size_t len,
                    uint64_t off, size_t *ret_len, struct ckpt_err *err)
{
    struct ckpt_err own = {0};

    if (ckpt_checkpoint_check(view, &own) == 0 &&
        ckpt_vfile_pread(&view->reading, vnode(file), buf, len, off, ret_len, &own) == 0)
        return 0;
    (void)note_failure(view, &own);
    return ckpt_err_move(err, &own);
}

/* ---- tensors ---- */

size_t ckpt_view_tensors(const struct ckpt_view *view) { return view->cat->tensors.len; }

int ckpt_view_tensor(const struct ckpt_view *view, size_t i, struct ckpt_tensor_info *ret,
                     struct ckpt_err *err)
{
    const struct ckpt_tensor *t = &view->cat->tensors.ptr[i];
    const struct ckpt_vnode *file;
    struct ckpt_tensor_info info = {
        .name = t->name,
        .dtype = ckpt_tensor_dtype_name(t),
        .shape = ckpt_tensor_shape(t),
        .rank = t->rank,
        .nbytes = ckpt_tensor_nbytes(t),
        .torch_dtype = ckpt_dtype_torch_name(t->dtype),
    };

    ckpt_vtree_place(view->tree, i, &file, &info.file_off);
    info.file = node(file);
    return ckpt_sized_give(ret, &info, sizeof info, "ckpt_tensor_info", err);
}

bool ckpt_view_find_tensor(const struct ckpt_view *view, const char *name, size_t *ret_i)
{
    const struct ckpt_tensor *t = ckpt_catalog_find(view->cat, name);

    if (t)
        *ret_i = (size_t)(t - view->cat->tensors.ptr);
    return t != NULL;
}

int ckpt_view_tensor_pread(struct ckpt_view *view, size_t i, void *buf, size_t len, uint64_t off,
                           struct ckpt_err *err)
{
    const struct ckpt_tensor *t = i < view->cat->tensors.len ? &view->cat->tensors.ptr[i] : NULL;
    struct ckpt_err own = {0};

    if (!t || !ckpt_range_ok(off, len, ckpt_tensor_nbytes(t)))
        return ckpt_fail(err, CKPT_USAGE,
                         "bytes %" PRIu64 "..%" PRIu64 " are outside of the tensor", off,
                         off + len);
    ckpt_ahead_note_tensor(&view->reading, view->tree, i, off, off + len);
    if (ckpt_checkpoint_check(view, &own) == 0 &&
        ckpt_tensor_pread(t, &view->reading, buf, len, off, &own) == 0)
        return 0;
    if (own.code == CKPT_STALE)
        atomic_store(&view->stale, true);
    return ckpt_err_move(err, &own);
}

int ckpt_view_prepare(struct ckpt_view *view, const struct ckpt_node *file, uint64_t off,
                      uint64_t end)
{
    switch (ckpt_ahead_prepare(&view->reading, vnode(file), off, end)) {
    case CKPT_PREPARED_BEFORE:
        return 2;
    case CKPT_PREPARED_BUSY:
        return 1;
    case CKPT_PREPARED_NOT:
        return -1;
    default:
        return 0;
    }
}

void ckpt_view_will_read(struct ckpt_view *view)
{
    ckpt_ahead_all(&view->reading, view->tree, view->cat->tensors.len);
}

const struct ckpt_changes_form *ckpt_changes_form_at(size_t i)
{
    const struct ckpt_changes_writer *const *w = ckpt_changes_writers;

    while (*w && i--)
        w++;
    return *w ? &(*w)->form : NULL;
}

/* The writer of a form; NULL: the form is none of the library's. */
static const struct ckpt_changes_writer *writer_of(const struct ckpt_changes_form *form)
{
    const struct ckpt_changes_writer *const *w = ckpt_changes_writers;

    while (*w && &(*w)->form != form)
        w++;
    return *w;
}

int ckpt_view_change(struct ckpt_view *from, struct ckpt_view *to, size_t i,
                     const struct ckpt_changes_form *form, bool overwrite, struct ckpt_change *ret,
                     struct ckpt_err *err)
{
    const struct ckpt_tensor *b = &to->cat->tensors.ptr[i],
                             *a = ckpt_catalog_find(from->cat, b->name);
    const struct ckpt_changes_writer *writer = writer_of(form);
    struct ckpt_change made = {0};

    if (ckpt_sized_check(ret, "ckpt_change", err) < 0)
        return -1;
    if (!writer)
        return ckpt_fail(err, CKPT_USAGE, "the form is not one of ckpt_changes_form_at");
    if (!a)
        return ckpt_fail(err, CKPT_MISSING, "'%s' is not in %s", b->name, from->source);
    if (ckpt_tensor_same_kind(a, from->source, b, to->source, err) < 0 ||
        writer->make(a, &from->reading, b, &to->reading, overwrite, &made, err) < 0)
        return -1;
    return ckpt_sized_give(ret, &made, sizeof made, "ckpt_change", err);
}

bool ckpt_view_unchanged(const struct ckpt_view *from, const struct ckpt_view *to, size_t i)
{
    const struct ckpt_tensor *b = &to->cat->tensors.ptr[i],
                             *a = ckpt_catalog_find(from->cat, b->name);

    return a && ckpt_tensor_unchanged(a, b);
}

/* ---- saves ---- */

int ckpt_view_verify_unchanged(struct ckpt_view *view, struct ckpt_err *err)
{
    enum ckpt_save_state state;
    struct ckpt_err own = {0};

    if (ckpt_checkpoint_check(view, err) < 0 ||
        ckpt_save_compare(view->save, view->shared->pool, &state, &own) < 0)
        return ckpt_err_move(err, &own);
    if (state == CKPT_SAVE_MIXED && !view->shared->opt->allow_mixed)
        return ckpt_fail(err, own.code, "%s: try again when the save has ended", own.text);
    if (state == CKPT_SAVE_MIXED)
        ckpt_logf(&view->shared->opt->log, CKPT_LOG_WARNING, "%s (allow_mixed)", own.text);
    return 0;
}

int ckpt_view_at_rest(struct ckpt_view *view, uint32_t quiet_ms, bool *ret, struct ckpt_err *err)
{
    struct ckpt_err own = {0};

    if (ckpt_save_at_rest(view->save, quiet_ms, ret, &own) == 0)
        return 0;
    if (own.code == CKPT_STALE || own.code == CKPT_MISSING)
        atomic_store(&view->stale, true);
    return ckpt_err_move(err, &own);
}

/* ---- facts ---- */

const char *ckpt_view_source(const struct ckpt_view *view) { return view->source; }

uint64_t ckpt_view_generation(const struct ckpt_view *view) { return view->generation; }

static int dump(const json_t *j, char **ret, struct ckpt_err *err)
{
    return ckpt_json_dump(j, CKPT_JSON_PYTHON, false, ret, NULL, err);
}

static size_t count_files(const struct ckpt_vnode *n)
{
    size_t count = n->kind == CKPT_NODE_FILE;

    for (size_t i = 0; i < n->nchild; i++)
        count += count_files(n->child[i]);
    return count;
}

static void totals(const struct ckpt_catalog *cat, json_int_t *parameters, json_int_t *bytes,
                   json_int_t *pieces)
{
    *parameters = *bytes = *pieces = 0;
    for (size_t i = 0; i < cat->tensors.len; i++) {
        *parameters += (json_int_t)ckpt_tensor_elements(&cat->tensors.ptr[i]);
        *bytes += (json_int_t)ckpt_tensor_nbytes(&cat->tensors.ptr[i]);
        *pieces += (json_int_t)cat->tensors.ptr[i].npiece;
    }
}

/* The word of -o view=. */
static const char *word_of(const struct ckpt_options *opt)
{
    if (opt->output.writer)
        return opt->output.writer->name;
    return opt->raw ? "raw" : opt->memory ? "memory" : "hf";
}

/* The number of files that tensors are read from, and their bytes. */
static json_int_t count_shards(const struct ckpt_catalog *cat, json_int_t *ret_bytes)
{
    json_int_t n = 0;

    *ret_bytes = 0;
    for (size_t i = 0; i < cat->sources.len; i++) {
        const struct ckpt_source *file = ckpt_source_file_behind(cat->sources.ptr[i]);
        n += file != NULL;
        *ret_bytes += file ? (json_int_t)file->size : 0;
    }
    return n;
}

/* Make the object whose text ckpt_bucket_info returns. NULL: no run in a bucket is open, or memory
 * ran out. */
static json_t *bucket_info(void)
{
    struct ckpt_bucket_stats s;

    return !ckpt_bucket_stats(&s)
               ? NULL
               : json_pack("{s:s, s:s, s:s, s:I, s:I, s:I, s:I}", "endpoint", s.endpoint, "region",
                           s.region, "credentials", s.credentials, "requests",
                           (json_int_t)s.requests, "bytes", (json_int_t)s.bytes, "retries",
                           (json_int_t)s.retries, "connections", (json_int_t)s.connections);
}

int ckpt_bucket_info(char **ret_json, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *j = bucket_info();

    *ret_json = NULL;
    return j ? dump(j, ret_json, err) : 0;
}

/* Count tensors by torch's name of their dtype: a new object, in the order of first tensors; NULL:
 * out of memory. stored: the dtype from which those are made. */
static json_t *count_dtypes(const struct ckpt_catalog *cat, bool stored)
{
    size_t n[CKPT_NDTYPE] = {0};
    json_t *counts = json_object();

    for (size_t i = 0; i < cat->tensors.len; i++) {
        const struct ckpt_tensor *t = &cat->tensors.ptr[i];
        n[(stored ? ckpt_tensor_stored(t) : t)->dtype]++;
    }
    for (int t = 0; t < CKPT_NDTYPE; t++)
        if (n[t])
            ckpt_json_set(&counts, ckpt_dtype_torch_name((enum ckpt_dtype)t),
                          json_integer((json_int_t)n[t]));
    return counts;
}

int ckpt_view_info(struct ckpt_view *view, char **ret_json, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *info = json_deep_copy(view->cat->about);
    ckpt_cleanup(ckpt_json_decrefp) json_t *bucket = bucket_info();
    ckpt_cleanup(ckpt_freep) char *storage =
        view->cat->sources.len ? ckpt_source_storage(view->cat->sources.ptr[0]) : NULL;
    json_t *config = view->config, *more;
    json_int_t parameters, bytes, pieces, stored;
    const json_int_t shards = count_shards(view->cat, &stored);

    totals(view->cat, &parameters, &bytes, &pieces);
    more = json_pack(
        "{s:s, s:s, s:s?, s:O?, s:O?, s:s?, s:s?, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:O}",
        "source", view->source, "view", word_of(view->shared->opt), "recipe", view->recipe,
        "model_type", json_object_get(config, "model_type"), "architectures",
        json_object_get(config, "architectures"), "dtype", ckpt_main_dtype(view->cat, false),
        "stored_dtype", ckpt_main_dtype(view->cat, true), "tensors",
        (json_int_t)view->cat->tensors.len, "parameters", parameters, "bytes", bytes, "files",
        (json_int_t)count_files(ckpt_vtree_root(view->tree)), "shard_files", shards, "stored_bytes",
        stored, "saved_ns", (json_int_t)ckpt_node_mtime_ns(ckpt_view_root(view)), "pieces", pieces,
        "warnings", view->cat->warnings);
    if (!info || !more || json_object_update_new(info, more) < 0 ||
        json_object_set_new(info, "tied",
                            ckpt_describe_ties(view->shared, view->cat, view->config)) < 0 ||
        json_object_set_new(info, "dtypes", count_dtypes(view->cat, false)) < 0 ||
        json_object_set_new(info, "stored_dtypes", count_dtypes(view->cat, true)) < 0 ||
        (storage && json_object_set_new(info, "storage", json_string(storage)) < 0) ||
        (bucket && json_object_set(info, "bucket", bucket) < 0))
        return ckpt_nomem(err);
    return dump(info, ret_json, err);
}

int ckpt_view_objects(struct ckpt_view *view, char **ret_json, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *objects = NULL;

    return ckpt_describe_objects(view, &objects, err) < 0
               ? -1
               : ckpt_json_dump(objects, CKPT_JSON_COMPACT, false, ret_json, NULL, err);
}

int ckpt_view_states(struct ckpt_view *view, char **ret_json, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *states = NULL;

    return ckpt_describe_states(view, &states, err) < 0 ? -1 : dump(states, ret_json, err);
}

int ckpt_view_paths(struct ckpt_view *view, char **ret_json, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *paths = NULL;

    return ckpt_describe_paths(view, &paths, err) < 0
               ? -1
               : ckpt_json_dump(paths, CKPT_JSON_COMPACT, false, ret_json, NULL, err);
}

/* The pieces of a stored tensor, or of what it is computed from. */
static json_t *piece_list(const struct ckpt_catalog *cat, const struct ckpt_tensor *t)
{
    json_t *list = json_array();

    for (size_t i = 0; list && i < t->npiece; i++) {
        const struct ckpt_piece *p = &t->piece[i];
        ckpt_cleanup(ckpt_freep) char *path = ckpt_source_name(cat->sources.ptr[p->source]);
        ckpt_cleanup(ckpt_freep) char *name = path ? ckpt_printable(path) : NULL;
        json_t *axes = json_array();
        for (uint32_t a = 0; a < p->naxis; a++)
            ckpt_json_append(&axes, json_pack("{s:I, s:I, s:I}", "n", (json_int_t)p->axis[a].n,
                                              "element_stride", (json_int_t)p->axis[a].dst,
                                              "byte_stride", (json_int_t)p->axis[a].src));
        ckpt_json_append(&list,
                         json_pack("{s:s, s:I, s:I, s:I, s:o}", "file", name, "offset",
                                   (json_int_t)p->src, "element", (json_int_t)p->dst, "elements",
                                   (json_int_t)ckpt_piece_numel(p), "axes", axes));
    }
    return list;
}

static json_t *shape_list(const struct ckpt_tensor *t)
{
    json_t *list = json_array();

    for (uint32_t d = 0; d < t->rank; d++)
        ckpt_json_append(&list, json_integer((json_int_t)ckpt_tensor_shape(t)[d]));
    return list;
}

/* Append the stored tensors from which a tensor is computed, or itself if it is stored, each with
 * its pieces. */
static void add_stored(json_t **list, const struct ckpt_catalog *cat, const struct ckpt_tensor *t)
{
    for (uint32_t i = 0; t->value && i < t->value->narg; i++)
        add_stored(list, t->value->arg[i]->cat, t->value->arg[i]);
    if (!t->value)
        ckpt_json_append(list, json_pack("{s:s, s:s, s:o, s:o}", "tensor", t->name, "dtype",
                                         ckpt_dtype_name((enum ckpt_dtype)t->dtype), "shape",
                                         shape_list(t), "pieces", piece_list(cat, t)));
}

/* "cast of plus_one": operators, the last one first. */
static int add_computed(json_t *out, const struct ckpt_catalog *cat, const struct ckpt_tensor *t,
                        struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *text = NULL;
    ckpt_cleanup(ckpt_json_decrefp) json_t *stored = json_array();
    struct ckpt_str s = {0};

    add_stored(&stored, cat, t);
    for (; t->value; t = t->value->arg[0])
        ckpt_str_printf(&s, "%s%s", s.len ? " of " : "", t->value->ops->name);
    if (ckpt_str_steal(&s, &text, err) < 0)
        return -1;
    if (!stored || json_object_set_new(out, "computed", json_string(text)) < 0)
        return ckpt_nomem(err);
    if (json_array_size(stored) > 1)
        return json_object_set(out, "operands", stored) < 0 ? ckpt_nomem(err) : 0;
    const json_t *only = json_array_get(stored, 0);
    return json_object_set(out, "stored_dtype", json_object_get(only, "dtype")) < 0 ||
                   json_object_set(out, "pieces", json_object_get(only, "pieces")) < 0
               ? ckpt_nomem(err)
               : 0;
}

/* Name the tensor that was meant: users leave out ".weight" first of all. */
static int fail_no_tensor(const struct ckpt_catalog *cat, const char *name, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *weight = ckpt_asprintf("%s.weight", name);
    const struct ckpt_tensor *t = weight ? ckpt_catalog_find(cat, weight) : NULL;
    struct ckpt_near near = {.word = t ? t->name : NULL};

    for (size_t i = 0; !t && i < cat->tensors.len; i++)
        ckpt_near_consider(&near, name, cat->tensors.ptr[i].name);
    return ckpt_fail(err, CKPT_MISSING, "there is no tensor '%s'%s%s%s", name,
                     near.word ? "; did you mean '" : "", near.word ? near.word : "",
                     near.word ? "'?" : "");
}

int ckpt_view_explain(struct ckpt_view *view, const char *tensor, char **ret_json,
                      struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *out = NULL;
    ckpt_cleanup(ckpt_json_decrefp) json_t *rule = NULL;
    ckpt_cleanup(ckpt_json_decrefp) json_t *ties =
        ckpt_describe_ties(view->shared, view->cat, view->config);
    const struct ckpt_tensor *t = ckpt_catalog_find(view->cat, tensor);
    struct ckpt_tensor_info info = {.size = sizeof info};
    const char *tied = t ? NULL : ckpt_json_str(ties, tensor);

    if (tied)
        t = ckpt_catalog_find(view->cat, tied);
    if (!t)
        return fail_no_tensor(view->cat, tensor, err);
    if (ckpt_describe_rule(view, t->name, &rule, err) < 0)
        return -1;
    (void)ckpt_view_tensor(view, (size_t)(t - view->cat->tensors.ptr), &info, NULL);
    out = json_pack("{s:s, s:s, s:o, s:s?, s:I, s:O?}", "tensor", t->name, "dtype", info.dtype,
                    "shape", shape_list(t), "file", info.file ? ckpt_node_name(info.file) : NULL,
                    "file_offset", (json_int_t)info.file_off, "rule", rule);
    if (!out || (tied && json_object_set_new(out, "is_the_same_as", json_string(tensor)) < 0))
        return ckpt_nomem(err);
    if (t->value ? add_computed(out, view->cat, t, err) < 0
                 : json_object_set_new(out, "pieces", piece_list(view->cat, t)) < 0)
        return ckpt_nomem(err);
    return dump(out, ret_json, err);
}
