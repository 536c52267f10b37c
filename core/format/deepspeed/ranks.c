/* SPDX-License-Identifier: Apache-2.0 */
/* Reading the files of all data-parallel ranks, and checking that they are of one save. */
#include <inttypes.h>
#include <string.h>

#include "base/par.h"
#include "format/deepspeed/zero.h"

/* ---- checks ---- */

/* Check that there are exactly the ranks 0 to world - 1. */
static int check_ranks(const struct ckpt_ds_zero *z, enum ckpt_ds_role role, struct ckpt_err *err)
{
    const struct ckpt_ds_tag *tag = z->job->tag;
    const bool model = role == CKPT_DS_ZERO3_MODEL;
    uint64_t next = 0;

    for (size_t i = 0; i < tag->files.len; i++) {
        const struct ckpt_ds_file_name *f = &tag->files.ptr[i].is;
        if (f->role != role || f->mp != z->mp)
            continue;
        if (f->dp >= z->world || (next > 0 && f->dp < next))
            return ckpt_fail(err, CKPT_CONFLICT,
                             "'%s' holds files of several saves: '%s' is none of %" PRIu64
                             " data-parallel ranks, which is what '%s' says there are: remove the "
                             "stale ones",
                             ckpt_dir_path(z->job->dir), tag->files.ptr[i].name, z->world,
                             z->model_name);
        if (f->dp != next)
            break;
        next++;
    }
    if (next == z->world)
        return 0;
    return ckpt_fail(err, CKPT_MISSING,
                     "'%s': the %s file of data-parallel rank %" PRIu64 " of %" PRIu64
                     " (*zero_pp_rank_%" PRIu64 "_mp_rank_%02" PRIu64 "_%s_states.pt) is missing",
                     ckpt_dir_path(z->job->dir), model ? "model" : "optimizer", next, z->world,
                     next, z->mp, model ? "model" : "optim");
}

static int check_counts(const struct ckpt_ds_zero *z, const struct ckpt_ds_optim *o, uint64_t rank,
                        struct ckpt_err *err)
{
    uint64_t most = 0;

    for (size_t i = 0; i < o->count.len; i++)
        most = most < o->count.ptr[i] ? o->count.ptr[i] : most;
    if (most != z->world || o->zero3 != z->zero3)
        return ckpt_fail(err, CKPT_CONFLICT,
                         "'%s': the optimizer file of rank %" PRIu64 " is of %" PRIu64
                         " ranks%s, '%s' of %" PRIu64 "%s: files of different saves",
                         ckpt_dir_path(z->job->dir), rank, most, o->zero3 ? " of ZeRO 3" : "",
                         z->model_name, z->world, z->zero3 ? " of ZeRO 3" : "");
    if (!z->zero3 && o->master.len != z->group.len)
        return ckpt_fail(
            err, CKPT_CONFLICT,
            "'%s': the optimizer file of rank %" PRIu64 " has %zu groups of parameters, '%s' %zu",
            ckpt_dir_path(z->job->dir), rank, o->master.len, z->model_name, z->group.len);
    return 0;
}

/* Check that all optimizers have made the same number of steps. */
static int check_steps(const struct ckpt_ds_zero *z, uint64_t rank, struct ckpt_err *err)
{
    const struct ckpt_ds_optim *o = &z->optim.ptr[rank], *first = &z->optim.ptr[0];

    for (size_t i = 0; i < o->step.len; i++)
        for (size_t k = 0; k < first->step.len; k++)
            if (o->step.ptr[i].group == first->step.ptr[k].group &&
                o->step.ptr[i].step != first->step.ptr[k].step)
                return ckpt_fail(err, CKPT_CONFLICT,
                                 "'%s': the optimizer of rank 0 has taken %.0f steps, that of rank "
                                 "%" PRIu64 " %.0f: files of different saves",
                                 ckpt_dir_path(z->job->dir), first->step.ptr[k].step, rank,
                                 o->step.ptr[i].step);
    return 0;
}

static int check_agreement(const struct ckpt_ds_zero *z, struct ckpt_err *err)
{
    for (uint64_t r = 0; r < z->optim.len; r++)
        if (check_counts(z, &z->optim.ptr[r], r, err) < 0 || check_steps(z, r, err) < 0)
            return -1;
    for (size_t r = 1; r < z->rank_model.len; r++)
        if (z->rank_model.ptr[r].has_steps != z->rank_model.ptr[0].has_steps ||
            z->rank_model.ptr[r].steps != z->rank_model.ptr[0].steps)
            return ckpt_fail(err, CKPT_CONFLICT,
                             "'%s': the model file of rank 0 is of step %" PRIu64
                             ", that of rank %zu of step %" PRIu64 ": files of different saves",
                             ckpt_dir_path(z->job->dir), z->rank_model.ptr[0].steps, r,
                             z->rank_model.ptr[r].steps);
    return 0;
}

/* ---- files ---- */

static int read_optim(void *ctx, size_t i, struct ckpt_err *err)
{
    struct ckpt_ds_zero *z = ctx;
    const struct ckpt_ds_job *job = z->job;
    const struct ckpt_ds_entry *e = ckpt_ds_tag_find(job->tag, CKPT_DS_OPTIM, z->mp, i);

    return ckpt_ds_optim_read(job->dir, e->name, job->opt->pool, job->opt->states, &z->optim.ptr[i],
                              err);
}

static int read_fragments(struct ckpt_torch_file *f, struct ckpt_ds_rank_model *m,
                          struct ckpt_err *err)
{
    const struct ckpt_pickle *p = &f->p;
    const ckpt_pv dict = ckpt_pv_get(p, p->root, "frozen_param_fragments");

    for (size_t i = 0; i < ckpt_pv_npair(p, dict); i++) {
        const char *name = ckpt_pv_str(p, ckpt_pv_key(p, dict, i));
        struct ckpt_ds_fragment *fragment;
        if (ckpt_vec_add(&m->fragment, &fragment) < 0 ||
            !(fragment->name = ckpt_arena_strdup(&m->names, name ? name : "")))
            return ckpt_nomem(err);
        if (ckpt_torch_file_tensor(f, ckpt_pv_value(p, dict, i), &fragment->at, err) < 0)
            return ckpt_err_in(err, "frozen_param_fragments: '%s'", fragment->name);
    }
    return 0;
}

static int read_rank_model(void *ctx, size_t i, struct ckpt_err *err)
{
    struct ckpt_ds_zero *z = ctx;
    const struct ckpt_ds_job *job = z->job;
    const struct ckpt_ds_entry *e = ckpt_ds_tag_find(job->tag, CKPT_DS_ZERO3_MODEL, z->mp, i);
    struct ckpt_ds_rank_model *m = &z->rank_model.ptr[i];
    ckpt_cleanup(ckpt_ds_unwrapped_release) struct ckpt_ds_unwrapped unwrapped = {0};
    ckpt_cleanup(ckpt_torch_file_release) struct ckpt_torch_file own = {0};
    struct ckpt_torch_file *f = i ? &own : &z->model;

    if (i && (ckpt_torch_file_open(job->dir, e->name, job->opt->pool, f, err) < 0 ||
              ckpt_ds_file_unwrap(f, &unwrapped, err) < 0))
        return -1;
    m->source = ckpt_source_ref(f->source);
    m->has_steps = ckpt_ds_file_u64(f, f->p.root, "global_steps", &m->steps);
    return read_fragments(f, m, err) < 0
               ? ckpt_err_in(err, "'%s/%s'", ckpt_dir_path(job->dir), e->name)
               : 0;
}

static int add_sources(struct ckpt_ds_zero *z, struct ckpt_err *err)
{
    for (size_t r = 0; r < z->optim.len; r++) {
        struct ckpt_ds_optim *o = &z->optim.ptr[r];
        if ((o->index = ckpt_catalog_add_source(z->job->cat, o->source, err)) == UINT32_MAX)
            return -1;
    }
    for (size_t r = 0; r < z->rank_model.len; r++) {
        struct ckpt_ds_rank_model *m = &z->rank_model.ptr[r];
        m->index = z->model_index;
        if (r && (m->index = ckpt_catalog_add_source(z->job->cat, m->source, err)) == UINT32_MAX)
            return -1;
    }
    return 0;
}

int ckpt_ds_zero_read_ranks(struct ckpt_ds_zero *z, struct ckpt_err *err)
{
    if (z->world < 1)
        return ckpt_fail(err, CKPT_FORMAT, "'%s/%s' does not say dp_world_size",
                         ckpt_dir_path(z->job->dir), z->model_name);
    if ((z->zero3 && check_ranks(z, CKPT_DS_ZERO3_MODEL, err) < 0) ||
        check_ranks(z, CKPT_DS_OPTIM, err) < 0)
        return -1;
    for (uint64_t r = 0; r < z->world; r++) {
        struct ckpt_ds_optim *o;
        struct ckpt_ds_rank_model *m;
        if (ckpt_vec_add(&z->optim, &o) < 0 || (z->zero3 && ckpt_vec_add(&z->rank_model, &m) < 0))
            return ckpt_nomem(err);
    }
    if (ckpt_parallel(z->optim.len, 0, read_optim, z, err) < 0 ||
        ckpt_parallel(z->rank_model.len, 0, read_rank_model, z, err) < 0)
        return -1;
    return check_agreement(z, err) < 0 || add_sources(z, err) < 0 || ckpt_ds_zero_lay(z, err) < 0
               ? -1
               : 0;
}
