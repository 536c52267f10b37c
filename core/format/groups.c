/* SPDX-License-Identifier: Apache-2.0 */
/* Finding the groups of an optimizer among the values of a state dict. */
#include "format/groups.h"

#include <string.h>

#include "base/mem.h"
#include "base/str.h"
#include "container/torch_file.h"

const char *const ckpt_hyper_keys[CKPT_NHYPER] = {
    [CKPT_HYPER_LR] = "lr",
    [CKPT_HYPER_BETAS] = "betas",
    [CKPT_HYPER_EPS] = "eps",
    [CKPT_HYPER_DECAY] = "weight_decay",
    [CKPT_HYPER_INITIAL_LR] = "initial_lr",
    [CKPT_HYPER_MIN_LR] = "min_lr",
};

const struct ckpt_hyper_flag ckpt_hyper_flags[] = {
    {.key = "amsgrad"},
    {.key = "maximize"},
    {.key = "foreach", .is_null = true},
    {.key = "capturable"},
    {.key = "differentiable"},
    {.key = "fused", .is_null = true},
    {.key = "decoupled_weight_decay", .is_true = true},
    {0},
};

/* ---- values ---- */

static bool is_flag(const char *key)
{
    for (const struct ckpt_hyper_flag *f = ckpt_hyper_flags; f->key; f++)
        if (strcmp(f->key, key) == 0)
            return true;
    return false;
}

/* Two numbers, in a list or a tuple; new, or NULL. */
static json_t *pair(const json_t *v)
{
    const json_t *list = json_is_object(v) ? json_object_get(v, "$tuple") : v;
    const json_t *a = json_array_get(list, 0), *b = json_array_get(list, 1);

    return json_array_size(list) == 2 && json_is_number(a) && json_is_number(b)
               ? json_pack("[f, f]", json_number_value(a), json_number_value(b))
               : NULL;
}

/* The names of a group's parameters; new, or NULL: they are numbers. */
static json_t *names(const json_t *v)
{
    size_t i;
    json_t *name;

    json_array_foreach((json_t *)v, i, name)
        if (!json_is_string(name))
            return NULL;
    return json_array_size(v) ? json_copy((json_t *)v) : NULL;
}

/* Megatron's word for the learning rate from which a scheduler computes. */
#define MAX_LR "max_lr"

/* Set a member of a group, if it is one that groups have here. */
static int set_member(json_t *group, const char *key, const json_t *v, struct ckpt_err *err)
{
    static const char *const numbers[] = {"lr",         "eps",    "weight_decay", "step",
                                          "initial_lr", "min_lr", "wd_mult",      NULL};
    json_t *own = NULL;

    if (strcmp(key, "betas") == 0)
        own = pair(v);
    else if (strcmp(key, "params") == 0)
        own = names(v);
    else if (ckpt_one_of(key, numbers) && json_is_number(v))
        own = json_real(json_number_value(v));
    else if (strcmp(key, MAX_LR) == 0 && json_is_number(v) &&
             !json_object_get(group, ckpt_hyper_keys[CKPT_HYPER_INITIAL_LR]))
        return set_member(group, ckpt_hyper_keys[CKPT_HYPER_INITIAL_LR], v, err);
    else if (strcmp(key, ckpt_hyper_keys[CKPT_HYPER_MIN_LR]) == 0 && json_is_null(v))
        own = json_null();
    else if (is_flag(key) && (json_is_boolean(v) || json_is_null(v)))
        own = json_copy((json_t *)v);
    return own && json_object_set_new(group, key, own) < 0 ? ckpt_nomem(err) : 0;
}

/* ---- names ---- */

struct found {
    json_t *nested; /* {"optim.param_groups.0": group} */
    json_t *flat;   /* {"layers.0.weight": group} */
};

static void found_release(struct found *f)
{
    json_decref(f->nested);
    json_decref(f->flat);
}

/* The part of a value's name behind "param_groups."; or NULL. */
static const char *behind(const char *name)
{
    static const char word[] = "param_groups.";
    const char *at = strstr(name, word);

    return at && (at == name || at[-1] == '.') ? at + sizeof word - 1 : NULL;
}

static bool is_number(const char *s, size_t len)
{
    return len > 0 && strspn(s, "0123456789") >= len;
}

/* The object under this key, which is made if it is not there. */
static json_t *member(json_t *of, const char *key, size_t len)
{
    json_t *one = json_object_getn(of, key, len);

    if (one)
        return one;
    one = json_object();
    return one && json_object_setn_new(of, key, len, one) == 0 ? one : NULL;
}

static int add_value(struct found *f, const char *name, const json_t *v, struct ckpt_err *err)
{
    const char *rest = behind(name), *dot = rest ? strchr(rest, '.') : NULL,
               *last = rest ? strrchr(rest, '.') : NULL;

    if (!dot)
        return 0;
    const bool nested = dot == last && is_number(rest, (size_t)(dot - rest));
    json_t *group = nested ? member(f->nested, name, (size_t)(last - name))
                           : member(f->flat, rest, (size_t)(last - rest));
    return group ? set_member(group, last + 1, v, err) : ckpt_nomem(err);
}

/* Parameters with equal members are one group. */
static int join_flat(const struct found *f, json_t *out, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *by_text = json_object();
    const char *name;
    json_t *one;

    json_object_foreach(f->flat, name, one) {
        ckpt_cleanup(ckpt_freep) char *text = json_dumps(one, JSON_COMPACT | JSON_SORT_KEYS);
        json_t *group = text ? json_object_get(by_text, text) : NULL;
        if (text && !group && (group = json_deep_copy(one)) &&
            (json_object_set_new(by_text, text, group) < 0 || json_array_append(out, group) < 0 ||
             json_object_set_new(group, "params", json_array()) < 0))
            return ckpt_nomem(err);
        if (!group ||
            json_array_append_new(json_object_get(group, "params"), json_string(name)) < 0)
            return ckpt_nomem(err);
    }
    return 0;
}

/* Does the object have the group twice? DeepSpeed's conversions from ZeRO 3 have all groups at the
 * top, and in the optimizer's state dict. */
static bool is_repeated(const struct found *f, const char *name)
{
    static const char inner[] = "optimizer_state_dict.";

    return ckpt_has_prefix(name, inner) && json_object_get(f->nested, name + sizeof inner - 1);
}

int ckpt_groups_of_torch(const json_t *objects, json_t *out, struct ckpt_err *err)
{
    ckpt_cleanup(found_release) struct found f = {.nested = json_object(), .flat = json_object()};
    const char *name;
    json_t *v;

    if (!f.nested || !f.flat)
        return ckpt_nomem(err);
    json_object_foreach((json_t *)objects, name, v)
        if (add_value(&f, name, v, err) < 0)
            return -1;
    json_object_foreach(f.nested, name, v)
        if (!is_repeated(&f, name) && json_array_append(out, v) < 0)
            return ckpt_nomem(err);
    return join_flat(&f, out, err);
}

/* ---- files ---- */

/* The step in the state of an optimizer, where it lies beside its groups. */
struct step {
    const struct ckpt_torch_file *f;
    bool is_said, differs;
    double n;
};

static int note_step(struct step *s, ckpt_pv v, struct ckpt_err *err)
{
    const struct ckpt_pickle *p = &s->f->p;
    const enum ckpt_pv_kind kind = ckpt_pv_kind(v);
    struct ckpt_torch_tensor t = {0};
    double n;
    float x;

    if (kind == CKPT_PV_INT || kind == CKPT_PV_FLOAT) {
        ckpt_cleanup(ckpt_json_decrefp) json_t *number = NULL;
        if (ckpt_pickle_value(p, v, &number, err) < 0)
            return -1;
        n = json_number_value(number);
    } else if (kind == CKPT_PV_OBJ && ckpt_torch_file_tensor(s->f, v, &t, NULL) == 0 &&
               t.numel == 1 && t.dtype == CKPT_F32) {
        if (ckpt_source_pread(s->f->source, &x, sizeof x, t.off, err) < 0)
            return -1;
        n = (double)x;
    } else {
        return 0;
    }
    s->differs |= s->is_said && s->n != n;
    s->is_said = true;
    s->n = n;
    return 0;
}

/* Look at {0: {"step": 5, ...}, "common_step": 5}. */
static int note_steps(struct step *s, ckpt_pv state, struct ckpt_err *err)
{
    const struct ckpt_pickle *p = &s->f->p;

    if (note_step(s, ckpt_pv_get(p, state, "common_step"), err) < 0)
        return -1;
    for (size_t i = 0; i < ckpt_pv_npair(p, state); i++) {
        const ckpt_pv one = ckpt_pv_value(p, state, i);
        if (ckpt_pv_kind(one) == CKPT_PV_DICT && note_step(s, ckpt_pv_get(p, one, "step"), err) < 0)
            return -1;
    }
    return 0;
}

/* Find the state dicts that have groups, in dicts and lists. */
static int find_steps(struct step *s, ckpt_pv v, unsigned depth, struct ckpt_err *err)
{
    enum { DEEPEST = 4 };
    const struct ckpt_pickle *p = &s->f->p;
    const bool is_dict = ckpt_pv_kind(v) == CKPT_PV_DICT;

    if (depth > DEEPEST)
        return 0;
    if (is_dict && ckpt_pv_kind(ckpt_pv_get(p, v, "param_groups")) == CKPT_PV_LIST &&
        ckpt_pv_kind(ckpt_pv_get(p, v, "state")) == CKPT_PV_DICT)
        return note_steps(s, ckpt_pv_get(p, v, "state"), err);
    for (size_t i = 0; is_dict && i < ckpt_pv_npair(p, v); i++)
        if (find_steps(s, ckpt_pv_value(p, v, i), depth + 1, err) < 0)
            return -1;
    for (size_t i = 0; ckpt_pv_kind(v) == CKPT_PV_LIST && i < ckpt_pv_len(p, v); i++)
        if (find_steps(s, ckpt_pv_at(p, v, i), depth + 1, err) < 0)
            return -1;
    return 0;
}

int ckpt_groups_step_of_file(struct ckpt_dir *dir, const char *file, struct ckpt_fdpool *pool,
                             json_t **ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_torch_file_release) struct ckpt_torch_file f = {0};
    struct step s = {.f = &f};

    *ret = NULL;
    if (ckpt_torch_file_open(dir, file, pool, &f, err) < 0 ||
        ckpt_torch_refuse_attack(&f.p, err) < 0)
        return -1;
    if (note_step(&s, f.p.root, err) < 0 || ckpt_source_check(f.source, err) < 0)
        return ckpt_err_in(err, "'%s/%s'", ckpt_dir_path(dir), file);
    if (!s.is_said)
        return ckpt_fail(err, CKPT_UNSUPPORTED,
                         "'%s/%s' is neither a number nor a tensor of one F32: give the step with "
                         "the option optimizer_step=N",
                         ckpt_dir_path(dir), file);
    return (*ret = json_real(s.n)) ? 0 : ckpt_nomem(err);
}

int ckpt_groups_of_file(struct ckpt_dir *dir, const char *file, struct ckpt_fdpool *pool,
                        json_t *out, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_torch_file_release) struct ckpt_torch_file f = {0};
    ckpt_cleanup(ckpt_json_decrefp) json_t *objects = json_object();
    struct step s = {.f = &f};
    json_t *group;
    size_t i;

    if (!objects)
        return ckpt_nomem(err);
    if (ckpt_torch_file_open(dir, file, pool, &f, err) < 0 ||
        ckpt_torch_refuse_attack(&f.p, err) < 0)
        return -1;
    if (ckpt_pickle_leaves(&f.p, f.p.root, "", objects, err) < 0 ||
        ckpt_groups_of_torch(objects, out, err) < 0 || find_steps(&s, f.p.root, 0, err) < 0 ||
        ckpt_source_check(f.source, err) < 0)
        return ckpt_err_in(err, "'%s/%s'", ckpt_dir_path(dir), file);
    /* A group's own number may have stayed at 0, as DeepSpeed's FusedAdam leaves it. */
    json_array_foreach(out, i, group)
        if (s.is_said && !s.differs && json_number_value(json_object_get(group, "step")) == 0 &&
            json_object_set_new(group, "step", json_real(s.n)) < 0)
            return ckpt_nomem(err);
    return 0;
}

bool ckpt_groups_alike(const json_t *a, const json_t *b)
{
    const char *key;
    json_t *v;

    json_object_foreach((json_t *)a, key, v)
        if (strcmp(key, "params") != 0 && strcmp(key, "vectors") != 0 &&
            !json_equal(v, json_object_get(b, key)))
            return false;
    return json_object_size(a) == json_object_size(b);
}
