/* SPDX-License-Identifier: Apache-2.0 */
/* The functions of a directory over lists of a bucket. Folders are listed one by one, with a
 * delimiter; where many are looked at, everything below the root is listed at once. */
#include "io/bucket/dir_bucket.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "base/map.h"
#include "base/mem.h"
#include "base/par.h"
#include "base/sort.h"
#include "base/str.h"
#include "base/thread.h"
#include "base/vec.h"
#include "io/dir.h"

enum {
    FOLDERS = 8,       /* listed one by one, before everything is listed at once */
    MOST_PAGES = 1000, /* of 1,000 keys, of that list: beyond it, folders again */
    ALL_PAGES = 1 << 24,
    AT_ONCE = 64, /* headers that are read */
};

struct node {
    const char *path, *tag;
    const char *bad; /* why this folder can't be listed; NULL: it can */
    bool is_folder, is_listed;
    uint64_t size, hash;  /* hash: of a folder's entries */
    int64_t mtime_ns;     /* of a folder: its newest entry's */
    uint32_t first, next; /* entries of a folder; CKPT_NONE: no more */
};

struct bucket {
    struct ckpt_client *client;
    char *name, *prefix; /* the prefix ends with '/', or is "" */
    char *url;
    pthread_mutex_t lock;        /* protects what follows */
    CKPT_VEC(struct node) nodes; /* what is known of the bucket; node 0 is the root */
    struct ckpt_map index;       /* path -> node */
    struct ckpt_arena arena;
    unsigned listed; /* folders that were listed one by one */
    bool too_many;   /* to be listed at once */
    bool is_around;  /* nobody has named it: if it can't be listed, it is empty */
};

static void forget(struct bucket *b)
{
    ckpt_vec_release(&b->nodes);
    ckpt_map_release(&b->index);
    ckpt_arena_release(&b->arena);
    b->listed = 0;
}

static void bucket_free(void *ctx)
{
    struct bucket *b = ctx;

    forget(b);
    ckpt_client_unref(b->client);
    (void)pthread_mutex_destroy(&b->lock);
    free(b->name);
    free(b->prefix);
    free(b->url);
    free(b);
}

/* ---- the tree; with the lock held ---- */

/* Add a file, or a folder (e is NULL), and the folders above it: *ret is its node. */
static int add(struct bucket *b, const char *path, size_t len, const struct ckpt_listed *e,
               uint32_t *ret, struct ckpt_err *err)
{
    const struct node none = {.is_folder = !e, .first = CKPT_NONE, .next = CKPT_NONE};
    const char *slash = memrchr(path, '/', len);
    uint32_t above = 0;

    if (slash && add(b, path, (size_t)(slash - path), NULL, &above, err) < 0)
        return -1;
    const bool is_new = !ckpt_map_get(&b->index, path, len, ret);
    if (is_new) {
        char *own = ckpt_arena_strndup(&b->arena, path, len);
        if (!own || ckpt_vec_push(&b->nodes, none) < 0 ||
            ckpt_map_put(&b->index, own, len, (uint32_t)b->nodes.len - 1, ret, &(bool){0}) < 0)
            return ckpt_nomem(err);
        b->nodes.ptr[*ret].path = own;
        if (*ret > 0) {
            b->nodes.ptr[*ret].next = b->nodes.ptr[above].first;
            b->nodes.ptr[above].first = *ret;
        }
    }
    struct node *n = &b->nodes.ptr[*ret];
    if (e ? n->is_folder && e->size : !n->is_folder && n->size)
        return ckpt_fail(err, CKPT_CONFLICT,
                         "'%s/%s' is an object, and other objects are below it: files can't be so",
                         b->url, n->path);
    n->is_folder |= !e; /* an empty object of this name marks it */
    if (n->is_folder)
        return 0;
    n->size = e->size;
    n->mtime_ns = e->mtime_ns;
    n->tag = ckpt_arena_strdup(&b->arena, e->tag);
    return n->tag ? 0 : ckpt_nomem(err);
}

/* Could a file have this path? */
static bool is_path(const char *path)
{
    return ckpt_below_ok(path) && strcmp(path, ".") != 0 && !ckpt_has_prefix(path, "./") &&
           !strstr(path, "/./") && !ckpt_has_suffix(path, "/.");
}

/* A key that no file can have: the folder that it would be in can't be listed, others can. */
static int add_bad(struct bucket *b, char *path, const char *key, struct ckpt_err *err)
{
    struct ckpt_err why = {0};
    uint32_t at;
    char *slash;

    (void)ckpt_fail(&why, CKPT_UNSUPPORTED,
                    "'s3://%s/%s': no file can have this name (an empty part, '.' or '..')",
                    b->name, key);
    do
        if ((slash = strrchr(path, '/')))
            *slash = '\0';
    while (slash && !is_path(path));
    if (!slash)
        return ckpt_err_move(err, &why);
    if (add(b, path, strlen(path), NULL, &at, err) < 0)
        return -1;
    b->nodes.ptr[at].bad = ckpt_arena_strdup(&b->arena, why.text);
    return b->nodes.ptr[at].bad ? 0 : ckpt_nomem(err);
}

static int see(void *ctx, const struct ckpt_listed *e, struct ckpt_err *err)
{
    struct bucket *b = ctx;
    const size_t skip = strlen(b->prefix);
    ckpt_cleanup(ckpt_freep) char *path = NULL;
    uint32_t ignored;

    if (strncmp(e->key, b->prefix, skip) != 0)
        return ckpt_fail(err, CKPT_FORMAT, "a list of '%s' has the key '%s', which is not below it",
                         b->url, e->key);
    size_t len = strlen(e->key + skip);
    const bool is_folder = len && e->key[skip + len - 1] == '/';
    len -= is_folder;
    if (len == 0) /* the folder's own marker */
        return 0;
    if (!(path = strndup(e->key + skip, len)))
        return ckpt_nomem(err);
    if (!is_path(path))
        return add_bad(b, path, e->key, err);
    if (is_folder && e->size)
        return ckpt_fail(err, CKPT_UNSUPPORTED,
                         "'s3://%s/%s' has %llu bytes: no file's name ends with '/'", b->name,
                         e->key, (unsigned long long)e->size);
    if (!is_folder && strlen(e->tag) >= CKPT_TAG_MAX)
        return ckpt_fail(err, CKPT_UNSUPPORTED, "'s3://%s/%s': its ETag has %zu bytes", b->name,
                         e->key, strlen(e->tag));
    return add(b, path, len, is_folder ? NULL : e, &ignored, err);
}

/* Computes, now that the folder's entries are complete, the identity that tells whether it has
 * changed. */
static void seal(struct bucket *b, struct node *folder)
{
    folder->is_listed = true;
    for (uint32_t i = folder->first; i != CKPT_NONE; i = b->nodes.ptr[i].next) {
        const struct node *n = &b->nodes.ptr[i];
        if (n->mtime_ns > folder->mtime_ns && !n->is_folder)
            folder->mtime_ns = n->mtime_ns;
        folder->hash += XXH3_64bits(n->path, strlen(n->path)) * 2 +
                        (n->is_folder ? 1 : XXH3_64bits(n->tag, strlen(n->tag)));
    }
}

static int list_into(struct bucket *b, const char *below, const char *delimiter, unsigned most,
                     bool *ret_all, struct ckpt_err *err)
{
    const bool is_root = strcmp(below, ".") == 0;
    ckpt_cleanup(ckpt_freep) char *prefix =
        ckpt_asprintf("%s%s%s", b->prefix, is_root ? "" : below, is_root ? "" : "/");

    return !prefix ? ckpt_nomem(err)
                   : ckpt_client_list(b->client, b->name, prefix, delimiter, most, ret_all, see, b,
                                      err);
}

static int list_all(struct bucket *b, struct ckpt_err *err)
{
    bool all = false;

    if (list_into(b, ".", "", MOST_PAGES, &all, err) < 0)
        return -1;
    b->too_many = !all;
    for (size_t i = 0; all && i < b->nodes.len; i++)
        if (b->nodes.ptr[i].is_folder && !b->nodes.ptr[i].is_listed)
            seal(b, &b->nodes.ptr[i]);
    return 0;
}

/* Make sure that the entries of this folder are known. */
static int need_list(struct bucket *b, uint32_t at, struct ckpt_err *err)
{
    bool all;

    if (b->nodes.ptr[at].is_listed)
        return 0;
    if (b->listed++ >= FOLDERS && !b->too_many && list_all(b, err) < 0)
        return -1;
    if (b->nodes.ptr[at].is_listed)
        return 0;
    if (list_into(b, b->nodes.ptr[at].path, "/", ALL_PAGES, &all, err) < 0)
        return -1;
    seal(b, &b->nodes.ptr[at]);
    return 0;
}

static int need_root(struct bucket *b, struct ckpt_err *err)
{
    struct ckpt_err why = {0}; /* a folder around can't be listed */
    uint32_t root;

    if (b->nodes.len)
        return need_list(b, 0, err);
    if (add(b, ".", 1, NULL, &root, err) == 0 && need_list(b, root, b->is_around ? &why : err) == 0)
        return 0;
    forget(b);
    if (!why.code || add(b, ".", 1, NULL, &root, err) < 0)
        return -1;
    b->nodes.ptr[root].is_listed = true;
    return 0;
}

/* 0, an errno, or -1: as ckpt_dir_ops.look. */
static int find(struct bucket *b, const char *below, uint32_t *ret, struct ckpt_err *err)
{
    if (need_root(b, err) < 0)
        return -1;
    *ret = 0;
    for (const char *end = below; strcmp(below, ".") != 0 && *end; end += *end == '/') {
        end += strcspn(end, "/");
        if (!b->nodes.ptr[*ret].is_folder)
            return ENOTDIR;
        if (need_list(b, *ret, err) < 0)
            return -1;
        if (!ckpt_map_get(&b->index, below, (size_t)(end - below), ret))
            return ENOENT;
    }
    return 0;
}

/* ---- the functions ---- */

static int bucket_look(void *ctx, const char *below, struct ckpt_dir_found *ret,
                       struct ckpt_err *err)
{
    struct bucket *b = ctx;
    ckpt_cleanup(ckpt_unlockp) pthread_mutex_t *held = ckpt_lock(&b->lock);
    uint32_t at;
    const int rc = find(b, below, &at, err);

    if (rc || (b->nodes.ptr[at].is_folder && need_list(b, at, err) < 0))
        return rc ? rc : -1;
    const struct node *n = &b->nodes.ptr[at];
    const uint64_t place =
        XXH3_64bits_withSeed(below, strlen(below), XXH3_64bits(b->url, strlen(b->url)));
    const uint64_t content = n->is_folder ? n->hash : XXH3_64bits(n->tag, strlen(n->tag));
    *ret = (struct ckpt_dir_found){.kind = n->is_folder ? CKPT_ENTRY_DIR : CKPT_ENTRY_FILE,
                                   .id = {place, n->size, n->mtime_ns, (int64_t)(content >> 1)},
                                   .extent = {0, n->size}};
    if (!n->is_folder)
        memcpy(ret->tag, n->tag, strlen(n->tag) + 1);
    return 0;
}

static int bucket_open(void *ctx, const char *below, int *ret_fd, struct ckpt_dir_found *ret,
                       struct ckpt_err *err)
{
    *ret_fd = -1;
    return bucket_look(ctx, below, ret, err);
}

static int entry_cmp(const void *a, const void *b)
{
    return ckpt_natural_cmp(((const struct ckpt_entry *)a)->name,
                            ((const struct ckpt_entry *)b)->name);
}

static int bucket_list(void *ctx, const char *below, struct ckpt_str *ret, struct ckpt_err *err)
{
    struct bucket *b = ctx;
    ckpt_cleanup(ckpt_unlockp) pthread_mutex_t *held = ckpt_lock(&b->lock);
    CKPT_VEC(struct ckpt_entry) all = {0};
    uint32_t at;
    int rc = find(b, below, &at, err);

    if (rc == 0 && !b->nodes.ptr[at].is_folder)
        rc = ENOTDIR;
    if (rc || need_list(b, at, err) < 0)
        return rc ? rc : -1;
    if (b->nodes.ptr[at].bad)
        return ckpt_fail(err, CKPT_UNSUPPORTED, "%s", b->nodes.ptr[at].bad);
    for (uint32_t i = b->nodes.ptr[at].first; i != CKPT_NONE && rc == 0; i = b->nodes.ptr[i].next) {
        const struct node *n = &b->nodes.ptr[i];
        const char *slash = strrchr(n->path, '/');
        const struct ckpt_entry e = {.name = slash ? slash + 1 : n->path,
                                     .kind = n->is_folder ? CKPT_ENTRY_DIR : CKPT_ENTRY_FILE};
        if (ckpt_vec_push(&all, e) < 0)
            rc = ckpt_nomem(err);
    }
    ckpt_sort(all.ptr, all.len, entry_cmp);
    for (size_t i = 0; rc == 0 && i < all.len; i++)
        ckpt_listed_add(ret, &all.ptr[i]);
    ckpt_vec_release(&all);
    return rc;
}

static int bucket_read(void *ctx, const char *below, const char *tag, uint64_t size,
                       const struct iovec *iov, int n, uint64_t off, enum ckpt_read_how how,
                       struct ckpt_err *err)
{
    struct bucket *b = ctx;
    ckpt_cleanup(ckpt_freep) char *key = ckpt_asprintf("%s%s", b->prefix, below);
    const struct ckpt_object o = {b->name, key, tag, size};

    return key ? ckpt_client_read(b->client, &o, iov, n, off, how, err) : ckpt_nomem(err);
}

static void bucket_refresh(void *ctx)
{
    struct bucket *b = ctx;
    ckpt_cleanup(ckpt_unlockp) pthread_mutex_t *held = ckpt_lock(&b->lock);

    forget(b);
}

static const struct ckpt_dir_ops bucket_ops = {.look = bucket_look,
                                               .open = bucket_open,
                                               .list = bucket_list,
                                               .free = bucket_free,
                                               .read = bucket_read,
                                               .refresh = bucket_refresh};

/* ---- opening ---- */

#define SCHEME "s3://"

bool ckpt_is_bucket(const char *path) { return ckpt_has_prefix(path, SCHEME); }

/* Split the URL into bucket and prefix. */
static int parse(struct bucket *b, const char *url, struct ckpt_err *err)
{
    const char *name = url + strlen(SCHEME);
    const size_t len = strcspn(name, "/");
    ckpt_cleanup(ckpt_freep) char *prefix = strdup(name + len + (name[len] == '/'));

    if (len == 0 || len > 255 ||
        strspn(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
                     "0123456789.-_:") < len)
        return ckpt_fail(err, CKPT_USAGE, "'%s': expected s3://BUCKET or s3://BUCKET/PREFIX", url);
    for (size_t n = prefix ? strlen(prefix) : 0; n && prefix[n - 1] == '/';)
        prefix[--n] = '\0';
    b->name = strndup(name, len);
    if (!b->name || !prefix)
        return ckpt_nomem(err);
    b->prefix = ckpt_asprintf("%s%s", prefix, *prefix ? "/" : "");
    b->url = ckpt_asprintf(SCHEME "%s%s%s", b->name, *prefix ? "/" : "", prefix);
    if (!b->prefix || !b->url)
        return ckpt_nomem(err);
    if (*prefix && !is_path(prefix))
        return ckpt_fail(err, CKPT_USAGE, "'%s': a prefix has no empty part, no '.' and no '..'",
                         url);
    return 0;
}

/* Is this the key of the prefix itself, without its '/'? */
static int see_itself(void *ctx, const struct ckpt_listed *e, struct ckpt_err *err)
{
    const struct bucket *b = ctx;
    const size_t len = strlen(b->prefix);

    if (strncmp(e->key, b->prefix, len - 1) != 0 || e->key[len - 1])
        return 0;
    return ckpt_fail(err, CKPT_UNSUPPORTED,
                     "'%s' is an object, not a folder: archives and single files are not read in a "
                     "bucket; copy it to a disk",
                     b->url);
}

static int check_itself(struct bucket *b, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *key = NULL;
    bool all;

    if (!*b->prefix)
        return 0;
    key = strndup(b->prefix, strlen(b->prefix) - 1);
    return !key ? ckpt_nomem(err)
                : ckpt_client_list(b->client, b->name, key, "/", 1, &all, see_itself, b, err);
}

static int check_any(struct bucket *bucket, struct ckpt_err *err)
{
    struct bucket *b = bucket;
    ckpt_cleanup(ckpt_unlockp) pthread_mutex_t *held = ckpt_lock(&b->lock);

    if (need_root(b, err) < 0)
        return -1;
    if (b->nodes.ptr[0].first != CKPT_NONE)
        return 0;
    if (check_itself(b, err) < 0)
        return -1;
    return ckpt_fail(err, CKPT_MISSING, "'%s': the bucket has no object whose key begins with '%s'",
                     b->url, b->prefix);
}

int ckpt_dir_open_bucket(const char *url, bool is_around, const struct ckpt_bucket_settings *s,
                         const struct ckpt_recording *rec, struct ckpt_dir **ret,
                         struct ckpt_err *err)
{
    struct bucket *b = calloc(1, sizeof *b);
    const bool replays = rec && ckpt_recording_memory(rec) == CKPT_DIR_RECALLS;

    if (!b)
        return ckpt_nomem(err);
    (void)pthread_mutex_init(&b->lock, NULL);
    b->is_around = is_around;
    if (parse(b, url, err) < 0 || ckpt_client_get(s, &b->client, err) < 0 ||
        (!replays && !is_around && check_any(b, err) < 0) ||
        ckpt_dir_open_other(b->url, (struct ckpt_dir_way){&bucket_ops, b}, NULL, NULL, ret, err) <
            0) {
        bucket_free(b);
        return -1;
    }
    ckpt_parallel_default(AT_ONCE);
    return 0;
}
