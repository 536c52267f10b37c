/* SPDX-License-Identifier: Apache-2.0 */
/* Opening a view of one checkpoint. */
#include "run/checkpoint.h"

#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "base/mem.h"
#include "base/str.h"
#include "model/mean.h"
#include "model/opening.h"
#include "run/save.h"
#include "view/ahead.h"

struct ckpt_view *ckpt_view_hold(struct ckpt_view *view)
{
    atomic_fetch_add(&view->refs, 1);
    return view;
}

void ckpt_view_release(struct ckpt_view *view)
{
    if (!view || atomic_fetch_sub(&view->refs, 1) != 1)
        return;
    ckpt_slabs_forget(view->shared->slabs, &view->reading);
    ckpt_ahead_free(view->reading.ahead);
    ckpt_vtree_free(view->tree);
    ckpt_catalog_free(view->cat);
    ckpt_save_unref(view->save);
    ckpt_dir_unref(view->dir);
    ckpt_dir_unref(view->above);
    ckpt_dir_unref(view->around);
    json_decref(view->config);
    json_decref(view->groups);
    free(view->recipe);
    free(view->source);
    free(view->name);
    ckpt_shared_unref(view->shared);
    free(view);
}

/* ---- identity ---- */

static uint64_t add_identity(uint64_t h, const struct ckpt_file_id *id)
{
    const uint64_t part[] = {id->size, (uint64_t)id->mtime_ns, (uint64_t)id->ctime_ns};

    return XXH3_64bits_withSeed(part, sizeof part, h);
}

/* The generation: the same checkpoint with the same options has the same number in every mount. */
static uint64_t generation_of(const struct ckpt_opening *o)
{
    uint64_t h = XXH3_64bits_withSeed(o->step, strlen(o->step), ckpt_options_hash(o->shared->opt));
    struct ckpt_file_id id;

    for (size_t i = 0; i < o->cat->sources.len; i++)
        if (ckpt_source_file_id(o->cat->sources.ptr[i], &id))
            h = add_identity(h, &id);
    if (o->home.dir && ckpt_dir_stat(o->home.dir, "config.json", &id))
        h = add_identity(h, &id);
    return h;
}

static char *source_text(const struct ckpt_opening *o)
{
    const char *format = ckpt_json_str(o->cat->about, "format"),
               *version = ckpt_json_str(o->cat->about, "version");
    uint64_t number;
    char digits[32] = "";

    if (ckpt_json_u64(o->cat->about, "step", &number))
        (void)snprintf(digits, sizeof digits, "%llu", (unsigned long long)number);
    ckpt_cleanup(ckpt_freep) char *printable = ckpt_printable(o->step);
    const char *name = *digits ? digits : printable;
    if (!name)
        return NULL;
    return ckpt_asprintf("%s%s%s%s%s", format ? format : "?", version ? " " : "",
                         version ? version : "", *name ? ", step " : "", name);
}

/* ---- open ---- */

/* Return memory to the system: opening reads many headers in several threads, and what remains in
 * malloc's pools is not needed again. */
static void give_back_memory(void)
{
#ifdef __GLIBC__
    (void)malloc_trim(0);
#endif
}

/* Read the catalogue, and check that it is of one save. */
static int read_save(struct ckpt_opening *o, struct ckpt_view *v, const struct ckpt_save *before,
                     struct ckpt_err *err)
{
    const struct ckpt_save_marker marker = ckpt_save_marker_of(o->reader, v->dir);
    struct ckpt_err mixed = {0};
    bool written;

    if (ckpt_opening_read(o, err) < 0 ||
        ckpt_save_new(o->cat, v->dir, o->reader, &marker, atomic_load(&v->shared->watched),
                      &v->save, err) < 0)
        return -1;
    if (ckpt_save_marker_of(o->reader, v->dir).hash != marker.hash)
        return ckpt_fail(err, CKPT_STALE, "'%s' was saved again while it was opened: try again",
                         ckpt_dir_path(v->dir));
    if (!v->shared->opt->allow_mixed && ckpt_save_check_moment(v->save, v->shared->pool, err) < 0)
        return -1;
    if (ckpt_save_accept(v->save, before, o->cat, &written, &mixed) == 0)
        return written ? ckpt_save_settle(v->save, v->shared->pool, err) : 0;
    if (!v->shared->opt->allow_mixed || mixed.code != CKPT_CONFLICT)
        return ckpt_err_move(err, &mixed);
    ckpt_catalog_warn(o->cat, "%s", mixed.text);
    return 0;
}

/* Give the view what was made for it. */
static int hand_over(struct ckpt_opening *o, struct ckpt_view *v, struct ckpt_err *err)
{
    if (!(v->source = source_text(o)))
        return ckpt_nomem(err);
    v->generation = generation_of(o);
    v->cat = ckpt_steal(&o->cat);
    v->tree = ckpt_steal(&o->tree);
    v->config = ckpt_steal(&o->config);
    v->groups = ckpt_steal(&o->groups);
    v->recipe = ckpt_steal(&o->recipe);
    v->name = ckpt_steal(&o->name);
    return 0;
}

/* Make the model of one save. */
static int make_model(struct ckpt_opening *o, struct ckpt_view *v, const struct ckpt_save *before,
                      struct ckpt_err *err)
{
    return ckpt_opening_begin(o, err) < 0 || read_save(o, v, before, err) < 0 ||
                   ckpt_opening_identify(o, err) < 0 || ckpt_opening_make_model(o, err) < 0
               ? -1
               : 0;
}

static void steps_free(struct ckpt_mean_step *step)
{
    for (size_t i = 1; step && step[i].name; i++) { /* the first is the view's own */
        ckpt_catalog_free(step[i].cat);
        json_decref(step[i].config);
    }
    free(step);
}
CKPT_CLEANUP_BY(steps_free, struct ckpt_mean_step)
CKPT_CLEANUP_BY(ckpt_view_release, struct ckpt_view)

static struct ckpt_view *new_view(struct ckpt_shared *shared,
                                  const struct ckpt_checkpoint_place *at);

/* Make the model of another step of a mean. */
static int make_other(struct ckpt_shared *shared, const struct ckpt_checkpoint_place *at,
                      struct ckpt_mean_step *ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_view_releasep) struct ckpt_view *v = new_view(shared, at);
    ckpt_cleanup(ckpt_opening_release) struct ckpt_opening o = {.shared = shared,
                                                                .dir = at->dir,
                                                                .above = at->above,
                                                                .around = at->around,
                                                                .step = at->step};

    if (!v)
        return ckpt_nomem(err);
    if (make_model(&o, v, NULL, err) < 0)
        return ckpt_err_in(err, "average: step '%s'", at->step);
    *ret = (struct ckpt_mean_step){at->step, ckpt_steal(&o.cat), ckpt_steal(&o.config)};
    return 0;
}

/* Say in the facts, and to people, of which steps it is the mean. */
static int tell_steps(struct ckpt_catalog *cat, const struct ckpt_mean_step *step, size_t n,
                      struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_str_release) struct ckpt_str text = {0};
    json_t *names = json_array();

    for (size_t i = n; i-- > 0;) { /* the newest is the first operand */
        ckpt_json_append(&names, json_string(step[i].name));
        ckpt_str_printf(&text, "%s'%s'", text.len ? ", " : "", step[i].name);
    }
    ckpt_json_set(&cat->about, "average", names);
    if (!cat->about || text.failed)
        return ckpt_nomem(err);
    ckpt_catalog_note(cat, "the mean of %zu step%s: %s", n, n == 1 ? "" : "s", ckpt_str_get(&text));
    return 0;
}

/* Make o's model the mean of it and the models of other steps. */
static int make_mean(struct ckpt_opening *o, const struct ckpt_checkpoint_place *other, size_t n,
                     struct ckpt_err *err)
{
    ckpt_cleanup(steps_freep) struct ckpt_mean_step *step = calloc(n + 2, sizeof *step);

    if (!step)
        return ckpt_nomem(err);
    step[0] = (struct ckpt_mean_step){o->step, o->cat, o->config};
    for (size_t i = 0; i < n; i++)
        if (make_other(o->shared, &other[i], &step[i + 1], err) < 0)
            return -1;
    return ckpt_mean_make(step, n + 1, err) < 0 ? -1 : tell_steps(o->cat, step, n + 1, err);
}

static int open_into(struct ckpt_view *v, const char *step, const struct ckpt_save *before,
                     const struct ckpt_checkpoint_place *other, size_t nother, bool is_mean,
                     struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_opening_release) struct ckpt_opening o = {
        .shared = v->shared, .dir = v->dir, .above = v->above, .around = v->around, .step = step};

    if (make_model(&o, v, before, err) < 0 || (is_mean && make_mean(&o, other, nother, err) < 0) ||
        ckpt_optimizer_add(&o, err) < 0 || ckpt_opening_cast_model(&o, err) < 0 ||
        ckpt_opening_lay_out(&o, err) < 0 || ckpt_opening_tell_decoding(&o, err) < 0)
        return -1;
    return ckpt_ahead_new(o.cat, o.tree, &v->reading.ahead, err) < 0 ? -1 : hand_over(&o, v, err);
}

int ckpt_checkpoint_check(const struct ckpt_view *view, struct ckpt_err *err)
{
    if (!atomic_load(&view->mixed))
        return 0;
    return ckpt_fail(err, CKPT_STALE,
                     "'%s' was opened while it was being saved again, so that its shards may be of "
                     "two saves: open it again",
                     ckpt_dir_path(view->dir));
}

static struct ckpt_view *new_view(struct ckpt_shared *shared,
                                  const struct ckpt_checkpoint_place *at)
{
    struct ckpt_view *v = calloc(1, sizeof *v);

    if (!v)
        return NULL;
    atomic_init(&v->refs, 1);
    v->shared = ckpt_shared_ref(shared);
    v->dir = ckpt_dir_ref(at->dir);
    v->above = ckpt_dir_ref(at->above);
    v->around = ckpt_dir_ref(at->around);
    v->reading = (struct ckpt_reading){.slabs = shared->slabs, .stats = &shared->stats};
    return v;
}

static int open_view(struct ckpt_shared *shared, const struct ckpt_checkpoint_place *at,
                     const struct ckpt_save *before, const struct ckpt_checkpoint_place *other,
                     size_t nother, bool is_mean, struct ckpt_view **ret, struct ckpt_err *err)
{
    struct ckpt_view *v = new_view(shared, at);

    if (!v)
        return ckpt_nomem(err);
    if (open_into(v, at->step, before, other, nother, is_mean, err) < 0) {
        ckpt_view_release(v);
        return -1;
    }
    give_back_memory();
    ckpt_remarks_add(&shared->remarks, &shared->opt->log, CKPT_LOG_WARNING, at->step,
                     v->cat->warnings);
    ckpt_remarks_add(&shared->remarks, &shared->opt->log, CKPT_LOG_INFO, at->step,
                     json_object_get(v->cat->about, "notes"));
    *ret = v;
    return 0;
}

int ckpt_checkpoint_open(struct ckpt_shared *shared, const struct ckpt_checkpoint_place *at,
                         const struct ckpt_save *before, struct ckpt_view **ret,
                         struct ckpt_err *err)
{
    return open_view(shared, at, before, NULL, 0, false, ret, err);
}

int ckpt_checkpoint_open_mean(struct ckpt_shared *shared, const struct ckpt_checkpoint_place *at,
                              size_t n, struct ckpt_view **ret, struct ckpt_err *err)
{
    return open_view(shared, at, NULL, at + 1, n - 1, true, ret, err);
}
