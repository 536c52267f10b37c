/* SPDX-License-Identifier: Apache-2.0 */
/* ckpt verify: does a directory hold the tensors and files of a view?
 *
 * Tensors are compared by name, dtype, shape and bytes, however the directory distributes them over
 * files. All other files except the index are compared byte by byte. config.json and
 * generation_config.json, in which every tool writes different keys, are equal if the keys that
 * both have are equal. Files that only the directory has, and a generation_config.json that it
 * lacks, are mentioned but do not count as differences. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdatomic.h>
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

enum { SHOWN = 20 };

static const uint64_t SAME = UINT64_MAX;

struct verify {
    struct ckpt_view *view;
    struct ckpt_view *other; /* DIR's tensors, under their stored names */
    const char *dir;
    struct ckpt_items tensors; /* all of the view */
    uint64_t *start;           /* per tensor, for the pump: not compared, or from the beginning */
    size_t *twin;              /* per tensor that is compared: its number in `other` */
    _Atomic uint64_t *first;   /* per tensor: offset of the first byte that differs, or SAME */
    json_t *differences;       /* [{"tensor" | "file", "what"}] */
    json_t *notes;             /* sentences about what does not count as a difference */
    size_t compared;           /* tensors that both have with equal dtype and shape */
    uint64_t bytes;            /* of those */
};

static void verify_release(struct verify *v)
{
    ckpt_items_release(&v->tensors);
    free(v->start);
    free(v->twin);
    free(v->first);
    json_decref(v->differences);
    json_decref(v->notes);
}

static int differ(struct verify *v, const char *kind, const char *name, const char *what,
                  struct ckpt_err *err)
{
    json_t *j =
        json_pack("{s:o, s:o}", kind, ckptfs_json_text(name), "what", ckptfs_json_text(what));
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

/* Look for tensor i of the view in DIR, and say how it differs if it is not there alike. */
static int match(struct verify *v, size_t i, struct ckpt_err *err)
{
    struct ckpt_tensor_info a = {.size = sizeof a}, b = {.size = sizeof b};
    ckpt_cleanup(ckpt_freep) char *here = NULL, *there = NULL, *what = NULL;

    v->start[i] = CKPT_PUMP_SKIP;
    ckpt_view_tensor(v->view, i, &a);
    if (!ckpt_view_find_tensor(v->other, a.name, &v->twin[i])) {
        what = ckpt_asprintf("missing in %s", v->dir);
    } else {
        ckpt_view_tensor(v->other, v->twin[i], &b);
        if (same_type(&a, &b)) {
            v->start[i] = 0;
            v->compared++;
            v->bytes += a.nbytes;
            return 0;
        }
        here = type_text(&a);
        there = type_text(&b);
        what = ckpt_asprintf("%s, in %s %s", here ? here : "", v->dir, there ? there : "");
    }
    return what ? differ(v, "tensor", a.name, what, err) : ckpt_nomem(err);
}

static int match_all(struct verify *v, struct ckpt_err *err)
{
    if (ckpt_items_tensors(v->view, &v->tensors, err) < 0)
        return -1;
    const size_t n = v->tensors.n;
    v->start = calloc(n + 1, sizeof *v->start);
    v->twin = calloc(n + 1, sizeof *v->twin);
    v->first = calloc(n + 1, sizeof *v->first);
    if (!v->start || !v->twin || !v->first)
        return ckpt_nomem(err);
    for (size_t i = 0; i < n; i++) {
        atomic_store(&v->first[i], SAME);
        if (match(v, i, err) < 0)
            return -1;
    }
    return 0;
}

static int unmatched(struct verify *v, struct ckpt_err *err)
{
    for (size_t i = 0, n = ckpt_view_tensors(v->other); i < n; i++) {
        struct ckpt_tensor_info info = {.size = sizeof info};
        size_t k;
        ckpt_view_tensor(v->other, i, &info);
        if (!ckpt_view_find_tensor(v->view, info.name, &k) &&
            differ(v, "tensor", info.name, "only in the directory", err) < 0)
            return -1;
    }
    return 0;
}

static int compare_chunk(void *ctx, size_t i, const void *buf, size_t len, uint64_t off,
                         void *scratch, struct ckpt_err *err)
{
    struct verify *v = ctx;
    if (ckpt_view_tensor_pread(v->other, v->twin[i], scratch, len, off, err) < 0)
        return -1;
    const size_t same = ckpt_same_bytes(buf, scratch, len);
    if (same == len)
        return 0;
    /* Chunks end in any order: keep the lowest offset. */
    uint64_t mine = off + same, known = atomic_load(&v->first[i]);
    while (mine < known && !atomic_compare_exchange_weak(&v->first[i], &known, mine))
        continue;
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

/* Write an element's bytes, which are little-endian, as one hexadecimal number. */
static void hex_element(const unsigned char *bytes, size_t n, char *buf)
{
    for (size_t i = n; i-- > 0; buf += 2)
        (void)snprintf(buf, 3, "%02x", bytes[i]);
}

static int describe_first(struct verify *v, size_t i, struct ckpt_err *err)
{
    enum { WIDEST = 16 };
    unsigned char a[WIDEST], b[WIDEST];
    char hex_a[2 * WIDEST + 1] = "", hex_b[2 * WIDEST + 1] = "";
    struct ckpt_tensor_info info = {.size = sizeof info};
    uint64_t numel = 1, first = atomic_load(&v->first[i]);

    ckpt_view_tensor(v->view, i, &info);
    for (uint32_t d = 0; d < info.rank; d++)
        numel *= info.shape[d];
    size_t width = numel && info.nbytes / numel ? (size_t)(info.nbytes / numel) : 1;
    if (width > WIDEST)
        width = WIDEST;
    uint64_t e = first / width;
    if (ckpt_view_tensor_pread(v->view, i, a, width, e * width, err) < 0 ||
        ckpt_view_tensor_pread(v->other, v->twin[i], b, width, e * width, err) < 0)
        return -1;
    hex_element(a, width, hex_a);
    hex_element(b, width, hex_b);
    ckpt_cleanup(ckpt_freep) char *index = index_text(&info, e);
    ckpt_cleanup(ckpt_freep) char *what =
        ckpt_asprintf("element [%s] is 0x%s, in %s 0x%s", index ? index : "", hex_a, v->dir, hex_b);
    return what ? differ(v, "tensor", info.name, what, err) : ckpt_nomem(err);
}

static int compare_tensors(const struct ckpt_tool *t, struct verify *v, struct ckpt_err *err)
{
    const struct ckpt_pump pump = {.view = v->view,
                                   .items = &v->tensors,
                                   .jobs = t->jobs,
                                   .quiet = t->quiet,
                                   .start = v->start,
                                   .ctx = v,
                                   .sink = compare_chunk};

    if (unmatched(v, err) < 0 || ckpt_pump_run(&pump, NULL, err) < 0)
        return -1;
    for (size_t i = 0; i < v->tensors.n; i++)
        if (atomic_load(&v->first[i]) != SAME && describe_first(v, i, err) < 0)
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

/* Compare one file's bytes with the open fd. *what describes the difference; NULL: none. */
static int compare_bytes(const struct verify *v, const struct ckpt_item *item, int fd, char **what,
                         struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) unsigned char *a = malloc(2 * (size_t)CKPT_PUMP_CHUNK);
    unsigned char *b = a + CKPT_PUMP_CHUNK;

    if (!a)
        return ckpt_nomem(err);
    for (uint64_t off = 0; off < item->size;) {
        size_t len = item->size - off < CKPT_PUMP_CHUNK ? (size_t)(item->size - off)
                                                        : (size_t)CKPT_PUMP_CHUNK;
        uint64_t at = off;
        const int rc = ckpt_fdio_pread(fd, b, len, &at);
        if (rc)
            return ckpt_fail_errno(err, ckpt_fdio_errno(rc), "reading %s/%s", v->dir, item->path);
        if (ckpt_item_pread(v->view, item, a, len, off, err) < 0)
            return -1;
        const size_t same = ckpt_same_bytes(a, b, len);
        if (same < len) {
            *what = ckpt_asprintf("byte %" PRIu64 " is 0x%02x, in %s 0x%02x", off + same, a[same],
                                  v->dir, b[same]);
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

/* Are two values equal? 10000 and 10000.0 are. */
static bool same_value(const json_t *a, const json_t *b)
{
    if (json_is_number(a) && json_is_number(b))
        return !(json_number_value(a) < json_number_value(b)) &&
               !(json_number_value(a) > json_number_value(b));
    return json_equal(a, b);
}

/* The first key that both objects have with different values; NULL: there is none. */
static const char *contradiction(const json_t *a, const json_t *b)
{
    const char *key;
    json_t *value;

    json_object_foreach((json_t *)a, key, value) {
        const json_t *other = json_object_get(b, key);
        if (other && !same_value(value, other))
            return key;
    }
    return NULL;
}

/* Compare two versions of a config: if no key contradicts, *what becomes NULL and a note is added.
 */
static int compare_config(struct verify *v, const struct ckpt_item *item, int fd, char **what,
                          struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *text = malloc((size_t)item->size + 1);

    if (!text)
        return ckpt_nomem(err);
    if (ckpt_item_pread(v->view, item, text, (size_t)item->size, 0, err) < 0)
        return -1;
    ckpt_cleanup(ckpt_json_decrefp) json_t *ours = json_loadb(text, (size_t)item->size, 0, NULL);
    ckpt_cleanup(ckpt_json_decrefp) json_t *theirs =
        lseek(fd, 0, SEEK_SET) == 0 ? json_loadfd(fd, 0, NULL) : NULL;
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
    ckpt_cleanup(ckpt_freep) char *path = ckpt_asprintf("%s/%s", v->dir, item->path);
    ckpt_cleanup(ckpt_freep) char *what = NULL;
    struct stat st;

    if (!path)
        return ckpt_nomem(err);
    ckpt_cleanup(ckpt_closep) int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0 && errno != ENOENT)
        return ckpt_fail_errno(err, errno, "%s", path);
    if (fd < 0 && strcmp(item->path, "generation_config.json") == 0) {
        note(v, item->path, "only in the view");
        return 0;
    }
    if (fd < 0) {
        what = ckpt_asprintf("missing in %s", v->dir);
    } else if (fstat(fd, &st) < 0 || !S_ISREG(st.st_mode)) {
        what = ckpt_asprintf("not a regular file in %s", v->dir);
    } else if ((uint64_t)st.st_size != item->size) {
        what = ckpt_asprintf("%" PRIu64 " bytes, in %s %lld", item->size, v->dir,
                             (long long)st.st_size);
    } else if (compare_bytes(v, item, fd, &what, err) < 0) {
        return -1;
    }
    if (what && fd >= 0 && is_config(item->path) && compare_config(v, item, fd, &what, err) < 0)
        return -1;
    return what ? differ(v, "file", item->path, what, err) : 0;
}

/* Note the names below DIR that the view does not have. Weight files may be split differently. */
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

static int compare_files(struct verify *v, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_items_release) struct ckpt_items files = {0};

    if (ckpt_items_files(v->view, &files, err) < 0)
        return -1;
    for (size_t i = 0; i < files.n; i++)
        if (!is_model_file(files.item[i].path) && compare_file(v, &files.item[i], err) < 0)
            return -1;
    note_extra(v, "", 0);
    return 0;
}

/* ---- the command ---- */

static int report(const struct ckpt_tool *t, struct verify *v, struct ckpt_err *err)
{
    size_t n = json_array_size(v->differences), i;
    json_t *d;
    char size[CKPT_OUT_SIZE];

    if (t->json) {
        ckpt_cleanup(ckpt_json_decrefp) json_t *j = json_pack(
            "{s:b, s:I, s:I, s:O, s:O}", "equal", n == 0, "tensors", (json_int_t)v->compared,
            "bytes", (json_int_t)v->bytes, "differences", v->differences, "notes", v->notes);
        if (ckpt_out_json(j, err) < 0)
            return -1;
        return n ? CKPT_TOOL_DIFFERENT : CKPT_TOOL_GOOD;
    }
    json_array_foreach(v->notes, i, d)
        if (i < SHOWN)
            (void)printf("note: %s\n", json_string_value(d));
    json_array_foreach(v->differences, i, d) {
        const char *tensor = json_string_value(json_object_get(d, "tensor"));
        const char *file = json_string_value(json_object_get(d, "file"));
        if (i < SHOWN)
            (void)printf("%s %s: %s\n", tensor ? "tensor" : "file", tensor ? tensor : file,
                         json_string_value(json_object_get(d, "what")));
    }
    if (n > SHOWN)
        (void)printf("... and %zu more\n", n - SHOWN);
    if (n)
        (void)printf("different: %zu of %zu tensors and files\n", n, ckpt_view_tensors(v->view));
    else
        (void)printf("equal: %zu tensors, %s\n", v->compared, ckpt_out_size(v->bytes, size));
    return n ? CKPT_TOOL_DIFFERENT : CKPT_TOOL_GOOD;
}

/* Open DIR's tensors under their stored names. */
static int open_other(const char *dir, struct ckpt_run **ret_run, struct ckpt_view **ret_view,
                      struct ckpt_err *err)
{
    struct ckpt_options *opt = NULL;
    int rc = ckpt_options_new(&opt, err);

    if (rc == 0)
        rc = ckpt_options_set(opt, "view", "raw", err);
    if (rc == 0)
        rc = ckpt_tool_open_run(dir, opt, NULL, ret_run, ret_view, err);
    ckpt_options_free(opt);
    if (rc < 0)
        return -1;
    const char *source = ckpt_view_source(*ret_view);
    if (strncmp(source, "hf", 2) == 0 || strncmp(source, "peft", 4) == 0)
        return 0;
    return ckpt_fail(err, CKPT_USAGE,
                     "'%s' is not a model directory but a checkpoint (%s): ckpt verify RUN DIR "
                     "compares with what ckpt export RUN DIR writes",
                     dir, source);
}

int ckpt_cmd_verify(const struct ckpt_tool *t, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_runp) struct ckpt_run *run = NULL, *other_run = NULL;
    ckpt_cleanup(ckptfs_viewp) struct ckpt_view *view = NULL, *other = NULL;
    ckpt_cleanup(verify_release) struct verify v = {.dir = t->operand[0]};

    if (ckpt_tool_open(t, &run, &view, err) < 0 ||
        open_other(t->operand[0], &other_run, &other, err) < 0)
        return -1;
    v.view = view;
    v.other = other;
    v.differences = json_array();
    v.notes = json_array();
    if (match_all(&v, err) < 0 || compare_tensors(t, &v, err) < 0 ||
        (!t->tensors && compare_files(&v, err) < 0) || ckpt_view_verify_unchanged(view, err) < 0 ||
        ckpt_view_verify_unchanged(other, err) < 0)
        return -1;
    return report(t, &v, err);
}
