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
#include "base/mem.h"
#include "format/writer.h"
#include "tensor/box.h"
#include "tensor/catalog.h"
#include "view/text.h"

/* ---- `.metadata` ---- */

/* A pickle of torch.distributed.checkpoint.metadata's Metadata, written whenever it is read, an
 * entry per tensor and per part. */

enum { CKPT_DCP_PATH = 4 };

/* The archive of an object (container/torch_out.h); ptr NULL: that of the list [None]. */
struct ckpt_dcp_archive {
    const char *ptr;
    size_t len;
};

/* An entry of the state dict: a tensor of that shape, or an object. */
struct ckpt_dcp_key {
    const char *name; /* valid until the next call */
    bool is_object;
    struct ckpt_dcp_archive object;
    /* where it is in the nested state dict that was saved: npath keys, of which NULL stands for
     * `number`, a place in a list. npath 0: the state dict is flat, and the name is the key */
    const char *path[CKPT_DCP_PATH];
    uint32_t npath;
    uint64_t number;
    enum ckpt_dtype dtype;
    uint32_t rank;
    uint64_t dim[CKPT_MAX_RANK];
};

/* A part of an entry: a box of the tensor, and the bytes of some tensor that are stored for it. */
struct ckpt_dcp_data {
    uint64_t off[CKPT_MAX_RANK], dim[CKPT_MAX_RANK];
    const struct ckpt_tensor *tensor; /* NULL: an object */
    uint64_t from, len;
};

/* The archive of a part. */
struct ckpt_dcp_part {
    uint32_t rank;       /* whose file it is in */
    uint32_t key, index; /* the entry, and the part's number among the entry's */
    uint64_t off;        /* of the archive in the file; set by ckpt_dcp_out, as is len */
    uint64_t len;        /* of the archive */
};

/* A distributed checkpoint consists of these keys and parts. The functions are pure, and safe from
 * many threads. */
struct ckpt_dcp_state {
    const void *ctx;
    size_t nkey, npart;
    void (*key)(const void *ctx, size_t i, struct ckpt_dcp_key *ret);
    /* Part `index` of a key, in the order of `chunks`; false: there are no more. */
    bool (*chunk)(const void *ctx, size_t key, size_t index, struct ckpt_dcp_data *ret);
    struct ckpt_dcp_part *part; /* by rank, then as they stand in the file */
    bool indexed; /* parts are known by their index too, and keys by their paths in the state dict:
                     torch's own planner */
};

/* `s`, which is borrowed, must outlive the text. */
int ckpt_dcp_metadata_text(const struct ckpt_dcp_state *s, struct ckpt_arena *arena,
                           struct ckpt_text *ret, struct ckpt_err *err);

/* Add the files of a state below `folder` ("", or "step-5/"): of ranks 0..ranks, which are those of
 * its parts. A rank without parts has an empty file if `empty` is true, else none. The state is the
 * files' arena's. */
int ckpt_dcp_out(const struct ckpt_writing *w, const char *folder, struct ckpt_dcp_state *s,
                 uint32_t ranks, bool empty, struct ckpt_err *err);

/* Two forms of a state dict with an optimizer. */
enum ckpt_dcp_optimizer {
    /* {"model": {name: tensor}, "optim": {"state": {...}, "param_groups": [...]}}, as torch's
     * get_state_dict gives the latter */
    CKPT_DCP_NESTED,
    /* {name: tensor, ..., "optimizer": {"state.NAME.exp_avg": tensor, "param_groups.NAME.lr":
     * number, ...}}: with flatten_optimizer_state_dict */
    CKPT_DCP_FLATTENED,
};

/* Add a checkpoint of w->cat's tensors under their names, cut by rows as FSDP2 does,
 * below `folder` ("", or "step-5/"), for w->output's ranks. The state dict is flat, {name:
 * tensor}; with an optimizer it is nested or flattened. */
int ckpt_dcp_files(const struct ckpt_writing *w, const char *folder, enum ckpt_dcp_optimizer form,
                   struct ckpt_err *err);

/* Append the name of a state in the flattened form, as ckpt_writer.state_name does. */
void ckpt_dcp_flattened_name(struct ckpt_str *out, const char *parameter, const char *kind);

/* ---- tensors cut along their first dimension, as torch's Shard(0) deals the rows out to ranks
 * ---- */

/* One rank has these rows of a tensor. */
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
