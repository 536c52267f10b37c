/* SPDX-License-Identifier: Apache-2.0 */
/* ckpt delta: a directory with what has changed from A to B, as a trainer writes it for its
 * inference engines, in one of the forms that the library knows (ckpt_changes_form_at). Threads
 * compare tensors; what they compress is collected in memory, and written as a file when there is
 * enough of it. The index, which makes the version complete, comes last. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/err.h"
#include "base/fdio.h"
#include "base/json.h"
#include "base/mem.h"
#include "base/par.h"
#include "base/str.h"
#include "common.h"
#include "out.h"
#include "tool.h"
#include "tool/pump.h"

enum { FILE_BYTES = 256 << 20 };

/* The names of files in OUT. LOCK is there, and locked, while a delta is written. */
#define LOCK ".ckptfs-delta"
#define PARTIAL_INDEX ".index.partial"

struct blob {
    size_t tensor;
    struct ckpt_change change;
};

struct delta {
    const struct ckpt_tool *tool;
    struct ckpt_view *from, *to;
    const char *dest;
    int dir, lock; /* OUT; the open LOCK, which this process has locked; or -1 */
    size_t made;   /* so many folders were made: OUT, and those above it */
    bool finished;
    const struct ckpt_changes_form *form;
    struct ckpt_changes all; /* what becomes the index; under the mutex, as what follows it */
    struct ckpt_progress bar;
    pthread_mutex_t mutex; /* protects what follows */
    struct blob *blob;     /* what goes into the next file; room for all tensors */
    size_t nblob;
    uint64_t held;               /* bytes of them */
    struct ckpt_changed *tensor; /* those of `all`; room for all tensors */
    uint64_t done, changed;
    size_t nchanged;
};

static int fail_file(const struct delta *d, const char *what, const char *name, int e,
                     struct ckpt_err *err)
{
    return ckpt_fail_errno(err, ckpt_fdio_errno(e), "%s '%s/%s'", what, d->dest, name);
}

/* ---- OUT ---- */

/* Is it a name that a delta gives to a file before its index is there? */
static bool is_ours(const char *name)
{
    const struct ckpt_changes_form *form;
    bool ours = strcmp(name, PARTIAL_INDEX) == 0;

    for (size_t i = 0; (form = ckpt_changes_form_at(i)); i++)
        ours |= form->is_file(name);
    return ours;
}

/* Delete what a delta without an index has left, where `ours`; *ret_other is the name of an entry
 * that stays, "" if there is none. */
static int clear(const struct delta *d, bool ours, char ret_other[300], struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_closep) int copy = openat(d->dir, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *all = copy >= 0 ? fdopendir(copy) : NULL;

    *ret_other = '\0';
    if (!all)
        return fail_file(d, "listing", ".", errno, err);
    copy = -1; /* it is all's */
    for (struct dirent *e; (e = readdir(all));) {
        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0 ||
            strcmp(e->d_name, LOCK) == 0)
            continue;
        if (!ours || !is_ours(e->d_name) || unlinkat(d->dir, e->d_name, 0) < 0)
            (void)snprintf(ret_other, 300, "%s", e->d_name);
    }
    (void)closedir(all);
    return 0;
}

/* Lock OUT. *ret_new: no delta that was interrupted is there. A delta that ends removes the lock's
 * file, so one that is locked without a name is another's. */
static int lock_dest(struct delta *d, bool *ret_new, struct ckpt_err *err)
{
    const int flags = O_RDWR | O_CLOEXEC | O_NOFOLLOW;
    struct stat st;

    *ret_new = false;
    if ((d->lock = openat(d->dir, LOCK, flags)) < 0 && errno == ENOENT) {
        d->lock = openat(d->dir, LOCK, flags | O_CREAT | O_EXCL, 0666);
        *ret_new = d->lock >= 0;
    }
    const int e = d->lock < 0 ? errno : 0;
    if (e && e != EEXIST)
        return fail_file(d, "making", LOCK, e, err);
    if (!e && flock(d->lock, LOCK_EX | LOCK_NB) == 0 && fstat(d->lock, &st) == 0 && st.st_nlink)
        return 0;
    ckpt_closep(&d->lock);
    return ckpt_fail(err, CKPT_CONFLICT, "another ckpt delta is writing to '%s'", d->dest);
}

/* Does OUT have an index, of any form? */
static bool has_index(const struct delta *d)
{
    const struct ckpt_changes_form *form;

    for (size_t i = 0; (form = ckpt_changes_form_at(i)); i++)
        if (faccessat(d->dir, form->index, F_OK, 0) == 0)
            return true;
    return false;
}

/* OUT is made, or is there: empty, or with what an interrupted delta has left, which is deleted. */
static int open_dest(struct delta *d, struct ckpt_err *err)
{
    char other[300];
    bool is_new;

    if (ckptfs_make_folder(d->dest, &d->made, err) < 0)
        return -1;
    d->dir = open(d->dest, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (d->dir < 0)
        return ckpt_fail_errno(err, errno, "opening '%s'", d->dest);
    if (lock_dest(d, &is_new, err) < 0)
        return -1;
    if (has_index(d)) {
        d->finished = true;
        return ckpt_fail(err, CKPT_USAGE, "'%s' has a finished version already: remove it first",
                         d->dest);
    }
    if (clear(d, !is_new, other, err) < 0)
        return -1;
    if (!*other)
        return 0;
    d->finished = true;
    return ckpt_fail(err, CKPT_CONFLICT,
                     "'%s' is not empty: it holds %s; write into a new directory", d->dest, other);
}

/* Leave OUT to others. A delta that has failed leaves nothing. */
static void leave_dest(struct delta *d)
{
    char other[300];

    if (d->lock >= 0 && !d->finished)
        (void)clear(d, true, other, NULL);
    if (d->lock >= 0)
        (void)unlinkat(d->dir, LOCK, 0);
    ckpt_closep(&d->lock);
    ckpt_closep(&d->dir);
    if (!d->finished)
        ckptfs_remove_made(d->dest, d->made);
}

static void delta_release(struct delta *d)
{
    ckpt_view_release(d->from);
    ckpt_view_release(d->to);
    for (size_t i = 0; i < d->nblob; i++)
        free(d->blob[i].change.data);
    free(d->blob);
    free(d->tensor);
    leave_dest(d);
    (void)pthread_mutex_destroy(&d->mutex);
}

/* ---- files ---- */

/* Write a file whole, and wait until it is on the disk. */
static int write_file(const struct delta *d, const char *name, const struct iovec *part, size_t n,
                      struct ckpt_err *err)
{
    const int fd = openat(d->dir, name, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    uint64_t off = 0;
    int e = fd < 0 ? errno : 0;

    for (size_t i = 0; i < n && e == 0; i++)
        e = ckpt_fdio_pwrite(fd, part[i].iov_base, part[i].iov_len, &off);
    if (e == 0 && fsync(fd) < 0)
        e = errno;
    if (fd >= 0 && close(fd) < 0 && e == 0)
        e = errno;
    return e ? fail_file(d, "writing", name, e, err) : 0;
}

/* Describe the blobs: in the header of their file, and in what becomes the index. */
static int describe_blobs(struct delta *d, json_t *header, json_t *sums, struct iovec *part,
                          struct ckpt_err *err)
{
    uint64_t at = 0;

    for (size_t i = 0; i < d->nblob; i++) {
        const struct ckpt_change *c = &d->blob[i].change;
        struct ckpt_changed *changed = &d->tensor[d->all.ntensor++];
        *changed = (struct ckpt_changed){
            .tensor = ckptfs_tensor(d->to, d->blob[i].tensor), .file = d->all.nfile, .len = c->len};
        (void)snprintf(changed->checksum, sizeof changed->checksum, "%s", c->checksum);
        const char *name = changed->tensor.name;
        json_t *entry =
            json_pack("{s:s, s:[I], s:[I, I]}", "dtype", "U8", "shape", (json_int_t)c->len,
                      "data_offsets", (json_int_t)at, (json_int_t)(at + c->len));
        at += c->len;
        part[i + 1] = (struct iovec){c->data, c->len};
        if (json_object_set_new(header, name, entry) < 0 ||
            (d->form->has_sums && json_object_set_new(sums, name, json_string(c->checksum)) < 0))
            return ckpt_nomem(err);
    }
    d->all.written += at;
    return 0;
}

/* Write what is held as a file; under the mutex. */
static int flush(struct delta *d, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *header = json_object();
    ckpt_cleanup(ckpt_freep) struct iovec *part = calloc(d->nblob + 1, sizeof *part);
    ckpt_cleanup(ckpt_freep) char *text = NULL;
    ckpt_cleanup(ckpt_str_release) struct ckpt_str head = {0};
    json_t *sums = json_object();
    size_t len;
    char name[64];

    if (d->nblob == 0) {
        json_decref(sums);
        return 0;
    }
    d->form->file_name(d->all.nfile, 0, name);
    if (!header || !part || json_object_set_new(header, "__metadata__", sums) < 0)
        return ckpt_nomem(err);
    if (describe_blobs(d, header, sums, part, err) < 0 ||
        ckpt_json_dump(header, CKPT_JSON_COMPACT, false, &text, &len, err) < 0)
        return -1;
    const uint64_t padded = (len + 7) / 8 * 8;
    for (int k = 0; k < 8; k++) /* little-endian */
        ckpt_str_putc(&head, (char)(padded >> 8 * k));
    ckpt_str_printf(&head, "%-*s", (int)padded, text);
    part[0] = (struct iovec){head.ptr, head.len};
    int rc = head.failed ? ckpt_nomem(err) : write_file(d, name, part, d->nblob + 1, err);
    for (size_t i = 0; i < d->nblob; i++)
        free(d->blob[i].change.data);
    d->nblob = 0;
    d->held = 0;
    d->all.nfile++;
    return rc;
}

/* ---- tensors ---- */

static int compare(void *ctx, size_t i, struct ckpt_err *err)
{
    struct delta *d = ctx;
    struct blob b = {i, {.size = sizeof b.change}};
    const struct ckpt_tensor_info info = ckptfs_tensor(d->to, i);

    if (!ckpt_view_unchanged(d->from, d->to, i) &&
        ckpt_view_change(d->from, d->to, i, d->form, d->all.overwrite, &b.change, err) < 0)
        return -1;
    (void)pthread_mutex_lock(&d->mutex);
    d->done += info.nbytes;
    d->changed += b.change.changed;
    int rc = 0;
    if (b.change.data) {
        d->blob[d->nblob++] = b;
        d->held += b.change.len;
        d->nchanged++;
        rc = d->held >= FILE_BYTES ? flush(d, err) : 0;
    }
    ckpt_progress_draw(&d->bar, d->done, info.name);
    (void)pthread_mutex_unlock(&d->mutex);
    return rc;
}

/* Tensors that B lacks are an error, too. */
static int check_names(const struct delta *d, struct ckpt_err *err)
{
    size_t twin;

    for (size_t i = 0; i < ckpt_view_tensors(d->from); i++) {
        const struct ckpt_tensor_info info = ckptfs_tensor(d->from, i);
        if (!ckpt_view_find_tensor(d->to, info.name, &twin))
            return ckpt_fail(err, CKPT_CONFLICT,
                             "'%s' is not in %s any more: changes can't say that", info.name,
                             ckpt_view_source(d->to));
    }
    return 0;
}

/* ---- the index ---- */

/* Give the files the names that they have when their number is known. */
static int name_files(const struct delta *d, struct ckpt_err *err)
{
    char from[64], to[64];

    for (size_t i = 0; i < d->all.nfile; i++) {
        d->form->file_name(i, 0, from);
        d->form->file_name(i, d->all.nfile, to);
        if (strcmp(from, to) != 0 && renameat(d->dir, from, d->dir, to) < 0)
            return fail_file(d, "renaming", from, errno, err);
    }
    return 0;
}

static int write_index(struct delta *d, struct ckpt_err *err)
{
    const char *name = d->form->index;
    ckpt_cleanup(ckpt_freep) char *text = NULL;
    size_t len;

    if (name_files(d, err) < 0 || d->form->index_text(&d->all, &text, &len, err) < 0)
        return -1;
    const struct iovec part = {text, len};
    if (fsync(d->dir) < 0 || write_file(d, PARTIAL_INDEX, &part, 1, err) < 0)
        return err->code == CKPT_OK ? fail_file(d, "syncing", ".", errno, err) : -1;
    if (renameat(d->dir, PARTIAL_INDEX, d->dir, name) < 0 || fsync(d->dir) < 0)
        return fail_file(d, "renaming", name, errno, err);
    d->finished = true;
    return 0;
}

/* ---- the command ---- */

/* The version is the number at the end of the directory's name. */
static int take_version(struct delta *d, struct ckpt_err *err)
{
    const struct ckpt_tool *t = d->tool;
    size_t end = strlen(d->dest), begin;
    unsigned long long version, base;

    while (end && d->dest[end - 1] == '/')
        end--;
    for (begin = end; begin && strchr("0123456789", d->dest[begin - 1]); begin--)
        ;
    if (begin == end || !ckpt_parse_u64(d->dest + begin, end - begin, &version) || version == 0)
        return ckpt_fail(err, CKPT_USAGE,
                         "'%s': the directory's name ends with the number of the version, 1 or "
                         "more: %s",
                         d->dest, d->form->example);
    base = version - 1;
    if (t->base_version &&
        (!ckpt_parse_u64(t->base_version, strlen(t->base_version), &base) || base >= version))
        return ckpt_fail(err, CKPT_USAGE, "--base-version %s is not a version before %llu",
                         t->base_version, version);
    d->all.version = version;
    d->all.base_version = base;
    return 0;
}

static int report(const struct delta *d, struct ckpt_err *err)
{
    const uint64_t total = d->all.nbytes;
    const double part = total ? (double)d->changed / (double)total : 0;

    if (!d->tool->json) {
        (void)printf("%s: %zu of %zu tensors changed, %.2f %% of %" PRIu64 " bytes; %" PRIu64
                     " bytes in %zu file%s\n",
                     d->dest, d->nchanged, ckpt_view_tensors(d->to), 100 * part, total,
                     d->all.written, d->all.nfile, d->all.nfile == 1 ? "" : "s");
        return 0;
    }
    ckpt_cleanup(ckpt_json_decrefp) json_t *j = json_pack(
        "{s:I, s:I, s:I, s:I, s:I, s:I, s:f, s:I, s:I}", "version", (json_int_t)d->all.version,
        "base_version", (json_int_t)d->all.base_version, "tensors",
        (json_int_t)ckpt_view_tensors(d->to), "changed_tensors", (json_int_t)d->nchanged, "bytes",
        (json_int_t)total, "changed_bytes", (json_int_t)d->changed, "changed", part,
        "written_bytes", (json_int_t)d->all.written, "files", (json_int_t)d->all.nfile);
    return ckpt_out_json(j, err);
}

static int make(struct delta *d, struct ckpt_err *err)
{
    const size_t n = ckpt_view_tensors(d->to);

    for (size_t i = 0; i < n; i++) {
        const struct ckpt_tensor_info info = ckptfs_tensor(d->to, i);
        d->all.nbytes += info.nbytes;
    }
    d->blob = calloc(n + 1, sizeof *d->blob);
    d->tensor = calloc(n + 1, sizeof *d->tensor);
    if (!d->blob || !d->tensor)
        return ckpt_nomem(err);
    d->all.tensor = d->tensor;
    ckpt_progress_begin(&d->bar, 0, d->all.nbytes, d->tool->quiet);
    int rc = ckpt_parallel(n, ckpt_pump_jobs(d->tool->jobs), compare, d, err);
    ckpt_progress_end(&d->bar);
    return rc < 0 || flush(d, err) < 0 || ckpt_view_verify_unchanged(d->from, err) < 0 ||
                   ckpt_view_verify_unchanged(d->to, err) < 0 || write_index(d, err) < 0
               ? -1
               : report(d, err);
}

/* The form of this name; NULL is the name of the first. UNSUPPORTED: the library lacks it. */
static const struct ckpt_changes_form *find_form(const char *name, struct ckpt_err *err)
{
    const struct ckpt_changes_form *form;

    for (size_t i = 0; (form = ckpt_changes_form_at(i)); i++)
        if (!name || strcmp(form->name, name) == 0)
            return form;
    if (name)
        (void)ckpt_fail(err, CKPT_UNSUPPORTED, "this build does not write the form '%s'", name);
    else
        (void)ckpt_fail(err, CKPT_UNSUPPORTED, "this build writes no changes: it has no form");
    return NULL;
}

int ckpt_cmd_delta(const struct ckpt_tool *t, struct ckpt_err *err)
{
    const bool steps = t->delta_from != NULL; /* of export: A and B are steps of one run */
    ckpt_cleanup(delta_release) struct delta d = {.tool = t,
                                                  .dest = t->operand[steps ? 0 : 1],
                                                  .dir = -1,
                                                  .lock = -1,
                                                  .all = {.overwrite = t->encoding == 1}};

    (void)pthread_mutex_init(&d.mutex, NULL);
    if (!(d.form = find_form(t->delta_format, err)))
        return -1;
    if (d.all.overwrite && !d.form->has_overwrite)
        return ckpt_fail(err, CKPT_USAGE, "--encoding overwrite does not apply to --format %s",
                         d.form->name);
    if (steps && (t->steps || t->weights_only || t->no_weights || t->part))
        return ckpt_fail(err, CKPT_USAGE,
                         "--delta-from does not go with --steps, --weights-only, --no-weights or "
                         "--part");
    return take_version(&d, err) < 0 ||
                   ckpt_tool_open_run(t->run, t->opt, steps ? t->delta_from : t->step, NULL,
                                      &d.from, err) < 0 ||
                   ckpt_tool_open_run(steps ? t->run : t->operand[0], t->other ? t->other : t->opt,
                                      steps ? t->step : t->other_step, NULL, &d.to, err) < 0 ||
                   check_names(&d, err) < 0 || open_dest(&d, err) < 0
               ? -1
               : make(&d, err);
}
