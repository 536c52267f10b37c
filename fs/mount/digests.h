/* SPDX-License-Identifier: Apache-2.0 */
/* A cache of digests of virtual files: XXH3-128 by inode number. The bytes behind an inode number
 * never change, so an entry never becomes invalid. */
#ifndef CKPT_FS_MOUNT_DIGESTS_H
#define CKPT_FS_MOUNT_DIGESTS_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <ckptfs/ckptfs.h>

enum { CKPTFS_DIGEST_TEXT = 33, CKPTFS_DIGESTS = 4096 };

/* Except for the lock, an all-zero struct is an empty table. New entries overwrite the oldest. */
struct ckptfs_digests {
    pthread_mutex_t lock; /* no other lock is taken while it is held */
    struct ckptfs_digest {
        uint64_t ino;
        char text[CKPTFS_DIGEST_TEXT]; /* hexadecimal, as printed by xxhsum -H2 */
    } entry[CKPTFS_DIGESTS];
    size_t n; /* number of entries added so far */
};

/* Look up a digest; false if it is not in the table. */
bool ckptfs_digest_get(struct ckptfs_digests *d, uint64_t ino, char ret[CKPTFS_DIGEST_TEXT]);

/* Read the whole file, and store its digest under the inode number. */
int ckptfs_digest_make(struct ckptfs_digests *d, struct ckpt_view *view,
                       const struct ckpt_node *file, uint64_t ino, char ret[CKPTFS_DIGEST_TEXT],
                       struct ckpt_err *err);

#endif
