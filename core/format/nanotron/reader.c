/* SPDX-License-Identifier: Apache-2.0 */
/* nanotron: one safetensors file per parameter and shard, below model/; there is no manifest, so
 * the directory is scanned, and whether the checkpoint is complete follows from the coverage of its
 * tensors.
 *
 *     shards (format/nanotron/shards.h), of one topology -> pieces -> coverage */
#include <string.h>

#include "base/mem.h"
#include "base/str.h"
#include "container/config.h"
#include "container/torch_file.h"
#include "format/nanotron/shards.h"
#include "format/pieces.h"

struct load {
    struct ckpt_dir *dir;
    struct ckpt_nt_shards set;
    json_t *meta;   /* checkpoint_metadata.json, or NULL */
    json_t *config; /* config.yaml, or NULL */
    struct ckpt_catalog *cat;
};

static void load_release(struct load *l)
{
    ckpt_nt_shards_release(&l->set);
    json_decref(l->meta);
    json_decref(l->config);
}

/* ---- tensors ---- */

/* The tensor-parallel rank whose file is missing, or the size of the group if none is. Only for
 * names without an expert rank, because others need not be a full set. */
static uint32_t missing_rank(const struct ckpt_nt_shard *s, size_t n)
{
    uint32_t rank = 0;

    for (size_t i = 0; i < n; i++) {
        if (s[i].name.has_ep || !s[i].name.sharded)
            return s[i].name.tp.size;
        if (s[i].name.tp.rank == rank)
            rank++;
    }
    return rank;
}

static int fail_gap(const struct load *l, const struct ckpt_nt_param *p, struct ckpt_err *err)
{
    const struct ckpt_nt_shard *s = &l->set.shards.ptr[p->first];
    const char *dir = ckpt_dir_path(ckpt_nt_shard_dir(&l->set, s));
    uint32_t rank = missing_rank(s, p->n);

    if (rank < s->name.tp.size)
        return ckpt_err_in(
            err, "'%s': the shard of tp-rank-%u-of-%u, beside '%s', is missing: parameter '%s'",
            dir, rank, s->name.tp.size, s->file, p->name);
    return ckpt_err_in(err, "'%s': parameter '%s' (%zu files)", dir, p->name, p->n);
}

static int check_agreement(const struct load *l, const struct ckpt_nt_param *p,
                           struct ckpt_err *err)
{
    const struct ckpt_nt_shard *a = &l->set.shards.ptr[p->first];

    for (size_t i = 1; i < p->n; i++) {
        const struct ckpt_nt_shard *b = &a[i];
        if (strcmp(a->version, b->version) != 0)
            return ckpt_fail(err, CKPT_CONFLICT,
                             "parameter '%s': '%s' was written by version '%s', '%s' by '%s'",
                             p->name, a->file, a->version, b->file, b->version);
        if (a->dtype == b->dtype && a->rank == b->rank &&
            memcmp(a->dim, b->dim, a->rank * sizeof *a->dim) == 0)
            continue;
        return ckpt_fail(err, CKPT_CONFLICT, "parameter '%s': '%s' says %s %s, '%s' says %s %s",
                         p->name, a->file, ckpt_dtype_name(a->dtype),
                         ckpt_shape_text(a->dim, a->rank).text, b->file, ckpt_dtype_name(b->dtype),
                         ckpt_shape_text(b->dim, b->rank).text);
    }
    return 0;
}

static int collect_pieces(struct load *l, const struct ckpt_nt_param *p, struct ckpt_pieces *out,
                          struct ckpt_err *err)
{
    for (size_t i = 0; i < p->n; i++) {
        const struct ckpt_nt_shard *s = &l->set.shards.ptr[p->first + i];
        const struct ckpt_box own = ckpt_box_whole(s->local_dim, s->rank);
        const uint32_t source = ckpt_catalog_add_source(l->cat, s->source, err);
        uint64_t stride[CKPT_MAX_RANK];
        if (source == UINT32_MAX)
            return -1;
        ckpt_box_strides(&own, ckpt_dtype_size(s->dtype), stride);
        for (size_t k = 0; k < s->npair; k++)
            if (ckpt_pieces_add_part(out, s->dim, &s->pair[k], s->local_dim, 0, UINT64_MAX, source,
                                     s->off, stride, err) < 0)
                return -1;
    }
    return 0;
}

static int add_tensor(void *ctx, size_t i, struct ckpt_err *err)
{
    struct load *l = ctx;
    const struct ckpt_nt_param *p = &l->set.params.ptr[i];
    ckpt_cleanup(ckpt_pieces_release) struct ckpt_pieces pieces = {0};
    const struct ckpt_nt_shard *s = &l->set.shards.ptr[p->first];
    bool gap;

    if (check_agreement(l, p, err) < 0 || collect_pieces(l, p, &pieces, err) < 0)
        return -1;
    if (ckpt_pieces_cover(&pieces, l->cat, s->dim, s->rank, &gap, err) < 0)
        return gap ? fail_gap(l, p, err) : ckpt_err_in(err, "parameter '%s'", p->name);
    return ckpt_pieces_catalog(&pieces, l->cat, p->name, s->dtype, s->dim, s->rank, err);
}

/* ---- config ---- */

/* Read what says of which model the weights are, and of which save. nanotron's save_weights writes
 * the weights alone, so all of it may be missing: then a recipe asks for a base, and view=raw needs
 * nothing. */
static int read_configs(struct load *l, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *model = NULL;

    if (ckpt_config_read_if(l->dir, "checkpoint_metadata.json", CKPT_CONFIG_MAX_BYTES, &l->meta,
                            err) < 0 ||
        ckpt_config_read_if(l->dir, "config.yaml", CKPT_CONFIG_MAX_BYTES, &l->config, err) < 0 ||
        ckpt_config_read_if(l->dir, "model_config.json", CKPT_CONFIG_MAX_BYTES, &model, err) < 0)
        return -1;
    if (!model)
        model = json_incref(ckpt_json_at(l->config, "model.model_config"));
    if (model && !json_is_object(model))
        return ckpt_fail(
            err, CKPT_FORMAT,
            "'%s': neither model_config.json nor model.model_config in config.yaml is an object",
            ckpt_dir_path(l->dir));
    l->cat->config = ckpt_steal(&model);
    const char *version = ckpt_json_str(l->meta, "version");
    return version ? ckpt_nt_version_check(version, err) < 0
                         ? ckpt_err_in(err, "'%s/checkpoint_metadata.json'", ckpt_dir_path(l->dir))
                         : 0
                   : 0;
}

static void set(struct ckpt_catalog *cat, const char *key, json_t *value)
{
    if (value)
        ckpt_json_set(&cat->about, key, json_incref(value));
}

/* Facts for people and for the conditions of recipes. */
static int describe(const struct load *l, const struct ckpt_nt_topology *t, struct ckpt_err *err)
{
    json_t *mup = ckpt_json_at(l->config, "model.init_method.use_mup");
    json_t *facts = json_pack("{s:s, s:b, s:b, s:b, s:b, s:b, s:i, s:i}", "format", "nanotron",
                              "has_model_config", l->cat->config != NULL, "has_config_yaml",
                              l->config != NULL, "has_checkpoint_metadata", l->meta != NULL,
                              "optimizer", ckpt_dir_has_dir(l->dir, "optimizer"), "use_mup",
                              json_is_true(mup), "shard_tp", (int)t->tp, "shard_pp", (int)t->pp);

    if (!facts || json_object_update_new(l->cat->about, facts) < 0)
        return ckpt_nomem(err);
    const char *version = NULL;
    for (size_t i = 0; i < l->set.shards.len && !version; i++)
        version = *l->set.shards.ptr[i].version ? l->set.shards.ptr[i].version : NULL;
    if (version)
        ckpt_json_set(&l->cat->about, "version", json_string(version));
    set(l->cat, "version", json_object_get(l->meta, "version"));
    set(l->cat, "tp", json_object_get(l->meta, "tp"));
    set(l->cat, "dp", json_object_get(l->meta, "dp"));
    set(l->cat, "step", ckpt_json_at(l->meta, "metas.last_train_step"));
    set(l->cat, "tokenizer", ckpt_json_at(l->config, "tokenizer.tokenizer_name_or_path"));
    set(l->cat, "model_dtype", ckpt_json_at(l->config, "model.dtype"));
    return 0;
}

/* ---- what is beside tensors ---- */

/* Add param_groups of the optimizer, or the state of the learning rate's scheduler. All ranks have
 * the same, except for the numbering; those of the first rank are returned. */
static int add_first(struct ckpt_dir *dir, const char *folder,
                     const struct ckpt_reader_options *opt, json_t *out, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *at = NULL;
    ckpt_cleanup(ckpt_freep) char *name = NULL;

    if (!ckpt_dir_has_dir(dir, folder))
        return 0;
    if (ckpt_dir_open_below(dir, folder, &at, err) < 0 ||
        ckpt_reader_first(at, false, folder, ".pt", &name, err) < 0)
        return -1;
    return name ? ckpt_torch_objects_of(at, name, opt->pool, folder, out, err) : 0;
}

static int nanotron_objects(struct ckpt_dir *dir, const struct ckpt_reader_options *opt,
                            json_t *out, struct ckpt_err *err)
{
    return add_first(dir, "optimizer", opt, out, err) < 0
               ? -1
               : add_first(dir, "lr_scheduler", opt, out, err);
}

/* ---- the reader ---- */

static int nanotron_load(struct ckpt_dir *dir, const struct ckpt_reader_options *opt,
                         struct ckpt_facts *facts, struct ckpt_catalog *cat, struct ckpt_err *err)
{
    ckpt_cleanup(load_release) struct load l = {.dir = dir, .cat = cat};
    struct ckpt_nt_shards *set = &l.set;
    struct ckpt_nt_topology t = {0};

    (void)facts;
    if (read_configs(&l, err) < 0 || ckpt_nt_shards_find(dir, opt, set, err) < 0 ||
        ckpt_nt_topology_choose(set, l.meta, l.config, cat, &t, err) < 0 ||
        ckpt_nt_shards_select(set, &t, err) < 0 || ckpt_nt_shards_read(set, err) < 0 ||
        ckpt_reader_add_each(opt, cat, set->params.len, add_tensor, &l, err) < 0 ||
        (opt->states && ckpt_nt_states_add(set, &t, cat, err) < 0))
        return -1;
    return describe(&l, &t, err);
}

/* The folder with the weights. */
#define WEIGHTS "model"

static enum ckpt_evidence nanotron_probe(struct ckpt_dir *dir)
{
    if (!ckpt_dir_has_dir(dir, WEIGHTS))
        return CKPT_NOT_MINE;
    bool nested = ckpt_dir_has_dir(dir, "model/model") || ckpt_dir_has_dir(dir, "model/module");
    if (ckpt_dir_has_file(dir, "model_config.json"))
        return nested ? CKPT_BY_MAGIC : CKPT_BY_NAMES;
    return nested && ckpt_dir_has_file(dir, "config.yaml") ? CKPT_BY_NAMES : CKPT_NOT_MINE;
}

/* ---- weights alone ---- */

enum { MOST_LOOKED_AT = 64 }; /* folders, on the way to the first weight */

static bool is_weight(const struct ckpt_entry *e, bool is_top)
{
    struct ckpt_nt_name name;

    /* every parameter is one of a module, which is a folder; beside folders of modules, a file such
     * as model_fp16.safetensors is something else */
    return e->kind == CKPT_ENTRY_FILE && !is_top && ckpt_nt_name_parse(e->name, &name);
}

/* Is the folder a run's, a step's, or a Hugging Face model's? Then its names are not those of
 * modules. */
static bool is_own_checkpoint(const struct ckpt_dir *dir)
{
    return ckpt_dir_has_file(dir, "latest.txt") || ckpt_dir_has_file(dir, "model_config.json") ||
           ckpt_dir_has_file(dir, "config.yaml") || ckpt_dir_has_file(dir, "config.json");
}

/* Is there a weight's file somewhere below the folder? *left is how many folders may still be
 * looked at. */
static bool has_weights_below(struct ckpt_dir *dir, bool is_top, int *left)
{
    ckpt_cleanup(ckpt_entries_release) struct ckpt_entries entries = {0};
    struct ckpt_entry e;
    bool found = false;

    if ((*left)-- <= 0 || is_own_checkpoint(dir) || ckpt_entries_read(dir, &entries, NULL) < 0)
        return false;
    while (!found && *left > 0 && ckpt_entries_next(&entries, &e)) {
        ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *below = NULL;
        found = is_weight(&e, is_top) ||
                (e.kind == CKPT_ENTRY_DIR && ckpt_dir_open_below(dir, e.name, &below, NULL) == 0 &&
                 has_weights_below(below, false, left));
    }
    return found;
}

/* nanotron's save_weights writes model/ with a folder for each module, down to the files of its
 * parameters, and nothing of what nanotron's trainer writes around it. A folder that is called
 * model itself is the inside of such a checkpoint, and not one whose modules lie below another. */
static enum ckpt_evidence nanotron_guess(struct ckpt_dir *dir)
{
    ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *weights = NULL;
    int left = MOST_LOOKED_AT;

    if (strcmp(ckpt_dir_real_name(dir), WEIGHTS) == 0 || !ckpt_dir_has_dir(dir, WEIGHTS) ||
        ckpt_dir_open_below(dir, WEIGHTS, &weights, NULL) < 0)
        return CKPT_NOT_MINE;
    return has_weights_below(weights, true, &left) ? CKPT_BY_NAMES : CKPT_NOT_MINE;
}

static bool nanotron_has_weights_in(struct ckpt_dir *above, const char *name)
{
    return strcmp(name, WEIGHTS) == 0 && (!above || nanotron_probe(above) != CKPT_NOT_MINE ||
                                          nanotron_guess(above) != CKPT_NOT_MINE);
}

static char *nanotron_latest(struct ckpt_dir *run)
{
    ckpt_cleanup(ckpt_freep) char *text = ckpt_reader_pointer(run, "latest.txt");
    unsigned long long step;

    return text && ckpt_parse_u64(text, strlen(text), &step) ? ckpt_asprintf("%llu", step) : NULL;
}

/* A save is finished when all ranks have written their weights: then latest.txt is written, and
 * after it model_config.json. */
static bool nanotron_finished(struct ckpt_dir *dir, const char *name, const char *latest)
{
    return ckpt_dir_has_file(dir, "model_config.json") ||
           (latest && ckpt_natural_cmp(name, latest) <= 0);
}

static const char *const markers[] = {"model_config.json", NULL};
static const char *const rewrites[] = {"model_config.json", "checkpoint_metadata.json",
                                       "config.yaml", "model", NULL};

const struct ckpt_reader ckpt_reader_nanotron = {
    .name = "nanotron",
    .markers = markers,
    .after_marker = "optimizer/",
    .rewrites = rewrites,
    .probe = nanotron_probe,
    .guess = nanotron_guess,
    .has_weights_in = nanotron_has_weights_in,
    .load = nanotron_load,
    .objects = nanotron_objects,
    .latest = nanotron_latest,
    .finished = nanotron_finished,
    .side_files = "",
};
