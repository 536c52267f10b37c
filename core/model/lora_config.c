/* SPDX-License-Identifier: Apache-2.0 */
/* The members of PEFT's LoraConfig that merging needs. */
#include "model/lora_config.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/regex.h"
#include "base/str.h"

/* Keys which, unless null, false or empty, mean a variant that is not W + s B A, or one with a
 * changed W. */
static const char *const refused[] = {
    "fan_in_fan_out",
    "layer_replication",
    "trainable_token_indices",
    "alora_invocation_tokens",
    "arrow_config",
    "use_qalora",
    "use_bdlora",
    "kasa_config",
    "monteclora_config",
    "use_mica",
};

/* Values of init_lora_weights (their beginnings) with which the adapter is relative to other
 * weights than the base's. */
static const char *const changing[] = {"pissa", "corda", "olora", "loftq", "lora_ga", "mica"};

static bool is_set(const json_t *v)
{
    return v && !json_is_null(v) && !json_is_false(v) &&
           !(json_is_object(v) && json_object_size(v) == 0) &&
           !(json_is_array(v) && json_array_size(v) == 0);
}

int ckpt_lora_config_check(const json_t *config, struct ckpt_err *err)
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

/* As PEFT's get_pattern_key: the first entry whose pattern matches the end of the name. *ret is
 * NULL if none does. */
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

int ckpt_lora_config_scale(const json_t *config, const char *name, uint64_t rank, double *ret,
                           struct ckpt_err *err)
{
    const json_t *r, *alpha;

    if (find_pattern(json_object_get(config, "rank_pattern"), name, &r, err) < 0 ||
        find_pattern(json_object_get(config, "alpha_pattern"), name, &alpha, err) < 0)
        return -1;
    r = r ? r : json_object_get(config, "r");
    alpha = alpha ? alpha : json_object_get(config, "lora_alpha");
    if (!json_is_integer(r) || json_integer_value(r) <= 0 ||
        (uint64_t)json_integer_value(r) != rank)
        return ckpt_fail(err, CKPT_CONFLICT,
                         "LoRA of '%s' has rank %" PRIu64 ", adapter_config.json says %lld", name,
                         rank, (long long)json_integer_value(r));
    if (!json_is_number(alpha))
        return ckpt_fail(err, CKPT_FORMAT, "adapter_config.json: the alpha of '%s' is not a number",
                         name);
    *ret = json_number_value(alpha) /
           (ckpt_json_bool(config, "use_rslora", false) ? sqrt((double)rank) : (double)rank);
    return 0;
}

/* The order is that in which transformers' modules declare their parameters, which is also the
 * order of wrapping. */
size_t ckpt_lora_config_parameters(const json_t *config, const struct ckpt_type *type,
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

int ckpt_lora_config_turned(const json_t *config, const json_t *automodel,
                            const struct ckpt_type *type)
{
    const char *layout = ckpt_json_str(automodel, "paramwrapper_layout"),
               *version = ckpt_json_str(config, "peft_version");
    int major, minor;

    if (type->experts_turned == CKPT_EXPERTS_TURNED_MEMORY)
        return 1;
    if (layout && ckpt_has_prefix(layout, "peft-"))
        version = layout + strlen("peft-");
    if (!version || sscanf(version, "%9d.%9d", &major, &minor) != 2)
        return -1;
    return (major == 0 && minor < 19) != (type->experts_turned == CKPT_EXPERTS_TURNED_HUB);
}
