/* SPDX-License-Identifier: Apache-2.0 */
/* Many reads of one thread in flight, by io_uring.
 *
 * The kernel writes into the ring's own memory only (a bounce buffer, cut into chunks); what
 * arrives is copied to its place by ckpt_uring_add and ckpt_uring_wait, never by anybody else, and
 * never after ckpt_uring_wait has returned: it does not return while a read is in flight. As with
 * pread, a thread that waits for storage which never answers, waits for ever, and nobody may free
 * its ring. */
#ifndef CKPT_IO_URING_H
#define CKPT_IO_URING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#include "base/err.h"

/* Belongs to one thread at a time. */
struct ckpt_uring;

/* Bytes [off, off+len) of a file, len > 0. Belongs to the ring from ckpt_uring_add until `done`. */
struct ckpt_uring_read {
    int fd;
    uint32_t align; /* of offsets and lengths, that the descriptor asks for: a power of 2, at most
                       CKPT_BOUNCE_ALIGN */
    uint64_t off, len;
    const struct iovec *iov; /* len bytes */
    /* Called once, when nothing of it is in flight any more. Both 0: all bytes are there. What it
     * says of errors in *err, ckpt_uring_wait says. It may read by other means. */
    int (*done)(struct ckpt_uring_read *r, struct ckpt_err *err);
    int error;      /* of the read at byte `at` */
    bool ended;     /* the file ended there */
    uint64_t at;    /* the first of several */
    uint32_t parts; /* the ring's own: in flight, or to come */
};

/* Can rings be had? UNSUPPORTED: this build has no liburing, or the kernel refuses. */
int ckpt_uring_probe(struct ckpt_err *err);

/* A ring that reads into mem, which is borrowed: aligned to CKPT_BOUNCE_ALIGN, len > 0 a multiple
 * of it. */
int ckpt_uring_new(unsigned char *mem, size_t len, struct ckpt_uring **ret, struct ckpt_err *err);

/* Nothing may be in flight. */
void ckpt_uring_free(struct ckpt_uring *u);

/* Begin to read. Waits where all chunks are in flight. */
void ckpt_uring_add(struct ckpt_uring *u, struct ckpt_uring_read *r);

/* Until all that was added is done. The first error of all since the last time. */
int ckpt_uring_wait(struct ckpt_uring *u, struct ckpt_err *err);

#endif
