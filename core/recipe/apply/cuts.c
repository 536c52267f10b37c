/* SPDX-License-Identifier: Apache-2.0 */
/* Cuts from shares. */
#include "recipe/apply/cuts.h"

#include <stdlib.h>
#include <string.h>

#include "recipe/apply/shares.h"

static uint8_t way_of(const struct ckpt_share *s)
{
    if (s->way == CKPT_TP)
        return s->of_experts ? CKPT_CUT_OVER_ETP : CKPT_CUT_OVER_TP;
    return s->way == CKPT_EP ? CKPT_CUT_OVER_EP : CKPT_CUT_NOT;
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
                                   .way = way_of(s),
                                   .shared = s->shared};
        if (!cut[i].what)
            return ckpt_nomem(err);
    }
    return 0;
}

int ckpt_cuts_of(struct ckpt_instance *in, const struct ckpt_tensor *t, uint32_t stage,
                 struct ckpt_arena *arena, const struct ckpt_cuts **ret, struct ckpt_err *err)
{
    struct ckpt_cuts *cuts = ckpt_arena_alloc(arena, sizeof *cuts);
    ckpt_cleanup(ckpt_freep) struct ckpt_shares *shares = calloc(t->rank + 1, sizeof *shares);
    struct ckpt_cut *cut;
    uint32_t n = 0;

    if (!cuts || !shares)
        return ckpt_nomem(err);
    for (uint32_t d = 0; d < t->rank; d++) {
        const struct ckpt_factor *f = ckpt_instance_factor(in, d, t->rank);
        if (!f || !ckpt_factor_is_marked(f))
            continue;
        if (ckpt_shares_of(f, t->dim[d], &in->sizes, in->target, &shares[d], err) < 0)
            return -1;
        n += (uint32_t)shares[d].n;
    }
    if (!(cut = ckpt_arena_alloc(arena, (n + 1) * sizeof *cut)))
        return ckpt_nomem(err);
    *cuts = (struct ckpt_cuts){.stage = stage, .n = n, .cut = cut};
    for (uint32_t d = 0; d < t->rank; cut += shares[d++].n)
        if (add_dim(&shares[d], (uint8_t)d, cut, arena, err) < 0)
            return -1;
    *ret = cuts;
    return 0;
}
