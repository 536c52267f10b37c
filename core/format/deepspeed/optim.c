/* SPDX-License-Identifier: Apache-2.0 */
/* Reading an optimizer file of DeepSpeed. */
#include "format/deepspeed/zero.h"

#include <math.h>
#include <string.h>

enum { MAX_GROUPS = 1 << 20 };

struct reading {
    struct ckpt_torch_file *f;
    ckpt_pv state; /* optimizer_state_dict */
    struct ckpt_ds_optim *out;
};

void ckpt_ds_optim_release(struct ckpt_ds_optim *o)
{
    ckpt_source_unref(o->source);
    ckpt_arena_release(&o->names);
    ckpt_vec_release(&o->master);
    ckpt_vec_release(&o->count);
    ckpt_vec_release(&o->moment);
    ckpt_vec_release(&o->step);
    ckpt_vec_release(&o->padding);
}

static ckpt_pv get(const struct reading *r, ckpt_pv dict, const char *key)
{
    return ckpt_pv_get(&r->f->p, dict, key);
}

/* A tensor of one dimension, without gaps. */
static int read_flat(const struct reading *r, ckpt_pv v, struct ckpt_ds_flat *ret,
                     struct ckpt_err *err)
{
    struct ckpt_torch_tensor s;

    if (ckpt_torch_file_tensor(r->f, v, &s, err) < 0)
        return -1;
    if (s.rank != 1 || !s.contiguous)
        return ckpt_fail(err, CKPT_FORMAT, "it is not a tensor of one dimension without gaps");
    *ret = (struct ckpt_ds_flat){s.dtype, s.numel, s.off};
    return 0;
}

static int read_masters(const struct reading *r, struct ckpt_err *err)
{
    static const char *const keys[] = {"single_partition_of_fp32_groups", "fp32_flat_groups"};
    ckpt_pv groups = get(r, r->state, keys[0]);

    r->out->zero3 = !ckpt_pv_is_seq(groups);
    if (r->out->zero3)
        groups = get(r, r->state, keys[1]);
    if (!ckpt_pv_is_seq(groups))
        return ckpt_fail(err, CKPT_UNSUPPORTED,
                         "its optimizer_state_dict has neither '%s' nor '%s': it is not of ZeRO",
                         keys[0], keys[1]);
    const char *key = keys[r->out->zero3];
    for (size_t i = 0; i < ckpt_pv_len(&r->f->p, groups); i++) {
        struct ckpt_ds_flat flat;
        if (read_flat(r, ckpt_pv_at(&r->f->p, groups, i), &flat, err) < 0)
            return ckpt_err_in(err, "%s[%zu]", key, i);
        if (!ckpt_dtype_is_castable(flat.dtype))
            return ckpt_fail(err, CKPT_UNSUPPORTED, "%s[%zu] is %s", key, i,
                             ckpt_dtype_name(flat.dtype));
        if (ckpt_vec_push(&r->out->master, flat) < 0)
            return ckpt_nomem(err);
    }
    return 0;
}

static int read_counts(const struct reading *r, struct ckpt_err *err)
{
    const ckpt_pv v = get(r, r->state, "partition_count");
    const bool list = ckpt_pv_is_seq(v);

    for (size_t i = 0; i < (list ? ckpt_pv_len(&r->f->p, v) : 1); i++) {
        int64_t n;
        if (!ckpt_pv_int(list ? ckpt_pv_at(&r->f->p, v, i) : v, &n) || n < 1 || n > UINT32_MAX)
            return ckpt_fail(err, CKPT_FORMAT, "partition_count is not a number of ranks");
        if (ckpt_vec_push(&r->out->count, (uint64_t)n) < 0)
            return ckpt_nomem(err);
    }
    return 0;
}

static int read_paddings(const struct reading *r, struct ckpt_err *err)
{
    const ckpt_pv groups = get(r, r->state, "param_alignment_paddings");

    for (size_t i = 0; i < ckpt_pv_len(&r->f->p, groups); i++) {
        const ckpt_pv list = ckpt_pv_at(&r->f->p, groups, i);
        const size_t n = ckpt_pv_len(&r->f->p, list);
        if (!ckpt_pv_is_seq(list) || ckpt_vec_push(&r->out->padding, n) < 0)
            return ckpt_fail(err, CKPT_FORMAT, "param_alignment_paddings[%zu] is not a list", i);
        for (size_t k = 0; k < n; k++) {
            int64_t pad;
            if (!ckpt_pv_int(ckpt_pv_at(&r->f->p, list, k), &pad) || pad < 0 || pad > UINT32_MAX)
                return ckpt_fail(err, CKPT_FORMAT,
                                 "param_alignment_paddings[%zu][%zu] is not a number of elements",
                                 i, k);
            if (ckpt_vec_push(&r->out->padding, (uint64_t)pad) < 0)
                return ckpt_nomem(err);
        }
    }
    return 0;
}

/* ---- the optimizer's state ---- */

/* A number, or a tensor that holds one. */
static bool read_number(const struct reading *r, ckpt_pv v, double *ret)
{
    struct ckpt_torch_tensor s;
    unsigned char bytes[8];
    int64_t n;
    float narrow;

    if (ckpt_pv_int(v, &n)) {
        *ret = (double)n;
        return true;
    }
    if (!ckpt_torch_is_tensor(&r->f->p, v) || ckpt_torch_file_tensor(r->f, v, &s, NULL) < 0 ||
        s.numel != 1 ||
        ckpt_source_pread(r->f->source, bytes, ckpt_dtype_size(s.dtype), s.off, NULL) < 0)
        return false;
    if (s.dtype == CKPT_I64) {
        memcpy(&n, bytes, sizeof n);
        *ret = (double)n;
        return true;
    }
    if (s.dtype != CKPT_F32)
        return false;
    memcpy(&narrow, bytes, sizeof narrow);
    *ret = (double)narrow;
    return isfinite(narrow);
}

static int add_state(const struct reading *r, uint64_t group, const char *key, ckpt_pv v,
                     bool states, struct ckpt_err *err)
{
    struct ckpt_ds_moment m = {.group = group};
    struct ckpt_ds_group_step step = {.group = group};

    if (strcmp(key, "step") == 0 && read_number(r, v, &step.step))
        return ckpt_vec_push(&r->out->step, step) < 0 ? ckpt_nomem(err) : 0;
    if (!states || !ckpt_torch_is_tensor(&r->f->p, v) || read_flat(r, v, &m.at, NULL) < 0)
        return 0;
    if (!(m.key = ckpt_arena_strdup(&r->out->names, key)) || ckpt_vec_push(&r->out->moment, m) < 0)
        return ckpt_nomem(err);
    return 0;
}

/* {group: {key: value}}; each group is one flat parameter to the optimizer. */
static int read_states(const struct reading *r, bool states, struct ckpt_err *err)
{
    const struct ckpt_pickle *p = &r->f->p;
    const ckpt_pv base =
        get(r, r->state, r->out->zero3 ? "optimizer_state_dict" : "base_optimizer_state");
    const ckpt_pv groups = get(r, base, "state");

    r->out->elastic = ckpt_pv_kind(base) == CKPT_PV_LIST && ckpt_pv_len(p, base) > 0;

    for (size_t i = 0; i < ckpt_pv_npair(p, groups); i++) {
        const ckpt_pv state = ckpt_pv_value(p, groups, i);
        int64_t group;
        if (!ckpt_pv_int(ckpt_pv_key(p, groups, i), &group) || group < 0 || group > MAX_GROUPS)
            continue;
        for (size_t k = 0; k < ckpt_pv_npair(p, state); k++) {
            const char *key = ckpt_pv_str(p, ckpt_pv_key(p, state, k));
            if (key &&
                add_state(r, (uint64_t)group, key, ckpt_pv_value(p, state, k), states, err) < 0)
                return -1;
        }
    }
    return 0;
}

int ckpt_ds_optim_read(struct ckpt_dir *dir, const char *name, struct ckpt_fdpool *pool,
                       bool states, struct ckpt_ds_optim *ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_torch_file_release) struct ckpt_torch_file f = {0};
    struct reading r = {.f = &f, .out = ret};

    if (ckpt_torch_file_open(dir, name, pool, &f, err) < 0)
        return -1;
    ret->source = ckpt_source_ref(f.source);
    r.state = get(&r, f.p.root, "optimizer_state_dict");
    if (ckpt_pv_kind(r.state) != CKPT_PV_DICT)
        (void)ckpt_fail(err, CKPT_FORMAT, "it has no optimizer_state_dict");
    else if (read_masters(&r, err) == 0 && read_counts(&r, err) == 0 &&
             read_paddings(&r, err) == 0 && read_states(&r, states, err) == 0)
        return 0;
    return ckpt_err_in(err, "'%s/%s'", ckpt_dir_path(dir), name);
}
