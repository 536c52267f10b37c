/* SPDX-License-Identifier: Apache-2.0 */
/* The list of writers, which options each has, and what several of them ask. */
#include "format/writer.h"

#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/str.h"

const struct ckpt_writer *const ckpt_writers[] = {
#define CKPT_WRITER(NAME, ...) &ckpt_writer_##NAME,
#include "format/writers.def"
#undef CKPT_WRITER
    NULL,
};

static int check_key(const struct ckpt_output *o, const char *view, const char *key, unsigned bit,
                     struct ckpt_err *err)
{
    char views[256] = ""; /* "view=nanotron, view=megatron": the views that have the option */
    size_t at = 0;

    if (o->writer && (o->writer->keys & bit))
        return 0;
    if (o->writer)
        return ckpt_fail(err, CKPT_USAGE, "option %s does not apply to view=%s: %s", key, view,
                         o->writer->layout);
    for (const struct ckpt_writer *const *w = ckpt_writers; *w; w++)
        if (((*w)->keys & bit) && at < sizeof views)
            at += (size_t)snprintf(views + at, sizeof views - at, "%sview=%s", at ? ", " : "",
                                   (*w)->name);
    return ckpt_fail(err, CKPT_USAGE,
                     "option %s: view=%s shows whole tensors, in files of a Hugging Face model; "
                     "the option is for %s",
                     key, view, views);
}

struct ckpt_writers_text ckpt_writers_with_states(void)
{
    struct ckpt_writers_text views = {""};
    size_t at = 0;

    for (const struct ckpt_writer *const *w = ckpt_writers; *w; w++)
        if ((*w)->state_name && at < sizeof views.text)
            at += (size_t)snprintf(views.text + at, sizeof views.text - at, "%sview=%s",
                                   at ? ", " : "", (*w)->name);
    return views;
}

int ckpt_writers_check(const struct ckpt_output *o, const char *view, struct ckpt_err *err)
{
    for (int i = 0; i < CKPT_NCUT; i++)
        if (o->cut[i] && check_key(o, view, ckpt_output_keys[i], 1u << i, err) < 0)
            return -1;
    if (o->fuse_qkv && check_key(o, view, "fuse_qkv", CKPT_WRITES_FUSED, err) < 0)
        return -1;
    return o->names ? check_key(o, view, "names", CKPT_WRITES_NAMES, err) : 0;
}

const char *ckpt_writing_dtype(const struct ckpt_writing *w)
{
    const struct ckpt_catalog *cat = w->cat;
    uint64_t n[CKPT_NDTYPE] = {0};
    int best = CKPT_BF16;

    for (size_t i = 0; i < cat->tensors.len; i++)
        if (!cat->tensors.ptr[i].state)
            n[cat->tensors.ptr[i].dtype] += cat->tensors.ptr[i].numel;
    for (int t = 0; t < CKPT_NDTYPE; t++)
        best = n[t] > n[best] ? t : best;
    return ckpt_dtype_torch_name((enum ckpt_dtype)best);
}

const char *const ckpt_output_keys[CKPT_NCUT] = {
    [CKPT_CUT_TP] = "tp",
    [CKPT_CUT_PP] = "pp",
    [CKPT_CUT_EP] = "ep",
    [CKPT_CUT_ETP] = "etp",
    [CKPT_CUT_VPP] = "vpp",
    [CKPT_CUT_RANKS] = "ranks",
    [CKPT_CUT_VOCAB] = "make_vocab_size_divisible_by",
    [CKPT_CUT_BATCH] = "global_batch_size",
};

uint32_t ckpt_output_parts(const struct ckpt_output *t, enum ckpt_cut_by cut)
{
    return t->cut[cut] ? t->cut[cut] : 1;
}

/* ---- a file ---- */

int ckpt_writing_add(const struct ckpt_writing *w, const char *path, struct ckpt_segment *seg,
                     size_t n, struct ckpt_err *err)
{
    const struct ckpt_tensor *first = w->cat->tensors.ptr;
    int64_t mtime = INT64_MIN;

    for (size_t i = 0; i < n; i++)
        if (seg[i].kind == CKPT_SEGMENT_TENSOR)
            mtime = ckpt_vfiles_mtime(seg[i].tensor, mtime);
    if (ckpt_vfiles_add_segments(w->files, path, seg, n,
                                 mtime == INT64_MIN ? w->model->mtime_ns : mtime, err) < 0)
        return -1;
    const struct ckpt_vnode *node = w->files->list.ptr[w->files->list.len - 1].node;
    for (size_t i = 0; i < n; i++) {
        const struct ckpt_tensor *t = seg[i].kind == CKPT_SEGMENT_TENSOR ? seg[i].tensor : NULL;
        if (t && t >= first && t < first + w->cat->tensors.len && seg[i].from == 0 &&
            seg[i].len == ckpt_tensor_nbytes(t) && !w->place[t - first].file)
            w->place[t - first] = (struct ckpt_vplace){.file = node, .off = seg[i].off};
    }
    return 0;
}

int ckpt_writing_text(const struct ckpt_writing *w, const char *folder, const char *name,
                      const char *text, size_t len, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *path = ckpt_asprintf("%s%s", folder, name);

    return path ? ckpt_vfiles_add_text(w->files, path, text, len, w->model->mtime_ns, err)
                : ckpt_nomem(err);
}

/* ---- parts of cuts ---- */

uint32_t ckpt_cut_dim(const struct ckpt_tensor *t, enum ckpt_cut_way way)
{
    for (uint32_t i = 0; t->cuts && i < t->cuts->n; i++)
        if (t->cuts->cut[i].way == way)
            return t->cuts->cut[i].dim;
    return t->rank;
}

struct ckpt_interval ckpt_cut_part(const struct ckpt_cut *c, uint32_t rank, uint32_t ranks)
{
    const uint64_t parts = c->shared && c->groups && c->groups < ranks ? c->groups : ranks;
    const uint64_t n = c->n / parts;

    return c->way == CKPT_CUT_NOT ? (struct ckpt_interval){c->lo, c->n}
                                  : (struct ckpt_interval){c->lo + rank * parts / ranks * n, n};
}

int ckpt_cut_fail(const struct ckpt_tensor *t, const struct ckpt_cut *c, uint32_t ranks,
                  const char *key, struct ckpt_err *err)
{
    return ckpt_fail(err, CKPT_USAGE,
                     "option %s: dimension %u of '%s' has %" PRIu64
                     "%s%s, which cannot be divided among %" PRIu32 " ranks",
                     key, c->dim, t->name, c->groups ? c->groups : c->n,
                     c->groups ? " of " : " elements", c->groups ? c->what : "", ranks);
}

int ckpt_cut_check(const struct ckpt_tensor *t, enum ckpt_cut_way way, uint32_t ranks,
                   const char *key, struct ckpt_err *err)
{
    const uint32_t dim = ckpt_cut_dim(t, way);

    for (uint32_t i = 0; t->cuts && i < t->cuts->n; i++) {
        const struct ckpt_cut *c = &t->cuts->cut[i];
        if (c->way != way)
            continue;
        if (c->dim != dim)
            return ckpt_fail(err, CKPT_UNSUPPORTED, "'%s' is divided in two dimensions by %s",
                             t->name, key);
        const bool shared = c->shared && c->groups && c->groups < ranks;
        if (shared ? ranks % c->groups : (c->groups ? c->groups : c->n) % ranks)
            return ckpt_cut_fail(t, c, ranks, key, err);
    }
    return 0;
}

int ckpt_cut_tensor(struct ckpt_catalog *cat, const struct ckpt_tensor *t, enum ckpt_cut_way way,
                    uint32_t rank, uint32_t ranks, struct ckpt_tensor *ret, struct ckpt_err *err)
{
    const uint32_t dim = ckpt_cut_dim(t, way);
    ckpt_cleanup(ckpt_freep) struct ckpt_interval *part = NULL;
    size_t n = 0;

    *ret = *t;
    if (dim == t->rank || ranks == 1)
        return 0;
    if (!(part = calloc(t->cuts->n, sizeof *part)))
        return ckpt_nomem(err);
    for (uint32_t i = 0; i < t->cuts->n; i++)
        if (t->cuts->cut[i].dim == dim)
            part[n++] = ckpt_cut_part(&t->cuts->cut[i], rank, ranks);
    return ckpt_tensor_slice(cat, t, dim, part, n, ret, err);
}
