/* SPDX-License-Identifier: Apache-2.0 */
/* The mounter: a process that mounts, sets the read-ahead and unmounts on behalf of the daemon. The
 * daemon reads untrusted files, so it gives up the right to change mounts and to run programs
 * (sandbox.h). Before that it forks the mounter, which keeps both rights, reads
 * nothing but the daemon's requests (one byte each), and ends when the daemon ends. If the daemon
 * crashes, its dead mount remains, so that readers of files get ENOTCONN; the next ckptfs on that
 * mountpoint replaces it. */
#pragma once

#include <pthread.h>
#include <sys/types.h>

#include <ckptfs/ckptfs.h>

#include "mount/mount.h"

struct ckptfs_mounter {
    pthread_mutex_t lock; /* one request at a time */
    int fd;               /* a socket; -1: none */
    pid_t pid;
};

struct fuse_args;

/* Make the arguments of a FUSE session from config; the daemon's own session uses them too. Free
 * them with fuse_opt_free_args. -1: out of memory. */
int ckptfs_session_args(const struct ckptfs_config *config, struct fuse_args *ret);

/* Fork the mounter. Must be called before any thread is started and before privileges are dropped.
 * config and log must stay valid as long as the process runs. */
int ckptfs_mounter_start(struct ckptfs_mounter *m, const struct ckptfs_config *config,
                         struct ckptfs_log *log, struct ckpt_err *err);

/* Mount on config's mountpoint. *ret_fd is the connection to the kernel (/dev/fuse), which the
 * caller closes; the mounter keeps no descriptor of it. If mounting fails, libfuse has logged the
 * reason; *err has a text only if the options are at fault. */
int ckptfs_mounter_mount(struct ckptfs_mounter *m, int *ret_fd, struct ckpt_err *err);

/* Set the mount's read-ahead as config says, and store the result in readahead_kib,
 * readahead_refused and dev. Call it after INIT was answered, because that sets the read-ahead too.
 */
void ckptfs_mounter_readahead(struct ckptfs_mounter *m, struct ckptfs_negotiated *n);

/* Let the mounter detach from the terminal, once the mount is announced. */
void ckptfs_mounter_detach(struct ckptfs_mounter *m);

/* Detach the mount; waits for it for a bounded time. May be called from any thread. IO: the mounter
 * has died, or the unmount failed. */
int ckptfs_mounter_unmount(struct ckptfs_mounter *m, struct ckpt_err *err);

/* End the mounter, and wait until it has exited. */
void ckptfs_mounter_stop(struct ckptfs_mounter *m);
