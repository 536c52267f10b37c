/* SPDX-License-Identifier: Apache-2.0 */
/* Reading the files of all data-parallel ranks. */
#include <stdlib.h>
#include <string.h>

#include "base/par.h"
#include "format/deepspeed/zero.h"

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

static int make_room(struct ckpt_ds_zero *z, struct ckpt_err *err)
{
    for (uint64_t r = 0; r < z->world; r++) {
        struct ckpt_ds_optim *o;
        struct ckpt_ds_rank_model *m;
        if (ckpt_vec_add(&z->optim, &o) < 0 || (z->zero3 && ckpt_vec_add(&z->rank_model, &m) < 0))
            return ckpt_nomem(err);
    }
    return 0;
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
    const unsigned nthread = z->job->opt->nthread;

    if (ckpt_ds_zero_check_files(z, err) < 0 || make_room(z, err) < 0 ||
        ckpt_parallel(z->optim.len, nthread, read_optim, z, err) < 0 ||
        ckpt_parallel(z->rank_model.len, nthread, read_rank_model, z, err) < 0)
        return -1;
    return ckpt_ds_zero_check_ranks(z, err) < 0 || add_sources(z, err) < 0 ||
                   ckpt_ds_zero_lay(z, err) < 0
               ? -1
               : 0;
}
