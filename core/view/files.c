/* SPDX-License-Identifier: Apache-2.0 */
/* Listing the files of a view. */
#include "view/files.h"

#include <limits.h>
#include <string.h>

#include "base/ckd.h"
#include "base/map.h"
#include "base/sort.h"
#include "tensor/value.h"

/* ---- directories: sort the paths, then give every run with one first component its node ---- */

enum { MAX_DEPTH = 64 };

static bool component_ok(const char *s, size_t len)
{
    return len > 0 && len <= NAME_MAX && !(len == 1 && s[0] == '.') &&
           !(len == 2 && s[0] == '.' && s[1] == '.');
}

bool ckpt_vfiles_path_ok(const char *path)
{
    const char *s = path;
    size_t depth = 0;

    if (strlen(path) >= PATH_MAX)
        return false;
    for (;;) {
        size_t len = strcspn(s, "/");
        if (!component_ok(s, len) || ++depth > MAX_DEPTH)
            return false;
        if (!s[len])
            return true;
        s += len + 1;
    }
}

/* By components: '/' sorts before every other byte. */
static int path_cmp(const void *a, const void *b)
{
    const unsigned char *x = (const void *)((const struct ckpt_vdir_file *)a)->path;
    const unsigned char *y = (const void *)((const struct ckpt_vdir_file *)b)->path;

    while (*x && *x == *y) {
        x++;
        y++;
    }
    int cx = *x == '/' ? 1 : *x ? *x + 1 : 0, cy = *y == '/' ? 1 : *y ? *y + 1 : 0;
    return cx - cy;
}

struct build {
    struct ckpt_arena *arena;
    int64_t mtime_ns;
    struct ckpt_err *err;
};

/* The end of the run, from lo on, whose paths have the same component at byte `at`. */
static size_t run_end(const struct ckpt_vdir_file *f, size_t lo, size_t hi, size_t at)
{
    size_t len = strcspn(f[lo].path + at, "/"), i = lo + 1;

    while (i < hi && strncmp(f[i].path + at, f[lo].path + at, len) == 0 &&
           (f[i].path[at + len] == '/' || f[i].path[at + len] == '\0'))
        i++;
    return i;
}

static struct ckpt_vnode *dir_of(struct build *b, struct ckpt_vdir_file *f, size_t lo, size_t hi,
                                 size_t at);

static struct ckpt_vnode *child_of(struct build *b, struct ckpt_vdir_file *f, size_t lo, size_t hi,
                                   size_t at)
{
    size_t len = strcspn(f[lo].path + at, "/");
    struct ckpt_vnode *node = f[lo].node;

    if (f[lo].path[at + len] == '/') {
        if (!(node = dir_of(b, f, lo, hi, at + len + 1)))
            return NULL;
    } else if (hi - lo > 1) {
        (void)ckpt_fail(b->err, CKPT_CONFLICT, "'%s' and '%s' cannot both be in the view",
                        f[lo].path, f[lo + 1].path);
        return NULL;
    }
    if (!(node->name = ckpt_arena_strndup(b->arena, f[lo].path + at, len)))
        (void)ckpt_nomem(b->err);
    return node->name ? node : NULL;
}

/* The directory of the files [lo, hi), whose paths are alike before byte `at`. Depth is bounded by
 * ckpt_vfiles_path_ok. */
static struct ckpt_vnode *dir_of(struct build *b, struct ckpt_vdir_file *f, size_t lo, size_t hi,
                                 size_t at)
{
    struct ckpt_vnode *dir = ckpt_arena_alloc(b->arena, sizeof *dir);
    struct ckpt_vnode **child = ckpt_arena_alloc(b->arena, (hi - lo) * sizeof *child);
    size_t n = 0;

    if (!dir || !child) {
        (void)ckpt_nomem(b->err);
        return NULL;
    }
    for (size_t i = lo, end; i < hi; i = end) {
        end = run_end(f, i, hi, at);
        if (!(child[n++] = child_of(b, f, i, end, at)))
            return NULL;
    }
    *dir = (struct ckpt_vnode){
        .kind = CKPT_NODE_DIR, .mtime_ns = b->mtime_ns, .child = child, .nchild = n};
    return dir;
}

static bool has_tensors(const struct ckpt_vnode *file)
{
    size_t i = 0;

    while (i < file->nsegment && file->segment[i].kind != CKPT_SEGMENT_TENSOR)
        i++;
    return i < file->nsegment;
}

/* Let the files lie one after the other, in the order in which directories list them. Those without
 * tensors are apart: who reads one may not read the next. */
static void line_up(struct ckpt_vdir_file *file, size_t n)
{
    enum { APART = 1 << 30 };
    struct ckpt_vnode *last = NULL;
    uint64_t at = 0;

    for (size_t i = 0; i < n; i++) {
        struct ckpt_vnode *f = file[i].node;
        if (!has_tensors(f))
            continue;
        f->at = at;
        at += f->size;
        if (last)
            last->next = f;
        last = f;
    }
    for (size_t i = 0; i < n; i++)
        if (!has_tensors(file[i].node)) {
            file[i].node->at = at + APART;
            at = file[i].node->at + file[i].node->size;
        }
}

int ckpt_vdir_build(struct ckpt_vdir_file *file, size_t n, int64_t mtime_ns,
                    struct ckpt_arena *arena, struct ckpt_vnode **ret_root, struct ckpt_err *err)
{
    struct build b = {arena, mtime_ns, err};

    ckpt_sort(file, n, path_cmp);
    line_up(file, n);
    struct ckpt_vnode *root = dir_of(&b, file, 0, n, 0);
    if (!root)
        return -1;
    root->name = "";
    *ret_root = root;
    return 0;
}

/* ---- the list of files ---- */

void ckpt_vfiles_release(struct ckpt_vfiles *f)
{
    for (size_t i = 0; i < f->sources.len; i++)
        ckpt_source_unref(f->sources.ptr[i]);
    ckpt_vec_release(&f->sources);
    ckpt_vec_release(&f->list);
    ckpt_arena_release(&f->arena);
}

int ckpt_vfiles_add(struct ckpt_vfiles *f, const char *path, struct ckpt_vnode *node,
                    struct ckpt_err *err)
{
    struct ckpt_vdir_file file = {.path = path, .node = node};

    return ckpt_vec_push(&f->list, file) < 0 ? ckpt_nomem(err) : 0;
}

int ckpt_vfiles_add_segments(struct ckpt_vfiles *f, const char *path, struct ckpt_segment *segment,
                             size_t n, int64_t mtime_ns, struct ckpt_err *err)
{
    struct ckpt_vnode *node = ckpt_arena_alloc(&f->arena, sizeof *node);
    char *own = ckpt_arena_strdup(&f->arena, path);
    uint64_t size = 0;

    if (!node || !own)
        return ckpt_nomem(err);
    for (size_t i = 0; i < n; i++) {
        segment[i].off = size;
        if (ckd_add(&size, size, segment[i].len) || size > INT64_MAX)
            return ckpt_fail(err, CKPT_LIMIT, "%s: the file would have 2^63 bytes or more", path);
    }
    *node = (struct ckpt_vnode){.kind = CKPT_NODE_FILE,
                                .size = size,
                                .mtime_ns = mtime_ns,
                                .segment = segment,
                                .nsegment = n};
    return ckpt_vfiles_add(f, own, node, err);
}

int ckpt_vfiles_add_segment(struct ckpt_vfiles *f, const char *path, struct ckpt_segment segment,
                            int64_t mtime_ns, struct ckpt_err *err)
{
    struct ckpt_segment *own = ckpt_arena_alloc(&f->arena, sizeof *own);

    if (!own)
        return ckpt_nomem(err);
    *own = segment;
    return ckpt_vfiles_add_segments(f, path, own, 1, mtime_ns, err);
}

int ckpt_vfiles_add_text(struct ckpt_vfiles *f, const char *path, const char *text, size_t len,
                         int64_t mtime_ns, struct ckpt_err *err)
{
    char *own = ckpt_arena_strndup(&f->arena, text, len);

    if (!own)
        return ckpt_nomem(err);
    return ckpt_vfiles_add_segment(f, path, ckpt_segment_mem(own, len), mtime_ns, err);
}

/* Add a file as Python's json.dumps writes it, with a newline at the end; NULL adds none. */
static int add_json(struct ckpt_vfiles *f, const char *path, const json_t *j, int64_t mtime_ns,
                    struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *text = NULL;
    size_t len;

    if (!j)
        return 0;
    if (ckpt_json_dump(j, CKPT_JSON_PYTHON, true, &text, &len, err) < 0)
        return ckpt_err_in(err, "%s", path);
    return ckpt_vfiles_add_text(f, path, text, len, mtime_ns, err);
}

/* Add a file that passes through; its time is the source's, or mtime_ns if the source is not a
 * file. */
static int add_side(struct ckpt_vfiles *f, const struct ckpt_side_file *side, int64_t mtime_ns,
                    struct ckpt_err *err)
{
    struct ckpt_file_id id = {.mtime_ns = mtime_ns};

    if (ckpt_vec_push(&f->sources, side->source) < 0)
        return ckpt_nomem(err);
    (void)ckpt_source_file_id(side->source, &id);
    (void)ckpt_source_ref(side->source);
    return ckpt_vfiles_add_segment(f, side->path,
                                   (struct ckpt_segment){.len = side->source->size,
                                                         .kind = CKPT_SEGMENT_SOURCE,
                                                         .source = side->source},
                                   id.mtime_ns, err);
}

static int64_t newest(int64_t a, int64_t b) { return a > b ? a : b; }

int64_t ckpt_vfiles_mtime(const struct ckpt_tensor *t, int64_t mtime)
{
    for (size_t i = 0; i < t->npiece; i++) {
        struct ckpt_file_id id;
        if (ckpt_source_file_id(t->cat->sources.ptr[t->piece[i].source], &id))
            mtime = newest(mtime, id.mtime_ns);
    }
    for (uint32_t i = 0; t->value && i < t->value->narg; i++)
        mtime = ckpt_vfiles_mtime(t->value->arg[i], mtime);
    return mtime;
}

/* ---- the files of a model beside its weights ---- */

/* Add the files of opt->side, except one with the same name as a generated file, and, beside
 * weights, an index that is not generated, which would speak of files that are not here. */
static int add_sides(struct ckpt_vfiles *f, const struct ckpt_vtree_options *opt, bool weights,
                     struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_map_release) struct ckpt_map generated = {0};
    size_t ngenerated = f->list.len;

    for (size_t i = 0; i < ngenerated; i++)
        if (ckpt_map_add(&generated, f->list.ptr[i].path, 0) == CKPT_NONE)
            return ckpt_nomem(err);
    for (size_t i = 0; i < opt->nside; i++) {
        const char *path = opt->side[i].path;
        if (!ckpt_vfiles_path_ok(path))
            return ckpt_fail(err, CKPT_FORMAT, "'%s' cannot be the path of a file in a view", path);
        if (ckpt_map_find(&generated, path) == CKPT_NONE &&
            !(weights && strcmp(path, CKPT_VFILES_INDEX) == 0) &&
            add_side(f, &opt->side[i], opt->mtime_ns, err) < 0)
            return -1;
    }
    return 0;
}

int ckpt_vfiles_add_model(struct ckpt_vfiles *f, const struct ckpt_vtree_options *opt,
                          struct ckpt_err *err)
{
    const bool weights = f->list.len > 0;

    return add_json(f, "config.json", opt->config, opt->mtime_ns, err) < 0 ||
                   add_json(f, "generation_config.json", opt->generation, opt->mtime_ns, err) < 0 ||
                   add_json(f, "adapter_config.json", opt->adapter, opt->mtime_ns, err) < 0 ||
                   add_sides(f, opt, weights, err) < 0
               ? -1
               : 0;
}
