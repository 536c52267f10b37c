/* SPDX-License-Identifier: Apache-2.0 */
/* The items of a DCP's data files: where in a file the elements of a chunk are. Several threads
 * read the items' headers, in the order of the files. */
#pragma once

#include <pthread.h>

#include "container/zstd.h"
#include "format/dcp/metadata.h"
#include "io/source.h"

struct ckpt_dcp_items {
    CKPT_VEC(uint64_t) strides;           /* in bytes */
    CKPT_VEC(struct ckpt_source *) plain; /* the compressed items, decompressed */
    struct ckpt_zstd_store *store;        /* of these; NULL: none is compressed */
    pthread_mutex_t lock;                 /* protects the three above while items are read */
};

/* An empty list. */
void ckpt_dcp_items_init(struct ckpt_dcp_items *items);

/* Free the lists. The struct can be released in any state. */
void ckpt_dcp_items_release(struct ckpt_dcp_items *items);

/* Read and check the headers of the items of all tensors' chunks that are not empty, and set these
 * chunks' `data`, `strides` and `plain`; source[] has the order of m->files. */
int ckpt_dcp_items_read(struct ckpt_dcp_items *items, struct ckpt_dcp_metadata *m,
                        struct ckpt_source *const *source, unsigned nthread, struct ckpt_err *err);

/* If bytes [off, off+len) of s begin with a frame of zstd, *ret is a source of the decompressed
 * bytes: at most max_len, and what torch.save puts around them. Otherwise *ret is NULL. */
int ckpt_dcp_decompress(struct ckpt_dcp_items *items, struct ckpt_source *s, uint64_t off,
                        uint64_t len, uint64_t max_len, struct ckpt_source **ret,
                        struct ckpt_err *err);

/* The strides in bytes of the item of a chunk that is that box. */
void ckpt_dcp_strides(const struct ckpt_dcp_items *items, const struct ckpt_dcp_chunk *c,
                      const struct ckpt_box *box, size_t esize, uint64_t *ret);
