/* SPDX-License-Identifier: Apache-2.0 */
/* Boxes: half-open index ranges, one per dimension; and mixed-radix axes, which turn an interval of
 * a flattened index into few boxes. Everything that reads or maps a tensor is built of these. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"

#define CKPT_MAX_RANK 12 /* dimensions of a tensor */
#define CKPT_MAX_AXES 24 /* factors that a mapping may split them into */

/* lo[d] <= index < lo[d] + n[d]. */
struct ckpt_box {
    uint32_t rank;
    uint64_t lo[CKPT_MAX_RANK];
    uint64_t n[CKPT_MAX_RANK];
};

/* Product of the dimensions (1 for rank 0). False on overflow of 64 bits. */
bool ckpt_shape_numel(const uint64_t *dim, uint32_t rank, uint64_t *ret);

/* stride[d]: distance in elements of neighbours along d in row-major order. */
void ckpt_shape_strides(const uint64_t *dim, uint32_t rank, uint64_t *stride);

struct ckpt_shape_text {
    char text[24 * CKPT_MAX_RANK];
};
/* "[64, 32]", for use in the same expression: ckpt_shape_text(dim, rank).text */
struct ckpt_shape_text ckpt_shape_text(const uint64_t *dim, uint32_t rank);

/* All of a tensor of that shape. */
struct ckpt_box ckpt_box_whole(const uint64_t *dim, uint32_t rank);

/* The number of elements, which must fit 64 bits. */
uint64_t ckpt_box_numel(const struct ckpt_box *b);
bool ckpt_box_eq(const struct ckpt_box *a, const struct ckpt_box *b);
/* Is the box inside the shape? */
bool ckpt_box_within(const struct ckpt_box *b, const uint64_t *dim, uint32_t rank);

/* The first and one past the last element of a box, which is not empty, of a tensor of that shape,
 * row-major. */
void ckpt_box_range(const struct ckpt_box *b, const uint64_t *dim, uint64_t *ret_lo,
                    uint64_t *ret_hi);

/* stride[d]: distance in bytes of neighbours along d where the box lies in memory without holes. */
void ckpt_box_strides(const struct ckpt_box *b, size_t esize, uint64_t *stride);

/* False if they share no element (out is undefined). */
bool ckpt_box_intersect(const struct ckpt_box *a, const struct ckpt_box *b, struct ckpt_box *out);

/* Do the boxes cover every element of the shape exactly once? Boxes must lie within it. 0, or -1
 * with CONFLICT for an overlap or MISSING for a gap, naming a region in words ("rows 16..32 of 64
 * are missing"). *ret_bad is the index of a box that overlaps an earlier one, or SIZE_MAX for a
 * gap. Near n log n for the tilings that frameworks make. */
int ckpt_boxes_cover(const uint64_t *dim, uint32_t rank, const struct ckpt_box *box, size_t nbox,
                     size_t *ret_bad, struct ckpt_err *err);

/* A box in a space of k axes: first index and count along each. */
struct ckpt_span {
    uint64_t lo[CKPT_MAX_AXES];
    uint64_t n[CKPT_MAX_AXES];
};
#define CKPT_MAX_SPANS (2 * CKPT_MAX_AXES - 1)

/* The index tuples i (0 <= i[j] < n[j]) whose sum of i[j]*stride[j] lies in [lo, hi), as at most
 * 2k-1 disjoint spans in ascending order of that sum. Axes are slowest first and nest: stride[j] >=
 * n[j+1]*stride[j+1], stride > 0 (gaps are allowed). k may be 0: one tuple, with sum 0. Returns the
 * number of spans; 0 if none. */
size_t ckpt_axes_clip(const uint64_t *n, const uint64_t *stride, uint32_t k, uint64_t lo,
                      uint64_t hi, struct ckpt_span out[CKPT_MAX_SPANS]);
