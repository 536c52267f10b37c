/* SPDX-License-Identifier: Apache-2.0 */
/* The mount's read-ahead. The kernel starts every FUSE mount with 128 KiB, whatever the daemon asks
 * for, which costs a third of the speed of buffered readers; only root may raise it. */
#ifndef CKPT_FS_READAHEAD_H
#define CKPT_FS_READAHEAD_H

#include "mount.h"

/* Raise it to what the configuration asks for, after INIT was answered (which lowers it again) and
 * before anybody reads. Fills n->dev, readahead_kib (read back) and readahead_refused. Never fails:
 * it is only speed. */
void ckptfs_readahead_set(const struct ckptfs_config *config, struct ckptfs_negotiated *n);

#endif
