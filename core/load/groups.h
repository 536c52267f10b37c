/* SPDX-License-Identifier: Apache-2.0 */
/* Groups: the ranks that want the same bytes. What one rank wants of a tensor is cut only where the
 * set of ranks that want it changes; along a mesh that is nowhere, because the ranks with the same
 * shard are a sub-grid. A rank finds the groups that it is in and no others, and every member of a
 * group finds the same ranks and the same boxes. */
#ifndef CKPT_LOAD_GROUPS_H
#define CKPT_LOAD_GROUPS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"
#include "base/vec.h"
#include "load/job_wants.h"
#include "load/members.h"
#include "tensor/box.h"

/* A box that all ranks of a group want, and nobody else does. */
struct ckpt_group_box {
    struct ckpt_box box;
    uint32_t tensor, group;
};
typedef CKPT_VEC(struct ckpt_group_box) ckpt_group_boxes;

/* The groups of rank `self`, in an order that is the same on all ranks, and their boxes by tensor.
 * LIMIT: the wanted boxes overlap in too many ways. */
int ckpt_groups_find(const struct ckpt_job_wants *job_wants, uint32_t self,
                     const struct ckpt_sharing *sharing, ckpt_groups *groups,
                     ckpt_group_boxes *boxes, struct ckpt_err *err);
void ckpt_groups_release(ckpt_groups *groups);

#endif
