/* SPDX-License-Identifier: Apache-2.0 */
/* Strided copies: runs by memcpy, transposes in tiles that fit the cache. */
#include "tensor/ndcopy.h"

#include <string.h>

#include "base/ckd.h"

enum { TILE = 32 };

void ckpt_ndcopy_init(struct ckpt_ndcopy *c, const struct ckpt_step_axis *axis, uint32_t naxis,
                      size_t esize)
{
    c->naxis = 0;
    c->run = esize;
    for (uint32_t j = 0; j < naxis; j++) {
        struct ckpt_step_axis a = axis[j];
        if (a.n == 1)
            continue;
        struct ckpt_step_axis *outer = c->naxis ? &c->axis[c->naxis - 1] : NULL;
        if (outer && outer->dst == a.n * a.dst && outer->src == a.n * a.src) {
            a.n *= outer->n;
            *outer = a;
        } else {
            c->axis[c->naxis++] = a;
        }
    }
    while (c->naxis && c->axis[c->naxis - 1].dst == c->run && c->axis[c->naxis - 1].src == c->run)
        c->run *= c->axis[--c->naxis].n;
}

uint64_t ckpt_ndcopy_bytes(const struct ckpt_ndcopy *c)
{
    uint64_t n = c->run;

    for (uint32_t j = 0; j < c->naxis; j++)
        n *= c->axis[j].n;
    return n;
}

uint64_t ckpt_ndcopy_src_span(const struct ckpt_ndcopy *c)
{
    uint64_t n = c->run;

    for (uint32_t j = 0; j < c->naxis; j++)
        n += (c->axis[j].n - 1) * c->axis[j].src;
    return n;
}

static void copy_row(unsigned char *dst, const unsigned char *src, const struct ckpt_step_axis *a,
                     size_t run)
{
#define COPY_ROW(bytes)                                                                            \
    for (uint64_t i = 0; i < a->n; i++)                                                            \
    memcpy(dst + i * a->dst, src + i * a->src, bytes)
    switch (run) {
    case 1:
        COPY_ROW(1);
        break;
    case 2:
        COPY_ROW(2);
        break;
    case 4:
        COPY_ROW(4);
        break;
    case 8:
        COPY_ROW(8);
        break;
    case 16:
        COPY_ROW(16);
        break;
    default:
        COPY_ROW(run);
    }
#undef COPY_ROW
}

/* Two axes where neighbours in dst are far apart in src: walk in square tiles, so that both sides
 * use whole cache lines. */
static void copy_tiled(unsigned char *dst, const unsigned char *src,
                       const struct ckpt_step_axis *outer, const struct ckpt_step_axis *inner,
                       size_t run)
{
    for (uint64_t i = 0; i < outer->n; i += TILE)
        for (uint64_t j = 0; j < inner->n; j += TILE) {
            struct ckpt_step_axis row = {ckpt_min_u64(TILE, inner->n - j), inner->dst, inner->src};
            uint64_t rows = ckpt_min_u64(TILE, outer->n - i);
            for (uint64_t r = i; r < i + rows; r++)
                copy_row(dst + r * outer->dst + j * inner->dst,
                         src + r * outer->src + j * inner->src, &row, run);
        }
}

static void copy_axes(const struct ckpt_ndcopy *c, uint32_t j, unsigned char *dst,
                      const unsigned char *src)
{
    uint32_t left = c->naxis - j;

    if (left == 0)
        memcpy(dst, src, c->run);
    else if (left == 1)
        copy_row(dst, src, &c->axis[j], c->run);
    else if (left == 2 && c->run <= 16 && c->axis[j].src < c->axis[j + 1].src)
        copy_tiled(dst, src, &c->axis[j], &c->axis[j + 1], c->run);
    else
        for (uint64_t i = 0; i < c->axis[j].n; i++)
            copy_axes(c, j + 1, dst + i * c->axis[j].dst, src + i * c->axis[j].src);
}

void ckpt_ndcopy_run(const struct ckpt_ndcopy *c, void *dst, const void *src)
{
    copy_axes(c, 0, dst, src);
}

/* ---- from a buffer without holes to a destination in host memory ---- */

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
