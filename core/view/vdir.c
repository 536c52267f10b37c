/* SPDX-License-Identifier: Apache-2.0 */
/* Directories of a view: sort the paths, then give every run with one first component its node. */
#include "view/vdir.h"

#include <limits.h>
#include <string.h>

enum { MAX_DEPTH = 64 };

static bool component_ok(const char *s, size_t len)
{
    return len > 0 && len <= NAME_MAX && !(len == 1 && s[0] == '.') &&
           !(len == 2 && s[0] == '.' && s[1] == '.');
}

int ckpt_vdir_check_path(const char *path, struct ckpt_err *err)
{
    const char *s = path;
    size_t depth = 0;
    bool ok = strlen(path) < PATH_MAX;

    for (;;) {
        size_t len = strcspn(s, "/");
        ok = ok && component_ok(s, len) && ++depth <= MAX_DEPTH;
        if (!ok)
            return ckpt_fail(err, CKPT_FORMAT, "'%s' cannot be the path of a file in a view", path);
        if (!s[len])
            return 0;
        s += len + 1;
    }
}

/* By components: '/' sorts before every other byte. */
static int path_cmp(const void *a, const void *b)
{
    const unsigned char *x = (const void *)((const struct ckpt_vdir_file *)a)->path;
    const unsigned char *y = (const void *)((const struct ckpt_vdir_file *)b)->path;

    while (*x && *x == *y) {
        x++;
        y++;
    }
    int cx = *x == '/' ? 1 : *x ? *x + 1 : 0, cy = *y == '/' ? 1 : *y ? *y + 1 : 0;
    return cx - cy;
}

struct build {
    struct ckpt_arena *arena;
    int64_t mtime_ns;
    struct ckpt_err *err;
};

/* The end of the run, from lo on, whose paths have the same component at byte `at`. */
static size_t run_end(const struct ckpt_vdir_file *f, size_t lo, size_t hi, size_t at)
{
    size_t len = strcspn(f[lo].path + at, "/"), i = lo + 1;

    while (i < hi && strncmp(f[i].path + at, f[lo].path + at, len) == 0 &&
           (f[i].path[at + len] == '/' || f[i].path[at + len] == '\0'))
        i++;
    return i;
}

static struct ckpt_vnode *dir_of(struct build *b, struct ckpt_vdir_file *f, size_t lo, size_t hi,
                                 size_t at);

static struct ckpt_vnode *child_of(struct build *b, struct ckpt_vdir_file *f, size_t lo, size_t hi,
                                   size_t at)
{
    size_t len = strcspn(f[lo].path + at, "/");
    struct ckpt_vnode *node = f[lo].node;

    if (f[lo].path[at + len] == '/') {
        if (!(node = dir_of(b, f, lo, hi, at + len + 1)))
            return NULL;
    } else if (hi - lo > 1) {
        (void)ckpt_fail(b->err, CKPT_CONFLICT, "'%s' and '%s' cannot both be in the view",
                        f[lo].path, f[lo + 1].path);
        return NULL;
    }
    if (!(node->name = ckpt_arena_strndup(b->arena, f[lo].path + at, len)))
        (void)ckpt_nomem(b->err);
    return node->name ? node : NULL;
}

/* The directory of the files [lo, hi), whose paths are alike before byte `at`. Depth is bounded by
 * ckpt_vdir_check_path. */
static struct ckpt_vnode *dir_of(struct build *b, struct ckpt_vdir_file *f, size_t lo, size_t hi,
                                 size_t at)
{
    struct ckpt_vnode *dir = ckpt_arena_alloc(b->arena, sizeof *dir);
    struct ckpt_vnode **child = ckpt_arena_alloc(b->arena, (hi - lo) * sizeof *child);
    size_t n = 0;

    if (!dir || !child) {
        (void)ckpt_nomem(b->err);
        return NULL;
    }
    for (size_t i = lo, end; i < hi; i = end) {
        end = run_end(f, i, hi, at);
        if (!(child[n++] = child_of(b, f, i, end, at)))
            return NULL;
    }
    *dir = (struct ckpt_vnode){
        .kind = CKPT_NODE_DIR, .mtime_ns = b->mtime_ns, .child = child, .nchild = n};
    return dir;
}

int ckpt_vdir_build(struct ckpt_vdir_file *file, size_t n, int64_t mtime_ns,
                    struct ckpt_arena *arena, struct ckpt_vnode **ret_root, struct ckpt_err *err)
{
    struct build b = {arena, mtime_ns, err};

    if (n)
        qsort(file, n, sizeof *file, path_cmp);
    struct ckpt_vnode *root = dir_of(&b, file, 0, n, 0);
    if (!root)
        return -1;
    root->name = "";
    *ret_root = root;
    return 0;
}
