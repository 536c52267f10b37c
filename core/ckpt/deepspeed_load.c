/* SPDX-License-Identifier: Apache-2.0 */
/* Which of DeepSpeed's layouts a tag has, and its tensors. */
#include "ckpt/deepspeed_load.h"

#include <inttypes.h>
#include <string.h>

#include "base/str.h"
#include "ckpt/deepspeed_module.h"
#include "ckpt/deepspeed_universal.h"

static void parts_release(struct ckpt_ds_parts *p) { ckpt_ds_parts_release(p); }
static void zero_release(struct ckpt_ds_zero *z) { ckpt_ds_zero_release(z); }

static int about(const struct ckpt_ds_job *job, const char *key, json_t *value,
                 struct ckpt_err *err)
{
    return !value || json_object_set_new(job->cat->about, key, value) < 0 ? ckpt_nomem(err) : 0;
}

static int describe(const struct ckpt_ds_job *job, const struct ckpt_ds_zero *z,
                    struct ckpt_err *err)
{
    const struct ckpt_pickle *p = &z->model->p;
    const char *version = ckpt_pv_str(p, ckpt_pv_get(p, p->root, "ds_version"));
    uint64_t step;

    if (version && ckpt_utf8_ok(version) && about(job, "version", json_string(version), err) < 0)
        return -1;
    return ckpt_ds_file_u64(z->model, p->root, "global_steps", &step)
               ? about(job, "step", json_integer((json_int_t)step), err)
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

/* One rank has all of the module. */
static int load_module(const struct ckpt_ds_job *job, struct ckpt_err *err)
{
    ckpt_cleanup(zero_release) struct ckpt_ds_zero z = {0};
    ckpt_cleanup(parts_release) struct ckpt_ds_parts weights = {0}, moments = {0};

    if (ckpt_ds_zero_open(job, 0, &z, err) < 0 || describe(job, &z, err) < 0 ||
        ckpt_ds_module_read(&z, &weights, &moments, err) < 0)
        return -1;
    return add_all(job, &weights, err) < 0 || add_all(job, &moments, err) < 0 ? -1 : 0;
}

/* Ranks 0 to n - 1 have model files; 0 if one is missing. */
static uint64_t count_mp(const struct ckpt_ds_tag *tag)
{
    uint64_t n = 0;

    while (ckpt_ds_tag_find(tag, CKPT_DS_MODEL, n, 0) ||
           ckpt_ds_tag_find(tag, CKPT_DS_ZERO3_MODEL, n, 0))
        n++;
    return n;
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

/* A universal checkpoint, or a conversion that did not end. */
static int load_universal(const struct ckpt_ds_job *job, struct ckpt_err *err)
{
    ckpt_cleanup(zero_release) struct ckpt_ds_zero z = {0};
    ckpt_cleanup(parts_release) struct ckpt_ds_parts weights = {0}, moments = {0};

    if (!ckpt_dir_has_dir(job->dir, "zero"))
        return ckpt_fail(err, CKPT_MISSING,
                         "'%s' has fragments in tmp/ but no zero/: the conversion to a universal "
                         "checkpoint was interrupted",
                         ckpt_dir_path(job->dir));
    if (ckpt_ds_zero_open(job, 0, &z, err) < 0 || describe(job, &z, err) < 0 ||
        ckpt_ds_universal_read(&z, count_mp(job->tag), &weights, &moments, err) < 0)
        return -1;
    return add_all(job, &weights, err) < 0 || add_all(job, &moments, err) < 0 ? -1 : 0;
}

int ckpt_ds_load(const struct ckpt_ds_job *job, struct ckpt_err *err)
{
    if (check_roles(job, err) < 0)
        return -1;
    if (job->tag->universal && ckpt_ds_tag_count(job->tag, CKPT_DS_OPTIM, NULL) == 0)
        return load_universal(job, err);
    if (ckpt_ds_tag_count(job->tag, CKPT_DS_LAYER, NULL) ||
        ckpt_ds_tag_count(job->tag, CKPT_DS_EXPERT, NULL))
        return ckpt_fail(
            err, CKPT_UNSUPPORTED,
            "'%s' is of a pipeline module or of DeepSpeed-MoE, which are not supported "
            "yet",
            ckpt_dir_path(job->dir));
    if (count_mp(job->tag) > 1)
        return ckpt_fail(err, CKPT_UNSUPPORTED,
                         "'%s' has the files of %" PRIu64
                         " tensor-parallel ranks or pipeline stages, which are not joined yet",
                         ckpt_dir_path(job->dir), count_mp(job->tag));
    return load_module(job, err);
}
