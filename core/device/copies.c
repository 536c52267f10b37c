/* SPDX-License-Identifier: Apache-2.0 */
/* Boxes -> axes -> descriptors. Axes beyond what a descriptor has are walked here. */
#include "device/copies.h"

#include <inttypes.h>

#include "base/ckd.h"

uint64_t ckpt_copies_most(const struct ckpt_box *part)
{
    uint64_t n = 1;

    for (uint32_t d = 0; d + CKPT_COPY_AXES < part->rank; d++)
        n *= part->n[d];
    return n;
}

static int push(struct ckpt_copies *c, struct ckpt_device_copy copy, struct ckpt_err *err)
{
    uint64_t total = copy.run;

    for (int k = 0; k < CKPT_COPY_AXES; k++)
        if (ckd_mul(&total, total, copy.n[k]))
            total = UINT64_MAX;
    if (total > UINT32_MAX - CKPT_COPY_BLOCK || c->n == c->cap)
        return ckpt_fail(err, CKPT_LIMIT,
                         "a copy on the device of %" PRIu64 " elements, number %" PRIu32
                         " of %" PRIu32,
                         total, c->n, c->cap);
    copy.total = (uint32_t)total;
    copy.first = c->nblock;
    c->nblock += (copy.total + CKPT_COPY_BLOCK - 1) / CKPT_COPY_BLOCK;
    c->ptr[c->n++] = copy;
    return 0;
}

/* The innermost axes go into the descriptor. */
static int push_axes(struct ckpt_copies *c, const struct ckpt_step_axis *axis, uint32_t naxis,
                     struct ckpt_device_copy copy, struct ckpt_err *err)
{
    if (naxis > CKPT_COPY_AXES) {
        for (uint64_t i = 0; i < axis->n; i++) {
            if (push_axes(c, axis + 1, naxis - 1, copy, err) < 0)
                return -1;
            copy.src += axis->src;
            copy.dst += axis->dst;
        }
        return 0;
    }
    for (uint32_t k = 0; k < CKPT_COPY_AXES; k++) {
        const struct ckpt_step_axis *a = k < naxis ? &axis[k] : NULL;
        if (a && a->n > UINT32_MAX)
            return ckpt_fail(err, CKPT_LIMIT, "a copy on the device of %" PRIu64 " elements", a->n);
        copy.n[k] = a ? (uint32_t)a->n : 1;
        copy.step_src[k] = a ? a->src : 0;
        copy.step_dst[k] = a ? a->dst : 0;
    }
    return push(c, copy, err);
}

/* The largest element that everything is a multiple of. */
static uint32_t granule(const struct ckpt_ndcopy *n, uint64_t dst, uint64_t src)
{
    uint64_t all = dst | src | n->run;

    for (uint32_t k = 0; k < n->naxis; k++)
        all |= n->axis[k].dst | n->axis[k].src;
    all |= 16;
    return (uint32_t)(all & (~all + 1)); /* its lowest bit */
}

static int push_plain(struct ckpt_copies *c, const struct ckpt_ndcopy *n, uint64_t dst,
                      uint64_t src, struct ckpt_err *err)
{
    const uint32_t size = granule(n, dst, src);
    const struct ckpt_device_copy copy = {
        .src = src,
        .dst = dst,
        .run = (uint32_t)(n->run / size),
        .src_size = (uint8_t)size,
        .dst_size = (uint8_t)size,
        .from = CKPT_COPY_PLAIN,
        .to = CKPT_COPY_PLAIN,
    };

    if (n->run / size > UINT32_MAX)
        return ckpt_fail(err, CKPT_LIMIT, "a copy on the device of %zu bytes", n->run);
    return push_axes(c, n->axis, n->naxis, copy, err);
}

static enum ckpt_copy_type copy_type(enum ckpt_dtype t)
{
    switch (t) {
    case CKPT_F16:
        return CKPT_COPY_F16;
    case CKPT_BF16:
        return CKPT_COPY_BF16;
    case CKPT_F32:
        return CKPT_COPY_F32;
    default:
        return CKPT_COPY_F64;
    }
}

/* Axes over elements; the innermost becomes the run where both sides have no holes in it. */
static int push_cast(struct ckpt_copies *c, const struct ckpt_ndcopy *n, uint64_t dst,
                     enum ckpt_dtype to, uint64_t src, enum ckpt_dtype from, struct ckpt_err *err)
{
    struct ckpt_device_copy copy = {
        .src = src,
        .dst = dst,
        .run = 1,
        .src_size = (uint8_t)ckpt_dtype_size(from),
        .dst_size = (uint8_t)ckpt_dtype_size(to),
        .from = (uint8_t)copy_type(from),
        .to = (uint8_t)copy_type(to),
    };
    const struct ckpt_step_axis *last = n->naxis ? &n->axis[n->naxis - 1] : NULL;
    const bool dense =
        last && last->dst == copy.dst_size && last->src == copy.src_size && last->n <= UINT32_MAX;

    if (dense)
        copy.run = (uint32_t)last->n;
    return push_axes(c, n->axis, n->naxis - dense, copy, err);
}

int ckpt_copies_place(struct ckpt_copies *c, const struct ckpt_target *target,
                      const struct ckpt_box *part, const void *src, const struct ckpt_box *src_box,
                      enum ckpt_dtype src_dtype, struct ckpt_err *err)
{
    const size_t esize = ckpt_dtype_size(src_dtype);
    uint64_t from[CKPT_MAX_RANK];
    const uint64_t at = (uint64_t)(uintptr_t)src + ckpt_place_from(part, src_box, from) * esize;
    const uint64_t to = (uint64_t)(uintptr_t)target->ptr + ckpt_place_to(target, part);
    struct ckpt_step_axis axis[CKPT_MAX_RANK];
    struct ckpt_ndcopy n;

    ckpt_place_axes(part, target->stride, from, esize, axis);
    if (target->dtype == src_dtype) {
        ckpt_ndcopy_init(&n, axis, part->rank, esize);
        return push_plain(c, &n, to, at, err);
    }
    ckpt_ndcopy_init(&n, axis, part->rank, 0); /* without runs: sizes differ */
    return push_cast(c, &n, to, target->dtype, at, src_dtype, err);
}
