/* SPDX-License-Identifier: Apache-2.0 */
/* ckpt delta: a directory with what has changed from A to B, as slime or SkyRL write it for their
 * inference engines (core/format/delta/reader.c describes it). Threads compare tensors; what they
 * compress is collected in memory, and written as a file when there is enough of it. The index,
 * which makes the version complete, comes last. */
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
static const char SLIME_INDEX[] = "model.safetensors.index.json", SKYRL_INDEX[] = "manifest.json";

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
    bool skyrl, overwrite;
    uint64_t version, base, total;
    struct ckpt_progress bar;
    pthread_mutex_t mutex; /* protects what follows */
    struct blob *blob;     /* what goes into the next file; room for all tensors */
    size_t nblob, nfile;
    uint64_t held; /* bytes of them */
    json_t *map;   /* slime: {tensor: number of its file}; SkyRL: its records */
    uint64_t done, changed, written;
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
    return (ckpt_has_prefix(name, "model-") && ckpt_has_suffix(name, ".safetensors")) ||
           (ckpt_has_prefix(name, ".model-") && ckpt_has_suffix(name, ".partial")) ||
           (ckpt_has_prefix(name, "delta-rank") && ckpt_has_suffix(name, ".safetensors")) ||
           strcmp(name, PARTIAL_INDEX) == 0;
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
    if (faccessat(d->dir, SLIME_INDEX, F_OK, 0) == 0 ||
        faccessat(d->dir, SKYRL_INDEX, F_OK, 0) == 0) {
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
    json_decref(d->map);
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

/* slime's names have the number of files, which is known at the end. */
static void name_file(const struct delta *d, size_t i, size_t of, char ret[64])
{
    if (d->skyrl)
        (void)snprintf(ret, 64, "delta-rank00000-file%06zu.safetensors", i);
    else if (of)
        (void)snprintf(ret, 64, "model-%05zu-of-%05zu.safetensors", i, of);
    else
        (void)snprintf(ret, 64, ".model-%05zu.partial", i);
}

static json_t *record_of(const struct ckpt_tensor_info *info, const struct ckpt_change *c,
                         const char *file)
{
    return json_pack("{s:s, s:s, s:o, s:I, s:I, s:s, s:s, s:s, s:s}", "name", info->name, "dtype",
                     info->torch_dtype, "shape", ckptfs_json_shape(info), "uncompressed_num_bytes",
                     (json_int_t)info->nbytes, "compressed_num_bytes", (json_int_t)c->len,
                     "payload_file", file, "payload_key", info->name, "checksum", c->checksum,
                     "checksum_algorithm", "xxh3-128");
}

/* Describe the blobs: in the header of their file, and in what becomes the index. */
static int describe_blobs(struct delta *d, const char *file, json_t *header, json_t *sums,
                          struct iovec *part, struct ckpt_err *err)
{
    uint64_t at = 0;

    for (size_t i = 0; i < d->nblob; i++) {
        const struct ckpt_change *c = &d->blob[i].change;
        const struct ckpt_tensor_info info = ckptfs_tensor(d->to, d->blob[i].tensor);
        json_t *entry =
            json_pack("{s:s, s:[I], s:[I, I]}", "dtype", "U8", "shape", (json_int_t)c->len,
                      "data_offsets", (json_int_t)at, (json_int_t)(at + c->len));
        at += c->len;
        part[i + 1] = (struct iovec){c->data, c->len};
        if (json_object_set_new(header, info.name, entry) < 0 ||
            (!d->skyrl && json_object_set_new(sums, info.name, json_string(c->checksum)) < 0) ||
            (d->skyrl
                 ? json_array_append_new(d->map, record_of(&info, c, file))
                 : json_object_set_new(d->map, info.name, json_integer((json_int_t)d->nfile))) < 0)
            return ckpt_nomem(err);
    }
    d->written += at;
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
    name_file(d, d->nfile, 0, name);
    if (!header || !part || json_object_set_new(header, "__metadata__", sums) < 0)
        return ckpt_nomem(err);
    if (describe_blobs(d, name, header, sums, part, err) < 0 ||
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
    d->nfile++;
    return rc;
}

/* ---- tensors ---- */

static int compare(void *ctx, size_t i, struct ckpt_err *err)
{
    struct delta *d = ctx;
    struct blob b = {i, {.size = sizeof b.change}};
    const struct ckpt_tensor_info info = ckptfs_tensor(d->to, i);

    if (!ckpt_view_unchanged(d->from, d->to, i) &&
        ckpt_view_change(d->from, d->to, i, d->overwrite, &b.change, err) < 0)
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

static int name_slime_files(struct delta *d, struct ckpt_err *err)
{
    const char *tensor;
    json_t *file;
    char from[64], to[64];

    for (size_t i = 0; i < d->nfile; i++) {
        name_file(d, i, 0, from);
        name_file(d, i, d->nfile, to);
        if (renameat(d->dir, from, d->dir, to) < 0)
            return fail_file(d, "renaming", from, errno, err);
    }
    json_object_foreach(d->map, tensor, file) {
        name_file(d, (size_t)json_integer_value(file), d->nfile, to);
        if (json_object_set_new(d->map, tensor, json_string(to)) < 0)
            return ckpt_nomem(err);
    }
    return 0;
}

static json_t *manifest(const struct delta *d)
{
    json_t *files = json_array();
    char name[64];

    for (size_t i = 0; i < d->nfile; i++) {
        name_file(d, i, 0, name);
        ckpt_json_append(&files, json_string(name));
    }
    return json_pack("{s:I, s:I, s:O, s:I, s:I, s:o}", "version", (json_int_t)d->version,
                     "base_version", (json_int_t)d->base, "tensors", d->map,
                     "total_uncompressed_num_bytes", (json_int_t)d->total,
                     "total_compressed_num_bytes", (json_int_t)d->written, "payload_files", files);
}

static json_t *slime_index(const struct delta *d)
{
    char version[32], base[32];

    (void)snprintf(version, sizeof version, "%06" PRIu64, d->version);
    (void)snprintf(base, sizeof base, "%06" PRIu64, d->base);
    return json_pack("{s:{s:s, s:s, s:s, s:s, s:s}, s:O}", "metadata", "version", version,
                     "base_version", base, "delta_encoding", d->overwrite ? "overwrite" : "xor",
                     "compression_format", "zstd", "checksum_format", "xxh3-128", "weight_map",
                     d->map);
}

static int write_index(struct delta *d, struct ckpt_err *err)
{
    const char *name = d->skyrl ? SKYRL_INDEX : SLIME_INDEX;
    ckpt_cleanup(ckpt_freep) char *text = NULL;
    size_t len;

    if (!d->skyrl && name_slime_files(d, err) < 0)
        return -1;
    ckpt_cleanup(ckpt_json_decrefp) json_t *j = d->skyrl ? manifest(d) : slime_index(d);
    if (!j || ckpt_json_dump(j, CKPT_JSON_LINE, false, &text, &len, err) < 0)
        return j ? -1 : ckpt_nomem(err);
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
                         d->dest, d->skyrl ? "delta-00000001" : "weight_v000001");
    base = version - 1;
    if (t->base_version &&
        (!ckpt_parse_u64(t->base_version, strlen(t->base_version), &base) || base >= version))
        return ckpt_fail(err, CKPT_USAGE, "--base-version %s is not a version before %llu",
                         t->base_version, version);
    d->version = version;
    d->base = base;
    return 0;
}

static int report(const struct delta *d, struct ckpt_err *err)
{
    const double part = d->total ? (double)d->changed / (double)d->total : 0;

    if (!d->tool->json) {
        (void)printf("%s: %zu of %zu tensors changed, %.2f %% of %" PRIu64 " bytes; %" PRIu64
                     " bytes in %zu file%s\n",
                     d->dest, d->nchanged, ckpt_view_tensors(d->to), 100 * part, d->total,
                     d->written, d->nfile, d->nfile == 1 ? "" : "s");
        return 0;
    }
    ckpt_cleanup(ckpt_json_decrefp) json_t *j =
        json_pack("{s:I, s:I, s:I, s:I, s:I, s:I, s:f, s:I, s:I}", "version",
                  (json_int_t)d->version, "base_version", (json_int_t)d->base, "tensors",
                  (json_int_t)ckpt_view_tensors(d->to), "changed_tensors", (json_int_t)d->nchanged,
                  "bytes", (json_int_t)d->total, "changed_bytes", (json_int_t)d->changed, "changed",
                  part, "written_bytes", (json_int_t)d->written, "files", (json_int_t)d->nfile);
    return ckpt_out_json(j, err);
}

static int make(struct delta *d, struct ckpt_err *err)
{
    const size_t n = ckpt_view_tensors(d->to);

    for (size_t i = 0; i < n; i++) {
        const struct ckpt_tensor_info info = ckptfs_tensor(d->to, i);
        d->total += info.nbytes;
    }
    d->blob = calloc(n + 1, sizeof *d->blob);
    d->map = d->skyrl ? json_array() : json_object();
    if (!d->blob || !d->map)
        return ckpt_nomem(err);
    ckpt_progress_begin(&d->bar, 0, d->total, d->tool->quiet);
    int rc = ckpt_parallel(n, ckpt_pump_jobs(d->tool->jobs), compare, d, err);
    ckpt_progress_end(&d->bar);
    return rc < 0 || flush(d, err) < 0 || ckpt_view_verify_unchanged(d->from, err) < 0 ||
                   ckpt_view_verify_unchanged(d->to, err) < 0 || write_index(d, err) < 0
               ? -1
               : report(d, err);
}

int ckpt_cmd_delta(const struct ckpt_tool *t, struct ckpt_err *err)
{
    const bool steps = t->delta_from != NULL; /* of export: A and B are steps of one run */
    ckpt_cleanup(delta_release) struct delta d = {.tool = t,
                                                  .dest = t->operand[steps ? 0 : 1],
                                                  .dir = -1,
                                                  .lock = -1,
                                                  .skyrl = t->delta_format == 1,
                                                  .overwrite = t->encoding == 1};

    (void)pthread_mutex_init(&d.mutex, NULL);
    if (d.skyrl && d.overwrite)
        return ckpt_fail(err, CKPT_USAGE, "--encoding overwrite does not apply to --format skyrl");
    if (steps && (t->steps || t->weights_only || t->no_weights))
        return ckpt_fail(err, CKPT_USAGE,
                         "--delta-from does not go with --steps, --weights-only or --no-weights");
    return take_version(&d, err) < 0 ||
                   ckpt_tool_open_run(t->run, t->opt, steps ? t->delta_from : t->step, NULL,
                                      &d.from, err) < 0 ||
                   ckpt_tool_open_run(steps ? t->run : t->operand[0], t->other ? t->other : t->opt,
                                      steps ? t->step : t->other_step, NULL, &d.to, err) < 0 ||
                   check_names(&d, err) < 0 || open_dest(&d, err) < 0
               ? -1
               : make(&d, err);
}
