/* SPDX-License-Identifier: Apache-2.0 */
/* OLMo-core: a step is a folder with config.json, which describes the run, and model_and_optim, a
 * DCP of the model below `model.` and of its optimizer.
 *
 *     stepN/config.json  stepN/.metadata.json  stepN/train/rankR.pt  stepN/model_and_optim/
 *
 * .metadata.json is written when all the rest is there (olmo_core/train/checkpoint.py); config.json
 * is put beside it by a callback of the trainer. */
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "base/str.h"
#include "container/config.h"
#include "format/dcp/load.h"
#include "format/olmo_core/config.h"
#include "format/reader.h"
#include "format/states.h"

#define WEIGHTS "model_and_optim"
#define MARK ".metadata.json"

static enum ckpt_evidence olmo_core_probe(struct ckpt_dir *dir)
{
    ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *at =
        ckpt_dir_has_dir(dir, WEIGHTS) ? ckpt_reader_folder(dir, WEIGHTS) : NULL;

    return at ? ckpt_dcp_evidence(at) : CKPT_NOT_MINE;
}

static bool olmo_core_has_weights_in(struct ckpt_dir *above, const char *name)
{
    return strcmp(name, WEIGHTS) == 0 && (!above || olmo_core_probe(above) != CKPT_NOT_MINE);
}

/* A save is finished with .metadata.json, which says the version that wrote it; a folder that was
 * copied without it has at least a finished DCP. */
static bool olmo_core_finished(struct ckpt_dir *dir, const char *name, const char *latest)
{
    (void)name;
    (void)latest;
    return olmo_core_probe(dir) == CKPT_BY_MAGIC;
}

static int describe(const struct ckpt_dir *dir, const struct ckpt_reader_options *opt,
                    struct ckpt_catalog *cat, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *mark = NULL;
    unsigned long step;

    if (ckpt_config_read_if(dir, MARK, CKPT_CONFIG_MAX_BYTES, &mark, err) < 0)
        return -1;
    if (opt->name && sscanf(opt->name, "step%9lu", &step) == 1)
        ckpt_json_set(&cat->about, "step", json_integer((json_int_t)step));
    if (ckpt_json_str(mark, "version"))
        ckpt_json_set(&cat->about, "version", json_string(ckpt_json_str(mark, "version")));
    ckpt_json_set(&cat->about, "has_config", json_boolean(cat->config != NULL));
    return 0;
}

/* Leave the optimizer's states out, unless they are wanted. */
static const char *name_tensor(void *ctx, const char *name)
{
    const struct ckpt_reader_options *opt = ctx;

    return opt->states || !ckpt_has_prefix(name, "optim.") ? name : NULL;
}

static int olmo_core_load(struct ckpt_dir *dir, const struct ckpt_reader_options *opt,
                          struct ckpt_facts *facts, struct ckpt_catalog *cat, struct ckpt_err *err)
{
    const struct ckpt_dcp_format format = {
        .name = "olmo_core", .tensor = name_tensor, .ctx = (void *)(uintptr_t)opt};
    ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *at = NULL;

    facts->own_names = true;
    return ckpt_dir_open_below(dir, WEIGHTS, &at, err) < 0 ||
                   ckpt_dcp_load(at, opt, &format, cat, err) < 0 ||
                   ckpt_olmo_config_read(dir, &cat->config, err) < 0 ||
                   describe(dir, opt, cat, err) < 0 ||
                   (opt->states && ckpt_states_label(cat, ckpt_state_parse_torch, err) < 0)
               ? -1
               : 0;
}

static int olmo_core_objects(struct ckpt_dir *dir, const struct ckpt_reader_options *opt,
                             json_t *out, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *at = NULL;

    return ckpt_dir_open_below(dir, WEIGHTS, &at, err) < 0
               ? -1
               : ckpt_dcp_objects(at, opt, NULL, out, err);
}

static int olmo_core_paths(struct ckpt_dir *dir, const struct ckpt_reader_options *opt, json_t *out,
                           struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *at = NULL;

    return ckpt_dir_open_below(dir, WEIGHTS, &at, err) < 0
               ? -1
               : ckpt_reader_dcp.paths(at, opt, out, err);
}

static const char *const markers[] = {MARK, WEIGHTS "/.metadata", NULL};
static const char *const rewrites[] = {MARK, "config.json", WEIGHTS, WEIGHTS "/.metadata", NULL};
static const char *const step_names[] = {"step[0-9]*", NULL};

const struct ckpt_reader ckpt_reader_olmo_core = {
    .name = "olmo_core",
    .markers = markers,
    .rewrites = rewrites,
    .step_names = step_names,
    .probe = olmo_core_probe,
    .container = &ckpt_reader_dcp,
    .has_weights_in = olmo_core_has_weights_in,
    .load = olmo_core_load,
    .objects = olmo_core_objects,
    .paths = olmo_core_paths,
    .finished = olmo_core_finished,
};
