/* SPDX-License-Identifier: Apache-2.0 */
/* Reading bytes of tensors: byte range -> boxes -> pieces -> few big reads -> one copy. */
#ifndef CKPT_TENSOR_READ_H
#define CKPT_TENSOR_READ_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "tensor/catalog.h"
#include "tensor/slab.h"

/* What reading costs, for statistics. Updated with relaxed atomics. */
struct ckpt_read_stats {
    atomic_ullong requests;     /* tensor reads asked for */
    atomic_ullong bytes;        /* bytes delivered */
    atomic_ullong source_reads; /* system calls (or their equivalent) on sources */
    atomic_ullong source_bytes; /* bytes read from sources, gaps included */
};

/* Shared by all readers of a view; its address is the view's group of slabs. Both may be NULL, and
 * belong to somebody who outlives it. */
struct ckpt_reading {
    struct ckpt_slabs *slabs; /* cache of transposed spans; NULL: none is kept */
    struct ckpt_read_stats *stats;
};

/* Read bytes [off, off+len) of the tensor in row-major order into buf. The range must lie inside
 * the tensor (assert). Safe from many threads. Verifies, after the last read, that no file changed
 * since it was opened (STALE). On failure buf is undefined and err names the source and the offset
 * in it. */
int ckpt_tensor_pread(const struct ckpt_catalog *cat, const struct ckpt_tensor *t,
                      struct ckpt_reading *rd, void *buf, size_t len, uint64_t off,
                      struct ckpt_err *err);

#endif
