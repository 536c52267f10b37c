/* SPDX-License-Identifier: Apache-2.0 */
/* Shows a folder, writable, through a link with a rate: all bytes that are read and written share
 * it. Nothing is cached, so that several of these mounts of one folder see each other's changes, as
 * the machines of a network filesystem do.
 *
 * usage: slow_writes_fs FOLDER MOUNTPOINT BYTES_PER_SECOND
 *
 * It stays in the foreground. */
#define FUSE_USE_VERSION 31
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fuse3/fuse.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

static struct {
    int folder;
    double rate; /* bytes a second */
    pthread_mutex_t lock;
    double busy_until; /* the link */
} storage = {.lock = PTHREAD_MUTEX_INITIALIZER};

static double now(void)
{
    struct timespec t;

    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* Bytes queue up on the link. */
static void wait_for_bytes(size_t n)
{
    const double begin = now();

    (void)pthread_mutex_lock(&storage.lock);
    if (storage.busy_until < begin)
        storage.busy_until = begin;
    storage.busy_until += (double)n / storage.rate;
    const double end = storage.busy_until;
    (void)pthread_mutex_unlock(&storage.lock);
    const struct timespec t = {(time_t)end, (long)((end - (double)(time_t)end) * 1e9)};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL) == EINTR)
        ;
}

static const char *below(const char *path) { return path[1] ? path + 1 : "."; }

static int answer(int rc) { return rc < 0 ? -errno : 0; }

static int slow_getattr(const char *path, struct stat *st, struct fuse_file_info *fi)
{
    return answer(fi ? fstat((int)fi->fh, st)
                     : fstatat(storage.folder, below(path), st, AT_SYMLINK_NOFOLLOW));
}

static int slow_mkdir(const char *path, mode_t mode)
{
    return answer(mkdirat(storage.folder, below(path), mode));
}

static int slow_unlink(const char *path)
{
    return answer(unlinkat(storage.folder, below(path), 0));
}

static int slow_rmdir(const char *path)
{
    return answer(unlinkat(storage.folder, below(path), AT_REMOVEDIR));
}

static int slow_rename(const char *from, const char *to, unsigned flags)
{
    return flags ? -EINVAL
                 : answer(renameat(storage.folder, below(from), storage.folder, below(to)));
}

static int slow_chmod(const char *path, mode_t mode, struct fuse_file_info *fi)
{
    return answer(fi ? fchmod((int)fi->fh, mode) : fchmodat(storage.folder, below(path), mode, 0));
}

static int slow_chown(const char *path, uid_t uid, gid_t gid, struct fuse_file_info *fi)
{
    return answer(fi ? fchown((int)fi->fh, uid, gid)
                     : fchownat(storage.folder, below(path), uid, gid, AT_SYMLINK_NOFOLLOW));
}

static int slow_truncate(const char *path, off_t size, struct fuse_file_info *fi)
{
    if (fi)
        return answer(ftruncate((int)fi->fh, size));
    const int fd = openat(storage.folder, below(path), O_WRONLY | O_CLOEXEC);
    const int rc = fd < 0 ? -errno : answer(ftruncate(fd, size));
    if (fd >= 0)
        (void)close(fd);
    return rc;
}

static int slow_utimens(const char *path, const struct timespec t[2], struct fuse_file_info *fi)
{
    return answer(fi ? futimens((int)fi->fh, t)
                     : utimensat(storage.folder, below(path), t, AT_SYMLINK_NOFOLLOW));
}

static int slow_statfs(const char *path, struct statvfs *st)
{
    (void)path;
    return answer(fstatvfs(storage.folder, st));
}

static int slow_readdir(const char *path, void *buf, fuse_fill_dir_t fill, off_t off,
                        struct fuse_file_info *fi, enum fuse_readdir_flags flags)
{
    const int fd = openat(storage.folder, below(path), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *dir = fd < 0 ? NULL : fdopendir(fd);

    (void)off, (void)fi, (void)flags;
    if (!dir)
        return -errno;
    for (struct dirent *e; (e = readdir(dir));) {
        const struct stat st = {.st_ino = e->d_ino, .st_mode = (mode_t)e->d_type << 12};
        if (fill(buf, e->d_name, &st, 0, 0))
            break;
    }
    (void)closedir(dir);
    return 0;
}

static int open_at(const char *path, int flags, mode_t mode, struct fuse_file_info *fi)
{
    const int fd = openat(storage.folder, below(path), flags | O_CLOEXEC, mode);

    fi->fh = (uint64_t)fd;
    fi->direct_io = 1;
    return fd < 0 ? -errno : 0;
}

static int slow_open(const char *path, struct fuse_file_info *fi)
{
    return open_at(path, fi->flags & ~O_APPEND, 0, fi); /* the kernel says where it writes */
}

static int slow_create(const char *path, mode_t mode, struct fuse_file_info *fi)
{
    return open_at(path, (fi->flags & ~O_APPEND) | O_CREAT, mode, fi);
}

static int slow_read(const char *path, char *buf, size_t size, off_t off, struct fuse_file_info *fi)
{
    const ssize_t n = pread((int)fi->fh, buf, size, off);

    (void)path;
    if (n < 0)
        return -errno;
    wait_for_bytes((size_t)n);
    return (int)n;
}

static int slow_write(const char *path, const char *buf, size_t size, off_t off,
                      struct fuse_file_info *fi)
{
    const ssize_t n = pwrite((int)fi->fh, buf, size, off);

    (void)path;
    if (n < 0)
        return -errno;
    wait_for_bytes((size_t)n);
    return (int)n;
}

static int slow_fsync(const char *path, int data, struct fuse_file_info *fi)
{
    (void)path, (void)data;
    return answer(fsync((int)fi->fh));
}

static int slow_fsyncdir(const char *path, int data, struct fuse_file_info *fi)
{
    (void)path, (void)data, (void)fi;
    return 0;
}

static int slow_release(const char *path, struct fuse_file_info *fi)
{
    (void)path;
    (void)close((int)fi->fh);
    return 0;
}

static void *slow_init(struct fuse_conn_info *conn, struct fuse_config *config)
{
    (void)conn;
    config->kernel_cache = 0;
    config->use_ino = 1;
    config->attr_timeout = config->entry_timeout = config->negative_timeout = 0;
    return NULL;
}

static const struct fuse_operations operations = {.getattr = slow_getattr,
                                                  .mkdir = slow_mkdir,
                                                  .unlink = slow_unlink,
                                                  .rmdir = slow_rmdir,
                                                  .rename = slow_rename,
                                                  .chmod = slow_chmod,
                                                  .chown = slow_chown,
                                                  .truncate = slow_truncate,
                                                  .utimens = slow_utimens,
                                                  .statfs = slow_statfs,
                                                  .readdir = slow_readdir,
                                                  .open = slow_open,
                                                  .create = slow_create,
                                                  .read = slow_read,
                                                  .write = slow_write,
                                                  .fsync = slow_fsync,
                                                  .fsyncdir = slow_fsyncdir,
                                                  .release = slow_release,
                                                  .init = slow_init};

int main(int argc, char **argv)
{
    char foreground[] = "-f";

    if (argc != 4) {
        (void)fputs("usage: slow_writes_fs FOLDER MOUNTPOINT BYTES_PER_SECOND\n", stderr);
        return 2;
    }
    storage.folder = open(argv[1], O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (storage.folder < 0) {
        perror(argv[1]);
        return 1;
    }
    storage.rate = strtod(argv[3], NULL);
    (void)umask(0);
    char *args[] = {argv[0], argv[2], foreground, NULL};
    return fuse_main(3, args, &operations, NULL);
}
