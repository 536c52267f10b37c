/* SPDX-License-Identifier: Apache-2.0 */
/* For LD_PRELOAD: storage that fails, and a kernel that ends a mount in its rarer way. The file
 * CKPTFS_FAIL_READ, four int32 numbers that the test may change at any time, says what becomes of
 * reads at an offset: action, value, every n-th read only (0: each), reads so far. */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { NOTHING, ERRNO, SHORT, ZERO, DELAY_MS, MOUNT_ENDS };

struct control {
    _Atomic int32_t action, value, every, reads;
};

static struct control none, *control = &none;

__attribute__((constructor)) static void begin(void)
{
    const char *path = getenv("CKPTFS_FAIL_READ");
    const int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    void *p = fd < 0 ? MAP_FAILED
                     : mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

    if (p != MAP_FAILED)
        control = p;
    if (fd >= 0)
        (void)close(fd);
}

/* True: the read ends here, with *ret. Else it may be made, of *cap bytes at most. */
static int fault(ssize_t *ret, size_t *cap)
{
    const int32_t every = control->every, n = control->reads++, value = control->value;

    if (every > 0 && n % every != 0)
        return 0;
    switch (atomic_load(&control->action)) {
    case ERRNO:
        errno = value;
        *ret = -1;
        return 1;
    case ZERO:
        *ret = 0;
        return 1;
    case SHORT:
        *cap = (size_t)value;
        return 0;
    case DELAY_MS:
        (void)nanosleep(&(struct timespec){value / 1000, value % 1000 * 1000000L}, NULL);
        return 0;
    default:
        return 0;
    }
}

/* A mount has ended while a request was handed over: the kernel says ECONNABORTED, not ENODEV. */
static ssize_t mount_ends(ssize_t got)
{
    if (got < 0 && errno == ENODEV && atomic_load(&control->action) == MOUNT_ENDS)
        errno = ECONNABORTED;
    return got;
}

typedef ssize_t plain_read_fn(int, void *, size_t);
typedef ssize_t splice_fn(int, off64_t *, int, off64_t *, size_t, unsigned);

ssize_t read(int fd, void *buf, size_t len)
{
    return mount_ends(((plain_read_fn *)dlsym(RTLD_NEXT, "read"))(fd, buf, len));
}

ssize_t splice(int in, off64_t *off_in, int out, off64_t *off_out, size_t len, unsigned flags)
{
    return mount_ends(
        ((splice_fn *)dlsym(RTLD_NEXT, "splice"))(in, off_in, out, off_out, len, flags));
}

typedef ssize_t read_fn(int, void *, size_t, off64_t);
typedef ssize_t readv_fn(int, const struct iovec *, int, off64_t);
typedef ssize_t readv2_fn(int, const struct iovec *, int, off64_t, int);

static size_t cap_iov(const struct iovec *iov, int n, size_t cap, struct iovec *ret)
{
    int k = 0;

    for (; k < n && cap > 0; k++) {
        ret[k] = iov[k];
        if (ret[k].iov_len > cap)
            ret[k].iov_len = cap;
        cap -= ret[k].iov_len;
    }
    return (size_t)k;
}

ssize_t pread64(int fd, void *buf, size_t len, off64_t off)
{
    size_t cap = len;
    ssize_t ret;

    if (fault(&ret, &cap))
        return ret;
    return ((read_fn *)dlsym(RTLD_NEXT, "pread64"))(fd, buf, cap < len ? cap : len, off);
}

ssize_t preadv64(int fd, const struct iovec *iov, int n, off64_t off)
{
    struct iovec own[1024];
    size_t cap = SIZE_MAX;
    ssize_t ret;

    if (fault(&ret, &cap))
        return ret;
    return ((readv_fn *)dlsym(RTLD_NEXT, "preadv64"))(fd, own, (int)cap_iov(iov, n, cap, own), off);
}

ssize_t preadv64v2(int fd, const struct iovec *iov, int n, off64_t off, int flags)
{
    struct iovec own[1024];
    size_t cap = SIZE_MAX;
    ssize_t ret;

    if (fault(&ret, &cap))
        return ret;
    return ((readv2_fn *)dlsym(RTLD_NEXT, "preadv64v2"))(fd, own, (int)cap_iov(iov, n, cap, own),
                                                         off, flags);
}
