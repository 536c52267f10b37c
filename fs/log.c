/* SPDX-License-Identifier: Apache-2.0 */
/* One line per remark, to stderr or syslog. */
#include "log.h"

#include <stdio.h>
#include <string.h>
#include <syslog.h>

static int priority(enum ckpt_log_severity severity)
{
    switch (severity) {
    case CKPT_ERROR:
        return LOG_ERR;
    case CKPT_WARNING:
        return LOG_WARNING;
    case CKPT_INFO:
        return LOG_INFO;
    case CKPT_DEBUG:
        break;
    }
    return LOG_DEBUG;
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
    if (log->to_syslog)
        syslog(priority(severity), "%s", text);
    else
        (void)fprintf(stderr, "ckptfs: %s%s\n", word[severity], text);
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
