/* SPDX-License-Identifier: Apache-2.0 */
/* Converting names: prefixes, names of other state, numbers, and the names from before
 * Megatron-Core. */
#include "format/megatron/load.h"

#include <string.h>

#include "base/ckd.h"
#include "base/take.h"

#define COUNT(list) (sizeof(list) / sizeof *(list))

/* First parts of a model's names. */
static const char *const tops[] = {"embedding.", "decoder.",       "output_layer.",
                                   "mtp.",       "encoder.",       "language_model.",
                                   "vision_",    "rotary_pos_emb."};

static const char *const wrappers[] = {"model.", "module."};

/* Parts of the names of tensors that are not the model's weights. */
static const char *const others[] = {
    "optimizer.",    "chained_",  "rng_state",          "rerun_state_machine_state",
    "common_state/", "__shadow_", "dataloader_state",   "opt_param_scheduler",
    "args",          "iteration", "checkpoint_version", "num_floating_point_operations_so_far",
    "tokens_seen"};

/* Names in the transformer from before Megatron-Core. Models with Transformer Engine of that time
 * had the new names. */
struct renaming {
    const char *old, *now;
};

static const struct renaming old_parts[] = {
    {"self_attention.query_key_value.", "self_attention.linear_qkv."},
    {"attention.query_key_value.", "self_attention.linear_qkv."},
    {"self_attention.dense.", "self_attention.linear_proj."},
    {"attention.dense.", "self_attention.linear_proj."},
    {"post_attention_layernorm.", "pre_mlp_layernorm."},
    {"post_attention_norm.", "pre_mlp_layernorm."},
    {"input_norm.", "input_layernorm."},
    {"mlp.dense_h_to_4h.", "mlp.linear_fc1."},
    {"mlp.dense_4h_to_h.", "mlp.linear_fc2."},
};

static const struct renaming old_tops[] = {
    {"language_model.embedding.", "embedding."},
    {"language_model.output_layer.", "output_layer."},
    {"language_model.encoder.final_layernorm.", "decoder.final_layernorm."},
    {"language_model.encoder.final_norm.", "decoder.final_layernorm."},
    {"language_model.transformer.final_layernorm.", "decoder.final_layernorm."},
    {"language_model.encoder.", "decoder."},
    {"language_model.transformer.", "decoder."},
};

/* If the text begins with an old name, move it past that, and put the new one. */
static void put_renamed(const struct renaming *list, size_t n, const char **s, struct ckpt_str *out)
{
    for (size_t i = 0; i < n; i++)
        if (ckpt_take_text(s, list[i].old)) {
            ckpt_str_puts(out, list[i].now);
            return;
        }
}

static bool is_top(const char *name)
{
    for (size_t i = 0; i < COUNT(tops); i++)
        if (ckpt_has_prefix(name, tops[i]))
            return true;
    return false;
}

/* The name without the prefixes of wrappers. */
static const char *strip(const char *name)
{
    const char *rest = name;

    for (bool more = true; more && !is_top(rest);) {
        more = false;
        for (size_t i = 0; i < COUNT(wrappers) && !more; i++)
            if (ckpt_has_prefix(rest, wrappers[i])) {
                rest += strlen(wrappers[i]);
                more = true;
            }
    }
    return is_top(rest) ? rest : name;
}

bool ckpt_megatron_is_wrapped(const char *name)
{
    return strstr(name, ".adapters.") || strstr(name, ".to_wrap.");
}

static bool is_weight(const char *name)
{
    if (strstr(name, "/shard_") || strstr(name, "_extra_state") ||
        ckpt_has_prefix(name, "rotary_pos_emb."))
        return false;
    for (size_t i = 0; i < COUNT(others); i++)
        if (ckpt_has_prefix(name, others[i]))
            return false;
    return true;
}

bool ckpt_megatron_is_state(const char *name)
{
    const char *s = name;

    if (ckpt_has_prefix(s, "chained_")) /* one of several chained optimizers */
        s += strlen("chained_") + strspn(s + strlen("chained_"), "0123456789.");
    return ckpt_has_prefix(s, "optimizer.") && !strstr(s, "/shard_");
}

bool ckpt_megatron_state_parse(const char *name, struct ckpt_state_name *ret)
{
    static const char *const kinds[][2] = {{"param.", "master"},
                                           {"fp32_param.", "master"},
                                           {"exp_avg.", "exp_avg"},
                                           {"exp_avg_sq.", "exp_avg_sq"},
                                           {"step.", "step"},
                                           {"master_param.", "master"},
                                           {"momentum_buffer.", "momentum_buffer"}};
    const char *s = strstr(name, "optimizer.state.");

    if (!ckpt_megatron_is_state(name) || !s)
        return false;
    const size_t root = (size_t)(s - name);
    s += strlen("optimizer.state.");
    for (size_t i = 0; i < COUNT(kinds); i++)
        if (ckpt_take_text(&s, kinds[i][0])) {
            *ret = (struct ckpt_state_name){name,      root,        s,
                                            strlen(s), kinds[i][1], strlen(kinds[i][1])};
            return true;
        }
    return ckpt_state_parse_torch(name, ret);
}

bool ckpt_megatron_layer(const char *name, uint64_t *ret)
{
    return ckpt_take_text(&name, "decoder.layers.") && ckpt_take_u64(&name, ret) && *name == '.';
}

/* linear_fc1.weight7, linear_fc2.bias0_w */
static bool put_grouped(const char *s, uint64_t first, struct ckpt_str *out)
{
    static const char *const parts[] = {"linear_fc1.weight", "linear_fc1.bias", "linear_fc2.weight",
                                        "linear_fc2.bias"};
    uint64_t j;

    for (size_t i = 0; i < COUNT(parts); i++) {
        const char *rest = s;
        if (!ckpt_take_text(&rest, parts[i]) || !ckpt_take_u64(&rest, &j) || ckd_add(&j, j, first))
            continue;
        if (*rest && strcmp(rest, "_w") != 0 && strcmp(rest, "_v") != 0)
            continue;
        ckpt_str_puts(out, "experts.");
        ckpt_str_put_u64(out, j);
        ckpt_str_putc(out, '.');
        ckpt_str_puts(out, parts[i]);
        ckpt_str_puts(out, rest);
        return true;
    }
    return false;
}

/* Convert the part of a name after "mlp.experts.". */
static void put_expert(const char *s, uint64_t first, struct ckpt_str *out)
{
    const char *rest = s;
    uint64_t j;

    if (ckpt_take_text(&rest, "local_experts.") && ckpt_take_u64(&rest, &j) && *rest == '.' &&
        !ckd_add(&j, j, first)) {
        ckpt_str_puts(out, "experts.");
        ckpt_str_put_u64(out, j);
        ckpt_str_puts(out, rest);
        return;
    }
    if (!put_grouped(s, first, out))
        ckpt_str_puts(out, s);
}

/* Convert the part of a name after a layer's number. */
static void put_inner(const char *s, uint64_t first_expert, struct ckpt_str *out)
{
    const char *experts;

    put_renamed(old_parts, COUNT(old_parts), &s, out);
    if (!(experts = strstr(s, "mlp.experts."))) {
        ckpt_str_puts(out, s);
        return;
    }
    experts += strlen("mlp.experts.");
    ckpt_str_append(out, s, (size_t)(experts - s));
    put_expert(experts, first_expert, out);
}

bool ckpt_megatron_name(const char *name, const struct ckpt_megatron_place *at,
                        struct ckpt_str *out)
{
    const char *s = strip(name);
    uint64_t layer;

    ckpt_str_clear(out);
    if (!is_weight(s))
        return false;
    put_renamed(old_tops, COUNT(old_tops), &s, out);
    bool layers = out->len
                      ? strcmp(ckpt_str_get(out), "decoder.") == 0 && ckpt_take_text(&s, "layers.")
                      : ckpt_take_text(&s, "decoder.layers.");
    if (!layers) {
        put_inner(s, at->expert, out);
        return true;
    }
    ckpt_str_puts(out, out->len ? "layers." : "decoder.layers.");
    const char *rest = s;
    if (ckpt_take_u64(&rest, &layer) && *rest == '.' && !ckd_add(&layer, layer, at->layer)) {
        ckpt_str_put_u64(out, layer);
        ckpt_str_putc(out, '.');
        s = rest + 1;
    }
    put_inner(s, at->expert, out);
    return true;
}
