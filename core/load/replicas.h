/* SPDX-License-Identifier: Apache-2.0 */
/* Replica groups: the ranks that want exactly the same bytes. Along a mesh they are the ranks that
 * have the same coordinates in all dimensions that divide a tensor, whatever the others; with FSDP
 * every rank is its own group. What a job reads, sends and receives is summed up by group, so that
 * its size counts by how many different things are wanted, not by how many ranks there are. */
#ifndef CKPT_LOAD_REPLICAS_H
#define CKPT_LOAD_REPLICAS_H

#include <stdint.h>

#include "load/job_wants.h"

struct ckpt_replicas {
    uint32_t n;      /* groups, in the order of their first ranks */
    uint32_t *of;    /* the group of each rank */
    uint32_t *rank;  /* the first rank of each group, ascending */
    uint32_t *count; /* ranks of each group */
};

int ckpt_replicas_init(struct ckpt_replicas *r, const struct ckpt_job_wants *job_wants,
                       struct ckpt_err *err);
void ckpt_replicas_release(struct ckpt_replicas *r);

#endif
