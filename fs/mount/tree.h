/* SPDX-License-Identifier: Apache-2.0 */
/* The tree that a mount shows: names below nodes, listings, contents. This module does not depend
 * on FUSE.
 *
 *     /            a folder of steps:  1000/  2000/  latest -> 2000      one checkpoint: its files
 *     /1000        its files; or CKPTFS-ERROR.txt alone if it can't be read
 *     /.ckptfs     never listed: stats.json, stats.prom
 *
 * Functions return 0 or a positive errno, and log what a user should hear of. */
#pragma once

#include <limits.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "mount/mount.h"

/* The result of a look-up. The strings of id point into `text`, into the directory's node, or into
 * the listing, and are valid as long as those. */
struct ckptfs_found {
    struct ckptfs_id id;
    bool lasting; /* the name's meaning, or its absence, lasts as long as the directory's inode */
    char text[PATH_MAX];
};

/* Look up a name. ENOENT: it does not exist; ret->lasting then says whether it can never appear in
 * this directory. */
int ckptfs_tree_lookup(struct ckptfs *fs, const struct ckptfs_node *dir, const char *name,
                       struct ckptfs_found *ret);

/* The entries of a directory at the time when it was opened. */
struct ckptfs_listing;
int ckptfs_listing_open(struct ckptfs *fs, const struct ckptfs_node *dir,
                        struct ckptfs_listing **ret);
size_t ckptfs_listing_count(const struct ckptfs_listing *l);
const char *ckptfs_listing_name(const struct ckptfs_listing *l, size_t i);
bool ckptfs_listing_lasting(const struct ckptfs_listing *l);

/* The i-th entry, with the same result as ckptfs_tree_lookup of its name. */
int ckptfs_listing_find(const struct ckptfs_listing *l, size_t i, struct ckptfs_found *ret);

/* An open file. It holds its view, so that it stays readable even if the step is deleted. */
struct ckptfs_file;
int ckptfs_file_open(struct ckptfs *fs, const struct ckptfs_node *node, struct ckptfs_file **ret);

/* Count a reference to an open file or listing, which begins with the handle, and give one back.
 * The last one frees it. */
struct ckptfs_handle *ckptfs_handle_hold(struct ckptfs_handle *h);
void ckptfs_handle_close(struct ckptfs *fs, struct ckptfs_handle *h);

/* Free all files and listings that are still open. Call it when no more requests can arrive. */
void ckptfs_tree_close(struct ckptfs *fs);

/* True if the kernel must not cache the file: its bytes may change without a new inode, or its size
 * is not known beforehand. */
bool ckptfs_file_uncached(const struct ckptfs_file *f);

/* Read bytes [off, off+len). *ret_len is less than len only at the end of the file; any other
 * failure is an errno. */
int ckptfs_file_read(struct ckptfs *fs, struct ckptfs_file *f, void *buf, size_t len, uint64_t off,
                     size_t *ret_len);

/* Would a request about the node wait for storage, because its view must be opened first? If not,
 * *ret_view is the view (or NULL) that the caller must hold until the request is answered; else
 * *ret says what the request is counted by. */
bool ckptfs_tree_waits(struct ckptfs *fs, const struct ckptfs_node *node,
                       struct ckpt_view **ret_view, struct ckptfs_lanes *ret);

/* Would a read of the file wait for storage? Not if its content is in memory. */
bool ckptfs_file_waits(const struct ckptfs_file *f, struct ckptfs_lanes *ret);

/* The root's modification time: that of the newest step. */
int64_t ckptfs_root_mtime(struct ckptfs *fs);

/* The value of the attribute user.ckptfs.source of a node, a string that the caller frees. ENODATA:
 * the node does not have it. */
int ckptfs_tree_source(struct ckptfs *fs, const struct ckptfs_node *node, char **ret);
