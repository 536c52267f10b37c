/* SPDX-License-Identifier: Apache-2.0 */
/* A mount from beginning to end. */
#ifndef CKPT_FS_MOUNT_SESSION_H
#define CKPT_FS_MOUNT_SESSION_H

#include "mount/config.h"
#include "mount/log.h"

/* Open the run, mount it, announce the mount through `ready` (see ckptfs_daemon_fork; from then on,
 * log goes to syslog), and serve requests until it is unmounted or a signal ends it. The paths in
 * config have been resolved. Returns 0 if the mount was made and has ended cleanly. */
int ckptfs_session(struct ckptfs_config *config, struct ckptfs_log *log, int ready,
                   struct ckpt_err *err);

#endif
