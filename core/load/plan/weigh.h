/* SPDX-License-Identifier: Apache-2.0 */
/* How many bytes a job, its nodes and its ranks want, and what exchanging them costs beside the
 * bytes. The groups (groups.h) partition what is wanted: unique bytes are sums over groups, and a
 * group is counted at the first of its members, once in the job and once in each node. In a load
 * each rank weighs its own groups and rank 0 adds up; `ckpt plan` weighs a job that does not exist.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "load/plan/cost.h"
#include "load/plan/plan.h"
#include "load/want/job_wants.h"

/* The bytes that a rank wants: *ret_bytes in the dtypes of the view, *ret_stored in those of the
 * stored tensors. NOMEM. */
int ckpt_load_needed(const struct ckpt_job_wants *job_wants, uint32_t rank, uint64_t *ret_bytes,
                     uint64_t *ret_stored, struct ckpt_err *err);

/* The node and the group of options.share of each rank, numbered from 0. */
struct ckpt_load_places {
    const uint32_t *node;  /* per rank, less than nnode */
    const uint32_t *share; /* per rank, less than nshare; NULL if nshare is 0 */
    uint32_t nnode;
    uint32_t nshare; /* 0 or 1: all ranks share */
};

/* These numbers are counted at one rank, in bytes unless they say otherwise. */
struct ckpt_weight {
    uint64_t needed; /* ckpt_load_needed */
    uint64_t unique,
        node_unique; /* groups of which it is the first member; the first in its node */
    uint64_t shared, node_shared; /* the same for groups within a group of options.share */
    double latency;               /* seconds of its exchanges (ONCE) beside their bytes */
};

struct ckpt_weighing {
    const struct ckpt_job_wants *job_wants;
    const struct ckpt_load_places *at;
    const struct ckpt_plan_sizes *sizes; /* of a load with ONCE */
    bool device, logarithmic;            /* as in struct ckpt_cost_input */
    struct ckpt_weight *weight;          /* per rank; the caller's, zeroed */
    struct ckpt_file_use *use; /* per source of the catalogue; the caller's, zeroed. Not filled for
                                  a rank whose class is alone. NULL: not counted */
    struct ckpt_known_lists known[2]; /* groups that were counted: of the job; that share */
};

/* Add what rank `rank` wants to its weight, and its groups that are not known yet to those of their
 * members. NOMEM, LIMIT. */
int ckpt_load_weigh(struct ckpt_weighing *w, uint32_t rank, struct ckpt_err *err);

/* Forget the groups that are known. */
void ckpt_weighing_release(struct ckpt_weighing *w);

/* Add up the weights of all ranks: numbers of ranks and nodes, bytes and latency in *in. The caller
 * sets the other members. NOMEM. */
int ckpt_load_add_weights(const struct ckpt_weight *weight, uint32_t nrank,
                          const struct ckpt_load_places *at, struct ckpt_cost_input *in,
                          struct ckpt_err *err);

/* Does no rank of this class want a byte that another rank wants, as with FSDP? True only if that
 * follows from the meshes alone. */
bool ckpt_class_is_alone(const struct ckpt_job_wants *job_wants, uint32_t class);
