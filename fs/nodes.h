/* SPDX-License-Identifier: Apache-2.0 */
/* The inodes that the kernel holds.
 *
 * A node says *which* file it is (kind, step, generation, path) and what stat(2) says of it, but
 * holds no view: thousands of nodes may stay in the kernel's cache after a `find` while their views
 * are long freed. The inode number is a hash of the identity, so the same file has the same number
 * in every mount and after every forget. An identity never changes its bytes: a step saved again is
 * another generation, hence another inode. */
#ifndef CKPT_FS_NODES_H
#define CKPT_FS_NODES_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

enum ckptfs_kind {
    CKPTFS_ROOT,   /* number 1, for ever: the folder of steps, or the only checkpoint */
    CKPTFS_STEP,   /* a step's directory; generation is the step's */
    CKPTFS_LATEST, /* the symlink; path is its target */
    CKPTFS_DIR,    /* below a step; generation is the view's, here and for files */
    CKPTFS_FILE,
    CKPTFS_ERROR,       /* CKPTFS-ERROR.txt; generation is the text's hash */
    CKPTFS_CONTROL,     /* .ckptfs */
    CKPTFS_STATS,       /* .ckptfs/stats.json */
    CKPTFS_EXPLAIN_DIR, /* .ckptfs/explain */
    CKPTFS_EXPLAIN,     /* .ckptfs/explain/TENSOR; path is the tensor's name */
    CKPTFS_DIGEST_DIR,  /* .ckptfs/digest */
    CKPTFS_DIGEST,      /* .ckptfs/digest/INODE; path is the number */
};

/* Which file, and what is known of it. Texts are borrowed. */
struct ckptfs_id {
    enum ckptfs_kind kind;
    uint64_t generation;
    const char *step; /* "" outside steps, and for the step of a run that is one checkpoint */
    const char *path; /* below the step, without a leading '/'; "" for its directory */
    uint64_t size;
    int64_t mtime_ns;
};

struct ckptfs_node {
    struct ckptfs_id id; /* its texts lie behind the node */
    uint64_t ino;
    uint64_t nlookup; /* references of the kernel; under the table's lock */
    struct ckptfs_node *next;
    char text[];
};

struct ckptfs_nodes {
    pthread_mutex_t lock; /* innermost: nothing is called while it is held */
    struct ckptfs_node **bucket;
    size_t nbucket; /* a power of two */
    size_t len;
    struct ckptfs_node *root;
};

/* root's identity is CKPTFS_ROOT with empty texts. 0 or -1 (no memory). */
int ckptfs_nodes_init(struct ckptfs_nodes *t);
void ckptfs_nodes_release(struct ckptfs_nodes *t);

/* The node of a number that the kernel holds, or NULL. Valid while the kernel holds it: during any
 * request that names it. */
const struct ckptfs_node *ckptfs_nodes_get(struct ckptfs_nodes *t, uint64_t ino);

/* The node of a number, counting one look-up, which ckptfs_nodes_forget undoes; NULL if the kernel
 * does not hold it. For numbers that no request in progress names. */
const struct ckptfs_node *ckptfs_nodes_hold(struct ckptfs_nodes *t, uint64_t ino);

/* Find or make the node and count one look-up. NULL: no memory. */
const struct ckptfs_node *ckptfs_nodes_ref(struct ckptfs_nodes *t, const struct ckptfs_id *id);

/* Undo n look-ups. Unknown numbers are ignored. */
void ckptfs_nodes_forget(struct ckptfs_nodes *t, uint64_t ino, uint64_t n);

/* The number that an identity has unless another live one took it (odds 2^-63 per pair). For
 * readdir. */
uint64_t ckptfs_ino(const struct ckptfs_id *id);

size_t ckptfs_nodes_count(struct ckptfs_nodes *t);

#endif
