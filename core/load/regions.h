/* SPDX-License-Identifier: Apache-2.0 */
/* The union of what some ranks want of each tensor, as disjoint boxes. */
#ifndef CKPT_LOAD_REGIONS_H
#define CKPT_LOAD_REGIONS_H

#include "load/plan.h"

typedef CKPT_VEC(struct ckpt_region) ckpt_regions;

/* Append the regions of all tensors, in the catalogue's order; only tensor and box are set. */
int ckpt_regions_of(const struct ckpt_roster *roster, const uint32_t *rank, uint32_t nrank,
                    ckpt_regions *out, struct ckpt_err *err);

#endif
