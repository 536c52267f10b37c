/* SPDX-License-Identifier: Apache-2.0 */
/* Reading boxes of stored tensors: the part of each piece that is in the box is a strided region of
 * a source, which goes to a strided place in memory. Adjacent runs are read directly into place,
 * others as bounding ranges, and then copied. No other code walks the pieces of a tensor to read
 * it. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#include "base/err.h"
#include "base/vec.h"
#include "io/source.h"
#include "tensor/box.h"
#include "tensor/catalog.h"
#include "tensor/ndcopy.h"

/* ---- the reads of one request: neighbours in a source become one, and every source is checked at
 * the end ---- */

enum { CKPT_BATCH_IOV = 1024 }; /* IOV_MAX of Linux */

/* Bytes [off, end) of a source, the n-th that were added. */
struct ckpt_batch_run {
    struct ckpt_source *source;
    uint64_t off, end;
    size_t n;
};

/* Belongs to one thread and one request; lives on the stack (zeroed but for iov). */
struct ckpt_batch {
    struct ckpt_source *source; /* of the pending read; NULL: none */
    uint64_t off, len;          /* pending bytes of it */
    int niov;
    enum ckpt_read_how how;
    struct ckpt_route route;
    bool missed;                          /* CKPT_READ_CACHED: a read would have had to wait */
    CKPT_VEC(struct ckpt_batch_run) runs; /* CKPT_READ_PREFETCH: what ckpt_batch_fetch fetches */
    uint64_t part; /* which asks for at most so many bytes at once; 0: no matter how many */
    CKPT_VEC(struct ckpt_source *) touched;
    uint64_t nread, nbyte;            /* reads issued (a gather is one), bytes of them */
    uint64_t nasked;                  /* of these bytes, those that other machines read */
    struct iovec iov[CKPT_BATCH_IOV]; /* last, because it is not zeroed */
};

/* Begin an empty batch. */
void ckpt_batch_init(struct ckpt_batch *b, enum ckpt_read_how how);
void ckpt_batch_release(struct ckpt_batch *b); /* waits for reads in progress */

/* Add a read: bytes [off, off+len) of s are in buf after ckpt_batch_finish. May begin to read what
 * was added before. With CKPT_READ_PREFETCH buf is NULL, and nothing is read. */
int ckpt_batch_add(struct ckpt_batch *b, struct ckpt_source *s, void *buf, size_t len, uint64_t off,
                   struct ckpt_err *err);

/* With CKPT_READ_PREFETCH: let the sources begin to fetch what was added, and holes of up to `gap`
 * bytes in it, which makes neighbours in `runs` one. False: there is no room for all of it. */
bool ckpt_batch_fetch(struct ckpt_batch *b, uint64_t gap);

/* Read what is pending, then check that no source changed since it was opened: only now are the
 * bytes good. */
int ckpt_batch_finish(struct ckpt_batch *b, struct ckpt_err *err);

/* ---- strided regions ---- */

enum {
    CKPT_STRIDED_GAP = 128 * 1024, /* holes smaller than this are read too */
    CKPT_STRIDED_HOT_HOLE = 4096,  /* copying as much takes as long as another system call */
    CKPT_STRIDED_LONG_RUN = 4096,  /* bytes; longer runs are best read alone, without holes */
    CKPT_STRIDED_BOUND = 4 * 1024 * 1024, /* largest bounding range read at once */
    CKPT_STRIDED_KEPT = 2, /* limit of the cache, in multiples of CKPT_STRIDED_BOUND */
};

/* A cache of the last bounding range that was read, for later regions that lie in its holes. */
struct ckpt_strided_cache {
    const struct ckpt_source *source; /* NULL: empty */
    uint64_t off;
    size_t len, cap;
    unsigned char *data;
};
/* Free the memory; the cache is empty afterwards. */
void ckpt_strided_cache_release(struct ckpt_strided_cache *c);

struct ckpt_strided_reader {
    struct ckpt_batch *batch;
    size_t esize;       /* of the tensor that is read, as is */
    unsigned char *buf; /* the memory for it; NULL: nothing is read (CKPT_READ_PREFETCH) */
    uint64_t gap, bound;
    uint64_t run; /* runs from this size on are read alone, unless their holes are much smaller */
    uint64_t hot_hole; /* holes from this size on are left out where the page cache has the runs;
                          0: that is not tried */
    struct ckpt_strided_cache *cache;
};

/* ---- boxes of stored tensors ---- */

/* The box, which lies inside the tensor, goes to buf in row-major order without holes; NULL: it is
 * not read, but prefetched. A box of rank 1 is a range of elements in row-major order, whatever the
 * rank of the tensor. */
struct ckpt_box_read {
    const struct ckpt_tensor *tensor;
    struct ckpt_box box;
    void *buf;
};

/* Queue the reads of a box, which is not empty, of a tensor that has pieces. The bytes are
 * in buf after ckpt_batch_finish. Sets the reader's element size and buffer. */
int ckpt_stored_read(struct ckpt_strided_reader *reader, const struct ckpt_box_read *read,
                     struct ckpt_err *err);

/* Count the elements of a box of a stored tensor that one of its pieces has. */
uint64_t ckpt_piece_count(const struct ckpt_tensor *t, const struct ckpt_piece *piece,
                          const struct ckpt_box *box);

/* Find element `at` (row-major): the catalogue's source and the offset in it. False for computed
 * tensors, and if nothing is stored there. */
bool ckpt_tensor_place(const struct ckpt_tensor *t, uint64_t at, uint32_t *ret_source,
                       uint64_t *ret_off);
