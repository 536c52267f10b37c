/* SPDX-License-Identifier: Apache-2.0 */
/* Parsing options: one table for the mount, the tool and the library. */
#include "model/options.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <xxhash.h>

#include "base/option.h"
#include "base/str.h"
#include "format/writer.h"
#include "recipe/library/files.h"
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
    free(opt->base_named);
    free(opt->part);
    free(opt->state);
    free(opt->average);
    for (size_t i = 0; i < opt->also.len; i++)
        free(opt->also.ptr[i]);
    ckpt_vec_release(&opt->also);
    free(opt->variant);
    free(opt->recipe);
    free(opt->key_mapping);
    free(opt->cache_dir);
    ckpt_spill_unref(opt->spill);
    ckpt_client_unref(opt->connected);
    free(opt->bucket.cache);
    json_decref(opt->overrides);
    free(opt);
}

/* Add a copy of the path. False: out of memory. */
static bool add_also(struct ckpt_options *opt, const char *path)
{
    char *own = strdup(path);

    if (!own || ckpt_vec_push(&opt->also, own) < 0) {
        free(own);
        return false;
    }
    return true;
}

int ckpt_options_copy(const struct ckpt_options *opt, struct ckpt_options **ret,
                      struct ckpt_err *err)
{
    struct ckpt_options *copy = calloc(1, sizeof *copy);

    if (!copy)
        return ckpt_nomem(err);
    *copy = *opt;
    copy->dir = NULL;
    copy->recording = NULL;
    copy->connected = NULL; /* the original holds these */
    copy->spill = NULL;
    char **const text[] = {&copy->base,     &copy->base_named,  &copy->part,
                           &copy->state,    &copy->average,     &copy->variant,
                           &copy->recipe,   &copy->key_mapping, &copy->bucket.cache,
                           &copy->cache_dir};
    bool good = (copy->overrides = json_deep_copy(opt->overrides)) != NULL;
    for (size_t i = 0; i < sizeof text / sizeof *text; i++)
        if (*text[i] && !(*text[i] = strdup(*text[i])))
            good = false;
    memset(&copy->also, 0, sizeof copy->also);
    for (size_t i = 0; i < opt->also.len; i++)
        good &= add_also(copy, opt->also.ptr[i]);
    if (!good) {
        ckpt_options_free(copy);
        return ckpt_nomem(err);
    }
    *ret = copy;
    return 0;
}

void ckpt_options_compare_whole(struct ckpt_options *opt) { opt->compares_whole = true; }

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

static int set_base(void *into, const struct ckpt_option *o, const char *value,
                    struct ckpt_err *err)
{
    struct stat st;
    const bool is_path = value && stat(value, &st) == 0; /* else ORG/NAME in the hub's cache */
    const struct ckpt_option base = {.word = o->word,
                                     .kind = is_path ? CKPT_OPTION_PATH : CKPT_OPTION_TEXT,
                                     .at = offsetof(struct ckpt_options, base)};

    return ckpt_option_set(&base, into, value, err);
}

int ckpt_options_take_base(const struct ckpt_options *opt, const char *named,
                           struct ckpt_options **ret, struct ckpt_err *err)
{
    static const struct ckpt_option base = {.word = "base"};
    ckpt_cleanup(ckpt_options_freep) struct ckpt_options *copy = NULL;

    if (ckpt_options_copy(opt, &copy, err) < 0 || set_base(copy, &base, named, err) < 0)
        return -1;
    copy->recording = opt->recording;
    if (!(copy->base_named = strdup(named)))
        return ckpt_nomem(err);
    *ret = ckpt_steal(&copy);
    return 0;
}

/* Each such option adds a directory. */
static int set_also(void *into, const struct ckpt_option *o, const char *value,
                    struct ckpt_err *err)
{
    struct {
        char *path;
    } one = {0};
    const struct ckpt_option path = {.word = o->word,
                                     .kind = value && ckpt_is_bucket(value) ? CKPT_OPTION_TEXT
                                                                            : CKPT_OPTION_PATH};

    if (ckpt_option_set(&path, &one, value, err) < 0)
        return -1;
    const bool good = add_also(into, one.path);
    free(one.path);
    return good ? 0 : ckpt_nomem(err);
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

static int set_dtype(void *into, const struct ckpt_option *o, const char *value,
                     struct ckpt_err *err)
{
    struct ckpt_options *opt = into;

    if (value && strcmp(value, "auto") == 0) {
        opt->dtype_rule = CKPT_DTYPE_AUTO;
    } else if (value && strcmp(value, "stored") == 0) {
        opt->dtype_rule = CKPT_DTYPE_STORED;
    } else if (value && parse_dtype(value, &opt->dtype)) {
        opt->dtype_rule = CKPT_DTYPE_CAST;
    } else {
        return ckpt_fail(
            err, CKPT_USAGE,
            "option %s: '%s' is not one of auto, stored, bfloat16, float16, float32, float64",
            o->word, value ? value : "");
    }
    return 0;
}

static int set_view(void *into, const struct ckpt_option *o, const char *value,
                    struct ckpt_err *err)
{
    enum { HF, RAW, MEMORY, FIRST_WRITER };
    struct ckpt_options *opt = into;
    uint32_t word;

    if (ckpt_option_choice(o, value, &word, err) < 0)
        return -1;
    opt->raw = word == RAW;
    opt->memory = word == MEMORY;
    opt->output.writer = word < FIRST_WRITER ? NULL : ckpt_writers[word - FIRST_WRITER];
    return 0;
}

static const char *view_word(const struct ckpt_options *opt)
{
    return opt->output.writer ? opt->output.writer->name
           : opt->raw         ? "raw"
           : opt->memory      ? "memory"
                              : "hf";
}

/* The first number of the optimizer that was given; or NULL. */
static const char *first_hyper(const struct ckpt_options *opt)
{
    static const char *const key[] = {"_lr",  "_initial_lr",   "_min_lr",        "_betas",
                                      "_eps", "_weight_decay", "_optimizer_step"};

    for (size_t i = 0; i < sizeof key / sizeof *key; i++)
        if (json_object_get(opt->overrides, key[i]))
            return key[i] + 1;
    return NULL;
}

static int check_optimizer(const struct ckpt_options *opt, struct ckpt_err *err)
{
    const struct ckpt_writer *writer = opt->output.writer;
    const char *hyper = first_hyper(opt);

    if (!opt->optimizer && opt->output.cut[CKPT_CUT_BATCH])
        hyper = ckpt_output_keys[CKPT_CUT_BATCH];
    if (!opt->optimizer && opt->output.fuse_qkv)
        hyper = "fuse_qkv";
    if (!opt->optimizer)
        return hyper ? ckpt_fail(err, CKPT_USAGE, "option %s: it goes with the option optimizer",
                                 hyper)
                     : 0;
    if (!writer || !writer->state_name)
        return ckpt_fail(
            err, CKPT_USAGE,
            "option optimizer: view=%s has no place for an optimizer, but %s (view=raw "
            "shows all tensors as they are stored, state=exp_avg one moment under the "
            "model's names)",
            view_word(opt), ckpt_writers_with_states().text);
    if (opt->state || opt->average || opt->missing == CKPT_LACKS_FROM_BASE || opt->lora)
        return ckpt_fail(err, CKPT_USAGE, "option optimizer: it does not go with %s",
                         opt->state     ? "state="
                         : opt->average ? "average="
                         : opt->lora    ? "lora="
                                        : "missing=base");
    if ((opt->dtype_rule == CKPT_DTYPE_CAST && !writer->has_masters) || opt->dequantize)
        return ckpt_fail(err, CKPT_USAGE,
                         "option %s: with optimizer each tensor keeps the dtype in which the run "
                         "has it",
                         opt->dequantize ? "dequantize" : "dtype");
    return 0;
}

int ckpt_options_check(const struct ckpt_options *opt, struct ckpt_err *err)
{
    const struct ckpt_writer *writer = opt->output.writer;

    if (opt->raw && (opt->dequantize || opt->lora))
        return ckpt_fail(err, CKPT_USAGE, "option %s: view=raw shows tensors as they are stored",
                         opt->dequantize ? "dequantize" : "lora");
    if (opt->missing == CKPT_LACKS_FROM_BASE && (opt->raw || !opt->base))
        return ckpt_fail(err, CKPT_USAGE, "option missing=base %s",
                         opt->raw ? "does not apply to view=raw" : "needs base=DIR");
    if (opt->state && (opt->missing == CKPT_LACKS_FROM_BASE || opt->lora == CKPT_LORA_MERGE))
        return ckpt_fail(err, CKPT_USAGE, "option state: with %s there is nothing but weights",
                         opt->lora == CKPT_LORA_MERGE ? "lora=merge" : "missing=base");
    if (check_optimizer(opt, err) < 0)
        return -1;
    if (ckpt_writers_check(&opt->output, view_word(opt), err) < 0)
        return -1;
    if (writer && opt->max_shard_size && !(writer->keys & CKPT_WRITES_SIZE))
        return ckpt_fail(err, CKPT_USAGE, "option max_shard_size does not apply to view=%s: %s",
                         writer->name, writer->layout);
    return 0;
}

struct ckpt_access ckpt_options_access(const struct ckpt_options *opt)
{
    return (struct ckpt_access){.links = opt->follow_symlinks ? CKPT_LINKS_ANY : CKPT_LINKS_BENEATH,
                                .bucket = opt->bucket,
                                .recording = opt->recording,
                                .far = {.rule = opt->far,
                                        .connections = opt->bucket.connections,
                                        .timeout_ms = opt->bucket.timeout_ms}};
}

uint32_t ckpt_options_timeout_ms(const struct ckpt_options *opt)
{
    const struct ckpt_access how = ckpt_options_access(opt);

    return ckpt_far_timeout_ms(&how.far);
}

int ckpt_options_connect(struct ckpt_options *opt, const char *path, struct ckpt_err *err)
{
    bool any = ckpt_is_bucket(path) || (opt->base && ckpt_is_bucket(opt->base));

    for (size_t i = 0; i < opt->also.len; i++)
        any |= ckpt_is_bucket(opt->also.ptr[i]);
    if (any && !opt->connected && ckpt_client_get(&opt->bucket, &opt->connected, err) < 0)
        return -1;
    if (!opt->cache_dir || opt->spill)
        return 0;
    return ckpt_spill_new(opt->cache_dir, &opt->log, &opt->spill, err) < 0
               ? -1
               : ckpt_spill_open(opt->spill, err);
}

bool ckpt_options_memory(const struct ckpt_options *opt)
{
    return opt->memory || opt->output.names == CKPT_OUTPUT_NAMES_MEMORY;
}

static int set_max_shard_size(void *into, const struct ckpt_option *o, const char *value,
                              struct ckpt_err *err)
{
    struct ckpt_options *opt = into;
    uint64_t size;

    if (!value || !ckpt_shards_parse_size(value, &size) || size == 0)
        return ckpt_fail(err, CKPT_USAGE, "option %s: '%s' is not a size such as 5GB", o->word,
                         value ? value : "");
    opt->max_shard_size = size;
    return 0;
}

static int set_fuse_qkv(void *into, const struct ckpt_option *o, const char *value,
                        struct ckpt_err *err)
{
    static const struct ckpt_option flag = {.word = "fuse_qkv", .kind = CKPT_OPTION_FLAG};
    struct ckpt_options *opt = into;
    bool yes;

    (void)o;
    if (ckpt_option_set(&flag, &yes, value, err) < 0)
        return -1;
    opt->output.fuse_qkv = yes ? CKPT_OUTPUT_FUSED : CKPT_OUTPUT_FUSED_NOT;
    return 0;
}

static int set_rope(void *into, const struct ckpt_option *o, const char *value,
                    struct ckpt_err *err)
{
    struct ckpt_options *opt = into;
    uint32_t word;

    if (ckpt_option_choice(o, value, &word, err) < 0)
        return -1;
    if (word == 0)
        (void)json_object_del(opt->overrides, "_rope");
    else if (json_object_set_new(opt->overrides, "_rope", json_string(value)) < 0)
        return ckpt_nomem(err);
    return 0;
}

static int set_cache(void *into, const struct ckpt_option *o, const char *value,
                     struct ckpt_err *err)
{
    const struct ckpt_option path = {.word = o->word,
                                     .kind = CKPT_OPTION_PATH,
                                     .at = offsetof(struct ckpt_options, bucket.cache)};
    struct ckpt_options *opt = into;

    opt->bucket.no_cache = value && strcmp(value, "no") == 0;
    return opt->bucket.no_cache ? 0 : ckpt_option_set(&path, into, value, err);
}

static int set_cache_folder(struct ckpt_options *opt, const char *word, const char *value,
                            struct ckpt_err *err)
{
    const struct ckpt_option path = {
        .word = word, .kind = CKPT_OPTION_PATH, .at = offsetof(struct ckpt_options, cache_dir)};

    return ckpt_option_set(&path, opt, value, err);
}

static int set_cache_dir(void *into, const struct ckpt_option *o, const char *value,
                         struct ckpt_err *err)
{
    struct ckpt_options *opt = into;

    opt->no_cache_dir = value && strcmp(value, "no") == 0;
    if (!opt->no_cache_dir)
        return set_cache_folder(opt, o->word, value, err);
    free(ckpt_steal(&opt->cache_dir));
    return 0;
}

int ckpt_options_offer_cache_dir(struct ckpt_options *opt, const char *folder, struct ckpt_err *err)
{
    if (opt->cache_dir || opt->no_cache_dir)
        return 0;
    opt->cache_offered = true;
    return set_cache_folder(opt, "cache_dir", folder, err);
}

static int set_override(struct ckpt_options *opt, const char *key, const char *word, json_t *value,
                        struct ckpt_err *err)
{
    return json_object_set_new(opt->overrides, key, value) < 0
               ? ckpt_fail(err, CKPT_USAGE, "option %s: the value is not UTF-8", word)
               : 0;
}

/* Set the Hugging Face model type, for a checkpoint that does not say it. */
static int set_model_type(void *into, const struct ckpt_option *o, const char *value,
                          struct ckpt_err *err)
{
    if (!value || !*value)
        return ckpt_fail(err, CKPT_USAGE, "option %s needs a value", o->word);
    return set_override(into, "_model_type", o->word, json_string(value), err);
}

static int set_alpha(void *into, const struct ckpt_option *o, const char *value,
                     struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *v =
        json_loads(value ? value : "", JSON_DECODE_ANY, NULL);

    if (!json_is_number(v))
        return ckpt_fail(err, CKPT_USAGE, "option %s: '%s' is not a number", o->word,
                         value ? value : "");
    return set_override(into, "_lora_alpha", o->word, ckpt_steal(&v), err);
}

/* Parse a number that an optimizer may have; false: it is none. */
static bool parse_hyper(const char *text, double *ret)
{
    char *end;

    errno = 0;
    *ret = strtod(text, &end);
    return end != text && !*end && *ret >= 0 && *ret < INFINITY && errno != ERANGE;
}

/* Parse one number, or "0.9+0.95"; new, or NULL. */
static json_t *hyper_value(const char *text, bool two)
{
    ckpt_cleanup(ckpt_freep) char *first = strdup(text ? text : "");
    char *second = two && first ? strchr(first, '+') : NULL;
    double a, b;

    if (second)
        *second++ = '\0';
    if (!first || two != (second != NULL) || !parse_hyper(first, &a))
        return NULL;
    if (!two)
        return json_real(a);
    return parse_hyper(second, &b) && a < 1 && b < 1 ? json_pack("[f, f]", a, b) : NULL;
}

/* Set a number of the optimizer: "_lr" of the overrides. */
static int set_hyper(void *into, const struct ckpt_option *o, const char *value,
                     struct ckpt_err *err)
{
    enum { MOST_STEPS = 1 << 24 }; /* torch counts them in F32 */
    const bool two = strcmp(o->word, "betas") == 0,
               is_count = strcmp(o->word, "optimizer_step") == 0;
    ckpt_cleanup(ckpt_freep) char *key = ckpt_asprintf("_%s", o->word);
    json_t *v = hyper_value(value, two);
    const double x = json_number_value(v);

    if (!key || !v || (is_count && (x > MOST_STEPS || x != floor(x)))) {
        json_decref(v);
        return key ? ckpt_fail(err, CKPT_USAGE, "option %s: '%s' is not %s", o->word,
                               value ? value : "",
                               two        ? "two numbers below 1, such as 0.9+0.95"
                               : is_count ? "a number of steps, at most 16777216"
                                          : "a number from 0 on")
                   : ckpt_nomem(err);
    }
    return set_override(into, key, o->word, v, err);
}

#define FLAG(member) .kind = CKPT_OPTION_FLAG, .at = offsetof(struct ckpt_options, member)
#define PATH(member) .kind = CKPT_OPTION_PATH, .at = offsetof(struct ckpt_options, member)
#define CHOICE(member)                                                                             \
    .kind = CKPT_OPTION_CHOICE, .least = 1, .at = offsetof(struct ckpt_options, member)
#define PARTS(cut_)                                                                                \
    .kind = CKPT_OPTION_NUMBER, .least = 1, .most = CKPT_CUT_MOST,                                 \
    .at = offsetof(struct ckpt_options, output.cut[cut_]), .topic = CKPT_TOPIC_FORMAT

/* In the order of help. ckptfs(1) describes each at length. The words of `also` are those of
 * transformers, Megatron, DeepSpeed, torchtitan, nanotron, verl, slime, PEFT and vLLM. */
static const struct ckpt_option options[] = {
    {"base", "DIR|ORG/NAME", "model that gives config, tokenizer, split and dtypes",
     .also = "model model_name model_name_or_path model_path pretrained_model from_pretrained "
             "pretrained_model_name_or_path hf_model hf_model_path hf_model_name hf_path hf_dir "
             "hf_model_dir hf_checkpoint hf_config hf_config_path hf_assets_path origin_hf_dir "
             "config config_path config_file config_name tokenizer tokenizer_path tokenizer_dir "
             "tokenizer_name tokenizer_name_or_path tokenizer_model tokenizer_type base_model "
             "base_model_path base_model_name_or_path base_dir reference reference_model",
     .set = set_base},
    {"dtype", "auto|stored|bfloat16|float16|float32",
     "element type of floating tensors (auto: that of the mapping, the base or the checkpoint)",
     .also = "precision torch_dtype data_type output_dtype out_dtype outtype export_dtype to_dtype "
             "params_dtype param_dtype weight_dtype save_dtype target_dtype cast bf16:bfloat16 "
             "bfloat16:bfloat16 fp16:float16 float16:float16 half:float16 fp32:float32 "
             "float32:float32 float:float32",
     .set = set_dtype},
    {"view", "hf|raw|memory"
#define CKPT_WRITER(NAME, ...) "|" #NAME
#include "format/writers.def"
#undef CKPT_WRITER
     ,
     "what is shown: a Hugging Face model, the tensors as they are stored, the model under the "
     "names it has in memory, or a checkpoint of another framework",
     .also = "format output_format out_format target_format export_format save_format to to_format "
             "target target_type saver to_hf:hf hf:hf raw:raw",
     .set = set_view},
    {"max_shard_size", "SIZE", "the most bytes of a weight file, such as 5GB",
     .also = "shard_size export_size split_size split_max_size max_file_size max_shard",
     .set = set_max_shard_size},
    {"part", "NAME", "of two models in one checkpoint: the folder, or the beginning of the names",
     .kind = CKPT_OPTION_TEXT, .at = offsetof(struct ckpt_options, part),
     .also = "prefix subfolder submodel module_prefix key_prefix strip_prefix"},
    {"also", "DIR",
     "another directory with files of the run, whose union is one run; once for each",
     .also = "other also_dir node shards", .set = set_also},
    {"state", "weight|master|exp_avg|exp_avg_sq",
     "which value of each parameter is shown: its weight, or what the optimizer has of it",
     .kind = CKPT_OPTION_TEXT, .at = offsetof(struct ckpt_options, state),
     .also = "moment optimizer_state optim_state exp_avg:exp_avg exp_avg_sq:exp_avg_sq "
             "fp32_master:master master_weights:master"},
    {"optimizer", NULL,
     "of a trainer's view: also the masters and the moments, so that training goes on",
     .also = "optim optimizer_states load_optimizer include_optimizer save_optimizer resume "
             "with_optimizer",
     FLAG(optimizer)},
    {"lr", "X", "with optimizer: learning rate, if the run does not say it",
     .also = "learning_rate", .set = set_hyper},
    {"initial_lr", "X",
     "with optimizer: learning rate from which a scheduler computes, if the run does not say it",
     .also = "base_lr max_lr", .set = set_hyper},
    {"min_lr", "X",
     "with optimizer: learning rate at which a scheduler ends, if the run does not say it",
     .set = set_hyper},
    {"betas", "B1+B2", "with optimizer: Adam's betas, if the run does not say them",
     .also = "adam_betas", .set = set_hyper},
    {"eps", "X", "with optimizer: Adam's epsilon, if the run does not say it",
     .also = "adam_eps adam_epsilon epsilon", .set = set_hyper},
    {"weight_decay", "X", "with optimizer: weight decay, if the run does not say it", .also = "wd",
     .set = set_hyper},
    {"optimizer_step", "N", "with optimizer: steps that it has taken, if the run does not say it",
     .set = set_hyper},
    {"average", "last:K|STEP+STEP", "the mean of several steps, as one model",
     .kind = CKPT_OPTION_TEXT, .at = offsetof(struct ckpt_options, average),
     .also = "avg average_checkpoints num_checkpoints merge_checkpoints soup model_soup swa"},
    {"variant", "NAME", "weights of a Hugging Face directory that has several, such as fp16",
     .kind = CKPT_OPTION_TEXT, .at = offsetof(struct ckpt_options, variant)},
    {"recipe", "FILE|DIR", "the mapping to use instead of the built-in ones", PATH(recipe),
     .also = "mapping mapping_file weight_mapping name_mapping converter state_dict_adapter"},
    {"key_mapping", "FILE", "JSON file of rules that rename the base's tensors", PATH(key_mapping),
     .also = "rename rename_keys key_map"},
    {"model_type", "TYPE", "family of the model, if neither checkpoint nor base says it",
     .also = "architecture arch model_arch model_family family model_class "
             "model_flavor model_architecture",
     .set = set_model_type},
    {"rope", "auto|interleaved|half",
     "order of the rotary dimensions, if the checkpoint states the wrong one",
     .also = "rotary_interleaved:interleaved interleaved:interleaved rope_style permute_qk",
     .set = set_rope},
    {"dequantize", NULL, "show block-scaled weights (FP8, MXFP4) as ordinary ones",
     .also = "dequant dequantise unquantize fp8_to_bf16 fp8_cast_bf16", FLAG(dequantize)},
    {"lora", "adapter|merge|base", "what to show of LoRA matrices", CHOICE(lora),
     .also = "merge:merge merge_lora:merge merge_adapter:merge merge_adapters:merge "
             "merge_and_unload:merge merge_weights:merge adapter:adapter adapters:adapter "
             "adapter_only:adapter lora_only:adapter export_adapter:adapter peft lora_path "
             "lora_adapter lora_mode adapter_path adapter_name_or_path"},
    {"lora_alpha", "X", "alpha of the LoRA matrices, if the checkpoint does not say it",
     .also = "alpha adapter_alpha", .set = set_alpha},
    {"missing", "error|base", "base: tensors that the checkpoint lacks come from base= (error)",
     .also = "fill_missing:base missing_from_base:base allow_missing:base missing_keys",
     .kind = CKPT_OPTION_CHOICE, .at = offsetof(struct ckpt_options, missing)},
    {"allow_partial", NULL, "leave incomplete tensors out, and show a model that lacks tensors",
     .also = "strict partial allow_partial_load ignore_missing skip_missing ignore_incomplete "
             "no_strict non_strict ignore_mismatched_sizes",
     FLAG(allow_partial)},
    {"allow_leftover", NULL, "leave out tensors that the model does not have",
     .also = "allow_unexpected ignore_unexpected skip_unexpected ignore_extra allow_extra",
     FLAG(allow_leftover)},
    {"allow_mixed", NULL, "show a step whose shards are of two saves, or are being written",
     FLAG(allow_mixed)},
    {"follow_symlinks", NULL, "follow symbolic links that lead out of the run",
     .also = "follow_links symlinks dereference", FLAG(follow_symlinks)},
    {"wait", NULL, "a folder without a step is no error", FLAG(wait)},
    {"far", "auto|always|never",
     "read as from storage at a distance: ahead, many requests at once (auto: what the "
     "filesystem is)",
     .also = "network remote nfs:always lustre:always gpfs:always remote_storage",
     .kind = CKPT_OPTION_CHOICE, .at = offsetof(struct ckpt_options, far)},
    {"cache_dir", "DIR|no",
     "folder of a temporary file for decompressed arrays, each of which is then decompressed once "
     "(export: beside DEST)",
     .also = "tmpdir tmp_dir temp_dir scratch scratch_dir spill_dir", .set = set_cache_dir},
    {"connections", "N", "requests at once (32; 64 for small reads)",
     .also = "max_connections max_concurrency concurrency parallel_downloads",
     .kind = CKPT_OPTION_NUMBER, .least = 1, .most = 1024,
     .at = offsetof(struct ckpt_options, bucket.connections), .topic = CKPT_TOPIC_BUCKET},
    {"timeout", "S", "seconds without an answer to one request (60; 120 of a file)",
     .also = "request_timeout connect_timeout", .kind = CKPT_OPTION_SECONDS,
     .at = offsetof(struct ckpt_options, bucket.timeout_ms), .topic = CKPT_TOPIC_BUCKET},
    {"cache", "DIR|no", "where headers are kept (in the user's cache folder)", .set = set_cache,
     .topic = CKPT_TOPIC_BUCKET},
    {"anonymous", NULL, "do not sign requests, which a public bucket allows",
     .also = "anon no_sign_request unsigned", FLAG(bucket.anonymous), .topic = CKPT_TOPIC_BUCKET},
    {"names", "hub|memory", "of view=dcp and others without names of their own: the tensors'",
     CHOICE(output.names), .topic = CKPT_TOPIC_FORMAT},
    {"fuse_qkv", NULL,
     "with optimizer: states of q, k and v as one parameter, as of models that fuse them",
     .also = "fused_qkv fuse_qkv_proj", .set = set_fuse_qkv, .topic = CKPT_TOPIC_FORMAT},
    {"ranks", "N", "ranks that divide each tensor",
     .also = "world_size target_world_size num_ranks nranks num_shards", PARTS(CKPT_CUT_RANKS)},
    {"tp", "N", "tensor-parallel ranks",
     .also = "tp_size tensor_parallel tensor_parallel_size tensor_model_parallel_size "
             "target_tensor_parallel_size target_tp model_parallel_size",
     PARTS(CKPT_CUT_TP)},
    {"pp", "N", "stages of the pipeline",
     .also = "pp_size pipeline_parallel pipeline_parallel_size pipeline_model_parallel_size "
             "target_pipeline_parallel_size target_pp",
     PARTS(CKPT_CUT_PP)},
    {"vpp", "N", "parts of a stage that take turns",
     .also = "vpp_size virtual_pipeline_model_parallel_size virtual_pipeline_parallel_size "
             "virtual_pp",
     PARTS(CKPT_CUT_VPP)},
    {"ep", "N", "expert-parallel ranks",
     .also = "expert_parallel expert_parallel_size expert_model_parallel_size "
             "target_expert_parallel_size target_ep",
     PARTS(CKPT_CUT_EP)},
    {"etp", "N", "ranks that divide an expert",
     .also = "etp_size expert_tensor_parallel_size target_expert_tensor_parallel_size",
     PARTS(CKPT_CUT_ETP)},
    {"make_vocab_size_divisible_by", "N",
     "rows of the vocabulary on each tensor-parallel rank are a multiple of N",
     PARTS(CKPT_CUT_VOCAB)},
    {"global_batch_size", "N",
     "with optimizer: samples of a training step, by which a scheduler counts",
     PARTS(CKPT_CUT_BATCH)},
};

enum { NOPTIONS = sizeof options / sizeof *options };

/* The row of a word of the table above. */
static const struct ckpt_option *find_row(const char *key)
{
    for (size_t i = 0; i < NOPTIONS; i++)
        if (strcmp(options[i].word, key) == 0)
            return &options[i];
    return NULL;
}

/* The i-th of the words that writers have for options; NULL: there are no more. */
static const struct ckpt_writer_word *writers_word(size_t i)
{
    for (const struct ckpt_writer *const *w = ckpt_writers; *w; w++)
        for (const struct ckpt_writer_word *word = (*w)->words; word && word->word; word++)
            if (i-- == 0)
                return word;
    return NULL;
}

/* Find an option by its word, or by a writer's word for it, which *ret then has. */
static bool find_option(const char *key, struct ckpt_option *ret)
{
    const struct ckpt_option *row = find_row(key);
    const struct ckpt_writer_word *word;

    for (size_t i = 0; !row && (word = writers_word(i)); i++)
        row = strcmp(word->word, key) == 0 ? find_row(word->means) : NULL;
    if (row) {
        *ret = *row;
        ret->word = key;
    }
    return row;
}

const struct ckpt_option *ckpt_options_row(size_t i) { return i < NOPTIONS ? &options[i] : NULL; }

const char *ckpt_options_word(size_t i, const char **ret_value, const char **ret_help)
{
    if (i >= NOPTIONS) {
        const struct ckpt_writer_word *word = writers_word(i - NOPTIONS);
        if (!word)
            return NULL;
        *ret_value = find_row(word->means)->value;
        *ret_help = word->help;
        return word->word;
    }
    *ret_value = options[i].value;
    *ret_help = options[i].help;
    return options[i].word;
}

enum ckpt_option_topic ckpt_options_topic(size_t i)
{
    return i < NOPTIONS ? (enum ckpt_option_topic)options[i].topic : CKPT_TOPIC_FORMAT;
}

char *ckpt_options_meant(const char *word)
{
    char *meant = NULL;

    for (size_t i = 0; i < NOPTIONS && !meant; i++)
        meant = ckpt_option_meant(&options[i], word);
    for (const struct ckpt_writer *const *w = ckpt_writers; *w && !meant; w++)
        meant = ckpt_words_find((*w)->also, word) ? ckpt_asprintf("view=%s", (*w)->name) : NULL;
    return meant;
}

static int fail_unknown(const char *key, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *meant = ckpt_options_meant(key);
    const char *known, *value, *help;
    struct ckpt_near near = {0};

    for (size_t i = 0; (known = ckpt_options_word(i, &value, &help)); i++)
        ckpt_near_consider(&near, key, known);
    const char *shown = meant ? meant : near.word;
    return ckpt_fail(err, CKPT_USAGE, "there is no option '%s'%s%s", key,
                     shown ? "; did you mean " : "", shown ? shown : "");
}

/* Set a number of the model, under its key in config.json. */
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
    return set_override(opt, key, key, v, err);
}

bool ckpt_options_knows(const char *key)
{
    struct ckpt_option o;

    return find_option(key, &o) || ckpt_keys_known(key);
}

int ckpt_options_set(struct ckpt_options *opt, const char *key, const char *value,
                     struct ckpt_err *err)
{
    struct ckpt_option o;

    if (find_option(key, &o))
        return ckpt_option_set(&o, opt, value, err);
    if (ckpt_keys_known(key))
        return set_model_key(opt, key, value, err);
    return fail_unknown(key, err);
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
    return h * 31 + (t->names == CKPT_OUTPUT_NAMES_MEMORY) + 2 * (uint64_t)t->fuse_qkv;
}

uint64_t ckpt_options_hash(const struct ckpt_options *opt)
{
    ckpt_cleanup(ckpt_freep) char *overrides =
        json_dumps(opt->overrides, JSON_COMPACT | JSON_SORT_KEYS);
    ckpt_cleanup(ckpt_freep) char *text = ckpt_asprintf(
        "%s|%s|%s|%s|%s|%s|%s|%d|%d|%llu|%d|%d|%d|%d|%s", opt->base ? opt->base : "",
        opt->part ? opt->part : "", opt->state ? opt->state : "", opt->average ? opt->average : "",
        opt->variant ? opt->variant : "", opt->recipe ? opt->recipe : "",
        opt->key_mapping ? opt->key_mapping : "", (int)opt->dtype_rule, (int)opt->dtype,
        (unsigned long long)opt->max_shard_size, opt->raw + 2 * opt->memory,
        opt->dequantize + 2 * opt->optimizer, (int)opt->lora,
        opt->allow_partial + 2 * (int)opt->missing, overrides ? overrides : "");
    uint64_t seed = hash_output(&opt->output);
    for (size_t i = 0; i < opt->also.len; i++)
        seed = XXH3_64bits_withSeed(opt->also.ptr[i], strlen(opt->also.ptr[i]), seed);
    return text ? XXH3_64bits_withSeed(text, strlen(text), seed) : 0;
}
