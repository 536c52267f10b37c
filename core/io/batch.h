/* SPDX-License-Identifier: Apache-2.0 */
/* The reads of one request: neighbours in a source become one scatter read, and every source that
 * was touched is checked at the end. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#include "base/err.h"
#include "base/vec.h"
#include "io/source.h"

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
    bool cached, missed; /* read only from the page cache; a read would have had to wait */
    bool soon;           /* nothing is read: `runs` are to be fetched (ckpt_batch_fetch) */
    CKPT_VEC(struct ckpt_batch_run) runs;
    struct ckpt_route route;
    CKPT_VEC(struct ckpt_source *) touched;
    uint64_t nread, nbyte;            /* reads issued (a gather is one), bytes asked for */
    struct iovec iov[CKPT_BATCH_IOV]; /* last, because it is not zeroed */
};

/* Begin an empty batch. */
void ckpt_batch_init(struct ckpt_batch *b);
void ckpt_batch_release(struct ckpt_batch *b); /* waits for reads in progress */

/* Add a read: bytes [off, off+len) of s are in buf after ckpt_batch_finish. May begin to read what
 * was added before. */
int ckpt_batch_add(struct ckpt_batch *b, struct ckpt_source *s, void *buf, size_t len, uint64_t off,
                   struct ckpt_err *err);

/* With `soon`: let the sources begin to fetch what was added, and holes of up to `gap` bytes in it.
 * False: there is no room for all of it. */
bool ckpt_batch_fetch(struct ckpt_batch *b, uint64_t gap);

/* Read runs now, if the page cache has all of them; *ret_all is false if not: their memory is
 * undefined then. */
int ckpt_batch_gather_cached(struct ckpt_batch *b, struct ckpt_source *s,
                             const struct ckpt_source_run *run, size_t n, bool *ret_all,
                             struct ckpt_err *err);

/* Read what is pending. With `cached`, -1 without an error if that would have to wait. */
int ckpt_batch_flush(struct ckpt_batch *b, struct ckpt_err *err);

/* Read what is pending, then check that no source changed since it was opened: only now are the
 * bytes good. */
int ckpt_batch_finish(struct ckpt_batch *b, struct ckpt_err *err);
