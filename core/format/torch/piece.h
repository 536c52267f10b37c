/* SPDX-License-Identifier: Apache-2.0 */
/* The content of one rank's torch.save file of sharded tensors: a box of each tensor, and the
 * position of its elements. */
#pragma once

#include "base/err.h"
#include "base/mem.h"
#include "base/vec.h"
#include "io/source.h"
#include "tensor/box.h"
#include "tensor/dtype.h"

struct ckpt_rank_piece {
    const char *name;
    enum ckpt_dtype dtype;
    uint32_t rank;
    uint64_t dim[CKPT_MAX_RANK]; /* shape of the whole tensor */
    struct ckpt_box box;
    uint64_t off;                   /* offset of the box's first element in the source */
    uint64_t stride[CKPT_MAX_RANK]; /* bytes */
};

struct ckpt_rank_pieces {
    struct ckpt_arena names;
    CKPT_VEC(struct ckpt_rank_piece) piece; /* in the order of the file */
    const char *states; /* the key of an optimizer's states, which are not read; NULL: none */
    const char *other;  /* the first value that is not a tensor but may contain some, or NULL */
};

/* Read the file. `rank` is the rank that wrote it, for meshes that do not record its coordinates.
 */
int ckpt_rank_pieces_read(struct ckpt_source *s, uint64_t rank, struct ckpt_rank_pieces *ret,
                          struct ckpt_err *err);
void ckpt_rank_pieces_release(struct ckpt_rank_pieces *p);
