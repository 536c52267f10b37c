/* SPDX-License-Identifier: Apache-2.0 */
/* A Hugging Face model directory: config.json beside model.safetensors, or beside shards and their
 * index.
 *
 * The files are found as transformers and diffusers find them (weights.h). The checkpoint consists
 * of the tensors in the index, whose weight_map is kept, so that a view has the same split as the
 * directory. */

#include "format/reader.h"

#include <string.h>

#include "base/par.h"
#include "container/config.h"
#include "container/safetensors.h"
#include "container/st_metadata.h"
#include "format/huggingface/weights.h"

struct file {
    const char *name; /* borrowed from the map */
    struct ckpt_source *source;
    struct ckpt_st st;
};

struct load {
    struct ckpt_dir *dir;
    const struct ckpt_reader_options *opt;
    struct ckpt_facts *facts;
    struct ckpt_hf_weights weights; /* the names of its files */
    struct ckpt_weight_map *map;    /* or NULL: one file */
    CKPT_VEC(struct file) files;
    json_t *metadata; /* that the files have; or NULL */
    size_t metadata_size;
    struct ckpt_catalog *cat;
};

static void load_release(struct load *l)
{
    for (size_t i = 0; i < l->files.len; i++) {
        ckpt_source_unref(l->files.ptr[i].source);
        ckpt_st_release(&l->files.ptr[i].st);
    }
    ckpt_vec_release(&l->files);
    ckpt_hf_weights_release(&l->weights);
    ckpt_weight_map_unref(l->map);
    json_decref(l->metadata);
}

/* ---- which files ---- */

static int add_file(struct load *l, const char *name, struct ckpt_err *err)
{
    return ckpt_vec_push(&l->files, ((struct file){.name = name})) < 0 ? ckpt_nomem(err) : 0;
}

static int find_files(struct load *l, struct ckpt_err *err)
{
    struct ckpt_hf_weights *w = &l->weights;

    if (ckpt_hf_weights_find(l->dir, l->opt->variant, w, err) < 0)
        return -1;
    if (w->variant && !l->opt->variant)
        ckpt_catalog_note(l->cat, "the weights are those of variant '%s', the only one there is",
                          w->variant);
    if (w->single || !w->stem) /* a file that is gone since the probe is MISSING when it is read */
        return add_file(l, w->single ? w->single : "model.safetensors", err);
    for (size_t i = 0; i < w->shard.len; i++)
        if (add_file(l, w->shard.ptr[i], err) < 0)
            return -1;
    if (!w->index)
        return 0;
    if (ckpt_weight_map_read(l->dir, w->index, ckpt_reader_refuse_index, &l->map, err) < 0)
        return -1;
    for (size_t i = 0; i < l->map->files.len; i++)
        if (add_file(l, l->map->files.ptr[i], err) < 0)
            return -1;
    return 0;
}

static int read_one(void *ctx, size_t i, struct ckpt_err *err)
{
    struct load *l = ctx;
    struct file *f = &l->files.ptr[i];

    if (ckpt_source_file_new(l->dir, f->name, l->opt->pool, &f->source, err) < 0)
        return -1;
    f->st.keep_unknown = true;
    return ckpt_st_read(f->source, &f->st, err);
}

/* ---- tensors ---- */

static int keep_metadata(struct load *l, const struct file *f, struct ckpt_err *err)
{
    bool kept;

    if (ckpt_st_metadata_keep(&l->metadata, &l->metadata_size, f->name, &f->st, &kept, err) < 0)
        return -1;
    if (!kept)
        ckpt_catalog_warn(
            l->cat, "'%s': its __metadata__ is left out: at most %d MiB are kept of all files",
            f->name, CKPT_ST_MAX_KEPT >> 20);
    return 0;
}

static bool is_mapped_to(const struct ckpt_weight_map *map, const char *tensor, const char *file)
{
    const uint32_t found = ckpt_weight_map_find(map, tensor);

    return found != CKPT_NONE && strcmp(map->files.ptr[found], file) == 0;
}

/* Make the index that shards without one lack. */
static int map_shards(struct load *l, struct ckpt_err *err)
{
    ckpt_catalog_note(l->cat, "the %zu shards have no index, and their names %s", l->files.len,
                      l->weights.nshard ? "say that they are all"
                                        : "do not say how many there are");
    if (ckpt_weight_map_new(&l->map, err) < 0)
        return -1;
    for (size_t i = 0; i < l->files.len; i++)
        for (size_t k = 0; k < l->files.ptr[i].st.ntensor; k++) {
            const char *name = l->files.ptr[i].st.tensor[k].name;
            const uint32_t other = ckpt_weight_map_find(l->map, name);
            if (other != CKPT_NONE)
                return ckpt_fail(
                    err, CKPT_CONFLICT,
                    "'%s': tensor '%s' is in '%s' and in '%s', and no index says which "
                    "counts",
                    ckpt_dir_path(l->dir), name, l->map->files.ptr[other], l->files.ptr[i].name);
            if (ckpt_weight_map_put(l->map, name, l->files.ptr[i].name, err) < 0)
                return -1;
        }
    return 0;
}

static int add_tensors(struct load *l, struct file *f, struct ckpt_err *err)
{
    uint32_t source = ckpt_catalog_add_source(l->cat, f->source, err);

    if (source == UINT32_MAX || keep_metadata(l, f, err) < 0)
        return -1;
    for (size_t i = 0; i < f->st.ntensor; i++) {
        const struct ckpt_st_tensor *t = &f->st.tensor[i];
        /* a tensor that the index gives to another file, or to none, is not part of the model */
        if (l->map && !is_mapped_to(l->map, t->name, f->name)) {
            ckpt_catalog_warn(l->cat, "'%s' is in '%s', but the index does not say so: left out",
                              t->name, f->name);
            continue;
        }
        if (t->opaque)
            ckpt_catalog_warn(l->cat,
                              "'%s' in '%s' has dtype '%s', which is not known: it can be copied, "
                              "and not be read",
                              t->name, f->name, t->opaque);
        if (ckpt_st_catalog(t, source, l->cat, err) < 0)
            return ckpt_err_in(err, "'%s/%s'", ckpt_dir_path(l->dir), f->name);
    }
    ckpt_st_release(&f->st);
    return 0;
}

static int describe(struct load *l, struct ckpt_err *err)
{
    ckpt_json_set(&l->cat->about, "format", json_string("hf"));
    *l->facts = (struct ckpt_facts){.names = CKPT_NAMES_HUB,
                                    .is_hub_dir = true,
                                    .files = CKPT_FILES_ALL,
                                    .files_at = "",
                                    .metadata = ckpt_steal(&l->metadata),
                                    .weight_map = ckpt_weight_map_ref(l->map)};
    if (!l->weights.stem || strcmp(l->weights.stem, "diffusion_pytorch_model") != 0)
        return 0;
    l->facts->index_name = "diffusion_pytorch_model.safetensors.index.json";
    return l->map
               ? 0
               : ckpt_facts_map_all(l->facts, l->cat, "diffusion_pytorch_model.safetensors", err);
}

static int hf_load(struct ckpt_dir *dir, const struct ckpt_reader_options *opt,
                   struct ckpt_facts *facts, struct ckpt_catalog *cat, struct ckpt_err *err)
{
    ckpt_cleanup(load_release) struct load l = {.dir = dir, .opt = opt, .facts = facts, .cat = cat};
    size_t ntensor = 0;

    if (find_files(&l, err) < 0)
        return -1;
    if (ckpt_dir_has_file(dir, "config.json") &&
        ckpt_config_read(dir, "config.json", CKPT_CONFIG_MAX_BYTES, &cat->config, err) < 0)
        return -1;
    if (ckpt_parallel(l.files.len, 0, read_one, &l, err) < 0)
        return -1;
    if (l.weights.shard.len && map_shards(&l, err) < 0)
        return -1;
    for (size_t i = 0; i < l.files.len; i++)
        ntensor += l.files.ptr[i].st.ntensor;
    if (ckpt_catalog_reserve(cat, ntensor, err) < 0)
        return -1;
    for (size_t i = 0; i < l.files.len; i++)
        if (add_tensors(&l, &l.files.ptr[i], err) < 0)
            return -1;
    /* the tensors of the catalogue are those of the map: equal numbers leave none to look for */
    if (l.map && cat->tensors.len < l.map->tensors.len &&
        ckpt_reader_check_map(l.map, l.weights.index, dir, opt, cat, err) < 0)
        return -1;
    return describe(&l, err);
}

static const char *const markers[] = {"model.safetensors.index.json",
                                      "pytorch_model.bin.index.json", NULL};
static const char *const rewrites[] = {"config.json", "model.safetensors",
                                       "model.safetensors.index.json", NULL};

/* transformers' Trainer and accelerate give these names to what they put beside a model. */
static const char *const step_names[] = {"checkpoint[-_]*", NULL};
static const char *const state_files[] = {"trainer_state.json", "training_args.bin",
                                          "optimizer*.pt",      "optimizer*.bin",
                                          "scheduler*.pt",      NULL};
static const char *const states[] = {"training_args.", "optimizer",     "scheduler",
                                     "scaler",         "sampler",       "rng_state",
                                     "random_states",  "dl_state_dict", NULL};

const struct ckpt_reader ckpt_reader_hf = {
    .name = "hf",
    .markers = markers,
    .rewrites = rewrites,
    .step_names = step_names,
    .state_files = state_files,
    .states = states,
    .has_variants = true,
    .is_published = true,
    .probe = ckpt_hf_weights_probe,
    .guess = ckpt_hf_weights_guess,
    .load = hf_load,
};
