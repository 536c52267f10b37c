/* SPDX-License-Identifier: Apache-2.0 */
/* Finds the groups of ranks that want the same bytes: the first stage of a plan (plan.c).
 *
 * The boxes that a rank wants of a tensor are cut only where the set of ranks that want the bytes
 * changes. Along a mesh there are no such cuts, because the ranks with the same shard are a
 * sub-grid of the mesh. A rank finds only the groups of which it is a member. All members of a
 * group find the same ranks and the same boxes, without exchanging anything. */
#pragma once

#include <stdint.h>

#include "base/err.h"
#include "base/vec.h"
#include "load/want/job_wants.h"
#include "load/want/rank_lists.h"
#include "tensor/box.h"

/* A box of a tensor that all ranks of a group want, and no other rank that shares with them; or all
 * of a tensor that is decoded (tensor/read.h), of which they want something. */
struct ckpt_group_box {
    struct ckpt_box box;
    uint32_t tensor; /* in the catalogue */
    uint32_t group;  /* index in the list of groups */
};
typedef CKPT_VEC(struct ckpt_group_box) ckpt_group_boxes;

/* Append the groups of rank `self`, ordered by number of members and then by their ranks, and the
 * boxes of these groups, ordered by tensor. The relative order of two groups is the same on all
 * ranks that are in both. The caller releases both lists, also after a failure. LIMIT: the boxes of
 * a tensor overlap in more than 2^20 cells. */
int ckpt_groups_find(const struct ckpt_job_wants *job_wants, uint32_t self,
                     const struct ckpt_sharing *sharing, ckpt_groups *groups,
                     ckpt_group_boxes *boxes, struct ckpt_err *err);

/* Free a list of groups and their ranks. */
void ckpt_groups_release(ckpt_groups *groups);
