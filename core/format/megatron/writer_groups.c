/* SPDX-License-Identifier: Apache-2.0 */
/* The optimizer's part of the common state: the groups of parameters of Megatron's distributed
 * optimizer, which finds its own among them by wd_mult, lr_mult, max_lr, min_lr and the like, in
 * any order. Which parameters a group has is nowhere stored: by default those of one dimension and
 * the biases have wd_mult 0, and all others 1. Experts that another set of ranks shares have an
 * optimizer of their own, the second one of two that are chained. */
#include <string.h>

#include "base/str.h"
#include "container/torch_out.h"
#include "format/groups.h"
#include "format/megatron/writer_plan.h"

enum { VECTORS = 1, EXPERTS = 2, NCLASSES = 4 }; /* bits of a class of parameters */

struct group_class {
    const json_t *group; /* of the run; NULL: the model has no such parameters */
    const char *first;   /* a parameter */
};

/* Has a group of Megatron's a value of its own for this member, or none? */
static bool is_translated(const char *key)
{
    static const char *const own[] = {"params", "initial_lr", "min_lr", NULL};

    return ckpt_one_of(key, own);
}

static unsigned class_of(const struct ckpt_writing *w, bool apart, const char *name)
{
    const struct ckpt_tensor *t = ckpt_catalog_find(w->cat, name);
    const struct ckpt_mg_name n = ckpt_mg_name_parse(name);

    return (apart && n.leaf ? EXPERTS : 0) |
           ((t && t->rank <= 1) || ckpt_has_suffix(name, ".bias") ? VECTORS : 0);
}

/* Find the run's group of each class. */
static int find_classes(const struct ckpt_writing *w, bool apart,
                        struct group_class classes[NCLASSES], struct ckpt_err *err)
{
    json_t *group, *name;
    size_t i, k;

    json_array_foreach((json_t *)w->groups, i, group)
        json_array_foreach(json_object_get(group, "params"), k, name) {
            const char *text = json_string_value(name);
            struct group_class *c = &classes[class_of(w, apart, text)];
            if (!c->group) {
                *c = (struct group_class){group, text};
            } else if (!ckpt_groups_alike(c->group, group)) {
                return ckpt_fail(
                    err, CKPT_UNSUPPORTED,
                    "option optimizer: Megatron has '%s' and '%s' in one group of parameters, but "
                    "the run in two that differ: give numbers for all with lr= and weight_decay=",
                    c->first, text);
            }
        }
    return 0;
}

/* A class without parameters has the values of one that is near, since whoever resumes may divide
 * them otherwise; NULL: there are no parameters at all. */
static const struct group_class *filled(const struct group_class classes[NCLASSES], unsigned i)
{
    static const unsigned nearest[] = {0, EXPERTS, VECTORS, EXPERTS | VECTORS};

    for (size_t k = 0; k < NCLASSES; k++)
        if (classes[i ^ nearest[k]].group)
            return &classes[i ^ nearest[k]];
    return NULL;
}

static void warn_of_decay(const struct ckpt_writing *w, const struct group_class *vectors)
{
    const double decay = json_number_value(json_object_get(vectors->group, "weight_decay"));

    if (vectors->group && decay > 0)
        ckpt_catalog_warn(w->cat,
                          "optimizer: the run has the weight decay %g for '%s' and others of one "
                          "dimension, too. Megatron's group of these has wd_mult 0, and so its "
                          "scheduler sets their weight decay to 0, unless it is told otherwise",
                          decay, vectors->first);
}

/* A group as Megatron has it; new, or NULL: out of memory. */
static json_t *make_group(const json_t *of, unsigned class)
{
    json_t *group = json_object(), *value;
    const char *key;

    ckpt_json_set(&group, "is_expert_parallel", json_boolean(class & EXPERTS));
    ckpt_json_set(&group, "default_config", json_true());
    ckpt_json_set(&group, "wd_mult", json_real(class & VECTORS ? 0 : 1));
    ckpt_json_set(&group, "lr_mult", json_real(1));
    ckpt_json_set(&group, "is_decoupled_lr", json_false());
    ckpt_json_set(&group, "max_lr", json_deep_copy(json_object_get(of, "initial_lr")));
    ckpt_json_set(&group, "min_lr", json_deep_copy(json_object_get(of, "min_lr")));
    json_object_foreach((json_t *)of, key, value)
        if (!is_translated(key))
            ckpt_json_set(&group, key, json_deep_copy(value));
    /* TransformerEngine's Adam looks here whether it corrects the bias, as AdamW always does */
    ckpt_json_set(&group, "bias_correction", json_true());
    return group;
}

/* The state of one optimizer: its groups, and the steps twice, as optimizers that are distributed
 * and others look for them; new, or NULL: out of memory. */
static json_t *make_state(const struct group_class classes[NCLASSES], unsigned experts)
{
    json_t *groups = json_array(), *state = json_object(), *steps = json_object(),
           *optimizer = json_object();

    for (unsigned i = 0; i <= VECTORS; i++) {
        const struct group_class *c = filled(classes, experts | i);
        if (!c)
            continue;
        ckpt_json_append(&groups, make_group(c->group, experts | i));
        if (!json_object_get(steps, "common_step"))
            ckpt_json_set(&steps, "common_step", json_copy(json_object_get(c->group, "step")));
    }
    ckpt_json_set(&state, "state", steps);
    ckpt_json_set(&state, "param_groups", groups);
    ckpt_json_set(&optimizer, "optimizer", state);
    ckpt_json_set(&optimizer, "param_state_sharding_type", json_string("fully_reshardable"));
    return optimizer;
}

uint64_t ckpt_mg_samples(const struct ckpt_writing *w)
{
    const uint64_t batch = w->output->cut[CKPT_CUT_BATCH];
    uint64_t own = 0;

    if (batch)
        return w->step > INT64_MAX / CKPT_CUT_MOST ? 0 : batch * w->step;
    return ckpt_json_u64(w->config, CKPT_MG_SAMPLES, &own) && own <= INT64_MAX ? own : 0;
}

/* Append the state of Megatron-LM's scheduler, whose scripts insist on one, if it is known how far
 * it is. Its schedule is not known: with None these scripts ask for --override-opt-param-scheduler.
 */
static void put_scheduler(const struct ckpt_writing *w, struct ckpt_pickle_out *p)
{
    static const char *const unknown[] = {
        "lr_warmup_steps", "lr_decay_style", "lr_decay_steps", "start_wd",
        "end_wd",          "wd_incr_style",  "wd_incr_steps",  NULL};
    const json_t *group = json_array_get(w->groups, 0);
    const uint64_t samples = ckpt_mg_samples(w);

    if (!samples) {
        ckpt_catalog_note(w->cat,
                          "optimizer: nothing says how many samples the run has trained on, so "
                          "there is no opt_param_scheduler, on which Megatron-LM's scripts insist: "
                          "give global_batch_size=N");
        return;
    }
    ckpt_pickle_out_text(p, "opt_param_scheduler");
    ckpt_pickle_out_ops(p, CKPT_PICKLE_OUT_EMPTY_DICT CKPT_PICKLE_OUT_MARK);
    ckpt_pickle_out_text(p, "num_steps");
    ckpt_pickle_out_u64(p, samples);
    ckpt_pickle_out_text(p, "max_lr");
    ckpt_pickle_out_json(p, json_object_get(group, "initial_lr"));
    ckpt_pickle_out_text(p, "min_lr");
    ckpt_pickle_out_json(p, json_object_get(group, "min_lr"));
    for (size_t i = 0; unknown[i]; i++) {
        ckpt_pickle_out_text(p, unknown[i]);
        ckpt_pickle_out_ops(p, CKPT_PICKLE_OUT_NONE);
    }
    ckpt_pickle_out_ops(p, CKPT_PICKLE_OUT_SETITEMS);
}

/* Append the groups of one optimizer, or of two that are chained. */
static int put_groups(const struct group_class classes[NCLASSES], bool apart,
                      struct ckpt_pickle_out *p, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *dense = make_state(classes, 0),
                                           *experts = apart ? make_state(classes, EXPERTS) : NULL;

    if (!dense || (apart && !experts))
        return ckpt_nomem(err);
    ckpt_pickle_out_text(p, "optimizer");
    if (!apart) {
        ckpt_pickle_out_json(p, dense);
        return 0;
    }
    ckpt_pickle_out_ops(p, CKPT_PICKLE_OUT_EMPTY_DICT CKPT_PICKLE_OUT_MARK);
    ckpt_pickle_out_u64(p, 0);
    ckpt_pickle_out_json(p, dense);
    ckpt_pickle_out_u64(p, 1);
    ckpt_pickle_out_json(p, experts);
    ckpt_pickle_out_ops(p, CKPT_PICKLE_OUT_SETITEMS);
    return 0;
}

int ckpt_mg_put_optimizer(const struct ckpt_writing *w, const struct ckpt_mg_grid *g,
                          struct ckpt_pickle_out *p, struct ckpt_err *err)
{
    const bool apart = g->experts && (g->ep > 1 || g->etp != g->tp);
    struct group_class classes[NCLASSES] = {{0}};

    if (find_classes(w, apart, classes, err) < 0)
        return -1;
    warn_of_decay(w, &classes[VECTORS]);
    put_scheduler(w, p);
    return put_groups(classes, apart, p, err);
}
