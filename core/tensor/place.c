/* SPDX-License-Identifier: Apache-2.0 */
/* Strided copies and casts between boxes of one tensor. */
#include "tensor/place.h"

#include <stddef.h>

uint64_t ckpt_place_from(const struct ckpt_box *part, const struct ckpt_box *src_box,
                         uint64_t *ret_stride)
{
    uint64_t off = 0;

    ckpt_shape_strides(src_box->n, src_box->rank, ret_stride);
    for (uint32_t d = 0; d < part->rank; d++)
        off += (part->lo[d] - src_box->lo[d]) * ret_stride[d];
    return off;
}

uint64_t ckpt_place_to(const struct ckpt_target *target, const struct ckpt_box *part)
{
    uint64_t off = 0;

    for (uint32_t d = 0; d < part->rank; d++)
        off += (part->lo[d] - target->box.lo[d]) * target->stride[d];
    return off;
}

void ckpt_place_axes(const struct ckpt_box *part, const uint64_t *dst, const uint64_t *src,
                     size_t esize, struct ckpt_step_axis *ret)
{
    for (uint32_t d = 0; d < part->rank; d++)
        ret[d] = (struct ckpt_step_axis){part->n[d], dst[d], src[d] * esize};
}

/* Cast over dimensions d..; the innermost in runs where both sides are dense. */
static void cast_axes(const struct ckpt_target *t, const struct ckpt_box *part, uint32_t d,
                      unsigned char *dst, const unsigned char *src, const uint64_t *src_stride,
                      enum ckpt_dtype from)
{
    const size_t esize = ckpt_dtype_size(from);
    const uint64_t n = d < part->rank ? part->n[d] : 1;

    if (d >= part->rank ||
        (d + 1 == part->rank && t->stride[d] == ckpt_dtype_size(t->dtype) && src_stride[d] == 1))
        ckpt_dtype_cast(dst, t->dtype, src, from, (size_t)n);
    else
        for (uint64_t i = 0; i < n; i++)
            cast_axes(t, part, d + 1, dst + i * t->stride[d], src + i * src_stride[d] * esize,
                      src_stride, from);
}

void ckpt_place(const struct ckpt_target *target, const struct ckpt_box *part, const void *src,
                const struct ckpt_box *src_box, enum ckpt_dtype src_dtype)
{
    const size_t esize = ckpt_dtype_size(src_dtype);
    uint64_t from[CKPT_MAX_RANK];
    const unsigned char *at =
        (const unsigned char *)src + ckpt_place_from(part, src_box, from) * esize;
    unsigned char *dst = target->ptr + ckpt_place_to(target, part);

    if (target->dtype != src_dtype) {
        cast_axes(target, part, 0, dst, at, from, src_dtype);
        return;
    }
    struct ckpt_step_axis axis[CKPT_MAX_RANK];
    struct ckpt_ndcopy c;
    ckpt_place_axes(part, target->stride, from, esize, axis);
    ckpt_ndcopy_init(&c, axis, part->rank, esize);
    ckpt_ndcopy_run(&c, dst, at);
}
