/* SPDX-License-Identifier: Apache-2.0 */
/* The directory .ckptfs: files about the mount itself. It is not listed; its files are found only
 * by name. */
#ifndef CKPT_FS_MOUNT_CONTROL_H
#define CKPT_FS_MOUNT_CONTROL_H

#include <stddef.h>

#include "mount/mount.h"

/* The kind of the file `name` in .ckptfs, .ckptfs/explain or .ckptfs/digest. Returns 0 or ENOENT.
 */
int ckptfs_control_kind(enum ckptfs_kind dir, const char *name, enum ckptfs_kind *ret);

/* As ckptfs_control_kind; for explain/TENSOR also check that the latest view has the tensor. */
int ckptfs_control_lookup(struct ckptfs *fs, enum ckptfs_kind dir, const char *name,
                          enum ckptfs_kind *ret);

/* The names in a listing of such a directory, in static storage. */
size_t ckptfs_control_names(enum ckptfs_kind dir, const char *const **ret);

/* Make the content of stats.json, explain/TENSOR or digest/INODE (for which the whole file is
 * read). The caller frees it. Returns 0 or an errno. */
int ckptfs_control_text(struct ckptfs *fs, const struct ckptfs_id *id, char **ret);

#endif
