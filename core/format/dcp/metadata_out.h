/* SPDX-License-Identifier: Apache-2.0 */
/* The `.metadata` of a distributed checkpoint: a pickle of torch.distributed.checkpoint.metadata's
 * Metadata, written whenever it is read, an entry per tensor and per part. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "base/mem.h"
#include "tensor/catalog.h"
#include "view/text.h"

/* An entry of the state dict: a tensor of that shape, or an object. */
struct ckpt_dcp_key {
    const char *name; /* valid until the next call */
    bool is_object;
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

/* What a distributed checkpoint consists of. The functions are pure, and safe from many threads. */
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
