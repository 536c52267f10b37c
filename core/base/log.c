/* SPDX-License-Identifier: Apache-2.0 */
/* Formatting of log lines. */
#include "base/log.h"

#include <stdarg.h>
#include <stdio.h>

void ckpt_logf(const struct ckpt_log *log, enum ckpt_log_level level, const char *fmt, ...)
{
    char text[2 * CKPT_ERR_TEXT];
    va_list ap;

    if (!log || !log->line)
        return;
    va_start(ap, fmt);
    (void)vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    log->line(log->ctx, level, text);
}
