/* SPDX-License-Identifier: Apache-2.0 */
/* Going into the background with an honest exit status: the parent waits until the mount is up. */
#ifndef CKPT_FS_DAEMON_H
#define CKPT_FS_DAEMON_H

#include <ckptfs/ckptfs.h>

/* Fork. In the child 0, and *ret_ready is the descriptor for ckptfs_daemon_ready. The parent does
 * not return: it exits with 0 once the child is ready, else with the child's status. */
int ckptfs_daemon_fork(int *ret_ready, struct ckpt_err *err);

/* What is needed to say that the mount is up, opened before the daemon confines itself. */
struct ckptfs_announcement {
    int ready;  /* of ckptfs_daemon_fork; -1: in the foreground */
    int null;   /* /dev/null; -1 in the foreground */
    int notify; /* a socket for the service manager's; -1: there is none */
};

void ckptfs_announcement_open(struct ckptfs_announcement *a, int ready);

/* Leave the terminal and let the parent exit; in the foreground only a service manager is told. */
void ckptfs_announce(struct ckptfs_announcement *a);

/* Leave the terminal: a session of its own, standard streams to /dev/null. */
void ckptfs_daemon_detach(void);

#endif
