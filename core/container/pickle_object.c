/* SPDX-License-Identifier: Apache-2.0 */
/* Globals, and the results of calling them, by the caller's table. */
#include "container/pickle_machine.h"

#include <string.h>

enum { MAX_LINE = 4096 }; /* of the names of GLOBAL */

static int push_global(struct ckpt_pickle_machine *m, uint32_t module, uint32_t name)
{
    struct ckpt_pickle *p = m->p;
    const char *mod = p->strs.ptr[module].ptr, *own = p->strs.ptr[name].ptr;
    struct ckpt_pickle_name g = {module, name, CKPT_PICKLE_OTHER};

    for (int i = 0; p->rules->global[i].name && g.rule == CKPT_PICKLE_OTHER; i++)
        if (strcmp(own, p->rules->global[i].name) == 0 &&
            (!p->rules->global[i].module || strcmp(mod, p->rules->global[i].module) == 0))
            g.rule = i;
    if (ckpt_pm_check_id(m, p->globals.len) < 0)
        return -1;
    if (ckpt_vec_push(&p->globals, g) < 0)
        return ckpt_nomem(m->err);
    return ckpt_pm_push(m, ckpt_pv_make(CKPT_PV_GLOBAL, p->globals.len - 1));
}

int ckpt_pm_stack_global(struct ckpt_pickle_machine *m)
{
    if (ckpt_pm_has(m, 2) < 0)
        return -1;
    ckpt_pv name = *ckpt_pm_top(m), module = *(ckpt_pm_top(m) - 1);
    if (ckpt_pv_kind(name) != CKPT_PV_STR || ckpt_pv_kind(module) != CKPT_PV_STR)
        return ckpt_fail(m->err, CKPT_FORMAT, "a global's name is not a string");
    m->stack.len -= 2;
    return push_global(m, (uint32_t)ckpt_pv_id(module), (uint32_t)ckpt_pv_id(name));
}

static int take_line(struct ckpt_pickle_machine *m, uint32_t *ret)
{
    size_t n = 0;

    for (;; n++) {
        if (n >= MAX_LINE)
            return ckpt_fail(m->err, CKPT_FORMAT, "a global's name has no end");
        if (ckpt_pm_need(m, n + 1) < 0)
            return -1;
        if (m->at[n] == '\n')
            break;
    }
    const char *line = (const char *)m->at;
    m->at += n + 1;
    return ckpt_pm_str(m, line, n, ret);
}

int ckpt_pm_text_global(struct ckpt_pickle_machine *m)
{
    uint32_t module, name;

    return take_line(m, &module) < 0 || take_line(m, &name) < 0 ? -1 : push_global(m, module, name);
}

/* torch.Size((2, 3)), or of a list. */
static int make_size(struct ckpt_pickle_machine *m, ckpt_pv args, ckpt_pv *ret)
{
    ckpt_pv arg = ckpt_pv_at(m->p, args, 0);

    if (ckpt_pv_kind(args) == CKPT_PV_INTS1) {
        *ret = arg;
        return 0;
    }
    if (ckpt_pv_len(m->p, args) != 1 || ckpt_pv_kind(arg) != CKPT_PV_LIST)
        return ckpt_pm_fail_kind(m, arg, "a size made from");
    struct ckpt_pickle_box *b = &m->p->boxes.ptr[ckpt_pv_id(arg)];
    if (!ckpt_pm_all_ints(b->ptr, b->len))
        return ckpt_pm_fail_kind(m, arg, "a size made from");
    return ckpt_pm_ints(m, b->ptr, b->len, ret);
}

/* OrderedDict(), or OrderedDict([(key, value), ...]). */
static int make_dict(struct ckpt_pickle_machine *m, ckpt_pv args, ckpt_pv *ret)
{
    ckpt_pv pairs = ckpt_pv_at(m->p, args, 0);

    if (ckpt_pm_box(m, CKPT_PV_DICT, ret) < 0)
        return -1;
    for (size_t i = 0; i < ckpt_pv_len(m->p, pairs); i++) {
        ckpt_pv pair = ckpt_pv_at(m->p, pairs, i);
        if (ckpt_pv_len(m->p, pair) != 2)
            return ckpt_pm_fail_kind(m, pair, "a dict made from");
        ckpt_pv kv[2] = {ckpt_pv_at(m->p, pair, 0), ckpt_pv_at(m->p, pair, 1)};
        if (ckpt_pm_add(m, *ret, kv, 2) < 0)
            return -1;
    }
    return 0;
}

/* The result of calling a global, or making an object of it. */
static int call(struct ckpt_pickle_machine *m, ckpt_pv callable, ckpt_pv args, ckpt_pv *ret)
{
    int rule = ckpt_pv_rule(m->p, callable);

    if (ckpt_pv_kind(callable) == CKPT_PV_OPAQUE ||
        (ckpt_pv_kind(callable) == CKPT_PV_GLOBAL && rule == CKPT_PICKLE_OTHER)) {
        *ret = ckpt_pv_make(CKPT_PV_OPAQUE, ckpt_pv_id(callable));
        ckpt_pm_recycle(m, args);
        return 0;
    }
    if (ckpt_pv_kind(callable) != CKPT_PV_GLOBAL)
        return ckpt_pm_fail_kind(m, callable, "cannot call");
    if (!ckpt_pv_is_seq(args) || ckpt_pv_kind(args) == CKPT_PV_LIST)
        return ckpt_pm_fail_kind(m, args, "arguments that are");
    switch (m->p->rules->global[rule].role) {
    case CKPT_PICKLE_SIZE:
        return make_size(m, args, ret);
    case CKPT_PICKLE_DICT:
        return make_dict(m, args, ret);
    default:
        return ckpt_pm_obj(m, ckpt_pv_id(callable), rule, args, ret);
    }
}

int ckpt_pm_reduce(struct ckpt_pickle_machine *m, size_t n)
{
    ckpt_pv v;

    if (ckpt_pm_has(m, n) < 0 ||
        call(m, m->stack.ptr[m->stack.len - n], m->stack.ptr[m->stack.len - n + 1], &v) < 0)
        return -1;
    m->stack.len -= n;
    return ckpt_pm_push(m, v);
}

int ckpt_pm_persistent_id(struct ckpt_pickle_machine *m)
{
    ckpt_pv v;

    if (!m->p->rules->persid)
        return ckpt_fail(m->err, CKPT_UNSUPPORTED, "a persistent id is not expected here");
    if (ckpt_pm_has(m, 1) < 0 ||
        ckpt_pm_obj(m, CKPT_PM_NO_GLOBAL, CKPT_PICKLE_PERSID, *ckpt_pm_top(m), &v) < 0)
        return -1;
    *ckpt_pm_top(m) = v;
    return 0;
}

/* The members of a state that have slots. */
static void fill_slots(struct ckpt_pickle_machine *m, ckpt_pv obj, int rule, ckpt_pv state)
{
    const uint32_t *name = m->slot_name.ptr + (size_t)rule * CKPT_PICKLE_MAX_SLOTS;
    unsigned nslot = ckpt_pickle_nslot(m->p, rule);
    uint64_t *slot = m->p->words.ptr + ckpt_pv_id(obj) + 1;

    for (size_t i = 0; i < ckpt_pv_npair(m->p, state); i++) {
        ckpt_pv key = ckpt_pv_key(m->p, state, i);
        for (unsigned k = 0; k < nslot; k++)
            if (key == ckpt_pv_make(CKPT_PV_STR, name[k]))
                slot[k] = ckpt_pv_value(m->p, state, i);
    }
}

static int build_obj(struct ckpt_pickle_machine *m, ckpt_pv obj, ckpt_pv state)
{
    int rule = ckpt_pv_rule(m->p, obj);

    if (rule < 0 || !m->p->rules->global[rule].slot) {
        m->p->words.ptr[ckpt_pv_id(obj) + 2] = state;
        return 0;
    }
    if (ckpt_pv_kind(state) == CKPT_PV_DICT) {
        fill_slots(m, obj, rule, state);
        ckpt_pm_recycle(m, state);
        return 0;
    }
    /* a class with __slots__: (members or None, slots) */
    if (ckpt_pv_kind(state) != CKPT_PV_TUPLE || ckpt_pv_len(m->p, state) != 2)
        return ckpt_pm_fail_kind(m, state, "the state of an object is");
    for (size_t i = 0; i < 2; i++)
        fill_slots(m, obj, rule, ckpt_pv_at(m->p, state, i));
    return 0;
}

int ckpt_pm_build(struct ckpt_pickle_machine *m)
{
    if (ckpt_pm_has(m, 2) < 0)
        return -1;
    ckpt_pv state = *ckpt_pm_top(m), obj = *(ckpt_pm_top(m) - 1);
    m->stack.len--;
    switch (ckpt_pv_kind(obj)) {
    case CKPT_PV_OBJ:
        return build_obj(m, obj, state);
    case CKPT_PV_OPAQUE:
        ckpt_pm_recycle(m, state);
        return 0;
    case CKPT_PV_DICT: /* attributes of an OrderedDict, such as a state dict's _metadata */
        return 0;
    default:
        return ckpt_pm_fail_kind(m, obj, "cannot give a state to");
    }
}
