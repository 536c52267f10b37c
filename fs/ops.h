/* SPDX-License-Identifier: Apache-2.0 */
/* The requests of the kernel, each answered once. */
#ifndef CKPT_FS_OPS_H
#define CKPT_FS_OPS_H

#include <fuse_lowlevel.h>

/* The session's userdata is a struct ckptfs. */
extern const struct fuse_lowlevel_ops ckptfs_ops;

#endif
