/* SPDX-License-Identifier: Apache-2.0 */
/* Reading a universal checkpoint. */
#include "format/deepspeed/load.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/par.h"
#include "base/str.h"

#define MASTER "fp32"

/* One file: a parameter's master or one of its moments. */
struct state {
    struct ckpt_ds_listed of; /* the parameter */
    const char *folder;       /* torch's wrapper, too, is in its name */
    char *key;                /* "fp32", "exp_avg" */
    struct ckpt_source *source;
    struct ckpt_torch_tensor at;
    bool flat;       /* stage 3: the file does not record the shape */
    bool vocabulary; /* truncated to the unpadded vocabulary */
    uint32_t index;
    struct ckpt_err err; /* why it could not be read */
};

struct load {
    struct ckpt_ds_zero *z; /* of the first rank */
    uint64_t nmp;
    const struct ckpt_ds_pipe *pipe; /* NULL: not a pipeline */
    struct ckpt_dir *zero;
    CKPT_VEC(struct state) states; /* for each parameter the master first */
    struct ckpt_ds_parts *weights, *moments;
};

static void load_release(struct load *l)
{
    for (size_t i = 0; i < l->states.len; i++) {
        free(l->states.ptr[i].key);
        ckpt_source_unref(l->states.ptr[i].source);
    }
    ckpt_vec_release(&l->states);
    ckpt_dir_unref(l->zero);
}

/* ---- files ---- */

static int add_file(struct load *l, const struct state *like, const char *key, size_t len,
                    struct ckpt_err *err)
{
    struct state *s;

    if (ckpt_vec_add(&l->states, &s) < 0)
        return ckpt_nomem(err);
    *s = *like;
    return (s->key = strndup(key, len)) ? 0 : ckpt_nomem(err);
}

static int list_param(struct load *l, const struct ckpt_ds_listed *of, struct ckpt_err *err)
{
    const char *folder = ckpt_ds_unwrapped_original(&of->z->unwrapped, of->param->name);
    ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *dir = NULL;
    ckpt_cleanup(ckpt_entries_release) struct ckpt_entries entries = {0};
    ckpt_cleanup(ckpt_freep) char *master = ckpt_asprintf("%s/" MASTER ".pt", folder);
    const struct state like = {.of = *of, .folder = folder};
    struct ckpt_entry e;

    if (!master)
        return ckpt_nomem(err);
    if (strchr(folder, '/') || !ckpt_dir_has_file(l->zero, master))
        return ckpt_fail(err, CKPT_MISSING,
                         "'%s/%s' is missing: '%s' says that the model has this parameter",
                         ckpt_dir_path(l->zero), master, of->z->model_name);
    if (add_file(l, &like, MASTER, strlen(MASTER), err) < 0)
        return -1;
    if (!l->z->job->opt->states)
        return 0;
    if (ckpt_dir_open_below(l->zero, folder, &dir, err) < 0 ||
        ckpt_entries_read(dir, &entries, err) < 0)
        return -1;
    while (ckpt_entries_next(&entries, &e))
        if (e.kind != CKPT_ENTRY_DIR && ckpt_has_suffix(e.name, ".pt") &&
            strcmp(e.name, MASTER ".pt") != 0 && strcmp(e.name, "step.pt") != 0 &&
            add_file(l, &like, e.name, strlen(e.name) - strlen(".pt"), err) < 0)
            return -1;
    return 0;
}

/* Read a state: a tensor, or a dict that has it as "param". */
static int read_state(struct load *l, struct state *s, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *name = ckpt_asprintf("%s/%s.pt", s->folder, s->key);
    ckpt_cleanup(ckpt_torch_file_release) struct ckpt_torch_file f = {0};

    if (!name)
        return ckpt_nomem(err);
    if (ckpt_torch_file_open(l->zero, name, l->z->job->opt->pool, &f, err) < 0)
        return -1;
    s->source = ckpt_source_ref(f.source);
    const bool dict = ckpt_pv_kind(f.p.root) == CKPT_PV_DICT;
    const ckpt_pv v = dict ? ckpt_pv_get(&f.p, f.p.root, "param") : f.p.root;
    if (ckpt_torch_file_tensor(&f, v, &s->at, err) < 0)
        return ckpt_err_in(err, "'%s/%s'", ckpt_dir_path(l->zero), name);
    const ckpt_pv vocabulary = ckpt_pv_get(&f.p, f.p.root, "vocab_tensor");
    s->flat = !dict;
    s->vocabulary = ckpt_pv_kind(vocabulary) == CKPT_PV_BOOL && ckpt_pv_id(vocabulary);
    return 0;
}

static int read_one(void *ctx, size_t i, struct ckpt_err *err)
{
    struct load *l = ctx;
    struct state *s = &l->states.ptr[i];

    if (read_state(l, s, &s->err) == 0)
        return 0;
    const bool optional = strcmp(s->key, MASTER) != 0 && s->err.code != CKPT_NOMEM;
    return optional ? 0 : ckpt_err_move(err, &s->err);
}

/* The parameters of the module are those of one rank. */
static int list_params(struct load *l, struct ckpt_err *err)
{
    const size_t n = l->pipe ? l->pipe->listed.len : l->z->param.len;

    for (size_t i = 0; i < n; i++) {
        const struct ckpt_ds_listed own = {.z = l->z, .param = &l->z->param.ptr[i]};
        if (list_param(l, l->pipe ? &l->pipe->listed.ptr[i] : &own, err) < 0)
            return -1;
    }
    return 0;
}

/* ---- tensors ---- */

static int fail_shape(const struct load *l, const struct state *s, struct ckpt_err *err)
{
    return ckpt_fail(err, CKPT_CONFLICT,
                     "'%s/%s/%s.pt' has %" PRIu64 " elements in a shape other than param_shapes "
                     "in '%s' says (%" PRIu64 " elements)",
                     ckpt_dir_path(l->zero), s->folder, s->key, s->at.numel, s->of.z->model_name,
                     s->of.param->numel);
}

/* The shape, from the file, or for a flat tensor from the copied model file. */
static int shape_of(const struct load *l, const struct state *s, struct ckpt_torch_tensor *ret,
                    struct ckpt_err *err)
{
    const struct ckpt_ds_param *p = s->of.param;
    const bool whole = l->nmp == 1 && !s->vocabulary;

    *ret = s->at;
    if (l->pipe)
        return !s->flat && ckpt_ds_pipe_fits(l->pipe, &s->of, &s->at, s->vocabulary)
                   ? 0
                   : fail_shape(l, s, err);
    if (!s->flat && (!whole || ckpt_ds_param_fits(p, &s->at)))
        return 0;
    if (!s->flat || s->at.rank != 1 || s->at.numel != p->numel || !s->at.contiguous)
        return fail_shape(l, s, err);
    ret->rank = p->rank;
    memcpy(ret->dim, p->dim, p->rank * sizeof *p->dim);
    return 0;
}

static int add_moment(struct load *l, struct state *s, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *name =
        ckpt_asprintf("optim.state.%s.%s", s->of.param->name, s->key);
    struct ckpt_torch_tensor at;
    struct ckpt_err e = s->err;

    if (!name)
        return ckpt_nomem(err);
    if (e.code == CKPT_OK && s->at.numel == 1 && s->of.param->numel != 1)
        return 0; /* a number */
    if (e.code == CKPT_OK && shape_of(l, s, &at, &e) == 0)
        return ckpt_ds_parts_stored(l->moments, name, &at, s->index, err);
    ckpt_catalog_warn(l->z->job->cat, "left out: '%s': %s", name, e.text);
    return 0;
}

/* Compare the last weight with the copied module, because conversions of runs with
 * round_robin_gradients have their parameters in a wrong order. A placeholder says nothing. */
static int check_module(const struct load *l, const char *name, const struct ckpt_torch_tensor *own,
                        struct ckpt_err *err)
{
    bool same = true;

    if (!l->z->zero3 && l->nmp == 1 && own->numel &&
        ckpt_ds_spot_same(l->z->job, l->weights, l->weights->part.len - 1, &l->z->model, own, &same,
                          err) < 0)
        return -1;
    return same ? 0
                : ckpt_fail(
                      err, CKPT_CONFLICT,
                      "'%s/%s/" MASTER ".pt', rounded, is not the weight in '%s': a run with "
                      "round_robin_gradients, which ds_to_universal scrambles, or another save; "
                      "open the tag that it was made of",
                      ckpt_dir_path(l->zero), name, l->z->model_name);
}

/* The master of a parameter, or NULL. */
static const struct state *find_master(const struct load *l, const char *name)
{
    const struct ckpt_ds_param *param = ckpt_ds_zero_param(l->z, name);

    for (size_t i = 0; param && i < l->states.len; i++)
        if (l->states.ptr[i].of.param == param)
            return &l->states.ptr[i];
    return NULL;
}

/* Add a tensor that the optimizer did not have. */
static int add_other(struct load *l, const char *name, const struct ckpt_torch_tensor *own,
                     struct ckpt_err *err)
{
    if (l->z->zero3 && own->numel == 0 && !ckpt_ds_is_buffer(&l->z->model, name))
        return ckpt_fail(err, CKPT_MISSING,
                         "'%s': the values of '%s' (a frozen parameter?) are not in this universal "
                         "checkpoint: open the tag that it was made of",
                         ckpt_dir_path(l->z->job->dir), name);
    if (l->nmp > 1 && !ckpt_ds_is_buffer(&l->z->model, name))
        return ckpt_fail(err, CKPT_UNSUPPORTED,
                         "'%s': '%s' is not among the parameters, and how the parts of %" PRIu64
                         " tensor-parallel ranks join is not known",
                         ckpt_dir_path(l->z->job->dir), name, l->nmp);
    return ckpt_ds_parts_stored(l->weights, name, own, l->z->model_index, err);
}

static int add_entry(void *ctx, const char *name, ckpt_pv v, struct ckpt_err *err)
{
    struct load *l = ctx;
    const char *owner = ckpt_ds_owner(&l->z->model, name);
    const struct state *s = find_master(l, name);
    struct ckpt_torch_tensor at, own;

    if (ckpt_torch_file_tensor(&l->z->model, v, &own, err) < 0)
        return ckpt_err_in(err, "'%s/%s': '%s'", ckpt_dir_path(l->z->job->dir), l->z->model_name,
                           name);
    if (!s && owner)
        s = find_master(l, owner);
    if (!s)
        return add_other(l, name, &own, err);
    if (shape_of(l, s, &at, err) < 0 ||
        ckpt_ds_parts_stored(l->weights, name, &at, s->index, err) < 0 ||
        check_module(l, s->of.param->name, &own, err) < 0)
        return -1;
    if (ckpt_dtype_is_castable(own.dtype))
        ckpt_ds_parts_last(l->weights)->wanted = (uint8_t)(own.dtype + 1);
    return 0;
}

static int add_sources(struct load *l, struct ckpt_err *err)
{
    for (size_t i = 0; i < l->states.len; i++) {
        struct state *s = &l->states.ptr[i];
        if (s->err.code == CKPT_OK &&
            (s->index = ckpt_catalog_add_source(l->z->job->cat, s->source, err)) == UINT32_MAX)
            return -1;
    }
    return 0;
}

/* Add the master of a pipeline's parameter, to be shown in the dtype in which it was trained. */
static int add_master(struct load *l, const struct state *s, struct ckpt_err *err)
{
    struct ckpt_torch_tensor at;

    if (shape_of(l, s, &at, err) < 0 ||
        ckpt_ds_parts_stored(l->weights, s->of.param->name, &at, s->index, err) < 0)
        return -1;
    if (l->pipe->has_trained)
        ckpt_ds_parts_last(l->weights)->wanted = (uint8_t)(l->pipe->trained + 1);
    return 0;
}

/* ---- load ---- */

int ckpt_ds_universal_read(struct ckpt_ds_zero *z, uint64_t nmp, const struct ckpt_ds_pipe *pipe,
                           struct ckpt_ds_parts *weights, struct ckpt_ds_parts *moments,
                           struct ckpt_err *err)
{
    ckpt_cleanup(load_release) struct load l = {
        .z = z, .nmp = nmp, .pipe = pipe, .weights = weights, .moments = moments};
    const struct ckpt_pickle *p = &z->model.p;

    if (ckpt_dir_open_below(z->job->dir, "zero", &l.zero, err) < 0 || list_params(&l, err) < 0 ||
        ckpt_parallel(l.states.len, 0, read_one, &l, err) < 0 || add_sources(&l, err) < 0 ||
        (!pipe && ckpt_pickle_each(p, ckpt_pv_get(p, p->root, "module"), true, z->model_name,
                                   add_entry, &l, err) < 0))
        return -1;
    for (size_t i = 0; i < l.states.len; i++) {
        struct state *s = &l.states.ptr[i];
        const bool master = strcmp(s->key, MASTER) == 0;
        if ((!master ? add_moment(&l, s, err) : pipe ? add_master(&l, s, err) : 0) < 0)
            return -1;
    }
    return 0;
}
