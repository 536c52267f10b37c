/* SPDX-License-Identifier: Apache-2.0 */
/* Reads of a program, and of the libraries that it links, go through tests/load/faults.c: the
 * program's symbols come first. */
#include <dlfcn.h>
#include <stddef.h>
#include <sys/types.h>
#include <sys/uio.h>

#define EXPORT __attribute__((visibility("default")))

typedef ssize_t pread_fn(int fd, void *buf, size_t n, off_t off);
typedef ssize_t preadv_fn(int fd, const struct iovec *iov, int n, off_t off);
typedef ssize_t preadv2_fn(int fd, const struct iovec *iov, int n, off_t off, int flags);

pread_fn __wrap_pread64, __real_pread64;
preadv_fn __wrap_preadv64, __real_preadv64;
preadv2_fn __wrap_preadv64v2, __real_preadv64v2;
EXPORT ssize_t pread64(int fd, void *buf, size_t n, off64_t off);
EXPORT ssize_t preadv64(int fd, const struct iovec *iov, int n, off64_t off);
EXPORT ssize_t preadv64v2(int fd, const struct iovec *iov, int n, off64_t off, int flags);

static pread_fn *real_pread;
static preadv_fn *real_preadv;
static preadv2_fn *real_preadv2;

static __attribute__((constructor)) void find(void)
{
    *(void **)&real_pread = dlsym(RTLD_NEXT, "pread64");
    *(void **)&real_preadv = dlsym(RTLD_NEXT, "preadv64");
    *(void **)&real_preadv2 = dlsym(RTLD_NEXT, "preadv64v2");
}

ssize_t __real_pread64(int fd, void *buf, size_t n, off_t off)
{
    return real_pread(fd, buf, n, off);
}

ssize_t __real_preadv64(int fd, const struct iovec *iov, int n, off_t off)
{
    return real_preadv(fd, iov, n, off);
}

ssize_t __real_preadv64v2(int fd, const struct iovec *iov, int n, off_t off, int flags)
{
    return real_preadv2(fd, iov, n, off, flags);
}

ssize_t pread64(int fd, void *buf, size_t n, off64_t off)
{
    return __wrap_pread64(fd, buf, n, off);
}

ssize_t preadv64(int fd, const struct iovec *iov, int n, off64_t off)
{
    return __wrap_preadv64(fd, iov, n, off);
}

ssize_t preadv64v2(int fd, const struct iovec *iov, int n, off64_t off, int flags)
{
    return __wrap_preadv64v2(fd, iov, n, off, flags);
}
