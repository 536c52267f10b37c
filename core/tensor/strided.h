/* SPDX-License-Identifier: Apache-2.0 */
/* Reading a strided region of a source into a strided place in memory: adjacent runs are read
 * directly into place, others as bounding ranges, and then copied. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "io/batch.h"
#include "tensor/ndcopy.h"

enum {
    CKPT_STRIDED_GAP = 128 * 1024, /* holes smaller than this are read too */
    CKPT_STRIDED_HOT_HOLE = 4096,  /* copying as much takes as long as another system call */
    CKPT_STRIDED_LONG_RUN = 4096,  /* bytes; longer runs are best read alone, without holes */
    CKPT_STRIDED_BOUND = 4 * 1024 * 1024, /* largest bounding range read at once */
    CKPT_STRIDED_KEPT = 2, /* limit of the cache, in multiples of CKPT_STRIDED_BOUND */
};

/* A cache of the last bounding range that was read, for later regions that lie in its holes. */
struct ckpt_strided_cache {
    const struct ckpt_source *source; /* NULL: empty */
    uint64_t off;
    size_t len, cap;
    unsigned char *data;
};
/* Free the memory; the cache is empty afterwards. */
void ckpt_strided_cache_release(struct ckpt_strided_cache *c);

struct ckpt_strided_reader {
    struct ckpt_batch *batch;
    size_t esize;
    uint64_t gap, bound;
    uint64_t run; /* runs from this size on are read alone, unless their holes are much smaller */
    uint64_t hot_hole; /* holes from this size on are left out where the page cache has the runs;
                          0: that is not tried */
    struct ckpt_strided_cache *cache;
};

/* axis[j].src is a stride in the source, axis[j].dst one in memory, both in bytes, slowest first;
 * dst and src say where element 0 is. The bytes are there after ckpt_batch_finish. */
int ckpt_strided_read(const struct ckpt_strided_reader *r, struct ckpt_source *s,
                      const struct ckpt_step_axis *axis, uint32_t naxis, unsigned char *dst,
                      uint64_t src, struct ckpt_err *err);
