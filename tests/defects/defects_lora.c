/* SPDX-License-Identifier: Apache-2.0 */
/* Adapters that lie about their base, and kinds that do not merge. JSON stands here with ` for ".
 */
#include "defects.h"

#include <stdlib.h>

#include "model/lora.h"
#include "recipe/library/recipe.h"
#include "stored.h"

#define Q "base_model.model.l.0.q_proj."
#define X "base_model.model.l.0.mlp.experts."
#define GOOD "`peft_type`: `LORA`, `r`: 2, `lora_alpha`: 4"

/* name, shape up to a 0; F32 unless the name begins with '!' (F8_E4M3). */
struct part {
    const char *name;
    uint64_t dim[4];
};

#define PAIR                                                                                       \
    {Q "lora_A.weight", {2, 6}},                                                                   \
    {                                                                                              \
        Q "lora_B.weight", { 8, 2 }                                                                \
    }
#define WEIGHT                                                                                     \
    {                                                                                              \
        "l.0.q_proj.weight", { 8, 6 }                                                              \
    }
#define EXPERTS                                                                                    \
    {"l.0.mlp.experts.0.gate_proj.weight", {5, 6}}, {"l.0.mlp.experts.0.up_proj.weight", {5, 6}},  \
        {"l.0.mlp.experts.1.gate_proj.weight", {5, 6}},                                            \
    {                                                                                              \
        "l.0.mlp.experts.1.up_proj.weight", { 5, 6 }                                               \
    }

#define TOKENS "base_model.model.e.token_adapter.trainable_tokens_delta"

static const struct lie {
    const char *name, *config;
    struct part adapter[4], base[6];
    enum ckpt_code code;
    const char *needle;
} lies[] = {
    {"sound", GOOD, {PAIR}, {WEIGHT}, CKPT_OK, NULL},
    {"sound_in_full",
     GOOD ", `rank_pattern`: {}, `fan_in_fan_out`: false, `arrow_config`: null, "
          "`init_lora_weights`: `gaussian`",
     {PAIR},
     {WEIGHT},
     CKPT_OK,
     NULL},
    {"sound_patterns",
     "`peft_type`: `LORA`, `r`: 9, `lora_alpha`: 4, `rank_pattern`: {`q_pro.`: 2}",
     {PAIR},
     {WEIGHT},
     CKPT_OK,
     NULL},
    {"sound_experts",
     GOOD ", `target_parameters`: [`experts.gate_up_proj`]",
     {{X "lora_A.weight", {4, 6}}, {X "lora_B.weight", {10, 4}}},
     {EXPERTS},
     CKPT_OK,
     NULL},
    {"sound_saved_module",
     GOOD,
     {PAIR, {"base_model.model.h.weight", {3}}},
     {WEIGHT, {"h.weight", {3}}},
     CKPT_OK,
     NULL},
    {"no_type", "`r`: 2, `lora_alpha`: 4", {PAIR}, {WEIGHT}, CKPT_UNSUPPORTED, "peft_type"},
    {"ia3", "`peft_type`: `IA3`", {PAIR}, {WEIGHT}, CKPT_UNSUPPORTED, "IA3"},
    {"no_r", "`peft_type`: `LORA`, `lora_alpha`: 4", {PAIR}, {WEIGHT}, CKPT_MISSING, "'r'"},
    {"no_alpha", "`peft_type`: `LORA`, `r`: 4", {PAIR}, {WEIGHT}, CKPT_MISSING, "'lora_alpha'"},
    {"r_0", "`peft_type`: `LORA`, `r`: 0, `lora_alpha`: 4", {PAIR}, {WEIGHT}, CKPT_MISSING, "'r'"},
    {"r_text",
     "`peft_type`: `LORA`, `r`: `2`, `lora_alpha`: 4",
     {PAIR},
     {WEIGHT},
     CKPT_MISSING,
     "'r'"},
    {"other_r",
     "`peft_type`: `LORA`, `r`: 3, `lora_alpha`: 4",
     {PAIR},
     {WEIGHT},
     CKPT_CONFLICT,
     "rank 2, adapter_config.json says 3"},
    {"other_r_in_pattern",
     GOOD ", `rank_pattern`: {`.*`: 7}",
     {PAIR},
     {WEIGHT},
     CKPT_CONFLICT,
     "says 7"},
    {"pattern_text",
     GOOD ", `alpha_pattern`: {`q_proj`: `big`}",
     {PAIR},
     {WEIGHT},
     CKPT_FORMAT,
     "not a number"},
    {"pattern_open",
     GOOD ", `alpha_pattern`: {`(`: 3}",
     {PAIR},
     {WEIGHT},
     CKPT_USAGE,
     "adapter_config.json"},
    {"fan_in_fan_out",
     GOOD ", `fan_in_fan_out`: true",
     {PAIR},
     {WEIGHT},
     CKPT_UNSUPPORTED,
     "fan_in_fan_out"},
    {"tokens",
     GOOD ", `trainable_token_indices`: [1]",
     {PAIR},
     {WEIGHT},
     CKPT_MISSING,
     "trainable_token_indices"},
    {"sound_tokens",
     GOOD ", `trainable_token_indices`: [3, 1]",
     {PAIR, {TOKENS, {2, 6}}},
     {WEIGHT, {"e.weight", {4, 6}}},
     CKPT_OK,
     NULL},
    {"sound_tokens_by_module",
     GOOD ", `trainable_token_indices`: {`e`: [3, 1], `f`: [0]}",
     {PAIR, {TOKENS, {2, 6}}},
     {WEIGHT, {"e.weight", {4, 6}}},
     CKPT_OK,
     NULL},
    {"tokens_of_others",
     GOOD ", `trainable_token_indices`: {`f`: [3, 1]}",
     {PAIR, {TOKENS, {2, 6}}},
     {WEIGHT, {"e.weight", {4, 6}}},
     CKPT_CONFLICT,
     "lists 0"},
    {"tokens_fewer",
     GOOD ", `trainable_token_indices`: [1]",
     {PAIR, {TOKENS, {2, 6}}},
     {WEIGHT, {"e.weight", {4, 6}}},
     CKPT_CONFLICT,
     "2 trained tokens of 'e'"},
    {"tokens_twice",
     GOOD ", `trainable_token_indices`: [1, 1]",
     {PAIR, {TOKENS, {2, 6}}},
     {WEIGHT, {"e.weight", {4, 6}}},
     CKPT_CONFLICT,
     "row 1 of"},
    {"tokens_outside",
     GOOD ", `trainable_token_indices`: [1, 4]",
     {PAIR, {TOKENS, {2, 6}}},
     {WEIGHT, {"e.weight", {4, 6}}},
     CKPT_CONFLICT,
     "row 4 of 'e.weight' [4, 6] is not there"},
    {"tokens_negative",
     GOOD ", `trainable_token_indices`: [1, -4]",
     {PAIR, {TOKENS, {2, 6}}},
     {WEIGHT, {"e.weight", {4, 6}}},
     CKPT_FORMAT,
     "is no number of one"},
    {"tokens_wide",
     GOOD ", `trainable_token_indices`: [1, 3]",
     {PAIR, {TOKENS, {2, 5}}},
     {WEIGHT, {"e.weight", {4, 6}}},
     CKPT_CONFLICT,
     "[2, 5] has not the 2 rows"},
    {"tokens_nowhere",
     GOOD ", `trainable_token_indices`: [1, 3]",
     {PAIR, {TOKENS, {2, 6}}},
     {WEIGHT},
     CKPT_MISSING,
     "no 'e.weight'"},
    {"replicated",
     GOOD ", `layer_replication`: [[0, 4]]",
     {PAIR},
     {WEIGHT},
     CKPT_UNSUPPORTED,
     "layer_replication"},
    {"pissa",
     GOOD ", `init_lora_weights`: `pissa_niter_16`",
     {PAIR},
     {WEIGHT},
     CKPT_UNSUPPORTED,
     "pissa"},
    {"no_b", GOOD, {{Q "lora_A.weight", {2, 6}}}, {WEIGHT}, CKPT_MISSING, "lora_B.weight"},
    {"no_a", GOOD, {{Q "lora_B.weight", {8, 2}}}, {WEIGHT}, CKPT_UNSUPPORTED, "no pair"},
    {"no_weight",
     GOOD,
     {PAIR},
     {{"l.0.k_proj.weight", {8, 6}}},
     CKPT_MISSING,
     "'l.0.q_proj.weight'"},
    {"other_weight", GOOD, {PAIR}, {{"l.0.q_proj.weight", {6, 8}}}, CKPT_CONFLICT, "[6, 8]"},
    {"convolution",
     GOOD,
     {{Q "lora_A.weight", {2, 6, 1}}, {Q "lora_B.weight", {8, 2, 1}}},
     {WEIGHT},
     CKPT_UNSUPPORTED,
     "not a linear layer"},
    {"quantised", GOOD, {PAIR}, {{"!l.0.q_proj.weight", {8, 6}}}, CKPT_UNSUPPORTED, "dequantize"},
    {"not_below_root",
     GOOD,
     {{"model.q.lora_A.weight", {2, 6}}},
     {WEIGHT},
     CKPT_FORMAT,
     "base_model.model."},
    {"unknown_lora", GOOD, {PAIR, {Q "lora_C.weight", {2}}}, {WEIGHT}, CKPT_UNSUPPORTED, "lora_C"},
    {"unknown_module",
     GOOD,
     {PAIR, {"base_model.model.score.weight", {2, 6}}},
     {WEIGHT},
     CKPT_UNSUPPORTED,
     "score.weight"},
    {"module_of_another_shape",
     GOOD,
     {{"base_model.model.h.weight", {4}}},
     {{"h.weight", {3}}},
     CKPT_CONFLICT,
     "[4]"},
    {"dora_without_magnitude",
     GOOD ", `use_dora`: true",
     {PAIR},
     {WEIGHT},
     CKPT_MISSING,
     "lora_magnitude_vector"},
    {"magnitude_without_dora",
     GOOD,
     {PAIR, {Q "lora_magnitude_vector", {8}}},
     {WEIGHT},
     CKPT_CONFLICT,
     "use_dora is false"},
    {"magnitude_of_another_length",
     GOOD ", `use_dora`: true",
     {PAIR, {Q "lora_magnitude_vector", {7}}},
     {WEIGHT},
     CKPT_CONFLICT,
     "[7]"},
    {"bias_without_bias",
     GOOD,
     {PAIR, {Q "lora_B.bias", {8}}},
     {WEIGHT},
     CKPT_MISSING,
     "the base has none"},
    {"experts_of_no_parameter",
     GOOD,
     {{X "lora_A.weight", {4, 6}}, {X "lora_B.weight", {10, 4}}},
     {EXPERTS},
     CKPT_MISSING,
     "no 'l.0.mlp.experts.weight'"},
    {"experts_nested_too_deep",
     GOOD ", `target_parameters`: [`experts.gate_up_proj`]",
     {{X "base_layer.lora_A.weight", {4, 6}}, {X "base_layer.lora_B.weight", {10, 4}}},
     {EXPERTS},
     CKPT_MISSING,
     "target_parameters"},
    {"experts_of_another_number",
     GOOD ", `target_parameters`: [`experts.gate_up_proj`]",
     {{X "lora_A.weight", {5, 6}}, {X "lora_B.weight", {10, 5}}},
     {EXPERTS},
     CKPT_CONFLICT,
     "2 experts"},
    {"experts_of_another_shape",
     GOOD ", `target_parameters`: [`experts.gate_up_proj`]",
     {{X "lora_A.weight", {4, 7}}, {X "lora_B.weight", {10, 4}}},
     {EXPERTS},
     CKPT_CONFLICT,
     "10 x 6"},
    {"experts_that_differ",
     GOOD ", `target_parameters`: [`experts.gate_up_proj`]",
     {{X "lora_A.weight", {4, 6}}, {X "lora_B.weight", {10, 4}}},
     {{"l.0.mlp.experts.0.gate_proj.weight", {5, 6}},
      {"l.0.mlp.experts.0.up_proj.weight", {5, 6}},
      {"l.0.mlp.experts.1.gate_proj.weight", {5, 6}},
      {"l.0.mlp.experts.1.up_proj.weight", {4, 6}}},
     CKPT_CONFLICT,
     "experts.1.up_proj.weight' has another shape"},
    {"experts_that_are_not_whole",
     GOOD ", `target_parameters`: [`experts.gate_up_proj`]",
     {{X "lora_A.weight", {4, 6}}, {X "lora_B.weight", {10, 4}}},
     {{"l.0.mlp.experts.0.gate_proj.weight", {5, 6}},
      {"l.0.mlp.experts.0.up_proj.weight", {5, 6}},
      {"l.0.mlp.experts.1.gate_proj.weight", {5, 6}}},
     CKPT_MISSING,
     "a part of expert 1"},
    {"experts_that_are_no_stack",
     GOOD ", `target_parameters`: [`experts.down_proj`]",
     {{X "lora_A.weight", {4, 6}}, {X "lora_B.weight", {6, 4}}},
     {{"l.0.mlp.experts.down_proj", {12, 6}}},
     CKPT_CONFLICT,
     "not a stack"},
    {"experts_that_are_square",
     GOOD ", `target_parameters`: [`experts.down_proj`]",
     {{X "lora_A.weight", {4, 6}}, {X "lora_B.weight", {6, 4}}},
     {{"l.0.mlp.experts.down_proj", {2, 6, 6}}},
     CKPT_UNSUPPORTED,
     "peft_version"},
    {"experts_that_are_not_there",
     GOOD ", `target_parameters`: [`experts.down_proj`]",
     {{X "lora_A.weight", {4, 6}}, {X "lora_B.weight", {6, 4}}},
     {EXPERTS},
     CKPT_MISSING,
     "experts.down_proj"},
};

static struct ckpt_catalog *catalog_of(const struct part *list, size_t n)
{
    static const float zeros[1024];
    struct ckpt_catalog *cat = stored_catalog();

    for (size_t i = 0; i < n && list[i].name; i++) {
        const bool fp8 = list[i].name[0] == '!';
        uint32_t rank = 0;
        while (rank < 4 && list[i].dim[rank])
            rank++;
        (void)stored_add(cat, list[i].name + fp8, fp8 ? CKPT_F8_E4M3 : CKPT_F32, rank, list[i].dim,
                         zeros, 9);
    }
    return cat;
}

static json_t *config_of(const char *text)
{
    char buf[1000];
    json_t *j;

    (void)snprintf(buf, sizeof buf, "{%s}", text);
    for (char *p = buf; *p; p++)
        if (*p == '`')
            *p = '"';
    if (!(j = json_loads(buf, 0, NULL)))
        stored_fail(buf);
    return j;
}

int main(int argc, char **argv)
{
    struct judge j = {argc > 1 ? argv[1] : NULL, 0, 0};
    ckpt_cleanup(ckpt_recipes_freep) struct ckpt_recipes *recipes = NULL;

    if (ckpt_recipes_load(NULL, &recipes, NULL) < 0)
        return 1;
    for (size_t i = 0; i < sizeof lies / sizeof *lies; i++) {
        const struct lie *lie = &lies[i];
        if (!wanted(&j, lie->name))
            continue;
        struct ckpt_catalog *adapter = catalog_of(lie->adapter, 4), *cat = catalog_of(lie->base, 6);
        json_t *config = config_of(lie->config);
        const struct ckpt_lora_options opt = {.adapter = config,
                                              .type = ckpt_types_any(ckpt_recipes_types(recipes))};
        struct ckpt_err err = {0};
        clock_t begin = clock();
        int result = ckpt_lora_merge(cat, adapter, &opt, &err);
        judge(&j, lie->name, result, &err, lie->code, NULL, lie->needle, begin);
        for (size_t k = 0; result == 0 && k < cat->tensors.len; k++)
            free(stored_read(&cat->tensors.ptr[k], NULL, ckpt_tensor_nbytes(&cat->tensors.ptr[k]),
                             0));
        json_decref(config);
        ckpt_catalog_free(cat);
        ckpt_catalog_free(adapter);
    }
    return verdict(&j);
}
