/* SPDX-License-Identifier: Apache-2.0 */
/* Lists of folders, which are asked for one by one; once several below the same folder have been,
 * everything below that is listed, breadth first, many folders at the same time. */
#include "io/far/dir_listed.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/ckd.h"
#include "base/map.h"
#include "base/mem.h"
#include "base/par.h"
#include "base/str.h"
#include "base/thread.h"
#include "base/vec.h"

enum {
    FOLDERS = 8,            /* listed one by one, before all below their common folder are */
    MOST_ENTRIES = 1 << 20, /* of what is listed at once: beyond it, folders again */
};

enum state {
    NOT_LISTED, /* it could not be */
    ASKED,      /* a thread lists it; others wait */
    LISTED,
};

struct folder {
    enum state state;
    int rc;           /* 0, or the errno of listing it */
    const char *list; /* ckpt_listed_next */
    size_t len;
};

struct listed {
    struct ckpt_dir_way under;
    pthread_mutex_t lock;    /* protects what follows */
    pthread_cond_t answered; /* a folder that was asked for */
    pid_t owner;             /* the process whose threads ask */
    struct ckpt_map index;   /* a folder's path -> folder */
    struct ckpt_map entries; /* the paths of all entries; values are not used */
    CKPT_VEC(struct folder) folders;
    struct ckpt_arena arena;
    uint64_t refreshed; /* how often: a list that was begun before is not kept */
    char *common;       /* folder of all that were listed one by one; NULL: there was none */
    unsigned one_by_one;
    bool walks; /* a thread lists all below a folder */
};

static void forget(struct listed *l)
{
    ckpt_map_release(&l->index);
    ckpt_map_release(&l->entries);
    ckpt_vec_release(&l->folders);
    ckpt_arena_release(&l->arena);
    free(l->common);
    l->common = NULL;
    l->one_by_one = 0;
    l->refreshed++;
}

/* ---- what is known; with the lock held ---- */

static struct folder *find_any(const struct listed *l, const char *path, size_t len)
{
    uint32_t at;

    return ckpt_map_get(&l->index, path, len, &at) ? &l->folders.ptr[at] : NULL;
}

static const struct folder *find(const struct listed *l, const char *path, size_t len)
{
    const struct folder *f = find_any(l, path, len);

    return f && f->state == LISTED ? f : NULL;
}

/* Length of the path of the folder that an entry is in; 0: the root. */
static size_t above(const char *path, size_t len)
{
    const char *slash = memrchr(path, '/', len);

    return slash ? (size_t)(slash - path) : 0;
}

/* Is there no such folder, or may it only not be listed? */
static bool is_absent(int rc) { return rc == ENOENT || rc == ENOTDIR; }

/* Does a list say that this path leads nowhere? An errno, or 0. */
static int says_no(const struct listed *l, const char *path)
{
    uint32_t ignored;

    for (size_t len = strlen(path), up; len; len = up) {
        up = above(path, len);
        const struct folder *f = up ? find(l, path, up) : find(l, ".", 1);
        if (f && f->rc)
            return is_absent(f->rc) ? f->rc : 0;
        if (f && !ckpt_map_get(&l->entries, path, len, &ignored))
            return ENOENT;
        if (f) /* a folder above it, too, is in a list then, or is reached by a link */
            return 0;
    }
    return 0;
}

/* Keep the answer about a folder that was asked for. -1: out of memory. */
static int add(struct listed *l, const char *path, const struct ckpt_str *list, int rc)
{
    const bool is_root = strcmp(path, ".") == 0;
    struct folder *f = find_any(l, path, strlen(path));
    struct ckpt_entry e;

    f->list = ckpt_arena_dup(&l->arena, ckpt_str_get(list), list->len);
    f->len = list->len;
    if (list->len && !f->list)
        return -1;
    for (const char *at = f->list, *end = at + f->len; at && ckpt_listed_next(&at, end, &e);) {
        ckpt_cleanup(ckpt_freep) char *whole =
            ckpt_asprintf("%s%s%s", is_root ? "" : path, is_root ? "" : "/", e.name);
        const char *kept = whole ? ckpt_arena_strdup(&l->arena, whole) : NULL;
        if (!kept || ckpt_map_add(&l->entries, kept, 0) == CKPT_NONE)
            return -1;
    }
    f->rc = rc;
    f->state = LISTED;
    return 0;
}

/* Note that a folder is asked for. */
static int add_asked(struct listed *l, const char *path)
{
    struct folder *f = find_any(l, path, strlen(path));
    const struct folder asked = {.state = ASKED};
    const char *own;

    if (f) {
        f->state = ASKED;
        return 0;
    }
    return !(own = ckpt_arena_strdup(&l->arena, path)) || ckpt_vec_push(&l->folders, asked) < 0 ||
                   ckpt_map_add(&l->index, own, (uint32_t)l->folders.len - 1) == CKPT_NONE
               ? -1
               : 0;
}

/* Wait while another thread lists the folder. A child of a fork has none of the parent's threads.
 */
static const struct folder *wait_for(struct listed *l, const char *path)
{
    const struct folder *f;

    if (l->owner != getpid()) {
        forget(l);
        (void)pthread_cond_init(&l->answered, NULL);
        l->walks = false;
        l->owner = getpid();
    }
    while ((f = find_any(l, path, strlen(path))) && f->state == ASKED)
        (void)pthread_cond_wait(&l->answered, &l->lock);
    return f && f->state == LISTED ? f : NULL;
}

/* Shorten `common` to the folder of both. */
static void meet(char *common, const char *path)
{
    size_t n = 0, same = 0;

    for (; common[n] && common[n] == path[n]; n++)
        if (common[n] == '/')
            same = n;
    if ((common[n] == '\0' || common[n] == '/') && (path[n] == '\0' || path[n] == '/'))
        same = n;
    common[same] = '\0';
}

/* ---- asking ---- */

/* Is another thread's answer to be had, or is this one to ask? 1: it asks. 0: *ret_known is the
 * answer. -1: out of memory. */
static int ask(struct listed *l, const char *path, uint64_t *ret_refreshed, int *ret_known,
               struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_unlockp) pthread_mutex_t *held = ckpt_lock(&l->lock);
    const struct folder *known = wait_for(l, path);

    *ret_refreshed = l->refreshed;
    *ret_known = known ? known->rc : 0;
    if (known)
        return 0;
    return add_asked(l, path) < 0 ? ckpt_nomem(err) : 1;
}

/* Keep the answer, if it is one, and the lists were not forgotten meanwhile. */
static int answer(struct listed *l, const char *path, uint64_t refreshed,
                  const struct ckpt_str *list, int rc, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_unlockp) pthread_mutex_t *held = ckpt_lock(&l->lock);
    const bool is_answer = rc == 0 || is_absent(rc) || rc == EACCES || rc == EPERM;

    (void)pthread_cond_broadcast(&l->answered);
    if (l->refreshed != refreshed)
        return rc;
    if (!is_answer || list->failed) {
        find_any(l, path, strlen(path))->state = NOT_LISTED;
        return is_answer ? ckpt_nomem(err) : rc;
    }
    if (add(l, path, list, rc) < 0) {
        forget(l); /* what is half there would be taken for all */
        return ckpt_nomem(err);
    }
    return rc;
}

/* List a folder, unless that was done; if another thread does so, wait for it. 0, an errno, or -1
 * and *err. */
static int list_one(struct listed *l, const char *path, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_str_release) struct ckpt_str list = {0};
    uint64_t refreshed;
    int known;
    const int asks = ask(l, path, &refreshed, &known, err);

    if (asks <= 0)
        return asks < 0 ? -1 : known;
    const int rc = l->under.ops->list(l->under.ctx, path, &list, err);
    return answer(l, path, refreshed, &list, rc, err);
}

/* Folders of one depth below a folder that is listed as a whole. */
struct level {
    struct listed *l;
    CKPT_VEC(char *) path;
};

static void level_release(struct level *v)
{
    for (size_t i = 0; i < v->path.len; i++)
        free(v->path.ptr[i]);
    ckpt_vec_release(&v->path);
}

static int list_nth(void *ctx, size_t i, struct ckpt_err *err)
{
    const struct level *v = ctx;

    (void)err;
    (void)list_one(v->l, v->path.ptr[i], &(struct ckpt_err){0}); /* who needs it asks again */
    return 0;
}

/* Add the folders in a folder. */
static int descend(struct level *next, const char *path)
{
    struct listed *l = next->l;
    ckpt_cleanup(ckpt_unlockp) pthread_mutex_t *held = ckpt_lock(&l->lock);
    const struct folder *f = find(l, path, strlen(path));
    struct ckpt_entry e;

    if (!f || l->entries.len > MOST_ENTRIES)
        return 0;
    for (const char *at = f->list, *end = at + f->len; at && ckpt_listed_next(&at, end, &e);) {
        if (e.kind != CKPT_ENTRY_DIR || e.is_link)
            continue;
        char *below = ckpt_asprintf("%s/%s", path, e.name);
        if (!below || ckpt_vec_push(&next->path, below) < 0) {
            free(below);
            return -1;
        }
    }
    return 0;
}

/* List a folder and all below it. Nothing fails: what is not listed is asked for again. */
static void list_below(struct listed *l, const char *top)
{
    struct level now = {.l = l};
    char *first = strdup(top);

    if (!first || ckpt_vec_push(&now.path, first) < 0) {
        free(first);
        return;
    }
    while (now.path.len) {
        struct level next = {.l = l};
        (void)ckpt_parallel(now.path.len, CKPT_FAR_QUESTIONS, list_nth, &now, NULL);
        for (size_t i = 0; i < now.path.len && descend(&next, now.path.ptr[i]) == 0; i++)
            ;
        level_release(&now);
        now = next;
    }
    level_release(&now);
}

/* Note that a folder is listed alone. Then *ret is the folder of which all is to be listed; NULL:
 * not yet. */
static void note(struct listed *l, const char *path, char **ret)
{
    ckpt_cleanup(ckpt_unlockp) pthread_mutex_t *held = ckpt_lock(&l->lock);

    *ret = NULL;
    if (l->walks || find(l, path, strlen(path)) || strcmp(path, ".") == 0)
        return;
    if (l->common)
        meet(l->common, path);
    else
        l->common = strdup(path);
    if (++l->one_by_one < FOLDERS)
        return;
    if (l->common && *l->common)
        *ret = ckpt_steal(&l->common);
    free(l->common);
    l->common = NULL;
    l->one_by_one = 0;
    l->walks = *ret != NULL;
}

static int need(struct listed *l, const char *path, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *all = NULL;

    note(l, path, &all);
    if (all) {
        list_below(l, all);
        ckpt_cleanup(ckpt_unlockp) pthread_mutex_t *held = ckpt_lock(&l->lock);
        l->walks = false;
    }
    return list_one(l, path, err);
}

/* Is it the root, or a path that goes by "."? Lists have no such names. */
static bool has_dot(const char *below)
{
    return strcmp(below, ".") == 0 || ckpt_has_prefix(below, "./") || strstr(below, "/./") ||
           ckpt_has_suffix(below, "/.");
}

/* Is there no such entry, by the lists that there are? An errno, or 0. */
static int ask_lists(struct listed *l, const char *below)
{
    ckpt_cleanup(ckpt_unlockp) pthread_mutex_t *held = ckpt_lock(&l->lock);

    return has_dot(below) ? 0 : says_no(l, below);
}

/* Is there no such entry, by the list of its folder? An errno, or 0. */
static int look_up(struct listed *l, const char *below)
{
    const size_t up = above(below, strlen(below));
    ckpt_cleanup(ckpt_freep) char *folder = up ? strndup(below, up) : strdup(".");
    const int rc = ask_lists(l, below);
    struct ckpt_err ignored = {0};

    if (rc || has_dot(below) || !folder || need(l, folder, &ignored) < 0)
        return rc;
    return ask_lists(l, below);
}

/* ---- the functions ---- */

static int listed_look(void *ctx, const char *below, struct ckpt_dir_found *ret,
                       struct ckpt_err *err)
{
    struct listed *l = ctx;
    const int rc = look_up(l, below);

    return rc ? rc : l->under.ops->look(l->under.ctx, below, ret, err);
}

/* Opening asks by itself whether there is such a file: nothing is listed for it. */
static int listed_open(void *ctx, const char *below, int *ret_fd, struct ckpt_dir_found *ret,
                       struct ckpt_err *err)
{
    struct listed *l = ctx;
    const int rc = ask_lists(l, below);

    return rc ? rc : l->under.ops->open(l->under.ctx, below, ret_fd, ret, err);
}

static int listed_list(void *ctx, const char *below, struct ckpt_str *ret, struct ckpt_err *err)
{
    struct listed *l = ctx;
    const int rc = need(l, below, err);

    if (rc)
        return rc;
    (void)pthread_mutex_lock(&l->lock);
    const struct folder *f = find(l, below, strlen(below));
    if (f)
        ckpt_str_append(ret, f->list, f->len);
    (void)pthread_mutex_unlock(&l->lock);
    return f ? 0 : l->under.ops->list(l->under.ctx, below, ret, err);
}

static void listed_refresh(void *ctx)
{
    struct listed *l = ctx;
    ckpt_cleanup(ckpt_unlockp) pthread_mutex_t *held = ckpt_lock(&l->lock);

    forget(l);
}

static void listed_free(void *ctx)
{
    struct listed *l = ctx;

    forget(l);
    if (l->under.ops && l->under.ops->free)
        l->under.ops->free(l->under.ctx);
    (void)pthread_cond_destroy(&l->answered);
    (void)pthread_mutex_destroy(&l->lock);
    free(l);
}

static const struct ckpt_dir_ops listed_ops = {.look = listed_look,
                                               .open = listed_open,
                                               .list = listed_list,
                                               .free = listed_free,
                                               .refresh = listed_refresh};

int ckpt_dir_keep_lists(struct ckpt_dir *dir, struct ckpt_err *err)
{
    struct listed *l = calloc(1, sizeof *l);

    if (!l)
        return ckpt_nomem(err);
    (void)pthread_mutex_init(&l->lock, NULL);
    (void)pthread_cond_init(&l->answered, NULL);
    l->owner = getpid();
    l->under = ckpt_dir_replace(dir, (struct ckpt_dir_way){&listed_ops, l});
    return 0;
}
