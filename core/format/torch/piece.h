/* SPDX-License-Identifier: Apache-2.0 */
/* The content of one rank's torch.save file of sharded tensors: a box of each tensor, and the
 * position of its elements. */
#pragma once

#include "base/err.h"
#include "base/mem.h"
#include "base/vec.h"
#include "format/reader.h"
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

/* ---- copies of tensors in the files of several ranks ---- */

/* A piece in the file `name`, which is `source`. All are borrowed. */
struct ckpt_rank_holder {
    const char *name;
    struct ckpt_source *source;
    const struct ckpt_rank_piece *piece;
};

/* Two pieces of one tensor with the same box, which is not empty. */
struct ckpt_rank_copy {
    struct ckpt_rank_holder first, other;
    bool part;        /* the files are parts of one model, each of which has tensors of its own */
    bool differs;     /* set by ckpt_rank_copies_check, as is the next */
    uint64_t element; /* the first that differs, of the box in row-major order */
};

/* Compare the copies: all their bytes if there are few copies, otherwise a number of samples that
 * does not grow with the number of copies, so that opening stays fast. CONFLICT names the first
 * copy that differs; with opt->allow_mixed it is a warning. If a buffer or a counter differs, of
 * which each rank has its own, that is a warning, too. `dir` is the directory's path for messages.
 */
int ckpt_rank_copies_check(struct ckpt_rank_copy *copy, size_t n,
                           const struct ckpt_reader_options *opt, const char *dir,
                           struct ckpt_catalog *cat, struct ckpt_err *err);
