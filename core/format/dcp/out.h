/* SPDX-License-Identifier: Apache-2.0 */
/* A PyTorch distributed checkpoint, as torch writes it by default: `.metadata`, and for each rank
 * `__R_0.distcp`, which holds its parts of tensors as torch.save writes them, one after the other.
 *
 * What torch's FileSystemWriter writes with CRCs switched off (container/torch_out.h), but for
 * storage_meta: save_id is a random number there, and checkpoint_id a path; both are None here. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "format/dcp/metadata_out.h"
#include "format/writer.h"
#include "tensor/box.h"
#include "tensor/catalog.h"

/* Add the files of a state below `folder` ("", or "step-5/"): of ranks 0..ranks, which are those of
 * its parts. A rank without parts has an empty file if `empty` is true, else none. The state is the
 * files' arena's. Objects are lists of None. */
int ckpt_dcp_out(const struct ckpt_writing *w, const char *folder, struct ckpt_dcp_state *s,
                 uint32_t ranks, bool empty, struct ckpt_err *err);

/* Add a checkpoint of w->cat's tensors under their names, cut by rows as FSDP2 does,
 * below `folder` ("", or "step-5/"), for w->output's ranks. The state dict is flat:
 * {name: tensor}. */
int ckpt_dcp_files(const struct ckpt_writing *w, const char *folder, struct ckpt_err *err);

/* ---- tensors cut along their first dimension, as torch's Shard(0) deals the rows out to ranks
 * ---- */

/* What one rank has of a tensor. */
struct ckpt_rows {
    const struct ckpt_tensor *tensor;
    uint64_t lo, n;     /* rows lo..lo+n; a scalar is one row */
    uint64_t from, len; /* its bytes in the tensor */
};

/* Rank `rank` of `ranks` has ceil(rows / ranks) rows, or what is left of them. False if it has
 * nothing that an earlier rank does not have: scalars belong to rank 0, and of several ranks that
 * have no rows the first states that. */
bool ckpt_rows_of(const struct ckpt_tensor *t, uint32_t rank, uint32_t ranks,
                  struct ckpt_rows *ret);

/* The shape of the part, and its offset in each dimension. */
void ckpt_rows_dim(const struct ckpt_rows *r, uint64_t dim[CKPT_MAX_RANK],
                   uint64_t off[CKPT_MAX_RANK]);

/* How many parts all ranks have together, at most. LIMIT if that is more than a view may have. */
int ckpt_rows_count(const struct ckpt_catalog *cat, uint32_t ranks, size_t *ret,
                    struct ckpt_err *err);
