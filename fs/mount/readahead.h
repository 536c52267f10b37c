/* SPDX-License-Identifier: Apache-2.0 */
/* The mount's read-ahead. The kernel starts every FUSE mount with 128 KiB, whatever the daemon asks
 * for, which makes buffered readers a third slower; only root may raise it. */
#ifndef CKPT_FS_MOUNT_READAHEAD_H
#define CKPT_FS_MOUNT_READAHEAD_H

#include "mount/mount.h"

/* Raise it to the configured value. Call it after INIT was answered (which lowers it) and before
 * the first read. Fills n->dev, readahead_kib (the value read back) and readahead_refused. A
 * failure is not an error, since only speed depends on it. */
void ckptfs_readahead_set(const struct ckptfs_config *config, struct ckptfs_negotiated *n);

#endif
