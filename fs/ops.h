/* SPDX-License-Identifier: Apache-2.0 */
/* The requests of the kernel, each answered once. */
#ifndef CKPT_FS_OPS_H
#define CKPT_FS_OPS_H

#include <fuse_lowlevel.h>

/* The session's userdata is a struct ckptfs whose `buffer` key was made with ckptfs_buffer_free. */
extern const struct fuse_lowlevel_ops ckptfs_ops;

/* Bytes of the largest read request. */
void ckptfs_buffer_free(void *buffer);

#endif
