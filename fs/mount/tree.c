/* SPDX-License-Identifier: Apache-2.0 */
/* Names, listings and contents of the mounted tree. */
#include "mount/tree.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <xxhash.h>

#include "base/ckd.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/str.h"
#include "common.h"
#include "mount/reply.h"
#include "mount/watchdog.h"

static const char CONTROL_NAME[] = ".ckptfs", STATS_NAME[] = "stats.json",
                  PROMETHEUS_NAME[] = "stats.prom", LATEST_NAME[] = "latest",
                  ERROR_NAME[] = "CKPTFS-ERROR.txt";

/* Lanes of requests (admission.h) are hashes whose seed is the kind of work. */
enum { OPENING = 1, READING };

static uint64_t hash(const char *text, uint64_t seed)
{
    return XXH3_64bits_withSeed(text, strlen(text), seed);
}

static struct ckptfs_id id_of_step(const struct ckpt_step *s)
{
    return (struct ckptfs_id){.kind = CKPTFS_STEP,
                              .generation = s->generation,
                              .step = s->name,
                              .path = "",
                              .mtime_ns = s->mtime_ns};
}

/* A symlink to the step. */
static struct ckptfs_id id_of_link(const struct ckpt_step *s)
{
    return (struct ckptfs_id){.kind = CKPTFS_LINK,
                              .step = "",
                              .path = s->name,
                              .size = strlen(s->name),
                              .mtime_ns = s->mtime_ns};
}

static struct ckptfs_id id_of_vnode(const struct ckpt_view *view, const char *step,
                                    const struct ckpt_node *node, const char *path)
{
    bool dir = ckpt_node_is_dir(node);
    return (struct ckptfs_id){.kind = dir ? CKPTFS_DIR : CKPTFS_FILE,
                              .generation = ckpt_view_generation(view),
                              .step = step,
                              .path = path,
                              .size = dir ? 0 : ckpt_node_size(node),
                              .mtime_ns = ckpt_node_mtime_ns(node)};
}

static struct ckptfs_id id_of_stats(const char *name)
{
    return (struct ckptfs_id){.kind = CKPTFS_STATS, .step = "", .path = name};
}

/* The text of CKPTFS-ERROR.txt; the caller frees it. */
static char *error_text(const struct ckpt_err *err)
{
    return ckpt_asprintf("%s: %s\n", ckpt_code_name(err->code), err->text);
}

static int id_of_error(const struct ckptfs_id *dir, const struct ckpt_err *err,
                       struct ckptfs_id *ret)
{
    ckpt_cleanup(ckpt_freep) char *text = error_text(err);

    if (!text)
        return ENOMEM;
    *ret = (struct ckptfs_id){.kind = CKPTFS_ERROR,
                              .generation = XXH3_64bits(text, strlen(text)),
                              .step = dir->step,
                              .path = ERROR_NAME,
                              .size = strlen(text),
                              .mtime_ns = dir->mtime_ns};
    return 0;
}

/* Does dir show the root of a view? */
static bool is_view_root(struct ckptfs *fs, const struct ckptfs_node *dir)
{
    ckpt_cleanup(ckptfs_steps_releasep) struct ckptfs_steps *steps = NULL;

    if (dir->id.kind != CKPTFS_ROOT)
        return dir->id.kind == CKPTFS_STEP;
    steps = ckptfs_steps_hold(&fs->refresh);
    return steps && !steps->folder;
}

/* The path of a name in a directory below its step, in ret->text. */
static int join(const struct ckptfs_id *dir, const char *name, struct ckptfs_found *ret)
{
    const int n =
        snprintf(ret->text, sizeof ret->text, "%s%s%s", dir->path, *dir->path ? "/" : "", name);

    return n < 0 || (size_t)n >= sizeof ret->text ? ENAMETOOLONG : 0;
}

static int lookup_in_view(struct ckptfs *fs, const struct ckptfs_node *dir, const char *name,
                          struct ckptfs_found *ret)
{
    ckpt_cleanup(ckpt_view_releasep) struct ckpt_view *view = NULL;
    struct ckpt_err err = {0};

    if (join(&dir->id, name, ret))
        return ENAMETOOLONG;
    if (ckptfs_view_of_node(&fs->refresh, &dir->id, &view, &err) < 0) {
        if (err.code == CKPT_STALE || err.code == CKPT_NOMEM || *dir->id.path)
            return ckptfs_errno(&err);
        return strcmp(name, ERROR_NAME) == 0 ? id_of_error(&dir->id, &err, &ret->id) : ENOENT;
    }
    /* The root's inode stays when its checkpoint is saved again, so its names are never permanent.
     */
    ret->lasting = dir->id.kind != CKPTFS_ROOT;
    const struct ckpt_node *node = ckpt_view_find(view, ret->text);
    if (!node)
        return ENOENT;
    ret->id = id_of_vnode(view, dir->id.step, node, ret->text);
    return 0;
}

static int copy_text(struct ckptfs_found *ret, const char **text)
{
    size_t n = strlen(*text) + 1;

    if (n > sizeof ret->text)
        return ENAMETOOLONG;
    *text = memcpy(ret->text, *text, n);
    return 0;
}

static int lookup_step(struct ckptfs *fs, const char *name, struct ckptfs_found *ret)
{
    ckpt_cleanup(ckptfs_steps_releasep) struct ckptfs_steps *steps =
        ckptfs_steps_hold(&fs->refresh);
    const struct ckpt_step_link *link;
    const struct ckpt_step *s;

    if (!steps)
        return ENOENT;
    if ((s = ckptfs_steps_find(steps, name))) {
        ret->id = id_of_step(s);
        return copy_text(ret, &ret->id.step);
    }
    if ((link = ckptfs_steps_link(steps, name)))
        s = ckptfs_steps_find(steps, link->step);
    else if (strcmp(name, LATEST_NAME) == 0)
        s = ckptfs_steps_latest(steps);
    if (s) {
        ret->id = id_of_link(s);
        return copy_text(ret, &ret->id.path);
    }
    return ENOENT;
}

int ckptfs_tree_lookup(struct ckptfs *fs, const struct ckptfs_node *dir, const char *name,
                       struct ckptfs_found *ret)
{
    ret->lasting = false;
    if (strlen(name) > NAME_MAX)
        return ENAMETOOLONG;
    switch (dir->id.kind) {
    case CKPTFS_ROOT:
        if (strcmp(name, CONTROL_NAME) == 0) {
            ret->id = (struct ckptfs_id){.kind = CKPTFS_CONTROL, .step = "", .path = ""};
            return 0;
        }
        return is_view_root(fs, dir) ? lookup_in_view(fs, dir, name, ret)
                                     : lookup_step(fs, name, ret);
    case CKPTFS_STEP:
    case CKPTFS_DIR:
        return lookup_in_view(fs, dir, name, ret);
    case CKPTFS_CONTROL:
        ret->id = id_of_stats(strcmp(name, STATS_NAME) == 0 ? STATS_NAME : PROMETHEUS_NAME);
        return strcmp(name, ret->id.path) == 0 ? 0 : ENOENT;
    default:
        return ENOTDIR;
    }
}

/* ---- handles ---- */

static void enlist(struct ckptfs *fs, struct ckptfs_handle *h)
{
    atomic_init(&h->refs, 1);
    (void)pthread_mutex_lock(&fs->handles.lock);
    LIST_INSERT_HEAD(&fs->handles.all, h, link);
    (void)pthread_mutex_unlock(&fs->handles.lock);
}

struct ckptfs_handle *ckptfs_handle_hold(struct ckptfs_handle *h)
{
    atomic_fetch_add(&h->refs, 1);
    return h;
}

void ckptfs_handle_close(struct ckptfs *fs, struct ckptfs_handle *h)
{
    if (atomic_fetch_sub(&h->refs, 1) > 1)
        return;
    (void)pthread_mutex_lock(&fs->handles.lock);
    LIST_REMOVE(h, link);
    (void)pthread_mutex_unlock(&fs->handles.lock);
    if (h->ino)
        ckptfs_nodes_forget(&fs->nodes, h->ino, 1);
    ckpt_view_release(h->view);
    ckptfs_steps_release(h->steps);
    free(h->text);
    free(h);
}

void ckptfs_tree_close(struct ckptfs *fs)
{
    for (struct ckptfs_handle *h; (h = LIST_FIRST(&fs->handles.all));)
        ckptfs_handle_close(fs, h);
}

/* ---- listings ---- */

/* A listing has exactly one source of names: a directory of a view, a list of steps, or neither,
 * which is .ckptfs with its one file. */
struct ckptfs_listing {
    struct ckptfs_handle handle;   /* must be the first member, so that it can be closed */
    const struct ckptfs_node *dir; /* the kernel holds it while it is open */
    const struct ckpt_node *vdir;  /* of handle.view */
    struct ckpt_err err;           /* the step cannot be read: the only entry is CKPTFS-ERROR.txt */
    bool failed;
    bool latest; /* the symlink "latest" follows the steps and the run's own links */
    size_t n;
};

static int list_view(struct ckptfs *fs, struct ckptfs_listing *l)
{
    const struct ckptfs_node *dir = l->dir;

    if (ckptfs_view_of_node(&fs->refresh, &dir->id, &l->handle.view, &l->err) < 0) {
        if (l->err.code == CKPT_STALE || l->err.code == CKPT_NOMEM || *dir->id.path)
            return ckptfs_errno(&l->err);
        l->failed = true;
        l->n = 1;
        return 0;
    }
    l->vdir = *dir->id.path ? ckpt_view_find(l->handle.view, dir->id.path)
                            : ckpt_view_root(l->handle.view);
    if (!l->vdir)
        return ESTALE;
    l->n = ckpt_node_children(l->vdir);
    return 0;
}

static void list_steps(struct ckptfs *fs, struct ckptfs_listing *l)
{
    const struct ckptfs_steps *s = l->handle.steps = ckptfs_steps_hold(&fs->refresh);

    l->latest = s && ckptfs_steps_latest(s) && !ckptfs_steps_find(s, LATEST_NAME);
    l->n = s ? s->n + s->nlink + l->latest : 0;
}

int ckptfs_listing_open(struct ckptfs *fs, const struct ckptfs_node *dir,
                        struct ckptfs_listing **ret)
{
    struct ckptfs_listing *l = calloc(1, sizeof *l);
    int rc = 0;

    if (!l)
        return ENOMEM;
    l->dir = dir;
    enlist(fs, &l->handle);
    if (dir->id.kind == CKPTFS_CONTROL)
        l->n = 2;
    else if (dir->id.kind != CKPTFS_ROOT || is_view_root(fs, dir))
        rc = list_view(fs, l);
    else
        list_steps(fs, l);
    if (rc) {
        ckptfs_handle_close(fs, &l->handle);
        return rc;
    }
    *ret = l;
    return 0;
}

size_t ckptfs_listing_count(const struct ckptfs_listing *l) { return l->n; }

bool ckptfs_listing_lasting(const struct ckptfs_listing *l)
{
    return l->vdir && l->dir->id.kind != CKPTFS_ROOT;
}

const char *ckptfs_listing_name(const struct ckptfs_listing *l, size_t i)
{
    if (l->failed)
        return ERROR_NAME;
    if (l->vdir)
        return ckpt_node_name(ckpt_node_child(l->vdir, i));
    const struct ckptfs_steps *s = l->handle.steps;
    if (s)
        return i < s->n              ? s->step[i].name
               : i < s->n + s->nlink ? s->link[i - s->n].name
                                     : LATEST_NAME;
    return i ? PROMETHEUS_NAME : STATS_NAME;
}

int ckptfs_listing_find(const struct ckptfs_listing *l, size_t i, struct ckptfs_found *ret)
{
    const struct ckptfs_id *dir = &l->dir->id;

    ret->lasting = ckptfs_listing_lasting(l);
    if (l->failed)
        return id_of_error(dir, &l->err, &ret->id);
    if (l->vdir) {
        const struct ckpt_node *node = ckpt_node_child(l->vdir, i);
        if (join(dir, ckpt_node_name(node), ret))
            return ENAMETOOLONG;
        ret->id = id_of_vnode(l->handle.view, dir->step, node, ret->text);
        return 0;
    }
    const struct ckptfs_steps *s = l->handle.steps;
    if (!s || i < s->n) {
        ret->id = s ? id_of_step(&s->step[i]) : id_of_stats(i ? PROMETHEUS_NAME : STATS_NAME);
        return 0;
    }
    const struct ckpt_step *to =
        i < s->n + s->nlink ? ckptfs_steps_find(s, s->link[i - s->n].step) : ckptfs_steps_latest(s);
    if (!to) /* the run changed between its two lists */
        return ENOENT;
    ret->id = id_of_link(to);
    return 0;
}

/* ---- contents ---- */

struct ckptfs_file {
    struct ckptfs_handle handle;  /* must be the first member, as above */
    const struct ckpt_node *node; /* of handle.view; if that is NULL, handle.text is the file */
    uint64_t size;
    const struct ckptfs_id *id; /* of its inode, which the handle holds */
    struct ckptfs_lanes lanes;  /* lanes of its reads */
    atomic_flag complained;     /* one log line per open file is enough */
};

static int open_error(struct ckptfs *fs, const struct ckptfs_node *node, char **ret)
{
    ckpt_cleanup(ckpt_view_releasep) struct ckpt_view *view = NULL;
    struct ckpt_err err = {0};

    if (ckptfs_view_of(&fs->refresh, node->id.step, &view, &err) == 0)
        return ESTALE; /* the step has become readable since */
    if (!(*ret = error_text(&err)))
        return ENOMEM;
    return XXH3_64bits(*ret, strlen(*ret)) == node->id.generation ? 0 : ESTALE;
}

static int open_vfile(struct ckptfs *fs, const struct ckptfs_node *node, struct ckptfs_file *f)
{
    struct ckpt_err err = {0};

    if (ckptfs_view_of_node(&fs->refresh, &node->id, &f->handle.view, &err) < 0)
        return ckptfs_errno(&err);
    f->node = ckpt_view_find(f->handle.view, node->id.path);
    if (!f->node)
        return ESTALE;
    f->size = ckpt_node_size(f->node);
    return 0;
}

static int open_content(struct ckptfs *fs, const struct ckptfs_node *node, struct ckptfs_file *f)
{
    int rc;

    switch (node->id.kind) {
    case CKPTFS_FILE:
        return open_vfile(fs, node, f);
    case CKPTFS_ERROR:
        rc = open_error(fs, node, &f->handle.text);
        break;
    default:
        f->handle.text = strcmp(node->id.path, STATS_NAME) == 0 ? ckptfs_stats_text(fs)
                                                                : ckptfs_stats_prometheus(fs);
        rc = f->handle.text ? 0 : ENOMEM;
    }
    if (!rc)
        f->size = strlen(f->handle.text);
    return rc;
}

int ckptfs_file_open(struct ckptfs *fs, const struct ckptfs_node *node, struct ckptfs_file **ret)
{
    struct ckptfs_file *f = calloc(1, sizeof *f);
    int rc;

    if (!f)
        return ENOMEM;
    enlist(fs, &f->handle);
    atomic_flag_clear(&f->complained);
    f->id = &node->id;
    f->lanes = (struct ckptfs_lanes){.step = hash(f->id->step, READING),
                                     .file = hash(f->id->path, hash(f->id->step, READING)),
                                     .file_jobs = CKPTFS_FILE_JOBS,
                                     .step_name = f->id->step,
                                     .path = f->id->path};
    if (ckptfs_nodes_ref(&fs->nodes, &node->id))
        f->handle.ino = node->ino;
    rc = f->handle.ino ? open_content(fs, node, f) : ENOMEM;
    if (rc) {
        ckptfs_handle_close(fs, &f->handle);
        return rc;
    }
    *ret = f;
    return 0;
}

bool ckptfs_file_uncached(const struct ckptfs_file *f) { return !f->handle.view; }

/* Read from a view. The kernel takes a short reply for the end of the file and silently truncates
 * its cached size, so the library's promise never to read short is checked here too. */
static int read_view(struct ckptfs *fs, struct ckptfs_file *f, void *buf, size_t len, uint64_t off,
                     size_t *ret_len)
{
    struct ckpt_err err = {0};

    *ret_len = 0;
    if (ckpt_node_pread(f->handle.view, f->node, buf, len, off, ret_len, &err) == 0) {
        ckptfs_storage_answers(fs, &f->lanes);
        if (*ret_len == len || off + *ret_len >= f->size)
            return 0;
        (void)ckpt_fail(&err, CKPT_IO, "%s: %zu of %zu bytes at offset %llu", f->id->path, *ret_len,
                        len, (unsigned long long)off);
    }
    atomic_fetch_add_explicit(&fs->count.errors, 1, memory_order_relaxed);
    /* the library logs once per view that a shard has changed */
    if (err.code == CKPT_TIMEOUT)
        ckptfs_storage_is_silent(fs, &f->lanes, err.text);
    else if (!atomic_flag_test_and_set(&f->complained) && err.code != CKPT_STALE)
        ckptfs_logf(fs->log, CKPT_ERROR, "reading %s%s%s", f->id->step, *f->id->step ? "/" : "",
                    err.text); /* the text begins with the file's name */
    return ckptfs_read_errno(&err);
}

int ckptfs_file_read(struct ckptfs *fs, struct ckptfs_file *f, void *buf, size_t len, uint64_t off,
                     size_t *ret_len)
{
    if (f->handle.view && !fs->config->null_reads)
        return read_view(fs, f, buf, len, off, ret_len);
    *ret_len = off < f->size ? (size_t)ckpt_min_u64(len, f->size - off) : 0;
    if (f->handle.text && *ret_len)
        memcpy(buf, f->handle.text + off, *ret_len);
    return 0;
}

bool ckptfs_tree_waits(struct ckptfs *fs, const struct ckptfs_node *node,
                       struct ckpt_view **ret_view, struct ckptfs_lanes *ret)
{
    const enum ckptfs_kind kind = node->id.kind;
    const char *step = node->id.step;
    struct ckpt_run *run = atomic_load(&fs->refresh.run);

    *ret_view = NULL;
    if (kind == CKPTFS_LINK || kind == CKPTFS_CONTROL || kind == CKPTFS_STATS ||
        (kind == CKPTFS_ROOT && !is_view_root(fs, node)))
        return false;
    /* all requests that open the same step share the lane of a file */
    *ret = (struct ckptfs_lanes){.step = hash(step, OPENING),
                                 .file = hash("", hash(step, OPENING)),
                                 .file_jobs = CKPTFS_OPEN_JOBS,
                                 .step_name = step};
    if (run)
        *ret_view = ckpt_run_view_if_open(run, *step ? step : NULL);
    return *ret_view == NULL;
}

bool ckptfs_file_waits(const struct ckptfs_file *f, struct ckptfs_lanes *ret)
{
    *ret = f->lanes;
    return f->handle.view != NULL;
}

int ckptfs_tree_source(struct ckptfs *fs, const struct ckptfs_node *node, char **ret)
{
    ckpt_cleanup(ckpt_view_releasep) struct ckpt_view *view = NULL;
    enum ckptfs_kind kind = node->id.kind;

    if (kind != CKPTFS_STEP && kind != CKPTFS_DIR && kind != CKPTFS_FILE &&
        !(kind == CKPTFS_ROOT && is_view_root(fs, node)))
        return ENODATA;
    if (ckptfs_view_of_node(&fs->refresh, &node->id, &view, NULL) < 0)
        return ENODATA;
    *ret = strdup(ckpt_view_source(view));
    return *ret ? 0 : ENOMEM;
}

int64_t ckptfs_root_mtime(struct ckptfs *fs)
{
    ckpt_cleanup(ckptfs_steps_releasep) struct ckptfs_steps *steps =
        ckptfs_steps_hold(&fs->refresh);
    int64_t newest = 0;

    for (size_t i = 0; steps && i < steps->n; i++)
        if (steps->step[i].mtime_ns > newest)
            newest = steps->step[i].mtime_ns;
    return newest;
}
