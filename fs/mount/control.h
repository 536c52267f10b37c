/* SPDX-License-Identifier: Apache-2.0 */
/* The file .ckptfs/stats.json, which is about the mount itself. Its directory is not listed; it is
 * found only by name. */
#ifndef CKPT_FS_MOUNT_CONTROL_H
#define CKPT_FS_MOUNT_CONTROL_H

#include "mount/mount.h"

/* Make the content of stats.json, which the caller frees. NULL: out of memory. */
char *ckptfs_stats_text(struct ckptfs *fs);

#endif
