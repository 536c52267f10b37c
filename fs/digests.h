/* SPDX-License-Identifier: Apache-2.0 */
/* Digests of virtual files that are known: XXH3-128 by inode number. An inode never changes its
 * bytes, so what was known once stays true. */
#ifndef CKPT_FS_DIGESTS_H
#define CKPT_FS_DIGESTS_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <ckptfs/ckptfs.h>

enum { CKPTFS_DIGEST_TEXT = 33, CKPTFS_DIGESTS = 4096 };

/* All zero is an empty table but for the lock. The oldest entries are overwritten. */
struct ckptfs_digests {
    pthread_mutex_t lock; /* innermost */
    struct ckptfs_digest {
        uint64_t ino;
        char text[CKPTFS_DIGEST_TEXT]; /* hexadecimal, as xxhsum -H2 prints it */
    } entry[CKPTFS_DIGESTS];
    size_t n; /* ever put */
};

/* False: not known. */
bool ckptfs_digest_get(struct ckptfs_digests *d, uint64_t ino, char ret[CKPTFS_DIGEST_TEXT]);

/* Read the whole file, and remember its digest under the inode number. */
int ckptfs_digest_make(struct ckptfs_digests *d, struct ckpt_view *view,
                       const struct ckpt_node *file, uint64_t ino, char ret[CKPTFS_DIGEST_TEXT],
                       struct ckpt_err *err);

#endif
