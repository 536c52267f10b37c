/* SPDX-License-Identifier: Apache-2.0 */
/* Reading the files of layers. */

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/str.h"
#include "format/deepspeed/load.h"

/* ---- one file ---- */

int ckpt_ds_layers_each(const struct ckpt_ds_job *job, const char *file, ckpt_ds_add_fn *fn,
                        void *ctx, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_torch_file_release) struct ckpt_torch_file f = {0};
    const struct ckpt_pickle *p = &f.p;
    struct ckpt_torch_tensor s;

    if (ckpt_torch_file_open(job->dir, file, job->opt->pool, &f, err) < 0)
        return -1;
    const uint32_t source = ckpt_catalog_add_source(job->cat, f.source, err);
    if (source == UINT32_MAX)
        return -1;
    if (ckpt_pv_kind(p->root) != CKPT_PV_DICT)
        return ckpt_fail(err, CKPT_FORMAT, "'%s/%s' has no state dict", ckpt_dir_path(job->dir),
                         file);
    for (size_t i = 0; i < ckpt_pv_npair(p, p->root); i++) {
        const char *name = ckpt_pv_str(p, ckpt_pv_key(p, p->root, i));
        struct ckpt_err e = {0};
        if (!name || ckpt_torch_file_tensor(&f, ckpt_pv_value(p, p->root, i), &s, &e) < 0)
            return ckpt_fail(err, name ? e.code : CKPT_FORMAT, "'%s/%s': '%s': %s",
                             ckpt_dir_path(job->dir), file, name ? name : "?",
                             name ? e.text : "a key is not a string");
        if (fn(ctx, name, &f, &s, source, err) < 0)
            return -1;
    }
    return 0;
}

/* ---- pipelines ---- */

/* A tied parameter that has got the name of the first layer that uses it. */
struct taken {
    const struct ckpt_ds_param *param;
    uint64_t stage;
};

struct pipeline {
    const struct ckpt_ds_job *job;
    struct ckpt_ds_zero *stage;
    uint64_t nstage;
    struct ckpt_ds_buffer **masters; /* one per stage; NULL: not used */
    struct ckpt_ds_parts *weights;
    uint64_t layer;
    CKPT_VEC(struct taken) taken;
    size_t unnamed; /* number of tensors whose parameter no stage lists */
};

#define TIED "tied_modules."

/* A tensor in a layer's file that no stage lists under its own name: "weight" of layer 5 is
 * `local`, "5.weight" is `name`. */
struct unlisted {
    const char *local, *name;
    const struct ckpt_torch_file *file;
    const struct ckpt_torch_tensor *stored;
    uint32_t source;
};

/* Can the parameter be tied_modules.KEY.weight of a layer's "weight", with the same shape? */
static bool may_be_tied(const struct ckpt_ds_param *param, const struct unlisted *u)
{
    const char *own = param->name && ckpt_has_prefix(param->name, TIED)
                          ? strchr(param->name + strlen(TIED), '.')
                          : NULL;

    return own && strcmp(own + 1, u->local) == 0 && ckpt_ds_param_fits(param, u->stored);
}

/* Is the tensor in a layer's file the parameter, by its values? */
static int has_values(const struct pipeline *p, uint64_t stage, const struct ckpt_ds_param *param,
                      const struct unlisted *u, bool *ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_ds_parts_release) struct ckpt_ds_parts master = {0};

    if (ckpt_ds_zero_add(&p->stage[stage], p->masters[stage], param, param->name, &master, err) <
            0 ||
        ckpt_ds_spot_same(p->job, &master, 0, u->file, u->stored, ret, err) < 0)
        return -1;
    *ret &= u->stored->contiguous && param->numel > 0;
    return 0;
}

/* Name a tied parameter, of which several stages list a copy: the first copy gets the layer's name,
 * the others are dropped. */
static int take_name(const struct pipeline *p, const char *tied, const char *name,
                     struct ckpt_err *err)
{
    const char *own = ckpt_arena_strdup(&p->weights->names, name);

    if (!own)
        return ckpt_nomem(err);
    for (uint64_t i = 0; i < p->nstage; i++)
        for (size_t k = 0; k < p->stage[i].param.len; k++) {
            struct ckpt_ds_param *param = &p->stage[i].param.ptr[k];
            if (!param->name || strcmp(param->name, tied) != 0)
                continue;
            param->name = own;
            own = NULL;
        }
    return 0;
}

/* Find the tied parameter that belongs to a layer. No file records it; the name in the layer, the
 * shape and the values decide. NULL: there is none. */
static int find_tied(const struct pipeline *p, const struct unlisted *u,
                     const struct ckpt_ds_param **ret, uint64_t *ret_stage, struct ckpt_err *err)
{
    bool same = false;

    *ret = NULL;
    for (uint64_t i = 0; i < p->nstage && !same; i++)
        for (size_t k = 0; p->masters[i] && k < p->stage[i].param.len && !same; k++) {
            const struct ckpt_ds_param *param = &p->stage[i].param.ptr[k];
            if (!may_be_tied(param, u))
                continue;
            if (has_values(p, i, param, u, &same, err) < 0)
                return -1;
            *ret = same ? param : NULL;
            *ret_stage = i;
        }
    return 0;
}

/* Find the first layer's tensor that a later layer, which has a file too, is tied to. NULL: there
 * is none. */
static int find_first(const struct pipeline *p, const struct unlisted *u, const char **ret,
                      struct ckpt_err *err)
{
    bool same = false;

    *ret = NULL;
    for (size_t i = 0; i < p->taken.len && !same; i++) {
        const struct taken *t = &p->taken.ptr[i];
        const char *own = t->param->name ? strchr(t->param->name, '.') : NULL;
        if (!own || strcmp(own + 1, u->local) != 0 || !ckpt_ds_param_fits(t->param, u->stored))
            continue;
        if (has_values(p, t->stage, t->param, u, &same, err) < 0)
            return -1;
        *ret = same ? t->param->name : NULL;
    }
    return 0;
}

/* Add a tensor that no stage lists, and that is not the first of the layers that share it: as
 * another name of the first layer's, or, if there is none with the same values, as it is stored. */
static int add_later(struct pipeline *p, const struct unlisted *u, struct ckpt_err *err)
{
    const char *first;

    if (find_first(p, u, &first, err) < 0)
        return -1;
    p->unnamed += !first;
    const uint32_t at =
        first && p->job->opt->masters ? ckpt_ds_parts_find(p->weights, first) : CKPT_NONE;
    return at != CKPT_NONE ? ckpt_ds_parts_alias(p->weights, u->name, at, err)
                           : ckpt_ds_parts_stored(p->weights, u->name, u->stored, u->source, err);
}

static int add_tied(struct pipeline *p, const struct unlisted *u, struct ckpt_err *err)
{
    const struct ckpt_ds_param *param;
    struct taken *t;
    uint64_t stage;

    if (find_tied(p, u, &param, &stage, err) < 0)
        return -1;
    if (!param)
        return add_later(p, u, err);
    if (take_name(p, param->name, u->name, err) < 0)
        return -1;
    if (ckpt_vec_add(&p->taken, &t) < 0)
        return ckpt_nomem(err);
    *t = (struct taken){param, stage};
    return p->job->opt->masters
               ? ckpt_ds_zero_add(&p->stage[stage], p->masters[stage], param, u->name, p->weights,
                                  err)
               : ckpt_ds_parts_stored(p->weights, u->name, u->stored, u->source, err);
}

static int add_local(void *ctx, const char *local, const struct ckpt_torch_file *f,
                     const struct ckpt_torch_tensor *s, uint32_t source, struct ckpt_err *err)
{
    struct pipeline *p = ctx;
    ckpt_cleanup(ckpt_freep) char *name = ckpt_asprintf("%" PRIu64 ".%s", p->layer, local);

    if (!name)
        return ckpt_nomem(err);
    if (!p->masters)
        return ckpt_ds_parts_stored(p->weights, name, s, source, err);
    for (uint64_t i = 0; i < p->nstage; i++) {
        const struct ckpt_ds_param *param = ckpt_ds_zero_param(&p->stage[i], name);
        if (!param || !p->masters[i])
            continue;
        return p->job->opt->masters
                   ? ckpt_ds_zero_add(&p->stage[i], p->masters[i], param, name, p->weights, err)
                   : ckpt_ds_parts_stored(p->weights, name, s, source, err);
    }
    return add_tied(p, &(struct unlisted){local, name, f, s, source}, err);
}

/* Does a stage's model file list parameters of that layer? */
static bool has_params(const struct pipeline *p, uint64_t layer)
{
    for (uint64_t i = 0; i < p->nstage; i++)
        for (size_t k = 0; k < p->stage[i].param.len; k++) {
            const char *name = p->stage[i].param.ptr[k].name;
            unsigned long long number;
            if (name && ckpt_parse_u64(name, strcspn(name, "."), &number) && number == layer)
                return true;
        }
    return false;
}

static bool lists_params(const struct pipeline *p)
{
    for (uint64_t i = 0; i < p->nstage; i++)
        if (p->stage[i].param.len == 0)
            return false;
    return true;
}

/* Check a gap between the layers' files: a layer has no file if it is a function, or tied to an
 * earlier layer. */
static int check_hole(const struct pipeline *p, uint64_t from, uint64_t to, struct ckpt_err *err)
{
    const bool known = lists_params(p);

    for (uint64_t layer = from; layer < to; layer++) {
        if (known && !has_params(p, layer))
            continue;
        if (known || !p->job->opt->allow_partial)
            return ckpt_fail(
                err, CKPT_MISSING, "'%s': layer_%02" PRIu64 "-model_states.pt is missing%s",
                ckpt_dir_path(p->job->dir), layer,
                known
                    ? ""
                    : " although its neighbours are there (a layer without weights, or one that is "
                      "tied to an earlier layer, has no file either: allow_partial assumes that)");
        ckpt_catalog_warn(p->job->cat, "'%s' has no file of layer %" PRIu64,
                          ckpt_dir_path(p->job->dir), layer);
    }
    return 0;
}

/* Refuse the layers of several tensor-parallel ranks. DeepSpeed joins them when it converts a tag
 * to a universal checkpoint, by rules. Without rules it can be told to go on
 * (--inject_missing_state), and then takes every parameter for rows of a larger one, also one that
 * all ranks have whole. Neither shapes nor values prove which parameters are cut: a bias of zeros
 * is the same on all ranks, too. */
static int fail_parallel(const struct pipeline *p, const char *file, struct ckpt_err *err)
{
    const struct ckpt_pickle *own = &p->stage[0].model.p;
    const ckpt_pv info = ckpt_pv_get(own, own->root, "universal_checkpoint_info");
    const char *dir = ckpt_dir_path(p->job->dir);

    if (ckpt_pv_kind(info) == CKPT_PV_DICT)
        return ckpt_fail(err, CKPT_UNSUPPORTED,
                         "'%s/%s': layers of several tensor-parallel ranks are not joined here: "
                         "convert the tag by DeepSpeed's ds_to_universal, which does so by "
                         "universal_checkpoint_info, and give its result",
                         dir, file);
    return ckpt_fail(
        err, CKPT_UNSUPPORTED,
        "'%s/%s': the checkpoint does not say how the layers of several tensor-parallel ranks are "
        "joined (no universal_checkpoint_info): save it again with that in client_state. "
        "ds_to_universal --inject_missing_state does without, and joins all parameters as rows, "
        "also those that all ranks have whole",
        dir, file);
}

static int read_layers(struct pipeline *p, struct ckpt_err *err)
{
    const struct ckpt_ds_tag *tag = p->job->tag;
    uint64_t next = 0, tp = 1;

    (void)ckpt_ds_zero_degree(&p->stage[0], "tp_degree", &tp);
    for (size_t i = 0; i < tag->files.len; i++) {
        const struct ckpt_ds_entry *e = &tag->files.ptr[i];
        if (e->is.role != CKPT_DS_LAYER)
            continue;
        if (e->is.mp > 0 || tp > 1)
            return fail_parallel(p, e->name, err);
        p->layer = e->is.layer;
        if (p->layer < next)
            return ckpt_fail(err, CKPT_CONFLICT,
                             "'%s' holds two files of layer %" PRIu64 ": '%s' and another one",
                             ckpt_dir_path(p->job->dir), p->layer, e->name);
        if (check_hole(p, next, p->layer, err) < 0 ||
            ckpt_ds_layers_each(p->job, e->name, add_local, p, err) < 0)
            return -1;
        next = p->layer + 1;
    }
    return 0;
}

/* Check that every parameter in the model files was found in a layer's file. */
static int check_params(const struct pipeline *p, struct ckpt_err *err)
{
    for (uint64_t i = 0; i < p->nstage; i++)
        for (size_t k = 0; k < p->stage[i].param.len; k++) {
            const char *name = p->stage[i].param.ptr[k].name;
            if (name && !ckpt_has_prefix(name, TIED) &&
                ckpt_ds_parts_find(p->weights, name) == CKPT_NONE)
                return ckpt_fail(err, CKPT_MISSING,
                                 "'%s': no layer's file has '%s', which '%s' lists",
                                 ckpt_dir_path(p->job->dir), name, p->stage[i].model_name);
        }
    return 0;
}

/* The number of parameters that a stage's optimizer has, if it is torch's own; else 0. */
static size_t count_trained(const struct ckpt_ds_zero *stage)
{
    const struct ckpt_pickle *p = &stage->model.p;
    const ckpt_pv groups = ckpt_pv_get(p, ckpt_pv_get(p, p->root, "optimizer"), "param_groups");
    size_t n = 0;

    for (size_t i = 0; i < ckpt_pv_len(p, groups); i++)
        n += ckpt_pv_len(p, ckpt_pv_get(p, ckpt_pv_at(p, groups, i), "params"));
    return n;
}

/* Without lists of parameters, nothing tells how many layers there are: warn if the optimizers have
 * more parameters than the layers' files. */
static void compare_counts(const struct pipeline *p)
{
    size_t n = 0;

    for (uint64_t i = 0; i < p->nstage; i++)
        n += count_trained(&p->stage[i]);
    if (n > p->weights->part.len && !lists_params(p))
        ckpt_catalog_warn(p->job->cat,
                          "'%s': the optimizers of all stages have %zu parameters, but the layers' "
                          "files %zu tensors: layers at the end are missing (layer_*), or some are "
                          "tied",
                          ckpt_dir_path(p->job->dir), n, p->weights->part.len);
}

static int read_stage(struct pipeline *p, uint64_t i, bool *ret_any, struct ckpt_err *err)
{
    struct ckpt_err e = {0};
    bool read;

    if (ckpt_ds_module_read_ranks(&p->stage[i], &read, err) < 0)
        return -1;
    *ret_any |= read;
    if (!read || ckpt_ds_masters_new(&p->stage[i], &p->masters[i], &e) == 0)
        return 0;
    if (p->job->opt->masters || e.code == CKPT_NOMEM)
        return ckpt_err_move(err, &e);
    ckpt_ds_masters_free(&p->stage[i], p->masters[i]);
    p->masters[i] = NULL;
    ckpt_catalog_warn(p->job->cat, "left out: the optimizer's states: %s", e.text);
    return 0;
}

/* Read the masters of all stages if they are needed; they also identify tied parameters. */
static int read_stages(struct pipeline *p, struct ckpt_err *err)
{
    bool any = false;

    if (!p->job->opt->masters && !p->job->opt->states)
        return 0;
    if (!(p->masters = calloc(p->nstage, sizeof *p->masters)))
        return ckpt_nomem(err);
    for (uint64_t i = 0; i < p->nstage; i++)
        if (read_stage(p, i, &any, err) < 0)
            return -1;
    if (!any) {
        free(p->masters);
        p->masters = NULL;
    }
    return 0;
}

static void pipeline_release(struct pipeline *p)
{
    for (uint64_t i = 0; p->masters && i < p->nstage; i++)
        ckpt_ds_masters_free(&p->stage[i], p->masters[i]);
    free(p->masters);
    ckpt_vec_release(&p->taken);
}

int ckpt_ds_layers_read(const struct ckpt_ds_job *job, struct ckpt_ds_zero *stage, uint64_t n,
                        struct ckpt_ds_parts *weights, struct ckpt_ds_parts *moments,
                        struct ckpt_err *err)
{
    ckpt_cleanup(pipeline_release) struct pipeline p = {
        .job = job, .stage = stage, .nstage = n, .weights = weights};

    if (read_stages(&p, err) < 0 || read_layers(&p, err) < 0 || check_params(&p, err) < 0)
        return -1;
    compare_counts(&p);
    if (p.unnamed)
        ckpt_catalog_warn(
            job->cat,
            "'%s': %zu tensors are shown as their layers' files have them, without "
            "F32 masters or states: the checkpoint does not say which ones are theirs",
            ckpt_dir_path(job->dir), p.unnamed);
    for (uint64_t i = 0; p.masters && job->opt->states && i < n; i++)
        if (p.masters[i] && ckpt_ds_moments_add(&stage[i], moments, err) < 0)
            return -1;
    return 0;
}
