/* SPDX-License-Identifier: Apache-2.0 */
/* DEST appears whole: the work folder is beside it, and the files in that become DEST by one
 * rename. Where DEST is a folder in whose place no other can be put (a mountpoint, the working
 * directory, a folder in one that is read-only), the work folder is in DEST, and the files are
 * moved out one by one at the end, the weights first. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/err.h"
#include "base/json.h"
#include "base/mem.h"
#include "base/par.h"
#include "base/str.h"
#include "common.h"
#include "tool/export/export.h"
#include "tool/pump.h"

/* The journal of versions before 0.3, which wrote in DEST itself: a file. */
static const char OLD[] = ".ckptfs-export";

/* The work folder in DEST, and the end of its name beside DEST. */
static const char INSIDE[] = ".ckptfs-export.d", BESIDE[] = ".ckptfs-export";

/* ---- where DEST and the work folder are ---- */

/* Cut a path into the folder above and the name, neither of which ends with a slash. */
static int split(const char *path, char **ret_parent, char **ret_name)
{
    size_t end = strlen(path), begin;

    while (end > 1 && path[end - 1] == '/')
        end--;
    for (begin = end; begin && path[begin - 1] != '/'; begin--)
        ;
    size_t above = begin;
    while (above > 1 && path[above - 1] == '/')
        above--;
    *ret_parent = above ? strndup(path, above) : strdup(".");
    *ret_name = strndup(path + begin, end - begin);
    return *ret_parent && *ret_name ? 0 : -1;
}

static bool is_dots(const char *name)
{
    return strcmp(name, ".") == 0 || strcmp(name, "..") == 0 || !*name;
}

/* Can another folder be renamed to DEST, which exists? */
static bool is_replaceable(const struct exporting *x)
{
    struct statx mine = {0}, here = {0};

    return faccessat(x->above, ".", W_OK | X_OK, AT_EACCESS) == 0 &&
           statx(x->dir, "", AT_EMPTY_PATH, STATX_BASIC_STATS, &mine) == 0 &&
           !(mine.stx_attributes & STATX_ATTR_MOUNT_ROOT) &&
           statx(AT_FDCWD, ".", 0, STATX_BASIC_STATS, &here) == 0 &&
           (mine.stx_ino != here.stx_ino || mine.stx_dev_major != here.stx_dev_major ||
            mine.stx_dev_minor != here.stx_dev_minor);
}

static bool is_folder(int dir, const char *name)
{
    struct stat st;

    return dir >= 0 && fstatat(dir, name, &st, AT_SYMLINK_NOFOLLOW) == 0 && S_ISDIR(st.st_mode);
}

/* Decide where the work folder is. All processes of a job find the one that is there. */
static int place_work(struct exporting *x, bool has_parent, struct ckpt_err *err)
{
    x->inside = x->dir >= 0 && (!has_parent || is_folder(x->dir, INSIDE) ||
                                (!is_folder(x->above, x->work) && !is_replaceable(x)));
    if (!x->inside)
        return 0;
    free(x->work);
    free(ckpt_steal(&x->name));
    free(x->shown);
    ckpt_closep(&x->above);
    x->work = strdup(INSIDE);
    x->shown = ckpt_asprintf("%s/", x->dest);
    x->above = fcntl(x->dir, F_DUPFD_CLOEXEC, 0);
    return !x->work || !x->shown ? ckpt_nomem(err)
           : x->above < 0        ? ckpt_fail_errno(err, errno, "%s", x->dest)
                                 : 0;
}

/* Find DEST and the folder above it, which is made if it is not there. */
static int find(struct exporting *x, struct ckpt_err *err)
{
    char real[PATH_MAX];
    struct stat st;
    int e = stat(x->dest, &st) < 0 ? errno : 0;

    if (e == ENOENT && lstat(x->dest, &st) == 0) /* a link that leads nowhere */
        e = EEXIST;
    if ((e && e != ENOENT) || (!e && !S_ISDIR(st.st_mode)))
        return ckpt_fail_errno(err, e ? e : EEXIST, "making the folder '%s'", x->dest);
    if (!e && !realpath(x->dest, real))
        return ckpt_fail_errno(err, errno, "%s", x->dest);
    if (split(e ? x->dest : real, &x->parent, &x->name) < 0)
        return ckpt_nomem(err);
    if (e && is_dots(x->name))
        return ckpt_fail_errno(err, e, "making the folder '%s'", x->dest);
    x->shown = ckpt_asprintf("%s%s%s", x->parent, strcmp(x->parent, "/") == 0 ? "" : "/", x->name);
    x->work = ckpt_asprintf(".%s%s", x->name, BESIDE);
    if (!x->shown || !x->work)
        return ckpt_nomem(err);
    if (e && ckptfs_make_folder(x->parent, &x->made, err) < 0)
        return -1;
    x->above = open(x->parent, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (x->above < 0 && (e || errno != EACCES))
        return ckpt_fail_errno(err, errno, "%s", x->parent);
    x->dir = e ? -1 : open(x->dest, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (!e && x->dir < 0)
        return ckpt_fail_errno(err, errno, "%s", x->dest);
    return place_work(x, x->above >= 0 && *x->name, err);
}

int ckpt_dest_look(const char *dest, struct ckpt_job *ret, json_t **ret_what, struct ckpt_err *err)
{
    char real[PATH_MAX];
    const bool there = realpath(dest, real);
    ckpt_cleanup(ckpt_freep) char *parent = NULL, *name = NULL, *work = NULL, *shown = NULL;
    ckpt_cleanup(ckpt_closep) int dir =
        there ? open(real, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NONBLOCK) : -1;
    const bool inside = is_folder(dir, INSIDE);

    if (there && dir < 0)
        return 0;
    if (split(there ? real : dest, &parent, &name) < 0 ||
        !(work = inside ? strdup(INSIDE) : ckpt_asprintf(".%s%s", name, BESIDE)) ||
        !(shown = ckpt_asprintf("%s/%s", inside ? dest : parent, inside ? "" : name)))
        return ckpt_nomem(err);
    ckpt_cleanup(ckpt_closep) int above =
        inside ? fcntl(dir, F_DUPFD_CLOEXEC, 0) : open(parent, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (above < 0 || !is_folder(above, work))
        return 0;
    return ckpt_job_look(ret, above, work, shown, ret_what, err) < 0 ? -1 : 1;
}

/* ---- DEST before anything is written ---- */

static bool begins_a_path(const struct ckpt_items *items, const char *name)
{
    size_t n = strlen(name);

    for (size_t i = 0; i < items->n; i++)
        if (strncmp(items->item[i].path, name, n) == 0 &&
            (items->item[i].path[n] == '\0' || items->item[i].path[n] == '/'))
            return true;
    return false;
}

static bool is_temp(const struct ckpt_items *items, const char *name)
{
    for (size_t i = 0; *name == '.' && i < items->n; i++) {
        ckpt_cleanup(ckpt_freep) char *temp = ckpt_export_temp(items->item[i].path);
        if (temp && strcmp(temp, name) == 0)
            return true;
    }
    return false;
}

static bool has_file(int dir, const struct ckpt_item *item, int64_t *ret_mtime_ns)
{
    struct stat st;

    if (dir < 0 || fstatat(dir, item->path, &st, AT_SYMLINK_NOFOLLOW) < 0 || !S_ISREG(st.st_mode) ||
        (uint64_t)st.st_size != item->size)
        return false;
    *ret_mtime_ns = ckpt_job_mtime_ns(&st);
    return true;
}

bool ckpt_dest_has(const struct exporting *x, size_t item, int64_t *ret_mtime_ns)
{
    return has_file(x->job.files, &x->items->item[item], ret_mtime_ns) ||
           (x->inside && has_file(x->dir, &x->items->item[item], ret_mtime_ns));
}

/* Does DEST have every file, with its size? */
static bool has_all(const struct ckpt_items *items, int dir)
{
    int64_t ignored;

    for (size_t i = 0; i < items->n; i++)
        if (!has_file(dir, &items->item[i], &ignored))
            return false;
    return items->n > 0;
}

/* Is a name in DEST one that an export of these files makes? */
static bool is_ours(const struct exporting *x, const char *name, bool works)
{
    if (strcmp(name, INSIDE) == 0)
        return works;
    if (x->old && (strcmp(name, OLD) == 0 || is_temp(x->items, name)))
        return true;
    return (x->old || works || x->finished) && begins_a_path(x->items, name);
}

/* Check that DEST has nothing, all files, or what an unfinished export leaves there. */
static int inspect(struct exporting *x, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_closep) int copy = openat(x->dir, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *d = copy >= 0 ? fdopendir(copy) : NULL;
    const bool works = x->inside && is_folder(x->dir, INSIDE);
    struct stat st;
    char other[300] = "";

    if (!d)
        return ckpt_fail_errno(err, errno, "%s", x->dest);
    copy = -1; /* it is d's */
    x->old = fstatat(x->dir, OLD, &st, AT_SYMLINK_NOFOLLOW) == 0 && S_ISREG(st.st_mode);
    x->finished = !x->old && has_all(x->items, x->dir);
    for (struct dirent *e; (e = readdir(d));)
        if (strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0 && !*other &&
            !is_ours(x, e->d_name, works))
            (void)snprintf(other, sizeof other, "%s", e->d_name);
    (void)closedir(d);
    atomic_store(&x->other, *other && !x->old);
    return *other ? ckpt_fail(err, CKPT_CONFLICT,
                              "%s is not empty: it holds %s; export into a new directory (or "
                              "compare a finished export with ckpt verify)",
                              x->dest, other)
                  : 0;
}

int ckpt_dest_open(struct exporting *x, struct ckpt_err *err)
{
    if (find(x, err) < 0)
        return -1;
    return x->dir >= 0 ? inspect(x, err) : 0;
}

/* ---- unfinished exports of older versions ---- */

/* Open the old journal, and check that it is of this view. */
static FILE *open_old(int dir, const char *where, const char *source, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *text = NULL;
    const int fd = openat(dir, OLD, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    FILE *file = fd < 0 ? NULL : fdopen(fd, "r");
    size_t cap = 0;

    if (!file) {
        (void)ckpt_fail_errno(err, errno, "%s/%s", where, OLD);
        ckpt_closep(&(int){fd});
        return NULL;
    }
    const bool any = getline(&text, &cap, file) > 0;
    ckpt_cleanup(ckpt_json_decrefp) json_t *head =
        any ? json_loads(text, JSON_REJECT_DUPLICATES, NULL) : NULL;
    const char *of = ckpt_json_str_or(head, "export", "unreadable");
    if (!any || strcmp(of, source) == 0)
        return file;
    (void)ckpt_fail(err, CKPT_CONFLICT,
                    "%s: it holds an unfinished export of something else (%s in %s, this one is of "
                    "%s); remove it or choose another directory",
                    where, of, OLD, source);
    (void)fclose(file);
    return NULL;
}

/* Move the files one by one into the work folder, the journal last. */
static int move_into_work(const struct exporting *x, struct ckpt_err *err)
{
    for (size_t i = 0; i < x->items->n; i++) {
        const char *path = x->items->item[i].path;
        ckpt_cleanup(ckpt_freep) char *temp = ckpt_export_temp(path);
        if (!temp)
            return ckpt_nomem(err);
        if (ckpt_export_folders(x->job.files, path, err) < 0)
            return ckpt_err_in(err, "%s/%s", x->job.path, ckpt_job_files);
        const char *const names[] = {path, temp};
        for (size_t k = 0; k < 2; k++)
            if (renameat(x->dir, names[k], x->job.files, names[k]) < 0 && errno != ENOENT)
                return ckpt_fail_errno(err, errno, "moving %s/%s", x->dest, names[k]);
    }
    return renameat(x->dir, OLD, x->job.files, OLD) < 0 && errno != ENOENT
               ? ckpt_fail_errno(err, errno, "moving %s/%s", x->dest, OLD)
               : 0;
}

int ckpt_dest_adopt(struct exporting *x, struct ckpt_err *err)
{
    FILE *file = open_old(x->dir, x->dest, x->source, err);

    if (!file)
        return -1;
    /* The older version holds it with LOCK_EX while it runs. */
    const bool busy = flock(fileno(file), LOCK_SH | LOCK_NB) < 0 && errno == EWOULDBLOCK;
    (void)fclose(file);
    if (busy)
        return ckpt_fail(err, CKPT_CONFLICT, "%s: another export is writing there", x->dest);
    if (x->inside)
        return move_into_work(x, err);
    if (renameat(x->above, x->name, x->job.dir, ckpt_job_files) < 0 && errno != ENOENT)
        return ckpt_fail_errno(err, errno, "moving %s to %s/%s", x->dest, x->job.path,
                               ckpt_job_files);
    return ckpt_job_reopen_files(&x->job, err);
}

int ckpt_dest_take_old(struct exporting *x, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *text = NULL;
    size_t cap = 0;
    int rc = 0;

    if (faccessat(x->job.files, OLD, F_OK, AT_SYMLINK_NOFOLLOW) < 0)
        return 0;
    FILE *file = open_old(x->job.files, x->job.path, x->source, err);
    if (!file)
        return -1;
    x->resumed = true;
    while (rc == 0 && getline(&text, &cap, file) > 0) {
        ckpt_cleanup(ckpt_json_decrefp) json_t *line =
            json_loads(text, JSON_REJECT_DUPLICATES, NULL);
        rc = line ? ckpt_done_take(&x->done, line, err) : 0;
    }
    (void)fclose(file);
    return rc;
}

/* ---- DEST at the end ---- */

struct syncing {
    const struct exporting *x;
    int dir;
};

/* Sync the folders of a file. Files of one folder follow each other in the list: those that the
 * file before lies in, too, are synced for that one. */
static int sync_folders_of(void *ctx, size_t i, struct ckpt_err *err)
{
    const struct syncing *s = ctx;
    const struct ckpt_item *item = s->x->items->item;
    const char *before = i ? item[i - 1].path : "";
    ckpt_cleanup(ckpt_freep) char *path = strdup(item[i].path);

    if (!path)
        return ckpt_nomem(err);
    for (char *slash; (slash = strrchr(path, '/'));) {
        if (strncmp(before, path, (size_t)(slash + 1 - path)) == 0)
            break;
        *slash = '\0';
        ckpt_cleanup(ckpt_closep) int fd = openat(s->dir, path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (fd < 0 || fsync(fd) < 0)
            return ckpt_fail_errno(err, errno, "%s/%s", s->x->dest, path);
    }
    return 0;
}

/* Sync every folder that got a name in files/. */
static int sync_folders(const struct exporting *x, int dir, struct ckpt_err *err)
{
    struct syncing s = {x, dir};

    if (ckpt_parallel(x->items->n, ckpt_pump_jobs(x->jobs), sync_folders_of, &s, err) < 0)
        return -1;
    return fsync(dir) < 0 ? ckpt_fail_errno(err, errno, "%s", x->dest) : 0;
}

/* Move the files into DEST one by one. The process that moves the last one has made it. */
static int move_out(const struct exporting *x, bool *ret_named, struct ckpt_err *err)
{
    for (size_t i = 0; i < x->items->n; i++) {
        const char *path = x->items->item[i].path;
        ckpt_cleanup(ckpt_freep) char *copy = strdup(path);
        if (!copy)
            return ckpt_nomem(err);
        if (ckpt_export_folders(x->dir, path, err) < 0)
            return ckpt_err_in(err, "%s", x->dest);
        *ret_named = renameat(x->job.files, path, x->dir, path) == 0;
        if (!*ret_named && errno != ENOENT)
            return ckpt_fail_errno(err, errno, "%s/%s", x->dest, path);
        for (char *slash; (slash = strrchr(copy, '/'));) {
            *slash = '\0';
            (void)unlinkat(x->job.files, copy, AT_REMOVEDIR); /* fails if it is not empty */
        }
    }
    if (sync_folders(x, x->dir, err) < 0)
        return -1;
    (void)unlinkat(x->job.dir, ckpt_job_files, AT_REMOVEDIR);
    return 0;
}

/* DEST could not be made: another process has made it, or something else is there. */
static int not_named(const struct exporting *x, int e, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_closep) int dir =
        openat(x->above, x->name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);

    if (has_all(x->items, dir))
        return 0;
    return e == EEXIST || e == ENOTEMPTY
               ? ckpt_fail(err, CKPT_CONFLICT,
                           "%s is not empty any more: something has been put there; the export is "
                           "whole in %s/%s",
                           x->dest, x->job.path, ckpt_job_files)
               : ckpt_fail_errno(err, e, "naming %s", x->dest);
}

int ckpt_dest_name(struct exporting *x, bool *ret_named, struct ckpt_err *err)
{
    struct stat st;

    *ret_named = false;
    if (ckpt_job_is_named(&x->job))
        return x->inside ? 0 : not_named(x, ENOENT, err);
    if (unlinkat(x->job.files, OLD, 0) < 0 && errno != ENOENT)
        return ckpt_fail_errno(err, errno, "%s/%s/%s", x->job.path, ckpt_job_files, OLD);
    if (x->inside)
        return move_out(x, ret_named, err);
    if (sync_folders(x, x->job.files, err) < 0)
        return -1;
    /* The folder that is replaced was made by somebody who may have given it a mode and a group. */
    if (x->dir >= 0 && fstat(x->dir, &st) == 0) {
        (void)!fchown(x->job.files, (uid_t)-1, st.st_gid);
        (void)fchmod(x->job.files, st.st_mode & 07777);
    }
    *ret_named = renameat(x->job.dir, ckpt_job_files, x->above, x->name) == 0;
    if (!*ret_named)
        return not_named(x, errno, err);
    (void)fsync(x->above);
    return 0;
}

void ckpt_dest_tidy(struct exporting *x)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *what = NULL;
    struct ckpt_job job = {0};

    if (is_folder(x->above, x->work) &&
        ckpt_job_look(&job, x->above, x->work, x->shown, &what, NULL) == 0 &&
        (job.files < 0 || (x->inside && unlinkat(job.dir, ckpt_job_files, AT_REMOVEDIR) == 0)) &&
        ckpt_job_refresh(&job, NULL, NULL, NULL) == 0 && !ckpt_job_other(&job))
        ckpt_job_remove(&job);
    ckpt_job_release(&job);
}

void ckpt_dest_clean(struct exporting *x)
{
    for (size_t i = 0; i < x->items->n; i++) {
        ckpt_cleanup(ckpt_freep) char *temp = ckpt_export_temp(x->items->item[i].path),
                                      *dir = strdup(x->items->item[i].path);
        if (temp)
            (void)unlinkat(x->job.files, temp, 0);
        (void)unlinkat(x->job.files, x->items->item[i].path, 0);
        for (char *slash; dir && (slash = strrchr(dir, '/'));) {
            *slash = '\0';
            (void)unlinkat(x->job.files, dir, AT_REMOVEDIR); /* fails if it is not empty */
        }
    }
    (void)unlinkat(x->job.files, OLD, 0);
    ckpt_job_remove(&x->job);
}

void ckpt_dest_release(struct exporting *x)
{
    ckpt_closep(&x->dir);
    ckpt_closep(&x->above);
    free(ckpt_steal(&x->parent));
    free(ckpt_steal(&x->name));
    free(ckpt_steal(&x->work));
    free(ckpt_steal(&x->shown));
    x->made = 0;
    x->old = x->inside = x->finished = false;
}
