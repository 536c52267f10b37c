/* SPDX-License-Identifier: Apache-2.0 */
/* Versions of a model that hold only what changed since the version before, as trainers of
 * reinforcement learning write them for their inference engines. A run is a folder of versions,
 * some of which may be whole models; before the first one there is version 0, the base.
 *
 * slime (slime/backends/megatron_utils/update_weight/update_weight_from_disk_delta.py):
 * weight_v000003/model-00000-of-00002.safetensors, in which a changed tensor is a U8 blob under its
 * name and __metadata__ has the checksum of its new bytes; and model.safetensors.index.json,
 * written last, whose metadata has version, base_version, delta_encoding, compression_format and
 * checksum_format.
 *
 * SkyRL (skyrl/backends/skyrl_train/weight_sync/delta_checkpoint.py):
 * delta-00000003/delta-rank00000-file000000.safetensors, and manifest.json, written last, with a
 * record of each tensor: name, dtype, shape, payload_file, payload_key, checksum and
 * checksum_algorithm. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/str.h"
#include "container/config.h"
#include "container/safetensors.h"
#include "format/delta/fold.h"
#include "format/reader.h"
#include "tensor/strided.h"

#define INDEX "model.safetensors.index.json"
#define MANIFEST "manifest.json"

enum {
    MOST_LEVELS = 64,
    HEAD = 4096, /* bytes of a file that a probe reads at first, and then GROWTH times as many */
    GROWTH = 16,
    MAX_INDEX = 256 << 20,
};

/* A changed tensor. Strings are in the catalogue's arena, or in the index. */
struct blob {
    struct ckpt_delta delta;
    uint32_t rank; /* of the record's shape; CKPT_NONE: it says nothing */
    const json_t *shape;
    const char *dtype;
};

enum kind { WHOLE, SLIME, SKYRL }; /* of a version */

struct level {
    struct ckpt_dir *dir;
    enum kind kind;
    const char *name; /* of the folder */
    json_t *index;
    uint64_t version, base;
    CKPT_VEC(struct blob) blobs;
    struct ckpt_map by_name;
};

struct load {
    const struct ckpt_reader_options *opt;
    struct ckpt_facts *facts;
    struct ckpt_catalog *cat;
    const struct ckpt_catalog
        *whole; /* of the whole model before the first change: `own` or base */
    struct ckpt_catalog *own;
    struct ckpt_delta_store *store;
    CKPT_VEC(struct level) levels; /* newest first */
    struct ckpt_source **last;     /* of each source of `whole`: the changed tensor before */
    size_t unchecked;              /* tensors whose checksum is not compared */
};

static void load_release(struct load *l)
{
    for (size_t i = 0; i < l->levels.len; i++) {
        ckpt_dir_unref(l->levels.ptr[i].dir);
        json_decref(l->levels.ptr[i].index);
        ckpt_vec_release(&l->levels.ptr[i].blobs);
        ckpt_map_release(&l->levels.ptr[i].by_name);
    }
    ckpt_vec_release(&l->levels);
    free(l->last);
    ckpt_catalog_free(l->own);
    ckpt_delta_store_unref(l->store);
}

/* ---- which versions ---- */

enum answer { NO, YES, CUT_OFF }; /* CUT_OFF: the text ends before that can be said */

/* Does the object that comes next have one of these members? */
static enum answer has_member(struct ckpt_json_pull *p, const char *const *names)
{
    const char *key;

    if (ckpt_json_pull_peek(p) != '{') {
        ckpt_json_pull_skip(p);
        return p->failed ? CUT_OFF : NO;
    }
    (void)ckpt_json_pull_object(p);
    while ((key = ckpt_json_pull_member(p))) {
        if (ckpt_one_of(key, names))
            return YES;
        ckpt_json_pull_skip(p);
    }
    return p->failed ? CUT_OFF : NO;
}

/* Is this the beginning of slime's index: does its metadata have delta_encoding? */
static enum answer says_slime(struct ckpt_json_pull *p)
{
    static const char *const names[] = {"delta_encoding", NULL};
    const char *key;

    if (ckpt_json_pull_peek(p) != '{')
        return NO;
    (void)ckpt_json_pull_object(p);
    while ((key = ckpt_json_pull_member(p))) {
        if (strcmp(key, "metadata") == 0)
            return has_member(p, names);
        ckpt_json_pull_skip(p);
    }
    return p->failed ? CUT_OFF : NO;
}

/* Is this the beginning of SkyRL's manifest? */
static enum answer says_skyrl(struct ckpt_json_pull *p)
{
    static const char *const names[] = {"base_version", "payload_files", NULL};

    return ckpt_json_pull_peek(p) == '{' ? has_member(p, names) : NO;
}

/* Ask about a JSON file. The answer is near its beginning as a rule, so that the first bytes are
 * read, and more as long as they do not say it. A file that is not JSON says no: whoever reads it
 * will report that. */
static bool says(const struct ckpt_dir *dir, const char *file,
                 enum answer (*ask)(struct ckpt_json_pull *p))
{
    struct ckpt_json_pull p;

    for (size_t cap = HEAD; cap <= MAX_INDEX; cap *= GROWTH) {
        ckpt_cleanup(ckpt_freep) char *text = malloc(cap + 1);
        const size_t len = text ? ckpt_dir_read_head(dir, file, text, cap) : 0;
        if (len == 0)
            return false;
        text[len] = '\0';
        ckpt_json_pull_init(&p, text, len, file);
        const enum answer answer = ask(&p);
        if (answer != CUT_OFF || len < cap)
            return answer == YES;
    }
    return false;
}

static enum kind kind_of(const struct ckpt_dir *dir)
{
    return says(dir, INDEX, says_slime) ? SLIME : says(dir, MANIFEST, says_skyrl) ? SKYRL : WHOLE;
}

static enum ckpt_evidence delta_probe(struct ckpt_dir *dir)
{
    return kind_of(dir) != WHOLE ? CKPT_BY_MAGIC : CKPT_NOT_MINE;
}

/* A version, as a number or as its digits. */
static bool number_of(const json_t *obj, const char *key, uint64_t *ret)
{
    const char *text = ckpt_json_str(obj, key);
    unsigned long long value;

    if (!text)
        return ckpt_json_u64(obj, key, ret);
    if (!ckpt_parse_u64(text, strlen(text), &value))
        return false;
    *ret = value;
    return true;
}

static int read_numbers(struct level *v, const char *file, const json_t *of, struct ckpt_err *err)
{
    if (number_of(of, "version", &v->version) && number_of(of, "base_version", &v->base) &&
        v->base < v->version)
        return 0;
    return ckpt_fail(err, CKPT_FORMAT,
                     "'%s/%s': expected version and an earlier base_version, as numbers",
                     ckpt_dir_path(v->dir), file);
}

/* The name of another version's folder: this one's with other digits at its end. NULL: no memory.
 */
static char *sibling(const struct level *v, uint64_t version)
{
    const size_t len = strlen(v->name);
    size_t digits = 0;

    while (digits < len && strchr("0123456789", v->name[len - digits - 1]))
        digits++;
    return ckpt_asprintf("%.*s%0*" PRIu64, (int)(len - digits), v->name, (int)digits, version);
}

/* Start from a whole model, a version in the folder. */
static int start_from(struct load *l, struct ckpt_dir *dir, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_facts_release) struct ckpt_facts facts = {0};

    if (ckpt_catalog_new(&l->own, err) < 0 ||
        ckpt_reader_hf.load(dir, l->opt, &facts, l->own, err) < 0)
        return -1;
    l->whole = l->own;
    l->facts->weight_map = ckpt_weight_map_ref(facts.weight_map);
    l->facts->home = ckpt_dir_ref(dir);
    return 0;
}

/* Go on with the version before v. *ret is a folder with changes, or NULL: the beginning has been
 * found. */
static int go_back(struct load *l, const struct level *v, struct ckpt_dir **ret,
                   enum kind *ret_kind, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *name = sibling(v, v->base);
    ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *dir = NULL;

    *ret = NULL;
    if (!name)
        return ckpt_nomem(err);
    if (l->opt->above && ckpt_dir_has_dir(l->opt->above, name)) {
        if (ckpt_dir_open_below(l->opt->above, name, &dir, err) < 0)
            return -1;
        if ((*ret_kind = kind_of(dir)) != WHOLE)
            *ret = ckpt_steal(&dir);
        return *ret ? 0 : start_from(l, dir, err);
    }
    if (v->base == 0 && l->opt->base)
        return l->whole = l->opt->base, 0;
    if (v->base == 0)
        return ckpt_fail(err, CKPT_MISSING,
                         "'%s' holds the changes of a model that is not here: base= gives it, the "
                         "directory from which the trainer began%s",
                         ckpt_dir_path(v->dir),
                         l->opt->above ? ""
                                       : "; if it is one of several versions, give their "
                                         "folder and step= instead");
    return ckpt_fail(err, CKPT_MISSING,
                     "'%s' holds the changes since version %" PRIu64 ", and there is no '%s'%s: "
                     "keep a whole version every so many, or export one before it is removed",
                     ckpt_dir_path(v->dir), v->base, name,
                     l->opt->above ? "" : " beside it (give the folder of all versions and step=)");
}

/* ---- the changes of a version ---- */

static int add_blob(struct load *l, struct level *v, const struct blob *b, struct ckpt_err *err)
{
    const uint32_t next = (uint32_t)v->blobs.len;
    const uint32_t at = ckpt_map_add(&v->by_name, b->delta.tensor, next);

    l->unchecked += b->delta.sum == CKPT_DELTA_UNCHECKED;
    if (at == CKPT_NONE || ckpt_vec_push(&v->blobs, *b) < 0)
        return ckpt_nomem(err);
    return at == next ? 0
                      : ckpt_fail(err, CKPT_CONFLICT, "'%s' has two changes of '%s'",
                                  ckpt_dir_path(v->dir), b->delta.tensor);
}

static const char *keep(struct load *l, const char *text)
{
    return text ? ckpt_arena_strdup(&l->cat->arena, text) : NULL;
}

/* Where a blob is. */
static int place(struct blob *b, const struct ckpt_st_tensor *t, struct ckpt_source *s,
                 struct level *v, struct ckpt_err *err)
{
    if (t->dtype != CKPT_U8)
        return ckpt_fail(err, CKPT_FORMAT, "'%s': the change of '%s' is %s, expected U8",
                         ckpt_dir_path(v->dir), b->delta.tensor, ckpt_dtype_name(t->dtype));
    b->delta.of = s;
    b->delta.off = t->off;
    b->delta.len = t->len;
    return 0;
}

/* A file of blobs that is open. */
struct payload {
    const char *name;
    struct ckpt_st st;
    struct ckpt_source *source;
    struct ckpt_map by_name, sums; /* its tensors; slime: its checksums, in st.metadata */
};
typedef CKPT_VEC(struct payload) payloads;

static void payloads_release(payloads *p)
{
    for (size_t i = 0; i < p->len; i++) {
        ckpt_st_release(&p->ptr[i].st);
        ckpt_map_release(&p->ptr[i].by_name);
        ckpt_map_release(&p->ptr[i].sums);
    }
    ckpt_vec_release(p);
}

static int find_payload(struct load *l, struct level *v, payloads *all, const char *name,
                        struct payload **ret, struct ckpt_err *err)
{
    struct payload *p;

    for (size_t i = all->len; i-- > 0;)
        if (strcmp(all->ptr[i].name, name) == 0)
            return *ret = &all->ptr[i], 0;
    if (ckpt_vec_add(all, &p) < 0)
        return ckpt_nomem(err);
    p->name = name;
    if (ckpt_source_file_new(v->dir, name, l->opt->pool, &p->source, err) < 0)
        return -1;
    const uint32_t kept = ckpt_catalog_add_source(l->cat, p->source, err);
    ckpt_source_unref(p->source);
    if (kept == UINT32_MAX || ckpt_st_read(p->source, &p->st, err) < 0)
        return -1;
    for (size_t i = 0; i < p->st.ntensor; i++)
        if (ckpt_map_add(&p->by_name, p->st.tensor[i].name, (uint32_t)i) == CKPT_NONE)
            return ckpt_nomem(err);
    for (size_t i = 0; i < p->st.nmetadata; i++)
        if (ckpt_map_add(&p->sums, p->st.metadata[i].key, (uint32_t)i) == CKPT_NONE)
            return ckpt_nomem(err);
    *ret = p;
    return 0;
}

static bool is_open(const payloads *files, const char *name)
{
    for (size_t i = 0; i < files->len; i++)
        if (strcmp(files->ptr[i].name, name) == 0)
            return true;
    return false;
}

/* Do the index or the manifest tell of all tensors of the files? Files that they do not name are
 * left out with a warning. */
static int check_count(struct load *l, const struct level *v, const char *list,
                       const payloads *files, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_entries_release) struct ckpt_entries entries = {0};
    struct ckpt_entry e;
    size_t n = 0;

    for (size_t i = 0; i < files->len; i++)
        n += files->ptr[i].st.ntensor;
    if (v->blobs.len != n)
        return ckpt_fail(err, CKPT_CONFLICT,
                         "'%s': %s names %zu tensors, its files have %zu: it is damaged, or of "
                         "another version: write or copy the version again",
                         ckpt_dir_path(v->dir), list, v->blobs.len, n);
    if (ckpt_entries_read(v->dir, &entries, err) < 0)
        return -1;
    while (ckpt_entries_next(&entries, &e))
        if (e.kind == CKPT_ENTRY_FILE && e.name[0] != '.' &&
            ckpt_has_suffix(e.name, ".safetensors") && !is_open(files, e.name))
            ckpt_catalog_warn(l->cat, "'%s/%s' is left out: %s does not name it",
                              ckpt_dir_path(v->dir), e.name, list);
    return 0;
}

static int read_slime(struct load *l, struct level *v, struct ckpt_err *err)
{
    ckpt_cleanup(payloads_release) payloads files = {0};
    const json_t *meta, *file;
    const char *tensor;

    if (ckpt_config_read(v->dir, INDEX, MAX_INDEX, &v->index, err) < 0)
        return -1;
    meta = json_object_get(v->index, "metadata");
    const char *encoding = ckpt_json_str(meta, "delta_encoding");
    const char *packing = ckpt_json_str(meta, "compression_format");
    const char *digest = ckpt_json_str(meta, "checksum_format");
    const json_t *map = json_object_get(v->index, "weight_map");
    if (read_numbers(v, INDEX, meta, err) < 0)
        return -1;
    if (!encoding || (strcmp(encoding, "xor") != 0 && strcmp(encoding, "overwrite") != 0) ||
        !packing || strcmp(packing, "zstd") != 0 || !json_is_object(map))
        return ckpt_fail(err, CKPT_UNSUPPORTED,
                         "'%s/" INDEX "': delta_encoding is %s and compression_format %s, expected "
                         "xor or overwrite, zstd, and a weight_map",
                         ckpt_dir_path(v->dir), encoding ? encoding : "not there",
                         packing ? packing : "not there");
    json_object_foreach((json_t *)map, tensor, file) {
        const char *name = json_string_value(file);
        struct payload *p = NULL;
        if (!name)
            return ckpt_fail(err, CKPT_FORMAT, "'%s/" INDEX "': weight_map has no file of '%s'",
                             ckpt_dir_path(v->dir), tensor);
        if (find_payload(l, v, &files, name, &p, err) < 0)
            return -1;
        struct blob b = {.delta = {.overwrite = *encoding == 'o',
                                   .sum = ckpt_delta_sum_find(digest),
                                   .tensor = keep(l, tensor),
                                   .version = v->name},
                         .rank = CKPT_NONE};
        if (!b.delta.tensor)
            return ckpt_nomem(err);
        const uint32_t k = ckpt_map_find(&p->by_name, tensor),
                       sum = ckpt_map_find(&p->sums, tensor);
        if (k == CKPT_NONE)
            return ckpt_fail(err, CKPT_MISSING, "'%s/%s' has no '%s'", ckpt_dir_path(v->dir), name,
                             tensor);
        if (sum != CKPT_NONE)
            b.delta.digits = keep(l, p->st.metadata[sum].value);
        if (b.delta.sum != CKPT_DELTA_UNCHECKED && !b.delta.digits)
            return ckpt_fail(err, CKPT_FORMAT, "'%s/%s' has no checksum of '%s'",
                             ckpt_dir_path(v->dir), name, tensor);
        if (place(&b, &p->st.tensor[k], p->source, v, err) < 0 || add_blob(l, v, &b, err) < 0)
            return -1;
    }
    return check_count(l, v, INDEX, &files, err);
}

/* Open the files that the manifest lists, also those of which no record tells. */
static int open_listed(struct load *l, struct level *v, payloads *files, struct ckpt_err *err)
{
    const json_t *list = json_object_get(v->index, "payload_files"), *name;
    struct payload *p;
    size_t i;

    if (list && !json_is_array(list))
        return ckpt_fail(err, CKPT_FORMAT,
                         "'%s/" MANIFEST "': payload_files is not a list of files",
                         ckpt_dir_path(v->dir));
    json_array_foreach(list, i, name) {
        if (!json_is_string(name))
            return ckpt_fail(err, CKPT_FORMAT,
                             "'%s/" MANIFEST "': payload_files[%zu] is not the name of a file",
                             ckpt_dir_path(v->dir), i);
        if (find_payload(l, v, files, json_string_value(name), &p, err) < 0)
            return -1;
    }
    return 0;
}

static int read_skyrl(struct load *l, struct level *v, struct ckpt_err *err)
{
    ckpt_cleanup(payloads_release) payloads files = {0};
    const json_t *record, *records;
    size_t i;

    if (ckpt_config_read(v->dir, MANIFEST, MAX_INDEX, &v->index, err) < 0 ||
        read_numbers(v, MANIFEST, v->index, err) < 0)
        return -1;
    if (!json_is_array(records = json_object_get(v->index, "tensors")))
        return ckpt_fail(err, CKPT_FORMAT,
                         "'%s/" MANIFEST "': tensors is %s, expected a list of records",
                         ckpt_dir_path(v->dir), records ? "not a list" : "not there");
    json_array_foreach(records, i, record) {
        const char *file = ckpt_json_str(record, "payload_file");
        const char *key = ckpt_json_str(record, "payload_key");
        struct blob b = {
            .delta = {.sum = ckpt_delta_sum_find(ckpt_json_str(record, "checksum_algorithm")),
                      .digits = keep(l, ckpt_json_str(record, "checksum")),
                      .tensor = keep(l, ckpt_json_str(record, "name")),
                      .version = v->name},
            .shape = json_object_get(record, "shape"),
            .dtype = ckpt_json_str(record, "dtype")};
        struct payload *p = NULL;
        if (!file || !key || !b.delta.tensor || !b.dtype || !json_is_array(b.shape) ||
            (b.delta.sum != CKPT_DELTA_UNCHECKED && !b.delta.digits))
            return ckpt_fail(err, CKPT_FORMAT,
                             "'%s/" MANIFEST "': record %zu lacks name, dtype, shape, checksum, "
                             "payload_file or payload_key",
                             ckpt_dir_path(v->dir), i);
        b.rank = (uint32_t)json_array_size(b.shape);
        if (find_payload(l, v, &files, file, &p, err) < 0)
            return -1;
        const uint32_t k = ckpt_map_find(&p->by_name, key);
        if (k == CKPT_NONE)
            return ckpt_fail(err, CKPT_MISSING, "'%s/%s' has no '%s'", ckpt_dir_path(v->dir), file,
                             key);
        if (place(&b, &p->st.tensor[k], p->source, v, err) < 0 || add_blob(l, v, &b, err) < 0)
            return -1;
    }
    return open_listed(l, v, &files, err) < 0 ? -1 : check_count(l, v, MANIFEST, &files, err);
}

/* Read the version in `dir` and those before it. */
static int read_levels(struct load *l, struct ckpt_dir *dir, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *next = ckpt_dir_ref(dir);
    const char *path = l->opt->name ? l->opt->name : ckpt_dir_path(dir);
    enum kind kind = kind_of(dir);

    while (next) {
        const char *slash = strrchr(path, '/');
        struct level *v;
        if (l->levels.len == MOST_LEVELS)
            return ckpt_fail(err, CKPT_LIMIT,
                             "there are more than %d versions since the last whole one; '%s' is "
                             "one of them: keep a whole version every so many, or export one",
                             MOST_LEVELS, ckpt_dir_path(next));
        if (ckpt_vec_add(&l->levels, &v) < 0)
            return ckpt_nomem(err);
        v->dir = ckpt_steal(&next);
        v->kind = kind;
        if (kind == SLIME && says(v->dir, MANIFEST, says_skyrl))
            return ckpt_fail(err, CKPT_CONFLICT,
                             "'%s' has slime's " INDEX " and SkyRL's " MANIFEST
                             ": it holds two versions, and only one of them can be meant",
                             ckpt_dir_path(v->dir));
        if (!(v->name = keep(l, slash ? slash + 1 : path)))
            return ckpt_nomem(err);
        if ((kind == SLIME ? read_slime(l, v, err) : read_skyrl(l, v, err)) < 0 ||
            go_back(l, v, &next, &kind, err) < 0)
            return -1;
        path = next ? ckpt_dir_path(next) : NULL;
    }
    return 0;
}

/* ---- the tensors ---- */

/* Does a record fit the tensor? */
static int check_record(const struct blob *b, const struct ckpt_tensor *t, struct ckpt_err *err)
{
    enum ckpt_dtype dtype;
    bool same = b->rank == CKPT_NONE || b->rank == t->rank;

    for (uint32_t d = 0; same && b->rank != CKPT_NONE && d < t->rank; d++)
        same = (uint64_t)json_integer_value(json_array_get(b->shape, d)) == t->dim[d];
    if (same && b->dtype &&
        (!ckpt_dtype_parse(b->dtype, strlen(b->dtype), &dtype) ||
         dtype != (enum ckpt_dtype)t->dtype))
        same = false;
    return same ? 0
                : ckpt_fail(err, CKPT_CONFLICT,
                            "version '%s' changes '%s', which is %s %s in the whole model, to "
                            "another shape or dtype",
                            b->delta.version, t->name, ckpt_dtype_name(t->dtype),
                            ckpt_shape_text(t->dim, t->rank).text);
}

/* Add a tensor with its changes. */
static int add_changed(struct load *l, const struct ckpt_tensor *t, const struct ckpt_delta *delta,
                       size_t n, struct ckpt_err *err)
{
    const uint64_t size = ckpt_tensor_nbytes(t);
    ckpt_cleanup(ckpt_source_unrefp) struct ckpt_source *s = NULL;
    uint64_t off;
    uint32_t source;

    if (t->value || t->npiece != 1 || !ckpt_tensor_place(t, 0, &source, &off))
        return ckpt_fail(err, CKPT_UNSUPPORTED,
                         "'%s' of the whole model is not stored in one piece", t->name);
    if (ckpt_source_delta_new(l->store, t->cat->sources.ptr[source], off, size, delta, n, &s, err) <
        0)
        return -1;
    const uint32_t at = ckpt_catalog_add_source(l->cat, s, err);
    if (at == UINT32_MAX)
        return -1;
    if (l->last[source])
        ckpt_source_delta_next(l->last[source], s);
    l->last[source] = s;
    return ckpt_catalog_add_whole(l->cat, t->name, t->dtype, t->dim, t->rank, at, 0, err);
}

static int add_tensor(struct load *l, const struct ckpt_tensor *t, uint32_t first,
                      size_t *ret_changes, struct ckpt_err *err)
{
    struct ckpt_delta delta[MOST_LEVELS];
    size_t n = 0;

    for (size_t i = l->levels.len; i-- > 0;) {
        const struct level *v = &l->levels.ptr[i];
        const uint32_t k = ckpt_map_find(&v->by_name, t->name);
        if (k == CKPT_NONE)
            continue;
        if (check_record(&v->blobs.ptr[k], t, err) < 0)
            return -1;
        delta[n++] = v->blobs.ptr[k].delta;
    }
    *ret_changes += n;
    return n && t->numel ? add_changed(l, t, delta, n, err)
                         : ckpt_catalog_copy(l->cat, t, first, err);
}

static int fail_unknown(const struct load *l, struct ckpt_err *err)
{
    for (size_t i = 0; i < l->levels.len; i++)
        for (size_t k = 0; k < l->levels.ptr[i].blobs.len; k++) {
            const struct ckpt_delta *d = &l->levels.ptr[i].blobs.ptr[k].delta;
            if (!ckpt_catalog_find(l->whole, d->tensor))
                return ckpt_fail(err, CKPT_MISSING,
                                 "version '%s' changes '%s', which the whole model does not have",
                                 d->version, d->tensor);
        }
    return 0;
}

static void describe(struct load *l)
{
    json_t **about = &l->cat->about, *versions = json_array();
    const struct level *newest = l->levels.ptr;

    for (size_t i = l->levels.len; i-- > 0;)
        ckpt_json_append(&versions, json_string(l->levels.ptr[i].name));
    ckpt_json_set(about, "format",
                  json_string(newest->kind == SLIME ? "slime delta" : "SkyRL delta"));
    ckpt_json_set(about, "step", json_integer((json_int_t)newest->version));
    ckpt_json_set(about, "changes", versions);
    if (l->unchecked)
        ckpt_catalog_warn(l->cat,
                          "%zu changes have checksums of another kind than xxh3-128 and adler32: "
                          "they are not compared",
                          l->unchecked);
    l->facts->names = CKPT_NAMES_HUB;
}

static int delta_load(struct ckpt_dir *dir, const struct ckpt_reader_options *opt,
                      struct ckpt_facts *facts, struct ckpt_catalog *cat, struct ckpt_err *err)
{
    ckpt_cleanup(load_release) struct load l = {.opt = opt, .facts = facts, .cat = cat};
    size_t changes = 0, blobs = 0;

    if (ckpt_delta_store_new(&l.store, err) < 0 || read_levels(&l, dir, err) < 0)
        return -1;
    const uint32_t first = (uint32_t)cat->sources.len;
    if (ckpt_catalog_add_sources(cat, l.whole, err) < 0)
        return -1;
    if (!(l.last = calloc(l.whole->sources.len + 1, sizeof(struct ckpt_source *))))
        return ckpt_nomem(err);
    for (size_t i = 0; i < l.whole->tensors.len; i++)
        if (add_tensor(&l, &l.whole->tensors.ptr[i], first, &changes, err) < 0)
            return -1;
    for (size_t i = 0; i < l.levels.len; i++)
        blobs += l.levels.ptr[i].blobs.len;
    if (changes < blobs && fail_unknown(&l, err) < 0)
        return -1;
    describe(&l);
    return 0;
}

static const char *const markers[] = {INDEX, MANIFEST, NULL};
static const char *const rewrites[] = {INDEX, MANIFEST, NULL};

const struct ckpt_reader ckpt_reader_delta = {
    .name = "delta",
    .markers = markers,
    .rewrites = rewrites,
    .index_key = "delta_encoding",
    .index_why = "its metadata has delta_encoding: the files hold what has changed since another "
                 "version, not a model's tensors: give the folder of all versions and step=, or a "
                 "whole model",
    .is_published = true,
    .probe = delta_probe,
    .load = delta_load,
};
