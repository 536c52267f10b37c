/* SPDX-License-Identifier: Apache-2.0 */
/* A mount from beginning to end. */
#ifndef CKPT_FS_SESSION_H
#define CKPT_FS_SESSION_H

#include "cmdline.h"
#include "log.h"

/* Open the run, mount it, announce it (`ready`: see ckptfs_daemon_ready; then log goes to syslog),
 * serve until it is unmounted or a signal ends it. Paths are resolved already. 0: it was up and
 * ended cleanly. */
int ckptfs_session(struct ckptfs_config *config, struct ckptfs_log *log, int ready,
                   struct ckpt_err *err);

#endif
