/* SPDX-License-Identifier: Apache-2.0 */
/* Going into the background with an honest exit status: the parent waits until the mount is up. */
#ifndef CKPT_FS_DAEMON_H
#define CKPT_FS_DAEMON_H

#include <ckptfs/ckptfs.h>

/* Fork. In the child 0, and *ret_ready is the descriptor for ckptfs_daemon_ready. The parent does
 * not return: it exits with 0 once the child is ready, else with the child's status. */
int ckptfs_daemon_fork(int *ret_ready, struct ckpt_err *err);

/* Leave the terminal and let the parent exit. ready may be -1 (foreground): then only a service
 * manager is told. */
void ckptfs_daemon_ready(int ready);

#endif
