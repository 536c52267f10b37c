/* SPDX-License-Identifier: Apache-2.0 */
/* The contents of stats.json, explain/TENSOR and digest/INODE. */
#include "mount/control.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "base/mem.h"
#include "json_text.h"
#include "mount/reply.h"
#include "view.h"

static const char *const control_names[] = {"stats.json", "explain", "digest"};

int ckptfs_control_kind(enum ckptfs_kind dir, const char *name, enum ckptfs_kind *ret)
{
    if (dir == CKPTFS_EXPLAIN_DIR)
        *ret = CKPTFS_EXPLAIN;
    else if (dir == CKPTFS_DIGEST_DIR)
        *ret = CKPTFS_DIGEST;
    else if (strcmp(name, "stats.json") == 0)
        *ret = CKPTFS_STATS;
    else if (strcmp(name, "explain") == 0)
        *ret = CKPTFS_EXPLAIN_DIR;
    else if (strcmp(name, "digest") == 0)
        *ret = CKPTFS_DIGEST_DIR;
    else
        return ENOENT;
    return 0;
}

/* Get the node of a view's file by its inode number and hold it (ckptfs_nodes_forget releases it);
 * NULL: there is no such file. */
static const struct ckptfs_node *hold_file(struct ckptfs *fs, const char *number)
{
    char *end;
    unsigned long long ino = strtoull(number, &end, 10);

    if (*number < '0' || *number > '9' || *end)
        return NULL;
    const struct ckptfs_node *n = ckptfs_nodes_hold(&fs->nodes, ino);
    if (n && n->id.kind != CKPTFS_FILE) {
        ckptfs_nodes_forget(&fs->nodes, n->ino, 1);
        n = NULL;
    }
    return n;
}

int ckptfs_control_lookup(struct ckptfs *fs, enum ckptfs_kind dir, const char *name,
                          enum ckptfs_kind *ret)
{
    ckpt_cleanup(ckptfs_viewp) struct ckpt_view *view = NULL;
    struct ckpt_err err = {0};

    if (dir == CKPTFS_EXPLAIN_DIR) {
        if (ckptfs_view_of(&fs->refresh, "", &view, &err) < 0)
            return ckptfs_errno(&err);
        if (!ckpt_view_find_tensor(view, name, &(size_t){0}))
            return ENOENT;
    }
    if (dir == CKPTFS_DIGEST_DIR) {
        const struct ckptfs_node *n = hold_file(fs, name);
        if (!n)
            return ENOENT;
        ckptfs_nodes_forget(&fs->nodes, n->ino, 1);
    }
    return ckptfs_control_kind(dir, name, ret);
}

size_t ckptfs_control_names(enum ckptfs_kind dir, const char *const **ret)
{
    *ret = control_names;
    return dir == CKPTFS_CONTROL ? sizeof control_names / sizeof *control_names : 0;
}

static json_int_t load(_Atomic uint64_t *n)
{
    return (json_int_t)atomic_load_explicit(n, memory_order_relaxed);
}

static json_t *settings(const struct ckptfs *fs)
{
    const struct ckptfs_negotiated *n = &fs->negotiated;
    char sandbox[64];

    return json_pack("{s:s, s:s, s:i, s:i, s:i, s:s, s:b, s:b, s:s}", "version", ckpt_version(),
                     "libfuse", fuse_pkgversion(), "protocol_minor", (int)n->proto_minor,
                     "max_read", (int)n->max_read, "threads", (int)fs->config->threads, "io",
                     fs->config->direct ? "direct" : "buffered", "direct_mmap", n->direct_mmap,
                     "null", fs->config->null_reads, "sandbox",
                     ckptfs_sandbox_text(&fs->sandbox, sandbox, sizeof sandbox));
}

/* The warnings of all views opened so far. */
static json_t *warnings_of(struct ckpt_run *run)
{
    struct ckpt_err err = {0};
    char *text = NULL;
    json_t *list = NULL;

    if (run && ckpt_run_warnings(run, &text, &err) == 0)
        list = json_loads(text, 0, NULL);
    free(text);
    return list ? list : json_array();
}

static char *stats_text(struct ckptfs *fs)
{
    struct ckpt_stats run_stats = {0};
    struct ckpt_run *run = atomic_load(&fs->refresh.run);
    struct ckptfs_steps *steps = ckptfs_steps_hold(&fs->refresh);
    struct ckptfs_counters *c = &fs->count;

    if (run)
        ckpt_run_stats(run, &run_stats);
    json_t *j = json_pack(
        "{s:o, s:I, s:I, s:{s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I}, s:{s:I, s:I, s:I, s:I, s:I, "
        "s:I, "
        "s:I},"
        " s:o, s:i, s:s, s:o}",
        "run", ckptfs_json_text(fs->config->run), "uptime_s",
        (json_int_t)(time(NULL) - fs->started), "steps", (json_int_t)(steps ? steps->n : 0), /**/
        "mount", "lookups", load(&c->lookups), "opens", load(&c->opens), "reads", load(&c->reads),
        "bytes", load(&c->read_bytes), "errors", load(&c->errors), "open_files",
        load(&c->open_files), "nodes", (json_int_t)ckptfs_nodes_count(&fs->nodes), "waiting",
        (json_int_t)ckptfs_dispatch_queued(&fs->dispatch), /**/
        "source", "requests", (json_int_t)run_stats.requests, "bytes", (json_int_t)run_stats.bytes,
        "reads", (json_int_t)run_stats.source_reads, "read_bytes",
        (json_int_t)run_stats.source_bytes, "cache_bytes", (json_int_t)run_stats.slab_bytes,
        "open_files", (json_int_t)run_stats.open_files, "errors", (json_int_t)run_stats.errors, /**/
        "settings", settings(fs), "readahead_kib", (int)fs->negotiated.readahead_kib, "bdi",
        fs->negotiated.dev, "warnings", warnings_of(run));
    ckptfs_steps_release(steps);
    char *text = j ? json_dumps(j, JSON_INDENT(2) | JSON_PRESERVE_ORDER) : NULL;
    json_decref(j);
    return text;
}

static int explain_text(struct ckptfs *fs, const char *tensor, char **ret)
{
    ckpt_cleanup(ckptfs_viewp) struct ckpt_view *view = NULL;
    struct ckpt_err err = {0};

    if (ckptfs_view_of(&fs->refresh, "", &view, &err) < 0 ||
        ckpt_view_explain(view, tensor, ret, &err) < 0)
        return ckptfs_errno(&err);
    return 0;
}

static int make_digest(struct ckptfs *fs, const struct ckptfs_node *n,
                       char text[CKPTFS_DIGEST_TEXT])
{
    ckpt_cleanup(ckptfs_viewp) struct ckpt_view *view = NULL;
    const struct ckpt_node *file;
    struct ckpt_err err = {0};

    if (ckptfs_view_of_node(&fs->refresh, &n->id, &view, &err) < 0)
        return ckptfs_errno(&err);
    if (!(file = ckpt_view_find(view, n->id.path)))
        return ESTALE;
    if (ckptfs_digest_make(&fs->digests, view, file, n->ino, text, &err) == 0)
        return 0;
    atomic_fetch_add_explicit(&fs->count.errors, 1, memory_order_relaxed);
    if (err.code != CKPT_STALE) /* the library logs STALE itself, once per view */
        ckptfs_logf(fs->log, CKPT_ERROR, "digest of %s%s%s", n->id.step, *n->id.step ? "/" : "",
                    err.text); /* the text begins with the file's name */
    return ckptfs_read_errno(&err);
}

static int digest_text(struct ckptfs *fs, const char *number, char **ret)
{
    char text[CKPTFS_DIGEST_TEXT];
    const struct ckptfs_node *n = hold_file(fs, number);
    int rc = 0;

    if (!n)
        return ENOENT;
    if (!ckptfs_digest_get(&fs->digests, n->ino, text))
        rc = make_digest(fs, n, text);
    ckptfs_nodes_forget(&fs->nodes, n->ino, 1);
    if (rc == 0)
        *ret = strdup(text);
    return rc;
}

/* Text files end with a newline. */
static int add_newline(char **text)
{
    size_t n = strlen(*text);

    if (n && (*text)[n - 1] == '\n')
        return 0;
    char *longer = realloc(*text, n + 2);
    if (!longer)
        return ENOMEM;
    memcpy(longer + n, "\n", 2);
    *text = longer;
    return 0;
}

int ckptfs_control_text(struct ckptfs *fs, const struct ckptfs_id *id, char **ret)
{
    if (id->kind == CKPTFS_STATS)
        *ret = stats_text(fs);
    else {
        int rc = id->kind == CKPTFS_DIGEST ? digest_text(fs, id->path, ret)
                                           : explain_text(fs, id->path, ret);
        if (rc)
            return rc;
    }
    return *ret ? add_newline(ret) : ENOMEM;
}
