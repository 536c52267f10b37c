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
#include "base/str.h"
#include "base/vec.h"
#include "io/below.h"

enum {
    FOLDERS = 8,       /* listed one by one, before everything is listed at once */
    MOST_PAGES = 1000, /* of 1,000 keys, of that list: beyond it, folders again */
    ALL_PAGES = 1 << 24,
};

struct node {
    const char *path, *tag;
    bool is_folder, is_listed;
    uint64_t size, hash;  /* hash: of a folder's entries */
    int64_t mtime_ns;     /* of a folder: its newest entry's */
    uint32_t first, next; /* entries of a folder; CKPT_NONE: no more */
};

/* What is known of the bucket; node 0 is the root. */
struct tree {
    CKPT_VEC(struct node) nodes;
    struct ckpt_map index; /* path -> node */
    struct ckpt_arena arena;
    unsigned listed; /* folders that were listed one by one */
    bool too_many;   /* to be listed at once */
};

struct bucket {
    struct ckpt_client *client;
    char *name, *prefix; /* the prefix ends with '/', or is "" */
    char *url;
    pthread_mutex_t lock; /* protects the tree */
    struct tree tree;
};

static void tree_clear(struct tree *t)
{
    ckpt_vec_release(&t->nodes);
    ckpt_map_release(&t->index);
    ckpt_arena_release(&t->arena);
    *t = (struct tree){.too_many = t->too_many};
}

static void bucket_free(void *ctx)
{
    struct bucket *b = ctx;

    tree_clear(&b->tree);
    ckpt_client_unref(b->client);
    (void)pthread_mutex_destroy(&b->lock);
    free(b->name);
    free(b->prefix);
    free(b->url);
    free(b);
}

static void bucket_freep(struct bucket **b)
{
    if (*b)
        bucket_free(*b);
}

/* ---- the tree; with the lock held ---- */

/* Get the node of a path, which is made if there is none. */
static int node_of(struct tree *t, const char *path, size_t len, uint32_t *ret, bool *ret_new,
                   struct ckpt_err *err)
{
    struct node n = {.first = CKPT_NONE, .next = CKPT_NONE};

    *ret_new = false;
    if (ckpt_map_get(&t->index, path, len, ret))
        return 0;
    n.path = ckpt_arena_strndup(&t->arena, path, len);
    if (!n.path || ckpt_vec_push(&t->nodes, n) < 0 ||
        ckpt_map_put(&t->index, n.path, len, (uint32_t)t->nodes.len - 1, ret, ret_new) < 0)
        return ckpt_nomem(err);
    return 0;
}

static int fail_both(const struct bucket *b, const char *path, struct ckpt_err *err)
{
    return ckpt_fail(err, CKPT_CONFLICT,
                     "'%s/%s' is an object, and other objects are below it: files can't be so",
                     b->url, path);
}

/* Add a folder, and those above it. */
static int add_folder(struct bucket *b, const char *path, size_t len, uint32_t *ret,
                      struct ckpt_err *err)
{
    struct tree *t = &b->tree;
    const char *slash = memrchr(path, '/', len);
    uint32_t above = 0;
    bool is_new;

    if (slash && add_folder(b, path, (size_t)(slash - path), &above, err) < 0)
        return -1;
    if (node_of(t, path, len, ret, &is_new, err) < 0)
        return -1;
    struct node *n = &t->nodes.ptr[*ret];
    if (is_new) {
        n->next = t->nodes.ptr[above].first;
        t->nodes.ptr[above].first = *ret;
    } else if (!n->is_folder && n->size) {
        return fail_both(b, n->path, err);
    }
    n->is_folder = true; /* an empty object of this name marks it */
    return 0;
}

static int add_file(struct bucket *b, const char *path, const struct ckpt_listed *e,
                    struct ckpt_err *err)
{
    struct tree *t = &b->tree;
    const char *slash = strrchr(path, '/');
    uint32_t above = 0, at;
    bool is_new;

    if (slash && add_folder(b, path, (size_t)(slash - path), &above, err) < 0)
        return -1;
    if (node_of(t, path, strlen(path), &at, &is_new, err) < 0)
        return -1;
    struct node *n = &t->nodes.ptr[at];
    if (n->is_folder)
        return e->size ? fail_both(b, path, err) : 0;
    if (is_new) {
        n->next = t->nodes.ptr[above].first;
        t->nodes.ptr[above].first = at;
    }
    n->size = e->size;
    n->mtime_ns = e->mtime_ns;
    n->tag = ckpt_arena_strdup(&t->arena, e->tag);
    return n->tag ? 0 : ckpt_nomem(err);
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
    if (!ckpt_below_ok(path) || strncmp(path, "./", 2) == 0 || strstr(path, "/./"))
        return ckpt_fail(err, CKPT_UNSUPPORTED,
                         "'s3://%s/%s': no file can have this name (an empty part, '.' or '..')",
                         b->name, e->key);
    if (is_folder && e->size)
        return ckpt_fail(err, CKPT_UNSUPPORTED,
                         "'s3://%s/%s' has %llu bytes: no file's name ends with '/'", b->name,
                         e->key, (unsigned long long)e->size);
    if (!is_folder && strlen(e->tag) >= CKPT_TAG_MAX)
        return ckpt_fail(err, CKPT_UNSUPPORTED, "'s3://%s/%s': its ETag has %zu bytes", b->name,
                         e->key, strlen(e->tag));
    return is_folder ? add_folder(b, path, len, &ignored, err) : add_file(b, path, e, err);
}

/* What tells whether a folder has changed: for its entries are complete now. */
static void seal(struct tree *t, struct node *folder)
{
    folder->is_listed = true;
    for (uint32_t i = folder->first; i != CKPT_NONE; i = t->nodes.ptr[i].next) {
        const struct node *n = &t->nodes.ptr[i];
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
    struct tree *t = &b->tree;
    bool all = false;

    if (list_into(b, ".", "", MOST_PAGES, &all, err) < 0)
        return -1;
    t->too_many = !all;
    for (size_t i = 0; all && i < t->nodes.len; i++)
        if (t->nodes.ptr[i].is_folder && !t->nodes.ptr[i].is_listed)
            seal(t, &t->nodes.ptr[i]);
    return 0;
}

/* Make sure that the entries of this folder are known. */
static int need_list(struct bucket *b, uint32_t at, struct ckpt_err *err)
{
    struct tree *t = &b->tree;
    bool all;

    if (t->nodes.ptr[at].is_listed)
        return 0;
    if (t->listed++ >= FOLDERS && !t->too_many && list_all(b, err) < 0)
        return -1;
    if (t->nodes.ptr[at].is_listed)
        return 0;
    if (list_into(b, t->nodes.ptr[at].path, "/", ALL_PAGES, &all, err) < 0)
        return -1;
    seal(t, &t->nodes.ptr[at]);
    return 0;
}

static int need_root(struct bucket *b, struct ckpt_err *err)
{
    uint32_t root;
    bool is_new;

    if (b->tree.nodes.len)
        return need_list(b, 0, err);
    if (node_of(&b->tree, ".", 1, &root, &is_new, err) < 0)
        return -1;
    b->tree.nodes.ptr[0].is_folder = true;
    if (need_list(b, 0, err) == 0)
        return 0;
    tree_clear(&b->tree);
    return -1;
}

/* 0, an errno, or -1: as ckpt_dir_ops.look. */
static int find(struct bucket *b, const char *below, uint32_t *ret, struct ckpt_err *err)
{
    if (need_root(b, err) < 0)
        return -1;
    *ret = 0;
    for (const char *end = below; strcmp(below, ".") != 0 && *end; end += *end == '/') {
        end += strcspn(end, "/");
        if (!b->tree.nodes.ptr[*ret].is_folder)
            return ENOTDIR;
        if (need_list(b, *ret, err) < 0)
            return -1;
        if (!ckpt_map_get(&b->tree.index, below, (size_t)(end - below), ret))
            return ENOENT;
    }
    return 0;
}

/* ---- the functions ---- */

static int look_locked(struct bucket *b, const char *below, struct ckpt_dir_found *ret,
                       struct ckpt_err *err)
{
    uint32_t at;
    const int rc = find(b, below, &at, err);

    if (rc || (b->tree.nodes.ptr[at].is_folder && need_list(b, at, err) < 0))
        return rc ? rc : -1;
    const struct node *n = &b->tree.nodes.ptr[at];
    const uint64_t place =
        XXH3_64bits_withSeed(below, strlen(below), XXH3_64bits(b->url, strlen(b->url)));
    const uint64_t content = n->is_folder ? n->hash : XXH3_64bits(n->tag, strlen(n->tag));
    *ret = (struct ckpt_dir_found){
        .kind = n->is_folder ? CKPT_ENTRY_DIR : CKPT_ENTRY_FILE,
        .id = {place, n->is_folder ? 0 : n->size, n->mtime_ns, (int64_t)(content >> 1)},
        .extent = {0, n->is_folder ? 0 : n->size}};
    if (!n->is_folder)
        memcpy(ret->tag, n->tag, strlen(n->tag) + 1);
    return 0;
}

static int bucket_look(void *ctx, const char *below, struct ckpt_dir_found *ret,
                       struct ckpt_err *err)
{
    struct bucket *b = ctx;

    (void)pthread_mutex_lock(&b->lock);
    const int rc = look_locked(b, below, ret, err);
    (void)pthread_mutex_unlock(&b->lock);
    return rc;
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

static int list_locked(struct bucket *b, const char *below, struct ckpt_str *ret,
                       struct ckpt_err *err)
{
    CKPT_VEC(struct ckpt_entry) all = {0};
    uint32_t at;
    int rc = find(b, below, &at, err);

    if (rc == 0 && !b->tree.nodes.ptr[at].is_folder)
        rc = ENOTDIR;
    if (rc || need_list(b, at, err) < 0)
        return rc ? rc : -1;
    for (uint32_t i = b->tree.nodes.ptr[at].first; i != CKPT_NONE && rc == 0;
         i = b->tree.nodes.ptr[i].next) {
        const struct node *n = &b->tree.nodes.ptr[i];
        const char *slash = strrchr(n->path, '/');
        const struct ckpt_entry e = {.name = slash ? slash + 1 : n->path,
                                     .kind = n->is_folder ? CKPT_ENTRY_DIR : CKPT_ENTRY_FILE};
        if (ckpt_vec_push(&all, e) < 0)
            rc = ckpt_nomem(err);
    }
    if (all.len)
        qsort(all.ptr, all.len, sizeof *all.ptr, entry_cmp);
    for (size_t i = 0; rc == 0 && i < all.len; i++)
        ckpt_listed_add(ret, &all.ptr[i]);
    ckpt_vec_release(&all);
    return rc;
}

static int bucket_list(void *ctx, const char *below, struct ckpt_str *ret, struct ckpt_err *err)
{
    struct bucket *b = ctx;

    (void)pthread_mutex_lock(&b->lock);
    const int rc = list_locked(b, below, ret, err);
    (void)pthread_mutex_unlock(&b->lock);
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

    (void)pthread_mutex_lock(&b->lock);
    tree_clear(&b->tree);
    (void)pthread_mutex_unlock(&b->lock);
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
    const char *name = url + strlen(SCHEME), *prefix = name + strcspn(name, "/");
    const size_t len = (size_t)(prefix - name);
    size_t plen;

    prefix += *prefix == '/';
    for (plen = strlen(prefix); plen && prefix[plen - 1] == '/'; plen--)
        continue;
    if (len == 0 || len > 255 ||
        strspn(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
                     "0123456789.-_:") < len)
        return ckpt_fail(err, CKPT_USAGE, "'%s': expected s3://BUCKET or s3://BUCKET/PREFIX", url);
    b->name = strndup(name, len);
    b->prefix = ckpt_asprintf("%.*s%s", (int)plen, prefix, plen ? "/" : "");
    b->url = b->prefix ? ckpt_asprintf(SCHEME "%.*s%s%.*s", (int)len, name, plen ? "/" : "",
                                       (int)plen, prefix)
                       : NULL;
    if (!b->name || !b->prefix || !b->url)
        return ckpt_nomem(err);
    if (plen) {
        ckpt_cleanup(ckpt_freep) char *bare = strndup(prefix, plen);
        if (!bare || !ckpt_below_ok(bare) || strcmp(bare, ".") == 0 ||
            strncmp(bare, "./", 2) == 0 || strstr(bare, "/./") || ckpt_has_suffix(bare, "/."))
            return ckpt_fail(err, CKPT_USAGE,
                             "'%s': a prefix has no empty part, no '.' and no '..'", url);
    }
    return 0;
}

static int check_any(struct bucket *b, struct ckpt_err *err)
{
    (void)pthread_mutex_lock(&b->lock);
    const int rc = need_root(b, err);
    const bool any = rc == 0 && b->tree.nodes.ptr[0].first != CKPT_NONE;
    (void)pthread_mutex_unlock(&b->lock);
    return rc < 0 || any ? rc
                         : ckpt_fail(err, CKPT_MISSING,
                                     "'%s': the bucket has no object whose key begins with '%s'",
                                     b->url, b->prefix);
}

int ckpt_dir_open_bucket(const char *url, const struct ckpt_bucket_settings *s,
                         const struct ckpt_recording *rec, struct ckpt_dir **ret,
                         struct ckpt_err *err)
{
    ckpt_cleanup(bucket_freep) struct bucket *b = calloc(1, sizeof *b);
    const bool replays = rec && ckpt_recording_memory(rec) == CKPT_DIR_RECALLS;

    if (!b)
        return ckpt_nomem(err);
    (void)pthread_mutex_init(&b->lock, NULL);
    if (parse(b, url, err) < 0 || ckpt_client_get(s, &b->client, err) < 0 ||
        (!replays && check_any(b, err) < 0) ||
        ckpt_dir_open_other(b->url, (struct ckpt_dir_way){&bucket_ops, b}, NULL, NULL, ret, err) <
            0)
        return -1;
    ckpt_parallel_far();
    (void)ckpt_steal(&b);
    return 0;
}
