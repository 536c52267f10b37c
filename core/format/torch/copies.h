/* SPDX-License-Identifier: Apache-2.0 */
/* Copies of tensors in the files of several ranks: if the copies differ, the files are of different
 * saves, or hold slices without saying so. */
#pragma once

#include "format/reader.h"
#include "format/torch/piece.h"

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
