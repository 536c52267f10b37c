/* SPDX-License-Identifier: Apache-2.0 */
/* Reads that go wrong. */
#include "faults.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { HANG_MS = 3600 * 1000, PATH = 4096, EVERY = 99 };

static struct {
    char kind[16];
    uint32_t rank;
    unsigned ms;
} fault;
static atomic_bool armed;
static atomic_uint hits;

ssize_t __real_pread64(int fd, void *buf, size_t n, off_t off);
ssize_t __real_preadv64(int fd, const struct iovec *iov, int n, off_t off);
ssize_t __real_preadv64v2(int fd, const struct iovec *iov, int n, off_t off, int flags);
ssize_t __wrap_preadv64v2(int fd, const struct iovec *iov, int n, off_t off, int flags);
ssize_t __wrap_pread64(int fd, void *buf, size_t n, off_t off);
ssize_t __wrap_preadv64(int fd, const struct iovec *iov, int n, off_t off);

void faults_set(const char *text)
{
    (void)sscanf(text, "%15[a-z]@%u:%u", fault.kind, &fault.rank, &fault.ms);
}

void faults_arm(void) { atomic_store(&armed, fault.kind[0] != '\0'); }

void faults_disarm(void) { atomic_store(&armed, false); }

uint32_t faults_timeout(void)
{
    const char *ms = getenv("LOAD_TIMEOUT_MS");

    return ms ? (uint32_t)atoi(ms) : 0;
}

static const char *path_of(int fd, char path[PATH])
{
    char link[64];

    (void)snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, PATH - 1);
    path[n < 0 ? 0 : n] = '\0';
    return path;
}

static bool is_of_rank(const char *path, uint32_t rank)
{
    char mark[32];

    if (rank == EVERY)
        (void)snprintf(mark, sizeof mark, "/rank");
    else
        (void)snprintf(mark, sizeof mark, "/rank%u/", rank);
    return strstr(path, mark) != NULL;
}

static bool concerns(int fd)
{
    char path[PATH];

    return atomic_load(&armed) && is_of_rank(path_of(fd, path), fault.rank);
}

/* -1: let it through; else the result, with errno. */
static int go_wrong(int fd, ssize_t *ret)
{
    if (!concerns(fd))
        return -1;
    const unsigned nth = atomic_fetch_add(&hits, 1);
    if (strcmp(fault.kind, "eio") == 0) {
        errno = EIO;
        *ret = -1;
        return 0;
    }
    if (strcmp(fault.kind, "short") == 0) {
        *ret = 0;
        return 0;
    }
    if (strcmp(fault.kind, "delay") == 0 && nth == 0)
        (void)usleep(fault.ms * 1000);
    if (strcmp(fault.kind, "hang") == 0)
        (void)usleep(HANG_MS * 1000u);
    return -1;
}

ssize_t __wrap_pread64(int fd, void *buf, size_t n, off_t off)
{
    ssize_t result;

    return go_wrong(fd, &result) == 0 ? result : __real_pread64(fd, buf, n, off);
}

ssize_t __wrap_preadv64(int fd, const struct iovec *iov, int n, off_t off)
{
    ssize_t result;

    return go_wrong(fd, &result) == 0 ? result : __real_preadv64(fd, iov, n, off);
}

/* What is not to wait finds nothing in the cache; or ("stall") waits all the same. */
ssize_t __wrap_preadv64v2(int fd, const struct iovec *iov, int n, off_t off, int flags)
{
    if (!concerns(fd))
        return __real_preadv64v2(fd, iov, n, off, flags);
    if (strcmp(fault.kind, "stall") == 0)
        (void)usleep(HANG_MS * 1000u);
    errno = EAGAIN;
    return -1;
}
