/* SPDX-License-Identifier: Apache-2.0 */
/* Checking, joining and opening paths. */
#include "io/below.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/openat2.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/mem.h"
#include "base/str.h"

bool ckpt_below_ok(const char *name)
{
    if (*name == '\0')
        return false;
    while (*name) {
        size_t n = strcspn(name, "/");
        if (n == 0 || (n == 2 && memcmp(name, "..", 2) == 0))
            return false;
        name += n;
        if (*name == '/' && *++name == '\0')
            return false;
    }
    return true;
}

char *ckpt_below_join(const char *a, const char *b)
{
    return strcmp(a, ".") == 0   ? strdup(b)
           : strcmp(b, ".") == 0 ? strdup(a)
                                 : ckpt_asprintf("%s/%s", a, b);
}

bool ckpt_is_below(const char *path, const char *top)
{
    size_t n = strlen(top);
    return strncmp(path, top, n) == 0 &&
           (path[n] == '/' || path[n] == '\0' || strcmp(top, "/") == 0);
}

/* Resolve the path with all links, but only to a placeholder (O_PATH reads nothing), ask the kernel
 * for its real path, and open exactly that if it is allowed. */
static int open_checked(const struct ckpt_below *b, const char *below, int flags)
{
    ckpt_cleanup(ckpt_closep) int place = openat(b->fd, below, O_PATH | O_CLOEXEC);
    char link[64], target[PATH_MAX];
    ssize_t n;

    if (place < 0)
        return -1;
    (void)snprintf(link, sizeof link, "/proc/self/fd/%d", place);
    n = readlink(link, target, sizeof target - 1);
    if (n < 0)
        return -1;
    target[n] = '\0';
    if (b->links != CKPT_LINKS_ANY && !ckpt_is_below(target, b->real) &&
        !(b->blobs && ckpt_is_below(target, b->blobs))) {
        errno = EXDEV;
        return -1;
    }
    return open(link, flags | O_CLOEXEC);
}

int ckpt_below_open(const struct ckpt_below *b, const char *below, int flags)
{
    struct open_how how = {.flags = (uint64_t)flags | O_CLOEXEC,
                           .resolve = RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS};
    long fd = syscall(SYS_openat2, b->fd, below, &how, sizeof how);

    if (fd >= 0)
        return (int)fd;
    /* EAGAIN: somebody renamed something, anywhere, while ".." in a link was walked */
    if (errno != EXDEV && errno != ENOSYS && errno != EPERM && errno != ELOOP && errno != EAGAIN)
        return -1;
    return open_checked(b, below, flags);
}

int ckpt_below_stat(const struct ckpt_below *b, const char *below, struct statx *ret)
{
    const unsigned mask = STATX_BASIC_STATS | STATX_BTIME;

    /* an entry of the directory itself, unless it is a link, leads nowhere else: one call */
    if (!strchr(below, '/')) {
        if (statx(b->fd, below, AT_SYMLINK_NOFOLLOW, mask, ret) < 0)
            return -1;
        if (!S_ISLNK(ret->stx_mode))
            return 0;
    }
    ckpt_cleanup(ckpt_closep) int fd = ckpt_below_open(b, below, O_PATH);
    return fd < 0 ? -1 : statx(fd, "", AT_EMPTY_PATH, mask, ret);
}

char *ckpt_below_blobs(const char *real)
{
    const char *rev = strrchr(real, '/');
    const char *tail = "/snapshots";
    size_t n = rev ? (size_t)(rev - real) : 0;

    if (n <= strlen(tail) || memcmp(rev - strlen(tail), tail, strlen(tail)) != 0)
        return NULL;
    n -= strlen(tail);
    const char *model = memrchr(real, '/', n);
    if (!model || !ckpt_has_prefix(model, "/models--"))
        return NULL;
    return ckpt_asprintf("%.*s/blobs", (int)n, real);
}
