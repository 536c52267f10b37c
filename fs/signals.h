/* SPDX-License-Identifier: Apache-2.0 */
/* A thread that takes the process's signals: SIGTERM and SIGINT end the mount, SIGHUP looks for new
 * steps, SIGUSR1 logs what was read. */
#ifndef CKPT_FS_SIGNALS_H
#define CKPT_FS_SIGNALS_H

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>

#include <fuse_lowlevel.h>

#include "mount.h"
#include "mounter.h"

struct ckptfs_signals {
    struct ckptfs *fs;
    struct fuse_session *se;
    struct ckptfs_mounter *mounter;
    pthread_t main; /* runs the session's loop */
    pthread_t thread;
    atomic_bool quitting, done;
};

/* Block them in this thread and all that it starts. Before the mount, so that none is lost or kills
 * a half-made one. */
void ckptfs_signals_block(void);

int ckptfs_signals_start(struct ckptfs_signals *s, struct ckptfs *fs, struct fuse_session *se,
                         struct ckptfs_mounter *mounter, struct ckpt_err *err);

/* Once everything else has ended. Until then a second SIGTERM, or the first after a bounded time,
 * ends the process at once. */
void ckptfs_signals_stop(struct ckptfs_signals *s);

#endif
