/* SPDX-License-Identifier: Apache-2.0 */
/* Pieces and boxes, one from the other. */
#include "tensor/piece.h"

#include "base/ckd.h"

void ckpt_piece_from_box(const uint64_t *dim, const struct ckpt_box *b, uint32_t source,
                         uint64_t src, const uint64_t *src_stride, struct ckpt_piece_draft *out)
{
    uint64_t stride[CKPT_MAX_RANK];

    ckpt_shape_strides(dim, b->rank, stride);
    out->source = source;
    out->src = src;
    out->dst = 0;
    out->naxis = b->rank;
    for (uint32_t d = 0; d < b->rank; d++) {
        out->dst += b->lo[d] * stride[d];
        out->axis[d] = (struct ckpt_axis){.n = b->n[d], .dst = stride[d], .src = src_stride[d]};
    }
}

bool ckpt_piece_box(const struct ckpt_piece *p, const uint64_t *dim, uint32_t rank,
                    struct ckpt_box *out)
{
    uint64_t stride[CKPT_MAX_RANK], at = p->dst;

    if (p->naxis != rank)
        return false;
    ckpt_shape_strides(dim, rank, stride);
    out->rank = rank;
    for (uint32_t d = 0; d < rank; d++) {
        if (p->axis[d].dst != stride[d])
            return false;
        out->lo[d] = at / stride[d];
        out->n[d] = p->axis[d].n;
        at %= stride[d];
    }
    return true;
}

uint64_t ckpt_piece_dst_end(const struct ckpt_piece *p)
{
    uint64_t end = p->dst + 1;

    for (uint32_t j = 0; j < p->naxis; j++)
        end += (p->axis[j].n - 1) * p->axis[j].dst;
    return end;
}

uint64_t ckpt_piece_numel(const struct ckpt_piece *p)
{
    uint64_t n = 1;

    for (uint32_t j = 0; j < p->naxis; j++)
        n *= p->axis[j].n;
    return n;
}

bool ckpt_piece_src_end(const struct ckpt_axis *axis, uint32_t naxis, uint64_t src, uint64_t esize,
                        uint64_t *ret)
{
    uint64_t end;

    if (ckd_add(&end, src, esize))
        return false;
    for (uint32_t j = 0; j < naxis; j++) {
        uint64_t more;
        if (axis[j].n == 0) {
            *ret = src;
            return true;
        }
        if (ckd_mul(&more, axis[j].n - 1, axis[j].src) || ckd_add(&end, end, more))
            return false;
    }
    *ret = end;
    return true;
}
