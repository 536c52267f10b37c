/* SPDX-License-Identifier: Apache-2.0 */
/* The cost model: estimates, from bytes and rates alone, how long a load would take in each of the
 * three ways to read (enum ckpt_readers). Nothing is measured. policy.c calls it after the ranks
 * have agreed on what all of them want, and for `ckpt plan`. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include <ckptfs/load.h>

/* The size of a job. "Unique" bytes are bytes in storage, counted once; "needed" bytes are bytes of
 * wants in the dtypes of the view, added up over ranks. weigh.c computes them. */
struct ckpt_cost_input {
    uint32_t nrank, nnode;
    uint64_t unique;          /* of the whole job */
    uint64_t needed;          /* of the whole job */
    uint64_t node_needed;     /* of the node that needs most */
    uint64_t node_unique;     /* of the node that wants most */
    uint64_t sum_node_unique; /* the unique bytes of each node, added up over all nodes */
    double cached;            /* fraction of the files that is in the page cache, 0 to 1 */
    bool shared;              /* all nodes read from one shared storage */
    bool device;    /* destinations are in device memory: reads, uploads and exchanges overlap */
    double latency; /* seconds of the exchanges with ONCE beside their bytes: of the rank that has
                       most (ckpt_cost_latency) */
    double setup;   /* seconds to make the communicators of a device, if they are not made yet */
    /* Only if options.share divides the ranks into several groups, else 0: */
    uint64_t shared_unique;      /* the unique bytes of each group, added up over all groups */
    uint64_t node_shared_unique; /* the same for the groups of one node: the mean of all nodes, and
                                    at least node_unique */
};

/* Seconds that the windows of a group of n ranks on nnode nodes take beside their bytes. Devices:
 * what NCCL's tuning tables say of a call, of a hop of a ring and of one of the logarithmic
 * algorithm, which it has (`logarithmic`) for communicators with one rank a node; two steps, rails
 * and then nodes, where nodes have several members. Hosts: trees. */
struct ckpt_plan_sizes;
double ckpt_cost_latency(bool device, bool logarithmic, uint32_t n, uint32_t nnode, uint64_t bytes,
                         const struct ckpt_plan_sizes *sizes);

/* Seconds to make the communicators of a job on devices. */
double ckpt_cost_setup(uint32_t nrank);

/* The estimated duration of a load with each of CKPT_READERS_EACH, _NODE and _ONCE, in seconds. */
struct ckpt_cost {
    double each, node, once;
};

/* Replace each rate that is 0 by the library's assumption for hosts, or for machines with eight
 * devices. shared_storage has none and stays 0, which means that it is no limit. */
void ckpt_rates_assume(struct ckpt_rates *r, bool device);

/* Estimate all three ways. The rates must have been completed by ckpt_rates_assume. */
void ckpt_cost_estimate(const struct ckpt_cost_input *in, const struct ckpt_rates *rates,
                        struct ckpt_cost *ret);

/* The fastest way; but EACH, which exchanges nothing, if it is at most a tenth slower than both
 * others and `setup` (ckpt_cost_input). Never AUTO. */
enum ckpt_readers ckpt_cost_choose(const struct ckpt_cost *cost, double setup);
