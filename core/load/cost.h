/* SPDX-License-Identifier: Apache-2.0 */
/* How long reading would take in each of the three ways, from rates: a model, not a measurement. */
#ifndef CKPT_LOAD_COST_H
#define CKPT_LOAD_COST_H

#include <stdbool.h>
#include <stdint.h>

#include <ckptfs/load.h>

/* Bytes of a job. */
struct ckpt_cost_input {
    uint32_t nrank, nnode;
    uint64_t unique;      /* wanted by anybody, once */
    uint64_t needed;      /* by every rank, added up */
    uint64_t node_needed; /* by the ranks of the node that needs most */
    uint64_t node_unique; /* the same, once per node; of the node that needs most */
    uint64_t sum_node_unique;
    double hot;    /* part of the files that is in the page caches, 0 to 1 */
    bool shared;   /* all nodes read one storage */
    bool device;   /* into memory of devices: reading, uploading and exchanging overlap */
    bool disjoint; /* ranks that do not want exactly the same have no byte in common */
    /* where only ranks of the caller's groups share; 0: all do */
    uint64_t shared_unique;      /* as unique, but once per group */
    uint64_t node_shared_unique; /* as node_unique, but once per group */
};

struct ckpt_cost {
    double each, node, once; /* seconds */
};

/* Fill in what is not given. */
void ckpt_rates_assume(struct ckpt_rates *r, bool device);

void ckpt_cost_estimate(const struct ckpt_cost_input *in, const struct ckpt_rates *rates,
                        struct ckpt_cost *ret);

/* The fastest; what gains less than a tenth over every rank for itself is not worth its trouble. */
enum ckpt_readers ckpt_cost_choose(const struct ckpt_cost *cost);

#endif
