/* SPDX-License-Identifier: Apache-2.0 */
/* Parts of cuts. */
#include "format/cut_parts.h"

#include <inttypes.h>
#include <stdlib.h>

uint32_t ckpt_cut_dim(const struct ckpt_tensor *t, enum ckpt_cut_way way)
{
    for (uint32_t i = 0; t->cuts && i < t->cuts->n; i++)
        if (t->cuts->cut[i].way == way)
            return t->cuts->cut[i].dim;
    return t->rank;
}

struct ckpt_interval ckpt_cut_part(const struct ckpt_cut *c, uint32_t rank, uint32_t ranks)
{
    const uint64_t parts = c->shared && c->groups && c->groups < ranks ? c->groups : ranks;
    const uint64_t n = c->n / parts;

    return c->way == CKPT_CUT_NOT ? (struct ckpt_interval){c->lo, c->n}
                                  : (struct ckpt_interval){c->lo + rank * parts / ranks * n, n};
}

int ckpt_cut_check(const struct ckpt_tensor *t, enum ckpt_cut_way way, uint32_t ranks,
                   const char *key, struct ckpt_err *err)
{
    const uint32_t dim = ckpt_cut_dim(t, way);

    for (uint32_t i = 0; t->cuts && i < t->cuts->n; i++) {
        const struct ckpt_cut *c = &t->cuts->cut[i];
        if (c->way != way)
            continue;
        if (c->dim != dim)
            return ckpt_fail(err, CKPT_UNSUPPORTED, "'%s' is divided in two dimensions by %s",
                             t->name, key);
        const bool shared = c->shared && c->groups && c->groups < ranks;
        if (shared ? ranks % c->groups : (c->groups ? c->groups : c->n) % ranks)
            return ckpt_fail(err, CKPT_USAGE,
                             "option %s: dimension %u of '%s' has %" PRIu64
                             "%s%s, which cannot be divided among %" PRIu32 " ranks",
                             key, c->dim, t->name, c->groups ? c->groups : c->n,
                             c->groups ? " of " : " elements", c->groups ? c->what : "", ranks);
    }
    return 0;
}

int ckpt_cut_tensor(struct ckpt_catalog *cat, const struct ckpt_tensor *t, enum ckpt_cut_way way,
                    uint32_t rank, uint32_t ranks, struct ckpt_tensor *ret, struct ckpt_err *err)
{
    const uint32_t dim = ckpt_cut_dim(t, way);
    ckpt_cleanup(ckpt_freep) struct ckpt_interval *part = NULL;
    size_t n = 0;

    *ret = *t;
    if (dim == t->rank || ranks == 1)
        return 0;
    if (!(part = calloc(t->cuts->n, sizeof *part)))
        return ckpt_nomem(err);
    for (uint32_t i = 0; i < t->cuts->n; i++)
        if (t->cuts->cut[i].dim == dim)
            part[n++] = ckpt_cut_part(&t->cuts->cut[i], rank, ranks);
    return ckpt_tensor_slice(cat, t, dim, part, n, ret, err);
}
