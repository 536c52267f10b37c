/* SPDX-License-Identifier: Apache-2.0 */
/* Files named by a part of a hash, each with one block. */
#include "io/bucket/cache.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include "base/fdio.h"
#include "base/mem.h"
#include "base/str.h"

enum { NFILE = 16384 }; /* of at most 64 KiB each: 1 GiB */

/* At the beginning of a file. */
struct head {
    char magic[8];
    XXH128_hash_t object;
    uint64_t off, len, sum;
};

static const char MAGIC[8] = "ckptfsH1";

char *ckpt_cache_default(void)
{
    const char *xdg = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");

    return xdg && *xdg == '/'     ? ckpt_asprintf("%s/ckptfs", xdg)
           : home && *home == '/' ? ckpt_asprintf("%s/.cache/ckptfs", home)
                                  : NULL;
}

int ckpt_cache_open(const char *say, int *ret_fd, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *path = say ? strdup(say) : ckpt_cache_default();
    char *slash = path ? strrchr(path, '/') : NULL;

    *ret_fd = -1;
    if (!path)
        return say ? ckpt_nomem(err) : 0;
    if (!say && slash && slash > path) { /* ~/.cache itself may be missing */
        *slash = '\0';
        (void)mkdir(path, 0700);
        *slash = '/';
    }
    if (mkdir(path, 0700) < 0 && errno != EEXIST && say)
        return ckpt_fail_errno(err, errno, "option cache: making '%s'", path);
    *ret_fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    return *ret_fd < 0 && say ? ckpt_fail_errno(err, errno, "option cache: '%s'", path) : 0;
}

static const char *file_of(XXH128_hash_t object, uint64_t off, char *buf, size_t cap)
{
    (void)snprintf(buf, cap, "%05u", (unsigned)((object.low64 + (off != 0)) % NFILE));
    return buf;
}

static struct head head_of(XXH128_hash_t object, uint64_t off, const void *buf, size_t len)
{
    struct head h = {.object = object, .off = off, .len = len};

    memcpy(h.magic, MAGIC, sizeof h.magic);
    h.sum = XXH3_64bits_withSeed(buf, len, object.high64);
    return h;
}

bool ckpt_cache_get(int fd, XXH128_hash_t object, uint64_t off, void *buf, size_t len)
{
    char name[16];
    struct head h;
    ckpt_cleanup(ckpt_closep) int file =
        openat(fd, file_of(object, off, name, sizeof name), O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
    struct iovec iov[2] = {{&h, sizeof h}, {buf, len}};

    if (file < 0 || ckpt_fdio_preadv(file, iov, 2, &(uint64_t){0}, 0) != 0)
        return false;
    const struct head sound = head_of(object, off, buf, len);
    return memcmp(&h, &sound, sizeof h) == 0;
}

void ckpt_cache_put(int fd, XXH128_hash_t object, uint64_t off, const void *buf, size_t len)
{
    static _Atomic unsigned number;
    char name[16], part[48];
    const struct head h = head_of(object, off, buf, len);
    uint64_t at = 0;

    (void)snprintf(part, sizeof part, "part-%ld-%u", (long)getpid(), number++);
    ckpt_cleanup(ckpt_closep) int file =
        openat(fd, part, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (file < 0)
        return;
    if (ckpt_fdio_pwrite(file, &h, sizeof h, &at) != 0 ||
        ckpt_fdio_pwrite(file, buf, len, &at) != 0 ||
        renameat(fd, part, fd, file_of(object, off, name, sizeof name)) < 0)
        (void)unlinkat(fd, part, 0);
}
