/* SPDX-License-Identifier: Apache-2.0 */
/* Reading experts.
 *
 * A file has one expert, under the number that it has among all experts of its layer. With ZeRO 1
 * and 2 the experts' parameters form groups of their own. Let such a group have a partition_count
 * of c, with w data-parallel ranks; then there are w / c expert-parallel ranks. Expert-parallel
 * rank e has consecutive experts, which it numbers from 0 in param_shapes, and the partitions of
 * ranks e, e + w / c, e + 2 w / c, ... form its buffer. DeepSpeed can also be told to divide the
 * ranks in another way (use_data_before_expert_parallelism), which no file records; the values
 * tell. */
#include "format/deepspeed/load.h"

#include <inttypes.h>
#include <string.h>

#include "base/str.h"

struct experts {
    struct ckpt_ds_zero *z;
    struct ckpt_ds_parts *weights, *moments;
    bool masters, states;             /* are wanted and there */
    const struct ckpt_ds_entry *file; /* the current file */
    uint64_t of;                      /* number of experts of its layer */
    bool checked;                     /* a value of the file has been compared with its master */
    uint64_t found;                   /* tensors whose parameter is known */
    size_t nmoment;                   /* moments of other parameters */
};

/* One parameter of one expert: where its masters and moments are. */
struct place {
    const struct ckpt_ds_param *param;
    uint64_t first, stride; /* data-parallel ranks first, first + stride, ... */
};

/* ---- places ---- */

/* Find the parameter that param_shapes lists with another number in place of an expert's. */
static const struct ckpt_ds_param *find_local(const struct ckpt_ds_zero *z, const char *name,
                                              size_t prefix, const char *rest, uint64_t number,
                                              struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *local =
        ckpt_asprintf("%.*s%" PRIu64 "%s", (int)prefix, name, number, rest);

    if (!local) {
        (void)ckpt_nomem(err);
        return NULL;
    }
    const struct ckpt_ds_param *p = ckpt_ds_zero_param(z, local);
    if (!p)
        (void)ckpt_fail(err, CKPT_CONFLICT, "'%s/%s' does not list '%s', which '%s' needs",
                        ckpt_dir_path(z->job->dir), z->model_name, local, name);
    return p;
}

/* The number of ranks over which a group is partitioned. */
static int count_of(const struct ckpt_ds_zero *z, uint64_t group, uint64_t *ret,
                    struct ckpt_err *err)
{
    for (size_t r = 0; r < z->optim.len; r++) {
        const struct ckpt_ds_optim *o = &z->optim.ptr[r];
        const uint64_t n = group < o->count.len ? o->count.ptr[group] : 0;
        if (n < 1 || z->world % n != 0 || (r && n != *ret))
            return ckpt_fail(err, CKPT_CONFLICT,
                             "'%s': partition_count of group %" PRIu64 " is %" PRIu64
                             " in the optimizer file of rank %zu of %" PRIu64
                             ": files of different saves?",
                             ckpt_dir_path(z->job->dir), group, n, r, z->world);
        *ret = n;
    }
    return 0;
}

static int find_place(const struct experts *x, const char *name, struct place *ret,
                      struct ckpt_err *err)
{
    const size_t prefix = ckpt_ds_expert_number(name);
    const char *end = name + prefix + strspn(name + prefix, "0123456789");
    unsigned long long number;
    uint64_t count = 0;

    if (!prefix || !ckpt_parse_u64(name + prefix, (size_t)(end - name) - prefix, &number) ||
        number != x->file->is.expert)
        return ckpt_fail(err, CKPT_FORMAT, "'%s/%s': '%s' does not have the number of its expert",
                         ckpt_dir_path(x->z->job->dir), x->file->name, name);
    const struct ckpt_ds_param *any = find_local(x->z, name, prefix, end, 0, err);
    if (!any || count_of(x->z, any->group, &count, err) < 0)
        return -1;
    ret->stride = x->z->world / count;
    if (x->of % ret->stride != 0)
        return ckpt_fail(err, CKPT_CONFLICT,
                         "'%s': %" PRIu64 " experts do not divide over %" PRIu64
                         " expert-parallel ranks, which partition_count says there are",
                         ckpt_dir_path(x->z->job->dir), x->of, ret->stride);
    const uint64_t each = x->of / ret->stride;
    ret->first = number / each;
    ret->param = find_local(x->z, name, prefix, end, number % each, err);
    return ret->param ? 0 : -1;
}

/* ---- one tensor ---- */

/* Add a master (key NULL) or a moment of a parameter, under a name. */
static int add_state(const struct experts *x, const struct place *at, const char *key,
                     const char *name, struct ckpt_ds_parts *out, struct ckpt_err *err)
{
    struct ckpt_ds_buffer b = {0};
    const struct ckpt_ds_param *p = at->param;
    int result = -1;

    if (ckpt_ds_zero_group_buffer(x->z, p->group, key, at->first, at->stride, &b, err) == 0 &&
        ckpt_ds_zero_check_group(x->z, p->group, x->z->world / at->stride, &b, err) == 0 &&
        ckpt_ds_parts_add(out, name, b.dtype, p->dim, p->rank, err) == 0)
        result = p->numel ? ckpt_ds_buffer_take(&b, p->offset, p->numel, out, err) : 0;
    ckpt_ds_buffer_release(&b);
    return result;
}

/* Check that the file's tensor has the parameter's shape, and, once per file, its values. */
static int check_tensor(struct experts *x, const struct place *at, const char *name,
                        const struct ckpt_torch_file *f, const struct ckpt_torch_tensor *s,
                        struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_ds_parts_release) struct ckpt_ds_parts master = {0};

    if (!ckpt_ds_param_fits(at->param, s))
        return ckpt_fail(err, CKPT_CONFLICT,
                         "'%s/%s': '%s' has one shape there and another one in param_shapes",
                         ckpt_dir_path(x->z->job->dir), x->file->name, name);
    if (x->checked)
        return 0;
    x->checked = true;
    return add_state(x, at, NULL, name, &master, err) < 0 ||
                   ckpt_ds_spot_check_part(x->z->job, f, x->file->name, s, &master, 0, err) < 0
               ? -1
               : 0;
}

static int add_moments(const struct experts *x, const struct place *at, const char *name,
                       struct ckpt_err *err)
{
    const struct ckpt_ds_optim *o = &x->z->optim.ptr[at->first];

    for (size_t i = 0; i < o->moment.len; i++) {
        if (o->moment.ptr[i].group != at->param->group)
            continue;
        const char *key = o->moment.ptr[i].key;
        ckpt_cleanup(ckpt_freep) char *own = ckpt_asprintf("optim.state.%s.%s", name, key);
        const char *param = ckpt_arena_strdup(&x->moments->names, name);
        if (!own || !param)
            return ckpt_nomem(err);
        if (add_state(x, at, key, own, x->moments, err) < 0)
            return -1;
        ckpt_ds_parts_last(x->moments)->param = param;
    }
    return 0;
}

/* Find the tensor's parameter, and add its moments. */
static int add_states(struct experts *x, const char *name, const struct ckpt_torch_file *f,
                      const struct ckpt_torch_tensor *s, struct place *ret, struct ckpt_err *err)
{
    if (find_place(x, name, ret, err) < 0 || check_tensor(x, ret, name, f, s, err) < 0 ||
        (x->states && add_moments(x, ret, name, err) < 0))
        return -1;
    x->found++;
    return 0;
}

/* Weights can be shown without states: leave all experts' states out. */
static int drop_states(struct experts *x, const struct ckpt_err *why, struct ckpt_err *err)
{
    if (x->masters || why->code == CKPT_NOMEM)
        return ckpt_err_move(err, why);
    ckpt_catalog_warn(x->z->job->cat, "left out: the optimizer's states of experts: %s", why->text);
    x->states = false;
    x->moments->part.len = x->nmoment;
    return 0;
}

static int add_expert(void *ctx, const char *name, const struct ckpt_torch_file *f,
                      const struct ckpt_torch_tensor *s, uint32_t source, struct ckpt_err *err)
{
    struct experts *x = ctx;
    struct place at = {0};
    struct ckpt_err e = {0};

    if ((x->masters || x->states) && add_states(x, name, f, s, &at, &e) < 0 &&
        drop_states(x, &e, err) < 0)
        return -1;
    return x->masters ? add_state(x, &at, NULL, name, x->weights, err)
                      : ckpt_ds_parts_stored(x->weights, name, s, source, err);
}

/* ---- all files ---- */

static bool has_expert(const struct ckpt_ds_tag *tag, uint64_t layer, uint64_t expert)
{
    for (size_t i = 0; i < tag->files.len; i++) {
        const struct ckpt_ds_file_name *f = &tag->files.ptr[i].is;
        if (f->role == CKPT_DS_EXPERT && f->layer == layer && f->expert == expert && f->mp == 0)
            return true;
    }
    return false;
}

/* num_experts is a list with one number per MoE layer. Get that of a layer; false: there is none.
 */
static bool experts_of(const struct ckpt_ds_zero *z, uint64_t layer, uint64_t *ret)
{
    const struct ckpt_pickle *p = &z->model.p;
    const ckpt_pv list = ckpt_pv_get(p, p->root, "num_experts");
    int64_t n;

    if (layer >= ckpt_pv_len(p, list) || !ckpt_pv_int(ckpt_pv_at(p, list, layer), &n) || n < 0)
        return false;
    *ret = (uint64_t)n;
    return true;
}

/* Check that all experts have files. *ret is the total number of experts. */
static int check_experts(const struct ckpt_ds_zero *z, size_t *ret, struct ckpt_err *err)
{
    const struct ckpt_pickle *p = &z->model.p;
    const ckpt_pv list = ckpt_pv_get(p, p->root, "num_experts");

    *ret = 0;
    if (!ckpt_pv_is_seq(list))
        return ckpt_fail(err, CKPT_FORMAT, "'%s/%s' does not say num_experts",
                         ckpt_dir_path(z->job->dir), z->model_name);
    for (size_t i = 0; i < ckpt_pv_len(p, list); i++) {
        uint64_t n;
        if (!experts_of(z, i, &n))
            return ckpt_fail(err, CKPT_FORMAT, "num_experts[%zu] is not a number", i);
        for (uint64_t e = 0; e < n; e++)
            if (!has_expert(z->job->tag, i, e))
                return ckpt_fail(err, CKPT_MISSING,
                                 "'%s': layer_%zu_expert_%" PRIu64
                                 "_mp_rank_00_model_states.pt is missing: '%s' says that MoE layer "
                                 "%zu has %" PRIu64 " experts",
                                 ckpt_dir_path(z->job->dir), i, e, z->model_name, i, n);
        *ret += (size_t)n;
    }
    return 0;
}

static int read_files(struct experts *x, struct ckpt_err *err)
{
    const struct ckpt_ds_tag *tag = x->z->job->tag;

    for (size_t i = 0; i < tag->files.len; i++) {
        x->file = &tag->files.ptr[i];
        if (x->file->is.role != CKPT_DS_EXPERT)
            continue;
        x->checked = false;
        if (!experts_of(x->z, x->file->is.layer, &x->of) ||
            ckpt_ds_layers_each(x->z->job, x->file->name, add_expert, x, err) < 0)
            return -1;
    }
    return 0;
}

/* Check that every expert's parameter in param_shapes was found in the files of as many experts as
 * there are expert-parallel ranks. */
static int check_found(const struct experts *x, struct ckpt_err *err)
{
    uint64_t want = 0, count = 0;

    for (size_t i = 0; i < x->z->param.len; i++) {
        const struct ckpt_ds_param *p = &x->z->param.ptr[i];
        if (!ckpt_ds_zero_is_expert(x->z, p->name))
            continue;
        if (count_of(x->z, p->group, &count, err) < 0)
            return -1;
        want += x->z->world / count;
    }
    return want == x->found
               ? 0
               : ckpt_fail(err, CKPT_CONFLICT,
                           "'%s': the experts' files have %" PRIu64 " tensors, '%s' lists %" PRIu64
                           ": files of different saves?",
                           ckpt_dir_path(x->z->job->dir), x->found, x->z->model_name, want);
}

int ckpt_ds_experts_read(struct ckpt_ds_zero *z, struct ckpt_ds_parts *weights,
                         struct ckpt_ds_parts *moments, struct ckpt_err *err)
{
    const bool has_ranks = z->optim.len > 0;
    struct experts x = {.z = z,
                        .weights = weights,
                        .moments = moments,
                        .nmoment = moments->part.len,
                        .masters = has_ranks && z->job->opt->masters,
                        .states = has_ranks && z->job->opt->states};
    const struct ckpt_ds_entry *last = NULL;
    const size_t have = ckpt_ds_tag_count(z->job->tag, CKPT_DS_EXPERT, &last);
    struct ckpt_err e = {0};
    size_t n;

    if (check_experts(z, &n, err) < 0)
        return -1;
    if (have != n || (last && last->is.old_expert))
        return ckpt_fail(err, CKPT_CONFLICT,
                         "'%s' holds %zu experts' files ('%s' first), '%s' says %zu: files of "
                         "several saves, or of tensor-parallel ranks",
                         ckpt_dir_path(z->job->dir), have, last ? last->name : "none",
                         z->model_name, n);
    if (read_files(&x, err) < 0)
        return -1;
    return (x.masters || x.states) && check_found(&x, &e) < 0 ? drop_states(&x, &e, err) : 0;
}
