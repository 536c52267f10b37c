/* SPDX-License-Identifier: Apache-2.0 */
/* Applying a recipe: the model file says which tensors there are, the rules say where each comes
 * from. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/ckd.h"
#include "base/str.h"
#include "recipe/join.h"
#include "recipe/leftover.h"
#include "recipe/lower.h"
#include "recipe/recipes.h"
#include "recipe/resolve.h"
#include "recipe/settings.h"
#include "tensor/fqn.h"

enum { MAX_TARGETS = 1 << 24, SHOWN_LEFT = 20, MAX_LEFT = 1 << 20 };

struct apply {
    const struct ckpt_recipe *recipe;
    const struct ckpt_catalog *src;
    const struct ckpt_recipe_options *opt;
    struct ckpt_settings set;
    struct ckpt_resolver rs;
    struct ckpt_catalog *cat, *joined; /* the model; what src is if it had ranked tensors */
    bool *used;                        /* tensors of src */
    struct ckpt_instance in;
    ckpt_drafts drafts;
    struct ckpt_str name;
    struct {
        const char *name;
        uint64_t at;
    } loop[CKPT_FAMILY_LOOPS];
    size_t nloop;
    uint32_t blocks, block; /* given so far; of the tensors being added, or 0 */
    size_t ntarget, nleft;  /* added, left out */
    const char *tied;       /* while tied tensors are left out: what they are copies of */
    struct ckpt_copies copies;
    const char *explain; /* the target to explain, or NULL */
    json_t *explanation;
    struct ckpt_err *err;
};

/* ---- one target ---- */

/* ap->name: the name of a model's tensor, with the numbers of the loops around it. */
static int name_target(struct apply *ap, const struct ckpt_item *it, struct ckpt_sizes *sizes)
{
    uint64_t at[CKPT_SCOPE_AXES] = {0};

    ckpt_settings_sizes(&ap->set, it->scope, sizes);
    for (uint32_t a = 0; a < it->scope->naxis; a++)
        for (size_t l = 0; l < ap->nloop; l++)
            if ((it->name->axes >> a & 1) && strcmp(it->scope->axis[a].name, ap->loop[l].name) == 0)
                at[a] = ap->loop[l].at;
    if (!ckpt_resolver_render(&ap->rs, it->name, sizes, at, &ap->name))
        return ckpt_fail(ap->err, CKPT_MISSING, "the numbers of '%s' are not known", it->text);
    return ap->name.failed ? ckpt_nomem(ap->err) : 0;
}

/* The model file's shape must be what the rule made. */
static int check_shape(struct apply *ap, const struct ckpt_item *it, const struct ckpt_sizes *sizes,
                       const uint64_t *dim, uint32_t rank)
{
    char shape[CKPT_SHAPE_TEXT], hint[128] = "";
    uint64_t want;
    uint32_t var;

    if (it->shape.ndim != rank)
        return ckpt_fail(ap->err, CKPT_CONFLICT,
                         "'%s' has the shape %s, the model has %" PRIu32
                         " dimensions there (from '%s')",
                         ckpt_str_get(&ap->name), ckpt_shape_text(dim, rank, shape, sizeof shape),
                         it->shape.ndim, ap->in.use.ptr[0].tensor->name);
    for (uint32_t d = 0; d < rank; d++) {
        switch (ckpt_factor_size(&it->shape.dim[d], sizes, &want, &var)) {
        case CKPT_SIZE_KNOWN:
            break;
        case CKPT_SIZE_OVERFLOW:
            return ckpt_fail(ap->err, CKPT_LIMIT, "the size of '%s' overflows",
                             ckpt_str_get(&ap->name));
        case CKPT_SIZE_UNKNOWN:
            return ckpt_fail(
                ap->err, CKPT_MISSING,
                "'%s': dimension %" PRIu32 ": '%s' is no whole number or not known%s",
                ckpt_str_get(&ap->name), d, it->scope->var[var].name,
                ckpt_settings_hint(&ap->set, it->scope->var[var].name, hint, sizeof hint));
        }
        if (want == dim[d])
            continue;
        for (uint32_t a = 0; a < it->scope->naxis && !hint[0]; a++)
            if (it->shape.dim[d].kind == CKPT_FACTOR_AXIS && it->shape.dim[d].axis == a)
                (void)ckpt_settings_hint(&ap->set, it->scope->axis[a].name, hint, sizeof hint);
        return ckpt_fail(ap->err, CKPT_CONFLICT,
                         "dimension %" PRIu32 " of '%s' is %" PRIu64
                         " in the checkpoint ('%s'), but the config makes it %" PRIu64 "%s",
                         d, ckpt_str_get(&ap->name), dim[d], ap->in.use.ptr[0].tensor->name, want,
                         hint);
    }
    return 0;
}

static int check_dtypes(struct apply *ap)
{
    const struct ckpt_instance *in = &ap->in;

    for (size_t i = 0; i < in->use.len; i++) {
        const struct ckpt_tensor *t = in->use.ptr[i].tensor, *first = in->use.ptr[0].tensor;
        if (t->value)
            return ckpt_fail(ap->err, CKPT_UNSUPPORTED,
                             "'%s' is a computed tensor: it can't be mapped", t->name);
        if (t->dtype != first->dtype)
            return ckpt_fail(ap->err, CKPT_CONFLICT,
                             "'%s' is made of tensors of different types: '%s' is %s, '%s' is %s",
                             in->target, first->name, ckpt_dtype_name(first->dtype), t->name,
                             ckpt_dtype_name(t->dtype));
    }
    return 0;
}

static void mark_used(struct apply *ap)
{
    for (size_t i = 0; i < ap->in.use.len; i++)
        ap->used[ap->in.use.ptr[i].tensor - ap->src->tensors.ptr] = true;
}

static int explain(struct apply *ap)
{
    const struct ckpt_instance *in = &ap->in;
    json_t *sources = json_array();

    for (size_t i = 0; i < in->use.len; i++) {
        const struct ckpt_side *s = &in->rule->from[in->use.ptr[i].side];
        const char *pattern = s->text + ckpt_name_extent(s->text);
        while (*pattern == ' ' || *pattern == '\t')
            pattern++;
        ckpt_json_append(&sources, json_pack("{s:s, s:s}", "tensor", in->use.ptr[i].tensor->name,
                                             "pattern", *pattern ? pattern : "..."));
    }
    ap->explanation = json_pack("{s:s, s:s, s:s, s:s*, s:o}", "recipe", ap->recipe->name, "rule",
                                in->rule->where, "target", in->rule->to[in->side].text, "value",
                                in->rule->value ? in->rule->value->name : NULL, "sources", sources);
    return ap->explanation ? 0 : ckpt_nomem(ap->err);
}

/* The instance as tensor ap->name of `cat`, which has the model's sources; `it` is what the model
 * file says of it, or NULL. */
static int add_to(struct apply *ap, struct ckpt_catalog *cat, const struct ckpt_item *it,
                  const struct ckpt_sizes *sizes)
{
    uint64_t dim[CKPT_MAX_RANK];
    uint32_t rank;
    size_t index;

    mark_used(ap);
    ap->drafts.len = 0;
    if (ckpt_instance_solve(&ap->in, &ap->set, ap->err) < 0 || check_dtypes(ap) < 0 ||
        ckpt_instance_shape(&ap->in, dim, &rank, ap->err) < 0 ||
        (it && check_shape(ap, it, sizes, dim, rank) < 0) ||
        ckpt_instance_lower(&ap->in, dim, rank, &ap->drafts, ap->err) < 0)
        return ckpt_err_in(ap->err, "%s", ap->in.rule->where);
    if (ap->ntarget++ == MAX_TARGETS)
        return ckpt_fail(ap->err, CKPT_LIMIT, "more than %d tensors", MAX_TARGETS);
    if (ckpt_catalog_add(cat, ckpt_str_get(&ap->name), ap->in.use.ptr[0].tensor->dtype, dim, rank,
                         &index, ap->err) < 0)
        return -1;
    cat->tensors.ptr[index].block = ap->block;
    cat->tensors.ptr[index].wanted = ap->in.use.ptr[0].tensor->wanted;
    if (ckpt_catalog_set_pieces(cat, index, ap->drafts.ptr, ap->drafts.len, ap->err) < 0)
        return -1;
    return ap->in.rule->value ? ckpt_value_apply(cat, index, ap->in.rule->value, ap->err) : 0;
}

static int add_target(struct apply *ap, const struct ckpt_item *it, const struct ckpt_sizes *sizes)
{
    if (ap->explain && strcmp(ap->explain, ckpt_str_get(&ap->name)) == 0 && explain(ap) < 0)
        return -1;
    return add_to(ap, ap->cat, it, sizes);
}

static int add_sources(struct apply *ap, struct ckpt_catalog *cat)
{
    for (size_t s = 0; s < ap->src->sources.len; s++)
        if (ckpt_catalog_add_source(cat, ap->src->sources.ptr[s], ap->err) == UINT32_MAX)
            return -1;
    return 0;
}

/* A tensor that the config ties to another: it is not part of the model, but must be a copy. */
static int add_copy(struct apply *ap, const struct ckpt_item *it, const struct ckpt_sizes *sizes)
{
    struct ckpt_copies *c = &ap->copies;

    if (!c->cat && (ckpt_catalog_new(&c->cat, ap->err) < 0 || add_sources(ap, c->cat) < 0))
        return -1;
    if (add_to(ap, c->cat, it, sizes) < 0)
        return -1;
    return ckpt_vec_push(&c->original, ap->tied) < 0 ? ckpt_nomem(ap->err) : 0;
}

static int missing_error(struct apply *ap, const struct ckpt_resolution *r)
{
    if (!r->missing)
        return ckpt_fail(ap->err, CKPT_MISSING,
                         "the model needs '%s', of which no rule of %s speaks",
                         ckpt_str_get(&ap->name), ap->recipe->name);
    return ckpt_fail(ap->err, CKPT_MISSING,
                     "the model needs '%s', but the checkpoint has no tensor '%s'",
                     ckpt_str_get(&ap->name), r->missing);
}

/* ap->in becomes the instance that delivers ap->name. */
static int resolve(struct apply *ap, bool all, struct ckpt_resolution *ret)
{
    return ckpt_resolve(&ap->rs, ckpt_str_get(&ap->name), ap->name.len, all, &ap->in, ret);
}

/* ---- the model file's items ---- */

/* How much of a list the checkpoint can deliver; a cheap look, without sizes. */
struct tally {
    size_t need, have;
};

enum pass { PASS_EMIT, PASS_LEAVE_OUT };

static int probe(struct apply *ap, const struct ckpt_items *list, struct tally *t);
static int walk(struct apply *ap, const struct ckpt_items *list, enum pass pass);

/* Conditions of the model file also see the numbers of the loops. */
static json_t *item_key(void *ctx, const char *key)
{
    struct apply *ap = ctx;

    for (size_t l = ap->nloop; l-- > 0;)
        if (strcmp(ap->loop[l].name, key) == 0)
            return json_integer((json_int_t)ap->loop[l].at);
    return ckpt_settings_after(&ap->set, key);
}

static enum ckpt_truth item_truth(struct apply *ap, const struct ckpt_item *it)
{
    const struct ckpt_expr_env env = {item_key, ap, ap->src};

    return ckpt_expr_truth(it->when, &env);
}

/* Run over an 'each' (or once, if it has no loop), calling fn on the list. */
static int loop(struct apply *ap, const struct ckpt_item *it,
                int (*fn)(struct apply *ap, const struct ckpt_item *it, void *ctx), void *ctx)
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
    if (n > MAX_TARGETS)
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

static int probe_inside(struct apply *ap, const struct ckpt_item *it, void *ctx)
{
    return probe(ap, it->list, ctx);
}

static int walk_inside(struct apply *ap, const struct ckpt_item *it, void *ctx)
{
    return walk(ap, it->list, *(enum pass *)ctx);
}

static int probe_tensor(struct apply *ap, const struct ckpt_item *it, struct tally *t)
{
    ckpt_cleanup(ckpt_resolution_release) struct ckpt_resolution r = {0};
    struct ckpt_sizes sizes;

    if (name_target(ap, it, &sizes) < 0 || resolve(ap, false, &r) < 0)
        return -1;
    t->need += !it->optional;
    t->have += !it->optional && r.presence == CKPT_PRESENT;
    return 0;
}

/* The list of an 'either' that fits; SIZE_MAX if none does, *ret_best is the one nearest to it
 * then. */
static int fitting_list(struct apply *ap, const struct ckpt_item *it, size_t *ret, size_t *ret_best)
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

static int probe_either(struct apply *ap, const struct ckpt_item *it, struct tally *t)
{
    size_t fit, best;

    if (fitting_list(ap, it, &fit, &best) < 0)
        return -1;
    return probe(ap, &it->list[fit != SIZE_MAX ? fit : best], t);
}

static int probe_item(struct apply *ap, const struct ckpt_item *it, struct tally *t)
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

static int probe(struct apply *ap, const struct ckpt_items *list, struct tally *t)
{
    for (size_t i = 0; i < list->n; i++)
        if (probe_item(ap, &list->item[i], t) < 0)
            return -1;
    return 0;
}

static int walk_tensor(struct apply *ap, const struct ckpt_item *it, enum pass pass)
{
    ckpt_cleanup(ckpt_resolution_release) struct ckpt_resolution r = {0};
    struct ckpt_sizes sizes;

    if (name_target(ap, it, &sizes) < 0 || resolve(ap, pass == PASS_LEAVE_OUT, &r) < 0)
        return -1;
    if (pass == PASS_LEAVE_OUT)
        return r.presence == CKPT_PRESENT ? add_copy(ap, it, &sizes) : 0;
    if (r.presence == CKPT_PRESENT)
        return add_target(ap, it, &sizes);
    if (it->optional && r.presence == CKPT_ABSENT)
        return 0;
    if (!ap->opt->allow_partial || !r.missing)
        return missing_error(ap, &r);
    if (ap->nleft == MAX_LEFT)
        return ckpt_fail(ap->err, CKPT_LIMIT, "more than %d tensors are missing", MAX_LEFT);
    if (ap->nleft++ < SHOWN_LEFT) /* the rest is only counted */
        ckpt_catalog_warn(ap->cat, "'%s' is left out: the checkpoint has no tensor '%s'",
                          ckpt_str_get(&ap->name), r.missing);
    return 0;
}

static int walk_either(struct apply *ap, const struct ckpt_item *it, enum pass pass)
{
    size_t fit, best;

    if (pass == PASS_LEAVE_OUT) {
        for (size_t i = 0; i < it->nlist; i++)
            if (walk(ap, &it->list[i], pass) < 0)
                return -1;
        return 0;
    }
    if (fitting_list(ap, it, &fit, &best) < 0)
        return -1;
    return walk(ap, &it->list[fit != SIZE_MAX ? fit : best], pass);
}

/* What the model does not have is not looked for, unless it is tied to what the model has. */
static int leave_out(struct apply *ap, const struct ckpt_item *it)
{
    ap->tied = it->tied;
    int rc = it->tied ? walk(ap, it->list, PASS_LEAVE_OUT) : 0;
    ap->tied = NULL;
    return rc;
}

static int walk_when(struct apply *ap, const struct ckpt_item *it, enum pass pass)
{
    struct tally t = {0};

    switch (item_truth(ap, it)) {
    case CKPT_TRUE:
        return walk(ap, it->list, pass);
    case CKPT_FALSE:
        return leave_out(ap, it);
    case CKPT_UNKNOWN:
        if (probe(ap, it->list, &t) < 0)
            return -1;
        return t.have > 0 ? walk(ap, it->list, pass) : 0;
    }
    return 0;
}

static int walk(struct apply *ap, const struct ckpt_items *list, enum pass pass)
{
    int rc = 0;

    for (size_t i = 0; i < list->n && rc == 0; i++) {
        const struct ckpt_item *it = &list->item[i];
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

/* ---- models without a list: the checkpoint says which tensors there are ---- */

/* ap->name: that of a tensor that no rule takes. */
static void name_kept(struct apply *ap, const char *name)
{
    const struct ckpt_prefix *p = ap->recipe->prefixes.ptr;
    size_t n = ap->recipe->prefixes.len, i = 0;

    while (i < n && !ckpt_has_prefix(name, p[i].from))
        i++;
    ckpt_str_clear(&ap->name);
    ckpt_str_printf(&ap->name, "%s%s", i < n ? p[i].to : "",
                    name + (i < n ? strlen(p[i].from) : 0));
}

static int keep_tensor(struct apply *ap, const struct ckpt_tensor *t)
{
    struct ckpt_tensor kept = *t;

    name_kept(ap, t->name);
    if (ap->name.failed)
        return ckpt_nomem(ap->err);
    kept.name = ckpt_str_get(&ap->name);
    ap->used[t - ap->src->tensors.ptr] = true;
    if (ap->explain && strcmp(ap->explain, kept.name) == 0 &&
        !(ap->explanation = json_pack("{s:s, s:s, s:[{s:s}]}", "recipe", ap->recipe->name, "target",
                                      kept.name, "sources", "tensor", t->name)))
        return ckpt_nomem(ap->err);
    return ckpt_catalog_copy(ap->cat, &kept, ap->err);
}

/* One side of the rule: a tensor for each value of the axes that are numbers in its name only. They
 * were one in memory and stay together. */
static int add_side(struct apply *ap, uint32_t side)
{
    struct ckpt_instance *in = &ap->in;
    const struct ckpt_name *name = in->rule->to[side].name;
    const struct ckpt_use *use = &in->use.ptr[0];
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
        if (ckd_mul(&total, total, size[naxis]) || total > MAX_TARGETS)
            return ckpt_fail(ap->err, CKPT_LIMIT, "'%s' holds more than %d tensors",
                             use->tensor->name, MAX_TARGETS);
        axis[naxis++] = a;
    }
    ap->block = naxis ? ++ap->blocks : 0;
    for (uint64_t i = 0; i < total; i++) {
        for (uint64_t k = naxis, rest = i; k-- > 0; rest /= size[k])
            in->at[axis[k]] = rest % size[k];
        if (!ckpt_resolver_render(&ap->rs, name, &in->sizes, in->at, &ap->name))
            return ckpt_fail(ap->err, CKPT_MISSING, "the numbers of '%s' are not known",
                             in->rule->to[side].text);
        if (ap->name.failed)
            return ckpt_nomem(ap->err);
        in->target = ckpt_str_get(&ap->name);
        if (add_target(ap, NULL, NULL) < 0)
            return -1;
    }
    return 0;
}

/* One side that is made of several tensors: when the first of them comes. */
static int gather_side(struct apply *ap, uint32_t side)
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
    if (resolve(ap, false, &r) < 0)
        return -1;
    ap->block = 0;
    return r.presence == CKPT_PRESENT ? add_target(ap, NULL, NULL) : missing_error(ap, &r);
}

/* Is a target of the rule made of more than the one tensor that in->use speaks of? */
static bool is_gathered(const struct ckpt_instance *in, uint32_t side)
{
    const uint32_t bound = in->use.ptr[0].bound, named = in->rule->to[side].name->axes;

    return in->rule->nfrom > 1 || ((bound & ~named) && !(named & ~bound));
}

static int convert(struct apply *ap, const struct ckpt_tensor *t)
{
    const struct ckpt_rule *rule;
    bool found;

    if (ckpt_resolve_source(&ap->rs, t, &ap->in, &found) < 0)
        return -1;
    if (!found)
        return keep_tensor(ap, t);
    rule = ap->in.rule;
    if (is_gathered(&ap->in, 0)) {
        const struct ckpt_use use = ap->in.use.ptr[0];
        for (uint32_t side = 0; side < rule->nto; side++) {
            ap->in.rule = rule; /* the sides' own instances take their place */
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
    for (uint32_t side = 0; side < rule->nto; side++)
        if (add_side(ap, side) < 0)
            return -1;
    return 0;
}

static int fqn_cmp(const void *a, const void *b)
{
    const struct ckpt_tensor *const *x = a, *const *y = b;

    return ckpt_fqn_cmp((*x)->name, (*y)->name);
}

/* In the order in which transformers saves what it converts: that of the names before. */
static int walk_sources(struct apply *ap)
{
    const size_t n = ap->src->tensors.len;
    ckpt_cleanup(ckpt_freep) const struct ckpt_tensor **order = calloc(n + 1, sizeof *order);

    if (!order)
        return ckpt_nomem(ap->err);
    for (size_t i = 0; i < n; i++)
        order[i] = &ap->src->tensors.ptr[i];
    if (n)
        qsort(order, n, sizeof *order, fqn_cmp);
    for (size_t i = 0; i < n; i++)
        if (convert(ap, order[i]) < 0)
            return -1;
    return 0;
}

/* ---- the whole ---- */

static int start_catalog(struct apply *ap)
{
    size_t i;
    json_t *line;

    if (ckpt_catalog_new(&ap->cat, ap->err) < 0 || add_sources(ap, ap->cat) < 0)
        return -1;
    json_decref(ap->cat->about);
    ap->cat->about = json_deep_copy(ap->src->about);
    json_array_foreach(ap->src->warnings, i, line)
        if (json_array_append(ap->cat->warnings, line) < 0)
            return ckpt_nomem(ap->err);
    return ap->cat->about ? 0 : ckpt_nomem(ap->err);
}

static void apply_release(struct apply *ap)
{
    ckpt_settings_release(&ap->set);
    ckpt_resolver_release(&ap->rs);
    ckpt_catalog_free(ap->cat);
    ckpt_catalog_free(ap->joined);
    ckpt_copies_release(&ap->copies);
    free(ap->used);
    ckpt_instance_release(&ap->in);
    ckpt_vec_release(&ap->drafts);
    ckpt_str_release(&ap->name);
    json_decref(ap->explanation);
}

/* Ranked tensors become ordinary ones before anything else looks at their shapes. */
static int join(struct apply *ap)
{
    struct ckpt_settings draft = {0};
    int rc;

    if (!ap->recipe->family || !ckpt_join_needed(ap->src))
        return 0;
    rc = ckpt_settings_draft(&draft, ap->recipe, ap->src, ap->opt, ap->err) < 0 ||
                 ckpt_join(ap->recipe, ap->src, &draft, &ap->joined, ap->err) < 0
             ? -1
             : 0;
    ckpt_settings_release(&draft);
    if (rc == 0)
        ap->src = ap->joined;
    return rc;
}

static int run(struct apply *ap, const struct ckpt_recipes *set)
{
    if (ckpt_recipes_choose(set, ap->src, ap->opt, &ap->recipe, ap->err) < 0 || join(ap) < 0 ||
        start_catalog(ap) < 0 ||
        ckpt_settings_init(&ap->set, ap->recipe, ap->src, ap->opt, ap->cat, ap->err) < 0)
        return -1;
    ap->used = calloc(ap->src->tensors.len + 1, sizeof *ap->used);
    if (!ap->used)
        return ckpt_nomem(ap->err);
    if (ckpt_resolver_init(&ap->rs, ap->recipe, ap->src, &ap->set, ap->err) < 0)
        return -1;
    if ((ap->recipe->family->open ? walk_sources(ap)
                                  : walk(ap, &ap->recipe->family->tensors, PASS_EMIT)) < 0)
        return -1;
    if (ap->nleft > SHOWN_LEFT)
        ckpt_catalog_warn(ap->cat, "%zu more tensors are left out", ap->nleft - SHOWN_LEFT);
    return ckpt_copies_check(&ap->copies, ap->opt->allow_leftover, ap->cat, ap->err) < 0
               ? -1
               : ckpt_leftover_check(ap->recipe, ap->src, ap->used, ap->opt->allow_leftover,
                                     ap->cat, ap->err);
}

static int make_model(struct apply *ap, struct ckpt_model **ret)
{
    ckpt_cleanup(ckpt_model_freep) struct ckpt_model *m = calloc(1, sizeof *m);

    if (!m || !(m->recipe = strdup(ap->recipe->name)))
        return ckpt_nomem(ap->err);
    m->config = json_incref(ap->set.hf);
    ap->cat->config = json_incref(ap->set.hf);
    m->catalog = ckpt_steal(&ap->cat);
    *ret = ckpt_steal(&m);
    return 0;
}

int ckpt_recipe_apply(const struct ckpt_recipes *r, const struct ckpt_catalog *src,
                      const struct ckpt_recipe_options *opt, struct ckpt_model **ret,
                      struct ckpt_err *err)
{
    struct apply ap = {.src = src, .opt = opt, .err = err};
    int rc = run(&ap, r) < 0 ? -1 : make_model(&ap, ret);

    apply_release(&ap);
    return rc;
}

int ckpt_recipe_explain(const struct ckpt_recipes *r, const struct ckpt_catalog *src,
                        const struct ckpt_recipe_options *opt, const char *name, json_t **ret,
                        struct ckpt_err *err)
{
    struct apply ap = {.src = src, .opt = opt, .explain = name, .err = err};
    int rc = run(&ap, r);

    if (rc == 0 && !ap.explanation)
        rc = ckpt_fail(err, CKPT_MISSING, "the model has no tensor '%.200s'", name);
    if (rc == 0)
        *ret = ckpt_steal(&ap.explanation);
    apply_release(&ap);
    return rc;
}

void ckpt_model_free(struct ckpt_model *m)
{
    if (!m)
        return;
    ckpt_catalog_free(m->catalog);
    json_decref(m->config);
    free(m->recipe);
    free(m);
}

void ckpt_model_freep(struct ckpt_model **m)
{
    ckpt_model_free(*m);
    *m = NULL;
}
