/* SPDX-License-Identifier: Apache-2.0 */
/* Listing the files of a view. */
#include "view/files.h"

#include <string.h>

#include "base/map.h"
#include "tensor/value.h"

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

int ckpt_vfiles_add_segments(struct ckpt_vfiles *f, const char *path,
                             const struct ckpt_segment *segment, size_t n, int64_t mtime_ns,
                             struct ckpt_err *err)
{
    struct ckpt_vnode *node = ckpt_arena_alloc(&f->arena, sizeof *node);
    char *own = ckpt_arena_strdup(&f->arena, path);
    const uint64_t size = n ? segment[n - 1].off + segment[n - 1].len : 0;

    if (!node || !own)
        return ckpt_nomem(err);
    if (size > INT64_MAX)
        return ckpt_fail(err, CKPT_LIMIT, "%s: the file would have 2^63 bytes or more", path);
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
    return ckpt_vfiles_add_segment(
        f, path, (struct ckpt_segment){.len = len, .kind = CKPT_SEGMENT_MEM, .mem = own}, mtime_ns,
        err);
}

int ckpt_vfiles_add_json(struct ckpt_vfiles *f, const char *path, const json_t *j, int64_t mtime_ns,
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

int ckpt_vfiles_add_side(struct ckpt_vfiles *f, const struct ckpt_side_file *side, int64_t mtime_ns,
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

/* What is generated goes before a file of the checkpoint's own with the same name, and an index
 * that is not generated would speak of files that are not here. */
static bool is_ours(const struct ckpt_map *generated, bool weights, const char *path)
{
    uint32_t at;

    return ckpt_map_get(generated, path, strlen(path), &at) ||
           (weights && strcmp(path, CKPT_VFILES_INDEX) == 0);
}

static int add_sides(struct ckpt_vfiles *f, const struct ckpt_vtree_options *opt, bool weights,
                     struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_map_release) struct ckpt_map generated = {0};
    size_t ngenerated = f->list.len;
    uint32_t at;
    bool is_new;

    for (size_t i = 0; i < ngenerated; i++) {
        const char *path = f->list.ptr[i].path;
        if (ckpt_map_put(&generated, path, strlen(path), 0, &at, &is_new) < 0)
            return ckpt_nomem(err);
    }
    for (size_t i = 0; i < opt->nside; i++) {
        if (ckpt_vdir_check_path(opt->side[i].path, err) < 0)
            return -1;
        if (!is_ours(&generated, weights, opt->side[i].path) &&
            ckpt_vfiles_add_side(f, &opt->side[i], opt->mtime_ns, err) < 0)
            return -1;
    }
    return 0;
}

int ckpt_vfiles_add_model(struct ckpt_vfiles *f, const struct ckpt_vtree_options *opt,
                          struct ckpt_err *err)
{
    const bool weights = f->list.len > 0;

    return ckpt_vfiles_add_json(f, "config.json", opt->config, opt->mtime_ns, err) < 0 ||
                   ckpt_vfiles_add_json(f, "generation_config.json", opt->generation, opt->mtime_ns,
                                        err) < 0 ||
                   ckpt_vfiles_add_json(f, "adapter_config.json", opt->adapter, opt->mtime_ns,
                                        err) < 0 ||
                   add_sides(f, opt, weights, err) < 0
               ? -1
               : 0;
}
