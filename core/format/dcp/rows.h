/* SPDX-License-Identifier: Apache-2.0 */
/* Tensors cut along their first dimension, as torch's Shard(0) deals the rows out to ranks. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "tensor/box.h"
#include "tensor/catalog.h"

/* What one rank has of a tensor. */
struct ckpt_rows {
    const struct ckpt_tensor *tensor;
    uint64_t lo, n;     /* rows lo..lo+n; a scalar is one row */
    uint64_t from, len; /* its bytes in the tensor */
};

/* Rank `rank` of `ranks` has ceil(rows / ranks) rows, or what is left of them. False if it has
 * nothing that an earlier rank does not have: scalars belong to rank 0, and of several ranks that
 * have no rows the first states that. */
bool ckpt_rows_of(const struct ckpt_tensor *t, uint32_t rank, uint32_t ranks,
                  struct ckpt_rows *ret);

/* The shape of the part, and its offset in each dimension. */
void ckpt_rows_dim(const struct ckpt_rows *r, uint64_t dim[CKPT_MAX_RANK],
                   uint64_t off[CKPT_MAX_RANK]);

/* Is the part the whole tensor? */
bool ckpt_rows_whole(const struct ckpt_rows *r);

/* How many parts all ranks have together, at most. LIMIT if that is more than a view may have. */
int ckpt_rows_count(const struct ckpt_catalog *cat, uint32_t ranks, size_t *ret,
                    struct ckpt_err *err);
