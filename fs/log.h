/* SPDX-License-Identifier: Apache-2.0 */
/* Where the mount's remarks go: the terminal until it is announced (and with -f), then syslog, by
 * way of the process that mounts (mounter.h): the daemon itself may make no socket any more. */
#ifndef CKPT_FS_LOG_H
#define CKPT_FS_LOG_H

#include <stdarg.h>
#include <stdatomic.h>

#include <ckptfs/ckptfs.h>

struct ckptfs_log {
    enum ckpt_log_severity least; /* remarks of lesser severity are dropped */
    atomic_bool to_syslog;
    atomic_int relay; /* a socket that takes lines for syslog; -1: none */
};

/* The first byte of a line on such a socket, and what its other end does with it. */
enum { CKPTFS_RELAYED = 'l' };
void ckptfs_log_relayed(const char *line, size_t len);

void ckptfs_logf(const struct ckptfs_log *log, enum ckpt_log_severity severity, const char *fmt,
                 ...) CKPT_PRINTF(3, 4);
void ckptfs_vlogf(const struct ckptfs_log *log, enum ckpt_log_severity severity, const char *fmt,
                  va_list ap);

/* For ckpt_options_set_log; ctx is a struct ckptfs_log. */
void ckptfs_log_line(void *ctx, enum ckpt_log_severity severity, const char *text);

#endif
