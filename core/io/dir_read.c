/* SPDX-License-Identifier: Apache-2.0 */
/* Reading whole small files of a directory, and listing it. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>

#include "base/ckd.h"
#include "base/fdio.h"
#include "base/mem.h"
#include "base/str.h"
#include "base/vec.h"
#include "io/dir.h"

/* ---- files ---- */

/* A file that is being read: from a replay, or by a descriptor. */
struct reading {
    const struct ckpt_dir *dir;
    const char *name;
    struct ckpt_place at;
    char *path;
    struct ckpt_extent extent; /* of the file in what is opened */
    bool replayed;
    int fd;
};

static void reading_release(struct reading *r)
{
    free(r->path);
    ckpt_closep(&r->fd);
}

static int reading_open(struct reading *r, struct ckpt_err *err)
{
    struct ckpt_file_id id;
    struct ckpt_look look;

    r->fd = -1;
    ckpt_dir_place(r->dir, r->name, &r->at, &r->path);
    r->replayed = ckpt_dir_replay_file(r->dir, r->name, &id, &r->extent);
    if (r->replayed)
        return 0;
    /* a replay may know that it is not there */
    if (ckpt_recording_replays(r->at.rec) && ckpt_dir_look(r->dir, r->name, &look, err) < 0)
        return -1;
    return ckpt_dir_open_file(r->dir, r->name, &r->fd, NULL, &r->extent, err);
}

/* Read the first len bytes, of which there are so many. */
static int reading_fill(struct reading *r, void *buf, size_t len, struct ckpt_err *err)
{
    const struct iovec iov = {buf, len};

    if (r->replayed && ckpt_replay_read(&r->at, &iov, 1, r->extent.off))
        return 0;
    if (r->fd < 0 && ckpt_dir_open_file(r->dir, r->name, &r->fd, NULL, &r->extent, err) < 0)
        return -1;
    uint64_t off = r->extent.off;
    const int rc = ckpt_fdio_pread(r->fd, buf, len, &off);
    if (rc == CKPT_FDIO_END)
        return ckpt_fail(err, CKPT_STALE, "'%s/%s' became shorter while it was read",
                         ckpt_dir_path(r->dir), r->name);
    if (rc)
        return ckpt_dir_fail(r->dir, rc, "reading", r->name, err);
    if (r->at.rec)
        ckpt_record_read(&r->at, &iov, 1, r->extent.off);
    return 0;
}

size_t ckpt_dir_read_head(const struct ckpt_dir *dir, const char *name, void *buf, size_t cap)
{
    ckpt_cleanup(reading_release) struct reading r = {.dir = dir, .name = name, .fd = -1};

    if (reading_open(&r, NULL) < 0)
        return 0;
    const size_t n = (size_t)ckpt_min_u64(cap, r.extent.len);
    return reading_fill(&r, buf, n, NULL) < 0 ? 0 : n;
}

int ckpt_dir_read_file(const struct ckpt_dir *dir, const char *name, size_t max_len,
                       char **ret_text, size_t *ret_len, struct ckpt_err *err)
{
    ckpt_cleanup(reading_release) struct reading r = {.dir = dir, .name = name, .fd = -1};

    if (reading_open(&r, err) < 0)
        return -1;
    const uint64_t size = r.extent.len;
    if (size > max_len)
        return ckpt_fail(err, CKPT_LIMIT, "'%s/%s' has %llu bytes, at most %zu are expected",
                         ckpt_dir_path(dir), name, (unsigned long long)size, max_len);
    ckpt_cleanup(ckpt_freep) char *text = malloc((size_t)size + 1);
    if (!text)
        return ckpt_nomem(err);
    if (reading_fill(&r, text, (size_t)size, err) < 0)
        return -1;
    text[size] = '\0';
    *ret_text = ckpt_steal(&text);
    *ret_len = (size_t)size;
    return 0;
}

/* ---- listings ---- */

static enum ckpt_entry_kind kind_of(const struct ckpt_dir *dir, const struct dirent *de)
{
    struct ckpt_look look;

    if (de->d_type == DT_REG)
        return CKPT_ENTRY_FILE;
    if (de->d_type == DT_DIR)
        return CKPT_ENTRY_DIR;
    if (de->d_type != DT_LNK && de->d_type != DT_UNKNOWN)
        return CKPT_ENTRY_OTHER;
    return ckpt_dir_look(dir, de->d_name, &look, NULL) == 0 ? look.kind : CKPT_ENTRY_OTHER;
}

/* Some file systems do not say. */
static bool is_link(DIR *d, const struct dirent *de)
{
    struct stat st;

    return de->d_type == DT_LNK ||
           (de->d_type == DT_UNKNOWN &&
            fstatat(dirfd(d), de->d_name, &st, AT_SYMLINK_NOFOLLOW) == 0 && S_ISLNK(st.st_mode));
}

typedef CKPT_VEC(struct ckpt_listed) listing;

static void listing_release(listing *all)
{
    for (size_t i = 0; i < all->len; i++)
        free(all->ptr[i].name);
    ckpt_vec_release(all);
}

static int listed_cmp(const void *a, const void *b)
{
    return ckpt_natural_cmp(((const struct ckpt_listed *)a)->name,
                            ((const struct ckpt_listed *)b)->name);
}

static int read_entries(const struct ckpt_dir *dir, DIR *d, listing *all, struct ckpt_err *err)
{
    for (const struct dirent *de; errno = 0, de = readdir(d);) {
        if (strcmp(de->d_name, ".") == 0 || strcmp(de->d_name, "..") == 0)
            continue;
        struct ckpt_listed item = {strdup(de->d_name), kind_of(dir, de), is_link(d, de)};
        if (!item.name || ckpt_vec_push(all, item) < 0) {
            free(item.name);
            return ckpt_nomem(err);
        }
    }
    return errno ? ckpt_dir_fail(dir, errno, "listing", NULL, err) : 0;
}

/* All entries in natural order, as the system has them. */
static int list_real(const struct ckpt_dir *dir, listing *all, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_closep) int fd = -1;
    DIR *d;

    if (ckpt_dir_open_itself(dir, &fd, err) < 0)
        return -1;
    if (!(d = fdopendir(fd)))
        return ckpt_dir_fail(dir, errno, "cannot list", NULL, err);
    fd = -1;
    const int rc = read_entries(dir, d, all, err);
    (void)closedir(d);
    if (all->len)
        qsort(all->ptr, all->len, sizeof *all->ptr, listed_cmp);
    return rc;
}

static int call_each(const struct ckpt_listed *list, size_t n,
                     int (*fn)(void *ctx, const struct ckpt_entry *entry, struct ckpt_err *err),
                     void *ctx, struct ckpt_err *err)
{
    int rc = 0;

    for (size_t i = 0; i < n && rc >= 0; i++)
        rc = fn(ctx, &(struct ckpt_entry){list[i].name, list[i].kind, list[i].is_link}, err);
    return rc;
}

int ckpt_dir_list(const struct ckpt_dir *dir,
                  int (*fn)(void *ctx, const struct ckpt_entry *entry, struct ckpt_err *err),
                  void *ctx, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *path = NULL;
    ckpt_cleanup(listing_release) listing all = {0};
    const struct ckpt_listed *list;
    struct ckpt_place at;
    size_t n;
    int rc;

    if (ckpt_dir_list_other(dir, fn, ctx, &rc, err))
        return rc;
    ckpt_dir_place(dir, ".", &at, &path);
    if (at.rec && ckpt_replay_list(&at, &list, &n))
        return call_each(list, n, fn, ctx, err);
    if (list_real(dir, &all, err) < 0)
        return -1;
    if (at.rec)
        ckpt_record_list(&at, all.ptr, all.len);
    return call_each(all.ptr, all.len, fn, ctx, err);
}
