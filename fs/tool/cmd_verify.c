/* SPDX-License-Identifier: Apache-2.0 */
/* ckpt verify: do two views hold the same tensors and files?
 *
 * Tensors are compared by name, dtype, shape and bytes, however they are distributed over files.
 * All other files except the index are compared byte by byte. config.json and
 * generation_config.json, in which every tool writes different keys, are equal if the keys that
 * both have are equal. Files that only B has, and a generation_config.json that it lacks, are
 * mentioned but do not count as differences.
 *
 * Of a Hugging Face model directory, the tensors are those of the files under their stored names
 * and dtypes, and the other files are those on disk. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
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
#include "tool/pump.h"
#include "tool/values.h"

enum { SHOWN = 20 };

struct verify {
    const struct ckpt_tool *tool;
    struct ckpt_view *view;
    struct ckpt_view *other;
    char *name;                /* of B, in what is said */
    const char *dir;           /* B is this model directory; NULL: its files are those of `other` */
    struct ckpt_items tensors; /* all of the view */
    size_t *twin;              /* per tensor that is compared: its number in `other` */
    pthread_mutex_t lock;      /* protects gap[] */
    struct ckpt_gap *gap;      /* per tensor */
    json_t *differences;       /* [{"tensor" | "file", "what", ...}] */
    json_t *within;            /* tensors that differ by no more than the tolerance, alike */
    json_t *notes;             /* sentences about what does not count as a difference */
    size_t compared;           /* tensors that both have with equal dtype and shape */
    uint64_t bytes;            /* of those */
    size_t ntensor, nfile;     /* in A or in B; files that are compared */
    size_t different[2];       /* tensors, files */
};

static void verify_release(struct verify *v)
{
    ckpt_view_release(v->view);
    ckpt_view_release(v->other);
    ckpt_items_release(&v->tensors);
    free(v->name);
    free(v->twin);
    free(v->gap);
    json_decref(v->differences);
    json_decref(v->within);
    json_decref(v->notes);
    (void)pthread_mutex_destroy(&v->lock);
}

static int differ(struct verify *v, const char *kind, const char *name, const char *what,
                  struct ckpt_err *err)
{
    json_t *j =
        json_pack("{s:o, s:o}", kind, ckptfs_json_text(name), "what", ckptfs_json_text(what));

    v->different[strcmp(kind, "file") == 0]++;
    return json_array_append_new(v->differences, j) < 0 ? ckpt_nomem(err) : 0;
}

/* ---- tensors ---- */

static char *type_text(const struct ckpt_tensor_info *info)
{
    ckpt_cleanup(ckpt_freep) char *shape = ckpt_out_numbers(info->shape, info->rank, ", ");

    return shape ? ckpt_asprintf("%s [%s]", info->dtype, shape) : NULL;
}

static bool same_type(const struct ckpt_tensor_info *a, const struct ckpt_tensor_info *b)
{
    return strcmp(a->dtype, b->dtype) == 0 && a->rank == b->rank && a->nbytes == b->nbytes &&
           (a->rank == 0 || memcmp(a->shape, b->shape, a->rank * sizeof *a->shape) == 0);
}

/* Look for tensor i of the view in B, and say how it differs if it is not there alike. */
static int match(struct verify *v, size_t i, struct ckpt_err *err)
{
    const struct ckpt_tensor_info a = ckptfs_tensor(v->view, i);
    ckpt_cleanup(ckpt_freep) char *here = NULL, *there = NULL, *what = NULL;

    v->tensors.item[i].start = CKPT_PUMP_SKIP;
    if (!ckpt_view_find_tensor(v->other, a.name, &v->twin[i])) {
        what = ckpt_asprintf("missing in %s", v->name);
    } else {
        const struct ckpt_tensor_info b = ckptfs_tensor(v->other, v->twin[i]);
        if (same_type(&a, &b)) {
            v->tensors.item[i].start = 0;
            v->compared++;
            v->bytes += a.nbytes;
            return 0;
        }
        here = type_text(&a);
        there = type_text(&b);
        what = ckpt_asprintf("%s, in %s %s", here ? here : "", v->name, there ? there : "");
    }
    return what ? differ(v, "tensor", a.name, what, err) : ckpt_nomem(err);
}

static int match_all(struct verify *v, struct ckpt_err *err)
{
    if (ckpt_items_tensors(v->view, &v->tensors, err) < 0)
        return -1;
    const size_t n = v->tensors.n;
    v->twin = calloc(n + 1, sizeof *v->twin);
    v->gap = calloc(n + 1, sizeof *v->gap);
    v->ntensor = n;
    if (!v->twin || !v->gap)
        return ckpt_nomem(err);
    for (size_t i = 0; i < n; i++)
        if (match(v, i, err) < 0)
            return -1;
    return 0;
}

static int unmatched(struct verify *v, struct ckpt_err *err)
{
    for (size_t i = 0, n = ckpt_view_tensors(v->other); i < n; i++) {
        const struct ckpt_tensor_info info = ckptfs_tensor(v->other, i);
        size_t k;
        if (ckpt_view_find_tensor(v->view, info.name, &k))
            continue;
        ckpt_cleanup(ckpt_freep) char *what = ckpt_asprintf("only in %s", v->name);
        if (!what)
            return ckpt_nomem(err);
        v->ntensor++;
        if (differ(v, "tensor", info.name, what, err) < 0)
            return -1;
    }
    return 0;
}

static uint64_t numel_of(const struct ckpt_tensor_info *info)
{
    uint64_t numel = 1;

    for (uint32_t d = 0; d < info->rank; d++)
        numel *= info->shape[d];
    return numel;
}

static int compare_chunk(void *ctx, size_t i, const void *buf, size_t len, uint64_t off,
                         void *scratch, struct ckpt_err *err)
{
    struct verify *v = ctx;
    struct ckpt_gap part = {0};

    if (ckpt_view_tensor_pread(v->other, v->twin[i], scratch, len, off, err) < 0)
        return -1;
    if (memcmp(buf, scratch, len) == 0)
        return 0;
    const struct ckpt_tensor_info info = ckptfs_tensor(v->view, i);
    const size_t size = (size_t)(info.nbytes / numel_of(&info));
    const struct ckpt_values values = {info.dtype, v->tool->tolerance};
    ckpt_values_compare(&values, buf, scratch, len / size, size, off / size, &part);
    (void)pthread_mutex_lock(&v->lock);
    ckpt_gap_add(&v->gap[i], &part);
    (void)pthread_mutex_unlock(&v->lock);
    return 0;
}

/* The index of element e, as "3, 17". */
static char *index_text(const struct ckpt_tensor_info *info, uint64_t e)
{
    ckpt_cleanup(ckpt_freep) uint64_t *index = calloc(info->rank + 1, sizeof *index);

    for (uint32_t d = info->rank; index && d-- > 0; e /= info->shape[d])
        index[d] = e % info->shape[d];
    return index ? ckpt_out_numbers(index, info->rank, ", ") : NULL;
}

/* "12 of 4096 elements differ, max |a - b| = 0.0078125 at [3, 17] (1.5, 1.5078125)" */
static char *gap_text(const struct ckpt_tensor_info *info, const struct ckpt_gap *gap)
{
    char max[CKPT_VALUE + 20] = "", a[CKPT_VALUE], b[CKPT_VALUE], nan[80] = "", number[CKPT_VALUE];
    ckpt_cleanup(ckpt_freep) char *index = index_text(info, gap->at);
    const bool known = ckpt_value_is_known(info->dtype);

    if (gap->max >= 0)
        (void)snprintf(max, sizeof max, "max |a - b| = %s ",
                       ckpt_value_text(info->dtype, gap->max, number));
    if (gap->nan)
        (void)snprintf(nan, sizeof nan, "; %" PRIu64 " of them NaN on one side only", gap->nan);
    return index ? ckpt_asprintf(
                       "%" PRIu64 " of %" PRIu64 " elements differ, %sat [%s]%s%s%s%s%s%s",
                       gap->differing + gap->within, numel_of(info), max, index, known ? " (" : "",
                       known ? ckpt_value_text(info->dtype, gap->a, a) : "", known ? ", " : "",
                       known ? ckpt_value_text(info->dtype, gap->b, b) : "", known ? ")" : "", nan)
                 : NULL;
}

/* JSON has no NaN and no infinity: they are the texts that people read. */
static json_t *value_json(const char *dtype, long double value)
{
    char text[CKPT_VALUE];
    json_t *j = json_loads(ckpt_value_text(dtype, value, text), JSON_DECODE_ANY, NULL);

    return j ? j : json_string(text);
}

static json_t *gap_json(const struct ckpt_tensor_info *info, const struct ckpt_gap *gap,
                        const char *what)
{
    json_t *at = json_array(), *j;
    uint64_t e = gap->at;

    for (uint32_t d = info->rank; d-- > 0; e /= info->shape[d])
        (void)json_array_insert_new(at, 0, json_integer((json_int_t)(e % info->shape[d])));
    j = json_pack("{s:o, s:o, s:I, s:I, s:I, s:I, s:o}", "tensor", ckptfs_json_text(info->name),
                  "what", ckptfs_json_text(what), "elements", (json_int_t)numel_of(info),
                  "differing", (json_int_t)gap->differing, "within", (json_int_t)gap->within, "nan",
                  (json_int_t)gap->nan, "at", at);
    if (j && gap->max >= 0)
        (void)json_object_set_new(j, "max_abs", value_json(info->dtype, gap->max));
    if (j && ckpt_value_is_known(info->dtype)) {
        (void)json_object_set_new(j, "a", value_json(info->dtype, gap->a));
        (void)json_object_set_new(j, "b", value_json(info->dtype, gap->b));
    }
    return j;
}

static int describe(struct verify *v, size_t i, struct ckpt_err *err)
{
    const struct ckpt_tensor_info info = ckptfs_tensor(v->view, i);
    const struct ckpt_gap *gap = &v->gap[i];
    ckpt_cleanup(ckpt_freep) char *what = gap_text(&info, gap);

    if (!what)
        return ckpt_nomem(err);
    v->different[0] += gap->differing > 0;
    return json_array_append_new(gap->differing ? v->differences : v->within,
                                 gap_json(&info, gap, what)) < 0
               ? ckpt_nomem(err)
               : 0;
}

static int compare_tensors(const struct ckpt_tool *t, struct verify *v, struct ckpt_err *err)
{
    const struct ckpt_pump pump = {.view = v->view,
                                   .items = &v->tensors,
                                   .jobs = t->jobs,
                                   .quiet = t->quiet,
                                   .ctx = v,
                                   .sink = compare_chunk};

    if (unmatched(v, err) < 0 || ckpt_pump_run(&pump, NULL, err) < 0)
        return -1;
    for (size_t i = 0; i < v->tensors.n; i++)
        if (v->gap[i].differing + v->gap[i].within && describe(v, i, err) < 0)
            return -1;
    return 0;
}

/* ---- other files ---- */

static bool is_model_file(const char *path)
{
    const char *slash = strrchr(path, '/');
    return ckpt_is_weights(path) ||
           strcmp(slash ? slash + 1 : path, "model.safetensors.index.json") == 0;
}

/* A file of B: on disk, or of its view. */
struct file {
    int fd; /* -1: it is not on disk */
    const struct ckpt_node *node;
    bool is_there, is_file;
    uint64_t size;
};

static void file_release(struct file *f) { ckpt_closep(&f->fd); }

static int file_open(const struct verify *v, const char *path, struct file *ret,
                     struct ckpt_err *err)
{
    struct stat st;

    *ret = (struct file){.fd = -1};
    if (!v->dir) {
        ret->node = ckpt_view_find(v->other, path);
        ret->is_there = ret->node;
        ret->is_file = ret->node && !ckpt_node_is_dir(ret->node);
        ret->size = ret->is_file ? ckpt_node_size(ret->node) : 0;
        return 0;
    }
    ckpt_cleanup(ckpt_freep) char *full = ckpt_asprintf("%s/%s", v->dir, path);
    if (!full)
        return ckpt_nomem(err);
    ret->fd = open(full, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (ret->fd < 0 && errno != ENOENT)
        return ckpt_fail_errno(err, errno, "%s", full);
    ret->is_there = ret->fd >= 0;
    ret->is_file = ret->is_there && fstat(ret->fd, &st) == 0 && S_ISREG(st.st_mode);
    ret->size = ret->is_file ? (uint64_t)st.st_size : 0;
    return 0;
}

static int file_pread(const struct verify *v, const struct file *f, const char *path, void *buf,
                      size_t len, uint64_t off, struct ckpt_err *err)
{
    const struct ckpt_item item = {.path = (char *)path, .size = f->size, .file = f->node};

    if (f->node)
        return ckpt_item_pread(v->other, &item, buf, len, off, err);
    const int rc = ckpt_fdio_pread(f->fd, buf, len, &off);
    return rc ? ckpt_fail_errno(err, ckpt_fdio_errno(rc), "reading %s/%s", v->dir, path) : 0;
}

/* Compare the bytes of two files. *what describes the difference; NULL: none. */
static int compare_bytes(const struct verify *v, const struct ckpt_item *item, const struct file *f,
                         char **what, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) unsigned char *a = malloc(2 * (size_t)CKPT_PUMP_CHUNK);
    unsigned char *b = a + CKPT_PUMP_CHUNK;

    if (!a)
        return ckpt_nomem(err);
    for (uint64_t off = 0; off < item->size;) {
        size_t len = item->size - off < CKPT_PUMP_CHUNK ? (size_t)(item->size - off)
                                                        : (size_t)CKPT_PUMP_CHUNK;
        if (ckpt_item_pread(v->view, item, a, len, off, err) < 0 ||
            file_pread(v, f, item->path, b, len, off, err) < 0)
            return -1;
        const size_t same = ckpt_same_bytes(a, b, len);
        if (same < len) {
            *what = ckpt_asprintf("byte %" PRIu64 " is 0x%02x, in %s 0x%02x", off + same, a[same],
                                  v->name, b[same]);
            return *what ? 0 : ckpt_nomem(err);
        }
        off += len;
    }
    return 0;
}

static void note(struct verify *v, const char *name, const char *what)
{
    json_t *text = json_sprintf("%s: %s", name, what);
    ckpt_json_append(&v->notes, text);
}

static bool is_config(const char *path)
{
    return strcmp(path, "config.json") == 0 || strcmp(path, "generation_config.json") == 0;
}

/* The first key that both objects have with different values; NULL: there is none. */
static const char *contradiction(const json_t *a, const json_t *b)
{
    const char *key;
    json_t *value;

    json_object_foreach((json_t *)a, key, value) {
        const json_t *other = json_object_get(b, key);
        if (other && !ckpt_json_same(value, other))
            return key;
    }
    return NULL;
}

/* Compare two versions of a config: if no key contradicts, *what becomes NULL and a note is added.
 */
static int compare_config(struct verify *v, const struct ckpt_item *item, const struct file *f,
                          char **what, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *a = malloc((size_t)item->size + 1);
    ckpt_cleanup(ckpt_freep) char *b = malloc((size_t)f->size + 1);

    if (!a || !b)
        return ckpt_nomem(err);
    if (ckpt_item_pread(v->view, item, a, (size_t)item->size, 0, err) < 0 ||
        file_pread(v, f, item->path, b, (size_t)f->size, 0, err) < 0)
        return -1;
    ckpt_cleanup(ckpt_json_decrefp) json_t *ours = json_loadb(a, (size_t)item->size, 0, NULL);
    ckpt_cleanup(ckpt_json_decrefp) json_t *theirs = json_loadb(b, (size_t)f->size, 0, NULL);
    if (!json_is_object(ours) || !json_is_object(theirs))
        return 0; /* not JSON: the difference in bytes counts */
    const char *key = contradiction(ours, theirs);
    free(*what);
    *what = key ? ckpt_asprintf("'%s' differs", key) : NULL;
    if (!key)
        note(v, item->path, "other keys or another spelling, but no different value");
    return key && !*what ? ckpt_nomem(err) : 0;
}

static int compare_file(struct verify *v, const struct ckpt_item *item, struct ckpt_err *err)
{
    ckpt_cleanup(file_release) struct file f = {.fd = -1};
    ckpt_cleanup(ckpt_freep) char *what = NULL;

    if (file_open(v, item->path, &f, err) < 0)
        return -1;
    v->nfile++;
    if (!f.is_there && strcmp(item->path, "generation_config.json") == 0) {
        note(v, item->path, "only in the view");
        return 0;
    }
    if (!f.is_there) {
        what = ckpt_asprintf("missing in %s", v->name);
    } else if (!f.is_file) {
        what = ckpt_asprintf("not a regular file in %s", v->name);
    } else if (f.size != item->size) {
        what = ckpt_asprintf("%" PRIu64 " bytes, in %s %" PRIu64, item->size, v->name, f.size);
    } else if (compare_bytes(v, item, &f, &what, err) < 0) {
        return -1;
    }
    if (what && f.is_file && is_config(item->path) && compare_config(v, item, &f, &what, err) < 0)
        return -1;
    return what ? differ(v, "file", item->path, what, err) : 0;
}

/* Note the names below the model directory that the view does not have. Weight files may be split
 * differently. */
static void note_extra(struct verify *v, const char *below, unsigned depth)
{
    ckpt_cleanup(ckpt_freep) char *path = ckpt_asprintf("%s/%s", v->dir, below);
    DIR *d = path && depth < 8 ? opendir(path) : NULL;

    for (struct dirent *e; d && (e = readdir(d));) {
        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0)
            continue;
        ckpt_cleanup(ckpt_freep) char *name =
            ckpt_asprintf("%s%s%s", below, *below ? "/" : "", e->d_name);
        const struct ckpt_node *node = name ? ckpt_view_find(v->view, name) : NULL;
        if (node && ckpt_node_is_dir(node))
            note_extra(v, name, depth + 1);
        else if (name && !node && !is_model_file(name))
            note(v, name, "only in the directory");
    }
    if (d)
        (void)closedir(d);
}

/* Note the files of B's view that the view does not have. */
static int note_others(struct verify *v, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_items_release) struct ckpt_items files = {0};
    ckpt_cleanup(ckpt_freep) char *what = ckpt_asprintf("only in %s", v->name);

    if (!what)
        return ckpt_nomem(err);
    if (ckpt_items_files(v->other, &files, err) < 0)
        return -1;
    for (size_t i = 0; i < files.n; i++)
        if (!is_model_file(files.item[i].path) && !ckpt_view_find(v->view, files.item[i].path))
            note(v, files.item[i].path, what);
    return 0;
}

static int compare_files(struct verify *v, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_items_release) struct ckpt_items files = {0};

    if (ckpt_items_files(v->view, &files, err) < 0)
        return -1;
    for (size_t i = 0; i < files.n; i++)
        if (!is_model_file(files.item[i].path) && compare_file(v, &files.item[i], err) < 0)
            return -1;
    if (!v->dir)
        return note_others(v, err);
    note_extra(v, "", 0);
    return 0;
}

/* ---- the command ---- */

static int report_json(const struct verify *v, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *j =
        json_pack("{s:b, s:I, s:I, s:I, s:I, s:I, s:I, s:O, s:O, s:O}", "equal",
                  json_array_size(v->differences) == 0, "tensors", (json_int_t)v->compared, "bytes",
                  (json_int_t)v->bytes, "all_tensors", (json_int_t)v->ntensor, "different_tensors",
                  (json_int_t)v->different[0], "files", (json_int_t)v->nfile, "different_files",
                  (json_int_t)v->different[1], "differences", v->differences, "within", v->within,
                  "notes", v->notes);
    return ckpt_out_json(j, err);
}

/* Print the first of a list of {"tensor" | "file", "what"}. */
static void print_list(const char *before, const json_t *list)
{
    const size_t n = json_array_size(list);
    size_t i;
    json_t *d;

    json_array_foreach(list, i, d) {
        const char *tensor = ckpt_json_str(d, "tensor");
        const char *file = ckpt_json_str(d, "file");
        if (i < SHOWN)
            (void)printf("%s%s %s: %s\n", before, tensor ? "tensor" : "file",
                         tensor ? tensor : file, ckpt_json_str(d, "what"));
    }
    if (n > SHOWN)
        (void)printf("... and %zu more\n", n - SHOWN);
}

static void print(const struct verify *v)
{
    char size[CKPT_OUT_SIZE], within[40] = "", equal[40] = "equal";
    size_t i;
    json_t *d;

    json_array_foreach(v->notes, i, d)
        if (i < SHOWN)
            (void)printf("note: %s\n", json_string_value(d));
    if (json_array_size(v->within)) {
        (void)snprintf(within, sizeof within, "within %.9g: ", v->tool->tolerance);
        (void)snprintf(equal, sizeof equal, "equal within %.9g", v->tool->tolerance);
    }
    print_list(within, v->within);
    print_list("", v->differences);
    if (json_array_size(v->differences))
        (void)printf("%zu of %zu tensors differ", v->different[0], v->ntensor);
    else
        (void)printf("%s: %zu tensors, %s", equal, v->compared, ckpt_out_size(v->bytes, size));
    if (!v->tool->tensors && json_array_size(v->differences))
        (void)printf(", %zu of %zu files", v->different[1], v->nfile);
    else if (!v->tool->tensors)
        (void)printf(", %zu files", v->nfile);
    (void)printf("\n");
}

/* ---- what is compared ---- */

/* Open B as a model directory, whose tensors have their stored names. False: it is none. */
static bool open_model(struct verify *v, const char *path)
{
    ckpt_cleanup(ckpt_run_closep) struct ckpt_run *run = NULL;
    ckpt_cleanup(ckpt_view_releasep) struct ckpt_view *view = NULL;
    struct ckpt_err ignored = {0}; /* the second way to open it says what is wrong */
    struct ckpt_options *opt = NULL;

    if (ckpt_options_new(&opt, &ignored) == 0 &&
        ckpt_options_set(opt, "view", "raw", &ignored) == 0)
        (void)ckpt_tool_open_run(path, opt, NULL, &run, &view, &ignored);
    ckpt_options_free(opt);
    const char *source = view ? ckpt_view_source(view) : "";
    if (!view || ckpt_run_is_folder(run) ||
        (strncmp(source, "hf", 2) != 0 && strncmp(source, "peft", 4) != 0))
        return false;
    v->dir = path;
    v->other = ckpt_steal(&view);
    return true;
}

static int open_other(struct verify *v, struct ckpt_err *err)
{
    const struct ckpt_tool *t = v->tool;
    const char *path = t->operand[0];
    const bool plain = !t->other && !t->other_step;

    v->name = t->other_step ? ckpt_asprintf("%s, step %s", path, t->other_step) : strdup(path);
    if (!v->name)
        return ckpt_nomem(err);
    if (plain && open_model(v, path))
        return 0;
    return ckpt_tool_open_run(path, t->other, t->other_step, NULL, &v->other, err);
}

int ckpt_cmd_verify(const struct ckpt_tool *t, struct ckpt_err *err)
{
    ckpt_cleanup(verify_release) struct verify v = {.tool = t};

    (void)pthread_mutex_init(&v.lock, NULL);
    ckpt_options_compare_whole(t->opt);
    if (t->other)
        ckpt_options_compare_whole(t->other);
    if (ckpt_tool_open(t, &v.view, err) < 0 || open_other(&v, err) < 0)
        return -1;
    v.differences = json_array();
    v.within = json_array();
    v.notes = json_array();
    if (match_all(&v, err) < 0 || compare_tensors(t, &v, err) < 0 ||
        (!t->tensors && compare_files(&v, err) < 0) ||
        ckpt_view_verify_unchanged(v.view, err) < 0 || ckpt_view_verify_unchanged(v.other, err) < 0)
        return -1;
    if (!t->json)
        print(&v);
    else if (report_json(&v, err) < 0)
        return -1;
    return json_array_size(v.differences) ? CKPT_TOOL_DIFFERENT : CKPT_TOOL_GOOD;
}
