/* SPDX-License-Identifier: Apache-2.0 */
/* Questions about folders, as calls that threads make (calls.h). */
#include "io/far/dir_bounded.h"

#include <fcntl.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/mem.h"
#include "base/str.h"
#include "io/far/calls.h"

/* A folder, which calls that hang keep. */
struct bounded {
    atomic_uint refs;
    struct ckpt_below below; /* a copy */
    struct ckpt_far_options opt;
    struct ckpt_storage *storage;
};

enum question { LOOK, OPEN, LIST };

struct asked {
    struct ckpt_call call;
    struct bounded *of; /* referenced */
    enum question what;
    int rc; /* 0 or an errno; the following only if it is 0 */
    int fd; /* of OPEN, or -1 */
    struct ckpt_dir_found found;
    struct ckpt_str list; /* of LIST */
    char below[];
};

static void unref(struct bounded *b)
{
    if (!b || atomic_fetch_sub(&b->refs, 1) != 1)
        return;
    ckpt_closep(&b->below.fd);
    free(b->below.real);
    free(b->below.blobs);
    free(b);
}

CKPT_CLEANUP_BY(unref, struct bounded)

/* ---- in a thread of the calls ---- */

static void make(struct ckpt_call *c)
{
    struct asked *a = (struct asked *)c;
    const struct ckpt_dir_ops *ops = &ckpt_folder_ops;
    struct ckpt_below *below = &a->of->below;

    if (a->what == LOOK)
        a->rc = ops->look(below, a->below, &a->found, NULL);
    else if (a->what == OPEN)
        a->rc = ops->open(below, a->below, &a->fd, &a->found, NULL);
    else
        a->rc = ops->list(below, a->below, &a->list, NULL);
}

static void free_asked(struct ckpt_call *c)
{
    struct asked *a = (struct asked *)c;

    ckpt_closep(&a->fd);
    ckpt_str_release(&a->list);
    unref(a->of);
    free(a);
}

static const struct ckpt_call_ops asked_ops = {.make = make, .free = free_asked};

/* ---- asking ---- */

/* Ask, and wait for the answer, which the caller frees. NULL and *err: there is none. */
static struct asked *ask(struct bounded *b, enum question what, const char *below,
                         struct ckpt_err *err)
{
    struct asked *a = calloc(1, sizeof *a + strlen(below) + 1);

    if (!a) {
        (void)ckpt_nomem(err);
        return NULL;
    }
    atomic_fetch_add(&b->refs, 1);
    a->call = (struct ckpt_call){.ops = &asked_ops, .storage = b->storage};
    a->of = b;
    a->what = what;
    a->fd = -1;
    memcpy(a->below, below, strlen(below) + 1);
    if (ckpt_call_make(&a->call, &b->opt, err) == 0)
        return a;
    (void)ckpt_err_in(err, strcmp(below, ".") == 0 ? "'%s'" : "'%s/%s'", b->below.real, below);
    return NULL;
}

static int bounded_look(void *ctx, const char *below, struct ckpt_dir_found *ret,
                        struct ckpt_err *err)
{
    struct asked *a = ask(ctx, LOOK, below, err);

    if (!a)
        return -1;
    const int rc = a->rc;
    *ret = a->found;
    free_asked(&a->call);
    return rc;
}

static int bounded_open(void *ctx, const char *below, int *ret_fd, struct ckpt_dir_found *ret,
                        struct ckpt_err *err)
{
    struct asked *a = ask(ctx, OPEN, below, err);

    if (!a)
        return -1;
    const int rc = a->rc;
    if (rc == 0) {
        *ret = a->found;
        *ret_fd = a->fd;
        a->fd = -1;
    }
    free_asked(&a->call);
    return rc;
}

static int bounded_list(void *ctx, const char *below, struct ckpt_str *ret, struct ckpt_err *err)
{
    struct asked *a = ask(ctx, LIST, below, err);

    if (!a)
        return -1;
    const int rc = a->rc;
    ckpt_str_append(ret, ckpt_str_get(&a->list), a->list.len);
    ret->failed |= a->list.failed;
    free_asked(&a->call);
    return rc;
}

static void bounded_free(void *ctx) { unref(ctx); }

static const struct ckpt_dir_ops bounded_ops = {
    .look = bounded_look, .open = bounded_open, .list = bounded_list, .free = bounded_free};

/* ---- opening ---- */

enum opened_as { FOLDER, PASSAGE, NOTHING };

struct opening {
    struct ckpt_call call;
    enum opened_as as;
    enum ckpt_links links; /* of FOLDER */
    bool is_file;          /* not looked for if it is a PASSAGE */
    int rc;                /* of opening it */
    struct ckpt_err err;
    struct ckpt_dir *dir; /* or NULL */
    char path[];
};

static void make_opening(struct ckpt_call *c)
{
    struct opening *o = (struct opening *)c;
    struct stat st;

    if (o->as == PASSAGE) {
        o->rc = ckpt_dir_open_passage(o->path, &o->dir, &o->err);
        return;
    }
    o->is_file = stat(o->path, &st) == 0 && S_ISREG(st.st_mode);
    if (o->as == FOLDER && !o->is_file)
        o->rc = ckpt_dir_open(o->path, o->links, &o->dir, &o->err);
}

static void free_opening(struct ckpt_call *c)
{
    struct opening *o = (struct opening *)c;

    ckpt_dir_unref(o->dir);
    free(o);
}

static int open_bounded(const char *path, enum opened_as as, enum ckpt_links links,
                        const struct ckpt_far_options *far, bool *ret_is_file,
                        struct ckpt_dir **ret, struct ckpt_err *err)
{
    static const struct ckpt_call_ops ops = {.make = make_opening, .free = free_opening};
    struct opening *o = calloc(1, sizeof *o + strlen(path) + 1);

    if (!o)
        return ckpt_nomem(err);
    o->call.ops = &ops;
    o->as = as;
    o->links = links;
    memcpy(o->path, path, strlen(path) + 1);
    if (far->rule == CKPT_FAR_NEVER)
        make_opening(&o->call);
    else if (ckpt_call_make(&o->call, far, err) < 0)
        return ckpt_err_in(err, "'%s'", path);
    const int rc = o->rc < 0 ? ckpt_err_move(err, &o->err) : 0;
    *ret_is_file = o->is_file;
    *ret = ckpt_steal(&o->dir);
    free_opening(&o->call);
    return rc;
}

int ckpt_dir_open_bounded(const char *path, enum ckpt_links links,
                          const struct ckpt_far_options *far, bool *ret_is_file,
                          struct ckpt_dir **ret, struct ckpt_err *err)
{
    return open_bounded(path, FOLDER, links, far, ret_is_file, ret, err);
}

int ckpt_dir_open_passage_bounded(const char *path, const struct ckpt_far_options *far,
                                  struct ckpt_dir **ret, struct ckpt_err *err)
{
    bool is_file;

    return open_bounded(path, PASSAGE, CKPT_LINKS_ANY, far, &is_file, ret, err);
}

bool ckpt_path_is_file_bounded(const char *path, const struct ckpt_far_options *far)
{
    struct ckpt_dir *none;
    bool is_file;

    return open_bounded(path, NOTHING, CKPT_LINKS_ANY, far, &is_file, &none, NULL) == 0 && is_file;
}

/* ---- its options and functions ---- */

int ckpt_dir_bound(struct ckpt_dir *dir, struct ckpt_err *err)
{
    ckpt_cleanup(unrefp) struct bounded *b = NULL;

    if (!ckpt_dir_may_hang(dir))
        return 0;
    if (!(b = calloc(1, sizeof *b)))
        return ckpt_nomem(err);
    atomic_init(&b->refs, 1);
    b->opt = *ckpt_dir_far_options(dir);
    b->storage = ckpt_dir_storage(dir);
    const struct ckpt_dir_way folder =
        ckpt_dir_replace(dir, (struct ckpt_dir_way){&bounded_ops, b});
    const struct ckpt_below *below = folder.ctx;
    b->below = (struct ckpt_below){.fd = fcntl(below->fd, F_DUPFD_CLOEXEC, 0),
                                   .links = below->links,
                                   .real = strdup(below->real),
                                   .blobs = below->blobs ? strdup(below->blobs) : NULL};
    if (b->below.fd < 0 || !b->below.real || (below->blobs && !b->below.blobs)) {
        (void)ckpt_dir_replace(dir, folder);
        return ckpt_nomem(err);
    }
    (void)ckpt_steal(&b);
    return 0;
}
