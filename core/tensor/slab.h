/* SPDX-License-Identifier: Apache-2.0 */
/* A cache with a budget for spans of tensors that are slow to make: transposed experts, computed
 * values.
 *
 * A slab is made once, by the first thread that needs it; other threads wait for it. When the
 * budget is used up, the least recently used slabs are freed. The memory of large slabs is kept for
 * the next ones, as far as half of the budget has room for it beside the slabs, but of one in any
 * case: getting it from the kernel, which clears it, takes as long as filling it. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "io/source.h"

struct ckpt_slabs;

/* Makes a cache, of which the caller has a reference. The budget is in bytes; slabs that are in use
 * may exceed it for a moment. */
int ckpt_slabs_new(size_t budget, struct ckpt_slabs **ret, struct ckpt_err *err);
struct ckpt_slabs *ckpt_slabs_ref(struct ckpt_slabs *slabs);
void ckpt_slabs_unref(struct ckpt_slabs *slabs);

/* Fills buf with the slab's bytes. */
typedef int ckpt_slab_fill(const void *ctx, void *buf, size_t len, uint64_t slab,
                           struct ckpt_err *err);

/* A slab and how it is made. */
struct ckpt_slab {
    const void *scope; /* slabs of one scope are forgotten together */
    const void *owner; /* any unique address, e.g. the tensor */
    uint64_t number;   /* among the owner's slabs */
    size_t len;        /* bytes of it */
    ckpt_slab_fill *fill;
    const void *ctx; /* for fill */
    /* NULL, or the slab that is likely to be read after this one; false: none is. A thread that
     * would wait while another one fills this slab fills a later one, if the budget has room. */
    bool (*next)(const void *ctx, struct ckpt_slab *ret);
};

/* Copy bytes [off, off+len) of a slab into buf; the slab is made if it is not in the cache. Safe
 * from many threads. A failed fill is reported to all threads that waited for it, and is not kept.
 */
int ckpt_slabs_read(struct ckpt_slabs *slabs, const struct ckpt_slab *slab, void *buf, size_t len,
                    size_t off, struct ckpt_err *err);

/* Makes a slab before it is read, unless it is there or another thread makes it now. That takes no
 * more than half of the budget: slabs which are not yet read as a whole stay. */
enum ckpt_prepared ckpt_slabs_prepare(struct ckpt_slabs *slabs, const struct ckpt_slab *slab);

/* Slabs of this size will be read: raise the budget so that two of them fit. */
void ckpt_slabs_need(struct ckpt_slabs *slabs, size_t len);

/* Forget all slabs of a scope; nobody may be reading them. */
void ckpt_slabs_forget(struct ckpt_slabs *slabs, const void *scope);

/* Bytes kept now. */
size_t ckpt_slabs_bytes(struct ckpt_slabs *slabs);
