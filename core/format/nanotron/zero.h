/* SPDX-License-Identifier: Apache-2.0 */
/* nanotron's ZeRO-1: each data-parallel rank keeps the optimizer's states of one interval of every
 * parameter, which is the parameter's part on a tensor-parallel rank, flattened in row-major order.
 * The intervals follow each other in the order of the ranks and cover the parameter
 * (nanotron/optim/zero.py). */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "base/json.h"
#include "format/nanotron/slices.h"

/* Elements [lo, hi). */
struct ckpt_nt_interval {
    uint64_t lo, hi;
};

/* The interval of one rank when numel elements are divided evenly; the first ranks get one more. */
struct ckpt_nt_interval ckpt_nt_zero_share(uint64_t numel, uint32_t rank, uint32_t size);

/* As ckpt_nt_zero_share, but from `offsets` if it lists the parameter: the object
 * param_name_to_dp_rank_offsets in optimizer_config.json, {PARAM: {"0": ["0", "118"], ...}}, which
 * the first pipeline stage writes for its own parameters. NULL: not available. CONFLICT: the rank
 * is not listed. FORMAT: the entry is not an interval of the parameter. */
int ckpt_nt_zero_interval(const json_t *offsets, const char *param, uint64_t numel, uint32_t rank,
                          uint32_t size, struct ckpt_nt_interval *ret, struct ckpt_err *err);

/* Intersect an interval of a file's flattened elements with one of its slice pairs. Returns the
 * number of resulting pairs (0: nothing). local_dim is the file's shape. */
size_t ckpt_nt_pair_clip(const struct ckpt_nt_pair *pair, const uint64_t *local_dim,
                         const struct ckpt_nt_interval *in,
                         struct ckpt_nt_pair out[CKPT_MAX_SPANS]);
