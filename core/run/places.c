/* SPDX-License-Identifier: Apache-2.0 */
/* Finding all files and directories from which a run's views are read. */
#include <errno.h>
#include <fts.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <ckptfs/ckptfs.h>

#include "base/mem.h"
#include "base/str.h"
#include "base/vec.h"
#include "io/bucket/cache.h"
#include "io/bucket/dir_bucket.h"
#include "io/dir.h"
#include "io/far/dir_bounded.h"
#include "model/base.h"
#include "model/options.h"
#include "run/steps.h"

enum { DEEPEST = 16 }; /* limit of nested folders, because a link can lead to its own parent */

struct walk {
    int (*visit)(void *ctx, const char *place);
    void *ctx;
    bool follow;
    CKPT_VEC(char *)
    places; /* places found so far; those from `next` on have not been searched for links yet */
    size_t next;
    struct ckpt_err *err;
};

static void walk_release(struct walk *w)
{
    for (size_t i = 0; i < w->places.len; i++)
        free(w->places.ptr[i]);
    ckpt_vec_release(&w->places);
}

/* Nothing is asked by threads: those that are started now would not be confined. */
static const struct ckpt_far_options near = {.rule = CKPT_FAR_NEVER};

/* Is the path, or a directory above it, among the places? */
static bool is_known(const struct walk *w, const char *path)
{
    for (size_t i = 0; i < w->places.len; i++)
        if (ckpt_is_below(path, w->places.ptr[i]))
            return true;
    return false;
}

/* Add a place. Only directories are remembered, because there may be as many links to files as
 * shards. */
static int add(struct walk *w, const char *path)
{
    ckpt_cleanup(ckpt_freep) char *real = realpath(path, NULL);
    struct stat st;

    if (!real || stat(real, &st) < 0)
        return errno == ENOMEM ? ckpt_nomem(w->err) : 0;
    if (is_known(w, real))
        return 0;
    if (w->visit(w->ctx, real) != 0)
        return -1;
    if (!S_ISDIR(st.st_mode))
        return 0;
    if (ckpt_vec_push(&w->places, real) < 0)
        return ckpt_nomem(w->err);
    (void)ckpt_steal(&real);
    return 0;
}

static int add_links_below(struct walk *w, const char *path)
{
    char *const roots[] = {(char *)path, NULL};
    FTS *tree = fts_open(roots, FTS_PHYSICAL | FTS_NOCHDIR, NULL);
    FTSENT *e;
    int result = 0;

    if (!tree)
        return ckpt_fail_errno(w->err, errno, "cannot look for links in '%s'", path);
    while (result == 0 && (e = fts_read(tree))) {
        if (e->fts_info == FTS_D && e->fts_level >= DEEPEST)
            (void)fts_set(tree, e, FTS_SKIP);
        else if (e->fts_info == FTS_SL)
            result = add(w, e->fts_accpath);
    }
    (void)fts_close(tree);
    return result;
}

/* Add the path, or the folder in which it may appear. */
static int add_nearest(struct walk *w, const char *path)
{
    ckpt_cleanup(ckpt_freep) char *copy = strdup(path);
    char *slash;

    if (!copy)
        return ckpt_nomem(w->err);
    while (access(copy, F_OK) < 0 && errno == ENOENT && (slash = strrchr(copy, '/')) &&
           slash > copy)
        *slash = '\0';
    return add(w, copy);
}

/* Add a run or a base: its directory, the model's folder of the hub cache that it is a snapshot of,
 * or the folder above weights alone, and the targets of its links. */
static int add_tree(struct walk *w, const char *path)
{
    ckpt_cleanup(ckpt_freep) char *folder = ckpt_part_folder(path, &near);
    ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *dir = NULL;

    if (ckpt_is_bucket(path))
        return 0;
    if (folder && add(w, folder) < 0)
        return -1;
    if (ckpt_dir_open_near(path, CKPT_LINKS_BENEATH, &dir, NULL) < 0)
        return add_nearest(w, path);
    const char *blobs = ckpt_dir_hub_blobs(dir);
    ckpt_cleanup(ckpt_freep) char *model =
        blobs ? ckpt_asprintf("%.*s", (int)(strrchr(blobs, '/') - blobs), blobs)
              : ckpt_part_above(dir);
    if (blobs && !model)
        return ckpt_nomem(w->err);
    if (add(w, model ? model : ckpt_dir_real_path(dir)) < 0)
        return -1;
    for (; w->follow && w->next < w->places.len; w->next++)
        if (add_links_below(w, w->places.ptr[w->next]) < 0)
            return -1;
    return 0;
}

/* Add the folder that a single checkpoint is in, if it has the model's config; of one that is a
 * file, the folder above that, too. */
static int add_home(struct walk *w, const char *path)
{
    ckpt_cleanup(ckpt_freep) char *real = realpath(path, NULL);
    ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *above = NULL;
    ckpt_cleanup(ckpt_home_release) struct ckpt_home home = {0};
    char *slash = real ? strrchr(real, '/') : NULL;

    if (!slash || slash == real)
        return 0;
    const bool is_file = ckpt_path_is_file_bounded(real, &near);
    *slash = '\0';
    if (ckpt_dir_open_near(real, CKPT_LINKS_BENEATH, &above, NULL) < 0 ||
        ckpt_home_find(above, NULL, &home, NULL) < 0)
        return 0; /* opening the run reports errors */
    if (home.dir)
        return add(w, real);
    return is_file ? add_home(w, real) : 0;
}

int ckpt_options_places(const struct ckpt_options *opt, const char *path,
                        int (*visit)(void *ctx, const char *place), void *ctx, struct ckpt_err *err)
{
    ckpt_cleanup(walk_release) struct walk w = {
        .visit = visit, .ctx = ctx, .follow = opt->follow_symlinks, .err = err};
    struct ckpt_access how = ckpt_options_access(opt);
    ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *dir = NULL;
    ckpt_cleanup(ckpt_freep) char *base = NULL;
    ckpt_cleanup(ckpt_freep) char *named = NULL;
    ckpt_cleanup(ckpt_freep) char *cache =
        opt->bucket.cache ? strdup(opt->bucket.cache) : ckpt_cache_default();

    how.far = near;
    if (opt->connected && cache && !opt->bucket.no_cache && add(&w, cache) < 0)
        return -1;
    for (size_t i = 0; i < opt->also.len; i++)
        if (add_tree(&w, opt->also.ptr[i]) < 0)
            return -1;
    if (add_tree(&w, path) < 0 || add_home(&w, path) < 0 ||
        (opt->recipe && add(&w, opt->recipe) < 0) ||
        (opt->key_mapping && add(&w, opt->key_mapping) < 0))
        return -1;
    if (!opt->base && opt->lora == CKPT_LORA_MERGE && !ckpt_is_bucket(path) &&
        ckpt_archive_open(path, &how, &dir, NULL) == 0)
        (void)ckpt_base_named(dir, true, &named, NULL);
    const char *name = opt->base ? opt->base : named;
    if (!name || ckpt_base_find(name, &base, NULL) < 0)
        return 0; /* opening the run reports the error */
    return add_tree(&w, base);
}
