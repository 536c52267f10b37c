/* SPDX-License-Identifier: Apache-2.0 */
/* Logging of lines to stderr or syslog. */
#include "mount/log.h"

#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <syslog.h>

#include "base/mem.h"
#include "common.h"

static const int priority[] = {[CKPT_ERROR] = LOG_ERR,
                               [CKPT_WARNING] = LOG_WARNING,
                               [CKPT_INFO] = LOG_INFO,
                               [CKPT_DEBUG] = LOG_DEBUG};

/* Send a line to the mounter without waiting; if the socket is full, the line is dropped. */
static void relay(int fd, int level, const char *text)
{
    char line[2 * CKPT_ERR_TEXT];
    const int n = snprintf(line, sizeof line, "%c%c%s", CKPTFS_RELAYED, '0' + level, text);

    (void)send(fd, line, (size_t)n < sizeof line ? (size_t)n : sizeof line - 1,
               MSG_NOSIGNAL | MSG_DONTWAIT);
}

void ckptfs_log_relayed(const char *line, size_t len)
{
    if (len > 2 && line[0] == CKPTFS_RELAYED)
        syslog((line[1] - '0') & LOG_PRIMASK, "%.*s", (int)len - 2, line + 2);
}

void ckptfs_log_line(void *ctx, enum ckpt_log_severity severity, const char *text)
{
    const struct ckptfs_log *log = ctx;
    static const char *const word[] = {[CKPT_ERROR] = "error: ",
                                       [CKPT_WARNING] = "warning: ",
                                       [CKPT_INFO] = "",
                                       [CKPT_DEBUG] = ""};

    if (severity > log->least)
        return;
    ckpt_cleanup(ckpt_freep) char *json =
        log->json ? ckptfs_log_json("ckptfs", severity, text) : NULL;
    text = json ? json : text;
    if (log->relay >= 0)
        relay(log->relay, priority[severity], text);
    else if (log->to_syslog)
        syslog(priority[severity], "%s", text);
    else
        (void)fprintf(stderr, "%s%s%s\n", json ? "" : "ckptfs: ", json ? "" : word[severity], text);
}

void ckptfs_vlogf(const struct ckptfs_log *log, enum ckpt_log_severity severity, const char *fmt,
                  va_list ap)
{
    char text[2 * CKPT_ERR_TEXT];

    (void)vsnprintf(text, sizeof text, fmt, ap);
    text[strcspn(text, "\n")] = '\0';
    ckptfs_log_line((void *)log, severity, text);
}

void ckptfs_logf(const struct ckptfs_log *log, enum ckpt_log_severity severity, const char *fmt,
                 ...)
{
    va_list ap;

    va_start(ap, fmt);
    ckptfs_vlogf(log, severity, fmt, ap);
    va_end(ap);
}
