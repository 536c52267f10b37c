/* SPDX-License-Identifier: Apache-2.0 */
/* A tree of nodes, by inode number. */
#include "mount/nodes.h"

#include <search.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include <xxhash.h>

#include "base/sort.h"
#include "base/str.h"

enum { ROOT_INO = 1, ORDER_BITS = 20, HASH_BITS = 43 };

/* The first number in a file's name, which says where it stands among the parts of a model. */
static uint64_t order_of(const char *path)
{
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    static const char digits[] = "0123456789";
    const char *number = name + strcspn(name, digits);
    const unsigned long long most = (1ULL << ORDER_BITS) - 1;
    const size_t len = strspn(number, digits);
    unsigned long long n = 0;

    return len && (!ckpt_parse_u64(number, len, &n) || n > most) ? most : n;
}

static uint64_t hash(const struct ckptfs_id *id, uint64_t salt)
{
    uint64_t word[2] = {id->kind, id->generation};
    XXH64_hash_t h = XXH3_64bits_withSeed(word, sizeof word, salt);

    h = XXH3_64bits_withSeed(id->step, strlen(id->step), h);
    h = XXH3_64bits_withSeed(id->path, strlen(id->path), h);
    /* Some programs store inode numbers in a signed type, so that 63 bits are left. 0 means "none"
     * to the kernel, and 1 is the root. */
    h &= (UINT64_C(1) << HASH_BITS) - 1;
    h |= order_of(id->path) << HASH_BITS;
    return h > ROOT_INO ? h : h + 2;
}

uint64_t ckptfs_ino(const struct ckptfs_id *id)
{
    return id->kind == CKPTFS_ROOT ? ROOT_INO : hash(id, 0);
}

static bool same(const struct ckptfs_id *a, const struct ckptfs_id *b)
{
    return a->kind == b->kind && a->generation == b->generation && strcmp(a->step, b->step) == 0 &&
           strcmp(a->path, b->path) == 0;
}

static struct ckptfs_node *node_new(const struct ckptfs_id *id, uint64_t ino)
{
    size_t nstep = strlen(id->step) + 1, npath = strlen(id->path) + 1;
    struct ckptfs_node *n = malloc(sizeof *n + nstep + npath);

    if (!n)
        return NULL;
    n->id = *id;
    n->ino = ino;
    n->nlookup = 0;
    n->id.step = memcpy(n->text, id->step, nstep);
    n->id.path = memcpy(n->text + nstep, id->path, npath);
    return n;
}

int ckptfs_nodes_init(struct ckptfs_nodes *t)
{
    const struct ckptfs_id root = {.kind = CKPTFS_ROOT, .step = "", .path = ""};

    *t = (struct ckptfs_nodes){.root = node_new(&root, ROOT_INO)};
    (void)pthread_mutex_init(&t->lock, NULL);
    return t->root ? 0 : -1;
}

void ckptfs_nodes_release(struct ckptfs_nodes *t)
{
    tdestroy(t->tree, free);
    free(t->root);
    (void)pthread_mutex_destroy(&t->lock);
    *t = (struct ckptfs_nodes){0};
}

static int by_ino(const void *a, const void *b)
{
    return ckpt_u64_cmp(((const struct ckptfs_node *)a)->ino, ((const struct ckptfs_node *)b)->ino);
}

/* With the lock held; NULL: the kernel does not hold such a node. */
static struct ckptfs_node *find(const struct ckptfs_nodes *t, uint64_t ino)
{
    const struct ckptfs_node key = {.ino = ino};
    struct ckptfs_node **at = tfind(&key, &t->tree, by_ino);

    return at ? *at : NULL;
}

const struct ckptfs_node *ckptfs_nodes_get(struct ckptfs_nodes *t, uint64_t ino)
{
    if (ino == ROOT_INO)
        return t->root;
    (void)pthread_mutex_lock(&t->lock);
    const struct ckptfs_node *n = find(t, ino);
    (void)pthread_mutex_unlock(&t->lock);
    return n;
}

static struct ckptfs_node *ref(struct ckptfs_nodes *t, const struct ckptfs_id *id)
{
    struct ckptfs_node *n;
    uint64_t salt = 0;

    while ((n = find(t, hash(id, salt))) && !same(&n->id, id))
        salt++;
    if (n)
        return n;
    n = node_new(id, hash(id, salt));
    if (!n || !tsearch(n, &t->tree, by_ino)) {
        free(n);
        return NULL;
    }
    t->len++;
    return n;
}

const struct ckptfs_node *ckptfs_nodes_ref(struct ckptfs_nodes *t, const struct ckptfs_id *id)
{
    if (id->kind == CKPTFS_ROOT)
        return t->root;
    (void)pthread_mutex_lock(&t->lock);
    struct ckptfs_node *n = ref(t, id);
    if (n)
        n->nlookup++;
    (void)pthread_mutex_unlock(&t->lock);
    return n;
}

void ckptfs_nodes_forget(struct ckptfs_nodes *t, uint64_t ino, uint64_t n)
{
    if (ino == ROOT_INO)
        return;
    (void)pthread_mutex_lock(&t->lock);
    struct ckptfs_node *node = find(t, ino);
    if (node && (node->nlookup -= n < node->nlookup ? n : node->nlookup) == 0) {
        (void)tdelete(node, &t->tree, by_ino);
        free(node);
        t->len--;
    }
    (void)pthread_mutex_unlock(&t->lock);
}

size_t ckptfs_nodes_count(struct ckptfs_nodes *t)
{
    (void)pthread_mutex_lock(&t->lock);
    size_t n = t->len;
    (void)pthread_mutex_unlock(&t->lock);
    return n;
}
