/* SPDX-License-Identifier: Apache-2.0 */
/* Making tensors from a module's state dict and the flat buffers of its parameters. */
#include "format/deepspeed/load.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/ckd.h"
#include "base/str.h"

/* ---- tensors of a module ---- */

struct walk {
    struct ckpt_ds_zero *z;
    struct ckpt_torch_file *f;
    struct ckpt_ds_parts *out;
    struct ckpt_ds_buffer *buffers; /* the masters; NULL: not used */
    struct ckpt_map frozen;         /* number of each fragment, by name */
};

void ckpt_ds_masters_free(const struct ckpt_ds_zero *z, struct ckpt_ds_buffer *b)
{
    for (size_t i = 0; b && i < ckpt_ds_zero_nbuffer(z); i++)
        ckpt_ds_buffer_release(&b[i]);
    free(b);
}

static struct ckpt_ds_buffer *new_buffers(const struct ckpt_ds_zero *z)
{
    return calloc(ckpt_ds_zero_nbuffer(z) + 1, sizeof(struct ckpt_ds_buffer));
}

int ckpt_ds_masters_new(const struct ckpt_ds_zero *z, struct ckpt_ds_buffer **ret,
                        struct ckpt_err *err)
{
    if (!(*ret = new_buffers(z)))
        return ckpt_nomem(err);
    if (ckpt_ds_zero_buffers(z, NULL, *ret, err) < 0)
        return ckpt_err_in(err, "'%s'", ckpt_dir_path(z->job->dir));
    return ckpt_ds_zero_check(z, *ret, err);
}

/* ---- frozen parameters of stage 3 ---- */

static int index_frozen(struct walk *w, struct ckpt_err *err)
{
    const struct ckpt_ds_rank_model *m = w->z->rank_model.ptr;

    for (size_t i = 0; w->z->rank_model.len && i < m->fragment.len; i++)
        if (ckpt_map_add(&w->frozen, m->fragment.ptr[i].name, (uint32_t)i) == CKPT_NONE)
            return ckpt_nomem(err);
    return 0;
}

static const struct ckpt_ds_fragment *find_fragment(const struct ckpt_ds_rank_model *m, size_t at,
                                                    const char *name)
{
    if (at < m->fragment.len && strcmp(m->fragment.ptr[at].name, name) == 0)
        return &m->fragment.ptr[at];
    for (size_t i = 0; i < m->fragment.len; i++)
        if (strcmp(m->fragment.ptr[i].name, name) == 0)
            return &m->fragment.ptr[i];
    return NULL;
}

/* Join the slices of all ranks, one after the other, and truncate the result to the shape. */
static int join_fragments(struct walk *w, const char *name, size_t at, uint64_t numel,
                          struct ckpt_err *err)
{
    const struct ckpt_ds_part *part = ckpt_ds_parts_last(w->out);
    const uint64_t world = w->z->world, slice = numel / world + (numel % world != 0);

    for (uint64_t r = 0, lo = 0; lo < numel; r++, lo += slice) {
        const struct ckpt_ds_rank_model *m = &w->z->rank_model.ptr[r];
        const struct ckpt_ds_fragment *f = find_fragment(m, at, name);
        const uint64_t n = ckpt_min_u64(numel - lo, slice);
        if (!f || f->at.rank != 1 || !f->at.contiguous || f->at.numel < n ||
            f->at.dtype != part->dtype)
            return ckpt_fail(err, CKPT_CONFLICT,
                             "'%s': the model file of rank %" PRIu64 " has no slice of %" PRIu64
                             " elements of the frozen parameter '%s'",
                             ckpt_dir_path(w->z->job->dir), r, n, name);
        if (ckpt_ds_parts_extend(w->out, m->index, f->at.off, n, err) < 0)
            return -1;
    }
    return 0;
}

static int add_frozen(struct walk *w, const char *name, size_t at, struct ckpt_err *err)
{
    const struct ckpt_ds_fragment *first = &w->z->rank_model.ptr[0].fragment.ptr[at];
    const ckpt_pv shapes = ckpt_pv_get(&w->f->p, w->f->p.root, "frozen_param_shapes");
    uint64_t dim[CKPT_MAX_RANK], numel;
    uint32_t rank;

    if (ckpt_ds_file_shape(w->f, ckpt_pv_get(&w->f->p, shapes, name), dim, &rank, err) < 0)
        return ckpt_err_in(err, "frozen_param_shapes: '%s'", name);
    (void)ckpt_shape_numel(dim, rank, &numel);
    return ckpt_ds_parts_add(w->out, name, first->at.dtype, dim, rank, err) < 0
               ? -1
               : join_fragments(w, name, at, numel, err);
}

/* ---- one tensor ---- */

/* Add a parameter's master, to be shown in the dtype of the module. */
static int add_param(struct walk *w, const struct ckpt_ds_param *param, const char *name,
                     const struct ckpt_torch_tensor *as, struct ckpt_err *err)
{
    if (ckpt_ds_zero_add(w->z, w->buffers, param, name, w->out, err) < 0)
        return -1;
    if (w->z->zero3 && as && ckpt_dtype_is_castable(as->dtype))
        ckpt_ds_parts_last(w->out)->wanted = (uint8_t)(as->dtype + 1);
    return 0;
}

/* With stage 3 a module has placeholders; add the tensor that one represents. */
static int add_placeholder(struct walk *w, const char *name, const struct ckpt_torch_tensor *s,
                           struct ckpt_err *err)
{
    const char *owner = ckpt_ds_owner(w->z->shared_in, name);
    const struct ckpt_ds_param *param = ckpt_ds_zero_param(w->z, name);
    uint32_t at, done;

    if (!param && owner)
        param = ckpt_ds_zero_param(w->z, owner);
    if (param)
        return add_param(w, param, name, s, err);
    if ((at = ckpt_map_find(&w->frozen, name)) != CKPT_NONE)
        return add_frozen(w, name, at, err);
    if (owner && (at = ckpt_map_find(&w->frozen, owner)) != CKPT_NONE &&
        (done = ckpt_ds_parts_find(w->out, owner)) != CKPT_NONE)
        return ckpt_ds_parts_alias(w->out, name, done, err);
    if (s->numel > 0 || ckpt_ds_is_buffer(w->f, name))
        return ckpt_ds_parts_stored(w->out, name, s, w->z->model_index, err);
    return ckpt_fail(err, CKPT_MISSING,
                     "'%s' has only a placeholder for '%s', and no file of ZeRO 3 has its values",
                     w->z->model_name, name);
}

/* With stages 0 to 2, add the module's own tensor, or the master. */
static int add_whole(struct walk *w, const char *name, const struct ckpt_torch_tensor *s,
                     struct ckpt_err *err)
{
    const struct ckpt_ds_param *param = w->buffers ? ckpt_ds_zero_param(w->z, name) : NULL;
    const char *owner = w->buffers && !param ? ckpt_ds_owner(w->z->shared_in, name) : NULL;

    if (owner)
        param = ckpt_ds_zero_param(w->z, owner);
    if (!param)
        return ckpt_ds_parts_stored(w->out, name, s, w->z->model_index, err);
    if (!ckpt_ds_param_fits(param, s))
        return ckpt_fail(err, CKPT_CONFLICT,
                         "'%s': '%s' has one shape in the module and another one in param_shapes",
                         w->z->model_name, name);
    return add_param(w, param, name, NULL, err);
}

static int add_entry(void *ctx, const char *name, ckpt_pv v, struct ckpt_err *err)
{
    struct walk *w = ctx;
    struct ckpt_torch_tensor s;

    if (ckpt_torch_is_data(&w->f->p, v) && ckpt_pv_kind(v) != CKPT_PV_OPAQUE) {
        ckpt_catalog_warn(w->z->job->cat, "left out: '%s' of '%s' is not a tensor", name,
                          w->z->model_name);
        return 0;
    }
    if (ckpt_torch_file_tensor(w->f, v, &s, err) < 0)
        return ckpt_err_in(err, "'%s/%s': tensor '%s'", ckpt_dir_path(w->z->job->dir),
                           w->z->model_name, name);
    return w->z->zero3 ? add_placeholder(w, name, &s, err) : add_whole(w, name, &s, err);
}

/* Add the parameters that the state dict does not have. */
static int add_others(struct walk *w, struct ckpt_err *err)
{
    for (size_t i = 0; w->buffers && i < w->z->param.len; i++) {
        const struct ckpt_ds_param *param = &w->z->param.ptr[i];
        if (ckpt_ds_parts_find(w->out, param->name) != CKPT_NONE ||
            ckpt_ds_zero_is_expert(w->z, param->name))
            continue;
        if (!w->z->zero3)
            return ckpt_fail(err, CKPT_CONFLICT,
                             "'%s': param_shapes has '%s', which the module does not have",
                             w->z->model_name, param->name);
        ckpt_catalog_warn(w->z->job->cat,
                          "'%s' does not say in which dtype '%s' was trained: shown as F32",
                          w->z->model_name, param->name);
        if (add_param(w, param, param->name, NULL, err) < 0)
            return -1;
    }
    return 0;
}

/* ---- moments ---- */

static int add_moment(struct ckpt_ds_zero *z, const struct ckpt_ds_param *param, const char *key,
                      const struct ckpt_ds_buffer *b, struct ckpt_ds_parts *out,
                      struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *name = ckpt_asprintf("optim.state.%s.%s", param->name, key);
    const size_t before = out->part.len;
    struct ckpt_err e = {0};

    if (!name)
        return ckpt_nomem(err);
    if (ckpt_ds_zero_add(z, b, param, name, out, &e) < 0) {
        if (e.code == CKPT_NOMEM)
            return ckpt_nomem(err);
        out->part.len = before;
        ckpt_catalog_warn(z->job->cat, "left out: '%s': %s", name, e.text);
        return 0;
    }
    const char *own = ckpt_arena_strdup(&out->names, param->name);
    ckpt_ds_parts_last(out)->param = own;
    return own ? 0 : ckpt_nomem(err);
}

static int add_moments(struct ckpt_ds_zero *z, const char *key, struct ckpt_ds_parts *out,
                       struct ckpt_err *err)
{
    struct ckpt_ds_buffer *b = new_buffers(z);
    struct ckpt_err e = {0};
    int result = 0;

    if (!b)
        return ckpt_nomem(err);
    if (ckpt_ds_zero_buffers(z, key, b, &e) < 0)
        ckpt_catalog_warn(z->job->cat, "left out: the optimizer's '%s': %s", key, e.text);
    else
        for (size_t i = 0; i < z->param.len && result == 0; i++)
            if (z->param.ptr[i].name && b[z->zero3 ? 0 : z->param.ptr[i].group].n > 0)
                result = add_moment(z, &z->param.ptr[i], key, b, out, err);
    ckpt_ds_masters_free(z, b);
    return result;
}

/* The keys are those of the first ranks, because the last ones may have none. */
int ckpt_ds_moments_add(struct ckpt_ds_zero *z, struct ckpt_ds_parts *out, struct ckpt_err *err)
{
    const struct ckpt_ds_optim *o = z->optim.ptr;

    if (z->optim.len && o->elastic)
        ckpt_catalog_warn(z->job->cat,
                          "left out: the optimizer's states, which elastic_checkpoint saved in a "
                          "form that is not read");
    for (size_t i = 0; z->optim.len && i < o->moment.len; i++) {
        bool seen = false;
        for (size_t k = 0; k < i; k++)
            seen |= strcmp(o->moment.ptr[k].key, o->moment.ptr[i].key) == 0;
        if (!seen && add_moments(z, o->moment.ptr[i].key, out, err) < 0)
            return -1;
    }
    return 0;
}

/* ---- the module ---- */

/* There are optimizer files, but the model file does not name their parameters: DeepSpeed 0.16 with
 * experts, and 0.19 with a pipeline in BF16 without ZeRO. Refuse masters, leave out states. */
static int refuse_nameless(const struct ckpt_ds_zero *z, struct ckpt_err *err)
{
    static const char why[] = "'%s' has optimizer files, but '%s' has no param_shapes, which says "
                              "which parameters they hold (some versions of DeepSpeed do so with "
                              "experts and pipelines)%s";
    const char *dir = ckpt_dir_path(z->job->dir);

    if (z->job->opt->masters)
        return ckpt_fail(err, CKPT_UNSUPPORTED, why, dir, z->model_name,
                         ": without dtype=float32 the weights are shown as trained");
    if (z->job->opt->states)
        ckpt_catalog_warn(z->job->cat, why, dir, z->model_name,
                          ": the optimizer's states are left out");
    return 0;
}

/* The optimizer's files are read always for stage 3; for other stages if masters or states are
 * wanted. */
int ckpt_ds_module_read_ranks(struct ckpt_ds_zero *z, bool *ret_read, struct ckpt_err *err)
{
    const struct ckpt_reader_options *opt = z->job->opt;
    struct ckpt_err e = {0};

    *ret_read = false;
    if (!z->zero3 && z->group.len == 0) {
        if (ckpt_ds_tag_count(z->job->tag, CKPT_DS_OPTIM, NULL))
            return refuse_nameless(z, err);
        if (opt->states &&
            ckpt_pv_kind(ckpt_pv_get(&z->model.p, z->model.p.root, "optimizer")) == CKPT_PV_DICT)
            ckpt_catalog_warn(z->job->cat,
                              "left out: the optimizer's states in '%s', which have no names (it "
                              "was saved without ZeRO)",
                              z->model_name);
        if (opt->masters)
            ckpt_catalog_warn(z->job->cat,
                              "'%s' keeps no named F32 masters (it was saved without ZeRO): the "
                              "module's own weights are shown as F32",
                              ckpt_dir_path(z->job->dir));
        return 0;
    }
    if (!z->zero3 && !opt->masters && !opt->states)
        return 0;
    if (ckpt_ds_zero_read_ranks(z, &e) == 0) {
        *ret_read = true;
        return 0;
    }
    if (z->zero3 || opt->masters || e.code == CKPT_NOMEM)
        return ckpt_err_move(err, &e);
    ckpt_catalog_warn(z->job->cat, "left out: the optimizer's states: %s", e.text);
    return 0;
}

/* Check by samples that the optimizer's files, whose masters are not shown, are of the weights'
 * save: if they are not, the moments are not, either, or are in another order than param_shapes. */
static int check_save(struct ckpt_ds_zero *z, ckpt_pv module, struct ckpt_err *err)
{
    struct ckpt_ds_parts masters = {0};
    struct ckpt_ds_buffer *b = NULL;
    int result = ckpt_ds_masters_new(z, &b, err);

    for (size_t i = 0; i < z->param.len && result == 0; i++) {
        const struct ckpt_ds_param *param = &z->param.ptr[i];
        if (param->name && b[param->group].n > 0)
            result = ckpt_ds_zero_add(z, b, param, param->name, &masters, err);
    }
    if (result == 0)
        result = ckpt_ds_spot_check(z, module, &masters, err);
    ckpt_ds_masters_free(z, b);
    ckpt_ds_parts_release(&masters);
    return result;
}

/* Add the moments, or tell why there are none. */
static int add_states(struct ckpt_ds_zero *z, ckpt_pv module, bool checked,
                      struct ckpt_ds_parts *moments, struct ckpt_err *err)
{
    struct ckpt_err e = {0};

    if (checked || z->zero3 || check_save(z, module, &e) == 0)
        return ckpt_ds_moments_add(z, moments, err);
    if (e.code == CKPT_NOMEM || e.code == CKPT_IO || e.code == CKPT_STALE)
        return ckpt_err_move(err, &e);
    ckpt_catalog_warn(z->job->cat, "left out: the optimizer's states: %s", e.text);
    return 0;
}

static void walk_release(struct walk *w)
{
    ckpt_ds_masters_free(w->z, w->buffers);
    ckpt_map_release(&w->frozen);
}

int ckpt_ds_module_read(struct ckpt_ds_zero *z, struct ckpt_ds_parts *weights,
                        struct ckpt_ds_parts *moments, struct ckpt_err *err)
{
    ckpt_cleanup(walk_release) struct walk w = {.z = z, .f = &z->model, .out = weights};
    const struct ckpt_pickle *p = &z->model.p;
    const ckpt_pv module = ckpt_pv_get(p, p->root, "module");
    bool has_ranks; /* the optimizer files have been read */

    if (ckpt_pv_kind(module) != CKPT_PV_DICT)
        return ckpt_fail(err, CKPT_FORMAT, "'%s/%s': 'module' is not a state dict",
                         ckpt_dir_path(z->job->dir), z->model_name);
    if (ckpt_ds_module_read_ranks(z, &has_ranks, err) < 0)
        return -1;
    if ((z->zero3 || z->job->opt->masters) && z->optim.len &&
        ckpt_ds_masters_new(z, &w.buffers, err) < 0)
        return -1;
    if (index_frozen(&w, err) < 0 ||
        ckpt_pickle_each(p, module, true, z->model_name, add_entry, &w, err) < 0 ||
        add_others(&w, err) < 0)
        return -1;
    if (w.buffers && !z->zero3 && ckpt_ds_spot_check(z, module, weights, err) < 0)
        return -1;
    return z->job->opt->states && has_ranks ? add_states(z, module, w.buffers != NULL, moments, err)
                                            : 0;
}
