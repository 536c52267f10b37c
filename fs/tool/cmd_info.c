/* SPDX-License-Identifier: Apache-2.0 */
/* ckpt info: facts about a run, and about a mountpoint what its daemon has negotiated. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/err.h"
#include "base/json.h"
#include "base/mem.h"
#include "base/str.h"
#include "common.h"
#include "out.h"
#include "summary.h"
#include "tool.h"

static json_t *steps_json(struct ckpt_run *run, struct ckpt_err *err)
{
    struct ckpt_step *step;
    json_t *list = json_array();
    size_t n;

    if (ckpt_run_steps(run, &step, &n, err) < 0) {
        json_decref(list);
        return NULL;
    }
    for (size_t i = 0; i < n; i++)
        ckpt_json_append(&list, ckptfs_json_text(step[i].name));
    ckpt_steps_free(step, n);
    if (!list)
        (void)ckpt_nomem(err);
    return list;
}

/* Gather {"run", "steps"} and the library's facts about the view. */
static int gather(const struct ckpt_tool *t, json_t **ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_runp) struct ckpt_run *run = NULL;
    ckpt_cleanup(ckptfs_viewp) struct ckpt_view *view = NULL;
    ckpt_cleanup(ckpt_freep) char *text = NULL;
    ckpt_cleanup(ckpt_json_decrefp) json_t *facts = NULL;
    json_t *j, *steps = NULL;

    if (ckpt_tool_open(t, &run, &view, err) < 0 || ckpt_view_info(view, &text, err) < 0 ||
        ckpt_out_parse(text, &facts, err) < 0)
        return -1;
    if (ckpt_run_is_folder(run) && !(steps = steps_json(run, err)))
        return -1;
    j = json_pack("{s:o}", "run", ckptfs_json_text(t->run));
    if (!j || (steps && json_object_set_new(j, "steps", steps) < 0) ||
        json_object_update(j, facts) < 0) {
        json_decref(j);
        return ckpt_nomem(err);
    }
    *ret = j;
    return 0;
}

/* The facts of a mountpoint, from its control file. */
static json_t *mount_facts(const char *path)
{
    ckpt_cleanup(ckpt_freep) char *file = ckpt_asprintf("%s/.ckptfs/stats.json", path);
    return file ? json_load_file(file, 0, NULL) : NULL;
}

static void print_advice(const json_t *mount)
{
    json_int_t now = json_integer_value(json_object_get(mount, "readahead_kib"));
    const char *bdi = json_string_value(json_object_get(mount, "bdi"));

    if (now < 1024 && bdi && *bdi)
        (void)printf("faster: echo 2048 | sudo tee /sys/class/bdi/%s/read_ahead_kb\n", bdi);
}

int ckpt_cmd_info(const struct ckpt_tool *t, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *j = mount_facts(t->run);
    bool mounted = j;

    if (!mounted && gather(t, &j, err) < 0)
        return -1;
    if (t->json)
        return ckpt_out_json(j, err);
    if (mounted || t->verbose)
        ckpt_out_outline(j);
    else
        ckpt_summary_of_run(j);
    if (mounted)
        print_advice(j);
    return CKPT_TOOL_GOOD;
}
