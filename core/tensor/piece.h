/* SPDX-License-Identifier: Apache-2.0 */
/* A piece says where in a source certain elements of a tensor are stored.
 *
 *     tensor element  dst + sum i[j] * axis[j].dst        (linear, row-major)
 *     source byte     src + sum i[j] * axis[j].src        for every tuple 0 <= i[j] < axis[j].n
 *
 * Axes are slowest first in the tensor and nest (axis[j].dst >= axis[j+1].n * axis[j+1].dst), and
 * no axis crosses a dimension: it steps within one. A shard of a tensor has one axis per dimension;
 * a mapping (RoPE, query groups, a transpose) may have more and in any source order. Source strides
 * may be 0 (torch's expanded tensors) or interleave. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"
#include "tensor/box.h"

struct ckpt_axis {
    uint64_t n;
    uint64_t dst; /* elements */
    uint64_t src; /* bytes */
};

struct ckpt_piece {
    uint64_t dst; /* element */
    uint64_t src; /* byte */
    const struct ckpt_axis *axis;
    uint32_t naxis;
    uint32_t source; /* index in the catalogue */
};

/* A piece that contains its axes, for building. `p.axis` is set when it is added to a catalogue. */
struct ckpt_piece_draft {
    uint64_t dst, src;
    uint32_t naxis, source;
    struct ckpt_axis axis[CKPT_MAX_AXES];
};

/* The box `b` of a tensor of shape dim[0..b->rank), whose first element lies at byte `src` of the
 * source, with byte strides src_stride[d]. Gives one axis per dimension (also where n is 1). */
void ckpt_piece_from_box(const uint64_t *dim, const struct ckpt_box *b, uint32_t source,
                         uint64_t src, const uint64_t *src_stride, struct ckpt_piece_draft *out);

/* The inverse, for pieces with one axis per dimension of unit step (what readers make): true and
 * the box. False for others. */
bool ckpt_piece_box(const struct ckpt_piece *p, const uint64_t *dim, uint32_t rank,
                    struct ckpt_box *out);

/* Last element + 1; numel of the piece; one past the last source byte (elements of esize bytes);
 * false if that overflows. */
uint64_t ckpt_piece_dst_end(const struct ckpt_piece *p);
uint64_t ckpt_piece_numel(const struct ckpt_piece *p);
bool ckpt_piece_src_end(const struct ckpt_axis *axis, uint32_t naxis, uint64_t src, uint64_t esize,
                        uint64_t *ret);
