/* SPDX-License-Identifier: Apache-2.0 */
/* The union of the wants of some ranks, as disjoint boxes. ckpt_plan_bytes (plan.c) sums up their
 * bytes when the job is weighed (weigh.c); what a plan reads is found by groups.h instead. */
#ifndef CKPT_LOAD_WANT_REGIONS_H
#define CKPT_LOAD_WANT_REGIONS_H

#include "base/vec.h"
#include "load/want/job_wants.h"

/* A box of a tensor that at least one of the ranks wants. */
struct ckpt_wanted_box {
    struct ckpt_box box;
    uint32_t tensor; /* in the catalogue */
};
typedef CKPT_VEC(struct ckpt_wanted_box) ckpt_wanted_boxes;

/* Append the boxes of all tensors, in the order of the catalogue. Boxes of a tensor have no byte in
 * common. LIMIT: wants of a tensor overlap in more than 2^20 cells. */
int ckpt_regions_of(const struct ckpt_job_wants *job_wants, const uint32_t *rank, uint32_t nrank,
                    ckpt_wanted_boxes *out, struct ckpt_err *err);

#endif
