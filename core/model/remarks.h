/* SPDX-License-Identifier: Apache-2.0 */
/* The warnings and notes of all views that a run has opened. Each is logged once, however often its
 * step is opened. Safe from many threads. */
#pragma once

#include <pthread.h>

#include "base/err.h"
#include "base/json.h"
#include "base/log.h"

enum { CKPT_REMARKS_KEPT = 1000 }; /* further warnings are logged each time */

struct ckpt_remarks {
    pthread_mutex_t lock;
    /* [{"step": name, "text": warning}, ...]; "step" is "" of a single checkpoint */
    json_t *list, *notes;
};

/* Make an empty list; free it. */
int ckpt_remarks_init(struct ckpt_remarks *r, struct ckpt_err *err);
void ckpt_remarks_release(struct ckpt_remarks *r);

/* Add the warnings (an array of strings) of a step's view, or its notes (CKPT_LOG_INFO); those that
 * are new are logged. */
void ckpt_remarks_add(struct ckpt_remarks *r, const struct ckpt_log *log, enum ckpt_log_level level,
                      const char *step, const json_t *lines);

/* The list of warnings as JSON text, which the caller frees. */
int ckpt_remarks_text(struct ckpt_remarks *r, char **ret_json, struct ckpt_err *err);
