/* SPDX-License-Identifier: Apache-2.0 */
/* A folder of the file system as a directory: opening safely below it, looking, listing. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/openat2.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "base/mem.h"
#include "base/sort.h"
#include "base/str.h"
#include "base/vec.h"
#include "io/dir.h"

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

/* Open what a path leads to: a descriptor (close-on-exec), or -1 and errno, which is EXDEV if a
 * link leads out. */
static int below_open(const struct ckpt_below *b, const char *below, int flags)
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

/* statx(2) of what a path leads to, with its time of creation: 0, or -1 and errno as for
 * ckpt_below_open. */
static int below_stat(const struct ckpt_below *b, const char *below, struct statx *ret)
{
    const unsigned mask = STATX_BASIC_STATS | STATX_BTIME;

    /* an entry of the directory itself, unless it is a link, leads nowhere else: one call */
    if (!strchr(below, '/')) {
        if (statx(b->fd, below, AT_SYMLINK_NOFOLLOW, mask, ret) < 0)
            return -1;
        if (!S_ISLNK(ret->stx_mode))
            return 0;
    }
    ckpt_cleanup(ckpt_closep) int fd = below_open(b, below, O_PATH);
    return fd < 0 ? -1 : statx(fd, "", AT_EMPTY_PATH, mask, ret);
}

/* ---- a folder of the file system as a directory ---- */

enum { READ_AHEAD = 128 * 1024 }; /* the kernel's default */

static struct ckpt_dir_found found_of(const struct statx *st)
{
    const bool has_birth = st->stx_mask & STATX_BTIME;

    return (struct ckpt_dir_found){
        .kind = S_ISREG(st->stx_mode)   ? CKPT_ENTRY_FILE
                : S_ISDIR(st->stx_mode) ? CKPT_ENTRY_DIR
                                        : CKPT_ENTRY_OTHER,
        .id = ckpt_file_id_of_statx(st),
        .extent = {0, st->stx_size},
        .device = makedev(st->stx_dev_major, st->stx_dev_minor),
        .birth_ns = has_birth ? st->stx_btime.tv_sec * 1000000000 + st->stx_btime.tv_nsec : 0,
    };
}

static int folder_look(void *ctx, const char *below, struct ckpt_dir_found *ret,
                       struct ckpt_err *err)
{
    struct statx st;

    (void)err;
    if (below_stat(ctx, below, &st) < 0)
        return errno;
    *ret = found_of(&st);
    return 0;
}

static int folder_open(void *ctx, const char *below, int *ret_fd, struct ckpt_dir_found *ret,
                       struct ckpt_err *err)
{
    struct statx st;
    ckpt_cleanup(ckpt_closep) int fd = below_open(ctx, below, O_RDONLY | O_NONBLOCK | O_NOCTTY);

    (void)err;
    if (fd < 0 || statx(fd, "", AT_EMPTY_PATH, STATX_BASIC_STATS | STATX_BTIME, &st) < 0)
        return errno;
    *ret = found_of(&st);
    if (st.stx_size > READ_AHEAD) /* small files are read at once, and may be many */
        (void)posix_fadvise(fd, 0, 0, POSIX_FADV_SEQUENTIAL); /* twice the read-ahead */
    *ret_fd = fd;
    fd = -1;
    return 0;
}

/* ---- listing ---- */

typedef CKPT_VEC(struct ckpt_entry) entries;

static void entries_release(entries *all)
{
    for (size_t i = 0; i < all->len; i++)
        free((char *)all->ptr[i].name);
    ckpt_vec_release(all);
}

static int entry_cmp(const void *a, const void *b)
{
    return ckpt_natural_cmp(((const struct ckpt_entry *)a)->name,
                            ((const struct ckpt_entry *)b)->name);
}

/* Some file systems do not say. */
static bool is_link(DIR *d, const struct dirent *de)
{
    struct stat st;

    return de->d_type == DT_LNK ||
           (de->d_type == DT_UNKNOWN &&
            fstatat(dirfd(d), de->d_name, &st, AT_SYMLINK_NOFOLLOW) == 0 && S_ISLNK(st.st_mode));
}

static int add_entry(DIR *d, const struct dirent *de, entries *all)
{
    const struct ckpt_entry e = {.name = strdup(de->d_name),
                                 .kind = de->d_type == DT_REG   ? CKPT_ENTRY_FILE
                                         : de->d_type == DT_DIR ? CKPT_ENTRY_DIR
                                         : de->d_type == DT_LNK || de->d_type == DT_UNKNOWN
                                             ? CKPT_ENTRY_UNKNOWN
                                             : CKPT_ENTRY_OTHER,
                                 .is_link = is_link(d, de)};

    if (e.name && ckpt_vec_push(all, e) == 0)
        return 0;
    free((char *)e.name);
    return ENOMEM;
}

/* Read all entries, in natural order: 0 or an errno. */
static int read_entries(struct ckpt_below *top, const char *below, entries *all)
{
    ckpt_cleanup(ckpt_closep) int fd = below_open(top, below, O_RDONLY | O_DIRECTORY);
    DIR *d = fd < 0 ? NULL : fdopendir(fd);
    int rc = 0;

    if (!d)
        return errno;
    fd = -1;
    for (const struct dirent *de; rc == 0 && (errno = 0, de = readdir(d));)
        if (strcmp(de->d_name, ".") != 0 && strcmp(de->d_name, "..") != 0)
            rc = add_entry(d, de, all);
    rc = rc ? rc : errno;
    (void)closedir(d);
    ckpt_sort(all->ptr, all->len, entry_cmp);
    return rc;
}

static int folder_list(void *ctx, const char *below, struct ckpt_str *ret, struct ckpt_err *err)
{
    ckpt_cleanup(entries_release) entries all = {0};
    const int rc = read_entries(ctx, below, &all);

    (void)err;
    for (size_t i = 0; rc == 0 && i < all.len; i++)
        ckpt_listed_add(ret, &all.ptr[i]);
    return rc;
}

const struct ckpt_dir_ops ckpt_folder_ops = {
    .look = folder_look, .open = folder_open, .list = folder_list};
