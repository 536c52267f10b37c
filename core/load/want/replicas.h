/* SPDX-License-Identifier: Apache-2.0 */
/* Replica groups: sets of ranks that want exactly the same bytes of all tensors. On a mesh, the
 * ranks with the same coordinates in all dimensions that divide a tensor are a group; with FSDP,
 * every rank is a group of its own. weigh.c and model.c sum up the bytes of a job by group, so that
 * the cost depends on the number of different wants, not on the number of ranks. (The groups of
 * groups.h are found for each box of a tensor; a rank may be in many of them.) */
#pragma once

#include <stdint.h>

#include "load/want/job_wants.h"

struct ckpt_replicas {
    uint32_t n;      /* number of groups; they are ordered by their first ranks */
    uint32_t *of;    /* per rank: its group */
    uint32_t *rank;  /* per group: its first rank */
    uint32_t *count; /* per group: number of ranks */
};

/* Find the replica groups of a job. NOMEM. */
int ckpt_replicas_init(struct ckpt_replicas *r, const struct ckpt_job_wants *job_wants,
                       struct ckpt_err *err);

/* Free what r owns, not r itself. */
void ckpt_replicas_release(struct ckpt_replicas *r);
