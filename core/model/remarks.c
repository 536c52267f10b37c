/* SPDX-License-Identifier: Apache-2.0 */
/* Keeping a list of warnings, so that each is logged once. */
#include "model/remarks.h"

#include <string.h>

int ckpt_remarks_init(struct ckpt_remarks *r, struct ckpt_err *err)
{
    (void)pthread_mutex_init(&r->lock, NULL);
    r->list = json_array();
    r->notes = json_array();
    return r->list && r->notes ? 0 : ckpt_nomem(err);
}

void ckpt_remarks_release(struct ckpt_remarks *r)
{
    json_decref(r->list);
    json_decref(r->notes);
    (void)pthread_mutex_destroy(&r->lock);
}

/* Was the line logged before? Called with the lock held. */
static bool is_known(const json_t *list, const char *step, const char *text)
{
    size_t i;
    json_t *j;

    json_array_foreach(list, i, j) {
        if (strcmp(ckpt_json_str(j, "text"), text) == 0 &&
            strcmp(ckpt_json_str(j, "step"), step) == 0)
            return true;
    }
    return false;
}

static void add(struct ckpt_remarks *r, const struct ckpt_log *log, enum ckpt_log_level level,
                const char *step, const char *text)
{
    json_t *list = level == CKPT_LOG_WARNING ? r->list : r->notes;

    (void)pthread_mutex_lock(&r->lock);
    const bool known = is_known(list, step, text);
    if (!known && json_array_size(list) < CKPT_REMARKS_KEPT)
        (void)json_array_append_new(list, json_pack("{s:s, s:s}", "step", step, "text", text));
    (void)pthread_mutex_unlock(&r->lock);
    if (!known)
        ckpt_logf(log, level, "%s%s%s", step, *step ? ": " : "", text);
}

void ckpt_remarks_add(struct ckpt_remarks *r, const struct ckpt_log *log, enum ckpt_log_level level,
                      const char *step, const json_t *lines)
{
    size_t i;
    json_t *text;

    json_array_foreach(lines, i, text)
        add(r, log, level, step, json_string_value(text));
}

int ckpt_remarks_text(struct ckpt_remarks *r, char **ret_json, struct ckpt_err *err)
{
    (void)pthread_mutex_lock(&r->lock);
    char *text = json_dumps(r->list, JSON_COMPACT);
    (void)pthread_mutex_unlock(&r->lock);
    if (!text)
        return ckpt_nomem(err);
    *ret_json = text;
    return 0;
}
