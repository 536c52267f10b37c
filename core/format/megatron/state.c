/* SPDX-License-Identifier: Apache-2.0 */
/* Reading the common state. */
#include "format/megatron/load.h"

#include <string.h>

#include "container/pickle_value.h"
#include "container/torch_file.h"

void ckpt_megatron_state_release(struct ckpt_megatron_state *st)
{
    json_decref(st->args);
    st->args = NULL;
}

uint64_t ckpt_megatron_state_size(const struct ckpt_megatron_state *st, const char *key)
{
    uint64_t n = 0;

    return st->args && ckpt_json_u64(st->args, key, &n) ? n : 0;
}

static int take_args(struct ckpt_megatron_state *st, const struct ckpt_pickle *p, ckpt_pv v,
                     struct ckpt_err *err)
{
    json_t *args;

    if (st->args)
        return 0;
    if (ckpt_pickle_plain(p, v, &args, err) < 0)
        return -1;
    if (json_is_object(args))
        st->args = args;
    else
        json_decref(args);
    return 0;
}

static void take_fact(struct ckpt_megatron_state *st, const struct ckpt_pickle *p, const char *name,
                      ckpt_pv v)
{
    int64_t i = 0;
    bool is_int = ckpt_pv_int(v, &i), is_float = ckpt_pv_kind(v) == CKPT_PV_FLOAT;

    if (strcmp(name, "iteration") == 0 && is_int && i >= 0 && !st->has_iteration) {
        st->iteration = (uint64_t)i;
        st->has_iteration = true;
    }
    if (strcmp(name, "checkpoint_version") == 0 && (is_int || is_float) && !st->has_version) {
        st->version = is_float ? p->floats.ptr[ckpt_pv_id(v)] : (double)i;
        st->has_version = true;
    }
}

int ckpt_megatron_state_take(struct ckpt_megatron_state *st, const struct ckpt_pickle *p, ckpt_pv v,
                             struct ckpt_err *err)
{
    char name[CKPT_PV_TEXT];

    if (ckpt_torch_refuse_attack(p, err) < 0)
        return -1;
    if (ckpt_pv_kind(v) == CKPT_PV_LIST)
        v = ckpt_pv_at(p, v, 0);
    if (ckpt_pv_kind(v) == CKPT_PV_OBJ)
        return take_args(st, p, v, err);
    if (ckpt_pv_kind(v) != CKPT_PV_DICT)
        return ckpt_fail(err, CKPT_FORMAT, "it holds %s instead of a dict",
                         ckpt_pv_text(p, v, name, sizeof name));
    take_fact(st, p, "iteration", ckpt_pv_get(p, v, "iteration"));
    take_fact(st, p, "checkpoint_version", ckpt_pv_get(p, v, "checkpoint_version"));
    return take_args(st, p, ckpt_pv_get(p, v, "args"), err);
}

int ckpt_megatron_state_read(struct ckpt_megatron_state *st, struct ckpt_source *s,
                             struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_torch_file_release) struct ckpt_torch_file f = {0};

    return ckpt_torch_file_read(s, &f, err) < 0 ? -1
                                                : ckpt_megatron_state_take(st, &f.p, f.p.root, err);
}

int ckpt_megatron_state_read_fact(struct ckpt_megatron_state *st, const char *name,
                                  struct ckpt_source *s, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_torch_file_release) struct ckpt_torch_file f = {0};

    if (ckpt_torch_file_read(s, &f, err) < 0 || ckpt_torch_refuse_attack(&f.p, err) < 0)
        return -1;
    take_fact(st, &f.p, name, f.p.root);
    return 0;
}
