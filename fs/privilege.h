/* SPDX-License-Identifier: Apache-2.0 */
/* Giving up what a mount started by root does not need, before the first byte of a checkpoint is
 * looked at.
 *
 * Kept: the user id (the run may be root's alone); CAP_DAC_READ_SEARCH (or another user's); and,
 * *permitted but not effective*, CAP_SYS_ADMIN, raised in the main thread for mount(2) and for the
 * umount2 at the end. no_new_privs makes it final: nothing that is executed gets any of it back. An
 * ordinary user has nothing to give up, and needs the set-user-id fusermount3 at the end, so there
 * no_new_privs is left alone. */
#ifndef CKPT_FS_PRIVILEGE_H
#define CKPT_FS_PRIVILEGE_H

#include <stdbool.h>

#include <ckptfs/ckptfs.h>

/* Before any other thread is started. *ret_dropped: there was something to drop. */
int ckptfs_privilege_drop(bool *ret_dropped, struct ckpt_err *err);

/* Make CAP_SYS_ADMIN effective in this thread if it was kept, and not effective again. */
void ckptfs_privilege_raise(void);
void ckptfs_privilege_lower(void);

#endif
