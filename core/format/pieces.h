/* SPDX-License-Identifier: Apache-2.0 */
/* The pieces of one tensor while a reader collects them from several files: boxes of the tensor,
 * and where each is stored. */
#pragma once

#include "io/source.h"
#include "tensor/catalog.h"

/* All zero: no pieces. */
struct ckpt_pieces {
    CKPT_VEC(struct ckpt_box) box;
    CKPT_VEC(struct ckpt_piece_draft) draft; /* of each box */
};

/* Free the lists. */
void ckpt_pieces_release(struct ckpt_pieces *p);

/* Add a box, unless it is empty, of a tensor of shape `dim`, as ckpt_piece_from_box. */
int ckpt_pieces_add(struct ckpt_pieces *p, const uint64_t *dim, const struct ckpt_box *box,
                    uint32_t source, uint64_t off, const uint64_t *stride, struct ckpt_err *err);

/* A box of a part of a tensor, and the equal box of the whole tensor that it is. */
struct ckpt_box_pair {
    struct ckpt_box local, global;
};

/* Intersect elements [lo, hi) of a part of shape local_dim, flattened, with one of its pairs.
 * Returns the number of resulting pairs (0: nothing). */
size_t ckpt_pair_clip(const struct ckpt_box_pair *pair, const uint64_t *local_dim, uint64_t lo,
                      uint64_t hi, struct ckpt_box_pair out[CKPT_MAX_SPANS]);

/* Add what a pair has of elements [lo, hi) of a part. `off` is where the part's first element would
 * be, modulo 2^64, `stride` has its strides in bytes. */
int ckpt_pieces_add_part(struct ckpt_pieces *p, const uint64_t *dim,
                         const struct ckpt_box_pair *pair, const uint64_t *local_dim, uint64_t lo,
                         uint64_t hi, uint32_t source, uint64_t off, const uint64_t *stride,
                         struct ckpt_err *err);

/* Check that the boxes cover the tensor exactly once, as ckpt_boxes_cover. Errors about an overlap
 * name the file, which is a source of cat; *ret_gap: the error is a gap. */
int ckpt_pieces_cover(const struct ckpt_pieces *p, const struct ckpt_catalog *cat,
                      const uint64_t *dim, uint32_t rank, bool *ret_gap, struct ckpt_err *err);

/* Add a tensor of these pieces to the catalogue. */
int ckpt_pieces_catalog(const struct ckpt_pieces *p, struct ckpt_catalog *cat, const char *name,
                        enum ckpt_dtype dtype, const uint64_t *dim, uint32_t rank,
                        struct ckpt_err *err);

/* ---- a few elements that two files should have in common: else they are of different saves ----
 */

/* Elements of a dtype that lie one behind the other at byte `off` of a source. */
struct ckpt_spot {
    struct ckpt_source *source;
    enum ckpt_dtype dtype;
    uint64_t off;
};

/* No more bytes than this of either file are compared in one call. */
enum { CKPT_SPOT_BYTES = 1024 };

/* Compare n elements: *ret is the number of the first that differs, n if none does. Elements of one
 * dtype are equal if their bytes are. Of two dtypes, which are castable, a is rounded to b's, and a
 * NaN is equal to any NaN. */
int ckpt_spot_compare(const struct ckpt_spot *a, const struct ckpt_spot *b, size_t n, size_t *ret,
                      struct ckpt_err *err);
