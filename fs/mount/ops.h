/* SPDX-License-Identifier: Apache-2.0 */
/* The handlers of the kernel's requests. Each request is answered exactly once. */
#ifndef CKPT_FS_MOUNT_OPS_H
#define CKPT_FS_MOUNT_OPS_H

#include <fuse_lowlevel.h>

/* The session's userdata is a struct ckptfs. */
extern const struct fuse_lowlevel_ops ckptfs_ops;

#endif
