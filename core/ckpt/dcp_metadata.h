/* SPDX-License-Identifier: Apache-2.0 */
/* The .metadata file of PyTorch Distributed Checkpoint (torch/distributed/checkpoint/metadata.py):
 * which tensors there are, of which boxes each consists, and in which file the bytes of each box
 * lie.
 *
 * Several files make one metadata where every rank wrote its own; equal boxes are replicas then. */
#ifndef CKPT_CKPT_DCP_METADATA_H
#define CKPT_CKPT_DCP_METADATA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "base/map.h"
#include "base/mem.h"
#include "base/vec.h"
#include "io/source.h"
#include "tensor/box.h"
#include "tensor/dtype.h"

#define CKPT_DCP_MAX_METADATA (UINT64_C(4) << 30)
#define CKPT_DCP_NOWHERE UINT32_MAX
enum { CKPT_DCP_MAX_NAME = 4096 };

struct ckpt_dcp_chunk {
    uint32_t tensor;
    uint32_t lo, n;    /* tuples: places in ints, where their length stands */
    uint32_t file;     /* NOWHERE: no entry in storage_data */
    uint64_t off, len; /* of the item in the file */
};

struct ckpt_dcp_tensor {
    const char *name;
    uint32_t dim; /* a tuple */
    enum ckpt_dtype dtype;
    const char *codec;    /* of its items' bytes ("stream.zstd/1"), or NULL */
    size_t first, nchunk; /* in chunks */
};

/* A pickled object that somebody wants. */
struct ckpt_dcp_object {
    const char *name;
    uint32_t file;
    uint64_t off, len;
};

/* Zeroed, but for what the caller sets. */
struct ckpt_dcp_metadata {
    bool (*wants)(void *ctx, const char *name); /* objects; NULL: none. The caller's, as ctx */
    void *ctx;
    bool replicas; /* equal boxes of one file are copies, too; the caller's */
    struct ckpt_arena arena;
    CKPT_VEC(int64_t) ints;
    CKPT_VEC(struct ckpt_dcp_tensor) tensors; /* in the order of the file */
    CKPT_VEC(uint32_t) planned;               /* tensors in the order of planner_data */
    uint32_t *order; /* tensors in the order of the state dict that was saved (finish makes it) */
    CKPT_VEC(struct ckpt_dcp_chunk) chunks; /* by tensor */
    CKPT_VEC(struct ckpt_dcp_object) objects;
    CKPT_VEC(const char *) files;
    CKPT_VEC(const char *) roots; /* first parts of the names, as planner_data splits them */
    struct ckpt_map by_name, by_file, by_root;
    size_t nfile;        /* that were added */
    size_t nbytes_entry; /* pickled objects */
    bool has_planner_data;
};

/* Add what one file says. `rank_local`: it is one of several. */
int ckpt_dcp_metadata_add(struct ckpt_dcp_metadata *m, struct ckpt_source *s, bool rank_local,
                          struct ckpt_err *err);

/* After the last file: order the chunks by tensor, drop replicas. */
int ckpt_dcp_metadata_finish(struct ckpt_dcp_metadata *m, struct ckpt_err *err);
void ckpt_dcp_metadata_release(struct ckpt_dcp_metadata *m);

/* The members of a tuple. */
static inline uint32_t ckpt_dcp_rank(const struct ckpt_dcp_metadata *m, uint32_t tuple)
{
    return (uint32_t)m->ints.ptr[tuple];
}

static inline const uint64_t *ckpt_dcp_ints(const struct ckpt_dcp_metadata *m, uint32_t tuple)
{
    return (const uint64_t *)(m->ints.ptr + tuple + 1);
}

#endif
