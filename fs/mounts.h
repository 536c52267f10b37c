/* SPDX-License-Identifier: Apache-2.0 */
/* Paths before mounting: making them absolute, refusing knots, clearing away a dead mount of ours;
 * and what /proc knows of a mount. */
#ifndef CKPT_FS_MOUNTS_H
#define CKPT_FS_MOUNTS_H

#include <stdbool.h>
#include <sys/types.h>

#include "cmdline.h"
#include "log.h"

struct ckptfs_mountinfo {
    char dev[32]; /* MAJ:MIN */
    char fstype[64];
    uid_t user; /* of a FUSE mount: whose it is; else 0 */
};

/* The topmost mount at exactly this path, from /proc/self/mountinfo: asks nothing of the filesystem
 * mounted there. */
bool ckptfs_mountinfo_find(const char *path, struct ckptfs_mountinfo *ret);

/* Make c's paths absolute, replace a stale ckptfs mount at the mountpoint (one whose daemon is
 * gone), and refuse a mountpoint that is no directory, carries a live ckptfs, or is knotted with
 * the run: one inside the other, so that the daemon would wait for itself. c->lock keeps other
 * ckptfs from mounting there until ckptfs_mountpoint_unlock; -1 where the filesystem has no locks.
 */
int ckptfs_paths_resolve(struct ckptfs_config *c, const struct ckptfs_log *log,
                         struct ckpt_err *err);

/* Once it is mounted, or will not be. */
void ckptfs_mountpoint_unlock(struct ckptfs_config *c);

/* Detach the mount at path: umount2, or fusermount3 where that is not permitted. */
int ckptfs_unmount(const char *path, struct ckpt_err *err);

#endif
