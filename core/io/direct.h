/* SPDX-License-Identifier: Apache-2.0 */
/* Reads that bypass the page cache: data that is read once need not be kept there, and is not
 * copied. */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#include "base/err.h"

enum { CKPT_BOUNCE_ALIGN = 64 * 1024 };

/* An aligned buffer of one thread, for reads that cannot go directly to their destination. Zeroed:
 * none. */
struct ckpt_bounce {
    unsigned char *buf; /* aligned to CKPT_BOUNCE_ALIGN */
    size_t len;         /* a multiple of it */
};

/* len bytes, rounded down to CKPT_BOUNCE_ALIGN; 0: none. */
int ckpt_bounce_init(struct ckpt_bounce *b, size_t len, struct ckpt_err *err);
void ckpt_bounce_release(struct ckpt_bounce *b);

/* Which reads bypass the page cache. */
enum ckpt_direct {
    CKPT_DIRECT_NONE,
    CKPT_DIRECT_COLD, /* large reads of what is not in the page cache */
    CKPT_DIRECT_ALL,  /* all large reads */
};

/* The way in which a thread reads; without a bounce buffer it does not bypass the page cache. */
struct ckpt_route {
    enum ckpt_direct direct;
    struct ckpt_bounce *bounce;
    atomic_ullong *arrived; /* the bytes of each read are added when it has ended; may be NULL */
};

enum { CKPT_DIRECT_LEAST = 256 * 1024 }; /* smaller reads are left to the page cache */

/* The alignment of offsets, lengths and memory that a file asks for; 0: it can't be read so. Makes
 * the descriptor (which nobody else may use) one of O_DIRECT. */
uint32_t ckpt_direct_begin(int fd);

/* Fill iov[0..n) from `off` on with aligned reads: straight to their place where memory begins at
 * the same distance from an aligned address as the file's bytes from an aligned offset, else into
 * the bounce buffer. False: it could not be
 * done (the end of the file came early, too), and iov's memory is undefined. */
bool ckpt_direct_read(int fd, uint32_t align, const struct iovec *iov, int n, uint64_t off,
                      const struct ckpt_bounce *bounce);
