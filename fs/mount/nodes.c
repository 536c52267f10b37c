/* SPDX-License-Identifier: Apache-2.0 */
/* A chained hash table from inode number to node. */
#include "mount/nodes.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include <xxhash.h>

enum { FIRST_BUCKETS = 256, ROOT_INO = 1 };

static uint64_t hash(const struct ckptfs_id *id, uint64_t salt)
{
    uint64_t word[2] = {id->kind, id->generation};
    XXH64_hash_t h = XXH3_64bits_withSeed(word, sizeof word, salt);

    h = XXH3_64bits_withSeed(id->step, strlen(id->step), h);
    h = XXH3_64bits_withSeed(id->path, strlen(id->path), h);
    /* Some programs store inode numbers in a signed type. 0 means "none" to the kernel, and 1 is
     * the root. */
    h &= INT64_MAX;
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

    *t = (struct ckptfs_nodes){.nbucket = FIRST_BUCKETS};
    t->bucket = calloc(t->nbucket, sizeof *t->bucket);
    t->root = node_new(&root, ROOT_INO);
    if (!t->bucket || !t->root || pthread_mutex_init(&t->lock, NULL) != 0) {
        free(t->bucket);
        free(t->root);
        *t = (struct ckptfs_nodes){0};
        return -1;
    }
    return 0;
}

void ckptfs_nodes_release(struct ckptfs_nodes *t)
{
    if (!t->bucket)
        return;
    for (size_t i = 0; i < t->nbucket; i++)
        for (struct ckptfs_node *n = t->bucket[i], *next; n; n = next) {
            next = n->next;
            free(n);
        }
    free(t->bucket);
    free(t->root);
    (void)pthread_mutex_destroy(&t->lock);
    *t = (struct ckptfs_nodes){0};
}

/* The link that points to the node of an inode number, or the NULL link where it belongs. */
static struct ckptfs_node **slot_of(struct ckptfs_nodes *t, uint64_t ino)
{
    struct ckptfs_node **p = &t->bucket[ino & (t->nbucket - 1)];

    while (*p && (*p)->ino != ino)
        p = &(*p)->next;
    return p;
}

static void resize(struct ckptfs_nodes *t, size_t nbucket)
{
    struct ckptfs_node **bucket = calloc(nbucket, sizeof *bucket);

    if (!bucket)
        return; /* no memory: the chains stay longer */
    for (size_t i = 0; i < t->nbucket; i++)
        for (struct ckptfs_node *n = t->bucket[i], *next; n; n = next) {
            struct ckptfs_node **head = &bucket[n->ino & (nbucket - 1)];
            next = n->next;
            n->next = *head;
            *head = n;
        }
    free(t->bucket);
    t->bucket = bucket;
    t->nbucket = nbucket;
}

const struct ckptfs_node *ckptfs_nodes_get(struct ckptfs_nodes *t, uint64_t ino)
{
    if (ino == ROOT_INO)
        return t->root;
    (void)pthread_mutex_lock(&t->lock);
    const struct ckptfs_node *n = *slot_of(t, ino);
    (void)pthread_mutex_unlock(&t->lock);
    return n;
}

static struct ckptfs_node *ref(struct ckptfs_nodes *t, const struct ckptfs_id *id)
{
    for (uint64_t salt = 0;; salt++) {
        uint64_t ino = hash(id, salt);
        struct ckptfs_node **p = slot_of(t, ino);
        if (!*p) {
            struct ckptfs_node *n = node_new(id, ino);
            if (!n)
                return NULL;
            n->next = NULL;
            *p = n;
            if (++t->len > t->nbucket)
                resize(t, t->nbucket * 2);
            return n;
        }
        if (same(&(*p)->id, id))
            return *p;
    }
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
    struct ckptfs_node *gone = NULL;

    if (ino == ROOT_INO)
        return;
    (void)pthread_mutex_lock(&t->lock);
    struct ckptfs_node **p = slot_of(t, ino);
    if (*p && ((*p)->nlookup -= n < (*p)->nlookup ? n : (*p)->nlookup) == 0) {
        gone = *p;
        *p = gone->next;
        t->len--;
        if (t->nbucket > FIRST_BUCKETS && t->len < t->nbucket / 8)
            resize(t, t->nbucket / 2);
    }
    (void)pthread_mutex_unlock(&t->lock);
    free(gone);
}

size_t ckptfs_nodes_count(struct ckptfs_nodes *t)
{
    (void)pthread_mutex_lock(&t->lock);
    size_t n = t->len;
    (void)pthread_mutex_unlock(&t->lock);
    return n;
}
