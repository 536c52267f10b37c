/* SPDX-License-Identifier: Apache-2.0 */
/* Computing shares from a factor and the sizes of its axes. */
#include "recipe/apply/shares.h"

#include <inttypes.h>
#include <string.h>

struct walk {
    struct ckpt_sizes *sizes;
    const char *tensor;
    struct ckpt_shares *out;
    struct ckpt_err *err;
};

static int factor_size(struct walk *w, const struct ckpt_factor *f, uint64_t *ret)
{
    uint32_t var = 0;

    if (ckpt_factor_size(f, w->sizes, ret, &var) == CKPT_SIZE_KNOWN)
        return 0;
    return ckpt_fail(w->err, CKPT_MISSING,
                     "tensor '%s': how it is divided is not known, since config.json lacks a size",
                     w->tensor);
}

bool ckpt_factor_is_marked(const struct ckpt_factor *f)
{
    for (uint16_t i = 0; !f->rank && i < f->nchild; i++)
        if (ckpt_factor_is_marked(&f->child[i]))
            return true;
    return f->rank != NULL;
}

static int add_share(struct walk *w, const struct ckpt_share *s)
{
    struct ckpt_shares *out = w->out;
    struct ckpt_share *last = out->n ? &out->share[out->n - 1] : NULL;

    if (last && s->way == CKPT_WAYS && last->way == CKPT_WAYS && last->lo + last->n == s->lo) {
        last->n += s->n;
        return 0;
    }
    if (out->n == CKPT_SHARES)
        return ckpt_fail(w->err, CKPT_UNSUPPORTED, "tensor '%s' is divided into too many parts",
                         w->tensor);
    out->share[out->n++] = *s;
    return 0;
}

static int add_whole(struct walk *w, uint64_t lo, uint64_t n)
{
    const struct ckpt_share s = {.lo = lo, .n = n, .way = CKPT_WAYS};

    return add_share(w, &s);
}

/* The name of an axis, or of its size where it has one of its own. */
static const char *axis_name(const struct walk *w, const struct ckpt_factor *f)
{
    const struct ckpt_scope *sc = w->sizes->scope;

    if (f->kind != CKPT_FACTOR_AXIS)
        return "";
    const struct ckpt_scope_axis *a = &sc->axis[f->axis];
    return a->var >= 0 ? sc->var[a->var].name : a->name;
}

static int add_marked(struct walk *w, const struct ckpt_factor *f, uint64_t lo, uint64_t size,
                      uint64_t inner)
{
    struct ckpt_share s = {.lo = lo, .n = size * inner, .way = CKPT_WAYS};
    const struct ckpt_factor *g = f; /* the content of the parentheses */

    if (strcmp(f->rank, "tp") == 0)
        s.way = CKPT_TP;
    s.of_experts = strcmp(f->rank, "etp") == 0;
    if (s.of_experts)
        s.way = CKPT_TP;
    if (strcmp(f->rank, "ep") == 0)
        s.way = CKPT_EP;
    while (g->kind == CKPT_FACTOR_PRODUCT && g->nchild == 1)
        g = &g->child[0];
    const struct ckpt_factor *lead = g->kind == CKPT_FACTOR_PRODUCT ? &g->child[0] : g;
    s.what = axis_name(w, lead);
    s.shared = f->shared;
    if (g->kind == CKPT_FACTOR_PRODUCT && factor_size(w, lead, &s.groups) < 0)
        return -1;
    if (g->kind != CKPT_FACTOR_PRODUCT && inner > 1)
        s.groups = size;
    return add_share(w, &s);
}

/* Add a factor that begins at lo, each element of which represents `inner` elements of the
 * dimension. */
static int add_factor(struct walk *w, const struct ckpt_factor *f, uint64_t lo, uint64_t inner)
{
    uint64_t size, outer = 1, within = inner;
    uint16_t marked = 0;

    if (factor_size(w, f, &size) < 0)
        return -1;
    if (f->rank)
        return add_marked(w, f, lo, size, inner);
    if (!ckpt_factor_is_marked(f))
        return add_whole(w, lo, size * inner);
    if (f->kind == CKPT_FACTOR_SUM) {
        for (uint16_t i = 0; i < f->nchild; i++) {
            if (add_factor(w, &f->child[i], lo, inner) < 0 ||
                factor_size(w, &f->child[i], &size) < 0)
                return -1;
            lo += size * inner;
        }
        return 0;
    }
    while (!ckpt_factor_is_marked(&f->child[marked]))
        marked++;
    for (uint16_t i = 0; i < f->nchild; i++) {
        if (i != marked && ckpt_factor_is_marked(&f->child[i]))
            return ckpt_fail(w->err, CKPT_UNSUPPORTED, "tensor '%s' is divided twice", w->tensor);
        if (factor_size(w, &f->child[i], &size) < 0)
            return -1;
        if (i < marked)
            outer *= size;
        if (i > marked)
            within *= size;
    }
    if (factor_size(w, &f->child[marked], &size) < 0)
        return -1;
    for (uint64_t o = 0; o < outer; o++)
        if (add_factor(w, &f->child[marked], lo + o * size * within, within) < 0)
            return -1;
    return 0;
}

int ckpt_shares_of(const struct ckpt_factor *f, uint64_t n, struct ckpt_sizes *sizes,
                   const char *tensor, struct ckpt_shares *ret, struct ckpt_err *err)
{
    struct walk w = {.sizes = sizes, .tensor = tensor, .out = ret, .err = err};

    ret->n = 0;
    if (!f || !ckpt_factor_is_marked(f))
        return add_whole(&w, 0, n);
    (void)ckpt_factor_solve(f, sizes, n, true); /* for a size that the config does not give */
    if (add_factor(&w, f, 0, 1) < 0)
        return -1;
    const struct ckpt_share *last = ret->n ? &ret->share[ret->n - 1] : NULL;
    if (last && last->lo + last->n == n)
        return 0;
    /* the sizes come from config.json, the tensor from the checkpoint */
    return ckpt_fail(err, CKPT_CONFLICT,
                     "tensor '%s' has a dimension of %" PRIu64 ", config.json makes it %" PRIu64,
                     tensor, n, last ? last->lo + last->n : 0);
}

uint32_t ckpt_share_parts(const struct ckpt_share *s, uint32_t tp)
{
    if (s->groups == 0 || s->groups % tp == 0)
        return tp;
    return s->shared && tp % s->groups == 0 ? (uint32_t)s->groups : 0;
}
