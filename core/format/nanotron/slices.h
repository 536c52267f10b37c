/* SPDX-License-Identifier: Apache-2.0 */
/* The metadata of a sharded nanotron file: which slices of the file's tensor correspond to which
 * slices of the whole parameter.
 *
 *     local_global_slices_pairs   "0,16,None|None,None,None#16,32,None|None,None,None;..." pairs of
 * local # global slices unsharded_shape             "(64, 32)", "(64,)", and with NumPy 2
 * "(np.int64(64), 32)"
 *
 * Written by nanotron/serialize/metadata.py; a slice is start,stop,step with Python's None for the
 * whole. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "base/json.h"
#include "tensor/box.h"

/* A parameter has at most this many chunks (qkv has three). */
enum { CKPT_NT_MAX_PAIRS = 4096 };

struct ckpt_nt_pair {
    struct ckpt_box local, global;
};

/* Parse a tuple of sizes. */
int ckpt_nt_shape_parse(const char *text, uint64_t *ret_dim, uint32_t *ret_rank,
                        struct ckpt_err *err);

/* Parse the pairs for a file of shape local_dim and a parameter of shape dim, both of this rank.
 * The two slices of a pair must have equal extents and be inside their shapes. *ret_pairs is
 * malloc'ed. */
int ckpt_nt_pairs_parse(const char *text, const uint64_t *local_dim, const uint64_t *dim,
                        uint32_t rank, struct ckpt_nt_pair **ret_pairs, size_t *ret_n,
                        struct ckpt_err *err);

/* Is version `text` ("1.4") newer than 1.5, the newest known version? FORMAT: it is not integers
 * separated by dots. */
int ckpt_nt_version_check(const char *text, struct ckpt_err *err);

/* ---- ZeRO-1 ----
 *
 * Each data-parallel rank keeps the optimizer's states of one interval of every parameter, which is
 * the parameter's part on a tensor-parallel rank, flattened in row-major order. The intervals
 * follow each other in the order of the ranks and cover the parameter (nanotron/optim/zero.py). */

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
