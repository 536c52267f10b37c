/* SPDX-License-Identifier: Apache-2.0 */
/* Opening files below a directory, safely for all names and links. */
#include "io/dir.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/map.h"
#include "base/mem.h"
#include "base/str.h"
#include "base/vec.h"
#include "io/below.h"

enum { READ_AHEAD = 128 * 1024 }; /* the kernel's default */

/* Data that all directories below one ckpt_dir_open share. */
struct root {
    struct ckpt_below top; /* its strings are owned */
    atomic_uint refs;
    struct ckpt_recording *rec; /* referenced; or NULL */
    uint32_t number;            /* of this directory in rec */
    char *within;               /* the file in that directory that has all bytes; or NULL */
    pthread_mutex_t lock;       /* protects the names below, which many files share */
    struct ckpt_map names;
    CKPT_VEC(const char *) name; /* by the map's value */
    struct ckpt_arena arena;
    const struct ckpt_dir_ops *ops; /* NULL: a folder of the file system */
    void *ctx;
};

struct ckpt_dir {
    struct root *root;
    struct ckpt_dir *parent; /* referenced; NULL: the root */
    const char *below;       /* path from the root, the end of `path`; "." for the root itself */
    atomic_uint refs;
    _Atomic(struct ckpt_err *) trouble; /* ckpt_dir_trouble; or NULL */
    _Atomic(struct ckpt_err *) leaving; /* ckpt_dir_leaving; or NULL */
    char path[];                        /* as shown to people */
};

static void root_unref(struct root *r)
{
    if (!r || atomic_fetch_sub(&r->refs, 1) != 1)
        return;
    ckpt_closep(&r->top.fd);
    ckpt_recording_unref(r->rec);
    free(r->within);
    if (r->ops)
        r->ops->free(r->ctx);
    free(r->top.real);
    free(r->top.blobs);
    ckpt_map_release(&r->names);
    ckpt_vec_release(&r->name);
    ckpt_arena_release(&r->arena);
    (void)pthread_mutex_destroy(&r->lock);
    free(r);
}

static struct root *root_new(enum ckpt_links links)
{
    struct root *r = calloc(1, sizeof *r);

    if (!r)
        return NULL;
    r->top.fd = -1;
    r->top.links = links;
    atomic_init(&r->refs, 1);
    (void)pthread_mutex_init(&r->lock, NULL);
    return r;
}

static int root_open(const char *path, int flags, enum ckpt_links links, struct root **ret,
                     struct ckpt_err *err)
{
    struct root *r = root_new(links);

    if (!r)
        return ckpt_nomem(err);
    r->top.fd = open(path, flags | O_DIRECTORY | O_CLOEXEC);
    if (r->top.fd < 0) {
        (void)ckpt_fail_errno(err, errno, "cannot open directory '%s'", path);
    } else if (!(r->top.real = realpath(path, NULL))) {
        (void)ckpt_fail_errno(err, errno, "cannot resolve '%s'", path);
    } else {
        r->top.blobs = ckpt_below_blobs(r->top.real);
        *ret = r;
        return 0;
    }
    root_unref(r);
    return -1;
}

/* below_len bytes at the end of path are the way from the root; 0: it is the root. */
static int dir_new(struct root *root, const char *path, size_t below_len, struct ckpt_dir **ret,
                   struct ckpt_err *err)
{
    size_t len = strlen(path);
    struct ckpt_dir *d = malloc(offsetof(struct ckpt_dir, path) + len + 1);

    if (!d)
        return ckpt_nomem(err);
    memcpy(d->path, path, len + 1);
    d->below = below_len ? d->path + len - below_len : ".";
    atomic_init(&d->refs, 1);
    atomic_init(&d->trouble, NULL);
    atomic_init(&d->leaving, NULL);
    d->parent = NULL;
    d->root = root;
    *ret = d;
    return 0;
}

static int open_with(const char *path, int flags, enum ckpt_links links, struct ckpt_dir **ret,
                     struct ckpt_err *err)
{
    struct root *root = NULL;

    if (root_open(path, flags, links, &root, err) < 0)
        return -1;
    if (dir_new(root, path, 0, ret, err) < 0) {
        root_unref(root);
        return -1;
    }
    return 0;
}

int ckpt_dir_open(const char *path, enum ckpt_links links, struct ckpt_dir **ret,
                  struct ckpt_err *err)
{
    return open_with(path, O_RDONLY, links, ret, err);
}

int ckpt_dir_open_passage(const char *path, struct ckpt_dir **ret, struct ckpt_err *err)
{
    return open_with(path, O_PATH, CKPT_LINKS_ANY, ret, err);
}

int ckpt_dir_open_other(const char *path, const char *real, const struct ckpt_dir_ops *ops,
                        void *ctx, struct ckpt_dir **ret, struct ckpt_err *err)
{
    struct root *root = root_new(CKPT_LINKS_BENEATH);

    if (!root || !(root->top.real = strdup(real)) || dir_new(root, path, 0, ret, err) < 0) {
        root_unref(root);
        return ckpt_nomem(err);
    }
    root->ops = ops;
    root->ctx = ctx;
    return 0;
}

struct ckpt_dir *ckpt_dir_ref(struct ckpt_dir *dir)
{
    atomic_fetch_add(&dir->refs, 1);
    return dir;
}

void ckpt_dir_unref(struct ckpt_dir *dir)
{
    if (!dir || atomic_fetch_sub(&dir->refs, 1) != 1)
        return;
    ckpt_dir_unref(dir->parent);
    free(atomic_load(&dir->trouble));
    free(atomic_load(&dir->leaving));
    root_unref(dir->root);
    free(dir);
}

void ckpt_dir_unrefp(struct ckpt_dir **dir)
{
    ckpt_dir_unref(*dir);
    *dir = NULL;
}

const char *ckpt_dir_path(const struct ckpt_dir *dir) { return dir->path; }

const char *ckpt_dir_real_path(const struct ckpt_dir *dir) { return dir->root->top.real; }

const char *ckpt_dir_hub_blobs(const struct ckpt_dir *dir) { return dir->root->top.blobs; }

const char *ckpt_dir_real_name(const struct ckpt_dir *dir)
{
    const char *slash = strrchr(dir->root->top.real, '/');

    return slash ? slash + 1 : dir->root->top.real;
}

/* ---- failures that a probe would take for a no ---- */

static void keep_first(_Atomic(struct ckpt_err *) *kept, const struct ckpt_err *err)
{
    struct ckpt_err *none = NULL, *copy;

    if (atomic_load(kept) || !(copy = malloc(sizeof *copy)))
        return;
    *copy = *err;
    if (!atomic_compare_exchange_strong(kept, &none, copy))
        free(copy);
}

/* Keep an error for ckpt_dir_trouble, in dir and in the directories above it. */
static void keep_trouble(const struct ckpt_dir *dir, const struct ckpt_err *err)
{
    for (; dir; dir = dir->parent)
        keep_first(&((struct ckpt_dir *)dir)->trouble, err);
}

/* The same for ckpt_dir_leaving. */
static int fail_leaving(const struct ckpt_dir *dir, const struct ckpt_err *own,
                        struct ckpt_err *err)
{
    for (const struct ckpt_dir *d = dir; d; d = d->parent)
        keep_first(&((struct ckpt_dir *)d)->leaving, own);
    return ckpt_err_move(err, own);
}

int ckpt_dir_fail(const struct ckpt_dir *dir, int errnum, const char *what, const char *name,
                  struct ckpt_err *err)
{
    struct ckpt_err own = {0};

    (void)ckpt_fail_errno(&own, errnum, "%s '%s%s%s'", what, dir->path, name ? "/" : "",
                          name ? name : "");
    if (!ckpt_errno_is_answer(errnum))
        keep_trouble(dir, &own);
    return ckpt_err_move(err, &own);
}

int ckpt_dir_trouble(const struct ckpt_dir *dir, struct ckpt_err *err)
{
    const struct ckpt_err *trouble = atomic_load(&dir->trouble);

    return trouble ? ckpt_err_move(err, trouble) : 0;
}

int ckpt_dir_leaving(const struct ckpt_dir *dir, struct ckpt_err *err)
{
    const struct ckpt_err *leaving = atomic_load(&dir->leaving);

    return leaving ? ckpt_err_move(err, leaving) : 0;
}

/* The path of a name below dir, from the root: malloc'ed. FORMAT: it is no name below dir. */
static int path_below(const struct ckpt_dir *dir, const char *name, char **ret,
                      struct ckpt_err *err)
{
    if (!ckpt_below_ok(name))
        return ckpt_fail(err, CKPT_FORMAT, "'%s' is not a path below '%s'", name, dir->path);
    return (*ret = ckpt_below_join(dir->below, name)) ? 0 : ckpt_nomem(err);
}

/* ---- recording and replaying ---- */

void ckpt_dir_use(struct ckpt_dir *dir, struct ckpt_recording *rec)
{
    struct ckpt_file_id id = {0};

    if (!rec || dir->root->ops || dir->root->rec)
        return;
    (void)ckpt_file_id_of(dir->root->top.fd, &id, NULL, NULL);
    dir->root->rec = ckpt_recording_ref(rec);
    dir->root->number = ckpt_recording_add_root(rec, &id);
}

int ckpt_dir_use_within(struct ckpt_dir *dir, const struct ckpt_dir *folder, const char *name,
                        struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *path = NULL;
    struct ckpt_place at;

    ckpt_dir_place(folder, name, &at, &path);
    if (!at.rec)
        return folder->root->rec ? ckpt_nomem(err) : 0;
    dir->root->within = ckpt_steal(&path);
    dir->root->number = at.root;
    dir->root->rec = ckpt_recording_ref(at.rec);
    return 0;
}

void ckpt_dir_place(const struct ckpt_dir *dir, const char *name, struct ckpt_place *ret,
                    char **ret_path)
{
    const struct root *r = dir->root;

    *ret_path = !r->rec ? NULL : r->within ? strdup(r->within) : ckpt_below_join(dir->below, name);
    *ret =
        (struct ckpt_place){.rec = *ret_path ? r->rec : NULL, .root = r->number, .path = *ret_path};
}

bool ckpt_dir_records(const struct ckpt_dir *dir) { return ckpt_recording_records(dir->root->rec); }

static enum ckpt_entry_kind kind_of_mode(mode_t mode)
{
    return S_ISREG(mode) ? CKPT_ENTRY_FILE : S_ISDIR(mode) ? CKPT_ENTRY_DIR : CKPT_ENTRY_OTHER;
}

static void record_look(const struct ckpt_dir *dir, const char *name, int errnum,
                        const struct stat *st)
{
    ckpt_cleanup(ckpt_freep) char *path = NULL;
    struct ckpt_look seen = {.errnum = errnum, .kind = CKPT_ENTRY_OTHER};
    struct ckpt_place at;

    if (!ckpt_dir_records(dir))
        return;
    if (st) {
        seen.kind = kind_of_mode(st->st_mode);
        seen.id = ckpt_file_id_of_stat(st);
    }
    ckpt_dir_place(dir, name, &at, &path);
    ckpt_record_look(&at, &seen);
}

/* ---- opening ---- */

static int fail_open(const struct ckpt_dir *dir, const char *name, int errnum, struct ckpt_err *err)
{
    struct ckpt_err own = {0};

    if (errnum == EXDEV) {
        (void)ckpt_fail(
            &own, CKPT_UNSUPPORTED,
            "'%s/%s' is a link that leads out of '%s' (option follow_symlinks allows it)",
            dir->path, name, dir->root->top.real);
        return fail_leaving(dir, &own, err);
    }
    return ckpt_dir_fail(dir, errnum, "cannot open", name, err);
}

static int open_name(const struct ckpt_dir *dir, const char *name, int flags, int *ret_fd,
                     struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *below = NULL;

    if (path_below(dir, name, &below, err) < 0)
        return -1;
    const int fd = ckpt_below_open(&dir->root->top, below, flags);
    if (fd < 0) {
        const int errnum = errno;
        record_look(dir, name, errnum, NULL);
        return fail_open(dir, name, errnum, err);
    }
    *ret_fd = fd;
    return 0;
}

/* ckpt_dir_ops.look, with the errors of a name that is not there. */
static int look(const struct ckpt_dir *dir, const char *name, struct ckpt_dir_found *ret,
                struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *below = NULL;
    struct ckpt_err own = {0};

    if (path_below(dir, name, &below, err) < 0)
        return -1;
    const int rc = dir->root->ops->look(dir->root->ctx, below, ret, &own);
    if (rc < 0) {
        keep_trouble(dir, &own);
        return ckpt_err_move(err, &own);
    }
    if (rc == EXDEV) {
        (void)ckpt_fail(&own, CKPT_UNSUPPORTED,
                        "'%s/%s' is a link that leads out of the archive: unpack it", dir->path,
                        name);
        return fail_leaving(dir, &own, err);
    }
    return rc ? ckpt_dir_fail(dir, rc, "cannot open", name, err) : 0;
}

static bool replay_look(const struct ckpt_dir *dir, const char *name, struct ckpt_look *ret)
{
    ckpt_cleanup(ckpt_freep) char *path = NULL;
    struct ckpt_place at;

    if (!ckpt_recording_replays(dir->root->rec) || !ckpt_below_ok(name))
        return false;
    ckpt_dir_place(dir, name, &at, &path);
    return at.rec && ckpt_replay_look(&at, ret);
}

static int real_look(const struct ckpt_dir *dir, const char *name, struct ckpt_look *ret,
                     struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *below = NULL;
    struct stat st;

    if (path_below(dir, name, &below, err) < 0)
        return -1;
    if (ckpt_below_stat(&dir->root->top, below, &st) < 0) {
        const int errnum = errno;
        record_look(dir, name, errnum, NULL);
        return fail_open(dir, name, errnum, err);
    }
    record_look(dir, name, 0, &st);
    *ret = (struct ckpt_look){.kind = kind_of_mode(st.st_mode), .id = ckpt_file_id_of_stat(&st)};
    return 0;
}

int ckpt_dir_look(const struct ckpt_dir *dir, const char *name, struct ckpt_look *ret,
                  struct ckpt_err *err)
{
    struct ckpt_dir_found found;

    if (dir->root->ops) {
        if (look(dir, name, &found, err) < 0)
            return -1;
        *ret = (struct ckpt_look){.kind = found.kind, .id = found.id};
        return 0;
    }
    if (!replay_look(dir, name, ret))
        return real_look(dir, name, ret, err);
    return ret->errnum ? fail_open(dir, name, ret->errnum, err) : 0;
}

bool ckpt_dir_replay_file(const struct ckpt_dir *dir, const char *name, struct ckpt_file_id *ret_id,
                          struct ckpt_extent *ret_extent)
{
    ckpt_cleanup(ckpt_freep) char *path = NULL;
    struct ckpt_dir_found found = {0};
    struct ckpt_place at;
    struct ckpt_look seen;

    ckpt_dir_place(dir, name, &at, &path);
    if (!at.rec || !ckpt_replay_look(&at, &seen) || seen.errnum || seen.kind != CKPT_ENTRY_FILE)
        return false;
    if (dir->root->ops && (look(dir, name, &found, NULL) < 0 || found.kind != CKPT_ENTRY_FILE ||
                           !ckpt_file_id_eq(&found.id, &seen.id)))
        return false;
    *ret_id = seen.id;
    *ret_extent = dir->root->ops ? found.extent : (struct ckpt_extent){0, seen.id.size};
    return true;
}

int ckpt_dir_open_below(struct ckpt_dir *dir, const char *name, struct ckpt_dir **ret,
                        struct ckpt_err *err)
{
    struct ckpt_look seen;

    if (ckpt_dir_look(dir, name, &seen, err) < 0)
        return -1;
    if (seen.kind != CKPT_ENTRY_DIR)
        return fail_open(dir, name, ENOTDIR, err);
    return ckpt_dir_listed_below(dir, name, ret, err);
}

int ckpt_dir_listed_below(struct ckpt_dir *dir, const char *name, struct ckpt_dir **ret,
                          struct ckpt_err *err)
{
    const bool at_root = strcmp(dir->below, ".") == 0, itself = strcmp(name, ".") == 0;
    const size_t len = at_root ? 0 : strlen(dir->below);
    ckpt_cleanup(ckpt_freep) char *path =
        itself ? strdup(dir->path) : ckpt_asprintf("%s/%s", dir->path, name);
    if (!path)
        return ckpt_nomem(err);
    atomic_fetch_add(&dir->root->refs, 1);
    if (dir_new(dir->root, path, itself ? len : len + !at_root + strlen(name), ret, err) < 0) {
        root_unref(dir->root);
        return -1;
    }
    (*ret)->parent = ckpt_dir_ref(dir);
    return 0;
}

const char *ckpt_dir_intern(struct ckpt_dir *dir, const char *name)
{
    struct root *r = dir->root;
    const char *own = NULL;
    size_t len = strlen(name);
    uint32_t at;
    bool is_new;

    (void)pthread_mutex_lock(&r->lock);
    if (ckpt_map_get(&r->names, name, len, &at))
        own = r->name.ptr[at];
    else if (ckpt_vec_reserve(&r->name, 1) == 0 &&
             (own = ckpt_arena_strndup(&r->arena, name, len)) &&
             ckpt_map_put(&r->names, own, len, (uint32_t)r->name.len, &at, &is_new) == 0)
        r->name.ptr[r->name.len++] = own;
    else
        own = NULL;
    (void)pthread_mutex_unlock(&r->lock);
    return own;
}

static const char *kind_name(mode_t mode)
{
    return S_ISDIR(mode)    ? "a directory"
           : S_ISFIFO(mode) ? "a FIFO"
           : S_ISSOCK(mode) ? "a socket"
                            : "a device";
}

static int open_other_file(const struct ckpt_dir *dir, const char *name, int *ret_fd,
                           struct ckpt_file_id *ret_id, struct ckpt_extent *ret_extent,
                           struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_closep) int fd = -1;
    struct ckpt_dir_found found;
    struct ckpt_file_id opened;

    if (look(dir, name, &found, err) < 0)
        return -1;
    if (found.kind != CKPT_ENTRY_FILE)
        return ckpt_fail(err, CKPT_FORMAT, "'%s/%s' is %s, expected a regular file", dir->path,
                         name, found.kind == CKPT_ENTRY_DIR ? "a directory" : "a device");
    if (dir->root->ops->open(dir->root->ctx, &fd, &opened, err) < 0)
        return -1;
    /* what a replay answered is compared by the caller */
    if (!ckpt_recording_replays(dir->root->rec) && !ckpt_file_id_eq(&opened, &found.id))
        return ckpt_fail(err, CKPT_STALE, "'%s/%s' changed while it was opened", dir->path, name);
    if (ret_id)
        *ret_id = opened;
    if (ret_extent)
        *ret_extent = found.extent;
    *ret_fd = fd;
    fd = -1;
    return 0;
}

int ckpt_dir_open_file(const struct ckpt_dir *dir, const char *name, int *ret_fd,
                       struct ckpt_file_id *ret_id, struct ckpt_extent *ret_extent,
                       struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_closep) int fd = -1;
    struct stat st;

    if (dir->root->ops)
        return open_other_file(dir, name, ret_fd, ret_id, ret_extent, err);
    if (open_name(dir, name, O_RDONLY | O_NONBLOCK | O_NOCTTY, &fd, err) < 0)
        return -1;
    if (fstat(fd, &st) < 0)
        return ckpt_dir_fail(dir, errno, "cannot stat", name, err);
    if (!S_ISREG(st.st_mode))
        return ckpt_fail(err, CKPT_FORMAT, "'%s/%s' is %s, expected a regular file", dir->path,
                         name, kind_name(st.st_mode));
    record_look(dir, name, 0, &st);
    if (st.st_size > READ_AHEAD) /* small files are read at once, and may be many */
        (void)posix_fadvise(fd, 0, 0, POSIX_FADV_SEQUENTIAL); /* twice the read-ahead */
    if (ret_id)
        *ret_id = ckpt_file_id_of_stat(&st);
    if (ret_extent)
        *ret_extent = (struct ckpt_extent){0, (uint64_t)st.st_size};
    *ret_fd = fd;
    fd = -1;
    return 0;
}

int ckpt_dir_identify(const struct ckpt_dir *dir, const char *name, struct ckpt_file_id *ret,
                      struct ckpt_err *err)
{
    struct ckpt_look seen;

    if (ckpt_dir_look(dir, name, &seen, err) < 0)
        return -1;
    *ret = seen.id;
    return 0;
}

bool ckpt_dir_stat(const struct ckpt_dir *dir, const char *name, struct ckpt_file_id *ret)
{
    return ckpt_dir_identify(dir, name, ret, NULL) == 0;
}

static int64_t real_birth_ns(const struct ckpt_dir *dir, const char *name)
{
    ckpt_cleanup(ckpt_closep) int fd = -1;
    struct statx st;

    if (open_name(dir, name, O_PATH, &fd, NULL) < 0 ||
        statx(fd, "", AT_EMPTY_PATH, STATX_BTIME, &st) < 0 || !(st.stx_mask & STATX_BTIME))
        return 0;
    return st.stx_btime.tv_sec * 1000000000 + st.stx_btime.tv_nsec;
}

int64_t ckpt_dir_birth_ns(const struct ckpt_dir *dir, const char *name)
{
    ckpt_cleanup(ckpt_freep) char *path = NULL;
    struct ckpt_place at;
    int64_t birth_ns;

    if (dir->root->ops)
        return 0;
    ckpt_dir_place(dir, name, &at, &path);
    if (at.rec && ckpt_replay_birth(&at, &birth_ns))
        return birth_ns;
    birth_ns = real_birth_ns(dir, name);
    if (at.rec)
        ckpt_record_birth(&at, birth_ns);
    return birth_ns;
}

bool ckpt_dir_in_hub(const struct ckpt_dir *dir) { return dir->root->top.blobs != NULL; }

static bool has_kind(const struct ckpt_dir *dir, const char *name, enum ckpt_entry_kind kind)
{
    struct ckpt_look seen;

    return ckpt_dir_look(dir, name, &seen, NULL) == 0 && seen.kind == kind;
}

bool ckpt_dir_has_file(const struct ckpt_dir *dir, const char *name)
{
    return has_kind(dir, name, CKPT_ENTRY_FILE);
}

bool ckpt_dir_has_dir(const struct ckpt_dir *dir, const char *name)
{
    return has_kind(dir, name, CKPT_ENTRY_DIR);
}

bool ckpt_dir_list_other(const struct ckpt_dir *dir,
                         int (*fn)(void *ctx, const struct ckpt_entry *entry, struct ckpt_err *err),
                         void *ctx, int *ret_rc, struct ckpt_err *err)
{
    if (!dir->root->ops)
        return false;
    *ret_rc = dir->root->ops->list(dir->root->ctx, dir->below, fn, ctx, err);
    return true;
}

int ckpt_dir_open_itself(const struct ckpt_dir *dir, int *ret_fd, struct ckpt_err *err)
{
    *ret_fd = ckpt_below_open(&dir->root->top, dir->below, O_RDONLY | O_DIRECTORY);
    return *ret_fd < 0 ? ckpt_dir_fail(dir, errno, "cannot list", NULL, err) : 0;
}

int ckpt_dir_open_from_root(const struct ckpt_dir *dir, const char *path, int *ret_fd)
{
    struct ckpt_file_id id;

    if (dir->root->ops) { /* the one file that has all bytes */
        errno = ENOENT;
        return dir->root->within && strcmp(path, dir->root->within) == 0
                   ? dir->root->ops->open(dir->root->ctx, ret_fd, &id, NULL)
                   : -1;
    }
    *ret_fd = ckpt_below_open(&dir->root->top, path, O_RDONLY | O_NONBLOCK | O_NOCTTY);
    return *ret_fd < 0 ? -1 : 0;
}
