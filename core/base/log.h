/* SPDX-License-Identifier: Apache-2.0 */
/* The library's log messages. The library never prints; the program decides where they go. */
#pragma once

#include <ckptfs/err.h>

enum ckpt_log_level { CKPT_LOG_ERROR, CKPT_LOG_WARNING, CKPT_LOG_INFO, CKPT_LOG_DEBUG };

/* `line` gets one line without newline and may be called from any thread. A zeroed struct is
 * silence. */
struct ckpt_log {
    void (*line)(void *ctx, enum ckpt_log_level level, const char *text);
    void *ctx;
};

/* Format a line and pass it to `log` (may be NULL). */
void ckpt_logf(const struct ckpt_log *log, enum ckpt_log_level level, const char *fmt, ...)
    CKPT_PRINTF(3, 4);
