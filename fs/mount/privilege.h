/* SPDX-License-Identifier: Apache-2.0 */
/* Dropping the privileges that the daemon does not need, before it reads the first byte of a
 * checkpoint. It keeps its user id (only root may be able to read the run) and CAP_DAC_READ_SEARCH
 * (the run may belong to another user). Mounts are changed by the mounter process (mounter.h).
 * no_new_privs makes this final: no program that is executed can regain a privilege. */
#ifndef CKPT_FS_MOUNT_PRIVILEGE_H
#define CKPT_FS_MOUNT_PRIVILEGE_H

#include <ckptfs/ckptfs.h>

/* Must be called before any other thread is started. */
int ckptfs_privilege_drop(struct ckpt_err *err);

#endif
