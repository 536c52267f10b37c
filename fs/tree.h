/* SPDX-License-Identifier: Apache-2.0 */
/* The tree that a mount shows: names below nodes, listings, contents. Knows nothing of FUSE.
 *
 *     /            a folder of steps:  1000/  2000/  latest -> 2000      one checkpoint: its files
 *     /1000        its files; or CKPTFS-ERROR.txt alone if it can't be read
 *     /.ckptfs     never listed: stats.json, explain/TENSOR
 *
 * Functions return 0 or a positive errno, and log what a user should hear of. */
#ifndef CKPT_FS_TREE_H
#define CKPT_FS_TREE_H

#include <limits.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "mount.h"

/* A name that was found. id's texts point into `text`, the directory's node, or (until it is freed)
 * the listing. */
struct ckptfs_found {
    struct ckptfs_id id;
    bool lasting; /* the name means this for as long as the directory's inode exists */
    char text[PATH_MAX];
};

/* ENOENT: no such name; then *ret_lasting says whether that is for ever. */
int ckptfs_tree_lookup(struct ckptfs *fs, const struct ckptfs_node *dir, const char *name,
                       struct ckptfs_found *ret, bool *ret_lasting);

/* A listing, taken when a directory is opened. */
struct ckptfs_listing;
int ckptfs_listing_open(struct ckptfs *fs, const struct ckptfs_node *dir,
                        struct ckptfs_listing **ret);
void ckptfs_listing_free(struct ckptfs *fs, struct ckptfs_listing *l);
size_t ckptfs_listing_count(const struct ckptfs_listing *l);
const char *ckptfs_listing_name(const struct ckptfs_listing *l, size_t i);
bool ckptfs_listing_lasting(const struct ckptfs_listing *l);

/* The i-th entry, as ckptfs_tree_lookup would find it. */
int ckptfs_listing_find(const struct ckptfs_listing *l, size_t i, struct ckptfs_found *ret);

/* An open file: holds its view, so that it stays readable whatever becomes of the step. */
struct ckptfs_file;
int ckptfs_file_open(struct ckptfs *fs, const struct ckptfs_node *node, struct ckptfs_file **ret);
void ckptfs_file_close(struct ckptfs *fs, struct ckptfs_file *f);

/* Free all files and listings that are still open. When no request can come any more. */
void ckptfs_tree_close(struct ckptfs *fs);

/* Its bytes may change without the inode changing, or its size is not known beforehand. */
bool ckptfs_file_uncached(const struct ckptfs_file *f);

/* Bytes [off, off+len): *ret_len is less than len only at the end of the file; everything else is
 * an errno. */
int ckptfs_file_read(struct ckptfs *fs, struct ckptfs_file *f, void *buf, size_t len, uint64_t off,
                     size_t *ret_len);

/* In which lanes a request waits for storage (dispatch.h). */
struct ckptfs_lanes {
    uint64_t step, file;
    unsigned file_jobs;
};

/* Does a request about the node wait for storage: has a view to be opened first? If not, *ret_view
 * is what must be held until the request is answered, or NULL. */
bool ckptfs_tree_waits(struct ckptfs *fs, const struct ckptfs_node *node,
                       struct ckpt_view **ret_view, struct ckptfs_lanes *ret);

/* Does a read of the file? Not if its text is in memory. */
bool ckptfs_file_waits(const struct ckptfs_file *f, struct ckptfs_lanes *ret);

/* When the root last changed: the newest step's time. */
int64_t ckptfs_root_mtime(struct ckptfs *fs);

/* user.ckptfs.source of a node: a text that the caller frees. ENODATA if it has none. */
int ckptfs_tree_source(struct ckptfs *fs, const struct ckptfs_node *node, char **ret);

#endif
