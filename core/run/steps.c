/* SPDX-License-Identifier: Apache-2.0 */
/* Scanning a run's folder. */
#include "run/steps.h"

#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "base/mem.h"
#include "base/str.h"
#include "base/vec.h"
#include "format/trainer.h"
#include "io/dir_union.h"
#include "io/far/dir_bounded.h"
#include "run/inner.h"

/* ---- one directory ---- */

static uint64_t add_identity(uint64_t h, const struct ckpt_dir *dir, const char *name,
                             int64_t *newest_ns)
{
    struct ckpt_file_id id;

    if (!ckpt_dir_stat(dir, name, &id))
        return h;
    const uint64_t part[] = {XXH3_64bits(name, strlen(name)), id.size, (uint64_t)id.mtime_ns,
                             (uint64_t)id.ctime_ns};
    if (id.mtime_ns > *newest_ns)
        *newest_ns = id.mtime_ns;
    return XXH3_64bits_withSeed(part, sizeof part, h);
}

/* The file beside the weights that says which model it is (model/base.h). */
#define CONFIG "config.json"

/* The generation of a step: a hash over the files that a save of any format writes anew, and the
 * model's config. */
static uint64_t generation_of(const struct ckpt_dir *dir, int64_t *ret_mtime_ns)
{
    *ret_mtime_ns = 0;
    uint64_t h = add_identity(0, dir, ".", ret_mtime_ns);

    h = add_identity(h, dir, CONFIG, &(int64_t){0});
    for (size_t r = 0; ckpt_reader_list[r]; r++)
        for (const char *const *name = ckpt_reader_list[r]->rewrites; name && *name; name++)
            h = add_identity(h, dir, *name, ret_mtime_ns);
    for (const struct ckpt_trainer *const *t = ckpt_trainers; *t; t++)
        for (const char *const *name = (*t)->rewrites; name && *name; name++)
            h = add_identity(h, dir, *name, ret_mtime_ns);
    return h;
}

/* ---- one step ---- */

/* The content of a format's pointer file. */
struct pointer {
    const struct ckpt_reader *reader;
    char *step;
};

struct pointers {
    CKPT_VEC(struct pointer) files; /* the pointer files that exist */
    char *leaving; /* a text about the first link out of the run that is left out; or NULL */
};

static void pointers_release(struct pointers *p)
{
    for (size_t i = 0; i < p->files.len; i++)
        free(p->files.ptr[i].step);
    ckpt_vec_release(&p->files);
    free(p->leaving);
}

/* Note a link that leads out: a pointer file, or what would be a step. */
static int note_leaving(struct pointers *p, const struct ckpt_err *why, struct ckpt_err *err)
{
    if (!p->leaving && !(p->leaving = ckpt_asprintf("left out: %s", why->text)))
        return ckpt_nomem(err);
    return 0;
}

static int read_pointer(struct ckpt_dir *run, const struct ckpt_reader *reader, struct pointers *p,
                        struct ckpt_err *err)
{
    struct pointer file = {reader, reader->latest ? reader->latest(run) : NULL};

    if (file.step && ckpt_vec_push(&p->files, file) < 0) {
        free(file.step);
        return ckpt_nomem(err);
    }
    return 0;
}

/* Read all pointer files. One that exists but cannot be read is an error: without it, an unfinished
 * step may look finished, or another step like the latest. */
static int read_pointers(struct ckpt_dir *run, struct pointers *p, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *fresh = NULL;
    struct ckpt_err leaving = {0};

    if (ckpt_dir_open_below(run, ".", &fresh, err) < 0)
        return -1;
    for (size_t r = 0; ckpt_reader_list[r]; r++)
        if (read_pointer(fresh, ckpt_reader_list[r], p, err) < 0)
            return -1;
    if (ckpt_dir_leaving(fresh, &leaving) < 0 && note_leaving(p, &leaving, err) < 0)
        return -1;
    return ckpt_dir_trouble(fresh, err);
}

static const char *pointer_of(const struct pointers *p, const struct ckpt_reader *reader)
{
    for (size_t i = 0; i < p->files.len; i++)
        if (p->files.ptr[i].reader == reader)
            return p->files.ptr[i].step;
    return NULL;
}

static bool is_pointed_at(const struct pointers *p, const char *name)
{
    for (size_t i = 0; i < p->files.len; i++)
        if (strcmp(p->files.ptr[i].step, name) == 0)
            return true;
    return false;
}

/* Every scan looks again at so many of the known steps, and finds out of so many whether their
 * folders have changed. At a distance, where a look takes a dozen round trips, at fewer. */
enum { LOOKS = 16, FAR_LOOKS = 1, STATS = 4096, FAR_STATS = 8 };

enum looks { NO_STEP, UNFINISHED, FINISHED, UNKNOWN };

/* Is `name` a step? *ret_dir is the directory with the model. *ret_reader is NULL if several
 * readers match, or models, which opening will report. UNKNOWN: the directory cannot be read.
 * part, place: as for ckpt_step_probe. */
static enum looks look_at(struct ckpt_dir *run, const struct pointers *pointers, const char *name,
                          const char *part, char **place, struct ckpt_dir **ret_dir,
                          const struct ckpt_reader **ret_reader)
{
    const bool is_step = is_pointed_at(pointers, name) || ckpt_step_is_name(name);
    struct ckpt_err err = {0};

    *ret_reader = NULL;
    if (ckpt_dir_open_below(run, name, ret_dir, &err) < 0)
        return err.code == CKPT_MISSING || err.code == CKPT_UNSUPPORTED ? NO_STEP : UNKNOWN;
    *ret_reader = ckpt_step_probe(ret_dir, part, is_step, place, &err);
    const struct ckpt_reader *r = *ret_reader;
    if (!r && err.code == CKPT_CONFLICT)
        return FINISHED;
    const char *lacks;
    const bool finished = r && ckpt_dir_is_everywhere(run, name, &lacks) &&
                          (!r->finished || r->finished(*ret_dir, name, pointer_of(pointers, r)));
    if (finished)
        return FINISHED;
    if (ckpt_dir_trouble(*ret_dir, NULL) < 0)
        return UNKNOWN;
    return r ? UNFINISHED : NO_STEP;
}

bool ckpt_step_is_gone(struct ckpt_dir *run, const char *name, const char *part)
{
    ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *dir = NULL;
    ckpt_cleanup(pointers_release) struct pointers pointers = {0};
    const struct ckpt_reader *reader;

    if (read_pointers(run, &pointers, NULL) < 0)
        return false;
    const enum looks looks = look_at(run, &pointers, name, part, NULL, &dir, &reader);
    return looks == NO_STEP || looks == UNFINISHED;
}

/* ---- all of them ---- */

/* A folder whose name says that its save is in progress. */
struct staged {
    char *name;
    uint64_t inode;
};

struct scan {
    struct ckpt_dir *dir;
    const char *part; /* as for ckpt_step_probe, as is found.place */
    const struct ckpt_steps_found *known;
    size_t at; /* in `known`: after the step that was found last; both are in the same order */
    struct pointers pointers;
    struct ckpt_steps_found found;
    bool has_training; /* a step was found that is_training */
    char *left_out;    /* a text about models that are no steps of this run; or NULL */
    CKPT_VEC(char *)
    links; /* names of links to folders, which are looked at when the steps are
              known */
    CKPT_VEC(struct staged) staged;
};

/* The name of the mount's own link to the latest step. */
#define LATEST_LINK "latest"

/* Is it a link that points to one of the steps: a format's or a trainer's own, or one like the
 * mount's? */
static bool is_link(const char *name)
{
    if (strcmp(name, LATEST_LINK) == 0)
        return true;
    for (size_t r = 0; ckpt_reader_list[r]; r++)
        if (ckpt_reader_list[r]->links && ckpt_one_of(name, ckpt_reader_list[r]->links))
            return true;
    for (const struct ckpt_trainer *const *t = ckpt_trainers; *t; t++)
        if ((*t)->links && ckpt_one_of(name, (*t)->links))
            return true;
    return false;
}

const char *ckpt_steps_behind(const struct ckpt_steps_found *s, const char *name)
{
    const struct ckpt_found_step *step = ckpt_steps_find(s, name);

    if (step)
        return step->name;
    for (size_t i = 0; i < s->links.len; i++)
        if (strcmp(s->links.ptr[i].name, name) == 0)
            return s->links.ptr[i].step;
    return NULL;
}

const struct ckpt_found_step *ckpt_steps_find(const struct ckpt_steps_found *s, const char *name)
{
    for (size_t i = 0; s && i < s->len; i++)
        if (strcmp(s->ptr[i].name, name) == 0)
            return &s->ptr[i];
    return NULL;
}

static const struct ckpt_found_step *find_known(struct scan *s, const char *name)
{
    const struct ckpt_steps_found *known = s->known;
    const bool is_next = known && s->at < known->len && strcmp(known->ptr[s->at].name, name) == 0;
    const struct ckpt_found_step *step =
        is_next ? &known->ptr[s->at] : ckpt_steps_find(known, name);

    if (step)
        s->at = (size_t)(step - known->ptr) + 1;
    return step;
}

/* Does a pointer file name the directory, or is it named like a step? */
static bool is_named_as_step(const struct scan *s, const char *name)
{
    const char last = name[strlen(name) - 1];

    return is_pointed_at(&s->pointers, name) || (last >= '0' && last <= '9');
}

static int note_unfinished(struct scan *s, const char *name, const struct ckpt_reader *reader,
                           struct ckpt_err *err)
{
    const char *lacks;

    free(s->found.unfinished);
    s->found.unfinished = ckpt_dir_is_everywhere(s->dir, name, &lacks)
                              ? ckpt_asprintf("%s (%s)", name, reader ? reader->name : "unreadable")
                              : ckpt_asprintf("%s (which '%s' has not)", name, lacks);
    return s->found.unfinished ? 0 : ckpt_nomem(err);
}

static int push_step(struct scan *s, struct ckpt_found_step step, const char *name,
                     struct ckpt_err *err)
{
    if (!(step.name = strdup(name)) || ckpt_vec_push(&s->found, step) < 0) {
        free(step.name);
        return ckpt_nomem(err);
    }
    s->has_training |= step.is_training;
    return 0;
}

/* Is it a known step's turn, if n of them have it in each scan? */
static bool has_turn(const struct ckpt_steps_found *known, const struct ckpt_found_step *step,
                     size_t n)
{
    return (size_t)(step - known->ptr) / n == known->turn % ((known->len + n - 1) / n);
}

/* May the scan take over what the last one found, without a look at the step? */
static bool may_skip(const struct scan *s, const struct ckpt_found_step *step, const char *name)
{
    const struct ckpt_steps_found *k = s->known;
    const bool far = ckpt_dir_is_far(s->dir);
    struct ckpt_file_id folder;

    if (!step->settled || s->found.config != k->config ||
        has_turn(k, step, far ? FAR_LOOKS : LOOKS) || is_pointed_at(&s->pointers, name) ||
        (k->latest && strcmp(name, k->latest) == 0))
        return false;
    return !has_turn(k, step, far ? FAR_STATS : STATS) ||
           (ckpt_dir_stat(s->dir, name, &folder) && ckpt_file_id_eq(&folder, &step->folder));
}

/* Add a step. dir and reader: what a look at it found, NULL: it cannot be read; known: what the
 * last scan found of it, or NULL. */
static int add_step(struct scan *s, const char *name, const struct ckpt_dir *dir,
                    const struct ckpt_reader *reader, const struct ckpt_found_step *known,
                    const struct ckpt_file_id *folder, struct ckpt_err *err)
{
    struct ckpt_found_step step = {.folder = *folder};

    if (dir) {
        step.generation = generation_of(dir, &step.mtime_ns);
        if (reader)
            step.marker = ckpt_save_marker_of(reader, dir);
    }
    if (*name)
        step.generation ^= XXH3_64bits(name, strlen(name)) ^ s->found.config;
    step.is_model = reader && reader->is_published && *name && !is_named_as_step(s, name);
    step.is_training = reader && !reader->is_published;
    step.settled = known && ckpt_file_id_eq(folder, &known->folder);
    /* a directory that cannot be read keeps its last generation */
    if (known && (!dir || ckpt_dir_trouble(dir, NULL) < 0)) {
        step = *known;
        step.settled = false;
    }
    return push_step(s, step, name, err);
}

/* See a link that leads to nothing that may be followed: if it leads out, it may be a step. */
static int see_link(struct scan *s, const char *name, struct ckpt_err *err)
{
    struct ckpt_err why = {0};
    struct ckpt_dir_found found;

    return ckpt_dir_look(s->dir, name, &found, &why) < 0 && why.code == CKPT_UNSUPPORTED
               ? note_leaving(&s->pointers, &why, err)
               : 0;
}

/* Look at a folder whose name says that its save is in progress. */
static int see_staged(struct scan *s, const char *name, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *dir = NULL;
    const struct ckpt_reader *reader;
    struct ckpt_file_id folder = {0};

    if (look_at(s->dir, &s->pointers, name, s->part, &s->found.place, &dir, &reader) == NO_STEP)
        return 0;
    (void)ckpt_dir_stat(s->dir, name, &folder);
    struct staged staged = {strdup(name), folder.inode};
    if (!staged.name || ckpt_vec_push(&s->staged, staged) < 0) {
        free(staged.name);
        return ckpt_nomem(err);
    }
    return note_unfinished(s, name, reader, err);
}

/* See a folder, or (known) what was one. */
static int see_folder(struct scan *s, const char *name, const struct ckpt_found_step *known,
                      struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *dir = NULL;
    const struct ckpt_reader *reader;
    struct ckpt_file_id folder = {0};

    if (ckpt_reader_is_staging(name) && !is_pointed_at(&s->pointers, name))
        return see_staged(s, name, err);
    if (known && may_skip(s, known, name))
        return push_step(s, *known, name, err);
    (void)ckpt_dir_stat(s->dir, name, &folder);
    switch (look_at(s->dir, &s->pointers, name, s->part, &s->found.place, &dir, &reader)) {
    case NO_STEP:
        return 0;
    case UNFINISHED:
        return note_unfinished(s, name, reader, err);
    case UNKNOWN: /* a directory that cannot be read */
        return known || is_named_as_step(s, name)
                   ? add_step(s, name, dir, reader, known, &folder, err)
                   : 0;
    case FINISHED:
        break;
    }
    return add_step(s, name, dir, reader, known, &folder, err);
}

static int keep_link(struct scan *s, const char *name, struct ckpt_err *err)
{
    char *own = strdup(name);

    if (own && ckpt_vec_push(&s->links, own) == 0)
        return 0;
    free(own);
    return ckpt_nomem(err);
}

/* Is it a folder of an optimizer's states, which trainers put beside the folder of the weights in a
 * step? In a run it is no step, though it may be a checkpoint of some format. */
static bool is_optimizer(const char *name)
{
    static const char *const names[] = {"optimizer", "optimizers", "optim", NULL};

    return ckpt_one_of(name, names);
}

static int scan_entry(void *ctx, const struct ckpt_entry *e, struct ckpt_err *err)
{
    struct scan *s = ctx;

    if (e->name[0] == '.' || e->kind == CKPT_ENTRY_FILE || is_optimizer(e->name))
        return 0;
    if (e->is_link && e->kind == CKPT_ENTRY_DIR)
        return keep_link(s, e->name, err);
    const struct ckpt_found_step *known = find_known(s, e->name);
    if (e->is_link && is_named_as_step(s, e->name) && see_link(s, e->name, err) < 0)
        return -1;
    /* the target of a link may be unknown */
    return (e->kind == CKPT_ENTRY_DIR || known) && !is_link(e->name)
               ? see_folder(s, e->name, known, err)
               : 0;
}

/* ---- links to folders ---- */

/* Find a folder among the first n steps. */
static const struct ckpt_found_step *find_folder(const struct scan *s, size_t n, uint64_t inode)
{
    for (size_t i = 0; inode && i < n; i++)
        if (s->found.ptr[i].folder.inode == inode)
            return &s->found.ptr[i];
    return NULL;
}

static bool is_staged(const struct scan *s, uint64_t inode)
{
    for (size_t i = 0; i < s->staged.len; i++)
        if (s->staged.ptr[i].inode == inode)
            return true;
    return false;
}

static int add_link(struct scan *s, const char *name, const char *step, struct ckpt_err *err)
{
    struct ckpt_step_link link = {strdup(name), strdup(step)};

    if (link.name && link.step && ckpt_vec_push(&s->found.links, link) == 0)
        return 0;
    free(link.name);
    free(link.step);
    return ckpt_nomem(err);
}

/* A link to another step of the run is a second name of that step. One to a folder that is no step
 * of the run by another name is seen as that folder. */
static int see_links(struct scan *s, struct ckpt_err *err)
{
    const size_t nfolder = s->found.len; /* links to one folder elsewhere are steps, each */

    for (size_t i = 0; i < s->links.len; i++) {
        const char *name = s->links.ptr[i];
        struct ckpt_file_id folder = {0};
        (void)ckpt_dir_stat(s->dir, name, &folder);
        const struct ckpt_found_step *step = find_folder(s, nfolder, folder.inode);
        int rc = 0;
        if (strcmp(name, LATEST_LINK) == 0 || is_staged(s, folder.inode))
            continue;
        if (step)
            rc = add_link(s, name, step->name, err);
        else if (!is_link(name))
            rc = see_folder(s, name, find_known(s, name), err);
        if (rc < 0)
            return -1;
    }
    return 0;
}

/* ---- the latest ---- */

/* Say what is guessed about the order of steps, and which folders are left out as unfinished. */
static int note_guesses(struct scan *s, enum ckpt_order how, bool is_pointed, struct ckpt_err *err)
{
    const char *path = ckpt_dir_path(s->dir), *latest = s->found.latest;
    struct ckpt_str text = {0};

    if (how == CKPT_ORDER_TIMES && !is_pointed)
        ckpt_str_printf(&text,
                        "'%s': no step's name has a number: the newest save is the latest, '%s'",
                        path, latest);
    if (how == CKPT_ORDER_NUMBERS && !is_pointed)
        ckpt_str_printf(&text,
                        "'%s': the steps are named in several ways: the one with the highest "
                        "number is the latest, '%s'",
                        path, latest);
    if (s->staged.len)
        ckpt_str_printf(&text,
                        "%s'%s/%s' is no step: its name says that its save is in progress, or was "
                        "interrupted",
                        text.len ? "; " : "", path, s->staged.ptr[0].name);
    if (s->staged.len > 1)
        ckpt_str_printf(&text, " (and %zu more)", s->staged.len - 1);
    return text.len || text.failed ? ckpt_str_steal(&text, &s->found.note, err) : 0;
}

/* Find the latest step: the one that a pointer file names, if it exists; else the last one in their
 * order. */
static int find_latest(struct scan *s, struct ckpt_err *err)
{
    struct ckpt_steps_found *f = &s->found;
    enum ckpt_order how;

    if (ckpt_steps_order(f->ptr, f->len, &how, err) < 0)
        return -1;
    const char *newest = f->len ? f->ptr[f->len - 1].name : NULL, *latest = NULL;

    for (size_t i = 0; !latest && i < s->pointers.files.len; i++) {
        const struct pointer *file = &s->pointers.files.ptr[i];
        if ((latest = ckpt_steps_behind(f, file->step)))
            continue;
        if (newest && !f->warning &&
            !(f->warning = ckpt_asprintf(
                  "'%s': the run's pointer file (%s) names step '%s' as the latest, which is "
                  "not there or not finished: '%s' is taken",
                  ckpt_dir_path(s->dir), file->reader->name, file->step, newest)))
            return ckpt_nomem(err);
    }
    const bool is_pointed = latest != NULL;
    if (is_pointed) {
        free(f->warning);
        f->warning = NULL;
    }
    latest = latest ? latest : newest;
    if (latest && !(f->latest = strdup(latest)))
        return ckpt_nomem(err);
    return note_guesses(s, how, is_pointed, err);
}

static void forget_links(struct ckpt_steps_found *f, const char *step)
{
    size_t n = 0;

    for (size_t i = 0; i < f->links.len; i++) {
        if (strcmp(f->links.ptr[i].step, step) != 0) {
            f->links.ptr[n++] = f->links.ptr[i];
            continue;
        }
        free(f->links.ptr[i].name);
        free(f->links.ptr[i].step);
    }
    f->links.len = n;
}

/* Beside steps of a training format, a model that was exported into the same folder is not a step;
 * and the models of a pipeline are none. */
static int leave_out_models(struct scan *s, struct ckpt_err *err)
{
    struct ckpt_steps_found *f = &s->found;
    size_t n = 0, models = 0;

    for (size_t i = 0; i < f->len; i++)
        models += f->ptr[i].is_model;
    const bool alone = models == f->len;
    if (!models || !(s->has_training || ckpt_foreign_is_pipeline(s->dir)))
        return 0;
    for (size_t i = 0; i < f->len; i++) {
        if (!f->ptr[i].is_model) {
            f->ptr[n++] = f->ptr[i];
            continue;
        }
        if (!s->left_out && !alone &&
            !(s->left_out = ckpt_asprintf("'%s/%s' is left out: it is a finished model beside the "
                                          "steps of a run",
                                          ckpt_dir_path(s->dir), f->ptr[i].name)))
            return ckpt_nomem(err);
        forget_links(f, f->ptr[i].name);
        free(f->ptr[i].name);
    }
    f->len = n;
    return 0;
}

static int scan_folder(struct scan *s, struct ckpt_err *err)
{
    if (read_pointers(s->dir, &s->pointers, err) < 0 ||
        ckpt_dir_list(s->dir, scan_entry, s, err) < 0 || see_links(s, err) < 0 ||
        leave_out_models(s, err) < 0 || find_latest(s, err) < 0)
        return -1;
    if (!s->found.warning)
        s->found.warning = ckpt_steal(&s->left_out);
    if (!s->pointers.leaving)
        return 0;
    ckpt_cleanup(ckpt_freep) char *other = s->found.warning;
    s->found.warning =
        ckpt_asprintf("%s%s%s", s->pointers.leaving, other ? "; " : "", other ? other : "");
    return s->found.warning ? 0 : ckpt_nomem(err);
}

static int scan_single(struct scan *s, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *dir = NULL;
    struct ckpt_err ignored = {0};

    /* open it again, which forgets earlier failures */
    if (ckpt_dir_open_below(s->dir, ".", &dir, err) < 0)
        return -1;
    const struct ckpt_reader *reader = ckpt_step_probe(&dir, NULL, false, NULL, &ignored);
    const struct ckpt_found_step *known = ckpt_steps_find(s->known, "");
    return add_step(s, "", dir, reader, known, &(struct ckpt_file_id){0}, err) < 0
               ? -1
               : find_latest(s, err);
}

int ckpt_steps_scan(struct ckpt_dir *run, bool is_folder, const char *part,
                    const struct ckpt_steps_found *known, struct ckpt_steps_found *ret,
                    struct ckpt_err *err)
{
    struct scan s = {
        .dir = run, .part = part, .known = known, .found.turn = known ? known->turn + 1 : 0};

    if (known && known->place && !(s.found.place = strdup(known->place)))
        return ckpt_nomem(err);
    if (is_folder)
        s.found.config = add_identity(0, run, CONFIG, &(int64_t){0});
    int result = is_folder ? scan_folder(&s, err) : scan_single(&s, err);

    pointers_release(&s.pointers);
    free(s.left_out);
    for (size_t i = 0; i < s.links.len; i++)
        free(s.links.ptr[i]);
    ckpt_vec_release(&s.links);
    for (size_t i = 0; i < s.staged.len; i++)
        free(s.staged.ptr[i].name);
    ckpt_vec_release(&s.staged);
    if (result < 0)
        ckpt_steps_found_release(&s.found);
    *ret = s.found;
    return result;
}

bool ckpt_steps_are_models(const struct ckpt_steps_found *s)
{
    for (size_t i = 0; i < s->len; i++)
        if (!s->ptr[i].is_model)
            return false;
    return s->len > 0;
}

enum { MOST_RUNS = 8 };

char *ckpt_steps_list_runs(struct ckpt_dir *dir)
{
    ckpt_cleanup(ckpt_entries_release) struct ckpt_entries entries = {0};
    struct ckpt_str text = {0};
    struct ckpt_entry e;
    char *list = NULL;
    size_t n = 0;

    (void)ckpt_entries_read(dir, &entries, NULL);
    while (n < MOST_RUNS && ckpt_entries_next(&entries, &e)) {
        ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *run = NULL;
        ckpt_cleanup(ckpt_steps_found_release) struct ckpt_steps_found found = {0};
        if (e.kind == CKPT_ENTRY_DIR && e.name[0] != '.' &&
            ckpt_dir_open_below(dir, e.name, &run, NULL) == 0 &&
            ckpt_steps_scan(run, true, NULL, NULL, &found, NULL) == 0 && found.len &&
            !ckpt_steps_are_models(&found))
            ckpt_str_printf(&text, "%s'%s'", n++ ? ", " : "", e.name);
    }
    return ckpt_str_steal(&text, &list, NULL) < 0 ? NULL : list;
}

void ckpt_steps_found_release(struct ckpt_steps_found *s)
{
    for (size_t i = 0; i < s->len; i++)
        free(s->ptr[i].name);
    free(s->ptr);
    free(s->latest);
    free(s->unfinished);
    free(s->place);
    free(s->warning);
    free(s->note);
    for (size_t i = 0; i < s->links.len; i++) {
        free(s->links.ptr[i].name);
        free(s->links.ptr[i].step);
    }
    ckpt_vec_release(&s->links);
    *s = (struct ckpt_steps_found){0};
}

bool ckpt_steps_same(const struct ckpt_steps_found *a, const struct ckpt_steps_found *b)
{
    if (a->len != b->len || a->links.len != b->links.len || !a->latest != !b->latest ||
        (a->latest && strcmp(a->latest, b->latest) != 0))
        return false;
    for (size_t i = 0; i < a->len; i++)
        if (a->ptr[i].generation != b->ptr[i].generation ||
            strcmp(a->ptr[i].name, b->ptr[i].name) != 0)
            return false;
    for (size_t i = 0; i < a->links.len; i++)
        if (strcmp(a->links.ptr[i].name, b->links.ptr[i].name) != 0 ||
            strcmp(a->links.ptr[i].step, b->links.ptr[i].step) != 0)
            return false;
    return true;
}

/* ---- opening the checkpoint above its folder of weights ---- */

/* Does some format have weights in a folder `name` of the checkpoint `above`? */
static bool is_part(struct ckpt_dir *above, const char *name)
{
    for (size_t r = 0; ckpt_reader_list[r]; r++)
        if (ckpt_reader_list[r]->has_weights_in && ckpt_reader_list[r]->has_weights_in(above, name))
            return true;
    return false;
}

char *ckpt_part_above(const struct ckpt_dir *dir)
{
    const char *path = ckpt_dir_real_path(dir), *slash = strrchr(path, '/');

    return slash && slash > path && is_part(NULL, slash + 1)
               ? ckpt_asprintf("%.*s", (int)(slash - path), path)
               : NULL;
}

char *ckpt_part_folder(const char *path, const struct ckpt_far_options *far)
{
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;

    if (!is_part(NULL, name) || !ckpt_path_is_file_bounded(path, far))
        return NULL;
    return slash ? ckpt_asprintf("%.*s", slash > path ? (int)(slash - path) : 1, path)
                 : strdup(".");
}

/* Open the checkpoint that a file of weights belongs to; *ret stays NULL if it is none, or if its
 * folder shows other weights. */
static void open_around(const char *path, const struct ckpt_access *how, struct ckpt_dir **ret)
{
    ckpt_cleanup(ckpt_freep) char *folder = ckpt_part_folder(path, &how->far);
    ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *dir = NULL;
    const char *slash = strrchr(path, '/');

    if (folder && ckpt_archive_open(folder, how, &dir, NULL) == 0 &&
        is_part(dir, slash ? slash + 1 : path))
        *ret = ckpt_steal(&dir);
}

static int part_open(const char *path, const struct ckpt_access *how, struct ckpt_dir **ret,
                     struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *dir = NULL, *above = NULL;

    open_around(path, how, &above);
    if (above) {
        *ret = ckpt_steal(&above);
        return 0;
    }
    if (ckpt_archive_open(path, how, &dir, err) < 0)
        return -1;
    ckpt_cleanup(ckpt_freep) char *outer = ckpt_dir_is_archive(dir) ? NULL : ckpt_part_above(dir);
    if (outer && ckpt_archive_open(outer, how, &above, NULL) == 0 &&
        is_part(above, ckpt_dir_real_name(dir)))
        *ret = ckpt_steal(&above);
    else
        *ret = ckpt_steal(&dir);
    return 0;
}

int ckpt_part_open(const char *path, const struct ckpt_access *how, char *const *also, size_t nalso,
                   bool whole, struct ckpt_dir **ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) struct ckpt_dir **member = calloc(nalso + 1, sizeof *member);
    struct ckpt_access one = *how;
    int rc = 0;

    if (!nalso)
        return part_open(path, how, ret, err);
    if (!member)
        return ckpt_nomem(err);
    one.recording = NULL; /* the union's answers are recorded */
    for (size_t i = 0; i <= nalso && rc == 0; i++)
        rc = part_open(i ? also[i - 1] : path, &one, &member[i], err);
    if (rc == 0)
        return ckpt_dir_open_union(member, nalso + 1, whole, ret, err) < 0
                   ? -1
                   : ckpt_dir_use(*ret, how->recording, err);
    for (size_t i = 0; i <= nalso; i++)
        ckpt_dir_unref(member[i]);
    return -1;
}
