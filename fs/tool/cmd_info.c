/* SPDX-License-Identifier: Apache-2.0 */
/* ckpt info: facts about a run; of a mountpoint, about the run that it shows, and with -v what its
 * daemon has negotiated; of the directory of an unfinished export, how far that is. */
#include <errno.h>
#include <limits.h>
#include <mntent.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/err.h"
#include "base/json.h"
#include "base/mem.h"
#include "base/str.h"
#include "base/thread.h"
#include "common.h"
#include "out.h"
#include "summary.h"
#include "tool.h"

static json_t *steps_json(struct ckpt_run *run, struct ckpt_err *err)
{
    struct ckpt_step *step;
    size_t n;

    if (ckpt_run_steps(run, &step, &n, err) < 0)
        return NULL;
    json_t *list = json_array();
    for (size_t i = 0; i < n; i++)
        ckpt_json_append(&list, ckptfs_json_text(step[i].name));
    ckpt_steps_free(step, n);
    if (!list)
        (void)ckpt_nomem(err);
    return list;
}

/* {"checkpoint-best": "checkpoint-9"}: the links of the run to its steps. */
static json_t *links_json(struct ckpt_run *run, struct ckpt_err *err)
{
    struct ckpt_step_link *link;
    size_t n;

    if (ckpt_run_links(run, &link, &n, err) < 0)
        return NULL;
    json_t *all = json_object();
    for (size_t i = 0; all && i < n; i++)
        if (json_object_set_new(all, link[i].name, ckptfs_json_text(link[i].step)) < 0)
            json_decref(ckpt_steal(&all));
    ckpt_step_links_free(link, n);
    if (!all)
        (void)ckpt_nomem(err);
    return all;
}

/* Add the states of the parameters, if the checkpoint has more than weights. */
static int add_states(struct ckpt_view *view, json_t *facts, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *text = NULL;
    ckpt_cleanup(ckpt_json_decrefp) json_t *states = NULL;

    if (ckpt_view_states(view, &text, err) < 0 || ckpt_out_parse(text, &states, err) < 0)
        return -1;
    if (json_object_size(states) < 2)
        return 0;
    return json_object_set(facts, "states", states) < 0 ? ckpt_nomem(err) : 0;
}

/* Gather {"run", "steps", "links"} and the library's facts about the view. */
static int gather(const struct ckpt_tool *t, const char *path, json_t **ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_run_closep) struct ckpt_run *run = NULL;
    ckpt_cleanup(ckpt_view_releasep) struct ckpt_view *view = NULL;
    ckpt_cleanup(ckpt_freep) char *text = NULL;
    ckpt_cleanup(ckpt_json_decrefp) json_t *facts = NULL;
    ckpt_cleanup(ckpt_json_decrefp) json_t *j = json_pack("{s:o}", "run", ckptfs_json_text(path));
    ckpt_cleanup(ckpt_json_decrefp) json_t *links = NULL;
    json_t *steps = NULL;

    if (ckpt_tool_open_run(path, t->opt, t->step, &run, &view, err) < 0 ||
        ckpt_view_info(view, &text, err) < 0 || ckpt_out_parse(text, &facts, err) < 0 ||
        add_states(view, facts, err) < 0)
        return -1;
    if (ckpt_run_is_folder(run) &&
        (!(links = links_json(run, err)) || !(steps = steps_json(run, err))))
        return -1;
    if (!j || (steps && json_object_set_new(j, "steps", steps) < 0) ||
        (json_object_size(links) && json_object_set(j, "links", links) < 0) ||
        json_object_update(j, facts) < 0)
        return ckpt_nomem(err);
    *ret = ckpt_steal(&j);
    return 0;
}

/* Is a ckptfs mounted anywhere? */
static bool is_any_mounted(void)
{
    FILE *in = setmntent("/proc/self/mounts", "re");
    struct mntent mount;
    char line[4 * PATH_MAX];
    bool any = false;

    while (in && !any && getmntent_r(in, &mount, line, sizeof line))
        any = strcmp(mount.mnt_type, "fuse.ckptfs") == 0;
    if (in)
        (void)endmntent(in);
    return any;
}

/* A control file that a thread reads; the last of the two to use it frees it. */
struct control {
    pthread_mutex_t lock;
    pthread_cond_t ended;
    bool was_read, was_left;
    json_t *facts;
    char path[];
};

static void free_control(struct control *c)
{
    json_decref(c->facts);
    free(c);
}

static void *read_control(void *arg)
{
    struct control *c = arg;
    json_t *facts = json_load_file(c->path, 0, NULL);

    (void)pthread_mutex_lock(&c->lock);
    c->facts = facts;
    c->was_read = true;
    const bool was_left = c->was_left;
    (void)pthread_cond_signal(&c->ended);
    (void)pthread_mutex_unlock(&c->lock);
    if (was_left)
        free_control(c);
    return NULL;
}

/* The facts of a mountpoint, from its control file. A path that is none may lie on storage that
 * hangs, so a thread reads, and is left to itself if it gets no answer: opening the run will not
 * get one either, and say so. */
static json_t *mount_facts(const char *path)
{
    static const char name[] = "/.ckptfs/stats.json";
    enum { WAIT_MS = 3000, STACK = 256 * 1024 }; /* a daemon answers from its memory */
    const struct timespec until = ckpt_deadline(WAIT_MS);
    struct control *c;

    if (!is_any_mounted() || !(c = calloc(1, sizeof *c + strlen(path) + sizeof name)))
        return NULL;
    (void)pthread_mutex_init(&c->lock, NULL);
    ckpt_cond_init(&c->ended);
    (void)sprintf(c->path, "%s%s", path, name);
    if (ckpt_thread_detach(STACK, read_control, c) != 0) {
        free_control(c);
        return NULL;
    }
    (void)pthread_mutex_lock(&c->lock);
    while (!c->was_read && pthread_cond_timedwait(&c->ended, &c->lock, &until) != ETIMEDOUT)
        ;
    json_t *facts = ckpt_steal(&c->facts);
    const bool was_read = c->was_read;
    c->was_left = !was_read;
    (void)pthread_mutex_unlock(&c->lock);
    if (was_read)
        free_control(c);
    return facts;
}

static void print_advice(const json_t *mount)
{
    json_int_t now = json_integer_value(json_object_get(mount, "readahead_kib"));
    const char *bdi = ckpt_json_str(mount, "bdi");

    if (now < 1024 && bdi && *bdi)
        (void)printf("faster: echo 2048 | sudo tee /sys/class/bdi/%s/read_ahead_kb\n", bdi);
}

/* For a path that is no run: is an unfinished export to be there? Else fail as *why says. */
static int tell_export(const struct ckpt_tool *t, const struct ckpt_err *why, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *state = NULL;

    /* storage that hangs is not asked again */
    if (why->code != CKPT_TIMEOUT && ckpt_export_state(t->run, &state, err) < 0)
        return -1;
    if (!state)
        return ckpt_err_move(err, why);
    if (t->json)
        return ckpt_out_json(state, err);
    ckpt_export_print_state(state);
    return CKPT_TOOL_GOOD;
}

int ckpt_cmd_info(const struct ckpt_tool *t, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *mount = mount_facts(t->run), *j = NULL;
    const char *run = ckpt_json_str(mount, "run");
    struct ckpt_err own = {0};

    /* a mount may wait for its first step */
    if (gather(t, run ? run : t->run, &j, &own) < 0 && !mount)
        return tell_export(t, &own, err);
    if (t->json) {
        if (mount && j && json_object_update_missing(mount, j) < 0)
            return ckpt_nomem(err);
        return ckpt_out_json(mount ? mount : j, err);
    }
    if (t->verbose && j)
        ckpt_out_outline(j);
    else if (j)
        ckpt_summary_of_run(j);
    if (mount && (t->verbose || !j))
        ckpt_out_outline(mount);
    if (mount)
        print_advice(mount);
    return CKPT_TOOL_GOOD;
}
