/* SPDX-License-Identifier: Apache-2.0 */
/* The log of the mount. Lines go to the terminal until the mount is announced (with -f: always).
 * Then they go to syslog, by way of the mounter process (mounter.h), because the daemon may no
 * longer open sockets. */
#pragma once

#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>

#include <ckptfs/ckptfs.h>

struct ckptfs_log {
    enum ckpt_log_severity least; /* messages of lower severity are dropped */
    bool json;                    /* each line is an object of JSON */
    atomic_bool to_syslog;
    atomic_int relay; /* a socket that takes lines for syslog; -1: none */
};

/* The first byte of each message on that socket, which tells the mounter to log the rest. */
enum { CKPTFS_RELAYED = 'l' };
/* Log a line that was received on the socket. */
void ckptfs_log_relayed(const char *line, size_t len);

/* Format a line and log it, unless its severity is too low. */
void ckptfs_logf(const struct ckptfs_log *log, enum ckpt_log_severity severity, const char *fmt,
                 ...) CKPT_PRINTF(3, 4);
void ckptfs_vlogf(const struct ckptfs_log *log, enum ckpt_log_severity severity, const char *fmt,
                  va_list ap);

/* A callback for ckpt_options_set_log; ctx is a struct ckptfs_log. */
void ckptfs_log_line(void *ctx, enum ckpt_log_severity severity, const char *text);
