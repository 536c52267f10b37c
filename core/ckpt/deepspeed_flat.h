/* SPDX-License-Identifier: Apache-2.0 */
/* A buffer that lies in several stretches, one after the other: a flat group over its ranks. */
#ifndef CKPT_CKPT_DEEPSPEED_FLAT_H
#define CKPT_CKPT_DEEPSPEED_FLAT_H

#include "ckpt/deepspeed_part.h"

struct ckpt_ds_stretch {
    uint64_t begin; /* element of the buffer */
    struct ckpt_ds_extent at;
};

struct ckpt_ds_buffer {
    CKPT_VEC(struct ckpt_ds_stretch) stretch;
    uint64_t n; /* elements */
    enum ckpt_dtype dtype;
};

void ckpt_ds_buffer_release(struct ckpt_ds_buffer *b);

/* Append. CONFLICT if it is of another dtype than what is there. */
int ckpt_ds_buffer_add(struct ckpt_ds_buffer *b, enum ckpt_dtype dtype, uint32_t source,
                       uint64_t off, uint64_t n, struct ckpt_err *err);

/* Give elements [at, at + n) to the last tensor of p. CONFLICT: the buffer is shorter. */
int ckpt_ds_buffer_take(const struct ckpt_ds_buffer *b, uint64_t at, uint64_t n,
                        struct ckpt_ds_parts *p, struct ckpt_err *err);

#endif
