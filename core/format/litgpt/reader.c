/* SPDX-License-Identifier: Apache-2.0 */
/* LitGPT: a folder with the whole model in one file of torch.save and model_config.yaml, which has
 * the numbers of the model.
 *
 *     lit_model.pth            {"model": state dict, "optimizer": ...}, or a state dict alone
 *     lit_model.pth.lora       {"model": the matrices of LoRA}
 *     model_config.yaml        written when the weights are there
 *     hyperparameters.yaml     what the run was given, also the numbers of LoRA
 *
 * Steps are folders step-00000010 (pretraining) and step-000010 (fine-tuning), and final, which a
 * run writes at its end. */
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "base/str.h"
#include "container/config.h"
#include "container/torch_file.h"
#include "format/pieces.h"
#include "format/reader.h"
#include "format/torch/piece.h"

#define WEIGHTS "lit_model.pth"
#define LORA WEIGHTS ".lora"
#define CONFIG "model_config.yaml"
#define RUN_CONFIG "hyperparameters.yaml"
#define LAST "final"

/* The files of weights; the first that is there counts: LitGPT's merge_lora puts the merged model
 * beside its LoRA file. */
static const char *const weights[] = {WEIGHTS, LORA, WEIGHTS ".adapter_v2", WEIGHTS ".adapter"};

static const char *weights_in(const struct ckpt_dir *dir)
{
    for (size_t i = 0; i < sizeof weights / sizeof weights[0]; i++)
        if (ckpt_dir_has_file(dir, weights[i]))
            return weights[i];
    return NULL;
}

static enum ckpt_evidence litgpt_probe(struct ckpt_dir *dir)
{
    if (!weights_in(dir))
        return CKPT_NOT_MINE;
    return ckpt_dir_has_file(dir, CONFIG) ? CKPT_BY_MAGIC : CKPT_BY_NAMES;
}

/* Whoever names the file means its folder, where model_config.yaml is; but beside a merged model a
 * LoRA file is what it is by itself. */
static bool litgpt_has_weights_in(struct ckpt_dir *above, const char *name)
{
    if (!above)
        return ckpt_has_prefix(name, WEIGHTS);
    const char *own = weights_in(above);
    return own && strcmp(own, name) == 0 && ckpt_dir_has_file(above, CONFIG);
}

/* ---- tensors ---- */

struct load {
    struct ckpt_dir *dir;
    const char *file;
    const struct ckpt_reader_options *opt;
    struct ckpt_source *source;
    uint32_t index; /* of the source in the catalogue */
    struct ckpt_rank_pieces pieces;
    struct ckpt_catalog *cat;
};

static void load_release(struct load *l)
{
    ckpt_source_unref(l->source);
    ckpt_rank_pieces_release(&l->pieces);
}

/* The name below the model's own state dict, by which recipes know it; raw views keep the whole. */
static const char *own_name(const struct load *l, const char *name)
{
    static const char model[] = "model.";

    return name + (!l->opt->states && ckpt_has_prefix(name, model) ? strlen(model) : 0);
}

static int add_tensor(void *ctx, size_t i, struct ckpt_err *err)
{
    struct load *l = ctx;
    const struct ckpt_rank_piece *p = &l->pieces.piece.ptr[i];
    ckpt_cleanup(ckpt_pieces_release) struct ckpt_pieces pieces = {0};
    bool gap;

    if (ckpt_pieces_add(&pieces, p->dim, &p->box, l->index, p->off, p->stride, err) < 0 ||
        ckpt_pieces_cover(&pieces, l->cat, p->dim, p->rank, &gap, err) < 0)
        return ckpt_err_in(err, "'%s/%s': tensor '%s'", ckpt_dir_path(l->dir), l->file, p->name);
    return ckpt_pieces_catalog(&pieces, l->cat, own_name(l, p->name), p->dtype, p->dim, p->rank,
                               err);
}

static int read_tensors(struct load *l, struct ckpt_err *err)
{
    if (ckpt_source_file_new(l->dir, l->file, l->opt->pool, &l->source, err) < 0)
        return -1;
    if (ckpt_rank_pieces_read(l->source, 0, &l->pieces, err) < 0)
        return ckpt_err_in(err, "'%s/%s'", ckpt_dir_path(l->dir), l->file);
    if (!l->pieces.piece.len)
        return ckpt_fail(err, CKPT_UNSUPPORTED, "'%s/%s' has no tensors under names",
                         ckpt_dir_path(l->dir), l->file);
    if ((l->index = ckpt_catalog_add_source(l->cat, l->source, err)) == UINT32_MAX)
        return -1;
    if (l->opt->states && l->pieces.states)
        ckpt_catalog_warn(l->cat,
                          "left out: the optimizer's states ('%s' in '%s'): of such files, only "
                          "weights are shown",
                          l->pieces.states, l->file);
    return ckpt_reader_add_each(l->opt, l->cat, l->pieces.piece.len, add_tensor, l, err);
}

/* ---- facts ---- */

/* Note for recipes what the run was given for LoRA: {"r": 8, "alpha": 16, "query": true, ...}. */
static int read_lora(const struct load *l, struct ckpt_err *err)
{
    static const char begin[] = "lora_";
    ckpt_cleanup(ckpt_json_decrefp) json_t *run = NULL;
    json_t *lora = json_object(), *value;
    const char *key;

    if (ckpt_config_read_if(l->dir, RUN_CONFIG, CKPT_CONFIG_MAX_BYTES, &run, err) < 0) {
        json_decref(lora);
        return -1;
    }
    json_object_foreach(run, key, value)
        if (ckpt_has_prefix(key, begin) && !json_is_null(value))
            ckpt_json_set(&lora, key + strlen(begin), json_incref(value));
    const char *base = ckpt_json_str(run, "checkpoint_dir");
    if (base)
        ckpt_json_set(&lora, "base", json_string(base));
    ckpt_json_set(&l->cat->about, "lora", lora);
    return 0;
}

static int describe(const struct load *l, struct ckpt_err *err)
{
    const char *name = l->opt->name;
    unsigned long step;

    if (ckpt_config_read_if(l->dir, CONFIG, CKPT_CONFIG_MAX_BYTES, &l->cat->config, err) < 0)
        return -1;
    if (name && sscanf(name, "step-%9lu", &step) == 1)
        ckpt_json_set(&l->cat->about, "step", json_integer((json_int_t)step));
    ckpt_json_set(&l->cat->about, "format", json_string("litgpt"));
    ckpt_json_set(&l->cat->about, "has_config", json_boolean(l->cat->config != NULL));
    ckpt_json_set(&l->cat->about, "optimizer", json_boolean(l->pieces.states != NULL));
    return strcmp(l->file, LORA) == 0 ? read_lora(l, err) : 0;
}

/* LitGPT's other ways of fine-tuning put prompts and gates into the attention, which no Hugging
 * Face model and no adapter of PEFT has. */
static int check_kind(const struct load *l, struct ckpt_err *err)
{
    if (strcmp(l->file, WEIGHTS) == 0 || strcmp(l->file, LORA) == 0 || l->opt->states)
        return 0;
    return ckpt_fail(err, CKPT_UNSUPPORTED,
                     "'%s/%s' is of LitGPT's adapter fine-tuning, whose prompts and gates no "
                     "Hugging Face model and no PEFT adapter has: only lit_model.pth and "
                     "lit_model.pth.lora are read (view=raw shows the tensors)",
                     ckpt_dir_path(l->dir), l->file);
}

/* ---- the reader ---- */

static int litgpt_load(struct ckpt_dir *dir, const struct ckpt_reader_options *opt,
                       struct ckpt_facts *facts, struct ckpt_catalog *cat, struct ckpt_err *err)
{
    ckpt_cleanup(load_release) struct load l = {
        .dir = dir, .file = weights_in(dir), .opt = opt, .cat = cat};

    if (!l.file)
        return ckpt_fail(err, CKPT_MISSING, "'%s' has no " WEIGHTS, ckpt_dir_path(dir));
    facts->own_names = true;
    facts->has_adapter = strcmp(l.file, LORA) == 0;
    return check_kind(&l, err) < 0 || read_tensors(&l, err) < 0 || describe(&l, err) < 0 ? -1 : 0;
}

static int litgpt_objects(struct ckpt_dir *dir, const struct ckpt_reader_options *opt, json_t *out,
                          struct ckpt_err *err)
{
    const char *file = weights_in(dir);

    return file ? ckpt_torch_objects_of(dir, file, opt->pool, "", out, err) : 0;
}

/* A run that has ended has its last weights in `final`, whatever the steps are called. */
static char *litgpt_latest(struct ckpt_dir *run)
{
    ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *last =
        ckpt_dir_has_dir(run, LAST) ? ckpt_reader_folder(run, LAST) : NULL;

    return last && litgpt_probe(last) == CKPT_BY_MAGIC ? strdup(LAST) : NULL;
}

/* model_config.yaml is copied into the folder when the file of weights is there. */
static bool litgpt_finished(struct ckpt_dir *dir, const char *name, const char *latest)
{
    (void)name;
    (void)latest;
    return ckpt_dir_has_file(dir, CONFIG);
}

static const char *const markers[] = {CONFIG, NULL};
static const char *const rewrites[] = {WEIGHTS, LORA, CONFIG, RUN_CONFIG, NULL};
static const char *const step_names[] = {"step-[0-9]*", LAST, NULL};

const struct ckpt_reader ckpt_reader_litgpt = {
    .name = "litgpt",
    .markers = markers,
    .rewrites = rewrites,
    .step_names = step_names,
    .probe = litgpt_probe,
    .container = &ckpt_reader_rank_files,
    .has_weights_in = litgpt_has_weights_in,
    .load = litgpt_load,
    .objects = litgpt_objects,
    .latest = litgpt_latest,
    .finished = litgpt_finished,
    .side_files = "",
};
