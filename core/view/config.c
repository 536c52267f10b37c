/* SPDX-License-Identifier: Apache-2.0 */
/* generation_config.json, as transformers derives it (GenerationConfig.from_model_config). */
#include <stdbool.h>
#include <string.h>

#include "view/view.h"

/* Attributes of GenerationConfig that it takes from a model's config, where they are not null. */
static const char *const fields[] = {
    "assistant_confidence_threshold",
    "assistant_early_exit",
    "assistant_ensemble_weight",
    "assistant_lookbehind",
    "bad_words_ids",
    "begin_suppress_tokens",
    "bos_token_id",
    "cache_config",
    "cache_implementation",
    "constraints",
    "continuous_batching_config",
    "decoder_start_token_id",
    "disable_compile",
    "diversity_penalty",
    "do_sample",
    "dola_layers",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "encoder_repetition_penalty",
    "eos_token_id",
    "epsilon_cutoff",
    "eta_cutoff",
    "exponential_decay_length_penalty",
    "force_words_ids",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "guidance_scale",
    "is_assistant",
    "length_penalty",
    "low_memory",
    "max_cache_len",
    "max_length",
    "max_matching_ngram_size",
    "max_new_tokens",
    "max_time",
    "min_length",
    "min_new_tokens",
    "min_p",
    "no_repeat_ngram_size",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_logits",
    "output_scores",
    "pad_token_id",
    "penalty_alpha",
    "prefill_chunk_size",
    "prompt_lookup_num_tokens",
    "remove_invalid_values",
    "renormalize_logits",
    "repetition_penalty",
    "return_dict_in_generate",
    "sequence_bias",
    "speculation_type",
    "stop_strings",
    "suppress_tokens",
    "target_lookbehind",
    "temperature",
    "token_healing",
    "top_h",
    "top_k",
    "top_p",
    "typical_p",
    "use_cache",
    "use_mtp",
    "watermarking_config",
};

/* Copy what `from` says and the result does not say yet. */
static void take_fields(json_t **g, const json_t *from)
{
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        const json_t *v = json_object_get(from, fields[i]);
        if (v && !json_is_null(v) && !json_object_get(*g, fields[i]))
            ckpt_json_set(g, fields[i], json_deep_copy(v));
    }
}

/* The decoder's config of a composite model, or NULL. */
static const json_t *text_config(const json_t *config, const char *decoder)
{
    static const char *const names[] = {"decoder", "generator", "text_config"};

    if (decoder)
        return json_object_get(config, decoder);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (json_object_size(json_object_get(config, names[i])) > 0)
            return json_object_get(config, names[i]);
    return NULL;
}

/* What a config class has although config.json may leave it out. */
static void add_defaults(json_t **g, bool no_use_cache)
{
    static const char *const outputs[] = {"output_attentions", "output_hidden_states",
                                          "output_scores", "output_logits"};
    bool any = false;

    for (size_t i = 0; i < 4; i++) {
        if (i < 2 && !json_object_get(*g, outputs[i]))
            ckpt_json_set(g, outputs[i], json_false());
        any |= ckpt_json_bool(*g, outputs[i], false);
    }
    if (!no_use_cache && !json_object_get(*g, "use_cache"))
        ckpt_json_set(g, "use_cache", json_true());
    if (any)
        ckpt_json_set(g, "return_dict_in_generate", json_true());
}

int ckpt_generation_config(const json_t *config, const char *decoder, bool no_use_cache,
                           json_t **ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *g = json_object();
    const char *version = ckpt_json_str(config, "transformers_version");

    ckpt_json_set(&g, "_from_model_config", json_true());
    take_fields(&g, config);
    take_fields(&g, text_config(config, decoder));
    add_defaults(&g, no_use_cache);
    if (version)
        ckpt_json_set(&g, "transformers_version", json_string(version));
    if (!g)
        return ckpt_nomem(err);
    *ret = ckpt_steal(&g);
    return 0;
}
