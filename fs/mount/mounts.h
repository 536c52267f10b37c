/* SPDX-License-Identifier: Apache-2.0 */
/* Preparing the paths of a mount: make them absolute, refuse a mountpoint and a run that contain
 * each other, and remove a dead mount of ckptfs. */
#pragma once

#include "mount/config.h"
#include "mount/log.h"

/* Make c's paths absolute, and detach a dead ckptfs mount (one whose daemon is gone) from the
 * mountpoint. It is an error if the mountpoint is not a directory, if a live ckptfs is mounted
 * there, or if the mountpoint and the run contain each other, since the daemon would then wait for
 * itself. c->lock is a lock that keeps other ckptfs processes from mounting there until
 * ckptfs_mountpoint_unlock; -1 if the filesystem has no locks. */
int ckptfs_paths_resolve(struct ckptfs_config *c, const struct ckptfs_log *log,
                         struct ckpt_err *err);

/* Release the lock, after the mount was made or has failed. */
void ckptfs_mountpoint_unlock(struct ckptfs_config *c);
