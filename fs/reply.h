/* SPDX-License-Identifier: Apache-2.0 */
/* Turning our results into FUSE's replies: error codes, attributes, timeouts. */
#ifndef CKPT_FS_REPLY_H
#define CKPT_FS_REPLY_H

#include <fuse_lowlevel.h>

#include "mount.h"

/* The errno for an error of the library. The only place that decides it. */
int ckptfs_errno(const struct ckpt_err *err);

/* The same for reading a file: ENOENT and the like would puzzle, since the file is there. */
int ckptfs_read_errno(const struct ckpt_err *err);

void ckptfs_stat_of(const struct ckptfs *fs, const struct ckptfs_id *id, uint64_t ino,
                    struct stat *ret);

/* S_IFDIR, S_IFREG or S_IFLNK. */
mode_t ckptfs_type_of(enum ckptfs_kind kind);

/* Seconds for which the kernel may keep what stat(2) says of such a node. */
double ckptfs_attr_timeout(enum ckptfs_kind kind);

/* Seconds for which it may keep a name. */
double ckptfs_name_timeout(bool lasting);

#endif
