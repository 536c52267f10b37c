/* SPDX-License-Identifier: Apache-2.0 */
/* The time model: every resource works at once, the slowest decides. */
#include "load/cost.h"

void ckpt_rates_assume(struct ckpt_rates *r)
{
    static const struct ckpt_rates assumed = {
        .node_storage = 2e9, .page_cache = 8e9, .copy = 8e9, .local_link = 2e9, .network = 3e9};

    if (r->node_storage <= 0)
        r->node_storage = assumed.node_storage;
    if (r->page_cache <= 0)
        r->page_cache = assumed.page_cache;
    if (r->copy <= 0)
        r->copy = assumed.copy;
    if (r->local_link <= 0)
        r->local_link = assumed.local_link;
    if (r->network <= 0)
        r->network = assumed.network;
}

static double larger(double a, double b) { return a > b ? a : b; }

/* Storage that each node reads `node` bytes of, all together `all`. */
static double storage(const struct ckpt_cost_input *in, const struct ckpt_rates *r, double node,
                      double all)
{
    const double cold = 1 - in->hot;
    double t = cold * node / r->node_storage;

    if (in->shared && r->shared_storage > 0)
        t = larger(t, cold * all / r->shared_storage);
    return t;
}

void ckpt_cost_estimate(const struct ckpt_cost_input *in, const struct ckpt_rates *r,
                        struct ckpt_cost *ret)
{
    const double per_node = (double)in->nrank / in->nnode;
    const double place = (double)in->node_needed / r->copy;
    const double own = (double)in->unique / in->nnode; /* what a node reads if all share */
    const double other = (double)in->node_needed * (1 - 1.0 / in->nnode);
    double local;

    /* every rank: the page cache of a node reads what it lacks once */
    ret->each = larger(storage(in, r, (double)in->node_unique, (double)in->sum_node_unique),
                       (double)in->node_needed / r->page_cache + place);

    /* one rank of a node: the rest goes over the links within the node */
    local =
        ((double)in->node_needed - (double)in->node_needed / per_node) / (r->local_link * per_node);
    ret->node = larger(storage(in, r, (double)in->node_unique, (double)in->sum_node_unique),
                       (double)in->node_unique / r->page_cache + place + local);

    /* one rank of the job: what a node did not read itself comes over the network, and is copied
     * once more, as what comes out of the page cache is */
    local = ((double)in->node_needed / in->nnode) * (1 - 1 / per_node) / (r->local_link * per_node);
    ret->once = larger(storage(in, r, own, (double)in->unique),
                       larger(other / r->network, (own + other) / r->page_cache + place + local));
}

enum ckpt_readers ckpt_cost_choose(const struct ckpt_cost *c)
{
    const double better = 0.9; /* a model, and rates of a moment: less than this decides nothing */

    if (c->once < better * c->each && c->once <= c->node)
        return CKPT_READERS_ONCE;
    return c->node < better * c->each ? CKPT_READERS_NODE : CKPT_READERS_EACH;
}
