/* SPDX-License-Identifier: Apache-2.0 */
/* Writing a view as real files, by one process or by many.
 *
 * The work lies in a folder beside DEST (job.h), so that DEST appears whole or not at all. Each
 * file is written as .NAME.partial, fsynced and renamed. A journal records what is on disk, so that
 * repeating the command resumes an interrupted export: finished files are kept; of an unfinished
 * file, the prefix recorded in the journal is read back and compared with its hash. A file that is
 * divided among processes is written in units; when all are there, one process reads it back for
 * its hash. At the end DEST holds the view's files and nothing else.
 *
 * One process is the case of one part. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/magic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/err.h"
#include "base/fdio.h"
#include "base/json.h"
#include "base/mem.h"
#include "base/sort.h"
#include "base/str.h"
#include "common.h"
#include "out.h"
#include "tool/export/export.h"
#include "tool/pump.h"

/* A job whose folder disappears while it is opened was finished by another process: it is looked at
 * again so often, after a moment. */
enum { MOST_TRIES = 50, AGAIN_MS = 100 };

/* Files of SMALL bytes at most are brought to disk by the hundred. A filesystem with a journal of
 * its own commits that when the first file of them is synced, and has little to do for the others;
 * alone, every file costs two commits. With half as many there are twice as many commits, with
 * twice as many an export that is killed writes more of them again. */
enum { SMALL = 1 << 20, SETTLED_TOGETHER = 256 };

/* No piece. */
static const size_t NOTHING = SIZE_MAX;

char *ckpt_export_temp(const char *path)
{
    const char *slash = strrchr(path, '/');
    int dir = slash ? (int)(slash + 1 - path) : 0;
    return ckpt_asprintf("%.*s.%s.partial", dir, path, path + dir);
}

int ckpt_export_folders(int dir, const char *path, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *copy = strdup(path);

    if (!copy)
        return ckpt_nomem(err);
    for (char *slash = copy; (slash = strchr(slash, '/')); *slash++ = '/') {
        *slash = '\0';
        if (mkdirat(dir, copy, 0777) < 0 && errno != EEXIST)
            return ckpt_fail_errno(err, errno, "making '%s'", copy);
    }
    return 0;
}

/* Bring a file to disk and give it its name. *ret: the journal's line that says so. fd is -1: the
 * temporary file is opened for this. */
static int settle(const struct exporting *x, size_t item, int fd, const XXH128_hash_t *hash,
                  json_t **ret, struct ckpt_err *err)
{
    const struct ckpt_item *file = &x->items->item[item];
    ckpt_cleanup(ckpt_freep) char *temp = ckpt_export_temp(file->path);
    ckpt_cleanup(ckpt_closep) int own = -1;
    struct stat st;

    if (!temp)
        return ckpt_nomem(err);
    if (fd < 0)
        fd = own = openat(x->job.files, temp, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0 || ftruncate(fd, (off_t)file->size) < 0 || fsync(fd) < 0 || fstat(fd, &st) < 0 ||
        renameat(x->job.files, temp, x->job.files, file->path) < 0)
        return ckpt_fail_errno(err, errno, "%s/%s/%s", x->job.path, ckpt_job_files, file->path);
    *ret = ckpt_done_line(file->path, file->size, ckpt_job_mtime_ns(&st), hash);
    return *ret ? 0 : ckpt_nomem(err);
}

int ckpt_export_complete(struct exporting *x, size_t item, int fd, const XXH128_hash_t *hash,
                         struct ckpt_err *err)
{
    json_t *line;

    return settle(x, item, fd, hash, &line, err) < 0 ? -1 : ckpt_job_add(&x->job, line, err);
}

/* ---- resuming ---- */

/* A file whose time is not the one of the journal is read back: somebody may have changed it. What
 * is not the view's any more is written again. */
static int check_whole(struct exporting *x, size_t item, bool mine, struct ckpt_err *err)
{
    const char *path = x->items->item[item].path;
    int64_t mtime_ns;

    const bool there = ckpt_dest_has(x, item, &mtime_ns);
    if (there &&
        (!mine || mtime_ns == x->done.file[item].mtime_ns || ckpt_readback_is_intact(x, item)))
        return 0;
    ckpt_done_forget(&x->done, item);
    return there && unlinkat(x->job.files, path, 0) < 0 && errno != ENOENT
               ? ckpt_fail_errno(err, errno, "%s/%s/%s", x->job.path, ckpt_job_files, path)
               : 0;
}

static bool is_mine(const struct exporting *x, size_t item)
{
    for (size_t u = x->spans.first[item]; u < x->spans.first[item + 1]; u++)
        if (x->spans.owner[u] != x->part.index)
            return false;
    return true;
}

/* Compare what the journals say with the files that are there. */
static int check_files(struct exporting *x, struct ckpt_err *err)
{
    for (size_t i = 0; i < x->items->n; i++) {
        struct ckpt_file_done *file = &x->done.file[i];
        ckpt_cleanup(ckpt_freep) char *temp = ckpt_export_temp(x->items->item[i].path);
        if (!temp)
            return ckpt_nomem(err);
        if (file->whole && check_whole(x, i, is_mine(x, i), err) < 0)
            return -1;
        if (!file->whole && (file->has_units || file->prefix.len) &&
            faccessat(x->job.files, temp, F_OK, AT_SYMLINK_NOFOLLOW) < 0)
            ckpt_done_forget(&x->done, i);
        if (file->whole || file->has_units || file->prefix.len)
            atomic_store(&x->durable, true);
    }
    return 0;
}

static int shorter(const void *a, const void *b)
{
    const struct ckpt_prefix *x = a, *y = b;
    return ckpt_u64_cmp(x->len, y->len);
}

/* Hash a file from its beginning, and keep in *ret_state the hash of the longest prefix whose hash
 * is the recorded one; returns the length of that, or 0. */
static uint64_t hash_prefix(int fd, const struct ckpt_file_done *file, XXH3_state_t *ret_state)
{
    ckpt_cleanup(ckpt_freep) char *buf = malloc(CKPT_PUMP_CHUNK);
    XXH3_state_t *state = XXH3_createState();
    uint64_t off = 0, good = 0;

    if (state)
        (void)XXH3_128bits_reset(state);
    (void)posix_fadvise(fd, 0, 0, POSIX_FADV_SEQUENTIAL);
    for (size_t i = 0; buf && state && i < file->prefix.len; i++) {
        const struct ckpt_prefix *prefix = &file->prefix.ptr[i];
        while (off < prefix->len) {
            const uint64_t left = prefix->len - off;
            const size_t want = left < CKPT_PUMP_CHUNK ? (size_t)left : CKPT_PUMP_CHUNK;
            if (ckpt_fdio_pread(fd, buf, want, &off) != 0)
                break;
            (void)XXH3_128bits_update(state, buf, want);
        }
        if (off != prefix->len)
            break;
        const XXH128_hash_t hash = XXH3_128bits_digest(state);
        if (!XXH128_isEqual(hash, prefix->hash))
            continue;
        good = prefix->len;
        XXH3_copyState(ret_state, state);
    }
    (void)XXH3_freeState(state);
    return good;
}

/* Resume the temporary file of a piece, if its bytes have a recorded hash. */
static int take_up(const struct exporting *x, size_t item, struct ckpt_item *piece,
                   struct ckpt_err *err)
{
    struct ckpt_file_done *file = &x->done.file[item];
    ckpt_cleanup(ckpt_freep) char *temp = ckpt_export_temp(piece->path);
    XXH3_state_t *state = file->prefix.len ? XXH3_createState() : NULL;

    if (!temp || (file->prefix.len && !state)) {
        (void)XXH3_freeState(state);
        return ckpt_nomem(err);
    }
    if (!state)
        return 0;
    ckpt_sort(file->prefix.ptr, file->prefix.len, shorter);
    const int fd = openat(x->job.files, temp, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    piece->start = fd < 0 ? 0 : hash_prefix(fd, file, state);
    if (piece->start) {
        piece->fd = fd;
        piece->state = state;
        return 0;
    }
    ckpt_closep(&(int){fd});
    (void)XXH3_freeState(state);
    return 0;
}

/* ---- what this process writes ---- */

static int add_piece(struct exporting *x, struct ckpt_piece piece, uint64_t from, uint64_t to,
                     struct ckpt_err *err)
{
    if (ckpt_items_add_part(&x->pieces, &x->items->item[piece.item], from, to, err) < 0)
        return -1;
    x->piece[x->pieces.n - 1] = piece;
    return 0;
}

/* Is a file written as a whole, by this process? One of which somebody has written units is not. */
static bool is_one_piece(const struct exporting *x, size_t item)
{
    return is_mine(x, item) && (x->finished || !x->done.file[item].has_units);
}

/* List the pieces that lack of this part. */
static int list_pieces(struct exporting *x, struct ckpt_err *err)
{
    ckpt_items_release(&x->pieces);
    x->pieces = (struct ckpt_items){0};
    free(x->piece);
    x->piece = calloc(x->spans.n + 1, sizeof *x->piece);
    if (!x->piece)
        return ckpt_nomem(err);
    for (size_t i = 0; i < x->items->n; i++) {
        const size_t first = x->spans.first[i];
        const bool one = is_one_piece(x, i);
        if (one && !x->done.file[i].whole &&
            add_piece(x, (struct ckpt_piece){i, first, true}, 0, x->items->item[i].size, err) < 0)
            return -1;
        for (size_t u = first; !one && u < x->spans.first[i + 1]; u++) {
            uint64_t from, to;
            (void)ckpt_spans_place(&x->spans, x->items, u, &from, &to);
            if (x->spans.owner[u] == x->part.index && !ckpt_done_has(&x->done, i, u) &&
                add_piece(x, (struct ckpt_piece){i, u, false}, from, to, err) < 0)
                return -1;
        }
    }
    return 0;
}

static int is_held(const struct exporting *x, const struct ckpt_item *piece, size_t holder,
                   struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *who = ckpt_process_text(&x->job.all.ptr[holder]);

    return ckpt_fail(err, CKPT_CONFLICT,
                     "%s: %s lives and writes %s from byte %" PRIu64
                     ", which is of this part, %" PRIu32 "/%" PRIu32
                     ", too: wait for it, or end it, and run this again",
                     x->dest, who ? who : "another process", piece->path, piece->first,
                     x->part.index + 1, x->part.count);
}

/* Claim all units of the pieces. */
static int claim_pieces(struct exporting *x, struct ckpt_err *err)
{
    size_t last = x->spans.n; /* no claim */

    for (size_t k = 0; k < x->pieces.n; k++) {
        const struct ckpt_piece *piece = &x->piece[k];
        const size_t n =
            piece->is_file ? x->spans.first[piece->item + 1] - x->spans.first[piece->item] : 1;
        for (size_t u = piece->unit; u < piece->unit + n; u++) {
            char id[24];
            size_t holder;
            if (x->spans.claim[u] == last)
                continue;
            last = x->spans.claim[u];
            (void)snprintf(id, sizeof id, "%zu", last);
            const int claimed = ckpt_job_claim(&x->job, id, true, &holder, err);
            if (claimed <= 0)
                return claimed < 0 ? -1 : is_held(x, &x->pieces.item[k], holder, err);
        }
    }
    return 0;
}

/* A piece that lacked before it was claimed may have been written in between, by a process that has
 * ended: the journals are read again. */
static int choose_pieces(struct exporting *x, struct ckpt_err *err)
{
    if (list_pieces(x, err) < 0 || claim_pieces(x, err) < 0 || ckpt_rest_refresh(x, err) < 0 ||
        list_pieces(x, err) < 0)
        return -1;
    for (size_t k = 0; k < x->pieces.n; k++)
        if (x->piece[k].is_file && take_up(x, x->piece[k].item, &x->pieces.item[k], err) < 0)
            return -1;
    return 0;
}

/* ---- writing ---- */

/* Only a new export can compare its size with the free space: a resumed one has used some already.
 */
static int check_space(const struct exporting *x, struct ckpt_err *err)
{
    struct statvfs st;
    const uint64_t need = x->items->bytes;

    if (!x->job.is_new || x->resumed || fstatvfs(x->job.files, &st) < 0 || st.f_blocks == 0)
        return 0;
    uint64_t have = (uint64_t)st.f_bavail * st.f_frsize;
    if (need <= have)
        return 0;
    char a[CKPT_OUT_SIZE], b[CKPT_OUT_SIZE];
    return ckpt_fail(err, CKPT_IO, "%s: no space: the files need %s, there are %s", x->dest,
                     ckpt_out_size(need, a), ckpt_out_size(have, b));
}

/* On tmpfs, to reserve space is to allocate every page, for which all threads would wait as long as
 * for half of the writing. */
static bool is_in_memory(int fd)
{
    struct statfs st;

    return fstatfs(fd, &st) == 0 && st.f_type == TMPFS_MAGIC;
}

/* Open the temporary file of a piece, which others may write, too. */
static int open_temp(const struct exporting *x, struct ckpt_item *piece, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *temp = ckpt_export_temp(piece->path);
    const uint64_t len = piece->size - piece->first;

    if (!temp)
        return ckpt_nomem(err);
    int fd = openat(x->job.files, temp, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666);
    if (fd < 0 && errno == ENOENT) {
        if (ckpt_export_folders(x->job.files, piece->path, err) < 0)
            return ckpt_err_in(err, "%s/%s", x->job.path, ckpt_job_files);
        fd = openat(x->job.files, temp, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666);
    }
    if (fd < 0)
        return ckpt_fail_errno(err, errno, "%s/%s/%s", x->job.path, ckpt_job_files, temp);
    /* Reserve the space now, so that a full disk is found at once. Filesystems that cannot reserve
     * space are written to all the same. */
    if (len && !is_in_memory(fd) &&
        fallocate(fd, FALLOC_FL_KEEP_SIZE, (off_t)piece->first, (off_t)len) < 0 &&
        (errno == ENOSPC || errno == EDQUOT || errno == EFBIG)) {
        (void)ckpt_fail_errno(err, errno, "%s/%s/%s, %llu bytes", x->job.path, ckpt_job_files,
                              piece->path, (unsigned long long)len);
        (void)close(fd);
        return -1;
    }
    piece->fd = fd;
    return 0;
}

/* The descriptor of a piece's temporary file; -1: it can't be opened. */
static int temp_fd(struct exporting *x, struct ckpt_item *piece, struct ckpt_err *err)
{
    (void)pthread_mutex_lock(&x->lock);
    if (piece->fd < 0)
        (void)open_temp(x, piece, err);
    const int fd = piece->fd;
    (void)pthread_mutex_unlock(&x->lock);
    return fd;
}

static int write_chunk(void *ctx, size_t i, const void *buf, size_t len, uint64_t off,
                       void *scratch, struct ckpt_err *err)
{
    struct exporting *x = ctx;
    struct ckpt_item *piece = &x->pieces.item[i];
    const int fd = temp_fd(x, piece, err);

    (void)scratch;
    if (fd < 0)
        return -1;
    const int rc = ckpt_fdio_pwrite(fd, buf, len, &off);
    /* The disk begins now, so that fdatasync has less to wait for, in which no thread decodes. */
    if (rc == 0)
        (void)sync_file_range(fd, (off_t)(off - len), (off_t)len, SYNC_FILE_RANGE_WRITE);
    return rc == 0 ? 0
                   : ckpt_fail_errno(err, rc, "writing %s/%s/%s at %llu", x->job.path,
                                     ckpt_job_files, piece->path, (unsigned long long)off);
}

/* Record that a unit, or a file up to `off`, is on disk. */
static int record(struct exporting *x, size_t i, uint64_t off, struct ckpt_err *err)
{
    struct ckpt_item *piece = &x->pieces.item[i];

    if (fdatasync(piece->fd) < 0)
        return ckpt_fail_errno(err, errno, "%s/%s/%s", x->job.path, ckpt_job_files, piece->path);
    if (x->piece[i].is_file)
        return ckpt_job_add(&x->job, ckpt_done_line(piece->path, off, 0, &piece->hash), err);
    if (off < piece->size)
        return 0;
    ckpt_closep(&piece->fd);
    return ckpt_job_add(
        &x->job, ckpt_done_unit_line(piece->path, piece->first, off - piece->first, &piece->hash),
        err);
}

/* Bring the small files that are written to disk, and record them. */
static int settle_small(struct exporting *x, const size_t *written, size_t n, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *lines = n ? json_array() : NULL;

    for (size_t i = 0; i < n; i++) {
        json_t *line;
        if (settle(x, x->piece[written[i]].item, -1, &x->pieces.item[written[i]].hash, &line, err) <
            0)
            return -1;
        ckpt_json_append(&lines, line);
    }
    if (n && ckpt_job_add_all(&x->job, ckpt_steal(&lines), err) < 0)
        return -1;
    if (n)
        atomic_store(&x->durable, true);
    return 0;
}

/* A small file is written: settle those that are, when there are enough or, with NOTHING, now. */
static int note_small(struct exporting *x, size_t piece, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) size_t *taken = NULL;
    size_t n = 0;
    int rc = 0;

    (void)pthread_mutex_lock(&x->lock);
    if (piece != NOTHING)
        rc = ckpt_vec_push(&x->written, piece);
    if (rc == 0 && (piece == NOTHING || x->written.len == SETTLED_TOGETHER)) {
        taken = ckpt_steal(&x->written.ptr);
        n = x->written.len;
        ckpt_vec_release(&x->written);
    }
    (void)pthread_mutex_unlock(&x->lock);
    return rc < 0 ? ckpt_nomem(err) : settle_small(x, taken, n, err);
}

static int mark(void *ctx, size_t i, uint64_t off, struct ckpt_err *err)
{
    struct exporting *x = ctx;
    struct ckpt_item *piece = &x->pieces.item[i];

    if (temp_fd(x, piece, err) < 0)
        return -1;
    const bool whole = x->piece[i].is_file && off == piece->size;
    if (whole && off <= SMALL) {
        ckpt_closep(&piece->fd);
        return note_small(x, i, err);
    }
    if ((whole ? ckpt_export_complete(x, x->piece[i].item, piece->fd, &piece->hash, err)
               : record(x, i, off, err)) < 0)
        return -1;
    if (whole)
        ckpt_closep(&piece->fd);
    atomic_store(&x->durable, true);
    return 0;
}

/* ---- comparing a finished export ---- */

static int compare_chunk(void *ctx, size_t i, const void *buf, size_t len, uint64_t off,
                         void *scratch, struct ckpt_err *err)
{
    struct exporting *x = ctx;
    const char *path = x->pieces.item[i].path;
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

/* ---- an export ---- */

/* Give the items the hashes that the pieces or the journals have. */
static void collect_hashes(const struct exporting *x)
{
    for (size_t i = 0; i < x->items->n && !x->finished; i++)
        x->items->item[i].hash = x->done.file[i].hash;
    for (size_t k = 0; k < x->pieces.n && x->finished; k++)
        x->items->item[x->piece[k].item].hash = x->pieces.item[k].hash;
}

/* How this process's share of an export went. */
struct result {
    bool whole, named; /* DEST is there; this process has made it */
    double seconds;
};

/* Write the pieces or, if DEST has everything, compare them. */
static int transfer(struct ckpt_export *e, struct exporting *x, struct ckpt_err *err)
{
    const bool one = x->part.count == 1;
    const struct ckpt_pump pump = {.view = x->view,
                                   .items = &x->pieces,
                                   .jobs = x->jobs,
                                   .quiet = e->tool->quiet,
                                   .hash = !x->finished || one,
                                   .ctx = x,
                                   .sink = x->finished ? compare_chunk : write_chunk,
                                   .mark = x->finished ? NULL : mark};
    struct result r = {.whole = x->finished, .named = x->finished && one};

    if (one && !atomic_load(&x->durable)) /* nothing is there from an earlier export */
        ckpt_view_will_read(x->view);
    int rc = ckpt_pump_run(&pump, &r.seconds, err);
    if (note_small(x, NOTHING, rc == 0 ? err : NULL) < 0) /* a resumed export needs them, too */
        rc = -1;
    /* who makes DEST looks at the checkpoint then: of one process, that is now */
    if (rc < 0 || ((x->finished || !one) && ckpt_view_verify_unchanged(x->view, err) < 0) ||
        (!x->finished && ckpt_rest_finish(x, &r.whole, &r.named, err) < 0))
        return -1;
    e->wrote = r.named && !x->finished;
    atomic_store(&e->writing, false);
    collect_hashes(x);
    return r.named ? ckpt_report_whole(e, x, r.seconds, err)
                   : ckpt_report_part(e, x, r.whole, r.seconds, err);
}

/* The command line of this process, for messages of others. The caller frees it; NULL: no memory.
 */
static char *command_line(void)
{
    char text[240];
    ckpt_cleanup(ckpt_closep) int fd = open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
    const ssize_t n = fd < 0 ? 0 : read(fd, text, sizeof text);

    for (ssize_t i = 0; i < n; i++)
        if (text[i] == '\0')
            text[i] = ' ';
    return n > 0 ? ckpt_asprintf("%.*s%s", (int)(n - 1), text, n == sizeof text ? "..." : "")
                 : strdup("");
}

/* Describe the job, upon which all its processes agree: the first one writes it down. NULL: no
 * memory. */
static json_t *describe(const struct exporting *x)
{
    ckpt_cleanup(ckpt_freep) char *command = command_line();
    json_t *files = json_array();

    for (size_t i = 0; i < x->items->n; i++)
        ckpt_json_append(&files,
                         json_pack("{s:o, s:I}", "name", ckptfs_json_text(x->items->item[i].path),
                                   "bytes", (json_int_t)x->items->item[i].size));
    return !command ? (json_decref(files), NULL)
                    : json_pack("{s:o, s:s, s:I, s:I, s:o, s:o}", "export",
                                ckptfs_json_text(x->source), "only", x->only, "cut",
                                (json_int_t)x->spans.cut, "xxhash", (json_int_t)XXH_versionNumber(),
                                "command", ckptfs_json_text(command), "files", files);
}

/* Is there something of processes that were killed, or have failed? */
static bool has_dead(const struct exporting *x)
{
    for (size_t i = 0; i < x->job.all.len; i++) {
        const struct ckpt_process *p = &x->job.all.ptr[i];
        if (strcmp(p->name, x->job.self) != 0 && !p->is_good && !p->lives)
            return true;
    }
    return false;
}

/* Meet the other processes in the work folder, and choose what to write. */
static int join(struct exporting *x, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *what = describe(x);

    if (!what)
        return ckpt_nomem(err);
    if (ckpt_job_open(&x->job, x->above, x->work, x->shown, what, err) < 0)
        return -1;
    x->joined = x->job.files >= 0;
    if (!x->joined)
        return ckpt_fail(err, CKPT_MISSING, "%s: another process is just ending there",
                         x->job.path);
    if ((x->old && ckpt_dest_adopt(x, err) < 0) ||
        ckpt_job_begin(&x->job, x->part.index + 1, x->part.count, err) < 0 ||
        ckpt_dest_take_old(x, err) < 0 || ckpt_rest_refresh(x, err) < 0)
        return -1;
    x->resumed = x->resumed || has_dead(x);
    return check_files(x, err) < 0 || check_space(x, err) < 0 ? -1 : choose_pieces(x, err);
}

static int prepare(struct exporting *x, struct ckpt_err *err)
{
    if (ckpt_dest_open(x, err) < 0 ||
        ckpt_spans_divide(x->items, ckpt_job_usual_limits().cut, x->part.count, &x->spans, err) <
            0 ||
        ckpt_done_init(&x->done, x->items, &x->spans, err) < 0)
        return -1;
    return x->finished ? list_pieces(x, err) : join(x, err);
}

/* Close everything, and forget it. */
static void close_all(struct exporting *x)
{
    ckpt_job_release(&x->job);
    ckpt_done_release(&x->done);
    ckpt_spans_release(&x->spans);
    ckpt_items_release(&x->pieces);
    x->pieces = (struct ckpt_items){0};
    free(ckpt_steal(&x->piece));
    x->joined = false;
    ckpt_dest_release(x);
}

/* The job's folder has gone while this process looked at it: it was finished, and is deleted. One
 * that was left so by a process that was killed is deleted here. */
static bool has_gone(struct exporting *x, const struct ckpt_err *err)
{
    if (err->code != CKPT_MISSING || !x->job.path || x->job.dir < 0 || !ckpt_job_is_named(&x->job))
        return false;
    ckpt_job_end(&x->job, true);
    if (ckpt_job_refresh(&x->job, NULL, NULL, NULL) == 0 && !ckpt_job_other(&x->job))
        ckpt_job_remove(&x->job);
    return true;
}

/* Prepare, again if another process finishes the job just now. */
static int prepare_again(struct exporting *x, struct ckpt_err *err)
{
    for (int tries = 0;; tries++) {
        struct ckpt_err why = {0};
        if (prepare(x, &why) == 0)
            return 0;
        if (tries == MOST_TRIES || !has_gone(x, &why))
            return ckpt_err_move(err, &why);
        close_all(x);
        ckpt_pause_ms(AGAIN_MS);
    }
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

/* Leave behind, after a failure, what the same command resumes, or nothing. */
static void give_up(struct exporting *x, bool stale)
{
    ckpt_job_end(&x->job, false);
    /* Which others live is known when this one is known to have ended: of two that end at once, one
     * finds nobody else. */
    const bool alone = x->joined && ckpt_dest_take_old(x, NULL) == 0 &&
                       ckpt_rest_refresh(x, NULL) == 0 && !ckpt_job_other(&x->job);
    const bool durable = x->joined && (atomic_load(&x->durable) || ckpt_done_any(&x->done));
    if (alone && (!durable || stale)) /* stale files are of a save that no longer exists */
        ckpt_dest_clean(x);
    else if (durable && !stale)
        (void)fprintf(stderr, "ckpt: what is written is kept: the same command resumes it\n");
    if (x->made)
        ckptfs_remove_made(x->parent, x->made);
}

int ckpt_export(struct ckpt_export *e, struct ckpt_view *view, const char *dest,
                struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_items_release) struct ckpt_items items = {0};
    struct exporting x = {
        .view = view, .items = &items, .jobs = e->tool->jobs, .dest = dest, .dir = -1, .above = -1};

    e->wrote = false;
    if (ckpt_part_find(e->tool->part, e->tool->alone, &x.part, err) < 0 ||
        choose(e->tool, view, &items, err) < 0)
        return -1;
    x.only = e->tool->weights_only ? "weights" : e->tool->no_weights ? "others" : "all";
    x.source = ckpt_asprintf("%s, generation %016llx, %llu bytes", ckpt_view_source(view),
                             (unsigned long long)ckpt_view_generation(view),
                             (unsigned long long)items.bytes);
    if (!x.source)
        return ckpt_nomem(err);
    (void)pthread_mutex_init(&x.lock, NULL);
    int rc = prepare_again(&x, err);
    atomic_store(&e->writing, rc == 0 && !x.finished);
    if (rc == 0 && !(x.finished && e->only_new))
        rc = transfer(e, &x, err);
    atomic_store(&e->writing, false);
    if (rc < 0)
        give_up(&x, err->code == CKPT_STALE);
    else if (x.finished)
        ckpt_dest_tidy(&x);
    e->compared = rc == 0 && x.finished && !e->only_new;
    e->other = rc < 0 && atomic_load(&x.other);
    if (rc == 0 && x.job.self && ckpt_job_is_named(&x.job)) {
        ckpt_job_end(&x.job, true);
        ckpt_job_remove(&x.job);
    }
    close_all(&x);
    free(x.source);
    (void)pthread_mutex_destroy(&x.lock);
    return rc;
}
