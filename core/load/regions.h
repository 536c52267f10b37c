/* SPDX-License-Identifier: Apache-2.0 */
/* The union of what some ranks want of each tensor, as disjoint boxes. */
#ifndef CKPT_LOAD_REGIONS_H
#define CKPT_LOAD_REGIONS_H

#include "base/vec.h"
#include "load/job_wants.h"

struct ckpt_wanted_box {
    struct ckpt_box box;
    uint32_t tensor;
};
typedef CKPT_VEC(struct ckpt_wanted_box) ckpt_wanted_boxes;

/* Append the boxes of all tensors, in the catalogue's order. */
int ckpt_regions_of(const struct ckpt_job_wants *job_wants, const uint32_t *rank, uint32_t nrank,
                    ckpt_wanted_boxes *out, struct ckpt_err *err);

#endif
