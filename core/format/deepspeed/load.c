/* SPDX-License-Identifier: Apache-2.0 */
/* Finding out which of DeepSpeed's layouts a tag has, and loading its tensors. */
#include "format/deepspeed/load.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/ckd.h"
#include "base/str.h"
#include "format/deepspeed/experts.h"
#include "format/deepspeed/layers.h"
#include "format/deepspeed/module.h"
#include "format/deepspeed/pipe.h"
#include "format/deepspeed/tp.h"
#include "format/deepspeed/universal.h"

static void parts_release(struct ckpt_ds_parts *p) { ckpt_ds_parts_release(p); }
static void zero_release(struct ckpt_ds_zero *z) { ckpt_ds_zero_release(z); }
static void pipe_release(struct ckpt_ds_pipe *p) { ckpt_ds_pipe_release(p); }

static int about(const struct ckpt_ds_job *job, const char *key, json_t *value,
                 struct ckpt_err *err)
{
    return !value || json_object_set_new(job->cat->about, key, value) < 0 ? ckpt_nomem(err) : 0;
}

static int describe(const struct ckpt_ds_job *job, const struct ckpt_ds_zero *z,
                    struct ckpt_err *err)
{
    const struct ckpt_pickle *p = &z->model.p;
    const char *version = ckpt_pv_str(p, ckpt_pv_get(p, p->root, "ds_version"));
    uint64_t step;

    if (version && ckpt_utf8_ok(version) && about(job, "version", json_string(version), err) < 0)
        return -1;
    return ckpt_ds_file_u64(&z->model, p->root, "global_steps", &step)
               ? about(job, "step", json_integer((json_int_t)step), err)
               : 0;
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

/* Open the first rank's model file, which says what the checkpoint is. */
static int open_first(const struct ckpt_ds_job *job, struct ckpt_ds_zero *ret, struct ckpt_err *err)
{
    return ckpt_ds_zero_open(job, 0, ret, err) < 0 || refuse_megatron(ret, err) < 0 ||
                   describe(job, ret, err) < 0
               ? -1
               : 0;
}

static int add_all(const struct ckpt_ds_job *job, const struct ckpt_ds_parts *p,
                   struct ckpt_err *err)
{
    for (size_t i = 0; i < p->part.len; i++)
        if (ckpt_ds_parts_catalog(p, i, job->cat, err) < 0)
            return ckpt_err_in(err, "'%s'", ckpt_dir_path(job->dir));
    return 0;
}

static int add_both(const struct ckpt_ds_job *job, const struct ckpt_ds_parts *weights,
                    const struct ckpt_ds_parts *moments, struct ckpt_err *err)
{
    return add_all(job, weights, err) < 0 ? -1 : add_all(job, moments, err);
}

/* The number n of ranks: 0 to n - 1 have model files. 0: one is missing. */
static uint64_t count_mp(const struct ckpt_ds_tag *tag)
{
    uint64_t n = 0;

    while (ckpt_ds_tag_find(tag, CKPT_DS_MODEL, n, 0) ||
           ckpt_ds_tag_find(tag, CKPT_DS_ZERO3_MODEL, n, 0))
        n++;
    return n;
}

/* Check that there are as many tensor-parallel ranks as the first one says. */
static int check_degree(const struct ckpt_ds_zero *z, uint64_t n, struct ckpt_err *err)
{
    const struct ckpt_pickle *p = &z->model.p;
    const ckpt_pv degrees = ckpt_pv_get(p, p->root, "checkpoint_parallel_dimensions");
    uint64_t want = n;

    if (!ckpt_ds_file_u64(&z->model, degrees, "tp_degree", &want))
        (void)ckpt_ds_file_u64(&z->model, p->root, "mp_world_size", &want);
    return want == n ? 0
                     : ckpt_fail(err, want > n ? CKPT_MISSING : CKPT_CONFLICT,
                                 "'%s': the model files of %" PRIu64
                                 " tensor-parallel ranks are there, '%s' says that there are "
                                 "%" PRIu64,
                                 ckpt_dir_path(z->job->dir), n, z->model_name, want);
}

/* Load a module of which one rank has everything except the experts. */
static int load_module(const struct ckpt_ds_job *job, struct ckpt_err *err)
{
    ckpt_cleanup(zero_release) struct ckpt_ds_zero z = {0};
    ckpt_cleanup(parts_release) struct ckpt_ds_parts weights = {0}, moments = {0};

    if (open_first(job, &z, err) < 0 || check_degree(&z, 1, err) < 0)
        return -1;
    if (z.moe && z.zero3)
        return ckpt_fail(err, CKPT_UNSUPPORTED,
                         "'%s': experts' files beside ZeRO 3 are not supported",
                         ckpt_dir_path(job->dir));
    if (ckpt_ds_module_read(&z, &weights, &moments, err) < 0 ||
        (z.moe && ckpt_ds_experts_read(&z, &weights, &moments, err) < 0))
        return -1;
    return add_both(job, &weights, &moments, err);
}

static void stages_free(struct ckpt_ds_zero *stage, uint64_t n)
{
    for (uint64_t i = 0; stage && i < n; i++)
        ckpt_ds_zero_release(&stage[i]);
    free(stage);
}

/* The ranks of a job, each of which has a part of the model. */
struct ranks {
    uint64_t n;
    struct ckpt_ds_zero *zero;
    struct ckpt_ds_parts *weights, *moments;
};

static void ranks_release(struct ranks *r)
{
    stages_free(r->zero, r->n);
    for (uint64_t i = 0; i < r->n; i++) {
        if (r->weights)
            ckpt_ds_parts_release(&r->weights[i]);
        if (r->moments)
            ckpt_ds_parts_release(&r->moments[i]);
    }
    free(r->weights);
    free(r->moments);
}

/* Open the first rank's model file, and make room for all ranks. */
static int open_rank0(const struct ckpt_ds_job *job, struct ranks *r, struct ckpt_err *err)
{
    r->n = ckpt_max_u64(count_mp(job->tag), 1);
    if (!(r->zero = calloc(r->n, sizeof *r->zero)) ||
        !(r->weights = calloc(r->n, sizeof *r->weights)) ||
        !(r->moments = calloc(r->n, sizeof *r->moments)))
        return ckpt_nomem(err);
    return open_first(job, &r->zero[0], err);
}

/* Load a pipeline module, with one model file per stage. */
static int load_pipeline(const struct ckpt_ds_job *job, struct ckpt_err *err)
{
    ckpt_cleanup(ranks_release) struct ranks r = {0};

    if (open_rank0(job, &r, err) < 0)
        return -1;
    for (uint64_t i = 1; i < r.n; i++)
        if (ckpt_ds_zero_open(job, i, &r.zero[i], err) < 0)
            return -1;
    return ckpt_ds_layers_read(job, r.zero, r.n, &r.weights[0], &r.moments[0], err) < 0
               ? -1
               : add_both(job, &r.weights[0], &r.moments[0], err);
}

/* Load a module of which each tensor-parallel rank has a part. */
static int load_ranks(const struct ckpt_ds_job *job, struct ckpt_err *err)
{
    ckpt_cleanup(ranks_release) struct ranks r = {0};

    if (open_rank0(job, &r, err) < 0 || check_degree(&r.zero[0], r.n, err) < 0)
        return -1;
    for (uint64_t i = 1; i < r.n; i++) {
        if (ckpt_ds_zero_open(job, i, &r.zero[i], err) < 0)
            return -1;
        r.zero[i].shared_in = &r.zero[0].model;
    }
    for (uint64_t i = 0; i < r.n; i++)
        if (ckpt_ds_module_read(&r.zero[i], &r.weights[i], &r.moments[i], err) < 0)
            return -1;
    return ckpt_ds_tp_join(&r.zero[0], r.weights, r.n, job->cat, err) < 0 ||
                   ckpt_ds_tp_join(&r.zero[0], r.moments, r.n, job->cat, err) < 0
               ? -1
               : 0;
}

static int check_roles(const struct ckpt_ds_job *job, struct ckpt_err *err)
{
    const struct ckpt_ds_entry *model, *zero3;

    if (ckpt_ds_tag_count(job->tag, CKPT_DS_MODEL, &model) &&
        ckpt_ds_tag_count(job->tag, CKPT_DS_ZERO3_MODEL, &zero3))
        return ckpt_fail(
            err, CKPT_CONFLICT,
            "'%s' holds files of several saves: '%s' is of ZeRO 3, '%s' is not: remove "
            "the stale ones",
            ckpt_dir_path(job->dir), zero3->name, model->name);
    return 0;
}

/* Load a universal checkpoint of a pipeline, whose tensor-parallel ranks are joined already. */
static int load_universal_pipe(struct ranks *r, struct ckpt_err *err)
{
    ckpt_cleanup(pipe_release) struct ckpt_ds_pipe pipe = {0};
    const struct ckpt_ds_job *job = r->zero[0].job;

    for (uint64_t i = 1; i < r->n; i++)
        if (ckpt_ds_zero_open(job, i, &r->zero[i], err) < 0)
            return -1;
    if (ckpt_ds_pipe_read(r->zero, r->n, &pipe, err) < 0 ||
        ckpt_ds_universal_read_pipe(&r->zero[0], &pipe, &r->weights[0], &r->moments[0], err) < 0)
        return -1;
    return add_both(job, &r->weights[0], &r->moments[0], err);
}

/* Load a universal checkpoint of a module. Everything that is not in zero/ is taken from the first
 * rank's file. */
static int load_universal_module(struct ranks *r, struct ckpt_err *err)
{
    struct ckpt_ds_zero *z = &r->zero[0];

    if (ckpt_ds_universal_read(z, r->n, &r->weights[0], &r->moments[0], err) < 0)
        return -1;
    return add_both(z->job, &r->weights[0], &r->moments[0], err);
}

/* Load a universal checkpoint, or refuse a conversion that was not finished. */
static int load_universal(const struct ckpt_ds_job *job, struct ckpt_err *err)
{
    ckpt_cleanup(ranks_release) struct ranks r = {0};

    if (!ckpt_dir_has_dir(job->dir, "zero"))
        return ckpt_fail(err, CKPT_MISSING,
                         "'%s' has fragments in tmp/ but no zero/: the conversion to a universal "
                         "checkpoint was interrupted",
                         ckpt_dir_path(job->dir));
    if (open_rank0(job, &r, err) < 0)
        return -1;
    const struct ckpt_torch_file *f = &r.zero[0].model;
    const enum ckpt_pv_kind module = ckpt_pv_kind(ckpt_pv_get(&f->p, f->p.root, "module"));
    if (module == CKPT_PV_DICT)
        return load_universal_module(&r, err);
    if (module == CKPT_PV_NONE && !r.zero[0].zero3)
        return load_universal_pipe(&r, err);
    return ckpt_fail(err, CKPT_FORMAT, "'%s/%s': 'module' is not a state dict",
                     ckpt_dir_path(job->dir), r.zero[0].model_name);
}

int ckpt_ds_load(const struct ckpt_ds_job *job, struct ckpt_err *err)
{
    if (check_roles(job, err) < 0)
        return -1;
    if (job->tag->universal && ckpt_ds_tag_count(job->tag, CKPT_DS_OPTIM, NULL) == 0)
        return load_universal(job, err);
    if (ckpt_ds_tag_count(job->tag, CKPT_DS_LAYER, NULL))
        return load_pipeline(job, err);
    return count_mp(job->tag) > 1 ? load_ranks(job, err) : load_module(job, err);
}
