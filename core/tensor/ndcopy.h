/* SPDX-License-Identifier: Apache-2.0 */
/* Strided copies between two buffers, transposes included. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "tensor/box.h"

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
