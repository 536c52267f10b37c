/* SPDX-License-Identifier: Apache-2.0 */
/* What exchanges take, in simulated seconds, as NCCL's own model has it (src/graph/tuning.cc): for
 * each algorithm that the call has, a latency and a rate; the fastest is taken. */
#include "comm.h"

enum { LOGARITHMIC = 22300 }; /* version of NCCL that has the algorithm "PAT" */

static double smaller(double a, double b) { return a < b ? a : b; }

int links_nodes(int ranks)
{
    const int each = (int)gpu_number("CKPTFS_GPU_NODE", 0);

    return each ? (ranks + each - 1) / each : 1;
}

int links_node(int rank)
{
    const int each = (int)gpu_number("CKPTFS_GPU_NODE", 0);

    return each ? rank / each : 0;
}

static double ring(const struct gpu_links *k, const struct ncclComm *c, double bytes)
{
    const int across = c->nodes - 1, inside = c->size - 1 - across;
    const double rate =
        across ? smaller(k->link_bytes_s, k->net_bytes_s * c->size / c->nodes) : k->link_bytes_s;

    return k->call_s + inside * k->link_hop_s + across * k->net_hop_s + bytes / rate;
}

/* Of communicators with one rank on each node. */
static double logarithmic(const struct gpu_links *k, const struct ncclComm *c, double bytes)
{
    int hops = 0;

    while (1 << hops < c->size)
        hops++;
    return k->tree_call_s + hops * k->tree_hop_s + c->size * k->tree_member_s +
           bytes / (k->tree_share * k->net_bytes_s);
}

double links_collective(const struct ncclComm *c, enum wire_call call, uint64_t len)
{
    const struct gpu_links *k = gpu_links();
    const double bytes = (double)len * (call == CALL_ALLGATHER ? c->size - 1 : 1);

    if (!k || c->size == 1)
        return 0;
    const double t = ring(k, c, bytes);
    if (call != CALL_ALLGATHER || c->nodes != c->size ||
        gpu_number("CKPTFS_GPU_NCCL", NCCL_VERSION_CODE) < LOGARITHMIC)
        return t;
    return smaller(t, logarithmic(k, c, bytes));
}

double links_pairs(const struct ncclComm *c, uint64_t sent, uint64_t received)
{
    const struct gpu_links *k = gpu_links();
    const uint64_t most = sent > received ? sent : received;

    if (!k || !most)
        return 0;
    return k->call_s + (c->nodes > 1 ? k->net_hop_s : k->link_hop_s) +
           (double)most / (c->nodes > 1 ? k->net_bytes_s : k->link_bytes_s);
}
