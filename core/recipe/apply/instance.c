/* SPDX-License-Identifier: Apache-2.0 */
/* The sizes of a rule's instance: solved from the shapes of its sources, checked against all of
 * them, and the shape of its target. */
#include "recipe/apply/instance.h"

#include <inttypes.h>
#include <stdio.h>

bool ckpt_dims_of(const struct ckpt_side *side, uint32_t spelling, uint32_t rank,
                  struct ckpt_dims *out)
{
    const struct ckpt_pattern *p = &side->pattern;
    const int8_t lead = side->name[spelling].lead;
    uint32_t spelt = p->ndim + (lead >= 0), n = 0;

    if (rank < spelt || rank > CKPT_MAX_RANK || (p->rest_at < 0 && rank != spelt))
        return false;
    out->n = rank;
    out->nrest = rank - spelt;
    if (lead >= 0) {
        out->lead = (struct ckpt_factor){.kind = CKPT_FACTOR_AXIS, .axis = (uint8_t)lead};
        out->d[n++].f = &out->lead;
    }
    for (uint32_t i = 0; i <= p->ndim; i++) {
        if (p->rest_at == (int32_t)i)
            for (uint32_t k = 0; k < out->nrest; k++) {
                out->d[n].f = NULL;
                out->d[n++].rest = k;
            }
        if (i < p->ndim)
            out->d[n++].f = &p->dim[i];
    }
    return true;
}

int ckpt_instance_rank_error(const struct ckpt_instance *in, const struct ckpt_source_use *u,
                             struct ckpt_err *err)
{
    return ckpt_fail(err, CKPT_CONFLICT,
                     "tensor '%s' has the shape %s, the rule '%s' (%s) speaks of %" PRIu32
                     " dimensions%s",
                     u->tensor->name, ckpt_shape_text(u->tensor->dim, u->tensor->rank).text,
                     in->rule->from[u->side].text, in->rule->where,
                     in->rule->from[u->side].pattern.ndim +
                         (in->rule->from[u->side].name[u->spelling].lead >= 0),
                     in->rule->from[u->side].pattern.rest_at >= 0 ? " or more" : "");
}

static int solve_rest(struct ckpt_instance *in, const struct ckpt_dims *d,
                      const struct ckpt_source_use *u, struct ckpt_err *err)
{
    if (!in->has_rest)
        in->nrest = d->nrest;
    if (in->nrest != d->nrest)
        return ckpt_fail(err, CKPT_CONFLICT, "tensors '%s' and '%s' have different ranks",
                         in->use.ptr[0].tensor->name, u->tensor->name);
    for (uint32_t i = 0; i < d->n; i++) {
        if (d->d[i].f)
            continue;
        if (!in->has_rest)
            in->rest[d->d[i].rest] = u->tensor->dim[i];
        else if (in->rest[d->d[i].rest] != u->tensor->dim[i])
            return ckpt_fail(err, CKPT_CONFLICT,
                             "dimension %" PRIu32 " of tensor '%s' is %" PRIu64
                             ", of tensor '%s' %" PRIu64,
                             i, u->tensor->name, u->tensor->dim[i], in->use.ptr[0].tensor->name,
                             in->rest[d->d[i].rest]);
    }
    in->has_rest = true;
    return 0;
}

/* Try to solve each dimension once; true if a size was found. */
static bool solve_round(struct ckpt_instance *in)
{
    uint32_t before = in->sizes.known;
    struct ckpt_dims d;

    for (size_t i = 0; i < in->use.len; i++) {
        const struct ckpt_source_use *u = &in->use.ptr[i];
        if (!ckpt_dims_of(&in->rule->from[u->side], u->spelling, u->tensor->rank, &d))
            continue;
        for (uint32_t k = 0; k < d.n; k++)
            if (d.d[k].f)
                (void)ckpt_factor_solve(d.d[k].f, &in->sizes, u->tensor->dim[k], false);
        if (in->sizes.known == (1ull << in->sizes.scope->nvar) - 1)
            break;
    }
    return in->sizes.known != before;
}

static bool factor_uses(const struct ckpt_scope *sc, const struct ckpt_factor *f, uint32_t var)
{
    if (f->kind == CKPT_FACTOR_AXIS)
        return sc->axis[f->axis].var == (int8_t)var;
    for (uint16_t c = 0; c < f->nchild; c++)
        if (factor_uses(sc, &f->child[c], var))
            return true;
    return false;
}

enum { SIZES_TEXT = 256 };

/* " with vocab=128 (option vocab_size=...), ..." of the known dims in f; "" if there is none. */
static const char *sizes_text(const struct ckpt_instance *in, const struct ckpt_settings *s,
                              const struct ckpt_factor *f, char *buf)
{
    const struct ckpt_scope *sc = in->rule->scope;
    char hint[128];
    size_t len = 0;

    buf[0] = '\0';
    for (uint32_t v = 0; v < sc->nvar && len + 1 < SIZES_TEXT; v++)
        if (sc->var[v].dim && (in->sizes.known >> v & 1) && factor_uses(sc, f, v)) {
            int n = snprintf(buf + len, SIZES_TEXT - len, "%s%s=%" PRIu64 "%s",
                             len ? ", " : " with ", sc->var[v].name, in->sizes.var[v],
                             ckpt_settings_hint(s, sc->var[v].name, hint, sizeof hint));
            len += n > 0 ? (size_t)n : 0;
        }
    return buf;
}

/* A dimension of a source whose size its pattern does not give. */
struct misfit {
    const struct ckpt_source_use *use;
    const struct ckpt_factor *f;
    uint32_t dim;
};

static int size_error(const struct ckpt_instance *in, const struct ckpt_settings *s,
                      const struct misfit *m, uint64_t want, struct ckpt_err *err)
{
    const struct ckpt_source_use *u = m->use;
    char sizes[SIZES_TEXT];

    return ckpt_fail(err, CKPT_CONFLICT,
                     "dimension %" PRIu32 " of tensor '%s' is %" PRIu64
                     ", but '%.150s' makes it %" PRIu64 "%s",
                     m->dim, u->tensor->name, u->tensor->dim[m->dim], in->rule->from[u->side].text,
                     want, sizes_text(in, s, m->f, sizes));
}

/* A size that is needed is not known, or no whole number solves the pattern. */
static int unknown_error(const struct ckpt_instance *in, const struct ckpt_settings *s,
                         const struct misfit *m, uint32_t var, struct ckpt_err *err)
{
    const struct ckpt_source_use *u = m->use;
    const struct ckpt_scope_var *v = &in->rule->scope->var[var];
    char hint[128], sizes[SIZES_TEXT];

    (void)sizes_text(in, s, m->f, sizes);
    if (!v->dim)
        return ckpt_fail(
            err, CKPT_CONFLICT,
            "dimension %" PRIu32 " of tensor '%s' is %" PRIu64 ", which does not fit '%.150s'%s",
            m->dim, u->tensor->name, u->tensor->dim[m->dim], in->rule->from[u->side].text, sizes);
    return ckpt_fail(err, CKPT_MISSING,
                     "dimension %" PRIu32 " of tensor '%s' is %" PRIu64
                     ", which '%.150s' does not divide: '%s' is unknown or not a whole number%s%s",
                     m->dim, u->tensor->name, u->tensor->dim[m->dim], in->rule->from[u->side].text,
                     v->name, ckpt_settings_hint(s, v->name, hint, sizeof hint), sizes);
}

static int check_use(struct ckpt_instance *in, const struct ckpt_settings *s,
                     const struct ckpt_source_use *u, struct ckpt_err *err)
{
    struct ckpt_dims d;
    uint64_t size;
    uint32_t var;

    if (!ckpt_dims_of(&in->rule->from[u->side], u->spelling, u->tensor->rank, &d))
        return ckpt_instance_rank_error(in, u, err);
    if (in->rule->from[u->side].pattern.rest_at >= 0 && solve_rest(in, &d, u, err) < 0)
        return -1;
    for (uint32_t k = 0; k < d.n; k++) {
        const struct misfit at = {u, d.d[k].f, k};
        if (!at.f)
            continue;
        switch (ckpt_factor_size(at.f, &in->sizes, &size, &var)) {
        case CKPT_SIZE_OVERFLOW:
            return ckpt_fail(err, CKPT_LIMIT, "sizes of the rule '%.200s' overflow",
                             in->rule->from[u->side].text);
        case CKPT_SIZE_UNKNOWN:
            return unknown_error(in, s, &at, var, err);
        case CKPT_SIZE_KNOWN:
            if (size != u->tensor->dim[k])
                return size_error(in, s, &at, size, err);
        }
    }
    return 0;
}

static int check_bound(const struct ckpt_instance *in, uint32_t bound, const uint64_t *at,
                       struct ckpt_err *err)
{
    uint64_t size;

    for (uint32_t a = 0; a < in->rule->scope->naxis; a++)
        if ((bound >> a & 1) && ckpt_axis_size(&in->sizes, a, &size) && at[a] >= size)
            return ckpt_fail(err, CKPT_CONFLICT,
                             "'%s': number %" PRIu64 " of '%s' is not below %" PRIu64, in->target,
                             at[a], in->rule->scope->axis[a].name, size);
    return 0;
}

int ckpt_instance_solve(struct ckpt_instance *in, const struct ckpt_settings *s,
                        struct ckpt_err *err)
{
    const uint32_t nvar = in->rule->scope->nvar;

    while (in->sizes.known != (uint32_t)((1ull << nvar) - 1) && solve_round(in))
        ;
    in->has_rest = false;
    in->nrest = 0;
    for (size_t i = 0; i < in->use.len; i++)
        if (check_use(in, s, &in->use.ptr[i], err) < 0 ||
            check_bound(in, in->use.ptr[i].bound, in->use.ptr[i].at, err) < 0)
            return -1;
    return check_bound(in, in->bound, in->at, err);
}

/* The size of a target's dimension. Its padding, of which its sources know nothing, makes it a
 * multiple. */
static enum ckpt_size_state target_size(struct ckpt_instance *in, const struct ckpt_factor *f,
                                        uint64_t *ret, uint32_t *ret_var)
{
    struct ckpt_sizes *s = &in->sizes;
    const enum ckpt_size_state state = ckpt_factor_size(f, s, ret, ret_var);
    const uint32_t var = *ret_var;
    uint32_t other;

    if (state != CKPT_SIZE_UNKNOWN || in->rule->scope->var[var].name[0] != '_')
        return state;
    s->known |= 1u << var;
    s->var[var] = 0;
    if (!in->pad_to || ckpt_factor_size(f, s, ret, &other) != CKPT_SIZE_KNOWN)
        return CKPT_SIZE_UNKNOWN;
    s->var[var] = (in->pad_to - *ret % in->pad_to) % in->pad_to;
    return ckpt_factor_size(f, s, ret, &other);
}

int ckpt_instance_shape(struct ckpt_instance *in, uint64_t dim[CKPT_MAX_RANK], uint32_t *ret_rank,
                        struct ckpt_err *err)
{
    const struct ckpt_side *side = &in->rule->to[in->side];
    uint32_t rank = side->pattern.ndim + (side->pattern.rest_at >= 0 ? in->nrest : 0), var;
    struct ckpt_dims d;

    if (!ckpt_dims_of(side, 0, rank, &d))
        return ckpt_fail(err, CKPT_LIMIT, "'%s' has more than %d dimensions", in->target,
                         CKPT_MAX_RANK);
    for (uint32_t k = 0; k < rank; k++) {
        if (!d.d[k].f) {
            dim[k] = in->rest[d.d[k].rest];
            continue;
        }
        switch (target_size(in, d.d[k].f, &dim[k], &var)) {
        case CKPT_SIZE_OVERFLOW:
            return ckpt_fail(err, CKPT_LIMIT, "the size of '%s' overflows", in->target);
        case CKPT_SIZE_UNKNOWN:
            return ckpt_fail(err, CKPT_MISSING, "'%s': the size of '%s' is not known", in->target,
                             in->rule->scope->var[var].name);
        case CKPT_SIZE_KNOWN:
            break;
        }
    }
    *ret_rank = rank;
    return 0;
}

/* ---- a temporary rule with one source and one target ---- */

static int rearrange(struct ckpt_catalog *cat, struct ckpt_instance *in,
                     const struct ckpt_tensor *t, ckpt_drafts *drafts, struct ckpt_tensor *ret,
                     struct ckpt_err *err)
{
    static const struct ckpt_family no_dims;
    const struct ckpt_settings none = {.family = &no_dims};
    const struct ckpt_source_use use = {.tensor = t};
    struct ckpt_tensor own = *t;
    uint64_t dim[CKPT_MAX_RANK];
    uint32_t rank;

    if (ckpt_vec_push(&in->use, use) < 0)
        return ckpt_nomem(err);
    if (ckpt_instance_solve(in, &none, err) < 0 || ckpt_instance_shape(in, dim, &rank, err) < 0 ||
        ckpt_instance_lower(in, dim, rank, drafts, err) < 0)
        return -1;
    if (!(own.dim = ckpt_arena_dup(&cat->arena, dim, rank * sizeof *dim)))
        return ckpt_nomem(err);
    own.rank = (uint8_t)rank;
    if (ckpt_tensor_set_pieces(cat, &own, drafts->ptr, drafts->len, err) < 0)
        return -1;
    *ret = own;
    return 0;
}

int ckpt_rearrange(struct ckpt_catalog *cat, const struct ckpt_tensor *t, const char *from,
                   const char *to, struct ckpt_tensor *ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_arena_release) struct ckpt_arena arena = {0};
    ckpt_cleanup(ckpt_instance_release) struct ckpt_instance in = {.target = t->name};
    const struct ckpt_rule_context cx = {
        .arena = &arena, .where = t->name, .from_at = "x  ", .to_at = "x  "};
    ckpt_cleanup(ckpt_vec_cleanup) ckpt_rules rules = {0};
    ckpt_cleanup(ckpt_vec_cleanup) ckpt_drafts drafts = {0};

    if (t->value)
        return ckpt_fail(err, CKPT_UNSUPPORTED, "'%s' is a computed tensor: it can't be mapped",
                         t->name);
    if (ckpt_rule_parse(&cx, &from, 1, &to, 1, &rules, err) < 0)
        return -1;
    in.rule = &rules.ptr[0];
    in.sizes.scope = in.rule->scope;
    return rearrange(cat, &in, t, &drafts, ret, err);
}
