/* SPDX-License-Identifier: Apache-2.0 */
/* Reading the lists of parameters of a pipeline's ranks. */
#include "format/deepspeed/load.h"

#include <inttypes.h>
#include <string.h>

#include "base/ckd.h"
#include "base/str.h"

#define TIED "tied_modules."
#define INFO "universal_checkpoint_info"
#define REPLICATED "pipeline_replicated_parameter_patterns"

void ckpt_ds_pipe_release(struct ckpt_ds_pipe *p)
{
    ckpt_vec_release(&p->listed);
    ckpt_map_release(&p->by_name);
}

/* ---- the union ---- */

static int add_param(struct ckpt_ds_pipe *p, const struct ckpt_ds_zero *z,
                     const struct ckpt_ds_param *param, struct ckpt_err *err)
{
    struct ckpt_ds_listed *listed;
    uint32_t at;

    if (ckpt_ds_expert_number(param->name))
        return ckpt_fail(err, CKPT_UNSUPPORTED,
                         "'%s/%s' lists '%s': ds_to_universal cannot convert the experts of a "
                         "pipeline: open the tag that it was made of",
                         ckpt_dir_path(z->job->dir), z->model_name, param->name);
    at = ckpt_map_add(&p->by_name, param->name, (uint32_t)p->listed.len);
    if (at == CKPT_NONE || (at == p->listed.len && ckpt_vec_add(&p->listed, &listed) < 0))
        return ckpt_nomem(err);
    listed = &p->listed.ptr[at];
    if (listed->nrank++ == 0)
        *listed = (struct ckpt_ds_listed){.z = z, .param = param, .nrank = 1};
    return ckd_add(&listed->numel, listed->numel, param->numel)
               ? ckpt_fail(err, CKPT_FORMAT, "'%s' is larger than any file", param->name)
               : 0;
}

static int add_rank(struct ckpt_ds_pipe *p, const struct ckpt_ds_zero *z, struct ckpt_err *err)
{
    if (z->param.len == 0)
        return ckpt_fail(err, CKPT_MISSING,
                         "'%s/%s' has no param_shapes: nothing says which parameters belong to "
                         "its stage of the pipeline: open the tag that the universal checkpoint "
                         "was made of",
                         ckpt_dir_path(z->job->dir), z->model_name);
    for (size_t i = 0; i < z->param.len; i++)
        if (add_param(p, z, &z->param.ptr[i], err) < 0)
            return -1;
    return 0;
}

/* ---- checks ---- */

/* The values of buffers were in the layers' files, which ds_to_universal does not copy. */
static int check_buffers(const struct ckpt_ds_zero *z, struct ckpt_err *err)
{
    static const char what[] = "'%s': the values of %zu buffers ('%s', ...), which '%s' lists, are "
                               "not in a universal checkpoint of a pipeline%s";
    const struct ckpt_pickle *p = &z->model.p;
    const ckpt_pv list = ckpt_pv_get(p, p->root, "buffer_names");
    const size_t n = ckpt_pv_len(p, list);
    const char *first = n ? ckpt_pv_str(p, ckpt_pv_at(p, list, 0)) : NULL;
    const char *dir = ckpt_dir_path(z->job->dir), *name = first ? first : "?";

    if (n == 0)
        return 0;
    if (!z->job->opt->allow_partial)
        return ckpt_fail(err, CKPT_MISSING, what, dir, n, name, z->model_name,
                         ": open the tag that it was made of, or give allow_partial, which leaves "
                         "them out");
    ckpt_catalog_warn(z->job->cat, what, dir, n, name, z->model_name, ": left out");
    return 0;
}

static int check_rules(const struct ckpt_ds_pipe *p, const struct ckpt_ds_zero *z,
                       struct ckpt_err *err)
{
    const ckpt_pv info = ckpt_pv_get(&z->model.p, z->model.p.root, INFO);

    if (p->ntp == 1 || ckpt_pv_kind(info) == CKPT_PV_DICT)
        return 0;
    return ckpt_fail(
        err, CKPT_UNSUPPORTED,
        "'%s': '%s' has no " INFO ", so that ds_to_universal had no rules to join "
        "the parts of %" PRIu64 " tensor-parallel ranks (--inject_missing_state joins "
        "all as rows, also those that all ranks have whole): save the tag again with " INFO
        " in client_state, and convert that",
        ckpt_dir_path(z->job->dir), z->model_name, p->ntp);
}

/* Check a parameter that several stages list. They have the same values if the whole layer is tied,
 * and not if only some of its parameters are (tied_weight_attr), which no file says. */
static int check_copy(const struct ckpt_ds_pipe *p, const struct ckpt_ds_zero *first,
                      const struct ckpt_ds_listed *listed, struct ckpt_err *err)
{
    bool match;

    if (listed->nrank == p->ntp)
        return 0;
    if (listed->nrank % p->ntp || !ckpt_has_prefix(listed->param->name, TIED))
        return ckpt_fail(err, CKPT_CONFLICT,
                         "'%s': the model files of %" PRIu64 " ranks list '%s', those of %" PRIu64
                         " tensor-parallel ranks were expected: model files of different saves?",
                         ckpt_dir_path(first->job->dir), listed->nrank, listed->param->name,
                         p->ntp);
    if (ckpt_ds_rules_match(&first->model, REPLICATED, listed->param->name, &match, err) < 0)
        return -1;
    ckpt_catalog_warn(first->job->cat,
                      "'%s': several stages list '%s', and a universal checkpoint has the copy of "
                      "the %s one: if the layers do not share it, the others' values are in the "
                      "tag that it was made of only",
                      ckpt_dir_path(first->job->dir), listed->param->name,
                      match ? "first" : "last");
    return 0;
}

/* ---- the dtype ---- */

/* Is the precision enabled? -1: that cannot be read. */
static int is_enabled(const struct ckpt_pickle *p, ckpt_pv config, const char *key)
{
    const ckpt_pv precision = ckpt_pv_get(p, config, key);
    const ckpt_pv v = ckpt_pv_get(p, precision, "enabled");

    if (ckpt_pv_kind(precision) == CKPT_PV_ABSENT || ckpt_pv_kind(v) == CKPT_PV_ABSENT)
        return 0;
    return ckpt_pv_kind(v) == CKPT_PV_BOOL ? ckpt_pv_id(v) != 0 : -1;
}

/* Find the dtype to which DeepSpeed converts the model, by its config. */
static bool find_dtype(const struct ckpt_ds_zero *z, enum ckpt_dtype *ret)
{
    const struct ckpt_pickle *p = &z->model.p;
    const ckpt_pv config = ckpt_pv_get(p, p->root, "ds_config");
    const int f16 = is_enabled(p, config, "fp16"), bf16 = is_enabled(p, config, "bf16"),
              old = is_enabled(p, config, "bfloat16");

    if (ckpt_pv_npair(p, config) == 0 || f16 < 0 || bf16 < 0 || old < 0 ||
        ckpt_pv_len(p, ckpt_pv_get(p, config, "keep_in_fp32_modules")))
        return false;
    *ret = f16 ? CKPT_F16 : bf16 || old ? CKPT_BF16 : CKPT_F32;
    return true;
}

/* ---- all ranks ---- */

static int check_all(struct ckpt_ds_pipe *p, const struct ckpt_ds_zero *rank, uint64_t n,
                     struct ckpt_err *err)
{
    for (uint64_t i = 0; i < n; i++)
        if (check_buffers(&rank[i], err) < 0)
            return -1;
    for (size_t i = 0; i < p->listed.len; i++)
        if (check_copy(p, &rank[0], &p->listed.ptr[i], err) < 0)
            return -1;
    ckpt_catalog_warn(rank[0].job->cat,
                      "'%s': parameters that were not trained, if the pipeline had any, are "
                      "in the tag that it was made of only",
                      ckpt_dir_path(rank[0].job->dir));
    return check_rules(p, &rank[0], err);
}

int ckpt_ds_pipe_read(const struct ckpt_ds_zero *rank, uint64_t n, struct ckpt_ds_pipe *ret,
                      struct ckpt_err *err)
{
    for (uint64_t i = 0; i < n; i++)
        if (add_rank(ret, &rank[i], err) < 0)
            return -1;
    /* a layer that is not tied is in one stage, so that as many ranks list its parameters as are
     * tensor-parallel */
    ret->ntp = 1;
    for (size_t i = 0; i < ret->listed.len; i++)
        if (!ckpt_has_prefix(ret->listed.ptr[i].param->name, TIED))
            ret->ntp = ckpt_max_u64(ret->ntp, ret->listed.ptr[i].nrank);
    if (!(ret->has_trained = find_dtype(&rank[0], &ret->trained)) && !rank[0].job->opt->masters)
        ckpt_catalog_warn(rank[0].job->cat,
                          "'%s/%s': its ds_config does not say in which dtype the pipeline was "
                          "trained: its F32 masters are shown",
                          ckpt_dir_path(rank[0].job->dir), rank[0].model_name);
    return check_all(ret, rank, n, err);
}

bool ckpt_ds_pipe_fits(const struct ckpt_ds_pipe *p, const struct ckpt_ds_listed *listed,
                       const struct ckpt_torch_tensor *s, bool cut)
{
    const struct ckpt_ds_param *param = listed->param;
    const uint64_t ncopy = listed->nrank / p->ntp, whole = listed->numel / ncopy;
    const uint32_t kept = cut ? 1 : 0;

    if (s->rank != param->rank || s->rank < kept)
        return false;
    if (cut || p->ntp == 1)
        return memcmp(s->dim + kept, param->dim + kept, (s->rank - kept) * sizeof *s->dim) == 0 &&
               s->numel <= whole;
    return s->numel == whole || s->numel == param->numel;
}
