/* SPDX-License-Identifier: Apache-2.0 */
/* The table of inodes that the kernel holds. A node says which file it is (kind, step, generation,
 * path) and its stat(2) data, but it does not hold a view: after a `find`, thousands of nodes may
 * stay in the kernel's cache although their views have been freed.
 *
 * The inode number is a hash of the identity, so the same file has the same number in every mount,
 * also after the kernel has forgotten it. Programs such as cp read the files of a folder in the
 * order of these numbers, so their upper bits are the first number in a file's name: parts of a
 * model are read one after the other, and what comes next can be fetched ahead. The bytes of an
 * identity never change: a step that is saved again gets another generation, and so another inode.
 */
#pragma once

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

enum ckptfs_kind {
    CKPTFS_ROOT, /* always number 1: the folder of steps, or the only checkpoint */
    CKPTFS_STEP, /* a step's directory; generation is the step's */
    CKPTFS_LINK, /* the symlink; path is its target */
    CKPTFS_DIR,  /* a directory below a step; generation is the view's, for this and for files */
    CKPTFS_FILE,
    CKPTFS_ERROR,   /* CKPTFS-ERROR.txt; generation is the text's hash */
    CKPTFS_CONTROL, /* .ckptfs */
    CKPTFS_STATS,   /* .ckptfs/stats.json, stats.prom */
};

/* The identity of a file and its attributes. Strings are borrowed. */
struct ckptfs_id {
    enum ckptfs_kind kind;
    uint64_t generation;
    const char *step; /* "" outside steps, and for the step of a run that is one checkpoint */
    const char *path; /* below the step, without a leading '/'; "" for its directory */
    uint64_t size;
    int64_t mtime_ns;
};

struct ckptfs_node {
    struct ckptfs_id id; /* its strings are stored after the node */
    uint64_t ino;
    uint64_t nlookup; /* the kernel's references; protected by the table's lock */
    char text[];
};

struct ckptfs_nodes {
    pthread_mutex_t lock; /* no other lock is taken, and no callback made, while it is held */
    void *tree;           /* of nodes, by their numbers: tsearch(3) */
    size_t len;
    struct ckptfs_node *root;
};

/* Make a table with the root, whose identity is CKPTFS_ROOT with empty strings. Returns 0, or -1
 * (no memory). */
int ckptfs_nodes_init(struct ckptfs_nodes *t);
void ckptfs_nodes_release(struct ckptfs_nodes *t);

/* Get the node of an inode number; NULL if the kernel does not hold it. The node is valid as long
 * as the kernel holds it, which includes every request that names it. */
const struct ckptfs_node *ckptfs_nodes_get(struct ckptfs_nodes *t, uint64_t ino);

/* Find or make the node and count one look-up. NULL: out of memory. */
const struct ckptfs_node *ckptfs_nodes_ref(struct ckptfs_nodes *t, const struct ckptfs_id *id);

/* Take back n look-ups. Unknown numbers are ignored. */
void ckptfs_nodes_forget(struct ckptfs_nodes *t, uint64_t ino, uint64_t n);

/* The inode number of an identity, for readdir. It is another one only if a live node with another
 * identity has that number (probability 2^-63 per pair). */
uint64_t ckptfs_ino(const struct ckptfs_id *id);

/* The number of nodes that the kernel holds, the root included. */
size_t ckptfs_nodes_count(struct ckptfs_nodes *t);
