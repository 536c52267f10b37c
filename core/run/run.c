/* SPDX-License-Identifier: Apache-2.0 */
/* Runs: which steps there are, which is the latest, and the views that are open. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include <ckptfs/ckptfs.h>

#include "base/mem.h"
#include "base/sized.h"
#include "base/str.h"
#include "base/vec.h"
#include "container/archive.h"
#include "format/reader.h"
#include "run/average.h"
#include "run/checkpoint.h"
#include "run/inner.h"
#include "run/save.h"
#include "run/steps.h"

enum {
    KEPT_VIEWS = 2, /* open views that are kept although nobody but the run holds them */
    MOST_TRIES = 3, /* attempts to open a step that is being saved */
};

/* ---- the saves that the steps held when they were last opened ---- */

enum { MOST_KEPT = 32 }; /* the least recently opened are dropped first */

struct kept_save {
    char *step;
    struct ckpt_save *save; /* referenced */
};

struct saves {
    CKPT_VEC(struct kept_save) kept; /* the last opened at the end */
};

static size_t save_of(const struct saves *s, const char *step)
{
    size_t i = 0;

    while (i < s->kept.len && strcmp(s->kept.ptr[i].step, step) != 0)
        i++;
    return i;
}

static void drop_save(struct saves *s, size_t i)
{
    free(s->kept.ptr[i].step);
    ckpt_save_unref(s->kept.ptr[i].save);
    memmove(&s->kept.ptr[i], &s->kept.ptr[i + 1], (--s->kept.len - i) * sizeof *s->kept.ptr);
}

/* The recorded save of the step, referenced for the caller; NULL: none is recorded. */
static struct ckpt_save *saves_find(const struct saves *s, const char *step)
{
    const size_t i = save_of(s, step);

    return i < s->kept.len ? ckpt_save_ref(s->kept.ptr[i].save) : NULL;
}

/* Record that the step was opened and held this save. If there is no memory, nothing is recorded;
 * the next opening then goes by the times of the files, like a first one. */
static void saves_keep(struct saves *s, const char *step, struct ckpt_save *save)
{
    const size_t known = save_of(s, step);
    char *name = strdup(step);

    if (known < s->kept.len)
        drop_save(s, known);
    if (s->kept.len == MOST_KEPT)
        drop_save(s, 0);
    if (!name || ckpt_vec_reserve(&s->kept, 1) < 0) {
        free(name);
        return;
    }
    s->kept.ptr[s->kept.len++] = (struct kept_save){name, ckpt_save_ref(save)};
}

/* Drop the saves of steps that no longer exist. */
static void saves_forget(struct saves *s, const struct ckpt_steps_found *steps)
{
    for (size_t i = s->kept.len; i-- > 0;)
        if (!ckpt_steps_find(steps, s->kept.ptr[i].step))
            drop_save(s, i);
}

static void saves_release(struct saves *s)
{
    while (s->kept.len)
        drop_save(s, s->kept.len - 1);
    ckpt_vec_release(&s->kept);
}

/* A view that is open, or being opened. */
struct opened {
    char *step;
    uint64_t generation;
    uint64_t marker;        /* hash of the marker when the view's shards were last compared */
    struct ckpt_view *view; /* NULL: being opened */
    uint64_t used;          /* tick (a counter of uses) of the last use */
};

struct ckpt_run {
    struct ckpt_dir *dir;
    struct ckpt_dir *above;  /* of a single checkpoint: the folder that it is in; or NULL */
    struct ckpt_dir *around; /* its own folder, if its model lies in one inside; or NULL */
    struct ckpt_shared *shared;
    bool is_folder;
    struct ckpt_average average; /* of these steps; none: each is a view of its own */
    char *part;                  /* the option part=, or NULL */
    pthread_mutex_t scanning;    /* held by the one that scans; lock order: scanning -> lock */
    pthread_mutex_t lock;        /* protects everything below; `steps` is written by a scan only */
    pthread_cond_t opened_one;
    struct ckpt_steps_found steps;
    struct ckpt_steps_found averaged; /* with average=: the folder's steps; `steps` is their mean */
    CKPT_VEC(struct opened) opened;
    struct saves saves; /* also of views that have been closed */
    uint64_t tick;
};

/* ---- scanning ---- */

static bool is_new_text(const char *text, const char *before)
{
    return text && (!before || strcmp(text, before) != 0);
}

/* Take over the result of a scan; *found gets the previous one. */
static void adopt(struct ckpt_run *run, struct ckpt_steps_found *found, bool *ret_changed,
                  bool *ret_warn, bool *ret_note)
{
    (void)pthread_mutex_lock(&run->lock);
    struct ckpt_steps_found old = run->steps;
    *ret_changed = !ckpt_steps_same(&old, found);
    *ret_warn = is_new_text(found->warning, old.warning);
    *ret_note = is_new_text(found->note, old.note);
    run->steps = *found;
    saves_forget(&run->saves, &run->steps);
    (void)pthread_mutex_unlock(&run->lock);
    *found = old;
}

/* Keep the folder's steps that a scan found, and make *found their mean. */
static int take_average(struct ckpt_run *run, struct ckpt_steps_found *found, struct ckpt_err *err)
{
    struct ckpt_steps_found mean = {0};

    if (ckpt_average_step(&run->average, found, &mean, err) < 0)
        return -1;
    ckpt_steps_found_release(&run->averaged);
    run->averaged = *found;
    *found = mean;
    return 0;
}

static int scan(struct ckpt_run *run, const struct ckpt_log *log, bool *ret_changed,
                struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_steps_found_release) struct ckpt_steps_found found = {0};
    ckpt_cleanup(ckpt_freep) char *warning = NULL, *note = NULL;
    bool changed = false, warn = false, tell = false;

    (void)pthread_mutex_lock(&run->scanning);
    struct ckpt_steps_found *known = run->average.n ? &run->averaged : &run->steps;
    int result = ckpt_steps_scan(run->dir, run->is_folder, run->part, known, &found, err);
    if (result == 0 && run->average.n)
        result = take_average(run, &found, err);
    if (result == 0) {
        warning = found.warning ? strdup(found.warning) : NULL;
        note = found.note ? strdup(found.note) : NULL;
        adopt(run, &found, &changed, &warn, &tell);
    }
    (void)pthread_mutex_unlock(&run->scanning);
    if (warn && warning)
        ckpt_logf(log, CKPT_LOG_WARNING, "%s", warning);
    if (tell && note)
        ckpt_logf(log, CKPT_LOG_INFO, "%s", note);
    if (ret_changed && result == 0)
        *ret_changed = changed;
    return result;
}

/* Find an open view whose step has another marker than when its shards were last compared, and hold
 * it. */
static struct ckpt_view *next_to_compare(struct ckpt_run *run)
{
    struct ckpt_view *view = NULL;

    (void)pthread_mutex_lock(&run->lock);
    for (size_t i = 0; i < run->opened.len && !view; i++) {
        struct opened *o = &run->opened.ptr[i];
        const struct ckpt_found_step *step = ckpt_steps_find(&run->steps, o->step);
        if (!o->view || !step || !step->marker.name || step->marker.hash == o->marker)
            continue;
        o->marker = step->marker.hash;
        view = ckpt_view_hold(o->view);
    }
    (void)pthread_mutex_unlock(&run->lock);
    return view;
}

/* After a save has ended, check each open view of its step: is the view of the previous save, or of
 * both? */
static void compare_held(struct ckpt_run *run)
{
    struct ckpt_view *view;

    while ((view = next_to_compare(run))) {
        const struct ckpt_log *log = &view->shared->opt->log;
        enum ckpt_save_state state = CKPT_SAVE_SAME;
        struct ckpt_err err = {0};
        const int result = ckpt_save_compare(view->save, view->shared->pool, &state, &err);
        /* if the comparison failed, assume the worst */
        if ((result < 0 || state == CKPT_SAVE_MIXED) && !view->shared->opt->allow_mixed &&
            !atomic_exchange(&view->mixed, true))
            ckpt_logf(log, CKPT_LOG_WARNING, "%s", err.text);
        ckpt_view_release(view);
    }
}

/* Let the run's directory, and those around it, look again. */
static void refresh(const struct ckpt_run *run)
{
    ckpt_dir_refresh(run->dir);
    if (run->above)
        ckpt_dir_refresh(run->above);
    if (run->around)
        ckpt_dir_refresh(run->around);
}

int ckpt_run_scan(struct ckpt_run *run, bool *ret_changed, struct ckpt_err *err)
{
    refresh(run);
    if (scan(run, &run->shared->opt->log, ret_changed, err) < 0)
        return -1;
    compare_held(run);
    return 0;
}

/* Replace the run's directory by the first of these inner folders that has steps. */
static int scan_folders(struct ckpt_run *run, const char *const *folders,
                        const struct ckpt_log *log, struct ckpt_err *err)
{
    struct ckpt_dir *outer = run->dir;

    for (; folders && *folders; folders++) {
        if (ckpt_dir_open_below(outer, *folders, &run->dir, NULL) < 0)
            continue;
        int result = scan(run, log, NULL, err);
        if (result < 0 || run->steps.len) {
            ckpt_dir_unref(outer);
            return result;
        }
        ckpt_dir_unref(run->dir);
    }
    run->dir = outer;
    return 0;
}

/* For a folder without steps: in some formats the steps are in an inner folder. */
static int scan_inside(struct ckpt_run *run, const struct ckpt_log *log, struct ckpt_err *err)
{
    for (size_t r = 0; ckpt_reader_list[r] && run->steps.len == 0; r++)
        if (scan_folders(run, ckpt_reader_list[r]->inner_runs, log, err) < 0)
            return -1;
    return 0;
}

/* ---- life cycle ---- */

/* Say what may be the reason that there is no checkpoint: a link that leads out, or to no file.
 * *ret is new, and "" if there is none. The hub's cache has links to blobs in another folder, which
 * tar packs as links. */
static int advise_links(const struct ckpt_run *run, char **ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_entries_release) struct ckpt_entries entries = {0};
    struct ckpt_err leaving = {0};
    const char *link = NULL;
    struct ckpt_entry e;

    if (ckpt_entries_read(run->dir, &entries, err) < 0)
        return -1;
    while (!link && ckpt_entries_next(&entries, &e))
        link = e.is_link && e.kind == CKPT_ENTRY_OTHER ? e.name : NULL;
    if (link && ckpt_dir_is_archive(run->dir))
        *ret = ckpt_asprintf(", but has links to files that are not in it ('%s' ...): if it was "
                             "packed from the hub's cache, pack it again with the files "
                             "themselves (tar -h)",
                             link);
    else if (ckpt_dir_leaving(run->dir, &leaving) < 0)
        *ret = ckpt_asprintf(", but %s", leaving.text);
    else
        *ret = link ? ckpt_asprintf(", but '%s' is a link that leads nowhere", link) : strdup("");
    return *ret ? 0 : ckpt_nomem(err);
}

/* Does the folder, or one in it, hold what no reader reads, but is known? */
static int check_foreign(const struct ckpt_run *run, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_entries_release) struct ckpt_entries entries = {0};
    struct ckpt_entry e;

    if (ckpt_foreign_check(run->dir, err) < 0)
        return -1;
    (void)ckpt_entries_read(run->dir, &entries, NULL);
    while (ckpt_entries_next(&entries, &e)) {
        ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *sub = NULL;
        if (e.kind == CKPT_ENTRY_DIR && ckpt_dir_open_below(run->dir, e.name, &sub, NULL) == 0 &&
            ckpt_foreign_check(sub, err) < 0)
            return -1;
    }
    return 0;
}

static int fail_without_steps(const struct ckpt_run *run, const char *path, const char *runs,
                              struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *links = NULL;

    if (advise_links(run, &links, err) < 0)
        return -1;
    if (run->steps.unfinished)
        return ckpt_fail(err, CKPT_MISSING,
                         "'%s' holds no finished checkpoint: the save of %s was interrupted, or is "
                         "in progress%s",
                         path, run->steps.unfinished, links);
    if (!*runs && check_foreign(run, err) < 0)
        return -1;
    const char *advice = !*runs ? links
                         : ckpt_dir_is_archive(run->dir)
                             ? ", but has a folder of runs: unpack it and give one of "
                             : ", but a folder of runs: give one of ";
    return ckpt_fail(
        err, CKPT_MISSING,
        "'%s' is neither a checkpoint of a known format nor a folder with finished checkpoints%s%s",
        path, advice, runs);
}

/* Is there a step, and is this the folder that was meant? The folder above several runs may hold
 * models that were exported from them. */
static int check_found(const struct ckpt_run *run, const char *path,
                       const struct ckpt_err *probe_err, struct ckpt_err *err)
{
    const bool none = run->steps.len == 0;

    if (none && probe_err->code != CKPT_MISSING)
        return ckpt_err_move(err, probe_err);
    if (!none && !(run->is_folder && ckpt_steps_are_models(&run->steps)))
        return 0;
    ckpt_cleanup(ckpt_freep) char *runs = ckpt_steps_list_runs(run->dir);
    if (!runs)
        return ckpt_nomem(err);
    if (none)
        return fail_without_steps(run, path, runs, err);
    return *runs ? ckpt_fail(err, CKPT_USAGE,
                             "'%s' is a folder of runs (%s) and of models ('%s'%s): give one of "
                             "them",
                             path, runs, run->steps.ptr[0].name, run->steps.len > 1 ? " ..." : "")
                 : 0;
}

/* Open the folder that a path is in. Nobody has named it: if it cannot be read, nothing is missing,
 * and *ret stays NULL. */
static int open_folder_of(const char *real, const struct ckpt_options *opt, struct ckpt_dir **ret,
                          struct ckpt_err *err)
{
    const char *slash = strrchr(real, '/');
    struct ckpt_access how = ckpt_options_access(opt);

    how.links = CKPT_LINKS_BENEATH;
    how.is_around = true;
    if (!slash || slash == real)
        return 0;
    ckpt_cleanup(ckpt_freep) char *folder = ckpt_asprintf("%.*s", (int)(slash - real), real);
    if (!folder)
        return ckpt_nomem(err);
    (void)ckpt_archive_open(folder, &how, ret, NULL);
    return 0;
}

/* Open the folder that a single checkpoint is in, which may be that of its run; not of an archive.
 * A checkpoint that is one file lies in the step's folder, and that in the run's. */
static int open_above(struct ckpt_run *run, const struct ckpt_options *opt, struct ckpt_err *err)
{
    const bool is_itself = ckpt_archive_is_itself(run->dir);

    if (ckpt_dir_is_archive(run->dir) && !is_itself)
        return 0;
    if (is_itself && !run->around &&
        open_folder_of(ckpt_dir_real_path(run->dir), opt, &run->around, err) < 0)
        return -1;
    return open_folder_of(ckpt_dir_real_path(run->around ? run->around : run->dir), opt,
                          &run->above, err);
}

/* Make what all views share. With lora=merge and no base=, the base is that which the adapter's
 * config names, if that is there. */
static int share(struct ckpt_run *run, const struct ckpt_options *opt, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_options_freep) struct ckpt_options *own = NULL;
    ckpt_cleanup(ckpt_freep) char *named = NULL;
    ckpt_cleanup(ckpt_freep) char *path = NULL;

    if (opt->lora == CKPT_LORA_MERGE && !opt->base &&
        ckpt_base_named(run->dir, run->is_folder, &named, err) < 0)
        return -1;
    if (named && ckpt_base_find(named, &path, NULL) == 0 &&
        ckpt_options_take_base(opt, named, &own, err) < 0)
        return -1;
    return ckpt_shared_new(own ? own : opt, &run->shared, err);
}

/* Probe a step as ckpt_step_probe does. *ret_around is its own folder, referenced, if the model
 * lies in one inside. */
static const struct ckpt_reader *probe_step(struct ckpt_dir **dir, const char *part, bool is_step,
                                            struct ckpt_dir **ret_around, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *own = ckpt_dir_ref(*dir);
    const struct ckpt_reader *reader = ckpt_step_probe(dir, part, is_step, NULL, err);

    if (*dir != own)
        *ret_around = ckpt_steal(&own);
    return reader;
}

/* Tell of steps in the folder of a model, which Trainer leaves there beside the final one. */
static void tell_steps_beside(const struct ckpt_run *run, const struct ckpt_log *log)
{
    ckpt_cleanup(ckpt_steps_found_release) struct ckpt_steps_found found = {0};
    size_t n = 0;

    if (ckpt_steps_scan(run->dir, true, NULL, NULL, &found, NULL) < 0)
        return;
    for (size_t i = 0; i < found.len; i++)
        n += ckpt_step_is_name(found.ptr[i].name);
    if (n)
        ckpt_logf(
            log, CKPT_LOG_INFO,
            "'%s' is a model itself, which is what is shown; in the same folder are %zu steps, "
            "the latest of them '%s/%s': to see a step, give its path",
            ckpt_dir_path(run->dir), n, ckpt_dir_path(run->dir), found.latest);
}

/* Make it a run of one checkpoint, if the folder is one; as_step: or if it is a step around one.
 * Errors in *why, but for a conflict, mean that it is not. */
static int try_single(struct ckpt_run *run, bool as_step, const struct ckpt_options *opt,
                      struct ckpt_err *why, struct ckpt_err *err)
{
    *why = (struct ckpt_err){0};
    const struct ckpt_reader *reader = probe_step(&run->dir, opt->part, as_step, &run->around, why);
    if (reader) {
        run->is_folder = false;
        if (reader->is_published && !ckpt_archive_is_itself(run->dir))
            tell_steps_beside(run, &opt->log);
        return open_above(run, opt, err);
    }
    return why->code == CKPT_CONFLICT ? ckpt_err_move(err, why) : 0;
}

static bool has_steps_by_name(const struct ckpt_run *run)
{
    for (size_t i = 0; i < run->steps.len; i++)
        if (ckpt_step_is_name(run->steps.ptr[i].name))
            return true;
    return false;
}

/* From here on the run is one model, the mean of the steps that are there now. */
static int begin_average(struct ckpt_run *run, const char *path, const struct ckpt_options *opt,
                         struct ckpt_err *err)
{
    struct ckpt_steps_found found = run->steps;

    if (!run->is_folder || !found.len)
        return ckpt_fail(err, CKPT_USAGE, "option average: '%s' is no folder of steps", path);
    if (ckpt_average_choose(opt->average, &found, &run->average, err) < 0)
        return ckpt_err_in(err, "option average");
    run->steps = (struct ckpt_steps_found){0};
    if (take_average(run, &found, err) < 0) {
        ckpt_steps_found_release(&found);
        return -1;
    }
    run->steps = found;
    return 0;
}

/* Open the run's directory, unless the caller has. */
static int open_dir(struct ckpt_run *run, const char *path, const struct ckpt_options *opt,
                    struct ckpt_err *err)
{
    const struct ckpt_access how = ckpt_options_access(opt);

    if (!opt->dir)
        return ckpt_part_open(path, &how, opt->also.ptr, opt->also.len, opt->compares_whole,
                              &run->dir, err);
    run->dir = ckpt_dir_ref(opt->dir);
    return ckpt_dir_use(run->dir, how.recording, err);
}

static int run_init(struct ckpt_run *run, const char *path, const struct ckpt_options *opt,
                    struct ckpt_err *err)
{
    struct ckpt_err probe_err = {0};

    if (opt->part && !(run->part = strdup(opt->part)))
        return ckpt_nomem(err);
    if (open_dir(run, path, opt, err) < 0)
        return -1;
    run->is_folder = true;
    if (try_single(run, false, opt, &probe_err, err) < 0 || scan(run, &opt->log, NULL, err) < 0 ||
        (run->steps.len == 0 && scan_inside(run, &opt->log, err) < 0))
        return -1;
    /* a folder with steps is a run, whatever its name is */
    if (run->is_folder && ckpt_step_is_name(ckpt_dir_real_name(run->dir)) &&
        !has_steps_by_name(run) &&
        (try_single(run, true, opt, &probe_err, err) < 0 || scan(run, &opt->log, NULL, err) < 0))
        return -1;
    if (!opt->wait && check_found(run, path, &probe_err, err) < 0)
        return -1;
    if (opt->average && begin_average(run, path, opt, err) < 0)
        return -1;
    return share(run, opt, err);
}

int ckpt_run_open(const char *path, const struct ckpt_options *opt, struct ckpt_run **ret,
                  struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_options_freep) struct ckpt_options *defaults = NULL;
    struct ckpt_run *run;

    if (!opt && ckpt_options_new(&defaults, err) < 0)
        return -1;
    if (!(run = calloc(1, sizeof *run)))
        return ckpt_nomem(err);
    (void)pthread_mutex_init(&run->scanning, NULL);
    (void)pthread_mutex_init(&run->lock, NULL);
    (void)pthread_cond_init(&run->opened_one, NULL);
    if (run_init(run, path, opt ? opt : defaults, err) < 0) {
        ckpt_run_close(run);
        return -1;
    }
    *ret = run;
    return 0;
}

void ckpt_run_close(struct ckpt_run *run)
{
    if (!run)
        return;
    for (size_t i = 0; i < run->opened.len; i++) {
        free(run->opened.ptr[i].step);
        ckpt_view_release(run->opened.ptr[i].view);
    }
    ckpt_vec_release(&run->opened);
    saves_release(&run->saves);
    ckpt_steps_found_release(&run->steps);
    ckpt_steps_found_release(&run->averaged);
    ckpt_average_release(&run->average);
    ckpt_shared_unref(run->shared);
    ckpt_dir_unref(run->dir);
    ckpt_dir_unref(run->above);
    ckpt_dir_unref(run->around);
    (void)pthread_cond_destroy(&run->opened_one);
    (void)pthread_mutex_destroy(&run->lock);
    (void)pthread_mutex_destroy(&run->scanning);
    free(run->part);
    free(run);
}

bool ckpt_run_is_folder(const struct ckpt_run *run) { return run->is_folder && !run->average.n; }

void ckpt_run_watch(struct ckpt_run *run) { atomic_store(&run->shared->watched, true); }

/* ---- steps ---- */

int ckpt_run_steps(struct ckpt_run *run, struct ckpt_step **ret_steps, size_t *ret_n,
                   struct ckpt_err *err)
{
    struct ckpt_step *out;
    size_t n = 0;

    (void)pthread_mutex_lock(&run->lock);
    out = calloc(run->steps.len + 1, sizeof *out);
    for (size_t i = 0; out && i < run->steps.len; i++) {
        const struct ckpt_found_step *s = &run->steps.ptr[i];
        out[i] = (struct ckpt_step){strdup(s->name), s->generation, s->mtime_ns,
                                    strcmp(s->name, run->steps.latest) == 0};
        if (!out[i].name) {
            ckpt_steps_free(out, i);
            out = NULL;
        }
    }
    n = run->steps.len;
    (void)pthread_mutex_unlock(&run->lock);
    if (!out)
        return ckpt_nomem(err);
    *ret_steps = out;
    *ret_n = n;
    return 0;
}

void ckpt_steps_free(struct ckpt_step *steps, size_t n)
{
    for (size_t i = 0; i < n; i++)
        free(steps[i].name);
    free(steps);
}

int ckpt_run_links(struct ckpt_run *run, struct ckpt_step_link **ret_links, size_t *ret_n,
                   struct ckpt_err *err)
{
    (void)pthread_mutex_lock(&run->lock);
    const size_t n = run->steps.links.len;
    struct ckpt_step_link *out = calloc(n + 1, sizeof *out);
    bool good = out != NULL;
    for (size_t i = 0; good && i < n; i++) {
        const struct ckpt_step_link *l = &run->steps.links.ptr[i];
        out[i] = (struct ckpt_step_link){strdup(l->name), strdup(l->step)};
        good = out[i].name && out[i].step;
    }
    (void)pthread_mutex_unlock(&run->lock);
    if (!good) {
        ckpt_step_links_free(out, n);
        return ckpt_nomem(err);
    }
    *ret_links = out;
    *ret_n = n;
    return 0;
}

void ckpt_step_links_free(struct ckpt_step_link *links, size_t n)
{
    for (size_t i = 0; links && i < n; i++) {
        free(links[i].name);
        free(links[i].step);
    }
    free(links);
}

/* ---- views ---- */

/* The functions below are called with the lock held. */

/* Is the view stale? Its holders continue to use it, but it is not handed out again. */
static bool is_stale(const struct opened *o)
{
    return o->view && (atomic_load(&o->view->stale) || atomic_load(&o->view->mixed));
}

static struct opened *find_opened(struct ckpt_run *run, const char *step, uint64_t generation)
{
    for (size_t i = 0; i < run->opened.len; i++) {
        struct opened *o = &run->opened.ptr[i];
        if (!is_stale(o) && o->generation == generation && strcmp(o->step, step) == 0)
            return o;
    }
    return NULL;
}

static void remove_opened(struct ckpt_run *run, struct opened *o)
{
    free(o->step);
    *o = run->opened.ptr[--run->opened.len];
}

/* Remove from the list, and return, the least recently used view that only the run holds, if there
 * are more than KEPT_VIEWS of them. */
static struct ckpt_view *take_surplus(struct ckpt_run *run)
{
    struct opened *oldest = NULL;
    struct ckpt_view *view;
    size_t idle = 0;

    for (size_t i = 0; i < run->opened.len; i++) {
        struct opened *o = &run->opened.ptr[i];
        if (!o->view || atomic_load(&o->view->refs) > 1)
            continue;
        idle++;
        if (!oldest || is_stale(o) || (!is_stale(oldest) && o->used < oldest->used))
            oldest = o;
    }
    if (!oldest || (idle <= KEPT_VIEWS && !is_stale(oldest)))
        return NULL;
    view = oldest->view;
    remove_opened(run, oldest);
    return view;
}

static int begin_opening(struct ckpt_run *run, const struct ckpt_found_step *step,
                         struct ckpt_err *err)
{
    struct opened o = {.step = strdup(step->name), .generation = step->generation};

    if (!o.step || ckpt_vec_push(&run->opened, o) < 0) {
        free(o.step);
        return ckpt_nomem(err);
    }
    return 0;
}

/* Find where a step is. The caller gives back both folders. */
static int place_of(const struct ckpt_run *run, const char *name, struct ckpt_dir **dir,
                    struct ckpt_dir **around, struct ckpt_checkpoint_place *ret,
                    struct ckpt_err *err)
{
    struct ckpt_err ignored = {0};

    if (ckpt_dir_open_below(run->dir, *name ? name : ".", dir, err) < 0)
        return -1;
    if (*name && !probe_step(dir, run->part, true, around, &ignored) &&
        ignored.code == CKPT_CONFLICT)
        return ckpt_err_move(err, &ignored);
    *ret = (struct ckpt_checkpoint_place){*dir, run->is_folder ? run->dir : run->above,
                                          *around ? *around : run->around, name};
    return 0;
}

static int open_once(const struct ckpt_run *run, const char *name, const struct ckpt_save *before,
                     struct ckpt_view **ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *dir = NULL, *around = NULL;
    struct ckpt_checkpoint_place at;

    return place_of(run, name, &dir, &around, &at, err) < 0
               ? -1
               : ckpt_checkpoint_open(run->shared, &at, before, ret, err);
}

/* Open the mean of the run's steps, the newest of which is the first. */
static int open_mean(const struct ckpt_run *run, struct ckpt_view **ret, struct ckpt_err *err)
{
    const size_t n = run->average.n;
    struct ckpt_dir **dir = calloc(2 * n, sizeof *dir);
    struct ckpt_checkpoint_place *at = calloc(n, sizeof *at);
    int rc = dir && at ? 0 : ckpt_nomem(err);

    for (size_t i = 0; i < n && rc == 0; i++)
        rc = place_of(run, run->average.step[n - 1 - i], &dir[2 * i], &dir[2 * i + 1], &at[i], err);
    if (rc == 0)
        rc = ckpt_checkpoint_open_mean(run->shared, at, n, ret, err);
    for (size_t i = 0; dir && i < 2 * n; i++)
        ckpt_dir_unref(dir[i]);
    free(dir);
    free(at);
    return rc;
}

static int open_step(struct ckpt_run *run, const char *name, const struct ckpt_save *before,
                     struct ckpt_view **ret, struct ckpt_err *err)
{
    struct ckpt_err last = {0};

    for (int i = 0; i < MOST_TRIES; i++) {
        last = (struct ckpt_err){0};
        if ((run->average.n ? open_mean(run, ret, &last)
                            : open_once(run, name, before, ret, &last)) == 0)
            return 0;
        /* a list may be older than the step's files */
        const bool may_be_old = i == 0 && ckpt_dir_is_far(run->dir) &&
                                (last.code == CKPT_MISSING || last.code == CKPT_CONFLICT);
        if (last.code != CKPT_STALE && !may_be_old)
            break;
        refresh(run);
    }
    return ckpt_err_move(err, &last);
}

static void opening_ended(struct ckpt_run *run, const char *name, uint64_t generation,
                          struct ckpt_view *view)
{
    struct opened *o = find_opened(run, name, generation);

    if (view) {
        o->view = ckpt_view_hold(view);
        o->marker = view->save->marker.hash;
        o->used = ++run->tick;
        saves_keep(&run->saves, name, view->save);
    } else {
        remove_opened(run, o);
    }
    (void)pthread_cond_broadcast(&run->opened_one);
}

/* Open a view. Called with the lock held, which is released while opening. */
static int open_unlocked(struct ckpt_run *run, const struct ckpt_found_step *step,
                         struct ckpt_view **ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *name = strdup(step->name);
    struct ckpt_save *before = saves_find(&run->saves, step->name);
    const uint64_t generation = step->generation;
    int result = -1;

    if (!name)
        (void)ckpt_nomem(err);
    else
        result = begin_opening(run, step, err);
    if (result == 0) {
        (void)pthread_mutex_unlock(&run->lock);
        result = open_step(run, name, before, ret, err);
        (void)pthread_mutex_lock(&run->lock);
        opening_ended(run, name, generation, result == 0 ? *ret : NULL);
    }
    ckpt_save_unref(before);
    return result;
}

static int view_locked(struct ckpt_run *run, const char *name, struct ckpt_view **ret,
                       struct ckpt_err *err)
{
    for (;;) {
        const struct ckpt_found_step *step = name ? ckpt_steps_find(&run->steps, name) : NULL;
        if (!step)
            return ckpt_fail(err, CKPT_MISSING, "'%s' has no step '%s'", ckpt_dir_path(run->dir),
                             name ? name : "latest");
        struct opened *o = find_opened(run, step->name, step->generation);
        if (!o)
            return open_unlocked(run, step, ret, err);
        if (o->view) {
            o->used = ++run->tick;
            *ret = ckpt_view_hold(o->view);
            return 0;
        }
        (void)pthread_cond_wait(&run->opened_one, &run->lock);
    }
}

/* Close surplus views; there are several if many views that were held at the same time were
 * released. */
static void drop_surplus(struct ckpt_run *run)
{
    struct ckpt_view *surplus;

    do {
        (void)pthread_mutex_lock(&run->lock);
        surplus = take_surplus(run);
        (void)pthread_mutex_unlock(&run->lock);
        ckpt_view_release(surplus);
    } while (surplus);
}

/* The name of the step that is meant: the latest, or the one to which a link of that name leads.
 * Called with the lock held. */
static const char *meant_by(const struct ckpt_run *run, const char *name)
{
    const char *step = name ? ckpt_steps_behind(&run->steps, name) : run->steps.latest;

    return step ? step : name;
}

/* Get the view of a step. *ret_name is a new string, the name of the step that was meant. */
static int view_of(struct ckpt_run *run, const char *step, char **ret_name, struct ckpt_view **ret,
                   struct ckpt_err *err)
{
    int result;

    (void)pthread_mutex_lock(&run->lock);
    step = meant_by(run, step);
    if (step && !(*ret_name = strdup(step)))
        result = ckpt_nomem(err);
    else
        result = view_locked(run, *ret_name, ret, err);
    (void)pthread_mutex_unlock(&run->lock);
    return result;
}

int ckpt_run_view(struct ckpt_run *run, const char *step, struct ckpt_view **ret,
                  struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *name = NULL;
    struct ckpt_err own = {0};
    int result = view_of(run, step, &name, ret, &own);

    drop_surplus(run);
    /* a step that was deleted meanwhile is not reported as a broken step */
    if (result < 0 && name && *name && ckpt_step_is_gone(run->dir, name, run->part) &&
        ckpt_run_scan(run, NULL, NULL) == 0)
        return ckpt_fail(err, CKPT_MISSING, "'%s' has no step '%s' (any more)",
                         ckpt_dir_path(run->dir), name);
    return result < 0 ? ckpt_err_move(err, &own) : 0;
}

struct ckpt_view *ckpt_run_view_if_open(struct ckpt_run *run, const char *name)
{
    struct ckpt_view *view = NULL;

    (void)pthread_mutex_lock(&run->lock);
    name = meant_by(run, name);
    const struct ckpt_found_step *step = name ? ckpt_steps_find(&run->steps, name) : NULL;
    struct opened *o = step ? find_opened(run, step->name, step->generation) : NULL;
    if (o && o->view) {
        o->used = ++run->tick;
        view = ckpt_view_hold(o->view);
    }
    (void)pthread_mutex_unlock(&run->lock);
    return view;
}

int ckpt_run_newest_view(struct ckpt_run *run, struct ckpt_view **ret, struct ckpt_err *err)
{
    struct ckpt_step *steps;
    struct ckpt_err first = {0};
    size_t n;

    if (ckpt_run_view(run, NULL, ret, &first) == 0)
        return 0;
    if (ckpt_run_steps(run, &steps, &n, err) < 0)
        return -1;
    int result = -1;
    for (size_t i = n; i-- > 0 && result < 0;) {
        struct ckpt_err e = {0};
        if (!steps[i].is_latest)
            result = ckpt_run_view(run, steps[i].name, ret, &e);
    }
    ckpt_steps_free(steps, n);
    if (result < 0)
        return ckpt_err_move(err, &first);
    ckpt_logf(&run->shared->opt->log, CKPT_LOG_WARNING,
              "the latest step cannot be read, but an older one can: %s", first.text);
    return 0;
}

int ckpt_run_warnings(struct ckpt_run *run, char **ret_json, struct ckpt_err *err)
{
    return ckpt_remarks_text(&run->shared->remarks, ret_json, err);
}

int ckpt_run_facts(struct ckpt_run *run, char **ret_json, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *facts = json_object();
    ckpt_cleanup(ckpt_freep) char *storage = NULL;

    for (size_t i = 0; i < run->average.n; i++) {
        json_t *list = json_object_get(facts, "average");
        if (!list)
            ckpt_json_set(&facts, "average", list = json_array());
        if (facts && json_array_append_new(list, json_string(run->average.step[i])) < 0)
            return ckpt_nomem(err);
    }
    (void)pthread_mutex_lock(&run->lock);
    for (size_t i = 0; i < run->opened.len && !storage; i++) {
        const struct ckpt_view *v = run->opened.ptr[i].view;
        storage = v && v->cat->sources.len ? ckpt_source_storage(v->cat->sources.ptr[0]) : NULL;
    }
    (void)pthread_mutex_unlock(&run->lock);
    if (storage)
        ckpt_json_set(&facts, "storage", json_string(storage));
    if (!facts || !(*ret_json = json_dumps(facts, JSON_COMPACT)))
        return ckpt_nomem(err);
    return 0;
}

int ckpt_run_stats(struct ckpt_run *run, struct ckpt_stats *ret, struct ckpt_err *err)
{
    struct ckpt_shared *s = run->shared;
    const struct ckpt_stats stats = {
        .requests = atomic_load(&s->stats.requests),
        .bytes = atomic_load(&s->stats.bytes),
        .source_reads = atomic_load(&s->stats.source_reads),
        .source_bytes = atomic_load(&s->stats.source_bytes),
        .slab_bytes = ckpt_slabs_bytes(s->slabs),
        .open_files = ckpt_fdpool_open_count(s->pool),
        .errors = atomic_load(&s->errors),
    };

    return ckpt_sized_give(ret, &stats, sizeof stats, "ckpt_stats", err);
}
