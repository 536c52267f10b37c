/* SPDX-License-Identifier: Apache-2.0 */
/* PyTorch Distributed Checkpoint: finding its directory in the places where trainers put it. */
#include <stddef.h>
#include <string.h>

#include "base/mem.h"
#include "container/torch_file.h"
#include "format/dcp/load.h"
#include "format/trainer.h"

/* Directories of the model's DCP below a checkpoint: accelerate, NeMo Automodel. */
static const char *const places[] = {"", "pytorch_model_fsdp_0", "model"};

/* Find the directory of the model's DCP; new, or NULL if there is none. */
static struct ckpt_dir *find(struct ckpt_dir *dir, enum ckpt_evidence *ret)
{
    *ret = CKPT_NOT_MINE;
    for (size_t i = 0; i < sizeof places / sizeof places[0]; i++) {
        ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *sub = ckpt_reader_folder(dir, places[i]);
        if (sub && (*ret = ckpt_dcp_evidence(sub)) != CKPT_NOT_MINE)
            return ckpt_steal(&sub);
    }
    return NULL;
}

static enum ckpt_evidence dcp_probe(struct ckpt_dir *dir)
{
    enum ckpt_evidence evidence;

    ckpt_dir_unref(find(dir, &evidence));
    return evidence;
}

/* A save is finished when .metadata exists: it is written last, and renamed to this name. */
static bool dcp_finished(struct ckpt_dir *dir, const char *name, const char *latest)
{
    return dcp_probe(dir) == CKPT_BY_MAGIC && ckpt_trainers_finished(dir, name, latest);
}

static int dcp_load(struct ckpt_dir *dir, const struct ckpt_reader_options *opt,
                    struct ckpt_facts *facts, struct ckpt_catalog *cat, struct ckpt_err *err)
{
    enum ckpt_evidence evidence;
    ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *at = find(dir, &evidence);

    (void)facts;
    if (!at)
        return ckpt_fail(err, CKPT_MISSING, "'%s' has no .metadata", ckpt_dir_path(dir));
    if (ckpt_dcp_load(at, opt, NULL, cat, err) < 0 || ckpt_dcp_add_states(dir, opt, cat, err) < 0)
        return -1;
    ckpt_trainers_describe(dir, opt->name, cat);
    return 0;
}

static int dcp_objects(struct ckpt_dir *dir, const struct ckpt_reader_options *opt, json_t *out,
                       struct ckpt_err *err)
{
    enum ckpt_evidence evidence;
    ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *at = find(dir, &evidence);

    return at ? ckpt_dcp_objects(at, opt, NULL, out, err)
              : ckpt_fail(err, CKPT_MISSING, "'%s' has no .metadata", ckpt_dir_path(dir));
}

/* ---- paths ---- */

static const char *no_tensor(void *ctx, const char *name)
{
    (void)ctx;
    (void)name;
    return NULL;
}

static int dcp_paths(struct ckpt_dir *dir, const struct ckpt_reader_options *opt, json_t *out,
                     struct ckpt_err *err)
{
    enum ckpt_evidence evidence;
    ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *at = find(dir, &evidence);
    ckpt_cleanup(ckpt_json_decrefp) json_t *paths = json_object();
    const struct ckpt_dcp_format format = {
        .name = "dcp", .tensor = no_tensor, .may_be_empty = true, .paths = &paths};
    ckpt_cleanup(ckpt_catalog_freep) struct ckpt_catalog *cat = NULL;

    if (!at)
        return ckpt_fail(err, CKPT_MISSING, "'%s' has no .metadata", ckpt_dir_path(dir));
    if (ckpt_catalog_new(&cat, err) < 0 || ckpt_dcp_load(at, opt, &format, cat, err) < 0)
        return -1;
    return paths && json_object_update(out, paths) == 0 ? 0 : ckpt_nomem(err);
}

static const char *const markers[] = {".metadata", "pytorch_model_fsdp_0/.metadata",
                                      "model/.metadata", NULL};
static const char *const rewrites[] = {".metadata", NULL};
/* torchtitan's dump folder; accelerate's project. */
static const char *const inner_runs[] = {"checkpoint", "checkpoints", NULL};

/* torchtitan's */
static const char *const step_names[] = {"step[-_0-9]*", NULL};

const struct ckpt_reader ckpt_reader_dcp = {
    .name = "dcp",
    .markers = markers,
    .rewrites = rewrites,
    .inner_runs = inner_runs,
    .step_names = step_names,
    .probe = dcp_probe,
    .load = dcp_load,
    .objects = dcp_objects,
    .groups = ckpt_dcp_groups,
    .paths = dcp_paths,
    .latest = ckpt_trainers_latest,
    .finished = dcp_finished,
    .side_files = "",
};
