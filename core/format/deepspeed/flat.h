/* SPDX-License-Identifier: Apache-2.0 */
/* A flat buffer that is stored as several consecutive parts, for example a flat group that is
 * divided over its ranks. */
#ifndef CKPT_FORMAT_DEEPSPEED_FLAT_H
#define CKPT_FORMAT_DEEPSPEED_FLAT_H

#include "format/deepspeed/part.h"

struct ckpt_ds_stretch {
    uint64_t begin; /* first element, counted in the whole buffer */
    struct ckpt_ds_extent at;
};

struct ckpt_ds_buffer {
    CKPT_VEC(struct ckpt_ds_stretch) stretch;
    uint64_t n; /* number of elements */
    enum ckpt_dtype dtype;
};

/* Free the list of parts. */
void ckpt_ds_buffer_release(struct ckpt_ds_buffer *b);

/* Append a part. CONFLICT: it has another dtype than the parts before. */
int ckpt_ds_buffer_add(struct ckpt_ds_buffer *b, enum ckpt_dtype dtype, uint32_t source,
                       uint64_t off, uint64_t n, struct ckpt_err *err);

/* Append elements [at, at + n) of the buffer to the last tensor of p. CONFLICT: the buffer is
 * shorter. */
int ckpt_ds_buffer_take(const struct ckpt_ds_buffer *b, uint64_t at, uint64_t n,
                        struct ckpt_ds_parts *p, struct ckpt_err *err);

#endif
