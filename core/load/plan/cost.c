/* SPDX-License-Identifier: Apache-2.0 */
/* The cost model: storage, network and memory work at the same time, and the slowest decides. */
#include "load/plan/cost.h"

#include "base/ckd.h"
#include "load/plan/plan.h"

#define WORTH 1.1 /* EACH wins if no other way is faster than it by this factor */

void ckpt_rates_assume(struct ckpt_rates *r, bool device)
{
    static const struct ckpt_rates host = {
        .node_storage = 2e9, .page_cache = 8e9, .copy = 8e9, .local_link = 2e9, .network = 3e9};
    /* a machine with eight devices, each with a 400 Gbit/s adapter; copy is from host to devices,
     * local_link between devices */
    static const struct ckpt_rates devices = {.node_storage = 20e9,
                                              .page_cache = 40e9,
                                              .copy = 400e9,
                                              .local_link = 300e9,
                                              .network = 400e9};
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

/* ---- latency ---- */

#define NCCL_CALL 8.4e-6     /* seconds: launch and base latency of a collective */
#define NCCL_NET_HOP 14e-6   /* one step to another node (protocol Simple) */
#define NCCL_LOG_HOP 4e-6    /* one step of the logarithmic algorithm, */
#define NCCL_LOG_RANK 2.8e-6 /* and what each rank adds to it */
#define NCCL_LINK_HOP 3.4e-6
#define HOST_CALL 20e-6
#define HOST_HOP 40e-6

static double rounds(uint64_t n)
{
    double k = 0;

    while (n > 1) {
        n = (n + 1) / 2;
        k++;
    }
    return k;
}

static double nccl_latency(bool logarithmic, uint32_t n, uint32_t nnode)
{
    const uint32_t local = n / nnode;

    if (nnode == 1)
        return NCCL_CALL + (n - 1) * NCCL_LINK_HOP;
    double rail = (nnode - 1) * NCCL_NET_HOP;
    const double other = rounds(nnode) * NCCL_LOG_HOP + nnode * NCCL_LOG_RANK;
    if (logarithmic && other < rail)
        rail = other;
    if (local * nnode != n) /* a ring, unless members could be paired */
        return NCCL_CALL + (n - 1) * NCCL_NET_HOP;
    return NCCL_CALL + rail + (local > 1 ? NCCL_CALL + (local - 1) * NCCL_LINK_HOP : 0);
}

double ckpt_cost_latency(bool device, bool logarithmic, uint32_t n, uint32_t nnode, uint64_t bytes,
                         const struct ckpt_plan_sizes *sizes)
{
    if (n == 1 || bytes == 0)
        return 0;
    const uint64_t span = (bytes + n - 1) / n;
    const uint64_t slice =
        ckpt_max_u64(CKPT_UNIT_ALIGN, ckpt_min_u64(sizes->slice, sizes->window / n));
    const uint64_t windows = (span + slice - 1) / slice;
    return (double)windows *
           (device ? nccl_latency(logarithmic, n, nnode) : HOST_CALL + 2 * rounds(n) * HOST_HOP);
}

/* 1,024 ranks take 3 to 15 s by public reports. */
double ckpt_cost_setup(uint32_t nrank) { return nrank > 1 ? 0.3 + 5e-3 * nrank : 0; }

/* ---- bytes ---- */

static double larger(double a, double b) { return a > b ? a : b; }

/* Seconds to read from storage what is not cached, if a node reads `node` bytes and all nodes read
 * `all` bytes. */
static double storage(const struct ckpt_cost_input *in, const struct ckpt_rates *r, double node,
                      double all)
{
    const double cold = 1 - in->cached;
    double t = cold * node / r->node_storage;

    if (in->shared && r->shared_storage > 0)
        t = larger(t, cold * all / r->shared_storage);
    return t;
}

/* Seconds that a node's memory is busy: `read` bytes are copied out of the page cache, `placed`
 * bytes into destinations, and its ranks exchange bytes for `local` seconds. On a device these
 * overlap. */
static double memory(const struct ckpt_cost_input *in, const struct ckpt_rates *r, double read,
                     double placed, double local)
{
    if (in->device)
        return larger(local, larger(read / r->page_cache, read / r->copy));
    return read / r->page_cache + placed / r->copy + local;
}

/* How much a exceeds b. */
static double excess(double a, double b) { return a > b ? a - b : 0; }

void ckpt_cost_estimate(const struct ckpt_cost_input *in, const struct ckpt_rates *r,
                        struct ckpt_cost *ret)
{
    const double per_node = (double)in->nrank / in->nnode;
    const double needed = (double)in->node_needed, unique = (double)in->node_unique;
    /* bytes that are read once because ranks share: in the job (ONCE), and in a node (NODE) */
    const double all = (double)(in->shared_unique ? in->shared_unique : in->unique);
    const double shared = in->node_shared_unique ? (double)in->node_shared_unique : unique;
    const double own = all / in->nnode; /* bytes that a node reads with ONCE */
    /* A byte is sent only to ranks that want it, and enters each node once; every further rank of
     * the node that wants it receives it over the node's links. */
    const double local = excess(needed, shared) / (r->local_link * per_node);
    const double entering = excess(shared, own);

    /* EACH: a byte that several ranks of a node read comes from storage once, by the page cache */
    ret->each = larger(storage(in, r, unique, (double)in->sum_node_unique),
                       memory(in, r, needed, needed, 0));

    /* NODE */
    ret->node = larger(storage(in, r, unique, (double)in->sum_node_unique),
                       memory(in, r, shared, needed, local));

    /* ONCE: bytes from the network are copied once more, at the rate of the page cache; on a device
     * rails and nodes exchange one after the other */
    ret->once = larger(
        storage(in, r, own < unique ? own : unique,
                all < (double)in->sum_node_unique ? all : (double)in->sum_node_unique),
        in->latency + (in->device
                           ? larger(entering / r->network + local, memory(in, r, own, needed, 0))
                           : larger(entering / r->network,
                                    memory(in, r, own, needed, local) + entering / r->page_cache)));
    if (in->nnode == 1) /* the same */
        ret->node = ret->once;
}

enum ckpt_readers ckpt_cost_choose(const struct ckpt_cost *c, double setup)
{
    if (c->each <= c->node * WORTH + setup && c->each <= c->once * WORTH + setup)
        return CKPT_READERS_EACH;
    return c->once <= c->node ? CKPT_READERS_ONCE : CKPT_READERS_NODE;
}
