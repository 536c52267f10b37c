/* SPDX-License-Identifier: Apache-2.0 */
/* How many bytes a job, its nodes and its ranks want. */
#ifndef CKPT_LOAD_PLAN_WEIGH_H
#define CKPT_LOAD_PLAN_WEIGH_H

#include <stdint.h>

#include "load/plan/cost.h"
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

/* Compute the numbers of ranks, nodes and bytes in *in, and `disjoint`. The caller sets the other
 * members. */
int ckpt_load_weigh(const struct ckpt_job_wants *job_wants, const struct ckpt_load_places *at,
                    struct ckpt_cost_input *in, struct ckpt_err *err);

#endif
