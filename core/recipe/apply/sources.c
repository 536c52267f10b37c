/* SPDX-License-Identifier: Apache-2.0 */
/* Models without a list: the tensors are those of the checkpoint. */
#include "recipe/apply/apply.h"

#include <stdlib.h>
#include <string.h>

#include "base/ckd.h"
#include "base/sort.h"
#include "tensor/fqn.h"

/* Set ap->name to the name of a tensor that no rule uses. Returns whether a prefix matches. */
static bool name_kept(struct ckpt_apply *ap, const char *name)
{
    uint64_t number[CKPT_NAME_NUMBERS];
    size_t len = 0;

    ckpt_str_clear(&ap->name);
    for (size_t i = 0; i < ap->recipe->prefixes.len && !len; i++)
        if ((len = ckpt_name_match_start(ap->recipe->prefixes.ptr[i].from, name, strlen(name),
                                         number)))
            ckpt_name_render(ap->recipe->prefixes.ptr[i].to, number, &ap->name);
    ckpt_str_puts(&ap->name, name + len);
    return len > 0;
}

static int keep_tensor(struct ckpt_apply *ap, const struct ckpt_tensor *t)
{
    struct ckpt_tensor kept = *t;

    (void)name_kept(ap, t->name);
    if (ap->name.failed)
        return ckpt_nomem(ap->err);
    kept.name = ckpt_str_get(&ap->name);
    ap->used[t - ap->src->tensors.ptr] = true;
    if (ap->explain && strcmp(ap->explain, kept.name) == 0 &&
        !(ap->explanation = json_pack("{s:s, s:s, s:[{s:s}]}", "recipe", ap->recipe->name, "target",
                                      kept.name, "sources", "tensor", t->name)))
        return ckpt_nomem(ap->err);
    return ckpt_catalog_copy(ap->cat, &kept, 0, ap->err);
}

/* A format has no place for a tensor of the model, where a whole family is read backwards. */
static int leave_out(struct ckpt_apply *ap, const struct ckpt_tensor *t)
{
    if (!ap->opt->allow_leftover)
        return ckpt_fail(ap->err, CKPT_UNSUPPORTED,
                         "'%s' has no equivalent in the format: no rule of %s takes it "
                         "(allow_leftover leaves it out)",
                         t->name, ap->recipe->name);
    ap->used[t - ap->src->tensors.ptr] = true;
    if (ap->nleft++ < CKPT_APPLY_SHOWN)
        ckpt_catalog_warn(ap->cat, "'%s' has no equivalent in the format: it is left out", t->name);
    return 0;
}

/* Add one target side of a rule: a tensor for each value of the axes that are numbers in its name
 * only. They were one tensor in memory and go into the same file. `block` is that of the other
 * sides, or 0. */
static int add_side(struct ckpt_apply *ap, uint32_t side, uint32_t block)
{
    struct ckpt_instance *in = &ap->in;
    const struct ckpt_name *name = in->rule->to[side].name;
    const struct ckpt_source_use *use = &in->use.ptr[0];
    const uint32_t numbered = name->axes & ~use->bound;
    uint32_t axis[CKPT_SCOPE_AXES], naxis = 0;
    uint64_t size[CKPT_SCOPE_AXES], total = 1;

    in->side = side;
    in->bound = name->axes;
    memcpy(in->at, use->at, sizeof in->at);
    for (uint32_t a = 0; a < in->rule->scope->naxis; a++) {
        if (!(numbered >> a & 1))
            continue;
        if (!ckpt_axis_size(&in->sizes, a, &size[naxis]))
            return ckpt_fail(ap->err, CKPT_MISSING, "'%s': the number of '%s' is not known",
                             use->tensor->name, in->rule->scope->axis[a].name);
        if (ckd_mul(&total, total, size[naxis]) || total > CKPT_APPLY_TARGETS)
            return ckpt_fail(ap->err, CKPT_LIMIT, "'%s' holds more than %d tensors",
                             use->tensor->name, CKPT_APPLY_TARGETS);
        axis[naxis++] = a;
    }
    ap->block = naxis ? ++ap->blocks : block;
    for (uint64_t i = 0; i < total; i++) {
        for (uint64_t k = naxis, rest = i; k-- > 0; rest /= size[k])
            in->at[axis[k]] = rest % size[k];
        if (!ckpt_resolver_render(&ap->rs, name, &in->sizes, in->at, &ap->name))
            return ckpt_fail(ap->err, CKPT_MISSING, "the numbers of '%s' are not known",
                             in->rule->to[side].text);
        if (ap->name.failed)
            return ckpt_nomem(ap->err);
        in->target = ckpt_str_get(&ap->name);
        if (ckpt_apply_add(ap, NULL, NULL) < 0)
            return -1;
    }
    return 0;
}

/* Add one target side that is made of several tensors, when the first of them is reached. */
static int gather_side(struct ckpt_apply *ap, uint32_t side)
{
    ckpt_cleanup(ckpt_resolution_release) struct ckpt_resolution r = {0};
    const struct ckpt_rule *rule = ap->in.rule;

    if (!ckpt_resolver_render(&ap->rs, rule->to[side].name, &ap->in.sizes, ap->in.use.ptr[0].at,
                              &ap->name) ||
        ap->name.failed)
        return ckpt_fail(ap->err, CKPT_MISSING, "the numbers of '%s' are not known",
                         rule->to[side].text);
    if (ckpt_catalog_find(ap->cat, ckpt_str_get(&ap->name)))
        return 0;
    if (ckpt_apply_resolve(ap, false, &r) < 0)
        return -1;
    ap->block = 0;
    return r.presence == CKPT_PRESENT ? ckpt_apply_add(ap, NULL, NULL) : ckpt_apply_missing(ap, &r);
}

/* The tensor t, as if it had the name `as`. */
static int convert(struct ckpt_apply *ap, const struct ckpt_tensor *t, const char *as)
{
    struct ckpt_tensor named = *t;
    const struct ckpt_rule *rule;
    bool found;

    named.name = as;
    if (ckpt_resolve_source(&ap->rs, &named, &ap->in, &found) < 0)
        return -1;
    if (found)
        ap->in.use.ptr[0].tensor = t;
    else
        return ap->recipe->family->open || name_kept(ap, as) ? keep_tensor(ap, t)
                                                             : leave_out(ap, t);
    rule = ap->in.rule;
    const struct ckpt_source_use use = ap->in.use.ptr[0];
    const uint32_t numbered = rule->to[0].name->axes;
    if (rule->nfrom > 1 || ((use.bound & ~numbered) && !(numbered & ~use.bound))) {
        /* its targets are made of more tensors than this one */
        for (uint32_t side = 0; side < rule->nto; side++) {
            ap->in.rule = rule; /* replaced by the sides' own instances */
            ap->in.use.ptr[0] = use;
            if (gather_side(ap, side) < 0)
                return -1;
        }
        return 0;
    }
    ap->in.target = t->name;
    ap->in.bound = 0;
    if (ckpt_instance_solve(&ap->in, &ap->set, ap->err) < 0)
        return ckpt_err_in(ap->err, "%s", rule->where);
    /* transformers saves rows of one tensor as they are, views of one storage; the parts of any
     * other dimension are copies */
    const struct ckpt_pattern *p = &rule->from[0].pattern;
    const bool rows =
        rule->nto > 1 && p->ndim && p->rest_at != 0 && p->dim[0].kind == CKPT_FACTOR_SUM;
    const uint32_t block = rows ? ++ap->blocks : 0;
    for (uint32_t side = 0; side < rule->nto; side++)
        if (add_side(ap, side, block) < 0)
            return -1;
    return 0;
}

/* The framework stores tied tensors under both names. */
static int convert_ties(struct ckpt_apply *ap)
{
    const struct ckpt_recipe *r = ap->recipe;

    if (!r->backwards || !ckpt_json_bool(ap->set.hf, "tie_word_embeddings", false))
        return 0;
    for (size_t i = 0; i < r->ties.len; i++) {
        const struct ckpt_tie *tie = &r->ties.ptr[i];
        const struct ckpt_tensor *t = ckpt_catalog_find(ap->src, tie->original);
        if (t && convert(ap, t, tie->copy) < 0)
            return -1;
    }
    return 0;
}

static int fqn_cmp(const void *a, const void *b)
{
    const struct ckpt_tensor *const *x = a, *const *y = b;

    return ckpt_fqn_cmp((*x)->name, (*y)->name);
}

int ckpt_apply_kept(struct ckpt_apply *ap)
{
    for (size_t i = 0; i < ap->src->tensors.len && ap->recipe->prefixes.len; i++)
        if (!ap->used[i] && name_kept(ap, ap->src->tensors.ptr[i].name) &&
            keep_tensor(ap, &ap->src->tensors.ptr[i]) < 0)
            return -1;
    return 0;
}

int ckpt_apply_sources(struct ckpt_apply *ap)
{
    const size_t all = ap->src->tensors.len;
    ckpt_cleanup(ckpt_freep) const struct ckpt_tensor **order = calloc(all + 1, sizeof *order);
    size_t n = 0;

    if (!order)
        return ckpt_nomem(ap->err);
    for (size_t i = 0; i < all; i++)
        if (!ap->used[i])
            order[n++] = &ap->src->tensors.ptr[i];
    ckpt_sort(order, n, fqn_cmp);
    for (size_t i = 0; i < n; i++)
        if (convert(ap, order[i], order[i]->name) < 0)
            return -1;
    return convert_ties(ap);
}
