/* SPDX-License-Identifier: Apache-2.0 */
/* Parsing options: one table for the mount, the tool and the library. */
#include "model/options.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include "base/mem.h"
#include "base/str.h"
#include "format/writers.h"
#include "recipe/library/keys.h"
#include "view/shards.h"

int ckpt_options_new(struct ckpt_options **ret, struct ckpt_err *err)
{
    struct ckpt_options *opt = calloc(1, sizeof *opt);

    if (!opt || !(opt->overrides = json_object())) {
        free(opt);
        return ckpt_nomem(err);
    }
    *ret = opt;
    return 0;
}

void ckpt_options_free(struct ckpt_options *opt)
{
    if (!opt)
        return;
    free(opt->base);
    free(opt->recipe);
    free(opt->key_mapping);
    json_decref(opt->overrides);
    free(opt);
}

void ckpt_options_freep(struct ckpt_options **opt)
{
    ckpt_options_free(*opt);
    *opt = NULL;
}

int ckpt_options_copy(const struct ckpt_options *opt, struct ckpt_options **ret,
                      struct ckpt_err *err)
{
    struct ckpt_options *copy = calloc(1, sizeof *copy);

    if (!copy)
        return ckpt_nomem(err);
    *copy = *opt;
    copy->base = opt->base ? strdup(opt->base) : NULL;
    copy->recipe = opt->recipe ? strdup(opt->recipe) : NULL;
    copy->key_mapping = opt->key_mapping ? strdup(opt->key_mapping) : NULL;
    copy->overrides = json_deep_copy(opt->overrides);
    copy->recording = NULL;
    if ((opt->base && !copy->base) || (opt->recipe && !copy->recipe) ||
        (opt->key_mapping && !copy->key_mapping) || !copy->overrides) {
        ckpt_options_free(copy);
        return ckpt_nomem(err);
    }
    *ret = copy;
    return 0;
}

void ckpt_options_set_log(struct ckpt_options *opt,
                          void (*line)(void *ctx, enum ckpt_log_severity severity,
                                       const char *text),
                          void *ctx)
{
    /* the two enumerations have equal values; base/log.h cannot include the public header */
    opt->log.line = (void (*)(void *, enum ckpt_log_level, const char *))line;
    opt->log.ctx = ctx;
}

/* ---- values ---- */

static int set_text(char **slot, const char *key, const char *value, struct ckpt_err *err)
{
    if (!value || !*value)
        return ckpt_fail(err, CKPT_USAGE, "option %s needs a value", key);
    free(*slot);
    *slot = strdup(value);
    return *slot ? 0 : ckpt_nomem(err);
}

/* Set an option to an absolute path, because daemons change their working directory. */
static int set_path(char **slot, const char *key, const char *value, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *here = NULL;

    if (set_text(slot, key, value, err) < 0)
        return -1;
    if (value[0] == '/')
        return 0;
    if (!(here = getcwd(NULL, 0)))
        return ckpt_fail(err, CKPT_IO, "option %s: the current directory is not known", key);
    free(*slot);
    *slot = ckpt_asprintf("%s/%s", here, value);
    return *slot ? 0 : ckpt_nomem(err);
}

static int set_flag(bool *slot, const char *key, const char *value, struct ckpt_err *err)
{
    static const char *const yes[] = {"1", "true", "yes", "on"}, *const no[] = {"0", "false", "no",
                                                                                "off"};

    if (!value) {
        *slot = true;
        return 0;
    }
    for (size_t i = 0; i < sizeof yes / sizeof yes[0]; i++)
        if (strcmp(value, yes[i]) == 0 || strcmp(value, no[i]) == 0) {
            *slot = strcmp(value, yes[i]) == 0;
            return 0;
        }
    return ckpt_fail(err, CKPT_USAGE, "option %s: '%s' is neither true nor false", key, value);
}

static int set_base(struct ckpt_options *opt, const char *key, const char *value,
                    struct ckpt_err *err)
{
    struct stat st;
    bool is_path = value && stat(value, &st) == 0; /* else it is ORG/NAME in the hub's cache */

    return (is_path ? set_path : set_text)(&opt->base, key, value, err);
}

static int set_recipe(struct ckpt_options *opt, const char *key, const char *value,
                      struct ckpt_err *err)
{
    return set_path(&opt->recipe, key, value, err);
}

static int set_key_mapping(struct ckpt_options *opt, const char *key, const char *value,
                           struct ckpt_err *err)
{
    return set_path(&opt->key_mapping, key, value, err);
}

/* Parse a dtype: a name that ckpt_dtype_parse accepts, or a common short one. */
static bool parse_dtype(const char *value, enum ckpt_dtype *ret)
{
    static const struct {
        const char *name;
        enum ckpt_dtype dtype;
    } shorts[] = {{"bf16", CKPT_BF16}, {"fp16", CKPT_F16}, {"f16", CKPT_F16}, {"fp32", CKPT_F32},
                  {"f32", CKPT_F32},   {"fp64", CKPT_F64}, {"f64", CKPT_F64}};

    for (size_t i = 0; i < sizeof shorts / sizeof shorts[0]; i++)
        if (strcmp(value, shorts[i].name) == 0) {
            *ret = shorts[i].dtype;
            return true;
        }
    return ckpt_dtype_parse(value, strlen(value), ret) && ckpt_dtype_is_castable(*ret);
}

static int set_dtype(struct ckpt_options *opt, const char *key, const char *value,
                     struct ckpt_err *err)
{
    if (value && strcmp(value, "auto") == 0) {
        opt->dtype_rule = CKPT_DTYPE_AUTO;
    } else if (value && strcmp(value, "stored") == 0) {
        opt->dtype_rule = CKPT_DTYPE_STORED;
    } else if (value && parse_dtype(value, &opt->dtype)) {
        opt->dtype_rule = CKPT_DTYPE_CAST;
    } else {
        return ckpt_fail(
            err, CKPT_USAGE,
            "option %s: '%s' is not one of auto, stored, bfloat16, float16, float32, float64", key,
            value ? value : "");
    }
    return 0;
}

static int fail_view(const char *key, const char *value, struct ckpt_err *err)
{
    char views[256];
    size_t at = 0;

    for (const struct ckpt_writer *const *w = ckpt_writers; *w && at < sizeof views; w++)
        at += (size_t)snprintf(views + at, sizeof views - at, ", %s", (*w)->name);
    return ckpt_fail(err, CKPT_USAGE, "option %s: '%s' is not one of hf, raw, memory%s", key,
                     value ? value : "", views);
}

static int set_view(struct ckpt_options *opt, const char *key, const char *value,
                    struct ckpt_err *err)
{
    const bool raw = value && strcmp(value, "raw") == 0, hf = value && strcmp(value, "hf") == 0,
               memory = value && strcmp(value, "memory") == 0;
    const struct ckpt_writer *writer = value ? ckpt_writer_find(value) : NULL;

    if (!raw && !hf && !memory && !writer)
        return fail_view(key, value, err);
    opt->raw = raw;
    opt->memory = memory;
    opt->output.writer = writer;
    return 0;
}

static const char *view_word(const struct ckpt_options *opt)
{
    return opt->output.writer ? opt->output.writer->name
           : opt->raw         ? "raw"
           : opt->memory      ? "memory"
                              : "hf";
}

int ckpt_options_check(const struct ckpt_options *opt, struct ckpt_err *err)
{
    const struct ckpt_writer *writer = opt->output.writer;

    if (opt->raw && (opt->dequantize || opt->lora))
        return ckpt_fail(err, CKPT_USAGE, "option %s: view=raw shows tensors as they are stored",
                         opt->dequantize ? "dequantize" : "lora");
    if (opt->missing_from_base && (opt->raw || !opt->base))
        return ckpt_fail(err, CKPT_USAGE, "option missing=base %s",
                         opt->raw ? "does not apply to view=raw" : "needs base=DIR");
    if (ckpt_writers_check(&opt->output, view_word(opt), err) < 0)
        return -1;
    if (writer && opt->max_shard_size && !(writer->keys & CKPT_WRITES_SIZE))
        return ckpt_fail(err, CKPT_USAGE, "option max_shard_size does not apply to view=%s: %s",
                         writer->name, writer->layout);
    return 0;
}

bool ckpt_options_memory(const struct ckpt_options *opt)
{
    return opt->memory || opt->output.names == CKPT_OUTPUT_NAMES_MEMORY;
}

static int set_max_shard_size(struct ckpt_options *opt, const char *key, const char *value,
                              struct ckpt_err *err)
{
    uint64_t size;

    if (!value || !ckpt_shards_parse_size(value, &size) || size == 0)
        return ckpt_fail(err, CKPT_USAGE, "option %s: '%s' is not a size such as 5GB", key,
                         value ? value : "");
    opt->max_shard_size = size;
    return 0;
}

static int set_rope(struct ckpt_options *opt, const char *key, const char *value,
                    struct ckpt_err *err)
{
    if (!value || (strcmp(value, "interleaved") != 0 && strcmp(value, "half") != 0 &&
                   strcmp(value, "auto") != 0))
        return ckpt_fail(err, CKPT_USAGE, "option %s: '%s' is not one of auto, interleaved, half",
                         key, value ? value : "");
    if (strcmp(value, "auto") == 0)
        (void)json_object_del(opt->overrides, "_rope");
    else if (json_object_set_new(opt->overrides, "_rope", json_string(value)) < 0)
        return ckpt_nomem(err);
    return 0;
}

/* Set the Hugging Face model type, for a checkpoint that does not say it. */
static int set_model_type(struct ckpt_options *opt, const char *key, const char *value,
                          struct ckpt_err *err)
{
    if (!value || !*value)
        return ckpt_fail(err, CKPT_USAGE, "option %s needs a value", key);
    return json_object_set_new(opt->overrides, "_model_type", json_string(value)) < 0
               ? ckpt_fail(err, CKPT_USAGE, "option %s: the value is not UTF-8", key)
               : 0;
}

static int set_allow_partial(struct ckpt_options *opt, const char *key, const char *value,
                             struct ckpt_err *err)
{
    return set_flag(&opt->allow_partial, key, value, err);
}

static int set_allow_leftover(struct ckpt_options *opt, const char *key, const char *value,
                              struct ckpt_err *err)
{
    return set_flag(&opt->allow_leftover, key, value, err);
}

static int set_missing(struct ckpt_options *opt, const char *key, const char *value,
                       struct ckpt_err *err)
{
    if (!value || (strcmp(value, "base") != 0 && strcmp(value, "error") != 0))
        return ckpt_fail(err, CKPT_USAGE, "option %s: '%s' is not one of error, base", key,
                         value ? value : "");
    opt->missing_from_base = strcmp(value, "base") == 0;
    return 0;
}

static int set_allow_mixed(struct ckpt_options *opt, const char *key, const char *value,
                           struct ckpt_err *err)
{
    return set_flag(&opt->allow_mixed, key, value, err);
}

static int set_follow_symlinks(struct ckpt_options *opt, const char *key, const char *value,
                               struct ckpt_err *err)
{
    return set_flag(&opt->follow_symlinks, key, value, err);
}

static int set_wait(struct ckpt_options *opt, const char *key, const char *value,
                    struct ckpt_err *err)
{
    return set_flag(&opt->wait, key, value, err);
}

static int set_dequantize(struct ckpt_options *opt, const char *key, const char *value,
                          struct ckpt_err *err)
{
    return set_flag(&opt->dequantize, key, value, err);
}

static int set_lora(struct ckpt_options *opt, const char *key, const char *value,
                    struct ckpt_err *err)
{
    static const struct {
        const char *word;
        enum ckpt_lora_rule rule;
    } words[] = {
        {"adapter", CKPT_LORA_ADAPTER}, {"merge", CKPT_LORA_MERGE}, {"base", CKPT_LORA_BASE}};

    for (size_t i = 0; value && i < sizeof words / sizeof words[0]; i++) {
        if (strcmp(value, words[i].word) == 0) {
            opt->lora = words[i].rule;
            return 0;
        }
    }
    return ckpt_fail(err, CKPT_USAGE, "option %s: '%s' is not one of adapter, merge, base", key,
                     value ? value : "");
}

static const struct option {
    const char *key;
    int (*set)(struct ckpt_options *opt, const char *key, const char *value, struct ckpt_err *err);
} options[] = {
    {"base", set_base},
    {"dtype", set_dtype},
    {"view", set_view},
    {"max_shard_size", set_max_shard_size},
    {"recipe", set_recipe},
    {"rope", set_rope},
    {"model_type", set_model_type},
    {"allow_partial", set_allow_partial},
    {"allow_leftover", set_allow_leftover},
    {"allow_mixed", set_allow_mixed},
    {"missing", set_missing},
    {"follow_symlinks", set_follow_symlinks},
    {"wait", set_wait},
    {"key_mapping", set_key_mapping},
    {"dequantize", set_dequantize},
    {"lora", set_lora},
};

static const struct option *find_option(const char *key)
{
    for (size_t i = 0; i < sizeof options / sizeof options[0]; i++)
        if (strcmp(options[i].key, key) == 0)
            return &options[i];
    return NULL;
}

/* Set a value of the model that a checkpoint may not record, under its key in Hugging Face's
 * config.json. It is a JSON number, true, false or null; anything else is a string
 * (hidden_act=gelu). */
static int set_model_key(struct ckpt_options *opt, const char *key, const char *value,
                         struct ckpt_err *err)
{
    json_t *v;

    if (!value || !*value)
        return ckpt_fail(err, CKPT_USAGE, "option %s needs a value", key);
    v = json_loads(value, JSON_DECODE_ANY, NULL);
    if (!v || json_is_object(v) || json_is_array(v)) {
        json_decref(v);
        v = json_string(value);
    }
    return json_object_set_new(opt->overrides, key, v) < 0
               ? ckpt_fail(err, CKPT_USAGE, "option %s: the value is not UTF-8", key)
               : 0;
}

bool ckpt_options_knows(const char *key)
{
    return find_option(key) || ckpt_output_knows(key) || ckpt_keys_known(key);
}

int ckpt_options_set(struct ckpt_options *opt, const char *key, const char *value,
                     struct ckpt_err *err)
{
    const struct option *o = find_option(key);

    if (o)
        return o->set(opt, key, value, err);
    if (ckpt_output_knows(key))
        return ckpt_output_set(&opt->output, key, value, err);
    if (ckpt_keys_known(key))
        return set_model_key(opt, key, value, err);
    return ckpt_fail(err, CKPT_USAGE, "there is no option '%s'", key);
}

const char *ckpt_options_override(const struct ckpt_options *opt)
{
    const char *key;
    json_t *value;

    json_object_foreach(opt->overrides, key, value) {
        if (key[0] != '_')
            return key;
    }
    return NULL;
}

/* 0 of a view in files of a Hugging Face model. */
static uint64_t hash_output(const struct ckpt_output *t)
{
    uint64_t h = t->writer ? XXH3_64bits(t->writer->name, strlen(t->writer->name)) : 0;

    for (int i = 0; t->writer && i < CKPT_NCUT; i++)
        h = h * 31 + ckpt_output_parts(t, (enum ckpt_cut_by)i);
    return h + (t->names == CKPT_OUTPUT_NAMES_MEMORY);
}

uint64_t ckpt_options_hash(const struct ckpt_options *opt)
{
    ckpt_cleanup(ckpt_freep) char *overrides =
        json_dumps(opt->overrides, JSON_COMPACT | JSON_SORT_KEYS);
    ckpt_cleanup(ckpt_freep) char *text = ckpt_asprintf(
        "%s|%s|%s|%d|%d|%llu|%d|%d|%d|%d|%s", opt->base ? opt->base : "",
        opt->recipe ? opt->recipe : "", opt->key_mapping ? opt->key_mapping : "",
        (int)opt->dtype_rule, (int)opt->dtype, (unsigned long long)opt->max_shard_size,
        opt->raw + 2 * opt->memory, opt->dequantize, (int)opt->lora,
        opt->allow_partial + 2 * opt->missing_from_base, overrides ? overrides : "");
    return text ? XXH3_64bits_withSeed(text, strlen(text), hash_output(&opt->output)) : 0;
}
