/* SPDX-License-Identifier: Apache-2.0 */
/* One cache, with a budget, for spans of tensors that are dear to make: transposed experts,
 * computed values.
 *
 * A slab is made once, whoever asks first; others who want it wait for that one. Least recently
 * used slabs go when the budget is spent. */
#ifndef CKPT_TENSOR_SLAB_H
#define CKPT_TENSOR_SLAB_H

#include <stddef.h>
#include <stdint.h>

#include "base/err.h"

struct ckpt_slabs;

/* budget in bytes; slabs in use may exceed it for a moment. */
int ckpt_slabs_new(size_t budget, struct ckpt_slabs **ret, struct ckpt_err *err);
void ckpt_slabs_free(struct ckpt_slabs *slabs);

/* Fills buf with the slab's bytes. */
typedef int ckpt_slab_fill(void *ctx, void *buf, size_t len, uint64_t slab, struct ckpt_err *err);

/* Copy bytes [off, off+len) of slab number `slab` of `owner` (any unique address, e.g. the tensor)
 * into buf; a slab that is not there is made by fill(ctx, ..., slab_len, ...). Safe from many
 * threads; a failed fill is reported to all who waited and not kept. */
int ckpt_slabs_read(struct ckpt_slabs *slabs, const void *group, const void *owner, uint64_t slab,
                    size_t slab_len, ckpt_slab_fill *fill, void *ctx, void *buf, size_t len,
                    size_t off, struct ckpt_err *err);

/* Forget all slabs of a group; nobody may be reading them. */
void ckpt_slabs_forget(struct ckpt_slabs *slabs, const void *group);

/* Bytes kept now. */
size_t ckpt_slabs_bytes(struct ckpt_slabs *slabs);

#endif
