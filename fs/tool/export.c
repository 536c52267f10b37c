/* SPDX-License-Identifier: Apache-2.0 */
/* Writing a view as real files.
 *
 * Each file is written as .NAME.partial, fsynced and renamed. A journal in DEST records what is on
 * disk, so that repeating the command resumes an interrupted export: finished files are kept; of an
 * unfinished file, the prefix recorded in the journal is read back and compared with its hash. At
 * the end DEST holds the view's files and nothing else. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "base/err.h"
#include "base/fdio.h"
#include "base/json.h"
#include "base/mem.h"
#include "base/str.h"
#include "common.h"
#include "out.h"
#include "tool.h"
#include "tool/items.h"
#include "tool/journal.h"
#include "tool/pump.h"

struct export
{
    struct ckpt_items *items;
    const char *dest;
    int dir;     /* DEST */
    size_t made; /* so many folders were created by this process: DEST, and those above it */
    bool resumed;
    bool finished; /* DEST has all files of the view with the right sizes, and no others */
    struct ckpt_journal journal;
    pthread_mutex_t lock; /* protects the items' fd while files are opened */
    atomic_bool durable;  /* something is on disk that a resumed export can use */
    atomic_bool other;    /* DEST holds other files */
};

/* The temporary name of a file: "sub/.NAME.partial" for "sub/NAME". The caller frees it. */
static char *temp_of(const char *path)
{
    const char *slash = strrchr(path, '/');
    int dir = slash ? (int)(slash + 1 - path) : 0;
    return ckpt_asprintf("%.*s.%s.partial", dir, path, path + dir);
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
        ckpt_cleanup(ckpt_freep) char *temp = temp_of(items->item[i].path);
        if (temp && strcmp(temp, name) == 0)
            return true;
    }
    return false;
}

/* Does DEST have every file, with its size? */
static bool has_all(const struct export *x)
{
    struct stat st;

    for (size_t i = 0; i < x->items->n; i++)
        if (fstatat(x->dir, x->items->item[i].path, &st, AT_SYMLINK_NOFOLLOW) < 0 ||
            !S_ISREG(st.st_mode) || (uint64_t)st.st_size != x->items->item[i].size)
            return false;
    return x->items->n > 0;
}

/* Check that DEST has a journal or all files, and no entry that an export of these items would not
 * create. */
static int inspect(struct export *x, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_closep) int copy = openat(x->dir, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *d = copy >= 0 ? fdopendir(copy) : NULL;
    bool journal = faccessat(x->dir, ckpt_journal_name, F_OK, AT_SYMLINK_NOFOLLOW) == 0;
    char other[300] = "";

    x->finished = !journal && has_all(x);
    if (!d)
        return ckpt_fail_errno(err, errno, "%s", x->dest);
    copy = -1; /* it is d's */
    for (struct dirent *e; (e = readdir(d));) {
        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0)
            continue;
        bool ours = (journal &&
                     (strcmp(e->d_name, ckpt_journal_name) == 0 || is_temp(x->items, e->d_name))) ||
                    ((journal || x->finished) && begins_a_path(x->items, e->d_name));
        if (!ours && !*other)
            (void)snprintf(other, sizeof other, "%s", e->d_name);
    }
    (void)closedir(d);
    atomic_store(&x->other, *other && !journal);
    return *other ? ckpt_fail(err, CKPT_CONFLICT,
                              "%s is not empty: it holds %s; export into a new directory (or "
                              "compare a finished export with ckpt verify)",
                              x->dest, other)
                  : 0;
}

static int open_dest(struct export *x, struct ckpt_err *err)
{
    if (ckptfs_make_folder(x->dest, &x->made, err) < 0)
        return -1;
    x->dir = open(x->dest, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (x->dir < 0)
        return ckpt_fail_errno(err, errno, "%s", x->dest);
    return inspect(x, err);
}

/* ---- resuming ---- */

static bool finished_before(const struct export *x, struct ckpt_item *item)
{
    const json_t *line = json_object_get(x->journal.line, item->path);
    const char *hex = ckpt_json_str(line, "xxh3");
    struct stat st;

    if (!hex || fstatat(x->dir, item->path, &st, AT_SYMLINK_NOFOLLOW) < 0 || !S_ISREG(st.st_mode) ||
        (uint64_t)st.st_size != item->size ||
        json_integer_value(json_object_get(line, "len")) != (json_int_t)item->size ||
        json_integer_value(json_object_get(line, "mtime_ns")) !=
            (json_int_t)st.st_mtim.tv_sec * 1000000000 + st.st_mtim.tv_nsec)
        return false;
    return ckpt_hash_of_hex(hex, &item->hash);
}

/* Hash the first len bytes of a file; false if it is shorter or cannot be read. */
static bool hash_prefix(int fd, uint64_t len, XXH3_state_t *state)
{
    ckpt_cleanup(ckpt_freep) char *buf = malloc(CKPT_PUMP_CHUNK);
    uint64_t off = 0;

    (void)XXH3_128bits_reset(state);
    (void)posix_fadvise(fd, 0, (off_t)len, POSIX_FADV_SEQUENTIAL);
    while (buf && off < len) {
        size_t want = len - off < CKPT_PUMP_CHUNK ? (size_t)(len - off) : CKPT_PUMP_CHUNK;
        if (ckpt_fdio_pread(fd, buf, want, &off) != 0)
            break;
        (void)XXH3_128bits_update(state, buf, want);
    }
    return off == len;
}

/* Resume the temporary file of an item from the length in the journal, if its bytes have the
 * recorded hash. */
static void take_up(const struct export *x, struct ckpt_item *item, const char *temp)
{
    const json_t *line = json_object_get(x->journal.line, item->path);
    const char *hex = ckpt_json_str(line, "xxh3");
    json_int_t len = json_integer_value(json_object_get(line, "len"));
    char found[CKPT_HEX];
    int fd;

    if (!hex || len <= 0 || (uint64_t)len > item->size ||
        (fd = openat(x->dir, temp, O_RDWR | O_CLOEXEC | O_NOFOLLOW)) < 0)
        return;
    XXH3_state_t *state = XXH3_createState();
    XXH128_hash_t hash = {0};
    bool good = state && hash_prefix(fd, (uint64_t)len, state);
    if (good)
        hash = XXH3_128bits_digest(state);
    if (good && strcmp(ckpt_hash_hex(&hash, found), hex) == 0) {
        item->fd = fd;
        item->start = (uint64_t)len;
        item->state = state;
    } else {
        (void)close(fd);
        (void)XXH3_freeState(state);
    }
}

static int resume(struct export *x, struct ckpt_err *err)
{
    for (size_t i = 0; i < x->items->n; i++) {
        struct ckpt_item *item = &x->items->item[i];
        ckpt_cleanup(ckpt_freep) char *temp = temp_of(item->path);
        if (!temp)
            return ckpt_nomem(err);
        if (finished_before(x, item))
            item->start = CKPT_PUMP_SKIP;
        else
            take_up(x, item, temp);
        if (item->start)
            atomic_store(&x->durable, true);
    }
    return 0;
}

/* ---- writing ---- */

static int check_space(const struct export *x, struct ckpt_err *err)
{
    struct statvfs st;
    uint64_t need = 0;

    for (size_t i = 0; i < x->items->n; i++)
        if (x->items->item[i].start != CKPT_PUMP_SKIP)
            need += x->items->item[i].size - x->items->item[i].start;
    /* Only a new export can compare its size with the free space: a resumed one has used some
     * already. */
    if (atomic_load(&x->durable) || fstatvfs(x->dir, &st) < 0 || st.f_blocks == 0)
        return 0;
    uint64_t have = (uint64_t)st.f_bavail * st.f_frsize;
    if (need <= have)
        return 0;
    char a[CKPT_OUT_SIZE], b[CKPT_OUT_SIZE];
    return ckpt_fail(err, CKPT_IO, "%s: no space: the files need %s, there are %s", x->dest,
                     ckpt_out_size(need, a), ckpt_out_size(have, b));
}

static int make_parents(const struct export *x, const char *path, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *copy = strdup(path);

    if (!copy)
        return ckpt_nomem(err);
    for (char *slash = copy; (slash = strchr(slash, '/')); *slash++ = '/') {
        *slash = '\0';
        if (mkdirat(x->dir, copy, 0777) < 0 && errno != EEXIST)
            return ckpt_fail_errno(err, errno, "%s/%s", x->dest, copy);
    }
    return 0;
}

static int open_temp(const struct export *x, struct ckpt_item *item, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *temp = temp_of(item->path);

    if (!temp)
        return ckpt_nomem(err);
    if (make_parents(x, item->path, err) < 0)
        return -1;
    int fd = openat(x->dir, temp, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0666);
    if (fd < 0)
        return ckpt_fail_errno(err, errno, "%s/%s", x->dest, temp);
    /* Reserve the space now, so that a full disk is found at once. Filesystems that cannot reserve
     * space are written to all the same. */
    if (item->size && fallocate(fd, FALLOC_FL_KEEP_SIZE, 0, (off_t)item->size) < 0 &&
        (errno == ENOSPC || errno == EDQUOT || errno == EFBIG)) {
        (void)ckpt_fail_errno(err, errno, "%s/%s, %llu bytes", x->dest, item->path,
                              (unsigned long long)item->size);
        (void)close(fd);
        (void)unlinkat(x->dir, temp, 0);
        return -1;
    }
    item->fd = fd;
    return 0;
}

/* The descriptor of an item's temporary file; -1: it can't be opened. */
static int temp_fd(struct export *x, struct ckpt_item *item, struct ckpt_err *err)
{
    (void)pthread_mutex_lock(&x->lock);
    if (item->fd < 0)
        (void)open_temp(x, item, err);
    const int fd = item->fd;
    (void)pthread_mutex_unlock(&x->lock);
    return fd;
}

static int write_chunk(void *ctx, size_t i, const void *buf, size_t len, uint64_t off,
                       void *scratch, struct ckpt_err *err)
{
    struct export *x = ctx;
    struct ckpt_item *item = &x->items->item[i];
    const int fd = temp_fd(x, item, err);

    (void)scratch;
    if (fd < 0)
        return -1;
    const int rc = ckpt_fdio_pwrite(fd, buf, len, &off);
    return rc == 0 ? 0
                   : ckpt_fail_errno(err, rc, "writing %s/%s at %llu", x->dest, item->path,
                                     (unsigned long long)off);
}

/* Finish a file: first fsync it, then rename it, then record it in the journal. */
static int complete(struct export *x, struct ckpt_item *item, const char *hex, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *temp = temp_of(item->path);
    const int fd = item->fd;
    struct stat st;

    if (!temp)
        return ckpt_nomem(err);
    if (ftruncate(fd, (off_t)item->size) < 0 || fsync(fd) < 0 || fstat(fd, &st) < 0 ||
        renameat(x->dir, temp, x->dir, item->path) < 0)
        return ckpt_fail_errno(err, errno, "%s/%s", x->dest, item->path);
    ckpt_closep(&item->fd);
    return ckpt_journal_add(&x->journal, item->path, item->size,
                            (int64_t)st.st_mtim.tv_sec * 1000000000 + st.st_mtim.tv_nsec, hex, err);
}

static int mark(void *ctx, size_t i, uint64_t off, struct ckpt_err *err)
{
    struct export *x = ctx;
    struct ckpt_item *item = &x->items->item[i];
    char hex[CKPT_HEX];
    int rc;

    if (temp_fd(x, item, err) < 0)
        return -1;
    (void)ckpt_hash_hex(&item->hash, hex);
    if (off == item->size)
        rc = complete(x, item, hex, err);
    else if (fdatasync(item->fd) < 0)
        rc = ckpt_fail_errno(err, errno, "%s/%s", x->dest, item->path);
    else
        rc = ckpt_journal_add(&x->journal, item->path, off, 0, hex, err);
    if (rc == 0)
        atomic_store(&x->durable, true);
    return rc;
}

/* ---- comparing a finished export ---- */

static int compare_chunk(void *ctx, size_t i, const void *buf, size_t len, uint64_t off,
                         void *scratch, struct ckpt_err *err)
{
    struct export *x = ctx;
    const char *path = x->items->item[i].path;
    ckpt_cleanup(ckpt_closep) int fd = openat(x->dir, path, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
    uint64_t at = off;
    const int rc = fd < 0 ? errno : ckpt_fdio_pread(fd, scratch, len, &at);

    if (rc)
        return ckpt_fail_errno(err, ckpt_fdio_errno(rc), "%s/%s", x->dest, path);
    const size_t same = ckpt_same_bytes(buf, scratch, len);
    if (same == len)
        return 0;
    atomic_store(&x->other, true);
    return ckpt_fail(err, CKPT_CONFLICT,
                     "%s is not empty: it holds another export, or this one was changed: %s "
                     "differs at byte %llu; export into a new directory",
                     x->dest, path, (unsigned long long)(off + same));
}

/* ---- the end ---- */

static void sync_parent(const char *dest)
{
    ckpt_cleanup(ckpt_freep) char *path = ckpt_asprintf("%s/..", dest);
    ckpt_cleanup(ckpt_closep) int fd = path ? open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;

    if (fd >= 0)
        (void)fsync(fd);
}

/* Sync every directory that got a name, DEST last; delete the journal when all others are on disk.
 */
static int settle(struct export *x, struct ckpt_err *err)
{
    for (size_t i = 0; i < x->items->n; i++) {
        ckpt_cleanup(ckpt_freep) char *dir = strdup(x->items->item[i].path);
        for (char *slash; dir && (slash = strrchr(dir, '/'));) {
            *slash = '\0';
            ckpt_cleanup(ckpt_closep) int fd =
                openat(x->dir, dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
            if (fd < 0 || fsync(fd) < 0)
                return ckpt_fail_errno(err, errno, "%s/%s", x->dest, dir);
        }
    }
    if (fsync(x->dir) < 0 || unlinkat(x->dir, ckpt_journal_name, 0) < 0 || fsync(x->dir) < 0)
        return ckpt_fail_errno(err, errno, "%s", x->dest);
    sync_parent(x->dest);
    return 0;
}

/* Delete what was created, if a later run could not use any of it. */
static void clean_up(struct export *x, bool of_other_save)
{
    for (size_t i = 0; i < x->items->n; i++) {
        ckpt_cleanup(ckpt_freep) char *temp = temp_of(x->items->item[i].path);
        if (temp && (of_other_save || x->items->item[i].fd >= 0))
            (void)unlinkat(x->dir, temp, 0);
        if (of_other_save)
            (void)unlinkat(x->dir, x->items->item[i].path, 0);
        ckpt_cleanup(ckpt_freep) char *dir = strdup(x->items->item[i].path);
        for (char *slash; dir && (slash = strrchr(dir, '/'));) {
            *slash = '\0';
            (void)unlinkat(x->dir, dir, AT_REMOVEDIR); /* fails if the directory is not empty */
        }
    }
    (void)unlinkat(x->dir, ckpt_journal_name, 0);
    ckptfs_remove_made(x->dest, x->made);
}

static int report(const struct ckpt_export *e, const struct export *x, double seconds,
                  struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *j = NULL;
    char hex[CKPT_HEX], size[CKPT_OUT_SIZE], rate[CKPT_OUT_SIZE];
    XXH128_hash_t whole;

    if (ckpt_hash_whole(x->items, &whole, err) < 0)
        return -1;
    (void)ckpt_hash_hex(&whole, hex);
    j = json_pack("{s:o, s:I, s:f, s:b, s:b, s:s, s:o}", "dest", ckptfs_json_text(x->dest), "bytes",
                  (json_int_t)x->items->bytes, "seconds", seconds, "resumed", x->resumed,
                  "already_complete", x->finished, "xxh3", hex, "files", ckpt_hash_list(x->items));
    if (e->step)
        (void)json_object_set_new(j, "step", ckptfs_json_text(e->step));
    if (e->tool->json)
        return (e->step ? ckpt_out_json_line : ckpt_out_json)(j, err);
    (void)printf(
        "%s: %zu files, %s in %.1f s (%s/s)%s\nxxh3 %s\n", x->dest, x->items->n,
        ckpt_out_size(x->items->bytes, size), seconds,
        ckpt_out_size(seconds > 0 ? (uint64_t)((double)x->items->bytes / seconds) : 0, rate),
        x->finished  ? ", already complete: every byte was compared"
        : x->resumed ? ", resumed"
                     : "",
        hex);
    return 0;
}

/* Write the files or, if DEST has them all, compare them. */
static int transfer(struct ckpt_export *e, struct export *x, struct ckpt_view *view,
                    struct ckpt_err *err)
{
    const struct ckpt_pump pump = {.view = view,
                                   .items = x->items,
                                   .jobs = e->tool->jobs,
                                   .quiet = e->tool->quiet,
                                   .hash = true,
                                   .ctx = x,
                                   .sink = x->finished ? compare_chunk : write_chunk,
                                   .mark = x->finished ? NULL : mark};
    double seconds;

    if (!atomic_load(&x->durable)) /* nothing is there from an earlier export */
        ckpt_view_will_read(view);
    if (ckpt_pump_run(&pump, &seconds, err) < 0 || ckpt_view_verify_unchanged(view, err) < 0 ||
        (!x->finished && settle(x, err) < 0))
        return -1;
    e->wrote = !x->finished;
    atomic_store(&e->writing, false);
    return report(e, x, seconds, err);
}

static int prepare(struct export *x, const struct ckpt_view *view, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *source = ckpt_asprintf(
        "%s, generation %016llx, %llu bytes", ckpt_view_source(view),
        (unsigned long long)ckpt_view_generation(view), (unsigned long long)x->items->bytes);
    bool fresh;

    if (!source)
        return ckpt_nomem(err);
    if (open_dest(x, err) < 0)
        return -1;
    if (x->finished)
        return 0;
    if (ckpt_journal_open(x->dir, source, &x->journal, &fresh, err) < 0)
        return ckpt_err_in(err, "%s", x->dest);
    x->resumed = !fresh;
    if (!fresh && resume(x, err) < 0)
        return -1;
    return check_space(x, err);
}

static void release(struct export *x)
{
    ckpt_journal_close(&x->journal);
    ckpt_closep(&x->dir);
    (void)pthread_mutex_destroy(&x->lock);
}

/* Choose the files to write. Nothing can load a model directory without a config, so that must be
 * asked for. */
static int choose(const struct ckpt_tool *t, struct ckpt_view *view, struct ckpt_items *items,
                  struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *text = NULL;
    ckpt_cleanup(ckpt_json_decrefp) json_t *info = NULL;

    if (ckpt_items_files(view, items, err) < 0 || ckpt_view_info(view, &text, err) < 0 ||
        ckpt_out_parse(text, &info, err) < 0)
        return -1;
    const char *word = ckpt_json_str(info, "view");
    const bool model = strcmp(word, "hf") == 0 || strcmp(word, "memory") == 0;
    if (t->weights_only && t->no_weights)
        return ckpt_fail(err, CKPT_USAGE, "--weights-only and --no-weights leave nothing");
    if ((t->weights_only || t->no_weights) && !model && strcmp(word, "raw") != 0)
        return ckpt_fail(err, CKPT_USAGE,
                         "%s: view=%s is written whole: its tensors and its other files "
                         "belong together",
                         t->no_weights ? "--no-weights" : "--weights-only", word);
    if (model && !t->weights_only && !ckpt_items_have_config(items))
        return ckpt_fail(err, CKPT_MISSING,
                         "'%s' holds no config.json that can be read: name the model with base=DIR "
                         "or base=ORG/NAME, follow a link that leads out with -o follow_symlinks, "
                         "or write the weights alone with --weights-only",
                         t->run);
    if (t->weights_only || t->no_weights)
        ckpt_items_keep(items, t->weights_only);
    return 0;
}

int ckpt_export(struct ckpt_export *e, struct ckpt_view *view, const char *dest,
                struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_items_release) struct ckpt_items items = {0};
    struct export x = {.items = &items, .dest = dest, .dir = -1};

    e->wrote = false;
    if (choose(e->tool, view, &items, err) < 0)
        return -1;
    (void)pthread_mutex_init(&x.lock, NULL);
    int rc = prepare(&x, view, err);
    atomic_store(&e->writing, rc == 0 && !x.finished);
    if (rc == 0 && !(x.finished && e->only_new))
        rc = transfer(e, &x, view, err);
    atomic_store(&e->writing, false);
    if (rc < 0 && x.journal.file) {
        /* the files on disk belong to a save that no longer exists, or to no single save */
        const bool stale = err->code == CKPT_STALE;
        if (atomic_load(&x.durable) && !stale)
            (void)fprintf(stderr, "ckpt: what is written is kept: the same command resumes it\n");
        else
            clean_up(&x, stale);
    } else if (rc < 0) {
        ckptfs_remove_made(x.dest, x.made);
    }
    e->compared = rc == 0 && !e->wrote && !e->only_new;
    e->other = rc < 0 && atomic_load(&x.other);
    release(&x);
    return rc;
}
