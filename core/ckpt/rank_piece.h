/* SPDX-License-Identifier: Apache-2.0 */
/* What one rank's torch.save file of sharded tensors holds: a box of each tensor, and where its
 * elements lie. */
#ifndef CKPT_CKPT_RANK_PIECE_H
#define CKPT_CKPT_RANK_PIECE_H

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
    uint64_t dim[CKPT_MAX_RANK]; /* of the whole tensor */
    struct ckpt_box box;
    uint64_t off;                   /* of the box's first element, in the source */
    uint64_t stride[CKPT_MAX_RANK]; /* bytes */
};

struct ckpt_rank_pieces {
    struct ckpt_arena names;
    CKPT_VEC(struct ckpt_rank_piece) piece; /* in the order of the file */
};

/* `rank` is the one that wrote the file, for meshes that do not say where it stands. */
int ckpt_rank_pieces_read(struct ckpt_source *s, uint64_t rank, struct ckpt_rank_pieces *ret,
                          struct ckpt_err *err);
void ckpt_rank_pieces_release(struct ckpt_rank_pieces *p);

#endif
