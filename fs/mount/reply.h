/* SPDX-License-Identifier: Apache-2.0 */
/* Converting results to FUSE replies: error codes, attributes, timeouts, buffers. */
#pragma once

#include "mount/mount.h"

/* The errno for an error of the library. This function is the only place that chooses it. */
int ckptfs_errno(const struct ckpt_err *err);

/* The errno for a failed read of a file, which is never ENOENT or the like, because the virtual
 * file does exist. */
int ckptfs_read_errno(const struct ckpt_err *err);

/* Fill in the attributes of a node. */
void ckptfs_stat_of(const struct ckptfs *fs, const struct ckptfs_id *id, uint64_t ino,
                    struct stat *ret);

/* S_IFDIR, S_IFREG or S_IFLNK. */
mode_t ckptfs_type_of(enum ckptfs_kind kind);

/* For how many seconds the kernel may cache the attributes of such a node. */
double ckptfs_attr_timeout(enum ckptfs_kind kind);

/* For how many seconds the kernel may cache a name. */
double ckptfs_name_timeout(bool lasting);

/* Take a buffer of CKPTFS_MAX_READ bytes; NULL: out of memory. Return it with ckptfs_buffer_put. */
struct ckptfs_buffer *ckptfs_buffer_get(struct ckptfs_buffers *b);
void ckptfs_buffer_put(struct ckptfs_buffers *b, struct ckptfs_buffer *buffer);

/* Free all buffers. None may be in use. */
void ckptfs_buffers_release(struct ckptfs_buffers *b);
