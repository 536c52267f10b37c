/* SPDX-License-Identifier: Apache-2.0 */
/* The copy kernel: many strided copies and casts within device memory in one launch. Here are the
 * descriptor, which the host writes (copies.h), and the kernel's body; it is C, so that tests can
 * run it on the host. copy_kernel.cu makes PTX of it. */
#pragma once

#include "tensor/dtype_bits.h"

enum {
    CKPT_COPY_AXES = 4,
    CKPT_COPY_THREADS = 256,
    CKPT_COPY_BLOCK = 16 * CKPT_COPY_THREADS, /* elements that a block of threads copies */
};

/* How elements are interpreted. A copy without a cast has CKPT_COPY_PLAIN on both sides, and
 * elements of 1, 2, 4, 8 or 16 bytes. */
enum ckpt_copy_type {
    CKPT_COPY_F16,
    CKPT_COPY_BF16,
    CKPT_COPY_F32,
    CKPT_COPY_F64,
    CKPT_COPY_PLAIN,
};

/* One copy of total = run * n[0] * n[1] * ... elements: runs of contiguous elements (on both sides)
 * over the axes, of which the first is the outermost. Both addresses and all steps are multiples of
 * the size of the element on that side. */
struct ckpt_device_copy {
    uint64_t src, dst;
    uint64_t step_src[CKPT_COPY_AXES], step_dst[CKPT_COPY_AXES]; /* bytes */
    uint32_t n[CKPT_COPY_AXES];                                  /* 1 for an axis not in use */
    uint32_t run, total;
    uint32_t first; /* the first of its blocks in the launch; ascending over the list */
    uint8_t src_size, dst_size, from, to; /* bytes; enum ckpt_copy_type */
};

/* An element of 16 bytes, aligned as CUDA needs it for one load or store. */
struct ckpt_copy16 {
    uint64_t lo, hi;
}
#ifdef __CUDACC__
__align__(16)
#endif
    ;

CKPT_BITS uint32_t ckpt_copy_f32_of(const struct ckpt_device_copy *c, uint64_t at)
{
    if (c->from == CKPT_COPY_F16)
        return ckpt_bits_of_f16(*(const uint16_t *)at);
    if (c->from == CKPT_COPY_BF16) {
        const uint16_t h = *(const uint16_t *)at;
        return (uint32_t)h << 16;
    }
    if (c->from == CKPT_COPY_F32)
        return *(const uint32_t *)at;
    const uint64_t u = *(const uint64_t *)at;
    if ((u & 0x7fffffffffffffff) > 0x7ff0000000000000)
        return (uint32_t)(u >> 32 & 0x80000000u) | 0x7fc00000u | (uint32_t)(u >> 29 & 0x3fffffu);
    union {
        float f;
        uint32_t u;
    } rounded = {(float)*(const double *)at};
    return rounded.u;
}

CKPT_BITS void ckpt_copy_of_f32(const struct ckpt_device_copy *c, uint64_t at, uint32_t u)
{
    union {
        uint32_t u;
        float f;
    } is = {u};

    if (c->to == CKPT_COPY_F16)
        *(uint16_t *)at = ckpt_f16_of_bits(u);
    else if (c->to == CKPT_COPY_BF16)
        *(uint16_t *)at = ckpt_bf16_of_bits(u, c->from == CKPT_COPY_F16 ? 0x7fc0 : 0xffff);
    else if (c->to == CKPT_COPY_F32)
        *(uint32_t *)at = u;
    else if ((u & 0x7fffffffu) > 0x7f800000u)
        *(uint64_t *)at = (uint64_t)(u & 0x80000000u) << 32 | 0x7ff8000000000000 |
                          (uint64_t)(u & 0x3fffffu) << 29;
    else
        *(double *)at = is.f;
}

CKPT_BITS void ckpt_copy_element(const struct ckpt_device_copy *c, uint32_t i)
{
    uint64_t src = c->src + (uint64_t)(i % c->run) * c->src_size;
    uint64_t dst = c->dst + (uint64_t)(i % c->run) * c->dst_size;
    uint32_t at = i / c->run;

    for (int k = CKPT_COPY_AXES - 1; k >= 0 && at; k--) {
        src += at % c->n[k] * c->step_src[k];
        dst += at % c->n[k] * c->step_dst[k];
        at /= c->n[k];
    }
    if (c->from != c->to)
        ckpt_copy_of_f32(c, dst, ckpt_copy_f32_of(c, src));
    else if (c->src_size == 16)
        *(struct ckpt_copy16 *)dst = *(const struct ckpt_copy16 *)src;
    else if (c->src_size == 8)
        *(uint64_t *)dst = *(const uint64_t *)src;
    else if (c->src_size == 4)
        *(uint32_t *)dst = *(const uint32_t *)src;
    else if (c->src_size == 2)
        *(uint16_t *)dst = *(const uint16_t *)src;
    else
        *(uint8_t *)dst = *(const uint8_t *)src;
}

/* The work of one thread of one block. */
CKPT_BITS void ckpt_copy_thread(const struct ckpt_device_copy *list, uint32_t n, uint32_t block,
                                uint32_t thread)
{
    uint32_t a = 0, b = n;

    while (b - a > 1) { /* the last that begins at this block or before */
        const uint32_t mid = a + (b - a) / 2;
        if (list[mid].first <= block)
            a = mid;
        else
            b = mid;
    }
    const struct ckpt_device_copy *c = &list[a];
    const uint32_t lo = (block - c->first) * CKPT_COPY_BLOCK;
    const uint32_t hi = c->total - lo < CKPT_COPY_BLOCK ? c->total : lo + CKPT_COPY_BLOCK;
    for (uint32_t i = lo + thread; i < hi; i += CKPT_COPY_THREADS)
        ckpt_copy_element(c, i);
}

/* The kernel's name in the PTX. Launch it with CKPT_COPY_THREADS threads a block. */
#define CKPT_COPY_KERNEL "ckpt_copy_list"
