/* SPDX-License-Identifier: Apache-2.0 */
/* Finding out which of DeepSpeed's layouts a tag has, and loading its tensors. */
#include "format/deepspeed/load.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/ckd.h"
#include "base/str.h"

static void describe(const struct ckpt_ds_job *job, const struct ckpt_ds_zero *z)
{
    const struct ckpt_pickle *p = &z->model.p;
    const char *version = ckpt_pv_str(p, ckpt_pv_get(p, p->root, "ds_version"));
    uint64_t step;

    if (version && ckpt_utf8_ok(version))
        ckpt_json_set(&job->cat->about, "version", json_string(version));
    if (ckpt_ds_file_u64(&z->model, p->root, "global_steps", &step))
        ckpt_json_set(&job->cat->about, "step", json_integer((json_int_t)step));
}

/* Can the module be Megatron's language model, by its names, nested or flat? That of a pipeline
 * lies in other files. */
static bool may_be_language_model(const struct ckpt_torch_file *f)
{
    const ckpt_pv module = ckpt_pv_get(&f->p, f->p.root, "module");
    bool found = ckpt_pv_kind(module) != CKPT_PV_DICT;

    for (size_t i = 0; i < ckpt_pv_npair(&f->p, module) && !found; i++) {
        const char *key = ckpt_pv_str(&f->p, ckpt_pv_key(&f->p, module, i));
        found =
            key && (strcmp(key, "language_model") == 0 || ckpt_has_prefix(key, "language_model.") ||
                    ckpt_has_prefix(key, "module.language_model."));
    }
    return found;
}

/* Refuse a model that Megatron-DeepSpeed trained, unless its own names are to be shown. */
static int refuse_megatron(const struct ckpt_ds_zero *z, struct ckpt_err *err)
{
    const struct ckpt_pickle *p = &z->model.p;

    if (z->job->opt->states || ckpt_pv_kind(ckpt_pv_get(p, p->root, "args")) != CKPT_PV_OBJ ||
        ckpt_pv_kind(ckpt_pv_get(p, p->root, "checkpoint_version")) == CKPT_PV_ABSENT ||
        !may_be_language_model(&z->model))
        return 0;
    return ckpt_fail(err, CKPT_UNSUPPORTED,
                     "'%s/%s': a model of Megatron-DeepSpeed (its args and checkpoint_version are "
                     "there), which is not converted: take Megatron-DeepSpeed's own converter "
                     "(tools/hf2megads_weight_converter.py); view=raw shows the tensors",
                     ckpt_dir_path(z->job->dir), z->model_name);
}

/* The ranks of a job that have model files: tensor-parallel ranks, or stages of a pipeline. Each
 * has a part of the model. */
struct ranks {
    const struct ckpt_ds_job *job;
    uint64_t n;
    struct ckpt_ds_zero *zero;
    struct ckpt_ds_parts *weights, *moments;
};

static void ranks_release(struct ranks *r)
{
    for (uint64_t i = 0; i < r->n; i++) {
        ckpt_ds_zero_release(&r->zero[i]);
        ckpt_ds_parts_release(&r->weights[i]);
        ckpt_ds_parts_release(&r->moments[i]);
    }
    free(r->zero);
    free(r->weights);
    free(r->moments);
}

/* Open the first rank's model file, which says what the checkpoint is, and make room for all. */
static int open_first(struct ranks *r, struct ckpt_err *err)
{
    uint64_t n = 0;

    while (ckpt_ds_tag_find(r->job->tag, CKPT_DS_MODEL, n, 0) ||
           ckpt_ds_tag_find(r->job->tag, CKPT_DS_ZERO3_MODEL, n, 0))
        n++;
    n = ckpt_max_u64(n, 1); /* if the first is missing, opening it says so */
    if (!(r->zero = calloc(n, sizeof *r->zero)) || !(r->weights = calloc(n, sizeof *r->weights)) ||
        !(r->moments = calloc(n, sizeof *r->moments)))
        return ckpt_nomem(err);
    r->n = n;
    if (ckpt_ds_zero_open(r->job, 0, &r->zero[0], err) < 0 || refuse_megatron(&r->zero[0], err) < 0)
        return -1;
    describe(r->job, &r->zero[0]);
    return 0;
}

/* Check that there are as many model files as the first one says, and open the others. */
static int open_others(struct ranks *r, struct ckpt_err *err)
{
    const struct ckpt_ds_zero *z = &r->zero[0];
    uint64_t want = r->n, pp = 1, tp = 1;
    const bool has_pp = ckpt_ds_zero_degree(z, "pp_degree", &pp);

    if (!(ckpt_ds_zero_degree(z, "tp_degree", &tp) || has_pp) || ckd_mul(&want, pp, tp))
        (void)ckpt_ds_file_u64(&z->model, z->model.p.root, "mp_world_size", &want);
    if (want != r->n)
        return ckpt_fail(err, want > r->n ? CKPT_MISSING : CKPT_CONFLICT,
                         "'%s' has the model files of %" PRIu64
                         " ranks (mp_rank_*), '%s' says that there are %" PRIu64,
                         ckpt_dir_path(r->job->dir), r->n, z->model_name, want);
    for (uint64_t i = 1; i < r->n; i++) {
        if (ckpt_ds_zero_open(r->job, i, &r->zero[i], err) < 0)
            return -1;
        r->zero[i].shared_in = &z->model;
    }
    return 0;
}

static int add_all(const struct ckpt_ds_job *job, const struct ckpt_ds_parts *p,
                   struct ckpt_err *err)
{
    for (size_t i = 0; i < p->part.len; i++)
        if (ckpt_ds_parts_catalog(p, i, job->cat, err) < 0)
            return ckpt_err_in(err, "'%s'", ckpt_dir_path(job->dir));
    return 0;
}

/* Add the tensors of the first rank, which has all of them. */
static int add_first(const struct ranks *r, struct ckpt_err *err)
{
    return add_all(r->job, &r->weights[0], err) < 0 ? -1 : add_all(r->job, &r->moments[0], err);
}

/* Load a module of which each tensor-parallel rank has a part; experts have files of their own. */
static int load_module(struct ranks *r, struct ckpt_err *err)
{
    struct ckpt_ds_zero *z = &r->zero[0];

    if (z->moe && z->zero3)
        return ckpt_fail(err, CKPT_UNSUPPORTED,
                         "'%s': experts' files beside ZeRO 3 are not supported",
                         ckpt_dir_path(r->job->dir));
    for (uint64_t i = 0; i < r->n; i++)
        if (ckpt_ds_module_read(&r->zero[i], &r->weights[i], &r->moments[i], err) < 0)
            return -1;
    if (z->moe && ckpt_ds_experts_read(z, &r->weights[0], &r->moments[0], err) < 0)
        return -1;
    if (r->n == 1)
        return add_first(r, err);
    return ckpt_ds_tp_join(z, r->weights, r->n, r->job->cat, err) < 0 ||
                   ckpt_ds_tp_join(z, r->moments, r->n, r->job->cat, err) < 0
               ? -1
               : 0;
}

/* Load a universal checkpoint, whose tensor-parallel ranks are joined already. Everything of a
 * module that is not in zero/ is taken from the first rank's file. */
static int load_universal(struct ranks *r, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_ds_pipe_release) struct ckpt_ds_pipe pipe = {0};
    const struct ckpt_pickle *p = &r->zero[0].model.p;
    const enum ckpt_pv_kind module = ckpt_pv_kind(ckpt_pv_get(p, p->root, "module"));
    const bool is_pipe = module == CKPT_PV_NONE && !r->zero[0].zero3;

    if (module != CKPT_PV_DICT && !is_pipe)
        return ckpt_fail(err, CKPT_FORMAT, "'%s/%s': 'module' is not a state dict",
                         ckpt_dir_path(r->job->dir), r->zero[0].model_name);
    if (is_pipe && (open_others(r, err) < 0 || ckpt_ds_pipe_read(r->zero, r->n, &pipe, err) < 0))
        return -1;
    return ckpt_ds_universal_read(&r->zero[0], r->n, is_pipe ? &pipe : NULL, &r->weights[0],
                                  &r->moments[0], err) < 0
               ? -1
               : add_first(r, err);
}

/* Refuse the model files of ZeRO 3 beside those of other stages. A universal checkpoint may have
 * both, for any stage to resume, if they are of one step. */
static int check_stages(const struct ckpt_ds_job *job, const struct ckpt_ds_zero *z, bool universal,
                        struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_torch_file_release) struct ckpt_torch_file f = {0};
    const struct ckpt_ds_entry *model, *zero3;
    uint64_t step = 0, own = 0;

    if (!ckpt_ds_tag_count(job->tag, CKPT_DS_MODEL, &model) ||
        !ckpt_ds_tag_count(job->tag, CKPT_DS_ZERO3_MODEL, &zero3))
        return 0;
    if (universal && ckpt_torch_file_open(job->dir, zero3->name, job->opt->pool, &f, err) < 0)
        return -1;
    if (universal && ckpt_ds_file_u64(&f, f.p.root, "global_steps", &step) &&
        ckpt_ds_file_u64(&z->model, z->model.p.root, "global_steps", &own) && step == own)
        return 0;
    return ckpt_fail(err, CKPT_CONFLICT,
                     "'%s' holds files of several saves: '%s' is of ZeRO 3, '%s' is not: remove "
                     "the stale ones",
                     ckpt_dir_path(job->dir), zero3->name, model->name);
}

int ckpt_ds_load(const struct ckpt_ds_job *job, struct ckpt_err *err)
{
    ckpt_cleanup(ranks_release) struct ranks r = {.job = job};
    const bool universal =
        job->tag->universal && ckpt_ds_tag_count(job->tag, CKPT_DS_OPTIM, NULL) == 0;

    if (universal && !ckpt_dir_has_dir(job->dir, "zero"))
        return ckpt_fail(err, CKPT_MISSING,
                         "'%s' has fragments in tmp/ but no zero/: the conversion to a universal "
                         "checkpoint was interrupted",
                         ckpt_dir_path(job->dir));
    if (open_first(&r, err) < 0 || check_stages(job, &r.zero[0], universal, err) < 0)
        return -1;
    if (universal)
        return load_universal(&r, err);
    if (open_others(&r, err) < 0)
        return -1;
    if (ckpt_ds_tag_count(job->tag, CKPT_DS_LAYER, NULL) == 0)
        return load_module(&r, err);
    return ckpt_ds_layers_read(job, r.zero, r.n, &r.weights[0], &r.moments[0], err) < 0
               ? -1
               : add_first(&r, err);
}
