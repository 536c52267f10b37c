/* SPDX-License-Identifier: Apache-2.0 */
/* Laying out a catalogue as files. */
#include <assert.h>
#include <string.h>

#include "base/ckd.h"
#include "base/sort.h"
#include "base/str.h"
#include "container/safetensors.h"
#include "view/ahead.h"
#include "view/files.h"
#include "view/shards.h"
#include "view/text.h"
#include "view/view.h"

/* A safetensors file: length, header, spaces, tensors. */
struct weights {
    struct ckpt_vnode node;
    struct ckpt_st_head head;
    uint64_t data_off; /* of the first tensor */
    size_t ntensor;
    const char *begin; /* the header's text before the tensors: __metadata__, unless it is bare */
    size_t begin_len;
    bool bare;                    /* no __metadata__ */
    struct ckpt_segment *segment; /* node.segment; the tensors are the last ntensor */
};

struct ckpt_vtree {
    struct ckpt_vfiles files;
    const struct ckpt_catalog *cat;
    const struct ckpt_vplace *place; /* of each tensor, in a layout of somebody else; or NULL */
    struct ckpt_shards shards;
    struct weights *weights; /* shards.nfile of them */
    uint32_t *segment;       /* of each tensor, in its file */
    uint32_t *by_name;       /* tensors by name; kept for the index only */
    struct ckpt_index index;
    struct ckpt_text index_text;
    bool joins; /* a file has the joined entries of __metadata__ */
    struct ckpt_vnode *root;
};

void ckpt_vtree_free(struct ckpt_vtree *t)
{
    if (!t)
        return;
    ckpt_vfiles_release(&t->files);
    ckpt_shards_release(&t->shards);
    free(t->by_name);
    free(t);
}

/* ---- files of weights ---- */

static int name_cmp(const void *a, const void *b, void *arg)
{
    const struct ckpt_tensor *t = arg;
    return strcmp(t[*(const uint32_t *)a].name, t[*(const uint32_t *)b].name);
}

static int sort_names(struct ckpt_vtree *t, struct ckpt_err *err)
{
    size_t n = t->cat->tensors.len;

    if (!(t->by_name = malloc((n + 1) * sizeof *t->by_name)))
        return ckpt_nomem(err);
    for (size_t i = 0; i < n; i++) {
        t->by_name[i] = (uint32_t)i;
        if (ckpt_st_check_name(t->cat->tensors.ptr[i].name, err) < 0)
            return -1;
    }
    qsort_r(t->by_name, n, sizeof *t->by_name, name_cmp, t->cat->tensors.ptr);
    return 0;
}

enum { LEADING = CKPT_ST_LEADING };

static int new_weights(struct ckpt_vtree *t, struct ckpt_err *err)
{
    size_t n = t->shards.nfile;

    if (!(t->weights = ckpt_arena_alloc(&t->files.arena, n * sizeof *t->weights)) ||
        !(t->segment = ckpt_arena_alloc(&t->files.arena, t->cat->tensors.len * sizeof *t->segment)))
        return ckpt_nomem(err);
    memset(t->weights, 0, n * sizeof *t->weights);
    for (size_t i = 0; i < t->cat->tensors.len; i++)
        t->weights[t->shards.file[i]].ntensor++;
    for (size_t i = 0; i < n; i++) {
        struct weights *w = &t->weights[i];
        if (!(w->segment =
                  ckpt_arena_alloc(&t->files.arena, (w->ntensor + LEADING) * sizeof *w->segment)))
            return ckpt_nomem(err);
        w->ntensor = 0;
    }
    return 0;
}

/* Put a tensor behind those of its file. Offsets are still relative to data_off. */
static void deal(struct ckpt_vtree *t, uint32_t at)
{
    const struct ckpt_tensor *tensor = &t->cat->tensors.ptr[at];
    struct weights *w = &t->weights[t->shards.file[at]];
    const size_t s = LEADING + w->ntensor++;

    w->segment[s] = ckpt_segment_tensor(tensor, 0, ckpt_tensor_nbytes(tensor));
    w->segment[s].off = w->node.size;
    w->node.size += w->segment[s].len;
    t->segment[at] = (uint32_t)s;
}

/* Assign the tensors to their files, largest dtype first and then by name, which is their order in
 * each file. */
static void deal_tensors(struct ckpt_vtree *t)
{
    size_t count[CKPT_NDTYPE] = {0};

    for (size_t i = 0; i < t->cat->tensors.len; i++)
        count[t->cat->tensors.ptr[i].dtype]++;
    for (int dtype = CKPT_NDTYPE - 1; dtype >= 0; dtype--) {
        for (size_t i = 0; count[dtype]; i++) {
            if (t->cat->tensors.ptr[t->by_name[i]].dtype != dtype)
                continue;
            deal(t, t->by_name[i]);
            count[dtype]--;
        }
    }
}

/* An entry of a header's text has so many bytes of __metadata__: a read writes 64 entries or more
 * (view/text.c), of which it uses what it was asked for. */
enum { BEGIN_STEP = 1024 };

/* Counts the entries that have parts of __metadata__. */
static size_t count_begin(const struct weights *w)
{
    return (w->begin_len + BEGIN_STEP - 1) / BEGIN_STEP;
}

/* Entries of a header: the metadata in equal parts, then a tensor each; the last one closes it. */
static void put_header(const void *ctx, size_t i, struct ckpt_str *out)
{
    const struct weights *w = ctx;
    const size_t before = count_begin(w), off = i * BEGIN_STEP;

    if (i < before) {
        ckpt_str_append(out, w->begin + off, ckpt_min_u64(BEGIN_STEP, w->begin_len - off));
    } else {
        const struct ckpt_segment *s = &w->segment[LEADING + i - before];
        ckpt_st_header_tensor(out, s->tensor, s->off - w->data_off, w->bare && i == before);
    }
    if (i + 1 == before + w->ntensor)
        ckpt_st_header_end(out);
}

/* Writes the text before the tensors, with `entries` unless the header is bare. */
static int begin_header(struct ckpt_vtree *t, struct weights *w, const json_t *entries,
                        struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_str_release) struct ckpt_str text = {0};

    if (w->bare)
        ckpt_st_header_begin(&text, true);
    else
        ckpt_st_header_begin_with(&text, entries);
    char *begin = text.failed ? NULL : ckpt_arena_alloc(&t->files.arena, text.len);
    if (!begin)
        return ckpt_nomem(err);
    memcpy(begin, text.ptr, text.len);
    w->begin = begin;
    w->begin_len = text.len;
    return 0;
}

/* Writes these texts of all files, of which those with the joined entries share one. */
static int begin_headers(struct ckpt_vtree *t, const struct ckpt_vtree_options *opt,
                         struct ckpt_err *err)
{
    const struct weights *joined = NULL;

    for (size_t i = 0; i < t->shards.nfile; i++) {
        struct weights *w = &t->weights[i];
        const json_t *own =
            t->shards.mapped ? json_object_get(opt->metadata, t->shards.name[i]) : NULL;
        w->bare = opt->bare;
        if (!own && joined) {
            w->begin = joined->begin;
            w->begin_len = joined->begin_len;
            continue;
        }
        if (begin_header(t, w, own ? own : opt->joined, err) < 0)
            return -1;
        if (!own)
            joined = w;
    }
    t->joins = joined != NULL;
    return 0;
}

static int finish_weights(struct ckpt_vtree *t, struct weights *w, int64_t mtime_ns,
                          struct ckpt_err *err)
{
    struct ckpt_segment *s = w->segment;

    if (ckpt_text_init(&w->head.text, put_header, w, count_begin(w) + w->ntensor, CKPT_TEXT_SHORT,
                       &t->files.arena, err) < 0)
        return -1;
    ckpt_st_head_segments(&w->head, s, &w->data_off);
    w->node.mtime_ns = INT64_MIN;
    for (size_t i = 0; i < w->ntensor; i++) {
        s[LEADING + i].off += w->data_off;
        w->node.mtime_ns = ckpt_vfiles_mtime(s[LEADING + i].tensor, w->node.mtime_ns);
    }
    if (w->node.mtime_ns == INT64_MIN)
        w->node.mtime_ns = mtime_ns;
    if (ckd_add(&w->node.size, w->node.size, w->data_off) || w->node.size > INT64_MAX)
        return ckpt_fail(err, CKPT_LIMIT, "a file of weights would have 2^63 bytes or more");
    w->node.kind = CKPT_NODE_FILE;
    w->node.segment = s;
    w->node.nsegment = LEADING + w->ntensor;
    return 0;
}

/* ---- the list of files ---- */

static int list_weights(struct ckpt_vtree *t, const struct ckpt_vtree_options *opt,
                        struct ckpt_err *err)
{
    if (sort_names(t, err) < 0 || new_weights(t, err) < 0 || begin_headers(t, opt, err) < 0)
        return -1;
    for (size_t i = 0; opt->keep_order && i < t->cat->tensors.len; i++)
        deal(t, (uint32_t)i);
    if (!opt->keep_order)
        deal_tensors(t);
    for (size_t i = 0; i < t->shards.nfile; i++) {
        if (finish_weights(t, &t->weights[i], opt->mtime_ns, err) < 0)
            return ckpt_err_in(err, "%s", t->shards.name[i]);
        if (ckpt_vfiles_add(&t->files, t->shards.name[i], &t->weights[i].node, err) < 0)
            return -1;
    }
    return 0;
}

/* Names under which a library looks for all weights in one file. */
static bool needs_no_index(const char *file)
{
    static const char *const names[] = {
        "model.safetensors",
        "diffusion_pytorch_model.safetensors",
        "adapter_model.safetensors",
        NULL,
    };

    return ckpt_one_of(file, names);
}

static int list_index(struct ckpt_vtree *t, const char *name, int64_t mtime_ns,
                      struct ckpt_err *err)
{
    const char *only = t->shards.nfile == 1 ? t->shards.name[0] : NULL;
    bool one_file = t->shards.nfile == 0 || (only && needs_no_index(only));

    if (one_file) {
        free(ckpt_steal(&t->by_name));
        return 0;
    }
    t->index = (struct ckpt_index){t->cat, &t->shards, t->by_name};
    if (ckpt_index_text(&t->index, &t->files.arena, &t->index_text, err) < 0)
        return -1;
    return ckpt_vfiles_add_segment(
        &t->files, name, ckpt_segment_text(&t->index_text, 0, t->index_text.len), mtime_ns, err);
}

/* ---- all of it ---- */

/* Make directories of the list of files, which is not needed afterwards. */
static int build_dirs(struct ckpt_vtree *t, int64_t mtime_ns, struct ckpt_err *err)
{
    const int result = ckpt_vdir_build(t->files.list.ptr, t->files.list.len, mtime_ns,
                                       &t->files.arena, &t->root, err);

    ckpt_vec_release(&t->files.list);
    return result;
}

static int build(struct ckpt_vtree *t, const struct ckpt_vtree_options *opt, struct ckpt_err *err)
{
    static const char end[] = ".safetensors.index.json";
    const char *name = opt->index_name ? opt->index_name : CKPT_VFILES_INDEX;
    ckpt_cleanup(ckpt_freep) char *stem = strndup(name, strlen(name) - strlen(end));

    if (!stem)
        return ckpt_nomem(err);
    if (ckpt_shards_choose(t->cat, opt->weight_map, opt->max_shard_size, opt->sort, stem,
                           &t->shards, err) < 0)
        return -1;
    t->shards.total_numel -= ckpt_min_u64(opt->buffer_numel, t->shards.total_numel);
    return list_weights(t, opt, err) < 0 || list_index(t, name, opt->mtime_ns, err) < 0 ||
                   ckpt_vfiles_add_model(&t->files, opt, err) < 0
               ? -1
               : build_dirs(t, opt->mtime_ns, err);
}

int ckpt_vtree_new(const struct ckpt_catalog *cat, const struct ckpt_vtree_options *opt,
                   struct ckpt_vtree **ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_vtree_freep) struct ckpt_vtree *t = calloc(1, sizeof *t);

    if (!t)
        return ckpt_nomem(err);
    t->cat = cat;
    if (build(t, opt, err) < 0)
        return -1;
    *ret = ckpt_steal(&t);
    return 0;
}

int ckpt_vtree_of_files(const struct ckpt_catalog *cat, struct ckpt_vfiles *files,
                        const struct ckpt_vplace *place, int64_t mtime_ns, struct ckpt_vtree **ret,
                        struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_vtree_freep) struct ckpt_vtree *t = calloc(1, sizeof *t);

    if (!t)
        return ckpt_nomem(err);
    t->cat = cat;
    t->place = place;
    t->files = *files;
    *files = (struct ckpt_vfiles){0};
    if (build_dirs(t, mtime_ns, err) < 0)
        return -1;
    *ret = ckpt_steal(&t);
    return 0;
}

bool ckpt_vtree_joins(const struct ckpt_vtree *t) { return t->joins; }

const struct ckpt_vnode *ckpt_vtree_root(const struct ckpt_vtree *t) { return t->root; }

static const struct ckpt_vnode *find_child(const struct ckpt_vnode *dir, const char *name,
                                           size_t len)
{
    size_t lo = 0, hi = dir->nchild;

    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        const char *at = dir->child[mid]->name;
        int c = strncmp(at, name, len);
        if (c == 0 && at[len] == '\0')
            return dir->child[mid];
        if (c < 0)
            lo = mid + 1;
        else
            hi = mid;
    }
    return NULL;
}

const struct ckpt_vnode *ckpt_vtree_find(const struct ckpt_vtree *t, const char *path)
{
    const struct ckpt_vnode *node = t->root;

    while (node && *path) {
        size_t len = strcspn(path, "/");
        node = len && node->kind == CKPT_NODE_DIR ? find_child(node, path, len) : NULL;
        path += len;
        if (*path == '/' && *++path == '\0')
            return NULL; /* a path that ends with '/' does not exist */
    }
    return node;
}

void ckpt_vtree_place(const struct ckpt_vtree *t, size_t tensor, const struct ckpt_vnode **ret_file,
                      uint64_t *ret_off)
{
    assert(tensor < t->cat->tensors.len);
    if (t->place) {
        *ret_file = t->place[tensor].file;
        *ret_off = t->place[tensor].off;
        return;
    }
    const struct weights *w = &t->weights[t->shards.file[tensor]];

    *ret_file = &w->node;
    *ret_off = w->segment[t->segment[tensor]].off;
}

/* ---- reading a file: clamping the range to it, and reading its segments ---- */

size_t ckpt_segment_at(const struct ckpt_vnode *file, uint64_t off)
{
    return ckpt_last_at(&file->segment->off, sizeof *file->segment, file->nsegment, off);
}

static int read_source(struct ckpt_source *s, void *buf, size_t len, uint64_t off,
                       struct ckpt_err *err)
{
    if (ckpt_source_pread(s, buf, len, off, err) < 0)
        return -1;
    return ckpt_source_check(s, err);
}

static int read_segment(struct ckpt_reading *rd, const struct ckpt_segment *s, void *buf,
                        size_t len, uint64_t off, struct ckpt_err *err)
{
    assert(ckpt_range_ok(off, len, s->len));
    switch (s->kind) {
    case CKPT_SEGMENT_MEM:
        memcpy(buf, (const char *)s->mem + off, len);
        return 0;
    case CKPT_SEGMENT_TEXT:
        return ckpt_text_pread(s->text, buf, len, s->from + off, err);
    case CKPT_SEGMENT_TENSOR:
        return ckpt_tensor_pread(s->tensor, rd, buf, len, s->from + off, err);
    case CKPT_SEGMENT_SOURCE:
        return read_source(s->source, buf, len, off, err);
    }
    return 0;
}

int ckpt_vfile_pread(struct ckpt_reading *rd, const struct ckpt_vnode *file, void *buf, size_t len,
                     uint64_t off, size_t *ret_len, struct ckpt_err *err)
{
    unsigned char *out = buf;
    uint64_t left = off < file->size ? ckpt_min_u64(len, file->size - off) : 0;

    assert(file->kind == CKPT_NODE_FILE);
    len = (size_t)left;
    if (rd)
        ckpt_ahead_note(rd, file, off, off + left);
    for (size_t i = left ? ckpt_segment_at(file, off) : 0; left; i++) {
        const struct ckpt_segment *s = &file->segment[i];
        size_t n = (size_t)ckpt_min_u64(left, s->off + s->len - off);
        if (n && read_segment(rd, s, out, n, off - s->off, err) < 0)
            return ckpt_err_in(err, "%s", file->name);
        out += n;
        off += n;
        left -= n;
    }
    *ret_len = len;
    return 0;
}
