/* SPDX-License-Identifier: Apache-2.0 */
/* What one rank has of a tensor that is divided over tensor-parallel or expert-parallel ranks
 * (tensor/cut.h). */
#pragma once

#include "tensor/cut.h"
#include "tensor/slice.h"

/* The dimension that is divided this way; the tensor's rank if none is. */
uint32_t ckpt_cut_dim(const struct ckpt_tensor *t, enum ckpt_cut_way way);

/* The part of one of the cuts that rank `rank` of `ranks` has. */
struct ckpt_interval ckpt_cut_part(const struct ckpt_cut *c, uint32_t rank, uint32_t ranks);

/* Can the tensor be divided so? `key` is the option that says it. USAGE: it does not divide, or is
 * divided in two dimensions. */
int ckpt_cut_check(const struct ckpt_tensor *t, enum ckpt_cut_way way, uint32_t ranks,
                   const char *key, struct ckpt_err *err);

/* Make *ret what the rank has; t itself if it is not divided. Memory is cat's. */
int ckpt_cut_tensor(struct ckpt_catalog *cat, const struct ckpt_tensor *t, enum ckpt_cut_way way,
                    uint32_t rank, uint32_t ranks, struct ckpt_tensor *ret, struct ckpt_err *err);
