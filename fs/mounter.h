/* SPDX-License-Identifier: Apache-2.0 */
/* The process that mounts, sets the read-ahead and unmounts.
 *
 * The daemon reads files that nobody vouches for, so it gives up the right to change mounts and to
 * run programs (privilege.h, sandbox.h). Before that it forks this process, which keeps both, reads
 * nothing but the daemon's requests (one byte each), and ends with the daemon. If the daemon dies
 * without a word, its dead mount stays, as readers of files expect (ENOTCONN), and the next ckptfs
 * replaces it. */
#ifndef CKPT_FS_MOUNTER_H
#define CKPT_FS_MOUNTER_H

#include <pthread.h>
#include <sys/types.h>

#include <ckptfs/ckptfs.h>

#include "mount.h"

struct ckptfs_mounter {
    pthread_mutex_t lock; /* one request at a time */
    int fd;               /* a socket; -1: none */
    pid_t pid;
};

struct fuse_args;

/* The arguments of a session for config, also for the daemon's own; free with fuse_opt_free_args.
 * -1: no memory. */
int ckptfs_session_args(const struct ckptfs_config *config, struct fuse_args *ret);

/* Fork. Before any thread is started and before privileges are dropped. config and log are used
 * until the process ends. */
int ckptfs_mounter_start(struct ckptfs_mounter *m, const struct ckptfs_config *config,
                         struct ckptfs_log *log, struct ckpt_err *err);

/* Mount on config's mountpoint. *ret_fd: the connection (/dev/fuse), of which this is the only
 * descriptor; the caller closes it. If it fails libfuse has logged why; *err says something only if
 * the options are at fault. */
int ckptfs_mounter_mount(struct ckptfs_mounter *m, int *ret_fd, struct ckpt_err *err);

/* Set the mount's read-ahead as config says, and tell what it is (readahead_kib, readahead_refused,
 * dev). Once INIT was answered, since that sets it too. */
void ckptfs_mounter_readahead(struct ckptfs_mounter *m, struct ckptfs_negotiated *n);

/* The mount is announced: the process leaves the terminal, as the daemon did. */
void ckptfs_mounter_detach(struct ckptfs_mounter *m);

/* Detach the mount; waits, but not for ever. From any thread. IO: the process is gone, or fails. */
int ckptfs_mounter_unmount(struct ckptfs_mounter *m, struct ckpt_err *err);

/* Let the process end, and wait for that. */
void ckptfs_mounter_stop(struct ckptfs_mounter *m);

#endif
