/* SPDX-License-Identifier: Apache-2.0 */
/* The time model: every resource works at once, the slowest decides. */
#include "load/cost.h"

#define WORTH 1.1

void ckpt_rates_assume(struct ckpt_rates *r, bool device)
{
    static const struct ckpt_rates host = {
        .node_storage = 2e9, .page_cache = 8e9, .copy = 8e9, .local_link = 2e9, .network = 3e9};
    /* of a machine with eight of them; copy is to the devices, local_link between them */
    static const struct ckpt_rates devices = {.node_storage = 10e9,
                                              .page_cache = 40e9,
                                              .copy = 200e9,
                                              .local_link = 200e9,
                                              .network = 25e9};
    const struct ckpt_rates *assumed = device ? &devices : &host;

    if (r->node_storage <= 0)
        r->node_storage = assumed->node_storage;
    if (r->page_cache <= 0)
        r->page_cache = assumed->page_cache;
    if (r->copy <= 0)
        r->copy = assumed->copy;
    if (r->local_link <= 0)
        r->local_link = assumed->local_link;
    if (r->network <= 0)
        r->network = assumed->network;
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

/* What a node's memory does: `read` bytes come out of the page cache, `placed` go to destinations,
 * `local` seconds between its ranks. */
static double memory(const struct ckpt_cost_input *in, const struct ckpt_rates *r, double read,
                     double placed, double local)
{
    if (in->device)
        return larger(local, larger(read / r->page_cache, read / r->copy));
    return read / r->page_cache + placed / r->copy + local;
}

static double more(double a, double b) { return a > b ? a - b : 0; }

void ckpt_cost_estimate(const struct ckpt_cost_input *in, const struct ckpt_rates *r,
                        struct ckpt_cost *ret)
{
    const double per_node = (double)in->nrank / in->nnode;
    const double needed = (double)in->node_needed, unique = (double)in->node_unique;
    /* what is read once by ranks that share: of the job, and of a node */
    const double all = (double)(in->shared_unique ? in->shared_unique : in->unique);
    const double shared = in->node_shared_unique ? (double)in->node_shared_unique : unique;
    const double own = all / in->nnode; /* what a node reads if all share */
    /* A byte goes only to ranks that want it, and enters a node once: within the node each other
     * rank that wants it gets it over the node's links. */
    const double local = more(needed, shared) / (r->local_link * per_node);
    const double entering = more(shared, own);

    /* every rank: the page cache of a node reads what it lacks once */
    ret->each = larger(storage(in, r, unique, (double)in->sum_node_unique),
                       memory(in, r, needed, needed, 0));

    /* one rank of a node */
    ret->node = larger(storage(in, r, unique, (double)in->sum_node_unique),
                       memory(in, r, shared, needed, local));

    /* one rank of the job: what comes over the network is copied once more, as what comes out of
     * the page cache is */
    ret->once =
        larger(storage(in, r, own < unique ? own : unique,
                       all < (double)in->sum_node_unique ? all : (double)in->sum_node_unique),
               larger(entering / r->network, memory(in, r, own, needed, local) +
                                                 (in->device ? 0 : entering / r->page_cache)));
}

enum ckpt_readers ckpt_cost_choose(const struct ckpt_cost *c)
{
    if (c->each <= c->node * WORTH && c->each <= c->once * WORTH)
        return CKPT_READERS_EACH;
    return c->once <= c->node ? CKPT_READERS_ONCE : CKPT_READERS_NODE;
}
