/* SPDX-License-Identifier: Apache-2.0 */
/* Running in the background: the parent process waits until the mount is ready or has failed, and
 * exits with the corresponding status. */
#pragma once

#include <ckptfs/ckptfs.h>

/* Fork. Returns in the child only: 0, with the descriptor for ckptfs_announcement in *ret_ready.
 * The parent exits with 0 once the child has announced the mount, else with the child's status. */
int ckptfs_daemon_fork(int *ret_ready, struct ckpt_err *err);

/* The descriptors for announcing the mount, opened before the daemon confines itself. */
struct ckptfs_announcement {
    int ready;  /* from ckptfs_daemon_fork; -1: in the foreground */
    int null;   /* /dev/null; -1 in the foreground */
    int notify; /* the socket of the service manager; -1: none */
};

/* Open the descriptors. `ready` is that of ckptfs_daemon_fork, or -1. */
void ckptfs_announcement_open(struct ckptfs_announcement *a, int ready);

/* Announce that the mount is ready: detach from the terminal and let the parent exit, and notify
 * the service manager. In the foreground only the service manager is notified. */
void ckptfs_announce(struct ckptfs_announcement *a);

/* Detach from the terminal: start a new session and redirect the standard streams to /dev/null. */
void ckptfs_daemon_detach(void);
