/* SPDX-License-Identifier: Apache-2.0 */
/* Making one tensor of the model: its name, its sources, its shape and dtype. */
#include "recipe/apply/apply.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "recipe/apply/sharding.h"
#include "tensor/catalog.h"

int ckpt_apply_name(struct ckpt_apply *ap, const struct ckpt_model_item *it,
                    struct ckpt_sizes *sizes)
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

/* Check that the rule's shape is that of the model file. */
static int check_shape(struct ckpt_apply *ap, const struct ckpt_model_item *it,
                       const struct ckpt_sizes *sizes, const uint64_t *dim, uint32_t rank)
{
    char hint[128] = "";
    uint64_t want;
    uint32_t var;

    if (it->shape.ndim != rank)
        return ckpt_fail(ap->err, CKPT_CONFLICT,
                         "'%s' has the shape %s, the model has %" PRIu32
                         " dimensions there (from '%s')",
                         ckpt_str_get(&ap->name), ckpt_shape_text(dim, rank).text, it->shape.ndim,
                         ap->in.use.ptr[0].tensor->name);
    for (uint32_t d = 0; d < rank; d++) {
        switch (ckpt_factor_size(&it->shape.dim[d], sizes, &want, &var)) {
        case CKPT_SIZE_KNOWN:
            break;
        case CKPT_SIZE_OVERFLOW:
            return ckpt_fail(ap->err, CKPT_LIMIT, "the size of '%s' overflows",
                             ckpt_str_get(&ap->name));
        case CKPT_SIZE_UNKNOWN:
            if (!it->scope->var[var].name[1]) /* one letter: any size */
                continue;
            return ckpt_fail(
                ap->err, CKPT_MISSING,
                "'%s': dimension %" PRIu32 ": '%s' is unknown or not a whole number%s",
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

static int check_dtypes(struct ckpt_apply *ap)
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

static int explain(struct ckpt_apply *ap)
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

/* Apply the rule's operator to the tensor, with its number if it takes one. */
static int apply_value(struct ckpt_apply *ap, struct ckpt_catalog *cat, size_t index)
{
    const struct ckpt_rule *rule = ap->in.rule;
    const struct ckpt_expr_env env = {ckpt_settings_after, &ap->set, ap->src};
    ckpt_cleanup(ckpt_json_decrefp) json_t *by = rule->by ? ckpt_expr_eval(rule->by, &env) : NULL;

    if (rule->by && !json_is_number(by))
        return ckpt_fail(ap->err, CKPT_MISSING, "'%s': the number of '%s' is not known (%s: 'by')",
                         ckpt_str_get(&ap->name), rule->value->name, rule->where);
    return ckpt_value_apply(cat, index, rule->value, json_number_value(by), ap->err);
}

/* Append the shares of a dimension that is divided. */
static int add_dim(const struct ckpt_shares *shares, uint8_t dim, struct ckpt_cut *cut,
                   struct ckpt_arena *arena, struct ckpt_err *err)
{
    for (size_t i = 0; i < shares->n; i++) {
        const struct ckpt_share *s = &shares->share[i];
        cut[i] = (struct ckpt_cut){.lo = s->lo,
                                   .n = s->n,
                                   .groups = s->groups,
                                   .what = ckpt_arena_strdup(arena, s->what ? s->what : ""),
                                   .dim = dim,
                                   .way = s->way == CKPT_TP && s->of_experts ? CKPT_CUT_OVER_ETP
                                          : s->way == CKPT_TP                ? CKPT_CUT_OVER_TP
                                          : s->way == CKPT_EP                ? CKPT_CUT_OVER_EP
                                                                             : CKPT_CUT_NOT,
                                   .shared = s->shared};
        if (!cut[i].what)
            return ckpt_nomem(err);
    }
    return 0;
}

/* How the ranks of a job divide the target t, by the annotations of its side; into the arena. */
static int cuts_of(struct ckpt_apply *ap, const struct ckpt_tensor *t, struct ckpt_arena *arena,
                   const struct ckpt_cuts **ret)
{
    struct ckpt_instance *in = &ap->in;
    struct ckpt_cuts *cuts = ckpt_arena_alloc(arena, sizeof *cuts);
    ckpt_cleanup(ckpt_freep) struct ckpt_shares *shares = calloc(t->rank + 1, sizeof *shares);
    struct ckpt_dims dims;
    struct ckpt_cut *cut;
    uint32_t n = 0;

    if (!cuts || !shares)
        return ckpt_nomem(ap->err);
    (void)ckpt_dims_of(&in->rule->to[in->side], 0, t->rank, &dims); /* its shape was made so */
    for (uint32_t d = 0; d < t->rank; d++) {
        if (!dims.d[d].f || !ckpt_factor_is_marked(dims.d[d].f))
            continue;
        if (ckpt_shares_of(dims.d[d].f, t->dim[d], &in->sizes, in->target, &shares[d], ap->err) < 0)
            return -1;
        n += (uint32_t)shares[d].n;
    }
    if (!(cut = ckpt_arena_alloc(arena, (n + 1) * sizeof *cut)))
        return ckpt_nomem(ap->err);
    *cuts =
        (struct ckpt_cuts){.stage = ckpt_pipeline_find(&ap->pipeline, t->name), .n = n, .cut = cut};
    for (uint32_t d = 0; d < t->rank; cut += shares[d++].n)
        if (add_dim(&shares[d], (uint8_t)d, cut, arena, ap->err) < 0)
            return -1;
    *ret = cuts;
    return 0;
}

/* Add the instance as tensor ap->name to `cat`, which has the model's sources; `it` is the model
 * file's item, or NULL. */
static int add_to(struct ckpt_apply *ap, struct ckpt_catalog *cat, const struct ckpt_model_item *it,
                  const struct ckpt_sizes *sizes)
{
    uint64_t dim[CKPT_MAX_RANK];
    uint32_t rank;
    size_t index;

    for (size_t i = 0; i < ap->in.use.len; i++)
        ap->used[ap->in.use.ptr[i].tensor - ap->src->tensors.ptr] = true;
    ap->drafts.len = 0;
    if (ckpt_instance_solve(&ap->in, &ap->set, ap->err) < 0 || check_dtypes(ap) < 0 ||
        ckpt_instance_shape(&ap->in, dim, &rank, ap->err) < 0 ||
        (it && check_shape(ap, it, sizes, dim, rank) < 0) ||
        ckpt_instance_lower(&ap->in, dim, rank, &ap->drafts, ap->err) < 0)
        return ckpt_err_in(ap->err, "%s", ap->in.rule->where);
    if (ap->ntarget++ == CKPT_APPLY_TARGETS)
        return ckpt_fail(ap->err, CKPT_LIMIT, "more than %d tensors", CKPT_APPLY_TARGETS);
    if (ckpt_catalog_add(cat, ckpt_str_get(&ap->name), ap->in.use.ptr[0].tensor->dtype, dim, rank,
                         &index, ap->err) < 0)
        return -1;
    struct ckpt_tensor *t = &cat->tensors.ptr[index];
    t->block = ap->block;
    t->wanted = ap->in.use.ptr[0].tensor->wanted;
    if (ckpt_catalog_set_pieces(cat, index, ap->drafts.ptr, ap->drafts.len, ap->err) < 0)
        return -1;
    if (ap->opt->output && ap->in.padded)
        ckpt_catalog_warn(ap->cat,
                          "'%s' is padded with zeros: dimension 0 becomes %" PRIu64
                          ", a multiple of %" PRIu64,
                          t->name, t->dim[0], ap->opt->output->pad_to);
    if (ap->opt->output && cuts_of(ap, t, &cat->arena, &t->cuts) < 0)
        return -1;
    if (!ap->in.rule->value)
        return 0;
    if (!ap->opt->layout_only)
        return apply_value(ap, cat, index);
    if (ap->in.rule->value->takes_number)
        ckpt_catalog_warn(ap->cat,
                          "the moments of '%s' are shown as they are stored: they are those of the "
                          "framework's own parameter, which the model's weight is a multiple of",
                          ap->in.rule->to[ap->in.side].text);
    return 0;
}

int ckpt_apply_add(struct ckpt_apply *ap, const struct ckpt_model_item *it,
                   const struct ckpt_sizes *sizes)
{
    if (ap->explain && strcmp(ap->explain, ckpt_str_get(&ap->name)) == 0 && explain(ap) < 0)
        return -1;
    return add_to(ap, ap->cat, it, sizes);
}

int ckpt_apply_add_copy(struct ckpt_apply *ap, const struct ckpt_model_item *it,
                        const struct ckpt_sizes *sizes)
{
    struct ckpt_tied_copies *c = &ap->copies;

    if (!c->cat && (ckpt_catalog_new(&c->cat, ap->err) < 0 ||
                    ckpt_catalog_add_sources(c->cat, ap->src, ap->err) < 0))
        return -1;
    if (add_to(ap, c->cat, it, sizes) < 0)
        return -1;
    return ckpt_vec_push(&c->original, ap->tied) < 0 ? ckpt_nomem(ap->err) : 0;
}

int ckpt_apply_missing(struct ckpt_apply *ap, const struct ckpt_resolution *r)
{
    if (!r->missing)
        return ckpt_fail(ap->err, CKPT_MISSING, "the model needs '%s', for which %s has no rule",
                         ckpt_str_get(&ap->name), ap->recipe->name);
    return ckpt_fail(ap->err, CKPT_MISSING,
                     "the model needs '%s', but the checkpoint has no tensor '%s' (missing=base "
                     "takes it from base=)",
                     ckpt_str_get(&ap->name), r->missing);
}

int ckpt_apply_resolve(struct ckpt_apply *ap, bool all, struct ckpt_resolution *ret)
{
    return ckpt_resolve(&ap->rs, ckpt_str_get(&ap->name), ap->name.len, all, &ap->in, ret);
}
