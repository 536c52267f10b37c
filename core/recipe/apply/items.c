/* SPDX-License-Identifier: Apache-2.0 */
/* Walking through the list of a model file: loops, alternatives, conditions. */
#include "recipe/apply/apply.h"

#include <inttypes.h>
#include <string.h>

#include "tensor/same.h"

/* How many tensors of a list the checkpoint can provide. A cheap check, without sizes. */
struct tally {
    size_t need, have;
};

/* What a walk does: add the model's tensors; compare those that are left out; or, for a recipe that
 * is read backwards, see whether the checkpoint has all of the model's tensors. */
enum pass { PASS_EMIT, PASS_LEAVE_OUT, PASS_CHECK, PASS_CHECK_COPIES };

static int probe(struct ckpt_apply *ap, const struct ckpt_model_items *list, struct tally *t);
static int walk(struct ckpt_apply *ap, const struct ckpt_model_items *list, enum pass pass);

/* Looks up a key of the model file's conditions, which can also use the numbers of the loops. */
static json_t *item_key(void *ctx, const char *key)
{
    struct ckpt_apply *ap = ctx;

    for (size_t l = ap->nloop; l-- > 0;)
        if (strcmp(ap->loop[l].name, key) == 0)
            return json_integer((json_int_t)ap->loop[l].at);
    return ckpt_settings_after(&ap->set, key);
}

static enum ckpt_truth item_truth(struct ckpt_apply *ap, const struct ckpt_model_item *it)
{
    const struct ckpt_expr_env env = {item_key, ap, ap->src};

    return ckpt_expr_truth(it->when, &env);
}

/* Call fn on the list for each value of an 'each' (once, if there is no loop). */
static int loop(struct ckpt_apply *ap, const struct ckpt_model_item *it,
                int (*fn)(struct ckpt_apply *ap, const struct ckpt_model_item *it, void *ctx),
                void *ctx)
{
    const uint32_t outer = ap->block;
    uint64_t n;

    if (!it->loop)
        return fn(ap, it, ctx);
    if (!ckpt_settings_dim(&ap->set, it->loop, &n)) {
        char hint[128];
        return ckpt_fail(ap->err, CKPT_MISSING, "the number of '%s' is not known%s", it->loop,
                         ckpt_settings_hint(&ap->set, it->loop, hint, sizeof hint));
    }
    if (n > CKPT_APPLY_TARGETS)
        return ckpt_fail(ap->err, CKPT_LIMIT, "'%s' is %" PRIu64, it->loop, n);
    if (it->block)
        ap->block = ++ap->blocks;
    ap->loop[ap->nloop].name = it->loop;
    ap->nloop++;
    int rc = 0;
    for (uint64_t i = 0; i < n && rc == 0; i++) {
        ap->loop[ap->nloop - 1].at = i;
        rc = fn(ap, it, ctx);
    }
    ap->nloop--;
    ap->block = outer;
    return rc;
}

static int probe_inside(struct ckpt_apply *ap, const struct ckpt_model_item *it, void *ctx)
{
    return probe(ap, it->list, ctx);
}

static int walk_inside(struct ckpt_apply *ap, const struct ckpt_model_item *it, void *ctx)
{
    return walk(ap, it->list, *(enum pass *)ctx);
}

/* The tensor with the model's name, where a recipe is read backwards: the checkpoint has it. */
static const struct ckpt_tensor *stored(const struct ckpt_apply *ap)
{
    return ckpt_catalog_find(ap->src, ckpt_str_get(&ap->name));
}

static int probe_tensor(struct ckpt_apply *ap, const struct ckpt_model_item *it, struct tally *t)
{
    ckpt_cleanup(ckpt_resolution_release) struct ckpt_resolution r = {0};
    struct ckpt_sizes sizes;

    if (ckpt_apply_name(ap, it, &sizes) < 0)
        return -1;
    t->need += !it->optional;
    if (ap->recipe->backwards) {
        t->have += !it->optional && stored(ap);
        return 0;
    }
    if (ckpt_apply_resolve(ap, false, &r) < 0)
        return -1;
    t->have += !it->optional && r.presence == CKPT_PRESENT;
    return 0;
}

/* Find the list of an 'either' that matches; SIZE_MAX if none does, and *ret_best is then the
 * closest one. */
static int fitting_list(struct ckpt_apply *ap, const struct ckpt_model_item *it, size_t *ret,
                        size_t *ret_best)
{
    size_t best_have = 0;

    *ret = SIZE_MAX;
    *ret_best = 0;
    for (size_t i = 0; i < it->nlist; i++) {
        struct tally t = {0};
        if (probe(ap, &it->list[i], &t) < 0)
            return -1;
        if (t.have == t.need && *ret != SIZE_MAX)
            return ckpt_fail(ap->err, CKPT_CONFLICT,
                             "%s: the checkpoint fits several choices of the model file",
                             ap->recipe->name);
        if (t.have == t.need)
            *ret = i;
        if (t.have > best_have) {
            best_have = t.have;
            *ret_best = i;
        }
    }
    return 0;
}

static int probe_either(struct ckpt_apply *ap, const struct ckpt_model_item *it, struct tally *t)
{
    size_t fit, best;

    if (fitting_list(ap, it, &fit, &best) < 0)
        return -1;
    return probe(ap, &it->list[fit != SIZE_MAX ? fit : best], t);
}

static int probe_item(struct ckpt_apply *ap, const struct ckpt_model_item *it, struct tally *t)
{
    struct tally inner = {0};

    switch (it->kind) {
    case CKPT_ITEM_TENSOR:
        return probe_tensor(ap, it, t);
    case CKPT_ITEM_EACH:
        return loop(ap, it, probe_inside, t);
    case CKPT_ITEM_EITHER:
        return probe_either(ap, it, t);
    case CKPT_ITEM_WHEN:
        switch (item_truth(ap, it)) {
        case CKPT_TRUE:
            return probe(ap, it->list, t);
        case CKPT_FALSE:
            return 0;
        case CKPT_UNKNOWN: /* all or none */
            if (probe(ap, it->list, &inner) < 0)
                return -1;
            if (inner.have > 0) {
                t->need += inner.need;
                t->have += inner.have;
            }
            return 0;
        }
    }
    return 0;
}

static int probe(struct ckpt_apply *ap, const struct ckpt_model_items *list, struct tally *t)
{
    for (size_t i = 0; i < list->n; i++)
        if (probe_item(ap, &list->item[i], t) < 0)
            return -1;
    return 0;
}

static int leave_out_missing(struct ckpt_apply *ap, const char *missing)
{
    if (ap->nleft == CKPT_APPLY_LEFT)
        return ckpt_fail(ap->err, CKPT_LIMIT, "more than %d tensors are missing", CKPT_APPLY_LEFT);
    if (ap->lacks) {
        if (ap->nleft++ < CKPT_APPLY_LACKS)
            ckpt_str_printf(ap->lacks, "%s'%s'", ap->nleft > 1 ? ", " : "", missing);
    } else if (ap->nleft++ < CKPT_APPLY_SHOWN) /* further ones are only counted */
        ckpt_catalog_warn(ap->cat, "'%s' is left out: the checkpoint has no tensor '%s'",
                          ckpt_str_get(&ap->name), missing);
    return 0;
}

/* Is the model's tensor there? */
static int check_tensor(struct ckpt_apply *ap, const struct ckpt_model_item *it)
{
    struct ckpt_sizes sizes;

    if (ckpt_apply_name(ap, it, &sizes) < 0)
        return -1;
    const struct ckpt_tensor *t = stored(ap);
    if (t && ap->lacks)
        ap->used[t - ap->src->tensors.ptr] = true;
    if (it->optional || t)
        return 0;
    if (ap->opt->allow_missing)
        return 0;
    if (ap->opt->allow_partial)
        return leave_out_missing(ap, ckpt_str_get(&ap->name));
    return ckpt_fail(ap->err, CKPT_MISSING,
                     "the model needs '%s', which the checkpoint does not have",
                     ckpt_str_get(&ap->name));
}

/* A tensor that the config ties to another, but that is stored too: are they equal? The framework
 * stores ties in its own way: the copy counts as used. */
static int check_copy(struct ckpt_apply *ap, const struct ckpt_model_item *it)
{
    const struct ckpt_tensor *of = ckpt_catalog_find(ap->src, ap->tied), *copy;
    struct ckpt_sizes sizes;
    bool same;

    if (ckpt_apply_name(ap, it, &sizes) < 0)
        return -1;
    if (!of || ap->lacks || !(copy = stored(ap)))
        return 0;
    ap->used[copy - ap->src->tensors.ptr] = true;
    if (ckpt_tensor_same(ap->src, copy, ap->src, of, &same, ap->err) < 0)
        return -1;
    return same ? 0
                : ckpt_copy_differs(ap->cat, ckpt_str_get(&ap->name), ap->tied,
                                    ap->opt->allow_leftover, ap->err);
}

static int walk_tensor(struct ckpt_apply *ap, const struct ckpt_model_item *it, enum pass pass)
{
    ckpt_cleanup(ckpt_resolution_release) struct ckpt_resolution r = {0};
    struct ckpt_sizes sizes;

    if (pass == PASS_CHECK)
        return check_tensor(ap, it);
    if (pass == PASS_CHECK_COPIES)
        return check_copy(ap, it);
    if (ckpt_apply_name(ap, it, &sizes) < 0 ||
        ckpt_apply_resolve(ap, pass == PASS_LEAVE_OUT, &r) < 0)
        return -1;
    if (pass == PASS_LEAVE_OUT)
        return r.presence == CKPT_PRESENT ? ckpt_apply_add_copy(ap, it, &sizes) : 0;
    if (r.presence == CKPT_PRESENT)
        return ckpt_apply_add(ap, it, &sizes);
    if ((it->optional && r.presence == CKPT_ABSENT) || ap->opt->allow_missing)
        return 0;
    if (!ap->opt->allow_partial || !r.missing)
        return ckpt_apply_missing(ap, &r);
    return leave_out_missing(ap, r.missing);
}

static int walk_either(struct ckpt_apply *ap, const struct ckpt_model_item *it, enum pass pass)
{
    size_t fit, best;

    if (pass == PASS_LEAVE_OUT || pass == PASS_CHECK_COPIES) {
        for (size_t i = 0; i < it->nlist; i++)
            if (walk(ap, &it->list[i], pass) < 0)
                return -1;
        return 0;
    }
    if (fitting_list(ap, it, &fit, &best) < 0)
        return -1;
    return walk(ap, &it->list[fit != SIZE_MAX ? fit : best], pass);
}

/* Leave out an item that the model does not have, unless it is tied to a tensor that the model has.
 */
static int leave_out(struct ckpt_apply *ap, const struct ckpt_model_item *it, enum pass pass)
{
    ap->tied = it->tied;
    int rc = it->tied ? walk(ap, it->list, pass) : 0;
    ap->tied = NULL;
    return rc;
}

static int walk_when(struct ckpt_apply *ap, const struct ckpt_model_item *it, enum pass pass)
{
    struct tally t = {0};

    switch (item_truth(ap, it)) {
    case CKPT_TRUE:
        return walk(ap, it->list, pass);
    case CKPT_FALSE:
        return leave_out(ap, it, pass == PASS_CHECK ? PASS_CHECK_COPIES : PASS_LEAVE_OUT);
    case CKPT_UNKNOWN:
        if (probe(ap, it->list, &t) < 0)
            return -1;
        return t.have > 0 ? walk(ap, it->list, pass) : 0;
    }
    return 0;
}

static int walk(struct ckpt_apply *ap, const struct ckpt_model_items *list, enum pass pass)
{
    int rc = 0;

    for (size_t i = 0; i < list->n && rc == 0; i++) {
        const struct ckpt_model_item *it = &list->item[i];
        switch (it->kind) {
        case CKPT_ITEM_TENSOR:
            rc = walk_tensor(ap, it, pass);
            break;
        case CKPT_ITEM_EACH:
            rc = loop(ap, it, walk_inside, &pass);
            break;
        case CKPT_ITEM_WHEN:
            rc = walk_when(ap, it, pass);
            break;
        case CKPT_ITEM_EITHER:
            rc = walk_either(ap, it, pass);
            break;
        }
    }
    return rc;
}

int ckpt_apply_check(struct ckpt_apply *ap, const struct ckpt_model_items *list)
{
    return walk(ap, list, PASS_CHECK);
}

int ckpt_apply_items(struct ckpt_apply *ap, const struct ckpt_model_items *list)
{
    return walk(ap, list, PASS_EMIT);
}
