/* SPDX-License-Identifier: Apache-2.0 */
/* The one loop around preadv(2), and the one around pwrite(2). */
#include "base/fdio.h"

#include <errno.h>
#include <unistd.h>

struct iovec *ckpt_fdio_advance(struct iovec *iov, int *n, size_t len)
{
    while (*n > 0 && len >= iov->iov_len) {
        len -= iov->iov_len;
        iov++;
        --*n;
    }
    if (*n > 0) {
        iov->iov_base = (char *)iov->iov_base + len;
        iov->iov_len -= len;
    }
    return iov;
}

int ckpt_fdio_preadv(int fd, struct iovec *iov, int n, uint64_t *off, int flags)
{
    for (iov = ckpt_fdio_advance(iov, &n, 0); n > 0;) {
        const ssize_t got =
            flags ? preadv2(fd, iov, n, (off_t)*off, flags) : preadv(fd, iov, n, (off_t)*off);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return got < 0 ? errno : CKPT_FDIO_END;
        *off += (uint64_t)got;
        iov = ckpt_fdio_advance(iov, &n, (size_t)got);
    }
    return 0;
}

int ckpt_fdio_pread(int fd, void *buf, size_t len, uint64_t *off)
{
    struct iovec iov = {.iov_base = buf, .iov_len = len};

    return ckpt_fdio_preadv(fd, &iov, 1, off, 0);
}

int ckpt_fdio_pwrite(int fd, const void *buf, size_t len, uint64_t *off)
{
    for (const char *p = buf; len > 0;) {
        const ssize_t put = pwrite(fd, p, len, (off_t)*off);
        if (put < 0 && errno == EINTR)
            continue;
        if (put <= 0)
            return put < 0 ? errno : ENOSPC;
        p += put;
        len -= (size_t)put;
        *off += (uint64_t)put;
    }
    return 0;
}

int ckpt_fdio_errno(int rc) { return rc == CKPT_FDIO_END ? EIO : rc; }
