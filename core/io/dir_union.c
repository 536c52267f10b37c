/* SPDX-License-Identifier: Apache-2.0 */
/* The functions of a union of directories. */
#include "io/dir_union.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/ckd.h"
#include "base/fdio.h"
#include "base/map.h"
#include "base/mem.h"
#include "base/sort.h"
#include "base/str.h"
#include "base/thread.h"
#include "base/vec.h"

enum {
    WHOLE_BYTES = 1 << 20, /* files up to this size are compared wholly */
    BLOCK_BYTES = 1 << 16, /* of larger ones, blocks of this size */
    BLOCKS = 18,           /* the first, the last, and 16 between them */
};

struct joined {
    struct ckpt_dir **member;
    size_t n;
    bool whole;
    pthread_mutex_t lock;    /* protects what follows */
    struct ckpt_map same;    /* files whose copies were found to be the same */
    struct ckpt_arena arena; /* of their names */
};

/* ---- the copies of a file ---- */

/* A file of one member, open for comparing. */
struct copy {
    const struct ckpt_dir *dir;
    const char *below;
    int fd; /* -1: an object */
    struct ckpt_dir_found found;
};

static void copy_close(struct copy *c) { ckpt_closep(&c->fd); }

static int copy_open(struct copy *c, struct ckpt_err *err)
{
    return ckpt_dir_open_file(c->dir, c->below, &c->fd, &c->found, err);
}

static uint64_t size_of(const struct ckpt_dir_found *f) { return f->extent.len; }

static int copy_read(const struct copy *c, void *buf, size_t len, uint64_t off,
                     struct ckpt_err *err)
{
    const struct iovec iov = {buf, len};

    if (c->fd < 0)
        return ckpt_dir_read_object(c->dir, c->below, c->found.tag, c->found.id.size, &iov, 1, off,
                                    CKPT_READ_EXACT, err);
    uint64_t at = c->found.extent.off + off;
    const int rc = ckpt_fdio_pread(c->fd, buf, len, &at);
    if (rc == CKPT_FDIO_END)
        return ckpt_fail(err, CKPT_STALE, "'%s/%s' became shorter while it was read",
                         ckpt_dir_path(c->dir), c->below);
    return rc ? ckpt_fail_errno(err, rc, "'%s/%s'", ckpt_dir_path(c->dir), c->below) : 0;
}

static int fail_differ(const struct copy *a, const struct copy *b, const char *how,
                       struct ckpt_err *err)
{
    return ckpt_fail(err, CKPT_CONFLICT,
                     "'%s/%s' and '%s/%s' are not the same file: %s (option also: directories of "
                     "one run, of one save)",
                     ckpt_dir_path(a->dir), a->below, ckpt_dir_path(b->dir), b->below, how);
}

/* Compare bytes [off, off + len). */
static int compare_block(const struct copy *a, const struct copy *b, unsigned char *buf, size_t len,
                         uint64_t off, struct ckpt_err *err)
{
    if (copy_read(a, buf, len, off, err) < 0 || copy_read(b, buf + len, len, off, err) < 0)
        return -1;
    return memcmp(buf, buf + len, len) == 0 ? 0 : fail_differ(a, b, "their bytes differ", err);
}

static int compare_bytes(const struct joined *u, const struct copy *a, const struct copy *b,
                         struct ckpt_err *err)
{
    const uint64_t size = size_of(&a->found);
    const bool whole = u->whole || size <= WHOLE_BYTES;
    const size_t block = whole ? WHOLE_BYTES : BLOCK_BYTES;
    ckpt_cleanup(ckpt_freep) unsigned char *buf = malloc(2 * block);

    if (!buf)
        return ckpt_nomem(err);
    for (uint64_t off = 0, i = 0; whole ? off < size : i < BLOCKS; off += block, i++) {
        const uint64_t at = whole ? off : (size - block) / (BLOCKS - 1) * i;
        const uint64_t from = !whole && i == BLOCKS - 1 ? size - block : at;
        if (compare_block(a, b, buf, (size_t)ckpt_min_u64(block, size - from), from, err) < 0)
            return -1;
    }
    return 0;
}

static int compare(const struct joined *u, struct copy *a, struct copy *b, struct ckpt_err *err)
{
    if (copy_open(a, err) < 0 || copy_open(b, err) < 0)
        return -1;
    if (size_of(&a->found) != size_of(&b->found))
        return fail_differ(a, b, "their sizes differ", err);
    if (*a->found.tag && strcmp(a->found.tag, b->found.tag) == 0)
        return 0;
    return compare_bytes(u, a, b, err);
}

/* The name under which it is kept that two files, as they are now, are the same. */
static char *same_key(const char *below, const struct ckpt_dir_found *a,
                      const struct ckpt_dir_found *b)
{
    return ckpt_asprintf("%s\n%llx %llx %llx %llx", below, (unsigned long long)a->id.inode,
                         (unsigned long long)a->id.ctime_ns, (unsigned long long)b->id.inode,
                         (unsigned long long)b->id.ctime_ns);
}

static bool is_known(struct joined *u, const char *key)
{
    ckpt_cleanup(ckpt_unlockp) pthread_mutex_t *held = ckpt_lock(&u->lock);

    return ckpt_map_find(&u->same, key) != CKPT_NONE;
}

static int keep_known(struct joined *u, const char *key, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_unlockp) pthread_mutex_t *held = ckpt_lock(&u->lock);
    const char *own = ckpt_arena_strdup(&u->arena, key);

    return !own || ckpt_map_add(&u->same, own, 0) == CKPT_NONE ? ckpt_nomem(err) : 0;
}

/* Check that a member's file is the same as the first one that was found. */
static int check_same(struct joined *u, size_t first, const struct ckpt_dir_found *found,
                      size_t other, const struct ckpt_dir_found *its, const char *below,
                      struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *key = same_key(below, found, its);
    struct copy a = {.dir = u->member[first], .below = below, .fd = -1},
                b = {.dir = u->member[other], .below = below, .fd = -1};

    if (!key)
        return ckpt_nomem(err);
    if (is_known(u, key))
        return 0;
    const int rc = compare(u, &a, &b, err);
    copy_close(&a);
    copy_close(&b);
    return rc < 0 ? -1 : keep_known(u, key, err);
}

/* ---- the functions ---- */

/* The number of the first member that has the entry, from `from` on; n: none has. An error that is
 * no answer is kept in *err, of the first member that gave one. */
static size_t find(const struct joined *u, size_t from, const char *below,
                   struct ckpt_dir_found *ret, struct ckpt_err *err)
{
    for (; from < u->n; from++) {
        struct ckpt_err own = {0};
        if (ckpt_dir_look(u->member[from], below, ret, &own) == 0)
            break;
        if (own.code != CKPT_MISSING && !err->code)
            *err = own;
    }
    return from;
}

/* The directory itself, and a folder that several have, are as new as all of them. */
static void join_folders(const struct joined *u, size_t first, const char *below,
                         struct ckpt_dir_found *found)
{
    struct ckpt_err ignored = {0};
    struct ckpt_dir_found more;

    for (size_t i = find(u, first + 1, below, &more, &ignored); i < u->n;
         i = find(u, i + 1, below, &more, &ignored)) {
        found->id.inode = found->id.inode * 31 + more.id.inode;
        found->id.size += more.id.size;
        found->id.mtime_ns =
            more.id.mtime_ns > found->id.mtime_ns ? more.id.mtime_ns : found->id.mtime_ns;
        /* only good for comparing, and a bucket's is a hash: it may wrap around */
        found->id.ctime_ns = (int64_t)((uint64_t)found->id.ctime_ns + (uint64_t)more.id.ctime_ns);
    }
}

static int joined_look(void *ctx, const char *below, struct ckpt_dir_found *ret,
                       struct ckpt_err *err)
{
    const struct joined *u = ctx;
    struct ckpt_err own = {0};
    const size_t first = find(u, 0, below, ret, &own);

    if (first == u->n)
        return own.code ? ckpt_err_move(err, &own) : ENOENT;
    if (ret->kind == CKPT_ENTRY_DIR)
        join_folders(u, first, below, ret);
    return 0;
}

static int joined_open(void *ctx, const char *below, int *ret_fd, struct ckpt_dir_found *ret,
                       struct ckpt_err *err)
{
    struct joined *u = ctx;
    struct ckpt_dir_found found, more;
    struct ckpt_err own = {0};
    const size_t first = find(u, 0, below, &found, &own);

    if (first == u->n)
        return own.code ? ckpt_err_move(err, &own) : ENOENT;
    if (found.kind != CKPT_ENTRY_FILE) {
        *ret = found;
        *ret_fd = -1;
        return 0;
    }
    for (size_t i = find(u, first + 1, below, &more, &own); i < u->n;
         i = find(u, i + 1, below, &more, &own))
        if (more.kind == CKPT_ENTRY_FILE && check_same(u, first, &found, i, &more, below, err) < 0)
            return -1;
    return ckpt_dir_open_file(u->member[first], below, ret_fd, ret, err);
}

struct entries {
    CKPT_VEC(char *) name; /* with the kind before it, as ckpt_listed_add has it */
    bool failed;
};

static void entries_release(struct entries *e)
{
    for (size_t i = 0; i < e->name.len; i++)
        free(e->name.ptr[i]);
    ckpt_vec_release(&e->name);
}

static int take(void *ctx, const struct ckpt_entry *entry, struct ckpt_err *err)
{
    struct entries *all = ctx;
    ckpt_cleanup(ckpt_str_release) struct ckpt_str one = {0};

    ckpt_listed_add(&one, entry);
    if (one.failed || ckpt_vec_push(&all->name, one.ptr) < 0)
        return ckpt_nomem(err);
    one = (struct ckpt_str){0};
    return 0;
}

static int name_cmp(const void *a, const void *b)
{
    return ckpt_natural_cmp(*(char *const *)a + 1, *(char *const *)b + 1);
}

/* Is the folder in member i? */
static bool has_folder(const struct joined *u, size_t i, const char *below)
{
    return strcmp(below, ".") == 0 || ckpt_dir_has_dir(u->member[i], below);
}

static int list_member(const struct joined *u, size_t i, const char *below, struct entries *all,
                       struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *dir = NULL;

    return ckpt_dir_open_below(u->member[i], below, &dir, err) < 0
               ? -1
               : ckpt_dir_list(dir, take, all, err);
}

static int joined_list(void *ctx, const char *below, struct ckpt_str *ret, struct ckpt_err *err)
{
    const struct joined *u = ctx;
    ckpt_cleanup(entries_release) struct entries all = {0};
    bool any = false;

    for (size_t i = 0; i < u->n; i++) {
        if (!has_folder(u, i, below))
            continue;
        any = true;
        if (list_member(u, i, below, &all, err) < 0)
            return -1;
    }
    if (!any)
        return ENOENT;
    ckpt_sort(all.name.ptr, all.name.len, name_cmp); /* which keeps the order of equal ones */
    for (size_t i = 0; i < all.name.len; i++)
        if (i == 0 || strcmp(all.name.ptr[i] + 1, all.name.ptr[i - 1] + 1) != 0)
            ckpt_str_append(ret, all.name.ptr[i], strlen(all.name.ptr[i] + 1) + 2);
    return 0;
}

static int joined_read(void *ctx, const char *below, const char *tag, uint64_t size,
                       const struct iovec *iov, int n, uint64_t off, enum ckpt_read_how how,
                       struct ckpt_err *err)
{
    const struct joined *u = ctx;
    struct ckpt_dir_found found;
    struct ckpt_err own = {0};
    const size_t first = find(u, 0, below, &found, &own);

    if (first == u->n)
        return own.code ? ckpt_err_move(err, &own)
                        : ckpt_fail(err, CKPT_STALE, "'%s' has gone", below);
    return ckpt_dir_read_object(u->member[first], below, tag, size, iov, n, off, how, err);
}

static void joined_refresh(void *ctx)
{
    const struct joined *u = ctx;

    for (size_t i = 0; i < u->n; i++)
        ckpt_dir_refresh(u->member[i]);
}

static const char *joined_lacks(void *ctx, const char *below)
{
    const struct joined *u = ctx;

    for (size_t i = 0; i < u->n; i++)
        if (!has_folder(u, i, below))
            return ckpt_dir_path(u->member[i]);
    return NULL;
}

static void joined_free(void *ctx)
{
    struct joined *u = ctx;

    for (size_t i = 0; i < u->n; i++)
        ckpt_dir_unref(u->member[i]);
    free(u->member);
    ckpt_map_release(&u->same);
    ckpt_arena_release(&u->arena);
    (void)pthread_mutex_destroy(&u->lock);
    free(u);
}

/* ---- opening ---- */

static const struct ckpt_dir_ops folder_ops = {.look = joined_look,
                                               .open = joined_open,
                                               .list = joined_list,
                                               .free = joined_free,
                                               .refresh = joined_refresh,
                                               .lacks = joined_lacks};
static const struct ckpt_dir_ops object_ops = {.look = joined_look,
                                               .open = joined_open,
                                               .list = joined_list,
                                               .free = joined_free,
                                               .read = joined_read,
                                               .refresh = joined_refresh,
                                               .lacks = joined_lacks};

static struct joined *new_joined(struct ckpt_dir **member, size_t n, bool whole)
{
    struct joined *u = calloc(1, sizeof *u);

    if (!u || !(u->member = calloc(n, sizeof *u->member))) {
        free(u);
        for (size_t i = 0; i < n; i++)
            ckpt_dir_unref(member[i]);
        return NULL;
    }
    memcpy(u->member, member, n * sizeof *member);
    u->n = n;
    u->whole = whole;
    (void)pthread_mutex_init(&u->lock, NULL);
    return u;
}

/* "/nodes/0/run (and /nodes/1/run, /nodes/2/run)", for messages. */
static char *path_of(const struct joined *u)
{
    ckpt_cleanup(ckpt_str_release) struct ckpt_str path = {0};

    ckpt_str_printf(&path, "%s (and ", ckpt_dir_path(u->member[0]));
    for (size_t i = 1; i < u->n; i++)
        ckpt_str_printf(&path, "%s%s", i > 1 ? ", " : "", ckpt_dir_path(u->member[i]));
    ckpt_str_printf(&path, ")");
    return path.failed ? NULL : strdup(ckpt_str_get(&path));
}

int ckpt_dir_open_union(struct ckpt_dir **member, size_t n, bool whole, struct ckpt_dir **ret,
                        struct ckpt_err *err)
{
    struct joined *u = new_joined(member, n, whole);
    ckpt_cleanup(ckpt_freep) char *path = u ? path_of(u) : NULL;
    size_t buckets = 0;
    int rc = path ? 0 : ckpt_nomem(err);

    for (size_t i = 0; i < n && rc == 0; i++)
        buckets += ckpt_dir_has_objects(member[i]);
    if (rc == 0 && buckets && buckets < n)
        rc = ckpt_fail(err, CKPT_UNSUPPORTED,
                       "option also: a run lies either in buckets or in directories, not in both: "
                       "mount the bucket");
    const struct ckpt_dir_way way = {buckets ? &object_ops : &folder_ops, u};
    if (rc == 0)
        rc = ckpt_dir_open_other(path, way, NULL, NULL, ret, err);
    if (rc < 0) {
        if (u)
            joined_free(u);
        return -1;
    }
    if (ckpt_dir_take_after(*ret, member[0], NULL, err) < 0) {
        ckpt_dir_unref(*ret);
        *ret = NULL;
        return -1;
    }
    return 0;
}
