/* SPDX-License-Identifier: Apache-2.0 */
/* A PEFT adapter: adapter_model.safetensors or adapter_model.bin with adapter_config.json, as
 * written by PeftModel.save_pretrained, in a trainer's checkpoint-N, or in model/ of a step
 * of NeMo Automodel. The view shows the same directory, with the weights in safetensors. */
#include <string.h>

#include "base/mem.h"
#include "container/safetensors.h"
#include "container/st_metadata.h"
#include "format/pieces.h"
#include "format/reader.h"
#include "format/torch/piece.h"
#include "format/trainer.h"

#define CONFIG "adapter_config.json"
#define WEIGHTS "adapter_model.safetensors"
#define OLD_WEIGHTS "adapter_model.bin"

static bool has_both(struct ckpt_dir *dir, const char *config, const char *weights)
{
    return ckpt_dir_has_file(dir, config) && ckpt_dir_has_file(dir, weights);
}

/* Files that show that a model's own weights are there; the last two are torchtune's. */
static const char *const models[] = {"model.safetensors", "model.safetensors.index.json",
                                     "pytorch_model.bin.index.json", "hf_model_0001_0.pt",
                                     "hf_model_0001_0.safetensors"};

/* Find the folder of the adapter; NULL: there is none. A model with an adapter beside its own
 * weights is a model. */
static const char *find(struct ckpt_dir *dir)
{
    for (size_t i = 0; i < sizeof models / sizeof models[0]; i++)
        if (ckpt_dir_has_file(dir, models[i]))
            return NULL;
    if (has_both(dir, CONFIG, WEIGHTS) || has_both(dir, CONFIG, OLD_WEIGHTS))
        return "";
    return has_both(dir, "model/" CONFIG, "model/" WEIGHTS) ? "model" : NULL;
}

static int load_safetensors(struct ckpt_source *source, struct ckpt_catalog *cat,
                            struct ckpt_facts *facts, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_st_release) struct ckpt_st st = {0};
    size_t size = 0;
    bool kept;

    if (ckpt_st_read(source, &st, err) < 0)
        return -1;
    uint32_t at = ckpt_catalog_add_source(cat, source, err);
    if (at == UINT32_MAX)
        return -1;
    for (size_t i = 0; i < st.ntensor; i++)
        if (ckpt_st_catalog(&st.tensor[i], at, cat, err) < 0)
            return -1;
    facts->bare_header = !st.has_metadata;
    if (ckpt_st_metadata_keep(&facts->metadata, &size, WEIGHTS, &st, &kept, err) < 0)
        return -1;
    if (!kept)
        ckpt_catalog_warn(cat,
                          "'" WEIGHTS "': its __metadata__ is left out: at most %d MiB are kept",
                          CKPT_ST_MAX_KEPT >> 20);
    return 0;
}

static int add_tensor(const struct ckpt_rank_piece *p, uint32_t source, struct ckpt_catalog *cat,
                      struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_pieces_release) struct ckpt_pieces pieces = {0};

    if (memcmp(p->box.n, p->dim, p->rank * sizeof *p->dim) != 0)
        return ckpt_fail(err, CKPT_MISSING, "'%s' holds only a part of the tensor", p->name);
    return ckpt_pieces_add(&pieces, p->dim, &p->box, source, p->off, p->stride, err) < 0
               ? -1
               : ckpt_pieces_catalog(&pieces, cat, p->name, p->dtype, p->dim, p->rank, err);
}

static int load_torch(struct ckpt_source *source, struct ckpt_catalog *cat, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_rank_pieces_release) struct ckpt_rank_pieces pieces = {0};

    if (ckpt_rank_pieces_read(source, 0, &pieces, err) < 0)
        return -1;
    uint32_t at = ckpt_catalog_add_source(cat, source, err);
    if (at == UINT32_MAX)
        return -1;
    for (size_t i = 0; i < pieces.piece.len; i++)
        if (add_tensor(&pieces.piece.ptr[i], at, cat, err) < 0)
            return -1;
    return 0;
}

static int peft_load(struct ckpt_dir *dir, const struct ckpt_reader_options *opt,
                     struct ckpt_facts *facts, struct ckpt_catalog *cat, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_source_unrefp) struct ckpt_source *source = NULL;

    if (!(facts->files_at = find(dir)))
        return ckpt_fail(err, CKPT_MISSING, "'%s' has no " CONFIG " with " WEIGHTS,
                         ckpt_dir_path(dir));
    const bool inner = *facts->files_at, old = !inner && !ckpt_dir_has_file(dir, WEIGHTS);
    const char *path = inner ? "model/" WEIGHTS : old ? OLD_WEIGHTS : WEIGHTS;
    if (ckpt_source_file_new(dir, path, opt->pool, &source, err) < 0)
        return -1;
    if ((old ? load_torch(source, cat, err) : load_safetensors(source, cat, facts, err)) < 0)
        return ckpt_err_in(err, "'%s/%s'", ckpt_dir_path(dir), path);
    facts->names = CKPT_NAMES_HUB;
    facts->is_adapter = true;
    facts->files = CKPT_FILES_COMPLETE;
    ckpt_json_set(&cat->about, "format", json_string("peft"));
    ckpt_trainers_describe(dir, opt->name, cat);
    return ckpt_facts_map_all(facts, cat, WEIGHTS, err);
}

static enum ckpt_evidence peft_probe(struct ckpt_dir *dir)
{
    return find(dir) ? CKPT_BY_NAMES : CKPT_NOT_MINE;
}

const struct ckpt_reader ckpt_reader_peft = {
    .name = "peft",
    .is_published = true,
    .probe = peft_probe,
    .load = peft_load,
    .latest = ckpt_trainers_latest,
    .finished = ckpt_trainers_finished,
};
