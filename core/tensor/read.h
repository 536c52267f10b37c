/* SPDX-License-Identifier: Apache-2.0 */
/* Reading boxes, ranges of elements and ranges of bytes of tensors, stored or computed:
 * box -> pieces -> strided regions -> few large reads -> one copy. */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "tensor/box.h"
#include "tensor/catalog.h"
#include "tensor/slab.h"
#include "tensor/strided.h"
#include "tensor/value.h"

/* The cost of reading, for statistics. It is updated with relaxed atomics. */
struct ckpt_read_stats {
    atomic_ullong requests;     /* tensor reads asked for */
    atomic_ullong bytes;        /* bytes delivered */
    atomic_ullong source_reads; /* system calls (or their equivalent) on sources */
    atomic_ullong source_bytes; /* bytes read from sources, gaps included */
    atomic_ullong asked_bytes;  /* of these, bytes that other machines read */
};

/* Data that all readers of a view share; its address identifies the scope of the view's slabs. All
 * members may be NULL, and must outlive it. */
struct ckpt_reading {
    struct ckpt_slabs *slabs; /* cache of transposed spans; NULL: none is kept */
    struct ckpt_read_stats *stats;
    struct ckpt_ahead *ahead; /* of files of which some bytes are far (view/ahead.h); NULL: none */
};

/* Holes of a source up to `gap` bytes are read through, in ranges of at most `bound` bytes: large
 * where a seek is slow (CKPT_STRIDED_GAP, CKPT_STRIDED_BOUND), small where the files are in the
 * page cache. Runs of `run` bytes and more are read alone (tensor/strided.h). */
struct ckpt_box_cost {
    uint64_t gap, bound, run;
    struct ckpt_route route; /* its bounce buffer belongs to the calling thread */
    uint64_t hot_hole;       /* tensor/strided.h */
};

/* Read n boxes. Neighbours in a source that follow each other in the list become
 * one read. Safe from many threads. Verifies, after the last read, that no file changed since it
 * was opened (STALE). On failure the buffers are undefined and err names the source and the offset
 * in it, not the tensor: several are read together. */
int ckpt_boxes_pread(struct ckpt_reading *rd, const struct ckpt_box_read *read, size_t n,
                     const struct ckpt_box_cost *cost, struct ckpt_err *err);

/* Reads as ckpt_boxes_pread does, if all bytes are in the page cache and nothing must be waited
 * for: returns 0. Returns 1 if not (or if a tensor is computed); the buffers are then undefined. */
int ckpt_boxes_pread_cached(struct ckpt_reading *rd, const struct ckpt_box_read *read, size_t n,
                            const struct ckpt_box_cost *cost, struct ckpt_err *err);

/* Read elements [lo, hi) of a tensor, in row-major order: as a box of rank 1 with
 * the usual costs, but data that is slow to make comes from the slabs of rd, and err also names the
 * tensor. */
int ckpt_elements_pread(const struct ckpt_tensor *t, struct ckpt_reading *rd, void *buf,
                        uint64_t lo, uint64_t hi, struct ckpt_err *err);

/* Read bytes [off, off+len) of the tensor in row-major order into buf. The range must lie inside
 * the tensor (assert). Safe from many threads. Verifies, after the last read, that no file changed
 * since it was opened (STALE). On failure buf is undefined and err names the source and the offset
 * in it. */
int ckpt_tensor_pread(const struct ckpt_tensor *t, struct ckpt_reading *rd, void *buf, size_t len,
                      uint64_t off, struct ckpt_err *err);

/* Add what is read for elements [lo, hi) to a batch of CKPT_READ_PREFETCH. For computed tensors,
 * about. */
int ckpt_tensor_prefetch(const struct ckpt_tensor *t, const struct ckpt_reading *rd, uint64_t lo,
                         uint64_t hi, struct ckpt_batch *batch, struct ckpt_err *err);

/* Elements [lo, hi) will be read soon: makes the first source of them that has to be decoded or, if
 * all are, the first slab. While another thread decodes a source, slabs are not made, since they
 * would wait for that. */
enum ckpt_prepared ckpt_tensor_prepare(const struct ckpt_tensor *t, struct ckpt_reading *rd,
                                       uint64_t lo, uint64_t hi);

/* The tensor that is read for t: t itself, or the tensor from which it is computed element by
 * element. Boxes of one are boxes of the other. */
const struct ckpt_tensor *ckpt_tensor_stored(const struct ckpt_tensor *t);

/* Is the tensor, or what is read for it, made by a source that decodes all of it to give a part? */
bool ckpt_tensor_is_decoded(const struct ckpt_tensor *t);

/* ---- do two tensors hold the same values? ---- */

/* CONFLICT unless both have the same dtype and shape; the message says where each is ("step 3"). */
int ckpt_tensor_same_kind(const struct ckpt_tensor *a, const char *in_a,
                          const struct ckpt_tensor *b, const char *in_b, struct ckpt_err *err);

/* True: both are known to hold the same bytes without reading any: they are made of the same bytes
 * of the same files, in the same way. */
bool ckpt_tensor_unchanged(const struct ckpt_tensor *a, const struct ckpt_tensor *b);

/* Is a part of the tensor, or of what it is computed from, nowhere (ckpt_source_nowhere_new)? */
bool ckpt_tensor_is_nowhere(const struct ckpt_tensor *t);

/* Compare two tensors. Dtype and shape must be equal. Nothing is read if they are known to be the
 * same, or one of them is nowhere; otherwise up to 16 places, spread over the whole tensor, first
 * and last bytes included, are read from both and compared. *ret_same is a sample's answer then:
 * two tensors that differ elsewhere only are taken for equal. Fails only if a source cannot be
 * read. */
int ckpt_tensor_same(const struct ckpt_tensor *a, const struct ckpt_tensor *b, bool *ret_same,
                     struct ckpt_err *err);
