/* SPDX-License-Identifier: Apache-2.0 */
/* Reading and writing all that was asked for, whatever number of system calls that takes. */
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

enum { CKPT_FDIO_END = -1 }; /* the file ends before the last byte */

/* Leave out the first len bytes of iov[0..*n), and what is empty after them. Returns the rest. */
struct iovec *ckpt_fdio_advance(struct iovec *iov, int *n, size_t len);

/* Fill iov[0..n), which is modified, from byte *off of a file; flags as preadv2(2)'s. 0, or an
 * errno (EAGAIN with RWF_NOWAIT: some bytes would have to be waited for), or CKPT_FDIO_END. *off is
 * then the first byte that did not come. */
int ckpt_fdio_preadv(int fd, struct iovec *iov, int n, uint64_t *off, int flags);

/* Reads as the function above, into one buffer. */
int ckpt_fdio_pread(int fd, void *buf, size_t len, uint64_t *off);

/* Write all of it at *off. 0 or an errno; *off is then the first byte that was not written. */
int ckpt_fdio_pwrite(int fd, const void *buf, size_t len, uint64_t *off);

/* The errno of what the calls above return, for messages: EIO where the file ended. */
int ckpt_fdio_errno(int rc);
