/* SPDX-License-Identifier: Apache-2.0 */
/* The .metadata file of PyTorch Distributed Checkpoint (torch/distributed/checkpoint/metadata.py):
 * the list of tensors, the boxes of each tensor, and the file in which the bytes of each box are.
 * If every rank wrote its own file, they are combined into one metadata; equal boxes are then
 * replicas. */
#pragma once

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "base/json.h"
#include "base/map.h"
#include "base/mem.h"
#include "base/vec.h"
#include "container/zstd.h"
#include "io/source.h"
#include "tensor/box.h"
#include "tensor/dtype.h"

#define CKPT_DCP_MAX_METADATA (UINT64_C(4) << 30)
#define CKPT_DCP_NOWHERE UINT32_MAX
enum { CKPT_DCP_MAX_NAME = 4096 };

/* A format's rules for the names in a DCP. Members may be NULL; their ctx is the member ctx. */
struct ckpt_dcp_format {
    const char *name; /* about.format */

    /* The name of tensor `name` in the catalogue: itself, or a string that lives as long as ctx.
     * NULL: the tensor does not belong to the model, and none of it is read. */
    const char *(*tensor)(void *ctx, const char *name);

    /* May the tensor be left out, with a warning, if it cannot be read? */
    bool (*optional)(void *ctx, const char *name);

    bool replicas;     /* equal boxes of a tensor are copies and not a conflict */
    bool may_be_empty; /* a DCP without any tensor is no error */

    /* Should the pickled object `name` be passed to `object`, as the archive s? */
    bool (*wants)(void *ctx, const char *name);
    int (*object)(void *ctx, const char *name, struct ckpt_source *s, struct ckpt_err *err);
    void *ctx;

    /* Receives each name's path in the state dict that was saved, as planner_data has it:
     * {"optim.state.w.step": ["optim", "state", "w", "step"]}, an element an integer where it was a
     * list's index or such a key. NULL after a lack of memory. The member may be NULL. */
    json_t **paths;
};

struct ckpt_dcp_chunk {
    uint32_t tensor;
    uint32_t lo, n;    /* tuples: positions in ints, where the tuple's length is */
    uint32_t file;     /* NOWHERE: no entry in storage_data */
    uint64_t off, len; /* offset and length of the item in the file */
    uint64_t data;     /* offset of the first element in the file, or in `plain` (below) */
    uint32_t strides;  /* position in `strides` + 1; 0: contiguous */
    uint32_t plain;    /* position in `plain` + 1; 0: the item is not compressed */
    bool is_archive;   /* its header was read, and it is a torch.save archive */
};

struct ckpt_dcp_tensor {
    const char *name;
    uint32_t dim; /* a tuple */
    enum ckpt_dtype dtype;
    const char *codec;    /* compression of its items ("stream.zstd/1"), or NULL */
    size_t first, nchunk; /* its range in `chunks` */
};

/* A pickled object that was asked for. */
struct ckpt_dcp_object {
    const char *name;
    uint32_t file;
    uint64_t off, len;
};

/* All zero except for the members that the caller sets. */
struct ckpt_dcp_metadata {
    const struct ckpt_dcp_format *format; /* set by the caller; NULL: a plain DCP */
    bool values_are_enough; /* likewise: a DCP of values without tensors is no error */
    struct ckpt_arena arena;
    CKPT_VEC(int64_t) ints;
    CKPT_VEC(struct ckpt_dcp_tensor) tensors; /* in the order of the file */
    CKPT_VEC(uint32_t) planned;               /* tensors in the order of planner_data */
    uint32_t *order; /* tensors in the order of the saved state dict (made by finish) */
    CKPT_VEC(struct ckpt_dcp_chunk) chunks; /* by tensor */
    CKPT_VEC(struct ckpt_dcp_object) objects;
    CKPT_VEC(const char *) files;
    CKPT_VEC(const char *) roots; /* first parts of the names, as planner_data separates them */
    struct ckpt_map by_name, by_file, by_root;
    size_t nfile;        /* number of files that were added */
    size_t nbytes_entry; /* number of pickled objects */
    bool has_planner_data;
};

/* Add the content of one file. rank_local: it is one of several, each written by a rank. */
int ckpt_dcp_metadata_add(struct ckpt_dcp_metadata *m, struct ckpt_source *s, bool rank_local,
                          struct ckpt_err *err);

/* Order the chunks by tensor and drop replicas, after the last file was added. */
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

/* Count the bytes of a chunk's data. False: it claims more than 2^64. */
bool ckpt_dcp_chunk_bytes(const struct ckpt_dcp_metadata *m, const struct ckpt_dcp_chunk *c,
                          uint64_t *ret);

/* ---- the order of the state dict that a DCP was saved from ----
 *
 * state_dict_metadata has the tensors of rank 0's plan first, then those that only rank 1 planned
 * to write, and so on: of replicated tensors each rank plans its share, so neighbours in a state
 * dict are separated. planner_data keeps every rank's own order, but is a ChainMap of all ranks'
 * keys (torch/distributed/checkpoint/default_planner.py): it begins with all keys of the last rank,
 * which are followed by those keys of the rank before that it did not have, and so on. If all ranks
 * have the same keys, this is the order of the state dict; stages of a pipeline are in reverse
 * order. */

/* Sort the n tensors in the order of the ranks' state dicts, rank after rank: their numbers, as
 * state_dict_metadata counts them, are written into ret[n]. planned[nplanned] are the numbers in
 * the order of planner_data. If these are not all tensors, once each, ret is 0 .. n - 1. -1: out of
 * memory. */
int ckpt_dcp_order(const uint32_t *planned, size_t nplanned, size_t n, uint32_t *ret);

/* ---- items: where in a file the elements of a chunk are ---- */

struct ckpt_dcp_items {
    CKPT_VEC(uint64_t) strides;           /* in bytes */
    CKPT_VEC(struct ckpt_source *) plain; /* the compressed items, decompressed */
    struct ckpt_decoded *store;           /* of these; NULL: none is compressed */
    struct ckpt_spill *spill;             /* for the store; borrowed, or NULL */
    pthread_mutex_t lock;                 /* protects the three above while items are read */
};

/* An empty list. */
void ckpt_dcp_items_init(struct ckpt_dcp_items *items);

/* Free the lists. The struct can be released in any state. */
void ckpt_dcp_items_release(struct ckpt_dcp_items *items);

/* Set `data`, `strides` and `plain` of all tensors' chunks that are not empty, by the headers of
 * their items, which are read and checked, at a distance only when the data are read
 * (dcp/unread.h). source[] has the order of m->files. */
int ckpt_dcp_items_read(struct ckpt_dcp_items *items, struct ckpt_dcp_metadata *m,
                        struct ckpt_source *const *source, struct ckpt_err *err);

/* If bytes [off, off+len) of s begin with a frame of zstd, *ret is a source of the decompressed
 * bytes: at most max_len, and what torch.save puts around them. Otherwise *ret is NULL. */
int ckpt_dcp_decompress(struct ckpt_dcp_items *items, struct ckpt_source *s, uint64_t off,
                        uint64_t len, uint64_t max_len, struct ckpt_source **ret,
                        struct ckpt_err *err);

/* The strides in bytes of the item of a chunk that is that box. */
void ckpt_dcp_strides(const struct ckpt_dcp_items *items, const struct ckpt_dcp_chunk *c,
                      const struct ckpt_box *box, size_t esize, uint64_t *ret);
