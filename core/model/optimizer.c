/* SPDX-License-Identifier: Apache-2.0 */
/* The option optimizer: a model with what AdamW has of each parameter, so that training goes on.
 *
 * The reader's catalogue is read once. The same rules make a model of each state, of the weights
 * or the masters in their places; a further one, of tensors that lie nowhere, tells of which stored
 * parameters each tensor of the model is made, and so to which group it belongs and how many steps
 * it took. */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/map.h"
#include "base/mem.h"
#include "base/str.h"
#include "base/vec.h"
#include "format/groups.h"
#include "format/writer.h"
#include "model/describe.h"
#include "model/opening.h"
#include "model/state.h"
#include "tensor/read.h"
#include "tensor/value.h"

#define STEP "step"

/* The moments; then the masters, of a format that has them beside the weights. */
enum { NMOMENTS = 2, MASTER = NMOMENTS, NSTATES };
static const char *const kinds[NSTATES] = {"exp_avg", "exp_avg_sq", "master"};

/* A stored parameter, by the number of its weight in the reader's catalogue, or, if it is stored in
 * another form than the weights, of its first moment. */
struct param {
    size_t group; /* NOT_SAID: no group names it */
    const struct ckpt_tensor *step;
    bool has_master, has_moment;
};
#define NOT_SAID SIZE_MAX

/* The model that is made of one state of each parameter. */
struct model {
    struct ckpt_opening opening;
    uint32_t *source; /* the number in the view's catalogue of each of its sources; UINT32_MAX: the
                         view has it not yet */
};

struct making {
    struct ckpt_opening *o;
    json_t *groups; /* of the run, completed by the options */
    struct param *param;
    bool any_master;
    struct model state[NSTATES];
    size_t nstate; /* how many of them the format has */
    struct ckpt_opening origin;
    size_t *weight_of;   /* by the number of a source of `origin`: the parameter that lies there */
    uint32_t *step_at;   /* of each group: the source with its step; UINT32_MAX: not made yet */
    float steps;         /* of all parameters, where these have none of their own */
    const char *stepped; /* the first of which it is known; NULL: none yet */
    struct ckpt_str buf; /* a name */
};

static void making_release(struct making *m)
{
    json_decref(m->groups);
    free(m->param);
    for (size_t i = 0; i < NSTATES; i++) {
        ckpt_opening_release(&m->state[i].opening);
        free(m->state[i].source);
    }
    ckpt_opening_release(&m->origin);
    free(m->weight_of);
    free(m->step_at);
    ckpt_str_release(&m->buf);
}

static const struct ckpt_writer *writer_of(const struct making *m)
{
    return m->o->shared->opt->output.writer;
}

/* ---- may it be done? ---- */

static int check(const struct ckpt_opening *o, struct ckpt_err *err)
{
    static const char *const known[] = {"weight", "master", "step", "exp_avg", "exp_avg_sq", NULL};
    ckpt_cleanup(ckpt_json_decrefp) json_t *states = ckpt_state_list(o->read);
    const char *kind;
    json_t *one;

    if (o->facts.is_adapter || o->facts.has_adapter)
        return ckpt_fail(err, CKPT_UNSUPPORTED,
                         "option optimizer: '%s' has a LoRA adapter, whose optimizer has the "
                         "adapter's parameters alone: leave the option away",
                         ckpt_dir_path(o->dir));
    json_object_foreach(states, kind, one)
        if (!ckpt_one_of(kind, known))
            return ckpt_fail(err, CKPT_UNSUPPORTED,
                             "option optimizer: '%s' has the state '%s', which AdamW has not: "
                             "view=raw shows it as it is stored",
                             ckpt_dir_path(o->dir), kind);
    return states ? 0 : ckpt_nomem(err);
}

/* ---- groups ---- */

static int read_groups(struct making *m, struct ckpt_err *err)
{
    const struct ckpt_shared *s = m->o->shared;
    const struct ckpt_reader *reader = m->o->reader;
    const struct ckpt_reader_options opt = {
        .pool = s->pool, .log = &s->opt->log, .allow_partial = s->opt->allow_partial};
    ckpt_cleanup(ckpt_json_decrefp) json_t *objects = json_object();

    if (!objects || !(m->groups = json_array()))
        return ckpt_nomem(err);
    if (reader->objects && reader->objects(m->o->dir, &opt, objects, err) < 0)
        return -1;
    if ((reader->groups ? reader->groups(m->o->dir, &opt, objects, m->groups, err)
                        : ckpt_groups_of_torch(objects, m->groups, err)) < 0)
        return -1;
    if (json_array_size(m->groups) == 0 && json_array_append_new(m->groups, json_object()) < 0)
        return ckpt_nomem(err);
    return 0;
}

/* The value of an option; NULL: it was not given. */
static json_t *option(const struct making *m, const char *key)
{
    char own[32];

    (void)snprintf(own, sizeof own, "_%s", key);
    return json_object_get(m->o->shared->opt->overrides, own);
}

/* Must a group have this hyper-parameter? */
static bool is_needed(const struct making *m, size_t hyper)
{
    return hyper == CKPT_HYPER_INITIAL_LR ? writer_of(m)->has_scheduler
           : hyper == CKPT_HYPER_MIN_LR   ? writer_of(m)->has_min_lr
                                          : true;
}

/* Give the group its hyper-parameters: an option's before the run's. */
static int complete(struct making *m, json_t *group, struct ckpt_err *err)
{
    for (size_t i = 0; i < CKPT_NHYPER; i++) {
        const char *key = ckpt_hyper_keys[i];
        json_t *said = json_object_get(group, key), *given = option(m, key);
        if (!said && !given && !is_needed(m, i))
            continue;
        if (given && i == CKPT_HYPER_MIN_LR && !is_needed(m, i))
            return ckpt_fail(
                err, CKPT_USAGE,
                "option %s does not apply to view=%s, whose groups have no such number", key,
                writer_of(m)->name);
        if (!said && !given)
            return ckpt_fail(err, CKPT_MISSING,
                             "option optimizer: '%s' does not say %s of its optimizer: give it "
                             "with the option %s=%s",
                             ckpt_dir_path(m->o->dir), key, key,
                             i == CKPT_HYPER_BETAS ? "B1+B2" : "X");
        if (given && said && !ckpt_json_same(given, said))
            ckpt_catalog_note(m->o->cat, "optimizer: %s is that of the option, not the run's", key);
        if (given && json_object_set(group, key, given) < 0)
            return ckpt_nomem(err);
    }
    return 0;
}

static int complete_all(struct making *m, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_str_release) struct ckpt_str defaults = {0};
    json_t *group;
    size_t i;

    json_array_foreach(m->groups, i, group)
        if (complete(m, group, err) < 0)
            return -1;
    for (const struct ckpt_hyper_flag *f = ckpt_hyper_flags; f->key; f++) {
        bool any = false;
        json_array_foreach(m->groups, i, group) {
            if (json_object_get(group, f->key))
                continue;
            any = true;
            if (json_object_set_new(group, f->key,
                                    f->is_null ? json_null() : json_boolean(f->is_true)) < 0)
                return ckpt_nomem(err);
        }
        if (any)
            ckpt_str_printf(&defaults, "%s%s", defaults.len ? ", " : "", f->key);
    }
    if (defaults.len)
        ckpt_catalog_note(m->o->cat, "optimizer: the run does not say %s: torch's defaults",
                          ckpt_str_get(&defaults));
    return defaults.failed ? ckpt_nomem(err) : 0;
}

/* Which parameters a group has was not said, but follows from what is usual. */
static void warn_of_vectors(const struct making *m)
{
    const json_t *first = json_array_get(m->groups, 0);

    if (json_array_size(m->groups) > 1 && !json_object_get(first, "params") &&
        json_object_get(first, "vectors"))
        ckpt_catalog_warn(m->o->cat,
                          "optimizer: the run has %zu groups of parameters and does not say which "
                          "parameters they have: those of one dimension and biases are taken for "
                          "the group without weight decay (weight_decay= and lr= make one group)",
                          json_array_size(m->groups));
}

/* Groups that do not say which parameters they have, and are alike, are one. */
static void join_alike(struct making *m)
{
    for (size_t i = 0; i < json_array_size(m->groups); i++)
        for (size_t k = json_array_size(m->groups); k-- > i + 1;) {
            const json_t *a = json_array_get(m->groups, i), *b = json_array_get(m->groups, k);
            if (!json_object_get(a, "params") && !json_object_get(b, "params") &&
                ckpt_groups_alike(a, b))
                (void)json_array_remove(m->groups, k);
        }
}

/* ---- stored parameters ---- */

/* The numbers of groups by the names of their parameters; new, or NULL: out of memory. */
static json_t *number_groups(const struct making *m)
{
    json_t *by_name = json_object(), *group, *name;
    size_t i, k;

    json_array_foreach(m->groups, i, group) {
        json_array_foreach(json_object_get(group, "params"), k, name)
            ckpt_json_set(&by_name, json_string_value(name), json_integer((json_int_t)i));
    }
    return by_name;
}

/* Find the first moments by the names of weights that are not there; 0 or -1 (no memory). */
static int find_other_forms(const struct ckpt_catalog *cat, struct ckpt_map *ret)
{
    for (size_t i = 0; i < cat->tensors.len; i++) {
        const struct ckpt_tensor *t = &cat->tensors.ptr[i];
        if (ckpt_state_is_of_other_form(cat, t, kinds[0]) &&
            ckpt_map_add(ret, t->state->weight, (uint32_t)i) == CKPT_NONE)
            return -1;
    }
    return 0;
}

/* The number of the parameter whose state it is; CKPT_NONE: nothing says it. */
static uint32_t param_of(const struct ckpt_catalog *cat, const struct ckpt_map *other_forms,
                         const struct ckpt_state *s)
{
    const struct ckpt_tensor *w = s && s->weight ? ckpt_catalog_find(cat, s->weight) : NULL;

    return w                ? (uint32_t)(w - cat->tensors.ptr)
           : s && s->weight ? ckpt_map_find(other_forms, s->weight)
                            : CKPT_NONE;
}

/* Note the groups and the steps of all stored parameters. */
static int note_params(struct making *m, struct ckpt_err *err)
{
    const struct ckpt_catalog *cat = m->o->read;
    ckpt_cleanup(ckpt_map_release) struct ckpt_map other_forms = {0};
    ckpt_cleanup(ckpt_json_decrefp) json_t *by_name = number_groups(m);
    const bool single = json_array_size(m->groups) == 1;

    if (!by_name || !(m->param = calloc(cat->tensors.len + 1, sizeof *m->param)) ||
        find_other_forms(cat, &other_forms) < 0)
        return ckpt_nomem(err);
    for (size_t i = 0; i < cat->tensors.len; i++)
        m->param[i].group = single ? 0 : NOT_SAID;
    for (size_t i = 0; i < cat->tensors.len; i++) {
        const struct ckpt_tensor *t = &cat->tensors.ptr[i];
        const uint32_t at = param_of(cat, &other_forms, t->state);
        if (at == CKPT_NONE)
            continue;
        struct param *p = &m->param[at];
        const json_t *group = json_object_get(by_name, t->state->parameter);
        if (strcmp(t->state->kind, STEP) == 0)
            p->step = t;
        p->has_master |= strcmp(t->state->kind, "master") == 0;
        p->has_moment |= strcmp(t->state->kind, kinds[0]) == 0;
        m->any_master |= p->has_master;
        if (group && !single)
            p->group = (size_t)json_integer_value(group);
    }
    return 0;
}

/* ---- models ---- */

static int make_model(struct making *m, const char *state, struct ckpt_opening *ret,
                      struct ckpt_err *err)
{
    return ckpt_opening_begin_state(m->o, state, ret, err) < 0 ||
                   ckpt_opening_identify(ret, err) < 0 || ckpt_opening_make_model(ret, err) < 0
               ? ckpt_err_in(err, "option optimizer: %s", state)
               : 0;
}

/* Find out which stored parameter lies in which source of the model of origins. */
static int note_sources(struct making *m, struct ckpt_err *err)
{
    const struct ckpt_catalog *cat = m->origin.cat;

    if (!(m->weight_of = calloc(cat->sources.len + 1, sizeof *m->weight_of)))
        return ckpt_nomem(err);
    for (size_t i = 0; i < cat->sources.len; i++) {
        m->weight_of[i] = NOT_SAID;
        if (!ckpt_source_is_nowhere(cat->sources.ptr[i]))
            continue;
        ckpt_cleanup(ckpt_freep) char *name = ckpt_source_name(cat->sources.ptr[i]);
        const struct ckpt_tensor *w = ckpt_catalog_find(m->o->read, name);
        if (w)
            m->weight_of[i] = (size_t)(w - m->o->read->tensors.ptr);
    }
    return 0;
}

/* The facts and remarks of a moment's model are the model's; what it left out is worth a line. */
static void take_notes(struct making *m, const struct ckpt_catalog *from)
{
    json_t *line;
    size_t i;

    json_array_foreach(from->warnings, i, line)
        ckpt_catalog_warn(m->o->cat, "%s", json_string_value(line));
    json_array_foreach(json_object_get(from->about, "notes"), i, line)
        ckpt_catalog_note(m->o->cat, "%s", json_string_value(line));
}

static int make_models(struct making *m, struct ckpt_err *err)
{
    m->nstate = writer_of(m)->has_masters ? NSTATES : NMOMENTS;
    for (size_t i = 0; i < m->nstate; i++) {
        struct ckpt_opening *o = &m->state[i].opening;
        if (make_model(m, i == MASTER ? CKPT_STATE_TRAINED : kinds[i], o, err) < 0)
            return -1;
        take_notes(m, o->cat);
    }
    return make_model(m, CKPT_STATE_ORIGIN, &m->origin, err) < 0 ? -1 : note_sources(m, err);
}

/* ---- what a tensor of the model is made of ---- */

/* The group and the step of one of its parameters, which all others must agree with. */
struct made_of {
    const struct ckpt_tensor *tensor; /* of the model */
    size_t first;                     /* a stored parameter; NOT_SAID: none yet */
    size_t group;
    float step;
    bool has_step;
};

static int read_step(const struct ckpt_tensor *t, float *ret, struct ckpt_err *err)
{
    struct ckpt_reading rd = {0};

    if (t->numel != 1 || t->dtype != CKPT_F32)
        return ckpt_fail(err, CKPT_UNSUPPORTED,
                         "'%s' is %s %s, not one F32: give the option optimizer_step=N", t->name,
                         ckpt_tensor_dtype_name(t), ckpt_shape_text(t->dim, t->rank).text);
    return ckpt_tensor_pread(t, &rd, ret, sizeof *ret, 0, err);
}

/* The group of a tensor whose parameters no group names: by its kind, if the groups tell that, and
 * only one has that kind. */
static size_t group_by_kind(const struct making *m, const struct ckpt_tensor *t)
{
    const bool is_vector = t->rank <= 1 || ckpt_has_suffix(t->name, "bias");
    size_t i, found = NOT_SAID;
    json_t *group;

    json_array_foreach(m->groups, i, group) {
        const json_t *vectors = json_object_get(group, "vectors");
        if (!vectors || json_is_true(vectors) != is_vector)
            continue;
        if (found != NOT_SAID)
            return NOT_SAID;
        found = i;
    }
    return found;
}

static int add_param(struct making *m, struct made_of *of, size_t i, struct ckpt_err *err)
{
    const struct ckpt_tensor *tensors = m->o->read->tensors.ptr;
    const struct param *p = &m->param[i];
    const size_t group = p->group != NOT_SAID ? p->group : group_by_kind(m, of->tensor);
    float step = 0;

    if (m->any_master && !p->has_master && ckpt_dtype_size(tensors[i].dtype) == 2)
        return ckpt_fail(err, CKPT_CONFLICT,
                         "option optimizer: '%s' has moments and is %s, but has no master, which "
                         "others have",
                         tensors[i].name, ckpt_tensor_dtype_name(&tensors[i]));
    if (group == NOT_SAID)
        return ckpt_fail(err, CKPT_UNSUPPORTED,
                         "option optimizer: the run has %zu groups of parameters, and nothing says "
                         "to which '%s' belongs: give numbers for all with lr=, weight_decay= and "
                         "initial_lr=",
                         json_array_size(m->groups), tensors[i].name);
    if (p->step && !option(m, "optimizer_step") && read_step(p->step, &step, err) < 0)
        return -1;
    if (of->first == NOT_SAID) {
        *of = (struct made_of){of->tensor, i, group, step, p->step != NULL};
        return 0;
    }
    if (of->group != group)
        return ckpt_fail(err, CKPT_UNSUPPORTED,
                         "option optimizer: '%s' is made of '%s' and '%s', which are in different "
                         "groups of the optimizer: give numbers for all with lr= and weight_decay=",
                         of->tensor->name, tensors[of->first].name, tensors[i].name);
    if (of->has_step != (p->step != NULL) || of->step != step)
        return ckpt_fail(err, CKPT_UNSUPPORTED,
                         "option optimizer: '%s' is made of '%s' and '%s', which took different "
                         "numbers of steps: give one for all with optimizer_step=N",
                         of->tensor->name, tensors[of->first].name, tensors[i].name);
    return 0;
}

/* Look at all stored parameters of which t, a tensor of the model of origins, is made. */
static int look_at(struct making *m, const struct ckpt_tensor *t, struct made_of *of,
                   struct ckpt_err *err)
{
    size_t last = NOT_SAID;

    for (size_t i = 0; i < t->npiece; i++) {
        const size_t weight = m->weight_of[t->piece[i].source];
        if (weight != NOT_SAID && weight != last && weight != of->first &&
            add_param(m, of, weight, err) < 0)
            return -1;
        last = weight;
    }
    for (uint32_t i = 0; t->value && i < t->value->narg; i++)
        if (look_at(m, t->value->arg[i], of, err) < 0)
            return -1;
    return 0;
}

/* ---- the tensors of the view ---- */

static const char *name_of(struct making *m, const char *parameter, const char *kind)
{
    ckpt_str_clear(&m->buf);
    writer_of(m)->state_name(&m->buf, parameter, kind);
    return ckpt_str_get(&m->buf);
}

/* State of the tensor that was added last what it is. */
static int set_state(struct making *m, const char *parameter, const char *kind,
                     struct ckpt_err *err)
{
    struct ckpt_catalog *cat = m->o->cat;
    const struct ckpt_state state = {kind, parameter, name_of(m, parameter, "weight")};

    return ckpt_catalog_set_state(cat, cat->tensors.len - 1, &state, err);
}

/* Note how many steps a parameter took. */
static void note_taken(struct making *m, float x)
{
    if (x >= 0 && x < (float)INT32_MAX && (uint64_t)x > m->o->taken)
        m->o->taken = (uint64_t)x;
}

/* Add a source with a number of steps to the model's catalogue. */
static int new_number(struct making *m, float x, uint32_t *ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_source_unrefp) struct ckpt_source *s = NULL;

    if (ckpt_source_mem_new("the optimizer's step", &x, sizeof x, &s, err) < 0)
        return -1;
    note_taken(m, x);
    *ret = ckpt_catalog_add_source(m->o->cat, s, err);
    return *ret == UINT32_MAX ? -1 : 0;
}

/* The steps of a group, where parameters have none: the option's, or else the group's. */
static int steps_of_group(const struct making *m, size_t group, float *ret, struct ckpt_err *err)
{
    const json_t *given = option(m, "optimizer_step"),
                 *said = json_object_get(json_array_get(m->groups, group), STEP);

    if (!given && !said)
        return ckpt_fail(err, CKPT_MISSING,
                         "option optimizer: '%s' does not say how many steps its optimizer has "
                         "taken: give the number with the option optimizer_step=N",
                         ckpt_dir_path(m->o->dir));
    *ret = (float)json_number_value(given ? given : said);
    return 0;
}

/* The source with the steps of a group. */
static int step_of_group(struct making *m, size_t group, uint32_t *ret, struct ckpt_err *err)
{
    float x;

    if (m->step_at[group] == UINT32_MAX &&
        (steps_of_group(m, group, &x, err) < 0 || new_number(m, x, &m->step_at[group], err) < 0))
        return -1;
    *ret = m->step_at[group];
    return 0;
}

/* Add the step: the number that is stored of one of the parameters, or else one that was given. */
static int add_step(struct making *m, const struct made_of *of, const char *name,
                    struct ckpt_err *err)
{
    const uint64_t no_dim[1] = {0};
    uint32_t source;

    if (of->has_step && !option(m, "optimizer_step")) {
        if (new_number(m, of->step, &source, err) < 0)
            return -1;
    } else if (step_of_group(m, of->group, &source, err) < 0) {
        return -1;
    }
    return ckpt_catalog_add_whole(m->o->cat, name, CKPT_F32, no_dim, 0, source, 0, err);
}

/* Compare the steps of a parameter with those of all others before it. */
static int compare_steps(struct making *m, const struct made_of *of, struct ckpt_err *err)
{
    float x = of->step;

    if ((!of->has_step || option(m, "optimizer_step")) && steps_of_group(m, of->group, &x, err) < 0)
        return -1;
    if (m->stepped && m->steps != x)
        return ckpt_fail(err, CKPT_UNSUPPORTED,
                         "option optimizer: '%s' took %g steps, and '%s' %g, but view=%s has one "
                         "number for all: give it with optimizer_step=N",
                         m->stepped, (double)m->steps, of->tensor->name, (double)x,
                         writer_of(m)->name);
    if (!(x >= 0 && x < (float)INT32_MAX) || x != floorf(x))
        return ckpt_fail(err, CKPT_FORMAT,
                         "option optimizer: '%s' took %g steps, which is no number of steps: give "
                         "it with optimizer_step=N",
                         of->tensor->name, (double)x);
    m->steps = x;
    m->stepped = m->stepped ? m->stepped : of->tensor->name;
    note_taken(m, x);
    return 0;
}

/* The number in the view's catalogue of a source of a state's model. What that has besides the
 * reader's sources (zeros, for padding) the view's catalogue gets when a tensor needs it. */
static int source_of(struct making *m, struct model *state, uint32_t i, uint32_t *ret,
                     struct ckpt_err *err)
{
    const struct ckpt_catalog *of = state->opening.cat;

    if (i < m->o->read->sources.len) {
        *ret = i;
        return 0;
    }
    if (!state->source) {
        const size_t size = of->sources.len * sizeof *state->source;
        if (!(state->source = malloc(size)))
            return ckpt_nomem(err);
        memset(state->source, 0xff, size);
    }
    if (state->source[i] == UINT32_MAX)
        state->source[i] = ckpt_catalog_add_source(m->o->cat, of->sources.ptr[i], err);
    *ret = state->source[i];
    return *ret == UINT32_MAX ? -1 : 0;
}

/* Give tensor `index` of the view the pieces of a state. */
static int copy_pieces(struct making *m, struct model *state, const struct ckpt_tensor *t,
                       size_t index, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) struct ckpt_piece_draft *draft =
        malloc((t->npiece + 1) * sizeof *draft);

    if (!draft)
        return ckpt_nomem(err);
    for (size_t i = 0; i < t->npiece; i++) {
        const struct ckpt_piece *p = &t->piece[i];
        draft[i] = (struct ckpt_piece_draft){.dst = p->dst, .src = p->src, .naxis = p->naxis};
        memcpy(draft[i].axis, p->axis, p->naxis * sizeof *p->axis);
        if (source_of(m, state, p->source, &draft[i].source, err) < 0)
            return -1;
    }
    return ckpt_catalog_set_pieces(m->o->cat, index, draft, t->npiece, err);
}

/* Add a state, under a name. The model that has its cuts, and what it is computed of, is kept. */
static int add_state(struct making *m, struct model *state, const struct ckpt_tensor *t,
                     const char *name, struct ckpt_err *err)
{
    struct ckpt_catalog *cat = m->o->cat;
    size_t index;

    if (ckpt_catalog_add(cat, name, (enum ckpt_dtype)t->dtype, t->dim, t->rank, &index, err) < 0)
        return -1;
    struct ckpt_tensor *own = &cat->tensors.ptr[index];
    own->cuts = t->cuts;
    if (!t->value)
        return copy_pieces(m, state, t, index, err);
    own->value = t->value;
    return 0;
}

/* Find a stored parameter with moments and one without, of those of which t, a tensor of the model
 * of origins, is made. */
static void find_frozen(const struct making *m, const struct ckpt_tensor *t, size_t *frozen,
                        size_t *trained)
{
    for (size_t i = 0; i < t->npiece; i++) {
        const size_t weight = m->weight_of[t->piece[i].source];
        if (weight != NOT_SAID)
            *(m->param[weight].has_moment ? trained : frozen) = weight;
    }
    for (uint32_t i = 0; t->value && i < t->value->narg; i++)
        find_frozen(m, t->value->arg[i], frozen, trained);
}

/* A tensor without moments is frozen: so is all of which it is made. */
static int check_frozen(const struct making *m, const struct ckpt_tensor *origin,
                        struct ckpt_err *err)
{
    const struct ckpt_tensor *tensors = m->o->read->tensors.ptr;
    size_t frozen = NOT_SAID, trained = NOT_SAID;

    if (origin)
        find_frozen(m, origin, &frozen, &trained);
    if (frozen == NOT_SAID || trained == NOT_SAID)
        return 0;
    return ckpt_fail(err, CKPT_UNSUPPORTED,
                     "option optimizer: '%s' is made of '%s', which has moments, and of '%s', "
                     "which has none, as if it were frozen: one parameter has moments, or none",
                     origin->name, tensors[trained].name, tensors[frozen].name);
}

/* Add what the optimizer has of a parameter, whose name is `name` without what the format puts
 * before it. */
static int add_states(struct making *m, const char *name, struct ckpt_err *err)
{
    const struct ckpt_tensor *origin = ckpt_catalog_find(m->origin.cat, name), *state[NSTATES];
    struct made_of of = {.tensor = origin, .first = NOT_SAID};
    size_t n = 0;

    for (size_t k = 0; k < m->nstate; k++) {
        state[k] = ckpt_catalog_find(m->state[k].opening.cat, name);
        n += k < NMOMENTS && state[k];
    }
    if (n == 0)
        return check_frozen(m, origin, err);
    if (n < NMOMENTS || !origin)
        return ckpt_fail(err, CKPT_CONFLICT, "option optimizer: '%s' has %s, but not %s", name,
                         kinds[state[0] ? 0 : 1], kinds[state[0] ? 1 : 0]);
    if (look_at(m, origin, &of, err) < 0)
        return -1;
    if (of.first == NOT_SAID)
        return ckpt_fail(err, CKPT_UNSUPPORTED,
                         "option optimizer: nothing says of which parameters '%s' is made", name);
    if (writer_of(m)->steps_in_groups ? compare_steps(m, &of, err) < 0
                                      : add_step(m, &of, name_of(m, name, STEP), err) < 0 ||
                                            set_state(m, name, STEP, err) < 0)
        return -1;
    for (size_t k = 0; k < m->nstate; k++)
        if (state[k] &&
            (add_state(m, &m->state[k], state[k], name_of(m, name, kinds[k]), err) < 0 ||
             set_state(m, name, kinds[k], err) < 0))
            return -1;
    json_t *params = json_object_get(json_array_get(m->groups, of.group), "params");
    return m->buf.failed || json_array_append_new(params, json_string(name)) < 0 ? ckpt_nomem(err)
                                                                                 : 0;
}

/* Have the sources of the model's catalogue the numbers that they have in another one's? */
static bool same_sources(const struct making *m, const struct ckpt_catalog *of)
{
    const struct ckpt_catalog *cat = m->o->cat, *read = m->o->read;
    bool same = cat->sources.len >= read->sources.len && of->sources.len >= read->sources.len;

    for (size_t i = 0; same && i < read->sources.len; i++)
        same = cat->sources.ptr[i] == of->sources.ptr[i];
    return same;
}

/* Begin new lists of parameters, under the model's names. */
static int clear_params(struct making *m, struct ckpt_err *err)
{
    const size_t n = json_array_size(m->groups);

    if (!(m->step_at = calloc(n + 1, sizeof *m->step_at)))
        return ckpt_nomem(err);
    for (size_t i = 0; i < n; i++) {
        m->step_at[i] = UINT32_MAX;
        if (json_object_set_new(json_array_get(m->groups, i), "params", json_array()) < 0)
            return ckpt_nomem(err);
    }
    return 0;
}

/* Add, for each name that the model's class has for a tensor besides its own, that tensor again:
 * torch's state dict of a model has both, and its loader wants them. */
static int add_tied(struct making *m, const json_t *ties, struct ckpt_err *err)
{
    struct ckpt_catalog *cat = m->o->cat;
    const char *name;
    json_t *to;
    size_t index;

    json_object_foreach((json_t *)ties, name, to) {
        const struct ckpt_tensor *found =
            ckpt_catalog_find(cat, name_of(m, json_string_value(to), "weight"));
        if (!found)
            continue;
        const struct ckpt_tensor of = *found; /* adding may move it */
        if (ckpt_catalog_add(cat, name_of(m, name, "weight"), (enum ckpt_dtype)of.dtype, of.dim,
                             of.rank, &index, err) < 0)
            return -1;
        struct ckpt_tensor *t = &cat->tensors.ptr[index];
        const char *own = t->name;
        *t = of;
        t->name = own;
    }
    return 0;
}

/* Add what the optimizer has of parameters that the model's tensors are parts of. */
static int add_fused(struct making *m, struct ckpt_err *err)
{
    const struct ckpt_catalog *origin = m->origin.cat;

    for (size_t i = 0; i < origin->tensors.len; i++) {
        const char *name = origin->tensors.ptr[i].name;
        if (!ckpt_catalog_find(m->o->cat, name_of(m, name, "weight")) &&
            add_states(m, name, err) < 0)
            return -1;
    }
    return 0;
}

/* Rename the model's tensors, and add the optimizer's behind them. */
static int add_all(struct making *m, struct ckpt_err *err)
{
    struct ckpt_catalog *cat = m->o->cat;
    const size_t n = cat->tensors.len;
    ckpt_cleanup(ckpt_freep) const char **old = ckpt_catalog_names(cat);
    ckpt_cleanup(ckpt_freep) const char **name = ckpt_catalog_names(cat);
    ckpt_cleanup(ckpt_json_decrefp) json_t *ties =
        ckpt_describe_ties(m->o->shared, cat, m->o->config);

    if (!old || !name || !ties)
        return ckpt_nomem(err);
    for (size_t i = 0; i < m->nstate; i++)
        if (!same_sources(m, m->state[i].opening.cat))
            return ckpt_fail(err, CKPT_UNSUPPORTED,
                             "option optimizer: %s lies in other files than the model", kinds[i]);
    for (size_t i = 0; i < n; i++)
        if (!(name[i] = ckpt_arena_strdup(&cat->arena, name_of(m, old[i], "weight"))))
            return ckpt_nomem(err);
    if (ckpt_catalog_select(cat, name, err) < 0 ||
        ckpt_catalog_reserve(cat, n * (2 + NSTATES), err) < 0 || add_tied(m, ties, err) < 0)
        return -1;
    for (size_t i = 0; i < n; i++)
        if (add_states(m, old[i], err) < 0)
            return -1;
    if (m->origin.fuses && add_fused(m, err) < 0)
        return -1;
    for (size_t i = 0; i < m->nstate; i++) {
        if (ckpt_catalog_keep(cat, m->state[i].opening.cat, err) < 0)
            return -1;
        m->state[i].opening.cat = NULL;
    }
    return 0;
}

/* ---- the groups of the view ---- */

/* A group as torch's AdamW has it, with what the format has besides; new, or NULL: out of memory.
 */
static json_t *torch_group(const struct making *m, const json_t *of)
{
    json_t *group = json_object(), *betas = json_object();

    ckpt_json_set(&betas, "$tuple", json_deep_copy(json_object_get(of, "betas")));
    for (size_t i = 0; i < CKPT_HYPER_INITIAL_LR; i++)
        ckpt_json_set(&group, ckpt_hyper_keys[i],
                      i == CKPT_HYPER_BETAS
                          ? betas
                          : json_deep_copy(json_object_get(of, ckpt_hyper_keys[i])));
    for (const struct ckpt_hyper_flag *f = ckpt_hyper_flags; f->key; f++)
        ckpt_json_set(&group, f->key, json_deep_copy(json_object_get(of, f->key)));
    if (json_object_get(of, "initial_lr"))
        ckpt_json_set(&group, "initial_lr", json_deep_copy(json_object_get(of, "initial_lr")));
    if (writer_of(m)->has_min_lr)
        ckpt_json_set(&group, "min_lr", json_deep_copy(json_object_get(of, "min_lr")));
    if (writer_of(m)->steps_in_groups)
        ckpt_json_set(&group, STEP, json_integer((json_int_t)m->steps));
    ckpt_json_set(&group, "params", json_deep_copy(json_object_get(of, "params")));
    return group;
}

static int give_groups(struct making *m, struct ckpt_err *err)
{
    json_t *group;
    size_t i;

    m->o->groups = json_array();
    json_array_foreach(m->groups, i, group)
        ckpt_json_append(&m->o->groups, torch_group(m, group));
    return m->o->groups ? 0 : ckpt_nomem(err);
}

/* ---- all of it ---- */

int ckpt_optimizer_add(struct ckpt_opening *o, struct ckpt_err *err)
{
    ckpt_cleanup(making_release) struct making m = {.o = o};

    if (!o->shared->opt->optimizer)
        return 0;
    if (check(o, err) < 0 || make_models(&m, err) < 0 || read_groups(&m, err) < 0 ||
        complete_all(&m, err) < 0)
        return -1;
    join_alike(&m);
    warn_of_vectors(&m);
    if (note_params(&m, err) < 0 || clear_params(&m, err) < 0 || add_all(&m, err) < 0)
        return -1;
    ckpt_catalog_note(o->cat, "optimizer: the states of schedulers, random numbers and data "
                              "loaders are not in this view");
    return give_groups(&m, err);
}
