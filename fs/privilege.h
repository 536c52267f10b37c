/* SPDX-License-Identifier: Apache-2.0 */
/* Giving up what a mount started by root does not need, before the first byte of a checkpoint is
 * looked at.
 *
 * Kept: the user id (the run may be root's alone) and CAP_DAC_READ_SEARCH (or another user's).
 * Mounts are changed by another process (mounter.h). no_new_privs makes it final: nothing that is
 * executed gets any of it back. */
#ifndef CKPT_FS_PRIVILEGE_H
#define CKPT_FS_PRIVILEGE_H

#include <ckptfs/ckptfs.h>

/* Before any other thread is started. */
int ckptfs_privilege_drop(struct ckpt_err *err);

#endif
