/* SPDX-License-Identifier: Apache-2.0 */
/* The data that all views of a run share. */
#include "model/view.h"

#include <stdlib.h>
#include <string.h>

enum { SLAB_BUDGET = 256 * 1024 * 1024 };

/* ---- the warnings and notes of all views, each logged once ---- */

enum { REMARKS_KEPT = 1000 }; /* further warnings are logged each time */

static int remarks_init(struct ckpt_remarks *r, struct ckpt_err *err)
{
    (void)pthread_mutex_init(&r->lock, NULL);
    r->list = json_array();
    r->notes = json_array();
    return r->list && r->notes ? 0 : ckpt_nomem(err);
}

/* Make an empty list; free it. */
static void remarks_release(struct ckpt_remarks *r)
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
    if (!known && json_array_size(list) < REMARKS_KEPT)
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

/* ---- all ---- */

/* Make the temporary file of the option cache_dir, unless it is there already. The folder of an
 * export's files, which nobody has named for it, may come later. */
static int make_spill(const struct ckpt_options *opt, struct ckpt_spill **ret, struct ckpt_err *err)
{
    if (opt->spill)
        *ret = ckpt_spill_ref(opt->spill);
    if (opt->spill || !opt->cache_dir)
        return 0;
    return ckpt_spill_new(opt->cache_dir, &opt->log, ret, err) < 0 ||
                   (!opt->cache_offered && ckpt_spill_open(*ret, err) < 0)
               ? -1
               : 0;
}

int ckpt_shared_new(const struct ckpt_options *opt, struct ckpt_shared **ret, struct ckpt_err *err)
{
    const struct ckpt_access how = ckpt_options_access(opt);
    struct ckpt_shared *s;

    if (ckpt_options_check(opt, err) < 0)
        return -1;
    if (!(s = calloc(1, sizeof *s)))
        return ckpt_nomem(err);
    atomic_init(&s->refs, 1);
    if (remarks_init(&s->remarks, err) < 0 || ckpt_options_copy(opt, &s->opt, err) < 0 ||
        ckpt_fdpool_new(0, &s->pool, err) < 0 || ckpt_slabs_new(SLAB_BUDGET, &s->slabs, err) < 0 ||
        make_spill(opt, &s->spill, err) < 0 ||
        ckpt_recipes_load(s->opt->recipe, &s->recipes, err) < 0 ||
        (s->opt->key_mapping && ckpt_renames_load(s->opt->key_mapping, &s->renames, err) < 0) ||
        (s->opt->base && ckpt_base_open(s->opt->base, &how, s->pool, &s->base, err) < 0)) {
        ckpt_shared_unref(s);
        return -1;
    }
    *ret = s;
    return 0;
}

struct ckpt_shared *ckpt_shared_ref(struct ckpt_shared *s)
{
    atomic_fetch_add(&s->refs, 1);
    return s;
}

void ckpt_shared_unref(struct ckpt_shared *s)
{
    if (!s || atomic_fetch_sub(&s->refs, 1) != 1)
        return;
    ckpt_base_free(s->base);
    ckpt_recipes_free(s->recipes);
    ckpt_renames_free(s->renames);
    ckpt_slabs_unref(s->slabs);
    ckpt_spill_unref(s->spill);
    ckpt_fdpool_unref(s->pool);
    ckpt_options_free(s->opt);
    remarks_release(&s->remarks);
    free(s);
}
