/* SPDX-License-Identifier: Apache-2.0 */
/* Recipes: the input is a recipe file; one that is accepted is applied to a small checkpoint, and
 * what it makes is read back. */
#include "fuzz.h"

#include <stdio.h>

#include "recipe/library/recipes.h"

enum { HIDDEN = 8, HEADS = 4, KV = 2, DIM = 2, INNER = 12, VOCAB = 16, LAYERS = 2 };

static void add(struct ckpt_catalog *cat, const char *name, uint64_t rows, uint64_t cols)
{
    uint64_t dim[2] = {rows, cols}, stride[2] = {cols ? cols * 2 : 2, 2};
    uint32_t rank = cols ? 2 : 1;
    struct ckpt_box box = {.rank = rank, .n = {rows, cols}};
    struct ckpt_piece_draft piece;
    struct ckpt_err err = {0};
    size_t index;

    MUST(ckpt_catalog_add(cat, name, CKPT_BF16, dim, rank, &index, &err) == 0);
    ckpt_piece_from_box(dim, &box, 0, 0, stride, &piece);
    MUST(ckpt_catalog_set_pieces(cat, index, &piece, 1, &err) == 0);
}

static void add_layer(struct ckpt_catalog *cat, int layer)
{
    static const struct {
        const char *name;
        uint64_t rows, cols;
    } tensors[] = {
        {"input_layernorm.weight", HIDDEN, 0},
        {"attn.qkv_proj.weight", (HEADS + 2 * KV) * DIM, HIDDEN},
        {"attn.o_proj.weight", HIDDEN, HEADS * DIM},
        {"post_attention_layernorm.weight", HIDDEN, 0},
        {"mlp.gate_up_proj.weight", 2 * INNER, HIDDEN},
        {"mlp.down_proj.weight", HIDDEN, INNER},
    };
    char name[128];

    for (size_t i = 0; i < sizeof tensors / sizeof tensors[0]; i++) {
        (void)snprintf(name, sizeof name, "model.decoder.%d.pp_block.%s", layer, tensors[i].name);
        add(cat, name, tensors[i].rows, tensors[i].cols);
    }
}

static struct ckpt_catalog *checkpoint(void)
{
    static const char config[] =
        "{\"is_llama_config\": true, \"hidden_size\": 8, \"num_attention_heads\": 4,"
        " \"num_key_value_heads\": 2, \"intermediate_size\": 12, \"vocab_size\": 16,"
        " \"num_hidden_layers\": 2, \"tie_word_embeddings\": false, \"rope_interleaved\": true,"
        " \"hidden_act\": \"silu\", \"rms_norm_eps\": 1e-05, \"rope_theta\": 10000.0,"
        " \"max_position_embeddings\": 64, \"attention_bias\": false, \"bos_token_id\": 1,"
        " \"eos_token_id\": 2, \"pad_token_id\": null, \"rope_scaling\": null,"
        " \"initializer_range\": 0.02, \"pretraining_tp\": 1, \"use_cache\": true}";
    static unsigned char bytes[4096];
    struct ckpt_catalog *cat;
    struct ckpt_source *s;
    struct ckpt_err err = {0};

    for (size_t i = 0; i < sizeof bytes; i++)
        bytes[i] = (unsigned char)(i * 29);
    MUST(ckpt_catalog_new(&cat, &err) == 0);
    MUST(ckpt_source_mem_new("shard", bytes, sizeof bytes, &s, &err) == 0);
    MUST(ckpt_catalog_add_source(cat, s, &err) == 0);
    ckpt_source_unref(s);
    MUST(ckpt_json_parse(config, strlen(config), "config", &cat->config, &err) == 0);
    (void)json_object_set_new(cat->about, "format", json_string("nanotron"));
    (void)json_object_set_new(cat->about, "has_config_yaml", json_true());
    (void)json_object_set_new(cat->about, "use_mup", json_false());
    add(cat, "model.token_position_embeddings.pp_block.token_embedding.weight", VOCAB, HIDDEN);
    for (int layer = 0; layer < LAYERS; layer++)
        add_layer(cat, layer);
    add(cat, "model.final_layer_norm.pp_block.weight", HIDDEN, 0);
    add(cat, "model.lm_head.pp_block.weight", VOCAB, HIDDEN);
    return cat;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct ckpt_err err = {0};
    struct ckpt_recipe_options opt = {0};
    struct ckpt_recipes *recipes = NULL;
    struct ckpt_model *model = NULL;

    if (ckpt_recipes_parse("input", (const char *)data, size, &recipes, &err) < 0) {
        check_err(&err);
        return 0;
    }
    struct ckpt_catalog *cat = checkpoint();
    if (ckpt_recipe_apply(recipes, cat, &opt, &model, &err) == 0) {
        ckpt_catalog_free(cat);
        read_back_all(model->catalog);
        ckpt_model_free(model);
    } else {
        check_err(&err);
        ckpt_catalog_free(cat);
    }
    ckpt_recipes_free(recipes);
    return 0;
}
