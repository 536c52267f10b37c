/* SPDX-License-Identifier: Apache-2.0 */
/* Placing: copying a part of a tensor from a buffer without holes to its destination in host
 * memory, with the strides and the dtype that the destination has. The loader's workers call this.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "tensor/box.h"
#include "tensor/dtype.h"
#include "tensor/ndcopy.h"

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
