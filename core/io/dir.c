/* SPDX-License-Identifier: Apache-2.0 */
/* Opening files below a directory, safely for all names and links. */
#include "io/dir.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "base/map.h"
#include "base/vec.h"

bool ckpt_below_ok(const char *name)
{
    if (*name == '\0')
        return false;
    while (*name) {
        size_t n = strcspn(name, "/");
        if (n == 0 || (n == 2 && memcmp(name, "..", 2) == 0))
            return false;
        name += n;
        if (*name == '/' && *++name == '\0')
            return false;
    }
    return true;
}

/* The path b below the path a, malloc'ed. NULL: no memory. */
static char *join(const char *a, const char *b)
{
    return strcmp(a, ".") == 0   ? strdup(b)
           : strcmp(b, ".") == 0 ? strdup(a)
                                 : ckpt_asprintf("%s/%s", a, b);
}

bool ckpt_is_below(const char *path, const char *top)
{
    size_t n = strlen(top);
    return strncmp(path, top, n) == 0 &&
           (path[n] == '/' || path[n] == '\0' || strcmp(top, "/") == 0);
}

/* For the canonical path of a snapshot in a hub cache, .../models--ORG--NAME/snapshots/REV: the
 * path .../models--ORG--NAME/blobs, malloc'ed (the layout of huggingface_hub's cache). NULL: the
 * path is not a snapshot's, or there is no memory. */
static char *blobs_of(const char *real)
{
    const char *rev = strrchr(real, '/');
    const char *tail = "/snapshots";
    size_t n = rev ? (size_t)(rev - real) : 0;

    if (n <= strlen(tail) || memcmp(rev - strlen(tail), tail, strlen(tail)) != 0)
        return NULL;
    n -= strlen(tail);
    const char *model = memrchr(real, '/', n);
    if (!model || !ckpt_has_prefix(model, "/models--"))
        return NULL;
    return ckpt_asprintf("%.*s/blobs", (int)n, real);
}

/* The first bytes of a far file, by its path from the root. */
struct head {
    char *below;
    unsigned char *data;
    size_t len;
    bool whole; /* the file has no more */
};

/* Data that all directories below one ckpt_dir_open share. */
struct root {
    struct ckpt_below top; /* its strings are owned */
    atomic_uint refs;
    pthread_mutex_t lock; /* protects the names below, which many files share, and the heads */
    CKPT_VEC(struct head) heads;
    struct ckpt_map names;
    CKPT_VEC(const char *) name; /* by the map's value */
    struct ckpt_arena arena;
    struct ckpt_dir_way way;
    struct ckpt_dir *folder;      /* of the file that has all bytes; NULL: each file has its own */
    const char *file;             /* its name in that folder */
    bool has_objects, is_spread;  /* ckpt_dir_has_objects, ckpt_dir_is_spread */
    bool is_archive;              /* ckpt_dir_is_archive */
    struct ckpt_storage *storage; /* of top.fd */
    struct ckpt_far_options far;
};

/* The kinds of errors that a directory keeps. */
enum kept { TROUBLE, LEAVING };

struct ckpt_dir {
    struct root *root;
    struct ckpt_dir *parent; /* referenced; NULL: the root */
    const char *below;       /* path from the root, the end of `path`; "." for the root itself */
    atomic_uint refs;
    _Atomic(struct ckpt_err *) kept[2]; /* TROUBLE: ckpt_dir_trouble; LEAVING; or NULL */
    char path[];                        /* as shown to people */
};

static void forget_heads(struct root *r)
{
    for (size_t i = 0; i < r->heads.len; i++) {
        free(r->heads.ptr[i].below);
        free(r->heads.ptr[i].data);
    }
    ckpt_vec_release(&r->heads);
}

static void root_unref(struct root *r)
{
    if (!r || atomic_fetch_sub(&r->refs, 1) != 1)
        return;
    forget_heads(r);
    ckpt_closep(&r->top.fd);
    if (r->way.ops->free)
        r->way.ops->free(r->way.ctx);
    free(r->top.real);
    free(r->top.blobs);
    ckpt_map_release(&r->names);
    ckpt_vec_release(&r->name);
    ckpt_arena_release(&r->arena);
    (void)pthread_mutex_destroy(&r->lock);
    free(r);
}

CKPT_CLEANUP_BY(root_unref, struct root)

static struct root *root_new(enum ckpt_links links)
{
    struct root *r = calloc(1, sizeof *r);

    if (!r)
        return NULL;
    r->top.fd = -1;
    r->top.links = links;
    r->way = (struct ckpt_dir_way){&ckpt_folder_ops, &r->top};
    atomic_init(&r->refs, 1);
    (void)pthread_mutex_init(&r->lock, NULL);
    return r;
}

static int root_open(const char *path, int flags, enum ckpt_links links, struct root **ret,
                     struct ckpt_err *err)
{
    ckpt_cleanup(root_unrefp) struct root *r = root_new(links);
    struct stat st;

    if (!r)
        return ckpt_nomem(err);
    r->top.fd = open(path, flags | O_DIRECTORY | O_CLOEXEC);
    if (r->top.fd < 0)
        return ckpt_fail_errno(err, errno, "cannot open directory '%s'%s", path,
                               ckpt_path_advice(path));
    if (!(r->top.real = realpath(path, NULL)))
        return ckpt_fail_errno(err, errno, "cannot resolve '%s'", path);
    r->top.blobs = blobs_of(r->top.real);
    if (fstat(r->top.fd, &st) == 0)
        r->storage = ckpt_storage_of(r->top.fd, st.st_dev);
    *ret = ckpt_steal(&r);
    return 0;
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
    atomic_init(&d->kept[TROUBLE], NULL);
    atomic_init(&d->kept[LEAVING], NULL);
    d->parent = NULL;
    d->root = root;
    *ret = d;
    return 0;
}

static int open_with(const char *path, int flags, enum ckpt_links links, struct ckpt_dir **ret,
                     struct ckpt_err *err)
{
    ckpt_cleanup(root_unrefp) struct root *root = NULL;

    if (root_open(path, flags, links, &root, err) < 0 || dir_new(root, path, 0, ret, err) < 0)
        return -1;
    root = NULL;
    return 0;
}

int ckpt_dir_open(const char *path, enum ckpt_links links, struct ckpt_dir **ret,
                  struct ckpt_err *err)
{
    return open_with(path, O_RDONLY, links, ret, err);
}

int ckpt_dir_open_near(const char *path, enum ckpt_links links, struct ckpt_dir **ret,
                       struct ckpt_err *err)
{
    if (ckpt_dir_open(path, links, ret, err) < 0)
        return -1;
    ckpt_dir_set_far(*ret, &(struct ckpt_far_options){.rule = CKPT_FAR_NEVER});
    return 0;
}

int ckpt_dir_open_passage(const char *path, struct ckpt_dir **ret, struct ckpt_err *err)
{
    return open_with(path, O_PATH, CKPT_LINKS_ANY, ret, err);
}

int ckpt_dir_open_other(const char *path, struct ckpt_dir_way way, struct ckpt_dir *folder,
                        const char *name, struct ckpt_dir **ret, struct ckpt_err *err)
{
    struct root *root = root_new(CKPT_LINKS_BENEATH);

    if (!root ||
        !(root->top.real = folder ? join(ckpt_dir_real_path(folder), name) : strdup(path)) ||
        dir_new(root, path, 0, ret, err) < 0) {
        root_unref(root);
        return ckpt_nomem(err);
    }
    root->way = way;
    root->is_spread = way.ops->elsewhere != NULL;
    root->has_objects = way.ops->read != NULL;
    root->folder = folder;
    root->is_archive = folder != NULL;
    root->file = name;
    return 0;
}

int ckpt_dir_take_after(struct ckpt_dir *dir, const struct ckpt_dir *of, const char *path,
                        struct ckpt_err *err)
{
    struct root *root = dir->root;
    char *real = strdup(path ? path : of->root->top.real);

    if (!real)
        return ckpt_nomem(err);
    free(root->top.real);
    root->top.real = real;
    if (of) {
        root->storage = of->root->storage;
        root->far = of->root->far;
        root->is_archive = of->root->is_archive;
    }
    return 0;
}

struct ckpt_dir_way ckpt_dir_replace(struct ckpt_dir *dir, struct ckpt_dir_way way)
{
    const struct ckpt_dir_way old = dir->root->way;

    dir->root->way = way;
    return old;
}

struct ckpt_dir *ckpt_dir_ref(struct ckpt_dir *dir)
{
    if (dir)
        atomic_fetch_add(&dir->refs, 1);
    return dir;
}

void ckpt_dir_unref(struct ckpt_dir *dir)
{
    if (!dir || atomic_fetch_sub(&dir->refs, 1) != 1)
        return;
    ckpt_dir_unref(dir->parent);
    free(atomic_load(&dir->kept[TROUBLE]));
    free(atomic_load(&dir->kept[LEAVING]));
    root_unref(dir->root);
    free(dir);
}

void ckpt_dir_set_far(struct ckpt_dir *dir, const struct ckpt_far_options *far)
{
    dir->root->far = *far;
    if (dir->root->folder)
        ckpt_dir_set_far(dir->root->folder, far);
}

const struct ckpt_far_options *ckpt_dir_far_options(const struct ckpt_dir *dir)
{
    return &dir->root->far;
}

bool ckpt_dir_may_hang(const struct ckpt_dir *dir)
{
    const struct root *r = dir->root;

    if (r->folder)
        return ckpt_dir_may_hang(r->folder);
    return ckpt_storage_may_hang(r->storage, r->far.rule);
}

bool ckpt_dir_has_objects(const struct ckpt_dir *dir) { return dir->root->has_objects; }

bool ckpt_dir_is_spread(const struct ckpt_dir *dir) { return dir->root->is_spread; }

bool ckpt_dir_is_archive(const struct ckpt_dir *dir) { return dir->root->is_archive; }

bool ckpt_dir_is_far(const struct ckpt_dir *dir)
{
    const struct root *r = dir->root;

    return ckpt_dir_has_objects(dir) || ckpt_storage_is_far(r->storage, r->far.rule);
}

struct ckpt_storage *ckpt_dir_storage(const struct ckpt_dir *dir) { return dir->root->storage; }

bool ckpt_dir_ignores_case(const struct ckpt_dir *dir)
{
    return ckpt_storage_ignores_case(dir->root->storage);
}

const char *ckpt_dir_path(const struct ckpt_dir *dir) { return dir->path; }

const char *ckpt_dir_real_path(const struct ckpt_dir *dir) { return dir->root->top.real; }

const char *ckpt_dir_hub_blobs(const struct ckpt_dir *dir) { return dir->root->top.blobs; }

const char *ckpt_dir_real_name(const struct ckpt_dir *dir)
{
    const char *slash = strrchr(dir->root->top.real, '/');

    return slash ? slash + 1 : dir->root->top.real;
}

/* ---- identities ---- */

bool ckpt_file_id_eq(const struct ckpt_file_id *a, const struct ckpt_file_id *b)
{
    return a->inode == b->inode && a->size == b->size && a->mtime_ns == b->mtime_ns &&
           a->ctime_ns == b->ctime_ns;
}

struct ckpt_file_id ckpt_file_id_of_statx(const struct statx *st)
{
    const uint64_t dev = makedev(st->stx_dev_major, st->stx_dev_minor);

    return (struct ckpt_file_id){
        .inode = st->stx_ino ^ dev << 44 ^ dev >> 20,
        .size = st->stx_size,
        .mtime_ns = st->stx_mtime.tv_sec * 1000000000 + st->stx_mtime.tv_nsec,
        .ctime_ns = st->stx_ctime.tv_sec * 1000000000 + st->stx_ctime.tv_nsec,
    };
}

int ckpt_file_id_of(int fd, struct ckpt_file_id *ret, bool *ret_unlinked, struct ckpt_err *err)
{
    struct statx st;

    if (statx(fd, "", AT_EMPTY_PATH, STATX_BASIC_STATS, &st) < 0)
        return ckpt_fail_errno(err, errno, "statx");
    *ret = ckpt_file_id_of_statx(&st);
    *ret_unlinked = st.stx_nlink == 0;
    return 0;
}

/* ---- failures that a probe would take for a no ---- */

static void keep_first(const struct ckpt_dir *dir, enum kept kind, const struct ckpt_err *err)
{
    for (struct ckpt_dir *d = (struct ckpt_dir *)dir; d; d = d->parent) {
        struct ckpt_err *none = NULL, *copy = NULL;
        if (!atomic_load(&d->kept[kind]) && (copy = malloc(sizeof *copy)))
            *copy = *err;
        if (copy && !atomic_compare_exchange_strong(&d->kept[kind], &none, copy))
            free(copy);
    }
}

void ckpt_dir_keep_trouble(const struct ckpt_dir *dir, const struct ckpt_err *err)
{
    keep_first(dir, TROUBLE, err);
}

static int first_kept(const struct ckpt_dir *dir, enum kept kind, struct ckpt_err *err)
{
    const struct ckpt_err *kept = atomic_load(&dir->kept[kind]);

    return kept ? ckpt_err_move(err, kept) : 0;
}

int ckpt_dir_trouble(const struct ckpt_dir *dir, struct ckpt_err *err)
{
    return first_kept(dir, TROUBLE, err);
}

int ckpt_dir_leaving(const struct ckpt_dir *dir, struct ckpt_err *err)
{
    return first_kept(dir, LEAVING, err);
}

bool ckpt_errno_is_answer(int errnum)
{
    static const int answers[] = {ENOENT, ENOTDIR, EXDEV, ELOOP, ENAMETOOLONG, ENXIO};

    for (size_t i = 0; i < sizeof answers / sizeof answers[0]; i++)
        if (errnum == answers[i])
            return true;
    return false;
}

/* Fails as ckpt_fail_errno with the text "what 'dir/name'" (name may be NULL), and keeps trouble
 * for ckpt_dir_trouble. */
static int fail_at(const struct ckpt_dir *dir, int errnum, const char *what, const char *name,
                   struct ckpt_err *err)
{
    struct ckpt_err own = {0};

    (void)ckpt_fail_errno(&own, errnum, "%s '%s%s%s'", what, dir->path, name ? "/" : "",
                          name ? name : "");
    if (!ckpt_errno_is_answer(errnum))
        ckpt_dir_keep_trouble(dir, &own);
    return ckpt_err_move(err, &own);
}

/* The path of a name below dir, from the root: malloc'ed. FORMAT: it is no name below dir. */
static int path_below(const struct ckpt_dir *dir, const char *name, char **ret,
                      struct ckpt_err *err)
{
    if (!ckpt_below_ok(name))
        return ckpt_fail(err, CKPT_FORMAT, "'%s' is not a path below '%s'", name, dir->path);
    return (*ret = join(dir->below, name)) ? 0 : ckpt_nomem(err);
}

/* ---- looking and opening ---- */

bool ckpt_dir_is_everywhere(const struct ckpt_dir *dir, const char *name, const char **ret_lacks)
{
    const struct ckpt_dir_way *way = &dir->root->way;
    ckpt_cleanup(ckpt_freep) char *below = NULL;

    *ret_lacks = NULL;
    if (way->ops->lacks && path_below(dir, name, &below, NULL) == 0)
        *ret_lacks = way->ops->lacks(way->ctx, below);
    return !*ret_lacks;
}

const char *ckpt_dir_elsewhere(const struct ckpt_dir *dir, const char *name)
{
    const struct ckpt_dir_way *way = &dir->root->way;
    ckpt_cleanup(ckpt_freep) char *below = NULL;

    return way->ops->elsewhere && path_below(dir, name, &below, NULL) == 0
               ? way->ops->elsewhere(way->ctx, below)
               : NULL;
}

bool ckpt_dir_holders(const struct ckpt_dir *dir, const char *name, bool *ret, uint32_t n)
{
    const struct ckpt_dir_way *way = &dir->root->way;
    ckpt_cleanup(ckpt_freep) char *below = NULL;

    if (!dir->root->is_spread || path_below(dir, name, &below, NULL) < 0)
        return false;
    way->ops->holders(way->ctx, below, ret, n);
    return true;
}

/* The failure of ckpt_dir_ops.look or open: -1 and *err; own is the error if rc is -1. */
static int fail_open(const struct ckpt_dir *dir, const char *name, int rc, struct ckpt_err *own,
                     struct ckpt_err *err)
{
    if (rc < 0) {
        ckpt_dir_keep_trouble(dir, own);
        return ckpt_err_move(err, own);
    }
    if (rc != EXDEV)
        return fail_at(dir, rc, "cannot open", name, err);
    if (dir->root->folder)
        (void)ckpt_fail(own, CKPT_UNSUPPORTED,
                        "'%s/%s' is a link that leads out of the archive: unpack it", dir->path,
                        name);
    else
        (void)ckpt_fail(
            own, CKPT_UNSUPPORTED,
            "'%s/%s' is a link that leads out of '%s' (option follow_symlinks allows it)",
            dir->path, name, dir->root->top.real);
    keep_first(dir, LEAVING, own);
    return ckpt_err_move(err, own);
}

int ckpt_dir_look(const struct ckpt_dir *dir, const char *name, struct ckpt_dir_found *ret,
                  struct ckpt_err *err)
{
    const struct ckpt_dir_way *way = &dir->root->way;
    ckpt_cleanup(ckpt_freep) char *below = NULL;
    struct ckpt_err own = {0};

    if (path_below(dir, name, &below, err) < 0)
        return -1;
    const int rc = way->ops->look(way->ctx, below, ret, &own);
    return rc ? fail_open(dir, name, rc, &own, err) : 0;
}

/* FORMAT unless it is a regular file; fd (or -1) is open for what it is. */
static int check_regular(const struct ckpt_dir *dir, const char *name, enum ckpt_entry_kind kind,
                         int fd, struct ckpt_err *err)
{
    struct stat st = {0};

    if (kind == CKPT_ENTRY_FILE)
        return 0;
    if (fd >= 0)
        (void)fstat(fd, &st);
    return ckpt_fail(err, CKPT_FORMAT, "'%s/%s' is %s, expected a regular file", dir->path, name,
                     kind == CKPT_ENTRY_DIR ? "a directory"
                     : S_ISFIFO(st.st_mode) ? "a FIFO"
                     : S_ISSOCK(st.st_mode) ? "a socket"
                                            : "a device");
}

/* Open a file whose bytes are in another one, which must be the one that was found. */
static int open_within(const struct ckpt_dir *dir, const char *name, int *ret_fd,
                       struct ckpt_dir_found *ret, struct ckpt_err *err)
{
    struct ckpt_dir_found opened;

    if (ckpt_dir_look(dir, name, ret, err) < 0 ||
        check_regular(dir, name, ret->kind, -1, err) < 0 ||
        ckpt_dir_open_file(dir->root->folder, dir->root->file, ret_fd, &opened, err) < 0)
        return -1;
    ret->device = opened.device;
    return ckpt_file_id_eq(&opened.id, &ret->id)
               ? 0
               : ckpt_fail(err, CKPT_STALE, "'%s/%s' changed while it was opened", dir->path, name);
}

static int open_itself(const struct ckpt_dir *dir, const char *name, int *ret_fd,
                       struct ckpt_dir_found *ret, struct ckpt_err *err)
{
    const struct ckpt_dir_way *way = &dir->root->way;
    ckpt_cleanup(ckpt_freep) char *below = NULL;
    struct ckpt_err own = {0};

    if (path_below(dir, name, &below, err) < 0)
        return -1;
    const int rc = way->ops->open(way->ctx, below, ret_fd, ret, &own);
    return rc ? fail_open(dir, name, rc, &own, err)
              : check_regular(dir, name, ret->kind, *ret_fd, err);
}

int ckpt_dir_open_file(const struct ckpt_dir *dir, const char *name, int *ret_fd,
                       struct ckpt_dir_found *ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_closep) int fd = -1;
    struct ckpt_dir_found found;

    if ((dir->root->folder ? open_within : open_itself)(dir, name, &fd, &found, err) < 0)
        return -1;
    if (ret)
        *ret = found;
    *ret_fd = fd;
    fd = -1;
    return 0;
}

int ckpt_dir_find_file(const struct ckpt_dir *dir, const char *name, int *ret_fd,
                       struct ckpt_dir_found *ret, struct ckpt_err *err)
{
    if (ckpt_dir_memory(dir) != CKPT_DIR_RECALLS)
        return ckpt_dir_open_file(dir, name, ret_fd, ret, err);
    *ret_fd = -1;
    return ckpt_dir_look(dir, name, ret, err) < 0 ? -1
                                                  : check_regular(dir, name, ret->kind, -1, err);
}

int ckpt_dir_read_object(const struct ckpt_dir *dir, const char *name, const char *tag,
                         uint64_t size, const struct iovec *iov, int n, uint64_t off,
                         enum ckpt_read_how how, struct ckpt_err *err)
{
    const struct ckpt_dir_way *way = &dir->root->way;
    ckpt_cleanup(ckpt_freep) char *below = NULL;

    return path_below(dir, name, &below, err) < 0
               ? -1
               : way->ops->read(way->ctx, below, tag, size, iov, n, off, how, err);
}

int ckpt_dir_read_elsewhere(const struct ckpt_dir *dir, const char *name,
                            const struct ckpt_source_run *run, size_t n, struct ckpt_err *err)
{
    const struct ckpt_dir_way *way = &dir->root->way;
    ckpt_cleanup(ckpt_freep) char *below = NULL;

    return path_below(dir, name, &below, err) < 0
               ? -1
               : way->ops->read_elsewhere(way->ctx, below, run, n, err);
}

void ckpt_dir_refresh(const struct ckpt_dir *dir)
{
    const struct ckpt_dir_way *way = &dir->root->way;

    (void)pthread_mutex_lock(&dir->root->lock);
    forget_heads(dir->root);
    (void)pthread_mutex_unlock(&dir->root->lock);
    if (way->ops->refresh)
        way->ops->refresh(way->ctx);
}

/* ---- first bytes of far files ---- */

enum { MOST_HEADS = 64, MOST_HEAD_BYTES = 256 * 1024 };

bool ckpt_dir_recall_head(const struct ckpt_dir *dir, const char *name, void *buf, size_t cap,
                          size_t *ret)
{
    ckpt_cleanup(ckpt_freep) char *below = join(dir->below, name);
    struct root *r = dir->root;
    bool found = false;

    (void)pthread_mutex_lock(&r->lock);
    for (size_t i = 0; below && i < r->heads.len && !found; i++) {
        const struct head *h = &r->heads.ptr[i];
        if (strcmp(h->below, below) != 0 || (!h->whole && h->len < cap))
            continue;
        *ret = h->len < cap ? h->len : cap;
        memcpy(buf, h->data, *ret);
        found = true;
    }
    (void)pthread_mutex_unlock(&r->lock);
    return found;
}

void ckpt_dir_keep_head(const struct ckpt_dir *dir, const char *name, const void *data, size_t len,
                        bool whole)
{
    struct root *r = dir->root;
    struct head h = {.len = len, .whole = whole};

    if (!ckpt_dir_is_far(dir) || len > MOST_HEAD_BYTES || !(h.below = join(dir->below, name)))
        return;
    if ((h.data = malloc(len + 1)))
        memcpy(h.data, data, len);
    (void)pthread_mutex_lock(&r->lock);
    if (h.data && r->heads.len < MOST_HEADS && ckpt_vec_push(&r->heads, h) == 0)
        h = (struct head){0};
    (void)pthread_mutex_unlock(&r->lock);
    free(h.below);
    free(h.data);
}

/* ---- what was read before ---- */

/* The directory and the file in it that has the bytes of a file. */
static const struct ckpt_dir *holder(const struct ckpt_dir *dir, const char **name)
{
    for (; dir->root->folder; dir = dir->root->folder)
        *name = dir->root->file;
    return dir;
}

enum ckpt_dir_memory ckpt_dir_memory(const struct ckpt_dir *dir)
{
    const char *any;
    const struct ckpt_dir_way *way = &holder(dir, &any)->root->way;

    return way->ops->memory ? way->ops->memory(way->ctx) : CKPT_DIR_FORGETS;
}

/* Where the bytes of a file are kept: *ret_below (malloc'ed) below a directory of these functions;
 * NULL: nowhere, or there is no memory. */
static const struct ckpt_dir_way *memory_of(const struct ckpt_dir *dir, const char *name,
                                            char **ret_below)
{
    const struct ckpt_dir *h = holder(dir, &name);

    if (!h->root->way.ops->memory || !(*ret_below = join(h->below, name)))
        return NULL;
    return &h->root->way;
}

void ckpt_dir_keep(const struct ckpt_dir *dir, const char *name, const struct iovec *iov, int n,
                   uint64_t off)
{
    ckpt_cleanup(ckpt_freep) char *below = NULL;
    const struct ckpt_dir_way *way = memory_of(dir, name, &below);

    if (way)
        way->ops->keep(way->ctx, below, iov, n, off);
}

bool ckpt_dir_recall(const struct ckpt_dir *dir, const char *name, const struct iovec *iov, int n,
                     uint64_t off)
{
    ckpt_cleanup(ckpt_freep) char *below = NULL;
    const struct ckpt_dir_way *way = memory_of(dir, name, &below);

    return way && way->ops->recall(way->ctx, below, iov, n, off);
}

void ckpt_dir_known_as(const struct ckpt_dir *dir, const char *name, struct ckpt_file_id *id)
{
    ckpt_cleanup(ckpt_freep) char *below = NULL;
    const struct ckpt_dir_way *way = memory_of(dir, name, &below);

    if (way)
        way->ops->known_as(way->ctx, below, id);
}

/* ---- folders ---- */

int ckpt_dir_open_below(struct ckpt_dir *dir, const char *name, struct ckpt_dir **ret,
                        struct ckpt_err *err)
{
    struct ckpt_dir_found found;

    if (ckpt_dir_look(dir, name, &found, err) < 0)
        return -1;
    if (found.kind != CKPT_ENTRY_DIR)
        return fail_at(dir, ENOTDIR, "cannot open", name, err);
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

/* ---- asking ---- */

int ckpt_dir_identify(const struct ckpt_dir *dir, const char *name, struct ckpt_file_id *ret,
                      struct ckpt_err *err)
{
    struct ckpt_dir_found found;

    if (ckpt_dir_look(dir, name, &found, err) < 0)
        return -1;
    *ret = found.id;
    return 0;
}

bool ckpt_dir_stat(const struct ckpt_dir *dir, const char *name, struct ckpt_file_id *ret)
{
    return ckpt_dir_identify(dir, name, ret, NULL) == 0;
}

int64_t ckpt_dir_birth_ns(const struct ckpt_dir *dir, const char *name)
{
    struct ckpt_dir_found found;

    return ckpt_dir_look(dir, name, &found, NULL) == 0 ? found.birth_ns : 0;
}

static bool has_kind(const struct ckpt_dir *dir, const char *name, enum ckpt_entry_kind kind)
{
    struct ckpt_dir_found found;

    return ckpt_dir_look(dir, name, &found, NULL) == 0 && found.kind == kind;
}

bool ckpt_dir_has_file(const struct ckpt_dir *dir, const char *name)
{
    return has_kind(dir, name, CKPT_ENTRY_FILE);
}

bool ckpt_dir_has_dir(const struct ckpt_dir *dir, const char *name)
{
    return has_kind(dir, name, CKPT_ENTRY_DIR);
}

/* ---- listing ---- */

enum { LINK = 128 }; /* in an entry of a list, with its kind */

void ckpt_listed_add(struct ckpt_str *list, const struct ckpt_entry *e)
{
    ckpt_str_putc(list, (char)(e->kind | (e->is_link ? LINK : 0)));
    ckpt_str_append(list, e->name, strlen(e->name) + 1);
}

bool ckpt_listed_next(const char **at, const char *end, struct ckpt_entry *ret)
{
    const char *nul = *at < end ? memchr(*at + 1, 0, (size_t)(end - *at - 1)) : NULL;

    if (!nul)
        return false;
    const char *name = *at + 1;
    const int kind = (unsigned char)**at & ~LINK;
    *ret = (struct ckpt_entry){name, (enum ckpt_entry_kind)kind, (**at & LINK) != 0};
    *at = nul + 1;
    return kind <= CKPT_ENTRY_UNKNOWN && *name && !strchr(name, '/') && strcmp(name, ".") != 0 &&
           strcmp(name, "..") != 0;
}

int ckpt_dir_list(const struct ckpt_dir *dir, ckpt_dir_entry_fn *fn, void *ctx,
                  struct ckpt_err *err)
{
    const struct ckpt_dir_way *way = &dir->root->way;
    ckpt_cleanup(ckpt_str_release) struct ckpt_str list = {0};
    struct ckpt_dir_found found;
    struct ckpt_entry e;
    int rc = way->ops->list(way->ctx, dir->below, &list, err);

    if (rc)
        return rc > 0 ? fail_at(dir, rc, "cannot list", NULL, err) : -1;
    if (list.failed)
        return ckpt_nomem(err);
    for (const char *at = ckpt_str_get(&list), *end = at + list.len;
         rc >= 0 && ckpt_listed_next(&at, end, &e);) {
        if (e.kind == CKPT_ENTRY_UNKNOWN)
            e.kind = ckpt_dir_look(dir, e.name, &found, NULL) == 0 ? found.kind : CKPT_ENTRY_OTHER;
        rc = fn(ctx, &e, err);
    }
    return rc;
}
