/* SPDX-License-Identifier: Apache-2.0 */
/* The choices of a view: what the reader says, options and base in; a decision out. */
#include "format/automodel/export.h"
#include "model/decide.h"

#include "test.h"

static const struct ckpt_base with_weights = {.cat = (struct ckpt_catalog *)&with_weights,
                                              .config = (json_t *)&with_weights,
                                              .weight_map =
                                                  (struct ckpt_weight_map *)&with_weights};
static const struct ckpt_base config_alone = {.config = (json_t *)&config_alone};

static struct ckpt_weight_map some_map; /* only its address counts */

/* Checkpoints, as their readers describe them. */
static const struct ckpt_facts framework = {.files_at = ""},
                               hub_dir = {.names = CKPT_NAMES_HUB,
                                          .is_hub_dir = true,
                                          .files = CKPT_FILES_ALL,
                                          .files_at = "",
                                          .weight_map = &some_map},
                               automodel = {.names = CKPT_NAMES_HUB,
                                            .split_as_base = ckpt_automodel_split,
                                            .files = CKPT_FILES_CONFIG,
                                            .files_at = "model/.hf_metadata"},
                               adapter = {.names = CKPT_NAMES_HUB,
                                          .is_adapter = true,
                                          .bare_header = true,
                                          .files = CKPT_FILES_COMPLETE,
                                          .files_at = "",
                                          .weight_map = &some_map};

static struct ckpt_decision decide(const struct ckpt_facts *facts, const struct ckpt_options *opt,
                                   const struct ckpt_base *base)
{
    const struct ckpt_decide in = {
        .facts = facts, .opt = opt, .base = base, .has_config = facts != &framework};
    return ckpt_decide(&in);
}

TEST(decide, a_model_directory_is_shown_as_itself)
{
    const struct ckpt_options opt = {0};
    const struct ckpt_decision d = decide(&hub_dir, &opt, NULL);
    CHECK(d.way == CKPT_WAY_HUB && d.convert == CKPT_CONVERT_NOT);
    CHECK(!d.check && !d.match_base && !d.dequantize && d.keep_quantization);
    CHECK(d.config == CKPT_CONFIG_PASS_UNLESS_CAST && !d.write_generation);
    CHECK(d.own_files && !d.own_config && !d.base_files && !d.merge_files);
    CHECK(d.split == CKPT_SPLIT_OWN && d.order == CKPT_ORDER_NAMES);
}

TEST(decide, a_model_directory_yields_to_the_base)
{
    const struct ckpt_options opt = {0};
    const struct ckpt_decision d = decide(&hub_dir, &opt, &with_weights);
    CHECK(d.split == CKPT_SPLIT_BASE && d.base_files && d.base_config && d.use_base_dtypes);
    CHECK(!d.check);
}

TEST(decide, a_model_directory_that_is_split_anew_goes_to_memory_and_back)
{
    const struct ckpt_options opt = {.max_shard_size = 1000};
    const struct ckpt_decision d = decide(&hub_dir, &opt, NULL);
    CHECK(d.split == CKPT_SPLIT_BY_SIZE && d.convert == CKPT_CONVERT_THERE_AND_BACK);
    CHECK(decide(&automodel, &opt, NULL).convert == CKPT_CONVERT_NOT);
}

TEST(decide, names_of_the_framework_need_a_recipe)
{
    const struct ckpt_options opt = {0};
    struct ckpt_decision d = decide(&framework, &opt, NULL);
    CHECK(d.way == CKPT_WAY_RECIPE && d.order == CKPT_ORDER_CATALOG && d.write_generation);
    CHECK(d.config == CKPT_CONFIG_WRITE && !d.check && !d.base_config && !d.keep_quantization);
    d = decide(&framework, &opt, &with_weights);
    CHECK(d.config == CKPT_CONFIG_PASS_IF_DTYPE && d.base_files && !d.base_config);
    CHECK(d.split == CKPT_SPLIT_BASE);
}

TEST(decide, a_number_that_an_option_changes_is_written)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *own = json_pack("{s:i}", "_rope", 1);
    ckpt_cleanup(ckpt_json_decrefp) json_t *number = json_pack("{s:i}", "vocab_size", 1);
    const struct ckpt_options rope = {.overrides = own}, vocab = {.overrides = number};
    CHECK(decide(&framework, &rope, &with_weights).config == CKPT_CONFIG_PASS_IF_DTYPE);
    CHECK(decide(&framework, &vocab, &with_weights).config == CKPT_CONFIG_WRITE);
    CHECK(decide(&hub_dir, &vocab, NULL).config == CKPT_CONFIG_WRITE);
}

TEST(decide, names_in_memory_are_not_converted_again)
{
    const struct ckpt_options opt = {.memory = true};
    const struct ckpt_facts memory = {.names = CKPT_NAMES_MEMORY, .files_at = ""};
    const struct ckpt_decision d = decide(&memory, &opt, &with_weights);
    CHECK(d.way == CKPT_WAY_MEMORY && d.convert == CKPT_CONVERT_NOT);
    CHECK(d.order == CKPT_ORDER_CATALOG && d.split == CKPT_SPLIT_BY_SIZE && d.write_generation);
    CHECK(decide(&hub_dir, &opt, NULL).convert == CKPT_CONVERT_TO_MEMORY);
    CHECK(decide(&framework, &opt, NULL).convert == CKPT_CONVERT_TO_MEMORY);
}

TEST(decide, automodel_follows_its_base)
{
    const struct ckpt_options opt = {0}, cast = {.dtype_rule = CKPT_DTYPE_CAST};
    struct ckpt_decision d = decide(&automodel, &opt, &with_weights);
    CHECK(d.way == CKPT_WAY_HUB && d.match_base && d.check);
    CHECK(!decide(&automodel, &opt, NULL).match_base && decide(&automodel, &opt, NULL).check);
    CHECK(d.split == CKPT_SPLIT_LIKE_BASE && d.config == CKPT_CONFIG_PASS && d.own_config);
    CHECK(decide(&automodel, &cast, NULL).config == CKPT_CONFIG_PASS_UNLESS_CAST);
    CHECK(decide(&automodel, &opt, NULL).split == CKPT_SPLIT_OWN);
    CHECK(decide(&automodel, &opt, &config_alone).order == CKPT_ORDER_FRESH);
    CHECK(d.order == CKPT_ORDER_NAMES);
}

TEST(decide, an_adapter_takes_nothing_from_the_base)
{
    const struct ckpt_options opt = {.dequantize = true, .max_shard_size = 1000};
    const struct ckpt_decision d = decide(&adapter, &opt, &with_weights);
    CHECK(d.way == CKPT_WAY_HUB && !d.match_base && !d.check && !d.use_base_dtypes);
    CHECK(!d.dequantize && d.keep_quantization && d.bare_header);
    CHECK(d.own_files && d.own_adapter_config && !d.base_files && !d.base_config);
    CHECK(d.split == CKPT_SPLIT_OWN);
}

TEST(decide, an_adapter_that_is_merged_has_the_files_of_the_base)
{
    const struct ckpt_options opt = {.lora = CKPT_LORA_MERGE};
    struct ckpt_facts merged = adapter;
    merged.is_adapter = merged.bare_header = false;
    const struct ckpt_decide in = {
        .facts = &merged, .opt = &opt, .base = &with_weights, .merged = true};
    const struct ckpt_decision d = ckpt_decide(&in);
    CHECK(d.way == CKPT_WAY_HUB && d.match_base && !d.check && !d.bare_header);
    CHECK(d.merge_files && !d.own_files && !d.base_files && d.config == CKPT_CONFIG_PASS_IF_DTYPE);
}

TEST(decide, a_raw_view_shows_what_is_stored)
{
    const struct ckpt_options opt = {.raw = true};
    for (int i = 0; i < 4; i++) {
        const struct ckpt_facts *facts[] = {&framework, &hub_dir, &automodel, &adapter};
        const struct ckpt_decision d = decide(facts[i], &opt, &with_weights);
        CHECK(d.way == CKPT_WAY_STORED && d.convert == CKPT_CONVERT_NOT);
        CHECK(d.split == CKPT_SPLIT_BY_SIZE && d.order == CKPT_ORDER_NAMES && !d.bare_header);
        CHECK(!d.own_files && !d.base_files && !d.base_config && !d.own_adapter_config);
        CHECK(d.keep_quantization && !d.check);
    }
}

TESTS(T(decide, a_model_directory_is_shown_as_itself),
      T(decide, a_model_directory_yields_to_the_base),
      T(decide, a_model_directory_that_is_split_anew_goes_to_memory_and_back),
      T(decide, names_of_the_framework_need_a_recipe),
      T(decide, a_number_that_an_option_changes_is_written),
      T(decide, names_in_memory_are_not_converted_again), T(decide, automodel_follows_its_base),
      T(decide, an_adapter_takes_nothing_from_the_base),
      T(decide, an_adapter_that_is_merged_has_the_files_of_the_base),
      T(decide, a_raw_view_shows_what_is_stored), )
