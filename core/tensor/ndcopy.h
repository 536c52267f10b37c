/* SPDX-License-Identifier: Apache-2.0 */
/* Strided copies between two buffers, transposes included. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "tensor/box.h"
#include "tensor/dtype.h"

/* One axis of a copy; strides in bytes. */
struct ckpt_step_axis {
    uint64_t n;
    uint64_t dst, src;
};

/* A copy in its simplest form: `run` bytes at a time, over the axes (slowest first in dst). */
struct ckpt_ndcopy {
    uint32_t naxis;
    size_t run;
    struct ckpt_step_axis axis[CKPT_MAX_AXES + 1]; /* one more: a run that was split again */
};

/* Drop axes of one, join neighbours that are contiguous on both sides, and put the innermost
 * contiguous ones into `run`. esize is the element's size. The result has no axis if the whole is
 * one run. */
void ckpt_ndcopy_init(struct ckpt_ndcopy *c, const struct ckpt_step_axis *axis, uint32_t naxis,
                      size_t esize);

/* Bytes copied; bytes from the first to one past the last byte touched in the source, in dst. */
uint64_t ckpt_ndcopy_bytes(const struct ckpt_ndcopy *c);
uint64_t ckpt_ndcopy_src_span(const struct ckpt_ndcopy *c);

/* Copy. The buffers do not overlap. */
void ckpt_ndcopy_run(const struct ckpt_ndcopy *c, void *dst, const void *src);

/* ---- placing ---- */

/* Copying a part of a tensor from a buffer without holes to its destination in host
 * memory, with the strides and the dtype that the destination has. The loader's workers call this.
 */

/* A destination: a box of a tensor in memory of the caller. */
struct ckpt_target {
    unsigned char *ptr;             /* the first element of the box */
    struct ckpt_box box;            /* in the tensor's coordinates */
    uint64_t stride[CKPT_MAX_RANK]; /* bytes between neighbours along each axis of the box */
    enum ckpt_dtype dtype;
    bool host; /* of a load into device memory: this is on the host */
    /* A function instead of ptr (ckpt_dest_put in load.h), and its argument. */
    int (*put)(void *ctx, const uint64_t *lo, const uint64_t *n, const void *data,
               const uint64_t *stride, const char *dtype);
    void *ctx;
};

/* Where a part begins, and how a copy of it steps. ckpt_place_from: elements from the beginning of
 * the buffer that holds src_box, with the buffer's strides in elements. ckpt_place_to: bytes from
 * target->ptr. ckpt_place_axes: the axes of the part for ckpt_ndcopy, given strides of dst in
 * bytes and of src in elements of esize bytes. */
uint64_t ckpt_place_from(const struct ckpt_box *part, const struct ckpt_box *src_box,
                         uint64_t *ret_stride);
uint64_t ckpt_place_to(const struct ckpt_target *target, const struct ckpt_box *part);
void ckpt_place_axes(const struct ckpt_box *part, const uint64_t *dst, const uint64_t *src,
                     size_t esize, struct ckpt_step_axis *ret);

/* Copy `part`, which lies in both boxes, from a buffer that holds `src_box` of the tensor without
 * holes in src_dtype, and cast it to the target's dtype. */
void ckpt_place(const struct ckpt_target *target, const struct ckpt_box *part, const void *src,
                const struct ckpt_box *src_box, enum ckpt_dtype src_dtype);
