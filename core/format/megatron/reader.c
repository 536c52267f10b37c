/* SPDX-License-Identifier: Apache-2.0 */
/* Checkpoints of Megatron-LM, Megatron-Bridge and NeMo.
 *
 *     layout -> common state -> tensors (format/megatron/load.h) -> the run's own configuration
 *
 * The configuration lies in one of several places: the arguments in the common state, the model
 * part of Bridge's run_config.yaml, NeMo's context/model.yaml or model_config.yaml, verl's
 * huggingface/config.json. */
#include <string.h>

#include "base/str.h"
#include "container/config.h"
#include "container/torch_file.h"
#include "format/dcp/load.h"
#include "format/groups.h"
#include "format/megatron/load.h"
#include "format/reader.h"

#define VERL_WEIGHTS "dist_ckpt" /* the folder of verl's distributed checkpoints */

enum { MAX_TOKENIZER = 128 * 1024 * 1024 };

/* Megatron's own names of the formats. */
static const char *const containers[] = {
    [CKPT_MEGATRON_DIST] = "torch_dist",
    [CKPT_MEGATRON_ZARR] = "zarr",
    [CKPT_MEGATRON_RANKS] = "torch",
    [CKPT_MEGATRON_DCP] = "torch_dcp",
};

struct load {
    struct ckpt_dir *dir, *weights;
    const struct ckpt_reader_options *opt;
    struct ckpt_facts *facts;
    struct ckpt_megatron_layout layout;
    struct ckpt_megatron_state st;
    struct ckpt_catalog *cat;
    json_t *seen; /* places that were searched for a configuration */
};

static void load_release(struct load *l)
{
    ckpt_dir_unref(l->weights);
    ckpt_megatron_state_release(&l->st);
    json_decref(l->seen);
}

/* ---- tensors ---- */

static int refuse(const struct load *l, struct ckpt_err *err)
{
    return ckpt_fail(err, CKPT_UNSUPPORTED,
                     "'%s/metadata.json' names a back end that is neither torch_dist nor zarr",
                     ckpt_dir_path(l->weights));
}

static int read_common(struct load *l, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_source_unrefp) struct ckpt_source *s = NULL;

    if (!ckpt_dir_has_file(l->weights, "common.pt"))
        return 0;
    if (ckpt_source_file_new(l->weights, "common.pt", l->opt->pool, &s, err) < 0)
        return -1;
    return ckpt_megatron_state_read(&l->st, s, err) < 0
               ? ckpt_err_in(err, "'%s/common.pt'", ckpt_dir_path(l->weights))
               : 0;
}

static int read_weights(struct load *l, struct ckpt_err *err)
{
    if (l->layout.format == CKPT_MEGATRON_UNFINISHED) {
        if (ckpt_megatron_unmarked(l->weights, l->opt, l->cat, err) < 0)
            return -1;
        l->layout.format = CKPT_MEGATRON_DIST;
    }
    switch (l->layout.format) {
    case CKPT_MEGATRON_DIST:
    case CKPT_MEGATRON_DCP:
        return ckpt_megatron_load_dcp(l->weights, l->opt, l->layout.format == CKPT_MEGATRON_DIST,
                                      &l->st, l->cat, err);
    case CKPT_MEGATRON_ZARR:
        return ckpt_megatron_load_zarr(l->weights, l->opt, &l->st, l->cat, err);
    case CKPT_MEGATRON_RANKS:
        return ckpt_megatron_load_ranks(l->weights, l->opt, &l->st, l->cat, err);
    default:
        return refuse(l, err);
    }
}

/* verl's optimizer is in a directory of its own. */
static int read_states(struct load *l, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *at = NULL;

    if (!l->opt->states)
        return 0;
    if (ckpt_megatron_beside(l->dir, &l->layout, "optimizer", &at, err) < 0)
        return -1;
    return at && ckpt_megatron_load_states(at, l->opt, l->cat, err) < 0
               ? -1
               : ckpt_states_label(l->cat, ckpt_megatron_state_parse, err);
}

/* Refuse weights that are not the model's values, and find out whether an adapter is among them. */
static int check_tensors(const struct load *l, struct ckpt_err *err)
{
    for (size_t i = 0; i < l->cat->tensors.len; i++) {
        const struct ckpt_tensor *t = &l->cat->tensors.ptr[i];
        const bool own = strstr(t->name, ".adapter.") != NULL;
        l->facts->has_adapter |= own;
        if (!l->opt->states &&
            (ckpt_megatron_is_wrapped(t->name) || (own && l->layout.format == CKPT_MEGATRON_RANKS)))
            return ckpt_fail(err, CKPT_UNSUPPORTED,
                             "'%s' holds an adapter of another kind than Megatron-Bridge's "
                             "torch_dist ('%s'): merge it into its model with the tool that "
                             "trained it (view=raw shows the tensors)",
                             ckpt_dir_path(l->weights), t->name);
        if (t->dtype == CKPT_F8_E4M3 || t->dtype == CKPT_F8_E5M2)
            return ckpt_fail(
                err, CKPT_UNSUPPORTED,
                "'%s': tensor '%s' is stored in fp8 (%s), whose scales are not supported",
                ckpt_dir_path(l->weights), t->name, ckpt_dtype_name(t->dtype));
    }
    if (l->cat->tensors.len == 0)
        return ckpt_fail(err, CKPT_MISSING, "'%s' holds no tensor of a model",
                         ckpt_dir_path(l->weights));
    return 0;
}

/* ---- the run's configuration ---- */

static void about(struct load *l, const char *key, json_t *value)
{
    ckpt_json_set(&l->cat->about, key, value);
}

/* The part of a "_target_" after the last dot. */
static const char *class_of(const json_t *config)
{
    const char *target = ckpt_json_str(config, "_target_"),
               *dot = target ? strrchr(target, '.') : NULL;

    return dot ? dot + 1 : target;
}

/* Read a configuration file, if it exists, and take its member `part` or the whole object. */
static int try_file(struct load *l, const char *file, const char *part, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *whole = NULL;

    if (l->cat->config)
        return 0;
    if (json_array_append_new(l->seen, json_string(file)) < 0)
        return ckpt_nomem(err);
    if (ckpt_config_read_if(l->dir, file, CKPT_CONFIG_MAX_BYTES, &whole, err) < 0)
        return -1;
    const json_t *peft = json_object_get(whole, "peft");
    if (json_is_object(peft)) /* what Bridge's run says of its adapter, for recipes */
        about(l, "lora",
              json_pack("{s:s*, s:O*, s:O*, s:O*}", "class", class_of(peft), "dim",
                        json_object_get(peft, "dim"), "alpha", json_object_get(peft, "alpha"),
                        "dropout", json_object_get(peft, "dropout")));
    json_t *config = json_object_get(whole, part);
    if (!config)
        config = whole; /* in NeMo 1 it is the whole file, or below "model" */
    if (!json_is_object(config))
        return 0;
    /* the model part of Bridge is the model's class; NeMo's model has the config as a member */
    const char *class = class_of(class_of(config) && strcmp(part, "model") == 0 ? config : whole);
    const char *id = ckpt_json_str(config, "hf_model_id");
    if (!id)
        id = ckpt_json_str(json_object_get(config, "extra_checkpoint_metadata"), "hf_model_id");
    if (class)
        about(l, "model_class", json_string(class));
    about(l, "config_from", json_string(file));
    if (id)
        about(l, "model_id", json_string(id));
    l->cat->config = json_incref(config);
    return 0;
}

static int read_config(struct load *l, struct ckpt_err *err)
{
    const char *from = l->layout.format == CKPT_MEGATRON_RANKS ? "args of the ranks' files"
                       : l->layout.format == CKPT_MEGATRON_DCP ? "args"
                                                               : "args of the common state";

    if (!(l->seen = json_array()) || json_array_append_new(l->seen, json_string(from)) < 0)
        return ckpt_nomem(err);
    if (json_object_size(l->st.args) > 0) {
        l->cat->config = json_incref(l->st.args);
        about(l, "config_from", json_string(from));
    }
    if (try_file(l, "run_config.yaml", "model", err) < 0 ||
        try_file(l, "context/model.yaml", "config", err) < 0 ||
        try_file(l, "model_config.yaml", "model", err) < 0)
        return -1;
    about(l, "config_looked_for", json_incref(l->seen));
    return 0;
}

/* ---- facts ---- */

static void see_id(const json_t *id, uint64_t *size)
{
    if (json_is_integer(id) && json_integer_value(id) >= 0 &&
        (uint64_t)json_integer_value(id) >= *size)
        *size = (uint64_t)json_integer_value(id) + 1;
}

/* The number of ids in a tokenizer.json; 0: it does not say. */
static uint64_t count_ids(const json_t *tokenizer)
{
    const json_t *vocab = ckpt_json_at(tokenizer, "model.vocab"), *v;
    uint64_t size = json_is_array(vocab) ? json_array_size(vocab) : 0;
    const char *word;
    size_t i;

    json_object_foreach((json_t *)vocab, word, v) {
        see_id(v, &size);
    }
    json_array_foreach(json_object_get(tokenizer, "added_tokens"), i, v) {
        see_id(json_object_get(v, "id"), &size);
    }
    return size;
}

/* Read the tokenizer, which gives the number of rows of the embedding that are not padding if no
 * file says it. */
static int read_tokenizer(struct load *l, const char *below, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *file = ckpt_asprintf("%s/tokenizer.json", below);
    ckpt_cleanup(ckpt_json_decrefp) json_t *tokenizer = NULL;
    uint64_t size;

    if (!file)
        return ckpt_nomem(err);
    if (ckpt_json_u64(l->cat->config, "vocab_size", &size))
        return 0;
    if (ckpt_config_read_if(l->dir, file, MAX_TOKENIZER, &tokenizer, err) < 0)
        return -1;
    size = count_ids(tokenizer);
    if (size)
        about(l, "tokenizer_size", json_integer((json_int_t)size));
    return 0;
}

static const char *side_files(const struct load *l)
{
    static const char *const places[] = {"tokenizer", "context/nemo_tokenizer", "context"};

    for (size_t i = 0; i < sizeof places / sizeof places[0]; i++)
        if (ckpt_dir_has_dir(l->dir, places[i]))
            return places[i];
    return NULL;
}

/* The parallel layout of the run that saved it, as far as its arguments say. */
static void about_layout(struct load *l)
{
    static const char *const keys[][2] = {
        {"tp", "tensor_model_parallel_size"}, {"pp", "pipeline_model_parallel_size"},
        {"ep", "expert_model_parallel_size"}, {"cp", "context_parallel_size"},
        {"dp", "data_parallel_size"},         {"ranks", "world_size"}};

    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        const uint64_t n = ckpt_megatron_state_size(&l->st, keys[i][1]);
        if (n)
            about(l, keys[i][0], json_integer((json_int_t)n));
    }
}

static int describe(struct load *l, struct ckpt_err *err)
{
    const char *sides = side_files(l);

    about(l, "format", json_string("megatron"));
    about(l, "container", json_string(containers[l->layout.format]));
    if (l->st.has_iteration)
        about(l, "step", json_integer((json_int_t)l->st.iteration));
    if (l->st.has_version)
        about(l, "checkpoint_version", json_real(l->st.version));
    about_layout(l);
    if (!sides)
        return 0;
    l->facts->files = CKPT_FILES_CONFIG;
    l->facts->files_at = sides;
    return read_tokenizer(l, sides, err);
}

static int megatron_load(struct ckpt_dir *dir, const struct ckpt_reader_options *opt,
                         struct ckpt_facts *facts, struct ckpt_catalog *cat, struct ckpt_err *err)
{
    ckpt_cleanup(load_release) struct load l = {.dir = dir, .opt = opt, .facts = facts, .cat = cat};

    l.layout = ckpt_megatron_layout_of(dir);
    return ckpt_dir_open_below(dir, *l.layout.below ? l.layout.below : ".", &l.weights, err) < 0 ||
                   read_common(&l, err) < 0 || read_weights(&l, err) < 0 ||
                   read_states(&l, err) < 0 || check_tensors(&l, err) < 0 ||
                   read_config(&l, err) < 0 || describe(&l, err) < 0
               ? -1
               : 0;
}

/* verl can export the model as Hugging Face's into the same save, and its distributed checkpoint
 * then has the model again, or the optimizer only: that model is shown. */
static bool is_exported(struct ckpt_dir *dir, const char *below)
{
    ckpt_cleanup(ckpt_freep) char *folder =
        ckpt_has_suffix(below, VERL_WEIGHTS)
            ? ckpt_asprintf("%.*shuggingface", (int)(strlen(below) - strlen(VERL_WEIGHTS)), below)
            : NULL;
    ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *model =
        folder ? ckpt_reader_folder(dir, folder) : NULL;

    return model && ckpt_reader_hf.probe(model) != CKPT_NOT_MINE;
}

static enum ckpt_evidence megatron_probe(struct ckpt_dir *dir)
{
    const struct ckpt_megatron_layout layout = ckpt_megatron_layout_of(dir);

    return layout.format == CKPT_MEGATRON_NONE || is_exported(dir, layout.below) ? CKPT_NOT_MINE
                                                                                 : CKPT_BY_MAGIC;
}

/* NeMo's folder of weights, and verl's. */
static bool megatron_has_weights_in(struct ckpt_dir *above, const char *name)
{
    if (!above)
        return strcmp(name, "weights") == 0 || strcmp(name, VERL_WEIGHTS) == 0;
    return strcmp(ckpt_megatron_layout_of(above).below, name) == 0 &&
           megatron_probe(above) != CKPT_NOT_MINE;
}

/* ---- objects ---- */

#define COMMON "common.pt"

static int add_first_rank(struct ckpt_dir *dir, const struct ckpt_reader_options *opt, json_t *out,
                          struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *folder = NULL;

    if (ckpt_reader_first(dir, true, "mp_rank_", "", &folder, err) < 0)
        return -1;
    for (size_t i = 0; folder && ckpt_megatron_rank_files[i]; i++) {
        ckpt_cleanup(ckpt_freep) char *path =
            ckpt_asprintf("%s/%s", folder, ckpt_megatron_rank_files[i]);
        if (!path)
            return ckpt_nomem(err);
        if (ckpt_dir_has_file(dir, path))
            return ckpt_torch_objects_of(dir, path, opt->pool, "", out, err);
    }
    return 0;
}

/* The values beside the tensors in a directory: in the metadata, if that is DCP's, and in
 * common.pt. */
static int add_dist(struct ckpt_dir *at, const struct ckpt_reader_options *opt, bool is_dcp,
                    json_t *out, struct ckpt_err *err)
{
    if (is_dcp && ckpt_dcp_objects(at, opt, ckpt_megatron_common_state, out, err) < 0)
        return -1;
    return ckpt_dir_has_file(at, COMMON)
               ? ckpt_torch_objects_of(at, COMMON, opt->pool, "", out, err)
               : 0;
}

static int add_beside(struct ckpt_dir *dir, const struct ckpt_megatron_layout *layout,
                      const char *part, const struct ckpt_reader_options *opt, json_t *out,
                      struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *at = NULL;

    if (ckpt_megatron_beside(dir, layout, part, &at, err) < 0)
        return -1;
    return at ? add_dist(at, opt, true, out, err) : 0;
}

/* The values besides tensors in the directory of the weights, and in those of verl's other parts.
 */
static int megatron_objects(struct ckpt_dir *dir, const struct ckpt_reader_options *opt,
                            json_t *out, struct ckpt_err *err)
{
    const struct ckpt_megatron_layout layout = ckpt_megatron_layout_of(dir);
    ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *at = NULL;

    if (ckpt_dir_open_below(dir, *layout.below ? layout.below : ".", &at, err) < 0)
        return -1;
    if (layout.format == CKPT_MEGATRON_RANKS)
        return add_first_rank(at, opt, out, err);
    if (layout.format == CKPT_MEGATRON_ZARR)
        return add_dist(at, opt, false, out, err);
    return add_dist(at, opt, true, out, err) < 0 ||
                   add_beside(dir, &layout, "optimizer", opt, out, err) < 0 ||
                   add_beside(dir, &layout, "extra", opt, out, err) < 0
               ? -1
               : 0;
}

/* Say which parameters a group has: without weight decay are, if nothing else was configured, those
 * of one dimension and the biases. */
static int say_vectors(json_t *groups, struct ckpt_err *err)
{
    json_t *group;
    size_t i;

    json_array_foreach(groups, i, group) {
        const json_t *mult = json_object_get(group, "wd_mult");
        if (mult &&
            json_object_set_new(group, "vectors", json_boolean(json_number_value(mult) == 0)) < 0)
            return ckpt_nomem(err);
        (void)json_object_del(group, "wd_mult");
    }
    return 0;
}

static int megatron_groups(struct ckpt_dir *dir, const struct ckpt_reader_options *opt,
                           const json_t *objects, json_t *out, struct ckpt_err *err)
{
    const struct ckpt_megatron_layout layout = ckpt_megatron_layout_of(dir);
    ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *at = NULL;

    if (ckpt_dir_open_below(dir, *layout.below ? layout.below : ".", &at, err) < 0)
        return -1;
    if (ckpt_dir_has_file(at, COMMON) && ckpt_groups_of_file(at, COMMON, opt->pool, out, err) < 0)
        return -1;
    if (json_array_size(out) == 0 && ckpt_groups_of_torch(objects, out, err) < 0)
        return -1;
    return say_vectors(out, err);
}

/* ---- folders of steps ---- */

static char *megatron_latest(struct ckpt_dir *run)
{
    char *latest = ckpt_tracker_latest(run, CKPT_TRACKER_ITER);

    return latest ? latest : ckpt_tracker_latest(run, CKPT_TRACKER_GLOBAL_STEP);
}

/* The format with one file per rank has no marker, and verl writes more files after the marker. The
 * tracker is written after the last of these files, so a step with a higher number may be
 * unfinished. */
static bool megatron_finished(struct ckpt_dir *dir, const char *name, const char *latest)
{
    enum ckpt_megatron_format format = ckpt_megatron_layout_of(dir).format;

    if (format == CKPT_MEGATRON_UNFINISHED ||
        ckpt_tracker_is_newer(name, latest, CKPT_TRACKER_GLOBAL_STEP))
        return false;
    return format != CKPT_MEGATRON_RANKS || !ckpt_tracker_is_newer(name, latest, CKPT_TRACKER_ITER);
}

/* The back end "torch", with one file per rank, has none. */
static const char *const markers[] = {"metadata.json",
                                      "weights/metadata.json",
                                      "model_weights/metadata.json",
                                      "dist_ckpt/metadata.json",
                                      "model/dist_ckpt/metadata.json",
                                      ".metadata",
                                      "weights/.metadata",
                                      NULL};
static const char *const rewrites[] = {"metadata.json",
                                       "common.pt",
                                       "run_config.yaml",
                                       "mp_rank_00/model_optim_rng.pt",
                                       "mp_rank_00_000/model_optim_rng.pt",
                                       "mp_rank_00_000_000/model_optim_rng.pt",
                                       "weights/metadata.json",
                                       "model_weights/metadata.json",
                                       "dist_ckpt/metadata.json",
                                       "model/dist_ckpt/metadata.json",
                                       NULL};
static const char *const step_names[] = {"iter_*", NULL};

const struct ckpt_reader ckpt_reader_megatron = {
    .name = "megatron",
    .markers = markers,
    .rewrites = rewrites,
    .step_names = step_names,
    .probe = megatron_probe,
    .container = &ckpt_reader_dcp,
    .has_weights_in = megatron_has_weights_in,
    .load = megatron_load,
    .objects = megatron_objects,
    .groups = megatron_groups,
    .latest = megatron_latest,
    .finished = megatron_finished,
};
