/* SPDX-License-Identifier: Apache-2.0 */
/* Layouts: computes the wants of one rank of tp x ep x fsdp x dp x pp from the sharding annotations
 * of the model file. */
#include "load/want/want.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/ckd.h"
#include "base/err.h"
#include "base/mem.h"
#include "model/describe.h"
#include "recipe/apply/sharding.h"
#include "run/checkpoint.h"

enum { MAX_WAYS = 1 << 20 };

enum { /* the ways to divide a model; the first varies fastest among ranks */
       TP = CKPT_TP,
       EP = CKPT_EP,
       FSDP = CKPT_FSDP,
       DP = CKPT_DP,
       PP = CKPT_PP,
       NWAY = CKPT_WAYS,
};

struct layout {
    uint32_t n[NWAY], at[NWAY]; /* per way: number of ranks, and this rank's index */
};

/* ---- the text ---- */

/* Parse the numbers; *ret_product is UINT64_MAX if the product is larger. */
static int parse_numbers(const char *text, struct layout *ret, uint64_t *ret_product,
                         struct ckpt_err *err)
{
    static const char *const name[NWAY] = {"tp", "ep", "fsdp", "dp", "pp"};
    uint64_t product = 1;
    bool seen[NWAY] = {false};

    for (int k = 0; k < NWAY; k++)
        ret->n[k] = 1;
    for (const char *at = text; *at;) {
        size_t len = strcspn(at, ",");
        const char *equals = memchr(at, '=', len);
        unsigned long long n;
        int k = 0;
        while (equals && k < NWAY &&
               !(strlen(name[k]) == (size_t)(equals - at) &&
                 strncmp(name[k], at, strlen(name[k])) == 0))
            k++;
        if (!equals || k == NWAY || seen[k] ||
            !ckpt_parse_u64(equals + 1, len - (size_t)(equals + 1 - at), &n) || n < 1 ||
            n > MAX_WAYS)
            return ckpt_fail(err, CKPT_USAGE,
                             "layout '%s': expected tp=N, pp=N, ep=N, dp=N, fsdp=N, each at most "
                             "once, with commas between",
                             text);
        seen[k] = true;
        ret->n[k] = (uint32_t)n;
        at += len + (at[len] == ',');
    }
    for (int k = 0; k < NWAY; k++)
        if (ckd_mul(&product, product, ret->n[k]))
            product = UINT64_MAX;
    *ret_product = product;
    return 0;
}

int ckpt_layout_ranks(const char *layout, uint32_t *ret, struct ckpt_err *err)
{
    struct layout l;
    uint64_t product;

    if (parse_numbers(layout, &l, &product, err) < 0)
        return -1;
    if (product > MAX_WAYS)
        return ckpt_fail(err, CKPT_USAGE, "layout '%s' is for more than %d ranks", layout,
                         MAX_WAYS);
    *ret = (uint32_t)product;
    return 0;
}

static int parse_layout(const char *text, uint32_t rank, uint32_t nrank, struct layout *ret,
                        struct ckpt_err *err)
{
    uint64_t product;

    if (parse_numbers(text, ret, &product, err) < 0)
        return -1;
    for (int k = 0; k < NWAY; k++) {
        ret->at[k] = rank % ret->n[k];
        rank /= ret->n[k];
    }
    if (product != nrank)
        return ckpt_fail(err, CKPT_USAGE,
                         "layout '%s' is for %" PRIu64 " ranks (tp x pp x ep x dp x fsdp), but "
                         "there are %" PRIu32 ": plan for as many (--ranks %" PRIu64
                         "), or start as many, with mpirun -n %" PRIu64
                         ", or torchrun --no-python --nproc-per-node=%" PRIu64,
                         text, product, nrank, product, product, product);
    return 0;
}

/* ---- wants ---- */

struct lay {
    const struct ckpt_annotations *marker;
    size_t nfound;  /* number of tensors with annotations */
    size_t nlayer;  /* number of tensors of layers */
    size_t nknown;  /* of these, number with annotations */
    size_t nexpert; /* number of tensors of experts, one each or stacked */
    struct layout l;
    struct ckpt_wants *w;
    const struct ckpt_catalog *cat;
    struct ckpt_err *err;
};

/* Add the grid of the ranks of this rank's pipeline stage: dp x fsdp x ep x groups x copies, where
 * groups x copies is tp. one_ep: only the ranks with this rank's index in ep, for a tensor of a
 * single expert. */
static uint32_t stage_grid(struct lay *y, bool one_ep, uint32_t groups)
{
    const struct layout *l = &y->l;
    const uint32_t nep = one_ep ? 1 : l->n[EP];
    const uint32_t dim[5] = {l->n[DP], l->n[FSDP], nep, groups, l->n[TP] / groups};
    const uint32_t n = l->n[DP] * l->n[FSDP] * nep * l->n[TP];
    ckpt_cleanup(ckpt_freep) uint32_t *rank = malloc(n * sizeof *rank);
    uint32_t at = 0;

    if (!rank)
        return (void)ckpt_nomem(y->err), CKPT_NONE;
    for (uint32_t d = 0; d < l->n[DP]; d++)
        for (uint32_t f = 0; f < l->n[FSDP]; f++)
            for (uint32_t e = 0; e < nep; e++)
                for (uint32_t t = 0; t < l->n[TP]; t++)
                    rank[at++] = (((l->at[PP] * l->n[DP] + d) * l->n[FSDP] + f) * l->n[EP] +
                                  (one_ep ? l->at[EP] : e)) *
                                     l->n[TP] +
                                 t;
    return ckpt_wants_grid(y->w, 5, dim, rank, y->err);
}

static int fail_groups(struct lay *y, const struct ckpt_tensor *t, const struct ckpt_share *s)
{
    return ckpt_fail(y->err, CKPT_USAGE,
                     "tp=%" PRIu32 ": tensor '%s' has %" PRIu64 " %s, which is no multiple of it%s",
                     y->l.n[TP], t->name, s->groups, strstr(s->what, "heads") ? "heads" : s->what,
                     s->shared ? ", nor a divisor" : "");
}

/* Add a want for each combination of one share (recipe/apply/sharding.h) of each dimension, from
 * dimension d on; `pick` has the shares of the dimensions before. */
static int add_products(struct lay *y, uint32_t tensor, const struct ckpt_tensor *t,
                        const struct ckpt_shares *share, uint32_t d, const struct ckpt_share **pick,
                        bool one_ep)
{
    if (d < t->rank) {
        for (size_t i = 0; i < share[d].n; i++) {
            pick[d] = &share[d].share[i];
            if (add_products(y, tensor, t, share, d + 1, pick, one_ep) < 0)
                return -1;
        }
        return 0;
    }
    struct ckpt_spec spec = {0};
    struct ckpt_box box = {.rank = t->rank};
    uint32_t groups = y->l.n[TP];
    bool whole = true;
    for (uint32_t k = 0; k < t->rank; k++) {
        box.lo[k] = pick[k]->lo;
        box.n[k] = pick[k]->n;
        whole &= box.n[k] == t->dim[k];
        if (pick[k]->way == CKPT_TP && y->l.n[TP] > 1 &&
            !(groups = ckpt_share_parts(pick[k], y->l.n[TP])))
            return fail_groups(y, t, pick[k]);
    }
    for (uint32_t k = 0; k < t->rank; k++) {
        if (pick[k]->way == CKPT_TP && y->l.n[TP] > 1)
            spec.cut[spec.ncut++] = (struct ckpt_division){k, 3};
        if (pick[k]->way == CKPT_EP && y->l.n[EP] > 1)
            spec.cut[spec.ncut++] = (struct ckpt_division){k, 2};
        if (spec.ncut > CKPT_SPEC_CUTS - 2)
            return ckpt_fail(y->err, CKPT_UNSUPPORTED,
                             "tensor '%s' is divided along too many dimensions", t->name);
    }
    if (t->rank > 0 && y->l.n[FSDP] > 1)
        spec.cut[spec.ncut++] = (struct ckpt_division){0, 1};
    uint32_t number = CKPT_NONE;
    if (spec.ncut && ((spec.grid = stage_grid(y, one_ep, groups)) == CKPT_NONE ||
                      (number = ckpt_wants_spec(y->w, &spec, y->err)) == CKPT_NONE))
        return -1;
    return ckpt_wants_add(y->w, y->cat, tensor, number, whole ? NULL : &box, y->err);
}

/* The stage of a layer: layers are divided as evenly as possible, the first stages get one more. */
static uint32_t stage_of_layer(uint64_t layer, uint64_t layers, uint32_t stages)
{
    const uint64_t base = layers / stages, more = layers % stages;

    if (layer < more * (base + 1))
        return (uint32_t)(layer / (base + 1));
    if (base == 0)
        return stages - 1;
    uint64_t s = more + (layer - more * (base + 1)) / base;
    return s < stages ? (uint32_t)s : stages - 1;
}

/* True if a tensor is on this rank's pipeline stage. */
static bool on_stage(const struct lay *y, const struct ckpt_sharding *m)
{
    const uint32_t pp = y->l.n[PP], at = y->l.at[PP];

    if (pp == 1)
        return true;
    if (m->has_layer)
        return stage_of_layer(m->layer, m->layers, pp) == at;
    if (m->embedding && at == pp - 1 && !ckpt_annotations_has_head(y->marker))
        return true; /* the embedding is the output matrix, too */
    return at == (m->first ? 0 : pp - 1);
}

/* True unless the tensor belongs to an expert that ep gives to other ranks. */
static bool on_ep(const struct lay *y, const struct ckpt_sharding *m)
{
    const uint32_t ep = y->l.n[EP];

    if (ep == 1 || !m->has_expert)
        return true;
    return m->expert / ((m->experts + ep - 1) / ep) == y->l.at[EP];
}

/* True if the tensor belongs to one expert, or has a dimension that ep divides. */
static bool is_of_experts(const struct ckpt_sharding *m, uint32_t rank)
{
    bool found = m->has_expert;

    for (uint32_t d = 0; d < rank && m->dim; d++)
        for (size_t i = 0; i < m->dim[d].n; i++)
            found |= m->dim[d].share[i].way == CKPT_EP;
    return found;
}

static int want_tensor(struct lay *y, uint32_t tensor, const struct ckpt_tensor *t)
{
    const struct ckpt_share *pick[CKPT_MAX_RANK];
    ckpt_cleanup(ckpt_sharding_release) struct ckpt_sharding m = {0};

    if (ckpt_annotations_find(y->marker, t, y->l.n[TP], y->l.n[EP], &m, y->err) < 0)
        return -1;
    y->nfound += m.found;
    y->nlayer += m.has_layer;
    y->nknown += m.has_layer && m.found;
    y->nexpert += is_of_experts(&m, t->rank);
    if (!on_stage(y, &m) || !on_ep(y, &m))
        return 0;
    return add_products(y, tensor, t, m.dim, 0, pick, y->l.n[EP] > 1 && m.has_expert);
}

static int fail_unknown(const struct ckpt_view *view, const char *layout, struct ckpt_err *err)
{
    const char *type = ckpt_json_str(view->config, "model_type");

    return ckpt_fail(err, CKPT_UNSUPPORTED,
                     "layout '%s': no model file says how %s%s is divided over tp, ep or pp; dp "
                     "and fsdp work",
                     layout, type ? "model_type " : "this view", type ? type : "");
}

int ckpt_layout_wants(const struct ckpt_view *view, const char *layout, uint32_t rank,
                      uint32_t nrank, struct ckpt_wants *w, struct ckpt_err *err)
{
    struct lay y = {.w = w, .cat = view->cat, .err = err};
    ckpt_cleanup(ckpt_annotations_freep) struct ckpt_annotations *marker = NULL;

    if (parse_layout(layout, rank, nrank, &y.l, err) < 0 ||
        ckpt_describe_sharding(view, &marker, err) < 0)
        return -1;
    y.marker = marker;
    for (uint32_t t = 0; t < view->cat->tensors.len; t++)
        if (want_tensor(&y, t, &view->cat->tensors.ptr[t]) < 0)
            return -1;
    const bool blind = y.nfound == 0 || (y.nlayer && y.nknown == 0);
    if (blind && (y.l.n[TP] > 1 || y.l.n[EP] > 1 || (y.l.n[PP] > 1 && !y.nlayer)))
        return fail_unknown(view, layout, err);
    if (y.l.n[EP] > 1 && y.nexpert == 0)
        return ckpt_fail(err, CKPT_USAGE,
                         "layout '%s': ep=%" PRIu32 ", but this model has no experts", layout,
                         y.l.n[EP]);
    return 0;
}

int ckpt_layout_class(const char *layout, uint32_t rank, uint32_t nrank, uint32_t *ret,
                      struct ckpt_err *err)
{
    struct layout l;

    if (parse_layout(layout, rank, nrank, &l, err) < 0)
        return -1;
    *ret = l.at[PP] * l.n[EP] + l.at[EP];
    return 0;
}
