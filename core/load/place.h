/* SPDX-License-Identifier: Apache-2.0 */
/* From windows to destinations, in host memory: strides and casts. */
#ifndef CKPT_LOAD_PLACE_H
#define CKPT_LOAD_PLACE_H

#include <stdint.h>

#include "tensor/box.h"
#include "tensor/dtype.h"
#include "tensor/ndcopy.h"

/* Where a want goes. */
struct ckpt_target {
    unsigned char *ptr;             /* of its first element */
    struct ckpt_box box;            /* the want, in its tensor */
    uint64_t stride[CKPT_MAX_RANK]; /* bytes */
    enum ckpt_dtype dtype;
};

/* The steps of copying a part: elements from its beginning in memory that holds src_box without
 * holes, with that memory's strides; bytes from the target's beginning; both over its axes. */
uint64_t ckpt_place_from(const struct ckpt_box *part, const struct ckpt_box *src_box,
                         uint64_t *ret_stride);
uint64_t ckpt_place_to(const struct ckpt_target *target, const struct ckpt_box *part);
void ckpt_place_axes(const struct ckpt_box *part, const uint64_t *dst, size_t dst_unit,
                     const uint64_t *src, size_t esize, struct ckpt_step_axis *ret);

/* Copy `part` of a tensor, which lies in both boxes, from memory that holds `src_box` of it
 * without holes. */
void ckpt_place(const struct ckpt_target *target, const struct ckpt_box *part, const void *src,
                const struct ckpt_box *src_box, enum ckpt_dtype src_dtype);

#endif
