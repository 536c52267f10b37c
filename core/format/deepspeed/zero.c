/* SPDX-License-Identifier: Apache-2.0 */
/* The geometry of ZeRO's partitions. */
#include "format/deepspeed/zero.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/ckd.h"

void ckpt_ds_zero_release(struct ckpt_ds_zero *z)
{
    for (size_t i = 0; i < z->optim.len; i++)
        ckpt_ds_optim_release(&z->optim.ptr[i]);
    for (size_t i = 0; i < z->rank_model.len; i++) {
        ckpt_source_unref(z->rank_model.ptr[i].source);
        ckpt_arena_release(&z->rank_model.ptr[i].names);
        ckpt_vec_release(&z->rank_model.ptr[i].fragment);
    }
    ckpt_vec_release(&z->optim);
    ckpt_vec_release(&z->rank_model);
    ckpt_vec_release(&z->param);
    ckpt_vec_release(&z->group);
    ckpt_map_release(&z->by_name);
    ckpt_torch_file_release(&z->model);
    ckpt_ds_unwrapped_release(&z->unwrapped);
    free(z->model_name);
}

const struct ckpt_ds_param *ckpt_ds_zero_param(const struct ckpt_ds_zero *z, const char *name)
{
    const uint32_t at = ckpt_map_find(&z->by_name, name);

    return at == CKPT_NONE ? NULL : &z->param.ptr[at];
}

bool ckpt_ds_param_fits(const struct ckpt_ds_param *param, const struct ckpt_torch_tensor *s)
{
    return param->rank == s->rank && memcmp(param->dim, s->dim, s->rank * sizeof *s->dim) == 0;
}

bool ckpt_ds_zero_degree(const struct ckpt_ds_zero *z, const char *key, uint64_t *ret)
{
    const struct ckpt_pickle *p = &z->model.p;

    return ckpt_ds_file_u64(&z->model, ckpt_pv_get(p, p->root, "checkpoint_parallel_dimensions"),
                            key, ret);
}

/* ---- experts ---- */

size_t ckpt_ds_expert_number(const char *name)
{
    static const char before[] = "deepspeed_moe.experts.deepspeed_experts.";
    const char *at = strstr(name, before);

    return at ? (size_t)(at - name) + sizeof before - 1 : 0;
}

bool ckpt_ds_zero_is_expert(const struct ckpt_ds_zero *z, const char *name)
{
    return z->moe && name && ckpt_ds_expert_number(name) > 0;
}

/* Is it a group of experts' parameters? */
static bool is_expert_group(const struct ckpt_ds_zero *z, size_t group)
{
    const size_t first = z->group.ptr[group];
    const size_t end = group + 1 < z->group.len ? z->group.ptr[group + 1] : z->param.len;

    return first < end && ckpt_ds_zero_is_expert(z, z->param.ptr[first].name);
}

/* ---- the model file ---- */

static int add_param(struct ckpt_ds_zero *z, ckpt_pv key, ckpt_pv shape, struct ckpt_err *err)
{
    const char *name = ckpt_pv_str(&z->model.p, key);
    struct ckpt_ds_param *p;
    uint32_t at;

    if (!name)
        return ckpt_fail(err, CKPT_FORMAT, "param_shapes: a key is not a string");
    if (ckpt_vec_add(&z->param, &p) < 0 ||
        (at = ckpt_map_add(&z->by_name, name, (uint32_t)z->param.len - 1)) == CKPT_NONE)
        return ckpt_nomem(err);
    if (at != z->param.len - 1)
        return ckpt_fail(err, CKPT_FORMAT, "param_shapes lists '%s' twice", name);
    p->name = name;
    p->group = z->group.len - 1;
    if (z->moe && ckpt_ds_zero_is_expert(z, name) != is_expert_group(z, p->group))
        return ckpt_fail(err, CKPT_UNSUPPORTED,
                         "param_shapes[%" PRIu64 "] has experts' and other parameters", p->group);
    if (ckpt_ds_file_shape(&z->model, shape, p->dim, &p->rank, err) < 0)
        return ckpt_err_in(err, "param_shapes: '%s'", name);
    (void)ckpt_shape_numel(p->dim, p->rank, &p->numel);
    return 0;
}

/* Read param_shapes: a list of dicts {name: size}, in the order of the flat buffer. */
static int read_params(struct ckpt_ds_zero *z, struct ckpt_err *err)
{
    const struct ckpt_pickle *p = &z->model.p;
    const ckpt_pv list = ckpt_pv_get(p, p->root, "param_shapes");

    for (size_t g = 0; g < ckpt_pv_len(p, list); g++) {
        const ckpt_pv dict = ckpt_pv_at(p, list, g);
        if (ckpt_pv_kind(dict) != CKPT_PV_DICT)
            return ckpt_fail(err, CKPT_FORMAT, "param_shapes[%zu] is not a dict", g);
        if (ckpt_vec_push(&z->group, z->param.len) < 0)
            return ckpt_nomem(err);
        for (size_t i = 0; i < ckpt_pv_npair(p, dict); i++)
            if (add_param(z, ckpt_pv_key(p, dict, i), ckpt_pv_value(p, dict, i), err) < 0)
                return -1;
    }
    return 0;
}

/* Refuse AutoEP, which distributes experts over groups of ranks in a way that is not supported. */
static int refuse_autoep(const struct ckpt_ds_zero *z, struct ckpt_err *err)
{
    static const char *const keys[] = {"ds_autoep_layers", "autoep_layers"};
    const struct ckpt_pickle *p = &z->model.p;

    for (size_t k = 0; k < sizeof keys / sizeof keys[0]; k++) {
        const ckpt_pv layers = ckpt_pv_get(p, p->root, keys[k]);
        for (size_t i = 0; i < ckpt_pv_len(p, layers); i++) {
            const char *format =
                ckpt_pv_str(p, ckpt_pv_get(p, ckpt_pv_at(p, layers, i), "checkpoint_format"));
            if (format && strcmp(format, "zero3_partitioned") == 0)
                return ckpt_fail(err, CKPT_UNSUPPORTED,
                                 "%s: experts are split over expert replica groups (AutoEP, %s), "
                                 "which is not supported",
                                 keys[k], format);
        }
    }
    return 0;
}

static int read_model(struct ckpt_ds_zero *z, struct ckpt_err *err)
{
    const ckpt_pv root = z->model.p.root;

    if (ckpt_pv_kind(root) != CKPT_PV_DICT)
        return ckpt_fail(err, CKPT_FORMAT, "its content is not a dict");
    if (refuse_autoep(z, err) < 0 || read_params(z, err) < 0)
        return -1;
    (void)ckpt_ds_file_u64(&z->model, root, "dp_world_size", &z->world);
    return 0;
}

int ckpt_ds_zero_open(const struct ckpt_ds_job *job, uint64_t mp, struct ckpt_ds_zero *z,
                      struct ckpt_err *err)
{
    const struct ckpt_ds_entry *e = ckpt_ds_tag_find(job->tag, CKPT_DS_MODEL, mp, 0);

    z->job = job;
    z->mp = mp;
    z->moe = ckpt_ds_tag_count(job->tag, CKPT_DS_EXPERT, NULL) > 0;
    if (!e && (e = ckpt_ds_tag_find(job->tag, CKPT_DS_ZERO3_MODEL, mp, 0)))
        z->zero3 = true;
    if (!e)
        return ckpt_fail(err, CKPT_MISSING,
                         "'%s': the model file of rank 0, mp_rank_%02" PRIu64
                         "_model_states.pt (of ZeRO 3: zero_pp_rank_0_mp_rank_%02" PRIu64
                         "_model_states.pt), is missing",
                         ckpt_dir_path(job->dir), mp, mp);
    if (!(z->model_name = strdup(e->name)))
        return ckpt_nomem(err);
    if (ckpt_torch_file_open(job->dir, e->name, job->opt->pool, &z->model, err) < 0)
        return -1;
    if (ckpt_ds_file_unwrap(&z->model, &z->unwrapped, err) < 0 || read_model(z, err) < 0)
        return ckpt_err_in(err, "'%s/%s'", ckpt_dir_path(job->dir), e->name);
    z->shared_in = &z->model;
    z->model_index = ckpt_catalog_add_source(job->cat, z->model.source, err);
    return z->model_index == UINT32_MAX ? -1 : 0;
}

/* ---- buffers ---- */

size_t ckpt_ds_zero_nbuffer(const struct ckpt_ds_zero *z)
{
    return z->zero3 ? z->world : z->group.len;
}

/* A group's masters (key NULL), or a moment, in one rank's file; NULL: it has none. */
static const struct ckpt_ds_flat *find_flat(const struct ckpt_ds_optim *o, uint64_t group,
                                            const char *key)
{
    if (!key)
        return group < o->master.len ? &o->master.ptr[group] : NULL;
    for (size_t i = 0; i < o->moment.len; i++)
        if (o->moment.ptr[i].group == group && strcmp(o->moment.ptr[i].key, key) == 0)
            return &o->moment.ptr[i].at;
    return NULL;
}

/* Check a moment's length. Moments include the padding that is removed from the masters of stages 1
 * and 2. */
static int check_moment(const struct ckpt_ds_optim *o, uint64_t group, const char *key,
                        const struct ckpt_ds_flat *flat, struct ckpt_err *err)
{
    const uint64_t n = group < o->master.len ? o->master.ptr[group].n : 0;

    if (!key || flat->n == n || (!o->zero3 && flat->n > n))
        return 0;
    return ckpt_fail(err, CKPT_UNSUPPORTED,
                     "'%s' of group %" PRIu64 " has %" PRIu64 " elements, its master %" PRIu64, key,
                     group, flat->n, n);
}

static int add_rank(const struct ckpt_ds_optim *o, uint64_t group, const char *key,
                    struct ckpt_ds_buffer *b, bool *ret_there, struct ckpt_err *err)
{
    const struct ckpt_ds_flat *flat = find_flat(o, group, key);

    *ret_there = flat != NULL;
    if (!flat)
        return 0;
    return check_moment(o, group, key, flat, err) < 0
               ? -1
               : ckpt_ds_buffer_add(b, flat->dtype, o->index, flat->off, flat->n, err);
}

/* Append all groups of one rank. The buffer ends at a group that is missing, because the offsets
 * after it are not known. */
static int rank_buffer(const struct ckpt_ds_optim *o, const char *key, struct ckpt_ds_buffer *b,
                       struct ckpt_err *err)
{
    bool there = true;

    for (uint64_t g = 0; g < o->master.len && there; g++)
        if (add_rank(o, g, key, b, &there, err) < 0)
            return -1;
    return 0;
}

int ckpt_ds_zero_group_buffer(const struct ckpt_ds_zero *z, uint64_t group, const char *key,
                              uint64_t first, uint64_t stride, struct ckpt_ds_buffer *b,
                              struct ckpt_err *err)
{
    bool there = true;

    for (size_t r = first; r < z->optim.len && there; r += stride)
        if (add_rank(&z->optim.ptr[r], group, key, b, &there, err) < 0)
            return -1;
    return 0;
}

int ckpt_ds_zero_buffers(const struct ckpt_ds_zero *z, const char *key, struct ckpt_ds_buffer *ret,
                         struct ckpt_err *err)
{
    for (size_t i = 0; i < ckpt_ds_zero_nbuffer(z); i++) {
        if (!z->zero3 && is_expert_group(z, i))
            continue;
        if ((z->zero3 ? rank_buffer(&z->optim.ptr[i], key, &ret[i], err)
                      : ckpt_ds_zero_group_buffer(z, i, key, 0, 1, &ret[i], err)) < 0)
            return -1;
    }
    return 0;
}

/* ---- offsets ---- */

static uint64_t slice_of(const struct ckpt_ds_zero *z, uint64_t numel)
{
    return numel / z->world + (numel % z->world != 0);
}

static uint64_t round_up(uint64_t n, uint64_t to) { return n % to ? n + (to - n % to) : n; }

/* The list of paddings of a group, which has one entry per parameter; *at moves to the next group.
 */
static const uint64_t *paddings_of(const struct ckpt_ds_zero *z, size_t *at, uint64_t *ret_n)
{
    const struct ckpt_ds_optim *o = &z->optim.ptr[0];

    if (*at >= o->padding.len)
        return NULL;
    const uint64_t *list = o->padding.ptr + *at;
    *ret_n = list[0];
    *at += 1 + list[0];
    return list + 1;
}

static int lay_groups(struct ckpt_ds_zero *z, struct ckpt_err *err)
{
    size_t at = 0;

    for (size_t g = 0; g < z->group.len; g++) {
        const size_t end = g + 1 < z->group.len ? z->group.ptr[g + 1] : z->param.len;
        uint64_t offset = 0, npad = 0;
        const uint64_t *pad = paddings_of(z, &at, &npad);
        if (pad && npad != end - z->group.ptr[g])
            return ckpt_fail(err, CKPT_CONFLICT,
                             "'%s': param_alignment_paddings of group %zu has %" PRIu64
                             " entries, the group has %zu parameters",
                             ckpt_dir_path(z->job->dir), g, npad, end - z->group.ptr[g]);
        for (size_t i = z->group.ptr[g]; i < end; i++) {
            z->param.ptr[i].offset = offset;
            if (ckd_add(&offset, offset, z->param.ptr[i].numel) ||
                (pad && ckd_add(&offset, offset, pad[i - z->group.ptr[g]])))
                return ckpt_fail(err, CKPT_FORMAT, "group %zu is larger than any file", g);
        }
    }
    return 0;
}

static int lay_slices(struct ckpt_ds_zero *z, struct ckpt_err *err)
{
    uint64_t offset = 0;

    for (size_t i = 0; i < z->param.len; i++) {
        z->param.ptr[i].offset = offset;
        if (ckd_add(&offset, offset, slice_of(z, z->param.ptr[i].numel)))
            return ckpt_fail(err, CKPT_FORMAT, "the parameters are larger than any file");
    }
    return 0;
}

int ckpt_ds_zero_lay(struct ckpt_ds_zero *z, struct ckpt_err *err)
{
    return z->zero3 ? lay_slices(z, err) : lay_groups(z, err);
}

/* The number of elements of a buffer that the parameters use. */
static uint64_t end_of(const struct ckpt_ds_zero *z, size_t buffer)
{
    const size_t end =
        z->zero3 || buffer + 1 >= z->group.len ? z->param.len : z->group.ptr[buffer + 1];
    const size_t begin = z->zero3 ? 0 : z->group.ptr[buffer];

    if (begin == end)
        return 0;
    const struct ckpt_ds_param *last = &z->param.ptr[end - 1];
    return last->offset + (z->zero3 ? slice_of(z, last->numel) : last->numel);
}

/* Check the length of a buffer that is padded to a multiple of `unit` elements. */
static int check_length(const struct ckpt_ds_zero *z, size_t i, uint64_t unit, uint64_t have,
                        struct ckpt_err *err)
{
    const uint64_t want = end_of(z, i);

    if (want <= INT64_MAX && have <= INT64_MAX && want <= have &&
        round_up(want, unit) == round_up(have, unit))
        return 0;
    return ckpt_fail(err, CKPT_CONFLICT,
                     "'%s': the parameters of '%s' take %" PRIu64 " elements of %s %zu, the "
                     "optimizer files hold %" PRIu64 ": files of different saves?",
                     ckpt_dir_path(z->job->dir), z->model_name, want, z->zero3 ? "rank" : "group",
                     i, have);
}

int ckpt_ds_zero_check_group(const struct ckpt_ds_zero *z, uint64_t group, uint64_t nrank,
                             const struct ckpt_ds_buffer *b, struct ckpt_err *err)
{
    return check_length(z, group, 2 * nrank, b->n, err);
}

int ckpt_ds_zero_check(const struct ckpt_ds_zero *z, const struct ckpt_ds_buffer *masters,
                       struct ckpt_err *err)
{
    for (size_t i = 0; i < ckpt_ds_zero_nbuffer(z); i++)
        if ((z->zero3 || !is_expert_group(z, i)) &&
            check_length(z, i, z->zero3 ? 1 : 2 * z->world, masters[i].n, err) < 0)
            return -1;
    return 0;
}

int ckpt_ds_zero_add(const struct ckpt_ds_zero *z, const struct ckpt_ds_buffer *buffers,
                     const struct ckpt_ds_param *param, const char *name, struct ckpt_ds_parts *out,
                     struct ckpt_err *err)
{
    const uint64_t slice = z->zero3 ? slice_of(z, param->numel) : param->numel;
    const struct ckpt_ds_buffer *b = &buffers[z->zero3 ? 0 : param->group];

    if (ckpt_ds_parts_add(out, name, b->stretch.len ? b->dtype : CKPT_F32, param->dim, param->rank,
                          err) < 0)
        return -1;
    for (uint64_t at = 0; at < param->numel; at += slice, b++) {
        const uint64_t n = ckpt_min_u64(slice, param->numel - at);
        if (b->dtype != ckpt_ds_parts_last(out)->dtype)
            return ckpt_fail(err, CKPT_CONFLICT,
                             "'%s' has different dtypes in the files of different ranks", name);
        if (ckpt_ds_buffer_take(b, param->offset, n, out, err) < 0)
            return ckpt_err_in(err, "'%s'", name);
    }
    return 0;
}
