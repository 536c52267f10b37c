/* SPDX-License-Identifier: Apache-2.0 */
/* A thread that receives the process's signals. SIGTERM and SIGINT end the mount, SIGHUP scans for
 * new steps, SIGUSR1 logs the read counters. */
#pragma once

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>

#include <fuse_lowlevel.h>

#include "mount/mount.h"
#include "mount/mounter.h"
#include "mount/watchdog.h"

struct ckptfs_signals {
    struct ckptfs *fs;
    struct fuse_session *se;
    struct ckptfs_mounter *mounter;
    pthread_t main; /* runs the session's loop */
    pthread_t thread;
    atomic_bool quitting, done;
    struct ckptfs_watchdog watchdog;
};

/* Block these signals in this thread and all threads that it starts. Call it before mounting, so
 * that a signal is not lost and cannot kill a half-made mount. */
void ckptfs_signals_block(void);

/* Start the thread. It runs until ckptfs_signals_stop. */
int ckptfs_signals_start(struct ckptfs_signals *s, struct ckptfs *fs, struct fuse_session *se,
                         struct ckptfs_mounter *mounter, struct ckpt_err *err);

/* End the thread, after everything else has ended. Until then a second SIGTERM, or the first after
 * a limited time, ends the process at once. */
void ckptfs_signals_stop(struct ckptfs_signals *s);
