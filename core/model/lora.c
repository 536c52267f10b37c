/* SPDX-License-Identifier: Apache-2.0 */
/* Merging LoRA: from an adapter's names to tensors of the base, and how each pair of matrices is
 * stored. */
#include "model/lora.h"

#include <inttypes.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/regex.h"
#include "base/sort.h"
#include "base/str.h"
#include "model/experts.h"
#include "model/fit.h"
#include "recipe/apply/instance.h"
#include "recipe/language/field.h"
#include "tensor/lora.h"
#include "tensor/read.h"
#include "tensor/rows.h"
#include "tensor/slice.h"
#include "tensor/value.h"

#define ROOT "base_model.model."

struct merge {
    struct ckpt_catalog *cat;
    const struct ckpt_catalog *adapter;
    const struct ckpt_lora_options *opt;
    uint32_t first_source; /* number of the adapter's first source in cat */
    bool *used;            /* tensors of the adapter that were used */
    struct ckpt_err *err;
};

/* ---- adapter_config.json ---- */

/* Keys which, unless null, false or empty, mean a variant that is not W + s B A, or one with a
 * changed W. */
static const char *const refused[] = {
    "fan_in_fan_out", "layer_replication", "alora_invocation_tokens", "arrow_config", "use_qalora",
    "use_bdlora",     "kasa_config",       "monteclora_config",       "use_mica"};

/* Values of init_lora_weights (their beginnings) with which the adapter is relative to other
 * weights than the base's. */
static const char *const changing[] = {"pissa", "corda", "olora", "loftq", "lora_ga", "mica"};

static bool is_set(const json_t *v)
{
    return v && !json_is_null(v) && !json_is_false(v) &&
           !(json_is_object(v) && json_object_size(v) == 0) &&
           !(json_is_array(v) && json_array_size(v) == 0);
}

/* Check that the adapter can be merged. UNSUPPORTED: another kind of adapter. MISSING: r or
 * lora_alpha. */
static int config_check(const json_t *config, struct ckpt_err *err)
{
    const char *type = ckpt_json_str(config, "peft_type"),
               *init = ckpt_json_str(config, "init_lora_weights");
    uint64_t r;

    if (!type || strcmp(type, "LORA") != 0)
        return ckpt_fail(err, CKPT_UNSUPPORTED, "the adapter's peft_type is %s: only LORA merges",
                         type ? type : "not known");
    for (size_t i = 0; i < sizeof refused / sizeof refused[0]; i++)
        if (is_set(json_object_get(config, refused[i])))
            return ckpt_fail(err, CKPT_UNSUPPORTED, "the adapter has '%s': it can't be merged here",
                             refused[i]);
    for (size_t i = 0; init && i < sizeof changing / sizeof changing[0]; i++)
        if (ckpt_has_prefix(init, changing[i]))
            return ckpt_fail(err, CKPT_UNSUPPORTED,
                             "the adapter's init_lora_weights is '%s': it is relative to other "
                             "weights than the base's",
                             init);
    if (!ckpt_json_u64(config, "r", &r) || r == 0 ||
        !json_is_number(json_object_get(config, "lora_alpha")))
        return ckpt_fail(
            err, CKPT_MISSING,
            "adapter_config.json has no 'r' or no 'lora_alpha' (option lora_alpha=...)");
    return 0;
}

/* Find the first entry whose pattern matches the end of the name, as PEFT's get_pattern_key does.
 * *ret is NULL if none does. */
static int find_pattern(const json_t *patterns, const char *name, const json_t **ret,
                        struct ckpt_err *err)
{
    const char *key;
    json_t *value;

    *ret = NULL;
    json_object_foreach((json_t *)patterns, key, value) {
        ckpt_cleanup(ckpt_freep) char *pattern = ckpt_asprintf("^(.*\\.)?(%s)$", key);
        ckpt_cleanup(ckpt_freep) char *matched = NULL;
        struct ckpt_regex *regex;
        if (!pattern)
            return ckpt_nomem(err);
        if (ckpt_regex_new(pattern, "", &regex, err) < 0)
            return ckpt_err_in(err, "adapter_config.json");
        int result = ckpt_regex_sub(regex, name, &matched, err);
        ckpt_regex_free(regex);
        if (result < 0)
            return -1;
        if (matched) {
            *ret = value;
            return 0;
        }
    }
    return 0;
}

int ckpt_lora_rank(const json_t *config, const char *module, uint64_t *ret, struct ckpt_err *err)
{
    const json_t *r;

    if (find_pattern(json_object_get(config, "rank_pattern"), module, &r, err) < 0)
        return -1;
    r = r ? r : json_object_get(config, "r");
    *ret = json_is_integer(r) && json_integer_value(r) > 0 ? (uint64_t)json_integer_value(r) : 0;
    return 0;
}

bool ckpt_lora_is_variant(const json_t *config)
{
    for (size_t i = 0; i < sizeof refused / sizeof refused[0]; i++)
        if (strcmp(refused[i], "fan_in_fan_out") != 0 &&
            is_set(json_object_get(config, refused[i])))
            return true;
    return is_set(json_object_get(config, "trainable_token_indices"));
}

/* The scale lora_alpha / r (or / sqrt(r)) of the module or parameter `name`, whose matrices have
 * this rank. CONFLICT: the config gives it another rank. */
static int config_scale(const json_t *config, const char *name, uint64_t rank, double *ret,
                        struct ckpt_err *err)
{
    const json_t *alpha;
    uint64_t r;

    if (ckpt_lora_rank(config, name, &r, err) < 0 ||
        find_pattern(json_object_get(config, "alpha_pattern"), name, &alpha, err) < 0)
        return -1;
    alpha = alpha ? alpha : json_object_get(config, "lora_alpha");
    if (r != rank)
        return ckpt_fail(err, CKPT_CONFLICT,
                         "LoRA of '%s' has rank %" PRIu64 ", adapter_config.json says %" PRIu64,
                         name, rank, r);
    if (!json_is_number(alpha))
        return ckpt_fail(err, CKPT_FORMAT, "adapter_config.json: the alpha of '%s' is not a number",
                         name);
    *ret = json_number_value(alpha) /
           (ckpt_json_bool(config, "use_rslora", false) ? sqrt((double)rank) : (double)rank);
    return 0;
}

/* List the parameters of module `name` that target_parameters names, in the order in which their
 * wrappers are nested, innermost first: that in which transformers' modules declare them. Fills at
 * most `cap`; returns their number. */
static size_t config_parameters(const json_t *config, const struct ckpt_type *type,
                                const char *name, const char **ret, size_t cap)
{
    const json_t *targets = json_object_get(config, "target_parameters"), *t;
    size_t n = 0, i;

    for (size_t k = 0; k < type->parameters.n; k++)
        json_array_foreach((json_t *)targets, i, t) {
            const char *text = json_string_value(t), *dot = text ? strrchr(text, '.') : NULL;
            const char *leaf = dot ? dot + 1 : text;
            ckpt_cleanup(ckpt_freep) char *module =
                dot ? strndup(text, (size_t)(dot - text)) : NULL;
            if (!leaf || strcmp(leaf, type->parameters.text[k]) != 0 ||
                (module && !ckpt_has_suffix(name, module)))
                continue;
            if (n < cap)
                ret[n] = type->parameters.text[k];
            n++;
            break;
        }
    return n;
}

/* A base holds experts' parameters as [experts, rows, columns]. Does A multiply the rows and B the
 * columns? PEFT's A multiplies the dimension that it takes for the input: the last one since PEFT
 * 0.19, the middle one before. Some models hold [experts, in, out] in memory, others only on the
 * hub. Returns 0 or 1; -1: the configs do not say. */
static int config_turned(const struct ckpt_lora_options *opt)
{
    const enum ckpt_experts_turned turned = opt->type->experts_turned;
    const char *version = opt->notes.peft_version ? opt->notes.peft_version
                                                  : ckpt_json_str(opt->adapter, "peft_version");
    int major, minor;

    if (turned == CKPT_EXPERTS_TURNED_MEMORY)
        return 1;
    if (!version || sscanf(version, "%9d.%9d", &major, &minor) != 2)
        return -1;
    return (major == 0 && minor < 19) != (turned == CKPT_EXPERTS_TURNED_HUB);
}

/* ---- catalogues ---- */

/* A tensor of the adapter, over cat's sources; it is marked as used. */
static int adopt(struct merge *m, const struct ckpt_tensor *t, struct ckpt_tensor *ret)
{
    m->used[t - m->adapter->tensors.ptr] = true;
    *ret = *t;
    ret->name = ckpt_arena_strdup(&m->cat->arena, t->name);
    uint64_t *dim = ckpt_arena_alloc(&m->cat->arena, t->rank * sizeof *dim);
    if (!ret->name || !dim)
        return ckpt_nomem(m->err);
    memcpy(dim, t->dim, t->rank * sizeof *dim);
    ret->dim = dim;
    return ckpt_tensor_copy_pieces(m->cat, ret, t, m->first_source, m->err);
}

/* Find the tensor "<module><leaf>" of the adapter; NULL: none. */
static const struct ckpt_tensor *find_part(const struct merge *m, const char *module,
                                           const char *leaf)
{
    ckpt_cleanup(ckpt_freep) char *name = ckpt_asprintf(ROOT "%s%s", module, leaf);
    return name ? ckpt_catalog_find(m->adapter, name) : NULL;
}

/* Find the base's tensor whose name in memory is "<module><leaf>"; SIZE_MAX: there is none. */
static size_t find_weight_of(const struct merge *m, const char *module, const char *leaf)
{
    ckpt_cleanup(ckpt_freep) char *name = ckpt_asprintf("%s%s", module, leaf);
    return name ? ckpt_experts_tensor(m->cat, m->opt->base_names, name) : SIZE_MAX;
}

/* Find the input embedding if the module is the output embedding that the base ties to it, and so
 * has no weight of its own; SIZE_MAX: it is not. */
static size_t find_tied(const struct merge *m, const char *module)
{
    const struct ckpt_texts *embedding = &m->opt->type->embedding;
    ckpt_cleanup(ckpt_freep) char *name = ckpt_asprintf("%s.weight", module);
    size_t at = SIZE_MAX;

    if (!name || !ckpt_texts_have(&m->opt->type->output, name, strlen(name)) ||
        !ckpt_json_bool(m->opt->config, "tie_word_embeddings", false))
        return SIZE_MAX;
    for (size_t i = 0; i < embedding->n && at == SIZE_MAX; i++)
        at = ckpt_experts_tensor(m->cat, m->opt->base_names, embedding->text[i]);
    return at;
}

static int check_weight(const struct merge *m, size_t index)
{
    const struct ckpt_tensor *t = &m->cat->tensors.ptr[index];

    const char *elsewhere = ckpt_config_dequantized_by(m->opt->config),
               *dtype = ckpt_dtype_name((enum ckpt_dtype)t->dtype);

    if (ckpt_dtype_is_castable((enum ckpt_dtype)t->dtype))
        return 0;
    if (elsewhere)
        return ckpt_fail(m->err, CKPT_UNSUPPORTED,
                         "the base's '%s' is %s, and the option dequantize does not know such "
                         "weights. Two steps work: %s; and lora=merge with base=DIR. Or give the "
                         "model before it was quantised as base=",
                         t->name, dtype, elsewhere);
    return ckpt_fail(m->err, CKPT_UNSUPPORTED,
                     "the base's '%s' is %s: quantised weights merge with the option dequantize",
                     t->name, dtype);
}

/* ---- one pair of matrices ---- */

/* Two matrices as operands [stack, rank, columns] and [stack, rows, rank]. */
struct layout {
    const char *a,
        *b;      /* patterns of their axes: k (the rank), c (columns), o (rows), e (the stack) */
    bool turned; /* B's elements come from the adapter's A */
};

static int rearrange_pair(struct merge *m, const struct layout *l, const struct ckpt_tensor *a,
                          const struct ckpt_tensor *b, bool stacked, struct ckpt_tensor ret[2])
{
    struct ckpt_tensor own_a, own_b;

    if (adopt(m, a, &own_a) < 0 || adopt(m, b, &own_b) < 0)
        return -1;
    return ckpt_rearrange(m->cat, l->turned ? &own_b : &own_a, l->a, stacked ? "e k c" : "1 k c",
                          &ret[0], m->err) < 0 ||
                   ckpt_rearrange(m->cat, l->turned ? &own_a : &own_b, l->b,
                                  stacked ? "e o k" : "1 o k", &ret[1], m->err) < 0
               ? -1
               : 0;
}

/* Find DoRA's magnitudes of the rows; ret->name is NULL if the adapter has none. */
static int find_magnitude(struct merge *m, const char *module, struct ckpt_tensor *ret)
{
    const struct ckpt_tensor *t = find_part(m, module, ".lora_magnitude_vector");
    const bool dora = ckpt_json_bool(m->opt->adapter, "use_dora", false);

    *ret = (struct ckpt_tensor){0};
    if (!t)
        t = find_part(m, module, ".lora_magnitude_vector.weight");
    if (!t != !dora)
        return ckpt_fail(m->err, dora ? CKPT_MISSING : CKPT_CONFLICT,
                         "use_dora is %s, but the adapter has %s '%s.lora_magnitude_vector'",
                         dora ? "true" : "false", dora ? "no" : "a", module);
    return t ? adopt(m, t, ret) : 0;
}

static int merge_bias(struct merge *m, const char *module, double scale)
{
    const struct ckpt_tensor *t = find_part(m, module, ".lora_B.bias");
    const size_t bias = t ? find_weight_of(m, module, ".bias") : SIZE_MAX;
    struct ckpt_tensor own;

    if (!t)
        return 0;
    if (bias == SIZE_MAX)
        return ckpt_fail(m->err, CKPT_MISSING, "'%s' has a bias of LoRA, but the base has none",
                         module);
    return adopt(m, t, &own) < 0 ? -1 : ckpt_value_lora_bias(m->cat, bias, &own, scale, m->err);
}

/* Merge a module with one weight: a linear layer or an embedding. */
static int merge_module(struct merge *m, const char *module, size_t weight, bool embedding,
                        const struct ckpt_tensor *a, const struct ckpt_tensor *b)
{
    static const struct layout linear = {"k c", "o k", false}, turned = {"c k", "k o", true};
    struct ckpt_tensor pair[2], magnitude;
    struct ckpt_lora lora = {.a = &pair[0], .b = &pair[1]};

    if (a->rank != 2 || b->rank != 2)
        return ckpt_fail(m->err, CKPT_UNSUPPORTED, "LoRA of '%s', which is not a linear layer",
                         module);
    if (check_weight(m, weight) < 0 ||
        config_scale(m->opt->adapter, module, a->dim[0], &lora.scale, m->err) < 0 ||
        rearrange_pair(m, embedding ? &turned : &linear, a, b, false, pair) < 0 ||
        find_magnitude(m, module, &magnitude) < 0)
        return -1;
    if (magnitude.name && embedding)
        return ckpt_fail(m->err, CKPT_UNSUPPORTED, "DoRA of the embedding '%s'", module);
    lora.magnitude = magnitude.name ? &magnitude : NULL;
    lora.rounded = embedding;
    if (ckpt_value_lora(m->cat, weight, &lora, 0, m->err) < 0)
        return -1;
    return merge_bias(m, module, lora.scale);
}

/* ---- parameters of experts ---- */

/* Choose between the two ways in which A and B can be stored; for square parameters the shapes fit
 * both. */
static int choose_layout(const struct merge *m, const struct ckpt_experts *x, const char *module,
                         const struct ckpt_tensor *a, const struct ckpt_tensor *b, bool *ret_turned)
{
    const bool straight = a->dim[1] == x->cols && b->dim[0] == x->rows;
    const bool turned = a->dim[1] == x->rows && b->dim[0] == x->cols;
    const int said = config_turned(m->opt);

    if (!straight && !turned)
        return ckpt_fail(m->err, CKPT_CONFLICT,
                         "LoRA of '%s' is of %" PRIu64 " x %" PRIu64
                         " matrices, the base's experts have %" PRIu64 " x %" PRIu64,
                         module, b->dim[0], a->dim[1], x->rows, x->cols);
    if (straight && turned && said < 0)
        return ckpt_fail(m->err, CKPT_UNSUPPORTED,
                         "LoRA of '%s', whose experts are square: adapter_config.json has no "
                         "peft_version that says how A and B are stored",
                         module);
    *ret_turned = straight && turned ? said == 1 : turned;
    return 0;
}

static int merge_experts(struct merge *m, const struct ckpt_experts *x,
                         const struct ckpt_lora *lora)
{
    uint64_t row = 0;

    for (size_t i = 0; i < x->tensor.len; i++) {
        const size_t at = x->tensor.ptr[i];
        if (check_weight(m, at) < 0 || ckpt_value_lora(m->cat, at, lora, row, m->err) < 0)
            return -1;
        row += m->cat->tensors.ptr[at].dim[0];
    }
    return 0;
}

static int merge_parameter(struct merge *m, const char *name, const struct ckpt_experts *x,
                           const struct ckpt_tensor *a, const struct ckpt_tensor *b)
{
    struct ckpt_tensor pair[2];
    struct ckpt_lora lora = {.a = &pair[0], .b = &pair[1], .rounded = !m->opt->notes.exact};
    struct layout layout = {0};
    char outer[64], inner[64];

    if (a->rank != 2 || b->rank != 2 || a->dim[0] != b->dim[1] || a->dim[0] % x->count)
        return ckpt_fail(m->err, CKPT_CONFLICT, "LoRA of '%s' is not of %" PRIu64 " experts", name,
                         x->count);
    if (config_scale(m->opt->adapter, name, a->dim[0] / x->count, &lora.scale, m->err) < 0 ||
        choose_layout(m, x, name, a, b, &layout.turned) < 0)
        return -1;
    (void)snprintf(outer, sizeof outer, "(e=%" PRIu64 " k) %c", x->count,
                   layout.turned ? 'o' : 'c');
    (void)snprintf(inner, sizeof inner, "%c (k e=%" PRIu64 ")", layout.turned ? 'c' : 'o',
                   x->count);
    layout.a = layout.turned ? inner : outer;
    layout.b = layout.turned ? outer : inner;
    return rearrange_pair(m, &layout, a, b, true, pair) < 0 ? -1 : merge_experts(m, x, &lora);
}

/* ---- an adapter's tensors ---- */

enum { MOST_PARAMETERS = 2 };

/* Merge the parameters of one module. Their wrappers are nested: "experts.base_layer.lora_A". */
static int merge_wrapped(struct merge *m, const char *module, const struct ckpt_tensor *a,
                         const struct ckpt_tensor *b)
{
    static const char inner[] = ".base_layer";
    ckpt_cleanup(ckpt_freep) char *name = strdup(module);
    ckpt_cleanup(ckpt_freep) char *whole = NULL;
    ckpt_cleanup(ckpt_experts_release) struct ckpt_experts x = {0};
    const char *parameter[MOST_PARAMETERS];
    size_t depth = 0, n;

    if (!name)
        return ckpt_nomem(m->err);
    for (; ckpt_has_suffix(name, inner); depth++)
        name[strlen(name) - strlen(inner)] = '\0';
    n = config_parameters(m->opt->adapter, m->opt->type, name, parameter, MOST_PARAMETERS);
    if (n == 0)
        return ckpt_fail(m->err, CKPT_MISSING,
                         "the base has no '%s.weight' that the adapter could change%s", name,
                         ckpt_json_bool(m->opt->config, "tie_word_embeddings", false)
                             ? " (its embeddings are tied)"
                             : "");
    if (depth >= n || n > MOST_PARAMETERS)
        return ckpt_fail(m->err, CKPT_MISSING,
                         "target_parameters do not say which parameter of '%s' is changed by '%s'",
                         name, a->name);
    const char *leaf = parameter[n - 1 - depth];
    if (!(whole = ckpt_asprintf("%s.%s", name, leaf)))
        return ckpt_nomem(m->err);
    return ckpt_experts_find(m->cat, m->opt->type, m->opt->base_names, name, leaf, &x, m->err) < 0
               ? -1
               : merge_parameter(m, whole, &x, a, b);
}

static int merge_pair(struct merge *m, const struct ckpt_tensor *a, const char *tail_a,
                      const char *tail_b)
{
    const char *below = a->name + strlen(ROOT);
    ckpt_cleanup(ckpt_freep) char *module = strndup(below, strlen(below) - strlen(tail_a));
    const struct ckpt_tensor *b = module ? find_part(m, module, tail_b) : NULL;
    const bool embedding = strcmp(tail_a, ".lora_embedding_A") == 0;

    if (!module)
        return ckpt_nomem(m->err);
    if (!b)
        return ckpt_fail(m->err, CKPT_MISSING, "the adapter has '%s', but no '%s%s'", a->name,
                         module, tail_b);
    size_t weight = find_weight_of(m, module, ".weight");
    if (weight == SIZE_MAX) /* as PEFT does, whose layers have one matrix then */
        weight = find_tied(m, module);
    if (weight != SIZE_MAX)
        return merge_module(m, module, weight, embedding, a, b);
    if (embedding)
        return ckpt_fail(m->err, CKPT_MISSING, "the base has no '%s.weight' for the adapter",
                         module);
    return merge_wrapped(m, module, a, b);
}

/* Replace an embedding, whose vocabulary may have grown. */
static int resize(struct merge *m, const struct ckpt_tensor *old, const struct ckpt_tensor *t)
{
    uint64_t vocab;
    const bool rows_only = old->rank == t->rank && t->rank > 0 &&
                           memcmp(old->dim + 1, t->dim + 1, (t->rank - 1) * sizeof *t->dim) == 0;

    if (rows_only && old->dim[0] == t->dim[0])
        return 0;
    if (!rows_only || !ckpt_json_u64(m->opt->config, "vocab_size", &vocab) ||
        (vocab != old->dim[0] && vocab != t->dim[0]))
        return ckpt_fail(m->err, CKPT_CONFLICT, "the adapter's '%s' is %s, the base's %s", t->name,
                         ckpt_shape_text(t->dim, t->rank).text,
                         ckpt_shape_text(old->dim, old->rank).text);
    return json_object_set_new(m->opt->config, "vocab_size", json_integer((json_int_t)t->dim[0])) <
                   0
               ? ckpt_nomem(m->err)
               : 0;
}

/* The output embedding that the adapter's tensor replaces, or NULL. */
static const char *output_of(const struct merge *m, const struct ckpt_tensor *t)
{
    const char *name = t->name + strlen(ROOT);
    const struct ckpt_texts *output = &m->opt->type->output;

    return ckpt_texts_have(output, name, strlen(name)) ? name : NULL;
}

/* Is t a copy of a tied embedding? With resized embeddings PEFT saves both embeddings, tied or not;
 * an output embedding that is not tied is a module to save. */
static bool is_tied_copy(const struct merge *m, const struct ckpt_tensor *t)
{
    const char *output = output_of(m, t);
    ckpt_cleanup(ckpt_freep) char *module = output ? strdup(output) : NULL;
    char *leaf = module ? strrchr(module, '.') : NULL;
    bool both = false;

    for (size_t i = 0; i < m->adapter->tensors.len; i++)
        both |= ckpt_texts_end(&m->opt->type->embedding, m->adapter->tensors.ptr[i].name);
    if (!both || !leaf)
        return false;
    *leaf = '\0';
    return ckpt_json_bool(m->opt->config, "tie_word_embeddings", false) &&
           !ckpt_field_lists(json_object_get(m->opt->adapter, "modules_to_save"), module);
}

/* Add an output embedding, which the base ties to the input embedding, as a tensor of its own. */
static int untie(struct merge *m, const struct ckpt_tensor *t, size_t *ret_at)
{
    const char *head = output_of(m, t);

    if (!head || !ckpt_json_bool(m->opt->config, "tie_word_embeddings", false))
        return ckpt_fail(m->err, CKPT_UNSUPPORTED,
                         "the adapter has '%s', which is neither LoRA nor a tensor of the base",
                         t->name);
    if (json_object_set_new(m->opt->config, "tie_word_embeddings", json_false()) < 0)
        return ckpt_nomem(m->err);
    return ckpt_catalog_add(m->cat, head, (enum ckpt_dtype)t->dtype, t->dim, t->rank, ret_at,
                            m->err);
}

/* Skip the weight of a tied output embedding that LoRA changes: PEFT saves it beside the pair, and
 * it is the base's. CONFLICT: it is not. */
static int skip_tied_weight(struct merge *m, const struct ckpt_tensor *t, char *name)
{
    struct ckpt_tensor own;
    bool same = false;

    *strrchr(name, '.') = '\0';
    const size_t at = find_tied(m, name);
    if (at == SIZE_MAX)
        return ckpt_fail(m->err, CKPT_UNSUPPORTED,
                         "the adapter has '%s', which is neither LoRA nor a tensor of the base",
                         t->name);
    const struct ckpt_tensor *tied = &m->cat->tensors.ptr[at];
    if (adopt(m, t, &own) < 0 || (own.dtype == tied->dtype && ckpt_fit_shape(&own, tied) &&
                                  ckpt_tensor_same(&own, tied, &same, m->err) < 0))
        return -1;
    return same ? 0
                : ckpt_fail(m->err, CKPT_CONFLICT,
                            "the adapter's '%s' differs from the base's '%s', to which the model "
                            "ties it: is it another base's adapter?",
                            t->name, tied->name);
}

/* Replace a weight that was trained as a whole: modules_to_save, biases, resized embeddings. */
static int replace(struct merge *m, const struct ckpt_tensor *t)
{
    ckpt_cleanup(ckpt_freep) char *name = strdup(t->name + strlen(ROOT));
    struct ckpt_tensor own;

    if (!name)
        return ckpt_nomem(m->err);
    for (char *p; (p = strstr(name, ".base_layer.")) || (p = strstr(name, ".modules_to_save."));)
        memmove(p, strchr(p + 1, '.'), strlen(strchr(p + 1, '.')) + 1);
    size_t at = ckpt_experts_tensor(m->cat, m->opt->base_names, name);
    if (at == SIZE_MAX && is_tied_copy(m, t)) {
        m->used[t - m->adapter->tensors.ptr] = true;
        return 0;
    }
    if (at == SIZE_MAX && strstr(t->name, ".base_layer.weight"))
        return skip_tied_weight(m, t, name);
    if (at == SIZE_MAX && untie(m, t, &at) < 0)
        return -1;
    struct ckpt_tensor *old = &m->cat->tensors.ptr[at];
    const enum ckpt_dtype dtype = (enum ckpt_dtype)old->dtype;
    if (adopt(m, t, &own) < 0 || resize(m, old, &own) < 0)
        return -1;
    own.name = old->name;
    own.block = old->block;
    *old = own;
    return ckpt_dtype_is_castable(dtype) && ckpt_dtype_is_castable((enum ckpt_dtype)own.dtype)
               ? ckpt_value_cast(m->cat, at, (int)dtype, m->err)
               : 0;
}

/* ---- trained tokens: rows of an embedding ---- */

#define TOKENS ".token_adapter.trainable_tokens_delta"

static int row_cmp(const void *a, const void *b)
{
    const uint64_t *p = *(const uint64_t *const *)a, *q = *(const uint64_t *const *)b;
    return ckpt_u64_cmp(*p, *q);
}

/* The numbers of a module's tokens: of all modules, or by the ends of their names. */
static const json_t *tokens_of(const json_t *config, const char *module)
{
    const json_t *all = json_object_get(config, "trainable_token_indices"), *list;
    const char *key;

    json_object_foreach((json_t *)all, key, list) {
        if (ckpt_has_suffix(module, key))
            return list;
    }
    return all;
}

/* Read the list into row[], n numbers. */
static int read_tokens(const json_t *list, const char *module, uint64_t *row, size_t n,
                       struct ckpt_err *err)
{
    if (!json_is_array(list) || json_array_size(list) != n)
        return ckpt_fail(
            err, CKPT_CONFLICT,
            "the adapter has %zu trained tokens of '%s', and adapter_config.json lists "
            "%zu (trainable_token_indices)",
            n, module, json_array_size(list));
    for (size_t i = 0; i < n; i++) {
        const json_t *v = json_array_get(list, i);
        if (!json_is_integer(v) || json_integer_value(v) < 0)
            return ckpt_fail(err, CKPT_FORMAT,
                             "adapter_config.json: a trained token of '%s' is no number of one",
                             module);
        row[i] = (uint64_t)json_integer_value(v);
    }
    return 0;
}

/* Put the rows in ascending order: their numbers, and which rows of the adapter's tensor they are.
 */
static int sort_tokens(struct merge *m, struct ckpt_tensor *own, uint64_t *row, size_t n)
{
    ckpt_cleanup(ckpt_freep) const uint64_t **order = malloc((n + 1) * sizeof *order);
    ckpt_cleanup(ckpt_freep) struct ckpt_interval *part = malloc((n + 1) * sizeof *part);
    ckpt_cleanup(ckpt_freep) uint64_t *sorted = malloc((n + 1) * sizeof *sorted);
    struct ckpt_tensor whole = *own;

    if (!order || !part || !sorted)
        return ckpt_nomem(m->err);
    for (size_t i = 0; i < n; i++)
        order[i] = &row[i];
    ckpt_sort(order, n, row_cmp);
    for (size_t i = 0; i < n; i++) {
        part[i] = (struct ckpt_interval){(uint64_t)(order[i] - row), 1};
        sorted[i] = *order[i];
    }
    memcpy(row, sorted, n * sizeof *row);
    return ckpt_tensor_slice(m->cat, &whole, 0, part, n, own, m->err);
}

/* Merge trained tokens: as PEFT does, the rows are the adapter's, whatever the base's are. */
static int merge_tokens(struct merge *m, const struct ckpt_tensor *t)
{
    const char *below = t->name + strlen(ROOT);
    ckpt_cleanup(ckpt_freep) char *module = strndup(below, strlen(below) - strlen(TOKENS));
    const size_t n = t->rank ? (size_t)t->dim[0] : 0;
    ckpt_cleanup(ckpt_freep) uint64_t *row = malloc((n + 1) * sizeof *row);
    struct ckpt_tensor own;

    if (!module || !row)
        return ckpt_nomem(m->err);
    const size_t at = find_weight_of(m, module, ".weight");
    if (at == SIZE_MAX)
        return ckpt_fail(m->err, CKPT_MISSING, "the base has no '%s.weight' for the adapter's '%s'",
                         module, t->name);
    return read_tokens(tokens_of(m->opt->adapter, module), module, row, n, m->err) < 0 ||
                   adopt(m, t, &own) < 0 || sort_tokens(m, &own, row, n) < 0 ||
                   ckpt_value_rows(m->cat, at, &own, row, n, m->err) < 0
               ? -1
               : 0;
}

static bool has_tokens(const struct ckpt_catalog *adapter)
{
    for (size_t i = 0; i < adapter->tensors.len; i++)
        if (ckpt_has_suffix(adapter->tensors.ptr[i].name, TOKENS))
            return true;
    return false;
}

/* ---- all of them ---- */

static bool is_lora(const char *name) { return strstr(name, ".lora_") != NULL; }

static int merge_pairs(struct merge *m, const char *tail_a, const char *tail_b)
{
    for (size_t i = 0; i < m->adapter->tensors.len; i++) {
        const struct ckpt_tensor *t = &m->adapter->tensors.ptr[i];
        if (ckpt_has_suffix(t->name, tail_a) && merge_pair(m, t, tail_a, tail_b) < 0)
            return -1;
    }
    return 0;
}

static int merge_all(struct merge *m)
{
    const struct ckpt_catalog *adapter = m->adapter;

    for (size_t i = 0; i < adapter->tensors.len; i++) {
        const struct ckpt_tensor *t = &adapter->tensors.ptr[i];
        if (!ckpt_has_prefix(t->name, ROOT))
            return ckpt_fail(m->err, CKPT_FORMAT, "the adapter's '%s' is not below '" ROOT "'",
                             t->name);
        const bool tokens = ckpt_has_suffix(t->name, TOKENS);
        if (!tokens && !is_lora(t->name) && replace(m, t) < 0)
            return -1;
        if (tokens && merge_tokens(m, t) < 0)
            return -1;
    }
    /* embeddings come first: a tied matrix is changed by both kinds, and rounded in between */
    if (merge_pairs(m, ".lora_embedding_A", ".lora_embedding_B") < 0 ||
        merge_pairs(m, ".lora_A.weight", ".lora_B.weight") < 0)
        return -1;
    if (is_set(json_object_get(m->opt->adapter, "trainable_token_indices")) && !has_tokens(adapter))
        return ckpt_fail(m->err, CKPT_MISSING,
                         "adapter_config.json has trained tokens (trainable_token_indices), and "
                         "the adapter has no '" TOKENS "'");
    for (size_t i = 0; i < adapter->tensors.len; i++)
        if (!m->used[i])
            return ckpt_fail(m->err, CKPT_UNSUPPORTED,
                             "the adapter's '%s' belongs to no pair of "
                             "LoRA matrices",
                             adapter->tensors.ptr[i].name);
    return 0;
}

int ckpt_lora_merge(struct ckpt_catalog *cat, const struct ckpt_catalog *adapter,
                    const struct ckpt_lora_options *opt, struct ckpt_err *err)
{
    struct merge m = {.cat = cat,
                      .adapter = adapter,
                      .opt = opt,
                      .first_source = (uint32_t)cat->sources.len,
                      .err = err};
    int result;

    if (!opt->adapter)
        return ckpt_fail(err, CKPT_MISSING,
                         "lora=merge needs the adapter_config.json: beside the adapter, or in the "
                         "base");
    if (config_check(opt->adapter, err) < 0 || ckpt_catalog_add_sources(cat, adapter, err) < 0)
        return -1;
    if (!(m.used = calloc(adapter->tensors.len + 1, sizeof *m.used)))
        return ckpt_nomem(err);
    result = merge_all(&m);
    free(m.used);
    return result;
}
