/* SPDX-License-Identifier: Apache-2.0 */
/* .ckptfs: the mount's own files, reached by name only. */
#ifndef CKPT_FS_CONTROL_H
#define CKPT_FS_CONTROL_H

#include <stddef.h>

#include "mount.h"

/* What a name below .ckptfs, .ckptfs/explain or .ckptfs/digest is. 0 or ENOENT. */
int ckptfs_control_kind(enum ckptfs_kind dir, const char *name, enum ckptfs_kind *ret);

/* The same; of explain/TENSOR it is also checked that the latest view has the tensor. */
int ckptfs_control_lookup(struct ckptfs *fs, enum ckptfs_kind dir, const char *name,
                          enum ckptfs_kind *ret);

/* The names that a listing of such a directory shows. Static storage. */
size_t ckptfs_control_names(enum ckptfs_kind dir, const char *const **ret);

/* The content of stats.json, explain/TENSOR or digest/INODE (which reads that file) now; the caller
 * frees it. 0 or an errno. */
int ckptfs_control_text(struct ckptfs *fs, const struct ckptfs_id *id, char **ret);

#endif
