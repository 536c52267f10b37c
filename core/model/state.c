/* SPDX-License-Identifier: Apache-2.0 */
/* Showing another value of each parameter than its weight. */
#include "model/state.h"

#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/str.h"
#include "tensor/read.h"

#define MASTER "master"
#define MOMENT "exp_avg" /* whoever is trained has it */

bool ckpt_state_is_of_other_form(const struct ckpt_catalog *cat, const struct ckpt_tensor *t,
                                 const char *kind)
{
    const struct ckpt_state *s = t->state;

    return s && s->weight && strcmp(s->kind, kind) == 0 && !ckpt_catalog_find(cat, s->weight);
}

bool ckpt_state_is_asked(const char *state)
{
    return state && strcmp(state, CKPT_STATE_WEIGHT) != 0;
}

static bool is_trained(const char *state) { return strcmp(state, CKPT_STATE_TRAINED) == 0; }

/* Do weights that have no such state stay? */
static bool has_others(const char *state)
{
    return is_trained(state) || !ckpt_state_is_asked(state);
}

static bool is_origin(const char *state) { return strcmp(state, CKPT_STATE_ORIGIN) == 0; }

bool ckpt_state_is_moment(const char *state)
{
    return ckpt_state_is_asked(state) && strcmp(state, MASTER) != 0 && !is_trained(state);
}

/* Is the tensor a weight, or does it stand for one? */
static bool is_weight(const struct ckpt_tensor *t)
{
    return !t->state || (t->state->weight && strcmp(t->state->weight, t->name) == 0);
}

static const char *kind_of(const struct ckpt_tensor *t)
{
    return t->state ? t->state->kind : CKPT_STATE_WEIGHT;
}

/* ---- what there is ---- */

/* Add one to a number of an object, or as much as is said. */
static void count(json_t *o, const char *key, uint64_t n)
{
    const json_int_t before = json_integer_value(json_object_get(o, key));

    (void)json_object_set_new(o, key, json_integer(before + (json_int_t)n));
}

static void list_one(json_t *list, const char *kind, const struct ckpt_tensor *t)
{
    json_t *one = json_object_get(list, kind);

    if (!one) {
        one = json_pack("{s:i, s:i, s:{}}", "tensors", 0, "bytes", 0, "dtypes");
        if (!one || json_object_set_new(list, kind, one) < 0)
            return;
    }
    count(one, "tensors", 1);
    count(one, "bytes", ckpt_tensor_nbytes(t));
    count(json_object_get(one, "dtypes"), ckpt_tensor_dtype_name(t), 1);
}

json_t *ckpt_state_list(const struct ckpt_catalog *cat)
{
    json_t *list = json_object();

    for (size_t i = 0; list && i < cat->tensors.len; i++) {
        const struct ckpt_tensor *t = &cat->tensors.ptr[i];
        if (is_weight(t))
            list_one(list, CKPT_STATE_WEIGHT, t);
        if (t->state)
            list_one(list, t->state->kind, t);
    }
    return list;
}

/* The names of the states, for messages. */
static void append_states(const struct ckpt_catalog *cat, struct ckpt_str *out)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *list = ckpt_state_list(cat);
    const char *kind;
    json_t *one;
    int n = 0;

    json_object_foreach(list, kind, one)
        ckpt_str_printf(out, "%s%s", n++ ? ", " : "", kind);
}

/* The reader's first word on optimizer tensors that it could not read; or NULL. */
static const char *left_out(const struct ckpt_catalog *cat)
{
    size_t i;
    json_t *text;

    json_array_foreach(cat->warnings, i, text)
        if (ckpt_has_prefix(json_string_value(text), "left out: "))
            return json_string_value(text);
    return NULL;
}

static int fail_missing(const struct ckpt_state_asked *asked, const struct ckpt_catalog *cat,
                        struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_str_release) struct ckpt_str states = {0};
    const char *why = left_out(cat);

    append_states(cat, &states);
    return ckpt_fail(err, CKPT_MISSING, "'%s' has no state '%s': it has %s%s%s", asked->path,
                     asked->state, ckpt_str_get(&states), why ? "; " : "", why ? why : "");
}

/* ---- instead of the weights ---- */

struct choice {
    const struct ckpt_state_asked *asked;
    const struct ckpt_catalog *cat; /* the reader's */
    const char *kind;
    const struct ckpt_tensor **state; /* of each tensor of cat, if it is a weight; or NULL */
    size_t nstate;                    /* states of this kind */

    /* Those of which nothing says whose they are, and the first one's name. */
    size_t nstray;
    const char *stray;

    /* Those of parameters that are stored in another form than the weights, as where a trainer
     * fuses q, k and v in memory, and the first one's name. */
    size_t nother;
    const char *other;

    struct ckpt_catalog *made;
    uint32_t nowhere; /* the source of weights without the state */
};

static void choice_release(struct choice *c)
{
    free(c->state);
    ckpt_catalog_free(c->made);
}

/* Note whose state the tensor is. */
static int note(struct choice *c, const struct ckpt_tensor *t, struct ckpt_err *err)
{
    const struct ckpt_catalog *cat = c->cat;
    const struct ckpt_tensor *w =
        t->state->weight ? ckpt_catalog_find(cat, t->state->weight) : NULL;

    c->nstate++;
    if (!w && t->state->weight) {
        c->other = c->nother++ ? c->other : t->name;
        return 0;
    }
    if (!w) {
        c->stray = c->nstray++ ? c->stray : t->name;
        return 0;
    }
    const struct ckpt_tensor **of = &c->state[w - cat->tensors.ptr];
    if (*of)
        return ckpt_fail(err, CKPT_CONFLICT, "'%s' and '%s' are both the %s of '%s'", (*of)->name,
                         t->name, c->kind, w->name);
    if (t->rank != w->rank || memcmp(t->dim, w->dim, w->rank * sizeof *w->dim) != 0)
        return ckpt_fail(err, CKPT_CONFLICT, "'%s' has the shape %s, but its parameter '%s' has %s",
                         t->name, ckpt_shape_text(t->dim, t->rank).text, w->name,
                         ckpt_shape_text(w->dim, w->rank).text);
    *of = t;
    return 0;
}

/* Adam has both of its moments of a parameter, or none. */
static int check_pair(const struct choice *c, struct ckpt_err *err)
{
    static const char *const pair[] = {MOMENT, "exp_avg_sq"};
    const struct ckpt_catalog *cat = c->cat;
    const char *other = strcmp(c->kind, pair[0]) == 0   ? pair[1]
                        : strcmp(c->kind, pair[1]) == 0 ? pair[0]
                                                        : NULL;

    for (size_t i = 0; other && i < cat->tensors.len; i++) {
        const struct ckpt_state *s = cat->tensors.ptr[i].state;
        const struct ckpt_tensor *w = s && s->weight && strcmp(s->kind, other) == 0
                                          ? ckpt_catalog_find(cat, s->weight)
                                          : NULL;
        if (w && !c->state[w - cat->tensors.ptr]) {
            const char *why = left_out(cat);
            return ckpt_fail(err, CKPT_MISSING, "'%s' has %s, but not %s%s%s", w->name, other,
                             c->kind, why ? ": " : ": is a file of the optimizer lost?",
                             why ? why : "");
        }
    }
    return 0;
}

static int find_states(struct choice *c, struct ckpt_err *err)
{
    const struct ckpt_catalog *cat = c->cat;

    if (!(c->state = calloc(cat->tensors.len + 1, sizeof *c->state)))
        return ckpt_nomem(err);
    for (size_t i = 0; i < cat->tensors.len; i++) {
        const struct ckpt_tensor *t = &cat->tensors.ptr[i];
        if (t->state && strcmp(t->state->kind, c->kind) == 0 && note(c, t, err) < 0)
            return -1;
    }
    if (has_others(c->asked->state) || is_origin(c->asked->state))
        return 0;
    if (!c->nstate)
        return fail_missing(c->asked, c->cat, err);
    if (c->nstray < c->nstate)
        return check_pair(c, err);
    return ckpt_fail(
        err, CKPT_UNSUPPORTED,
        "nothing says whose '%s' is, nor that of other tensors of this state: no weight "
        "has such a name (view=raw lists all)",
        c->stray);
}

/* The dtype of the states, which weights without one get, so that they can be joined with others.
 */
static enum ckpt_dtype dtype_of(const struct choice *c)
{
    for (size_t i = 0; i < c->cat->tensors.len; i++)
        if (c->state[i])
            return (enum ckpt_dtype)c->state[i]->dtype;
    return CKPT_F32;
}

static int add_nowhere(struct choice *c, const struct ckpt_tensor *w, const char *name,
                       enum ckpt_dtype dtype, struct ckpt_err *err)
{
    if (ckpt_catalog_add_whole(c->made, name, dtype, w->dim, w->rank, c->nowhere, 0, err) < 0)
        return -1;
    c->made->tensors.ptr[c->made->tensors.len - 1].ranks = w->ranks;
    return 0;
}

static int add_state(struct choice *c, const struct ckpt_tensor *t, const char *name,
                     struct ckpt_err *err)
{
    struct ckpt_tensor own = *t;

    own.name = name;
    own.wanted = ckpt_state_is_asked(c->asked->state) ? 0 : t->wanted;
    return ckpt_catalog_copy(c->made, &own, 0, err);
}

/* A source without bytes, whose number is c->nowhere then. */
static int new_nowhere(struct choice *c, const char *why, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_source_unrefp) struct ckpt_source *nowhere = NULL;

    if (ckpt_source_nowhere_new(why, &nowhere, err) < 0)
        return -1;
    c->nowhere = ckpt_catalog_add_source(c->made, nowhere, err);
    return c->nowhere == UINT32_MAX ? -1 : 0;
}

/* Add a tensor in a source of its own, which has the name of `t`, a tensor of the reader's. */
static int add_origin(struct choice *c, const struct ckpt_tensor *t, const char *name,
                      struct ckpt_err *err)
{
    return new_nowhere(c, t->name, err) < 0 ? -1 : add_nowhere(c, t, name, CKPT_F32, err);
}

/* Add the states of parameters that are stored in another form, under the names that these would
 * have, which recipes may know. Which weights they stand for is not known here, so weights without
 * a state are not there at all. */
static int add_others(struct choice *c, struct ckpt_err *err)
{
    const struct ckpt_catalog *cat = c->cat;
    int (*const add)(struct choice *, const struct ckpt_tensor *, const char *, struct ckpt_err *) =
        is_origin(c->asked->state) ? add_origin : add_state;

    for (size_t i = 0; i < cat->tensors.len; i++) {
        const struct ckpt_tensor *t = &cat->tensors.ptr[i];
        if (ckpt_state_is_of_other_form(cat, t, c->kind) && add(c, t, t->state->weight, err) < 0)
            return -1;
    }
    ckpt_catalog_note(c->made,
                      "%zu parameters of the optimizer are stored in another form than the weights "
                      "('%s' ...); a tensor without '%s', such as a frozen one, is left out",
                      c->nother, c->other, c->kind);
    return 0;
}

static int replace_all(struct choice *c, struct ckpt_err *err)
{
    const struct ckpt_catalog *cat = c->cat;
    const enum ckpt_dtype dtype = dtype_of(c);
    const bool origin = is_origin(c->asked->state), others = has_others(c->asked->state);

    for (size_t i = 0; i < cat->tensors.len; i++) {
        const struct ckpt_tensor *w = &cat->tensors.ptr[i],
                                 *state = c->state[i] || !others ? c->state[i] : w;
        if (!is_weight(w) || (!state && c->nother))
            continue;
        if (origin  ? add_origin(c, w, w->name, err) < 0
            : state ? add_state(c, state, w->name, err) < 0
                    : add_nowhere(c, w, w->name, dtype, err) < 0)
            return -1;
    }
    return c->nother ? add_others(c, err) : 0;
}

static int begin(struct choice *c, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *why =
        ckpt_asprintf("the checkpoint has no '%s' of this parameter", c->kind);

    if (!why)
        return ckpt_nomem(err);
    return ckpt_catalog_new_like(c->cat, &c->made, err) < 0 ? -1 : new_nowhere(c, why, err);
}

/* Keep the tensors of the state, under their parameters' names. */
static int keep_raw(const struct ckpt_state_asked *asked, struct ckpt_catalog *cat,
                    struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) const char **name = ckpt_catalog_names(cat);
    size_t kept = 0;

    if (!name)
        return ckpt_nomem(err);
    for (size_t i = 0; i < cat->tensors.len; i++) {
        struct ckpt_tensor *t = &cat->tensors.ptr[i];
        const bool is = strcmp(kind_of(t), asked->state) == 0;
        name[i] = is ? t->state->parameter : NULL;
        t->wanted = is ? 0 : t->wanted;
        kept += is;
    }
    return kept ? ckpt_catalog_select(cat, name, err) : fail_missing(asked, cat, err);
}

int ckpt_state_make(const struct ckpt_state_asked *asked, const struct ckpt_catalog *cat,
                    struct ckpt_catalog **ret, bool *ret_other_form, struct ckpt_err *err)
{
    ckpt_cleanup(choice_release) struct choice c = {.asked = asked,
                                                    .cat = cat,
                                                    .kind = is_trained(asked->state) ? MASTER
                                                            : is_origin(asked->state)
                                                                ? MOMENT
                                                                : asked->state};

    if (find_states(&c, err) < 0 || begin(&c, err) < 0 || replace_all(&c, err) < 0)
        return -1;
    if (c.nstray)
        ckpt_catalog_warn(
            c.made,
            "left out: %zu tensors of state '%s' whose weight is not known, the first is '%s'",
            c.nstray, c.kind, c.stray);
    *ret_other_form = c.nother > 0;
    *ret = ckpt_steal(&c.made);
    return 0;
}

int ckpt_state_choose(const struct ckpt_state_asked *asked, struct ckpt_catalog **cat,
                      bool *ret_other_form, struct ckpt_err *err)
{
    struct ckpt_catalog *made;

    if (!ckpt_state_is_asked(asked->state))
        return 0;
    if (asked->raw)
        return keep_raw(asked, *cat, err);
    if (ckpt_state_make(asked, *cat, &made, ret_other_form, err) < 0)
        return -1;
    ckpt_catalog_free(*cat);
    *cat = made;
    return 0;
}

int ckpt_state_leave_out(const struct ckpt_state_asked *asked, struct ckpt_catalog *cat,
                         const char ***ret_names, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) const char **name = NULL;
    const char *first = NULL, *why;
    size_t n = 0;

    *ret_names = NULL;
    if (!ckpt_state_is_asked(asked->state) || asked->raw || is_origin(asked->state))
        return 0;
    if (!(name = ckpt_catalog_names(cat)))
        return ckpt_nomem(err);
    for (size_t i = 0; i < cat->tensors.len; i++)
        if (ckpt_tensor_is_nowhere(&cat->tensors.ptr[i])) {
            first = n++ ? first : name[i];
            name[i] = NULL;
        }
    if (!n)
        return 0;
    if ((why = left_out(cat)))
        return ckpt_fail(err, CKPT_MISSING, "state=%s: '%s' has none: %s", asked->state, first,
                         why);
    ckpt_catalog_note(cat, "left out: %zu tensor%s without '%s', such as frozen ones: '%s'%s", n,
                      n == 1 ? "" : "s", asked->state, first, n == 1 ? "" : " ...");
    *ret_names = ckpt_steal(&name);
    return 0;
}
