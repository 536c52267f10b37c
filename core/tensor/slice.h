/* SPDX-License-Identifier: Apache-2.0 */
/* Some indices of one dimension of a tensor, as a tensor: what one rank of a job has of it. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "tensor/catalog.h"

struct ckpt_interval {
    uint64_t lo, n;
};

/* Make *ret the elements of t whose index in dimension `dim` lies in one of the intervals, which
 * are inside the dimension, one interval after the other. Each piece of t becomes as few pieces, so
 * that a slice is read in no more calls than the tensor. Memory is cat's, which has t's sources.
 * UNSUPPORTED: t is computed, but not element by element. */
int ckpt_tensor_slice(struct ckpt_catalog *cat, const struct ckpt_tensor *t, uint32_t dim,
                      const struct ckpt_interval *part, size_t npart, struct ckpt_tensor *ret,
                      struct ckpt_err *err);
