/* SPDX-License-Identifier: Apache-2.0 */
/* Shows a folder, read-only, as storage at a distance: every request takes a latency, and all bytes
 * share one rate. Requests wait side by side, as those of a network filesystem do.
 *
 * usage: slow_fs FOLDER MOUNTPOINT LATENCY_US BYTES_PER_SECOND [direct_io] [hang_after=N]
 *
 * SIGUSR1 hangs it: requests wait, those that have begun and new ones, until SIGUSR2. With
 * hang_after, N more are answered before.
 *
 * It stays in the foreground, and when it is unmounted it says how many requests of each kind there
 * were: one line of JSON on its standard output. */
#define FUSE_USE_VERSION 31
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fuse3/fuse.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { AT_ONCE = 64 };

static struct {
    int folder;
    double latency, rate; /* seconds, bytes a second */
    bool direct_io;
    unsigned long hang_after; /* so many requests after the signal */
    atomic_long until_hang;   /* requests; below 0: it does not count */
    pthread_mutex_t lock;
    double busy_until; /* the link */
    atomic_ulong reads, bytes, opens, attributes, lists;
    atomic_bool hangs;
} storage = {.lock = PTHREAD_MUTEX_INITIALIZER};

enum { LOOK_MS = 5 }; /* how often a request that hangs looks whether it still does */

static double now(void)
{
    struct timespec t;

    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void sleep_until(double when)
{
    const struct timespec t = {(time_t)when, (long)((when - (double)(time_t)when) * 1e9)};

    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL) == EINTR)
        ;
}

static void hang_or_go_on(int sig)
{
    atomic_store(&storage.until_hang, sig == SIGUSR1 ? (long)storage.hang_after : -1);
    atomic_store(&storage.hangs, sig == SIGUSR1 && storage.hang_after == 0);
}

/* Until then, and for as long as the storage hangs. */
static void wait_until(double when)
{
    sleep_until(when);
    if (atomic_load(&storage.until_hang) >= 0 && atomic_fetch_sub(&storage.until_hang, 1) == 0)
        atomic_store(&storage.hangs, true);
    while (atomic_load(&storage.hangs))
        sleep_until(now() + LOOK_MS * 1e-3);
}

/* A request without data. */
static void wait_for(atomic_ulong *count)
{
    atomic_fetch_add(count, 1);
    wait_until(now() + storage.latency);
}

/* One that brings bytes: they queue up on the link, and take the latency besides. */
static void wait_for_bytes(size_t n)
{
    const double begin = now();

    atomic_fetch_add(&storage.reads, 1);
    atomic_fetch_add(&storage.bytes, n);
    (void)pthread_mutex_lock(&storage.lock);
    if (storage.busy_until < begin)
        storage.busy_until = begin;
    storage.busy_until += (double)n / storage.rate;
    const double end = storage.busy_until + storage.latency;
    (void)pthread_mutex_unlock(&storage.lock);
    wait_until(end);
}

static const char *below(const char *path) { return path[1] ? path + 1 : "."; }

static int slow_getattr(const char *path, struct stat *st, struct fuse_file_info *fi)
{
    (void)fi;
    wait_for(&storage.attributes);
    return fstatat(storage.folder, below(path), st, AT_SYMLINK_NOFOLLOW) < 0 ? -errno : 0;
}

static int slow_readlink(const char *path, char *buf, size_t size)
{
    const ssize_t n = readlinkat(storage.folder, below(path), buf, size - 1);

    wait_for(&storage.attributes);
    if (n < 0)
        return -errno;
    buf[n] = '\0';
    return 0;
}

static int slow_readdir(const char *path, void *buf, fuse_fill_dir_t fill, off_t off,
                        struct fuse_file_info *fi, enum fuse_readdir_flags flags)
{
    const int fd = openat(storage.folder, below(path), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *dir = fd < 0 ? NULL : fdopendir(fd);

    (void)off, (void)fi, (void)flags;
    wait_for(&storage.lists);
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

static int slow_open(const char *path, struct fuse_file_info *fi)
{
    const int fd = openat(storage.folder, below(path), O_RDONLY | O_CLOEXEC);

    wait_for(&storage.opens);
    fi->fh = (uint64_t)fd;
    fi->direct_io = storage.direct_io;
    return fd < 0 ? -errno : 0;
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

static int slow_release(const char *path, struct fuse_file_info *fi)
{
    (void)path;
    (void)close((int)fi->fh);
    return 0;
}

static void *slow_init(struct fuse_conn_info *conn, struct fuse_config *config)
{
    conn->max_readahead = 1 << 20;
    conn->max_background = AT_ONCE;
    conn->congestion_threshold = AT_ONCE * 3 / 4;
    config->kernel_cache = 0;
    /* a test that counts requests asks for each attribute */
    config->attr_timeout = config->entry_timeout = storage.hang_after ? 0 : 1;
    return NULL;
}

static void slow_destroy(void *data)
{
    (void)data;
    printf(
        "{\"reads\": %lu, \"bytes\": %lu, \"opens\": %lu, \"attributes\": %lu, \"lists\": %lu}\n",
        storage.reads, storage.bytes, storage.opens, storage.attributes, storage.lists);
    (void)fflush(stdout);
}

static const struct fuse_operations operations = {.getattr = slow_getattr,
                                                  .readlink = slow_readlink,
                                                  .readdir = slow_readdir,
                                                  .open = slow_open,
                                                  .read = slow_read,
                                                  .release = slow_release,
                                                  .init = slow_init,
                                                  .destroy = slow_destroy};

int main(int argc, char **argv)
{
    const struct sigaction act = {.sa_handler = hang_or_go_on, .sa_flags = SA_RESTART};
    char options[] = "ro,max_threads=64,max_idle_threads=64";
    char foreground[] = "-f", o[] = "-o";

    if (argc < 5) {
        (void)fputs("usage: slow_fs FOLDER MOUNTPOINT LATENCY_US BYTES_PER_SECOND [direct_io] "
                    "[hang_after=N]\n",
                    stderr);
        return 2;
    }
    storage.folder = open(argv[1], O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (storage.folder < 0) {
        perror(argv[1]);
        return 1;
    }
    atomic_init(&storage.until_hang, -1);
    (void)sigaction(SIGUSR1, &act, NULL);
    (void)sigaction(SIGUSR2, &act, NULL);
    storage.latency = strtod(argv[3], NULL) * 1e-6;
    storage.rate = strtod(argv[4], NULL);
    for (int i = 5; i < argc; i++)
        if (strcmp(argv[i], "direct_io") == 0)
            storage.direct_io = true;
        else if (sscanf(argv[i], "hang_after=%lu", &storage.hang_after) != 1)
            return 2;
    char *args[] = {argv[0], argv[2], foreground, o, options, NULL};
    return fuse_main(5, args, &operations, NULL);
}
