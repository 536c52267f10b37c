/* SPDX-License-Identifier: Apache-2.0 */
/* NeMo Automodel, which writes steps of several formats, each with its own reader. Its run folders
 * have directories epoch_E_step_S, a link LATEST, and a file .incomplete in directories that are
 * being written; the directory model/ in a step is the checkpoint. */
#include "format/trainer.h"

#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "base/str.h"
#include "format/automodel/export.h"

/* LATEST is a link to the step's directory. Where links are not possible it is the text file
 * LATEST.txt, and in a copy of a run the link may have become a file. */
static char *automodel_latest(struct ckpt_dir *run)
{
    static const char *const files[] = {"LATEST", "LATEST.txt"};
    ckpt_cleanup(ckpt_entries_release) struct ckpt_entries entries = {0};
    struct ckpt_file_id latest, id;
    struct ckpt_entry e;

    for (size_t i = 0; i < 2; i++) {
        ckpt_cleanup(ckpt_freep) char *text = ckpt_reader_pointer(run, files[i]);
        if (!text)
            continue;
        for (size_t len = strlen(text); len > 0 && text[len - 1] == '/';)
            text[--len] = '\0';
        const char *name = strrchr(text, '/');
        return strdup(name ? name + 1 : text);
    }
    if (!ckpt_dir_has_dir(run, "LATEST") || !ckpt_dir_stat(run, "LATEST", &latest))
        return NULL;
    (void)ckpt_entries_read(run, &entries, NULL);
    while (ckpt_entries_next(&entries, &e))
        if (e.kind == CKPT_ENTRY_DIR && ckpt_has_prefix(e.name, "epoch_") &&
            ckpt_dir_stat(run, e.name, &id) && id.inode == latest.inode)
            return strdup(e.name);
    return NULL;
}

/* .incomplete is removed after LATEST was changed; in an asynchronous save only at the next save.
 */
static bool automodel_finished(struct ckpt_dir *dir, const char *name, const char *latest)
{
    if (strstr(name, ".reserving-"))
        return false;
    return !ckpt_dir_has_file(dir, ".incomplete") || (latest && strcmp(name, latest) == 0);
}

/* Parses the step's name, epoch_E_step_S. */
static void automodel_describe(const struct ckpt_dir *dir, const char *name,
                               struct ckpt_catalog *cat)
{
    unsigned long epoch, step;
    int end = 0;

    if (ckpt_dir_has_file(dir, ".incomplete"))
        ckpt_catalog_warn(cat, "'.incomplete' is there: the save was not finished, or not yet "
                               "published");
    if (!name || sscanf(name, "epoch_%9lu_step_%9lu%n", &epoch, &step, &end) < 2)
        return;
    ckpt_json_set(&cat->about, "epoch", json_integer((json_int_t)epoch));
    ckpt_json_set(&cat->about, "step", json_integer((json_int_t)step));
}

/* Automodel's own file says which PEFT's layout the matrices of experts have ("peft-0.19.1"). Its
 * merge doesn't round a change before it is added. */
static void automodel_adapter(const json_t *file, struct ckpt_adapter_notes *ret)
{
    static const char of_peft[] = "peft-";
    const char *layout = ckpt_json_str(file, "paramwrapper_layout");

    if (layout && ckpt_has_prefix(layout, of_peft))
        ret->peft_version = layout + strlen(of_peft);
    ret->exact = true;
}

static const char *const rewrites[] = {"model", ".incomplete", NULL};
static const char *const links[] = {"LATEST", "LOWEST_VAL", NULL};
static const char *const step_names[] = {"epoch[-_0-9]*", NULL};

const struct ckpt_trainer ckpt_trainer_automodel = {
    .name = "automodel",
    .latest = automodel_latest,
    .finished = automodel_finished,
    .rewrites = rewrites,
    .links = links,
    .step_names = step_names,
    .describe = automodel_describe,
    .split = ckpt_automodel_split,
    .adapter_file = "automodel_peft_config.json",
    .adapter = automodel_adapter,
};
