/* SPDX-License-Identifier: Apache-2.0 */
/* Reading boxes of tensors, several at a time: box -> pieces -> strided regions -> few big reads.
 * read.h does the same for ranges of bytes. */
#ifndef CKPT_TENSOR_BOXES_H
#define CKPT_TENSOR_BOXES_H

#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "tensor/box.h"
#include "tensor/catalog.h"
#include "tensor/read.h"

/* The box, which lies inside the tensor, goes to buf in row-major order without holes. */
struct ckpt_box_read {
    const struct ckpt_tensor *tensor;
    struct ckpt_box box;
    void *buf;
};

/* Holes of a source up to `gap` bytes are read through, in ranges of at most `bound` bytes: large
 * where a seek is dear (CKPT_REGION_GAP, CKPT_REGION_BOUND), small where the files are in the page
 * cache. Runs of `run` bytes and more are read alone (tensor/region.h). */
struct ckpt_box_cost {
    uint64_t gap, bound, run;
    struct ckpt_route route; /* its bounce buffer must be the calling thread's */
};

/* Read n boxes of one catalogue. Neighbours in a source that follow each other in the list become
 * one read. Safe from many threads. Verifies, after the last read, that no file changed since it
 * was opened (STALE). On failure the buffers are undefined and err names the source and the offset
 * in it, not the tensor: several are read together. */
int ckpt_boxes_pread(const struct ckpt_catalog *cat, struct ckpt_reading *rd,
                     const struct ckpt_box_read *read, size_t n, const struct ckpt_box_cost *cost,
                     struct ckpt_err *err);

/* The same if all of it is in the page cache and nothing must be waited for: 0. 1: it is not so (or
 * a tensor is computed); the buffers are undefined. */
int ckpt_boxes_pread_cached(const struct ckpt_catalog *cat, struct ckpt_reading *rd,
                            const struct ckpt_box_read *read, size_t n,
                            const struct ckpt_box_cost *cost, struct ckpt_err *err);

/* What is read for t: t itself, or what a cast is computed from. Boxes of one are boxes of the
 * other. *ret_cat is its catalogue. */
const struct ckpt_tensor *ckpt_tensor_stored(const struct ckpt_catalog *cat,
                                             const struct ckpt_tensor *t,
                                             const struct ckpt_catalog **ret_cat);

/* Where element `at` (row-major) of a stored tensor lies: catalogue's source and byte. False for
 * computed tensors, and where nothing is stored. */
bool ckpt_tensor_place(const struct ckpt_tensor *t, uint64_t at, uint32_t *ret_source,
                       uint64_t *ret_off);

#endif
