/* SPDX-License-Identifier: Apache-2.0 */
/* Looking into the folders of a step. */
#include "run/inner.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/str.h"
#include "base/vec.h"

enum {
    LEVELS = 2,       /* below the step */
    MOST_FOLDERS = 64 /* that are looked into, in each folder */
};

bool ckpt_step_is_name(const char *name)
{
    static const char *const words[] = {"step", "iter", "epoch", "checkpoint", "ckpt"};
    size_t n = strlen(name);

    if (ckpt_reader_is_step_name(name))
        return true;
    if (n == 0 || !isdigit((unsigned char)name[n - 1]))
        return false;
    while (n && isdigit((unsigned char)name[n - 1]))
        n--;
    while (n && strchr("-_=", name[n - 1]))
        n--;
    for (size_t i = 0; n && i < sizeof words / sizeof *words; i++)
        if (n >= strlen(words[i]) &&
            strncmp(name + n - strlen(words[i]), words[i], strlen(words[i])) == 0)
            return true;
    return n == 0;
}

/* ---- where a format's trainers put it ---- */

static void enter(struct ckpt_dir **dir, struct ckpt_dir **inner)
{
    ckpt_dir_unref(*dir);
    *dir = ckpt_steal(inner);
}

/* Find the reader for the first of these inner folders that is a checkpoint, which then replaces
 * *dir. */
static const struct ckpt_reader *probe_inside(struct ckpt_dir **dir, const char *const *folders)
{
    for (; folders && *folders; folders++) {
        ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *inner = NULL;
        const struct ckpt_reader *reader;
        if (ckpt_dir_open_below(*dir, *folders, &inner, NULL) == 0 &&
            (reader = ckpt_reader_probe(inner, NULL))) {
            enter(dir, &inner);
            return reader;
        }
    }
    return NULL;
}

/* ---- where only the step itself says it ---- */

/* Names of folders that trainers put beside the model, and that hold none: an optimizer's states,
 * the state of the loop and of the data. */
static bool is_state(const char *name)
{
    static const char *const folders[] = {
        "optimizer", "optim",     "optimizers", "train",     "trainer_state", "dataloader", "data",
        "dataset",   "scheduler", "rng",        "rng_state", "logs",          NULL};

    return name[0] == '.' || ckpt_one_of(name, folders) || ckpt_reader_is_staging(name);
}

/* A folder in a step that is no checkpoint itself. */
struct container {
    struct ckpt_dir *dir;
    char *path; /* from the step */
};

/* The checkpoints in a step. */
struct models {
    struct ckpt_dir *dir; /* of the first */
    const struct ckpt_reader *reader;
    char *place, *other; /* paths of the first and the second, from the step */
    CKPT_VEC(struct container) containers;
};

static void models_release(struct models *m)
{
    for (size_t i = 0; i < m->containers.len; i++) {
        ckpt_dir_unref(m->containers.ptr[i].dir);
        free(m->containers.ptr[i].path);
    }
    ckpt_vec_release(&m->containers);
    ckpt_dir_unref(m->dir);
    free(m->place);
    free(m->other);
}

/* Note a checkpoint, whose path is taken over. */
static void note_model(struct models *m, const struct ckpt_reader *reader, struct ckpt_dir **dir,
                       char **path)
{
    if (m->reader) {
        m->other = ckpt_steal(path);
        return;
    }
    m->reader = reader;
    m->dir = ckpt_steal(dir);
    m->place = ckpt_steal(path);
}

static int note_container(struct models *m, struct ckpt_dir *dir, const char *path,
                          struct ckpt_err *err)
{
    struct container c = {.dir = dir};

    if (m->containers.len == MOST_FOLDERS)
        return 0;
    if (!(c.path = strdup(path)) || ckpt_vec_push(&m->containers, c) < 0) {
        free(c.path);
        return ckpt_nomem(err);
    }
    (void)ckpt_dir_ref(dir);
    return 0;
}

static int look_into(struct ckpt_dir *dir, const char *path, int levels, struct models *m,
                     struct ckpt_err *err);

static int look_at_folder(struct ckpt_dir *dir, const char *path, const char *name, int levels,
                          struct models *m, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *inner = NULL;
    ckpt_cleanup(ckpt_freep) char *place = ckpt_asprintf("%s%s%s", path, *path ? "/" : "", name);

    if (!place)
        return ckpt_nomem(err);
    if (ckpt_dir_open_below(dir, name, &inner, NULL) < 0)
        return 0;
    const struct ckpt_reader *reader = ckpt_reader_probe(inner, NULL);
    if (!reader && note_container(m, inner, place, err) < 0)
        return -1;
    if (reader)
        note_model(m, reader, &inner, &place);
    return !reader && levels > 1 ? look_into(inner, place, levels - 1, m, err) : 0;
}

/* Look into the folders of dir, which is at `path` below the step. A folder that is named like a
 * step is one of a run, and not what this step holds. */
static int look_into(struct ckpt_dir *dir, const char *path, int levels, struct models *m,
                     struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_entries_release) struct ckpt_entries entries = {0};
    struct ckpt_entry e;
    int n = 0;

    if (ckpt_entries_read(dir, &entries, NULL) < 0)
        return 0;
    while (!m->other && n < MOST_FOLDERS && ckpt_entries_next(&entries, &e))
        if (e.kind == CKPT_ENTRY_DIR && !e.is_link && !is_state(e.name) &&
            !ckpt_step_is_name(e.name) && n++ < MOST_FOLDERS &&
            look_at_folder(dir, path, e.name, levels, m, err) < 0)
            return -1;
    return 0;
}

/* ---- a run of its own in the step: NeMo-RL's Megatron saves into a folder for runs ---- */

/* The step that a format's pointer file in the folder names, new; NULL: there is none. */
static char *pointed_at(struct ckpt_dir *dir)
{
    char *latest = NULL;

    for (size_t r = 0; !latest && ckpt_reader_list[r]; r++)
        latest = ckpt_reader_list[r]->latest ? ckpt_reader_list[r]->latest(dir) : NULL;
    return latest;
}

static int look_at_step(const struct container *in, const char *name, struct models *m,
                        struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *dir = NULL;
    ckpt_cleanup(ckpt_freep) char *path = ckpt_asprintf("%s/%s", in->path, name);
    const struct ckpt_reader *reader;

    if (!path)
        return ckpt_nomem(err);
    if (ckpt_dir_open_below(in->dir, name, &dir, NULL) == 0 &&
        (reader = ckpt_reader_probe(dir, NULL)))
        note_model(m, reader, &dir, &path);
    return 0;
}

static bool is_step_of_format(const struct ckpt_entry *e)
{
    return e->kind == CKPT_ENTRY_DIR && !e->is_link && ckpt_reader_is_step_name(e->name) &&
           !ckpt_reader_is_staging(e->name);
}

/* Look at the folders that are named like a format's steps: at the one that a pointer file names,
 * or at all. The pointer is only asked for where there are several. */
static int look_for_steps(const struct container *in, struct models *m, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_entries_release) struct ckpt_entries entries = {0};
    ckpt_cleanup(ckpt_freep) char *latest = NULL;
    struct ckpt_entry e;
    int n = 0;

    if (ckpt_entries_read(in->dir, &entries, NULL) < 0)
        return 0;
    while (ckpt_entries_next(&entries, &e))
        n += is_step_of_format(&e);
    latest = n > 1 ? pointed_at(in->dir) : NULL;
    for (entries.at = 0; !m->other && ckpt_entries_next(&entries, &e);)
        if (is_step_of_format(&e) && (!latest || strcmp(e.name, latest) == 0) &&
            look_at_step(in, e.name, m, err) < 0)
            return -1;
    return 0;
}

/* Look where another step has its model. */
static const struct ckpt_reader *probe_at(struct ckpt_dir **dir, const char *place)
{
    const char *const only[] = {place, NULL};

    return place ? probe_inside(dir, only) : NULL;
}

static const struct ckpt_reader *find_model(struct ckpt_dir **dir, char **place,
                                            struct ckpt_err *err)
{
    ckpt_cleanup(models_release) struct models m = {0};
    const struct ckpt_reader *reader = probe_at(dir, place ? *place : NULL);

    if (reader)
        return reader;
    if (look_into(*dir, "", LEVELS, &m, err) < 0)
        return NULL;
    const bool none = !m.reader;
    for (size_t i = 0; none && !m.other && i < m.containers.len; i++)
        if (look_for_steps(&m.containers.ptr[i], &m, err) < 0)
            return NULL;
    if (!m.reader)
        return NULL;
    if (m.other) {
        *err = (struct ckpt_err){0};
        (void)ckpt_fail(err, CKPT_CONFLICT,
                        "'%s' holds two models, '%s' and '%s': choose one with -o part=%s",
                        ckpt_dir_path(*dir), m.place, m.other, m.place);
        return NULL;
    }
    if (place) {
        free(*place);
        *place = ckpt_steal(&m.place);
    }
    enter(dir, &m.dir);
    return m.reader;
}

const struct ckpt_reader *ckpt_step_probe(struct ckpt_dir **dir, const char *part, bool is_step,
                                          char **place, struct ckpt_err *err)
{
    const struct ckpt_reader *reader = probe_at(dir, part);

    if (reader)
        return reader;
    reader = ckpt_reader_probe(*dir, err);

    for (size_t r = 0; !reader && err->code != CKPT_CONFLICT && ckpt_reader_list[r]; r++)
        reader = probe_inside(dir, ckpt_reader_list[r]->inner_models);
    if (!reader && is_step && err->code != CKPT_CONFLICT)
        reader = find_model(dir, place, err);
    return reader;
}
