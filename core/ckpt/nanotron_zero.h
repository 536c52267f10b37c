/* SPDX-License-Identifier: Apache-2.0 */
/* nanotron's ZeRO-1: of every parameter, as a tensor-parallel rank has it and flattened in
 * row-major order, each data-parallel rank keeps the optimizer's states of one interval. They
 * follow each other in the order of the ranks and cover it (nanotron/optim/zero.py). */
#ifndef CKPT_CKPT_NANOTRON_ZERO_H
#define CKPT_CKPT_NANOTRON_ZERO_H

#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "base/json.h"
#include "ckpt/nanotron_slices.h"

/* Elements [lo, hi). */
struct ckpt_nt_interval {
    uint64_t lo, hi;
};

/* Rank `rank` of `size`: all have as many of the numel elements, or the first ones have one more.
 */
struct ckpt_nt_interval ckpt_nt_zero_share(uint64_t numel, uint32_t rank, uint32_t size);

/* The same as `offsets` says it, where it knows the parameter: optimizer_config.json's
 * param_name_to_dp_rank_offsets, {PARAM: {"0": ["0", "118"], ...}}, which the first pipeline stage
 * writes of its own parameters. NULL: it says nothing. CONFLICT: it says that the rank has nothing;
 * FORMAT: what it says is no interval of the parameter. */
int ckpt_nt_zero_interval(const json_t *offsets, const char *param, uint64_t numel, uint32_t rank,
                          uint32_t size, struct ckpt_nt_interval *ret, struct ckpt_err *err);

/* What an interval of a file's flattened elements has of one of its slice pairs, as pairs; returns
 * how many (0: nothing). local_dim is the file's shape. */
size_t ckpt_nt_pair_clip(const struct ckpt_nt_pair *pair, const uint64_t *local_dim,
                         const struct ckpt_nt_interval *in,
                         struct ckpt_nt_pair out[CKPT_MAX_SPANS]);

#endif
