/* SPDX-License-Identifier: Apache-2.0 */
/* Views of HF-sharded runs: steps, files, dtypes, and the comparison with a base. */
#include "test.h"

#include <ckptfs/ckptfs.h>

#include "base/str.h"
#include "run/checkpoint.h"
#include "tree.h"

#define STEP "run/epoch_0_step_%d/"

/* U8 tensors "NAME: rows x 2" of rank r of n, cut along dimension 0, in one shard file. */
static void shard(struct tree *t, const char *folder, int rank, int n, const char *const *names,
                  int rows)
{
    struct ckpt_str header = {0}, info = {0};
    char path[512];
    int each = rows / n, off = 0;

    for (size_t i = 0; names[i]; i++) {
        ckpt_str_printf(&header,
                        "%s\"%s\":{\"dtype\":\"F32\",\"shape\":[%d,2],\"data_offsets\":[%d,%d]}",
                        i ? "," : "{", names[i], each, off, off + each * 8);
        ckpt_str_printf(&info, "%s\\\"%s\\\": {\\\"saved_offsets\\\": [%d, 0]}", i ? ", " : "",
                        names[i], rank * each);
        off += each * 8;
    }
    ckpt_str_printf(&header, ",\"__metadata__\":{\"DCP_SHARDING_INFO\":\"{%s}\"}}",
                    ckpt_str_get(&info));
    (void)snprintf(path, sizeof path, "%sshard-%05d-model-00001-of-00001.safetensors", folder,
                   rank + 1);
    tree_st(t, path, ckpt_str_get(&header), (size_t)off);
    ckpt_str_release(&header);
    ckpt_str_release(&info);
}

static const char *const two_layers[] = {"model.layers.0.a.weight", "model.layers.1.a.weight",
                                         NULL};

static void step(struct tree *t, int number)
{
    char folder[128];

    (void)snprintf(folder, sizeof folder, STEP "model/", number);
    for (int r = 0; r < 2; r++)
        shard(t, folder, r, 2, two_layers, 8);
}

/* A base of tensors [rows, 2]. */
static void base(struct tree *t, const char *dtype, const char *const *names, int rows)
{
    struct ckpt_str header = {0};
    int size = strcmp(dtype, "F32") == 0 ? 8 : 4, off = 0;

    for (size_t i = 0; names[i]; i++, off += rows * size)
        ckpt_str_printf(&header,
                        "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[%d,2],\"data_offsets\":[%d,%d]}",
                        i ? "," : "{", names[i], dtype, rows, off, off + rows * size);
    ckpt_str_puts(&header, "}");
    tree_text(t, "base/config.json", "{\"model_type\": \"llama\"}");
    tree_st(t, "base/model.safetensors", ckpt_str_get(&header), (size_t)off);
    ckpt_str_release(&header);
}

/* Options: base=PATH/base if there is one, then `key`=`value`. */
static int open_view(struct tree *t, const char *below, const char *key, const char *value,
                     struct ckpt_view **ret, struct ckpt_err *err)
{
    struct ckpt_options *opt = NULL;
    struct ckpt_run *run = NULL;
    char path[5000], text[5000];
    int result;

    (void)snprintf(path, sizeof path, "%s/%s", t->path, below);
    (void)snprintf(text, sizeof text, "%s/base", t->path);
    TREE_MUST(ckpt_options_new(&opt, err) == 0);
    if (access(text, F_OK) == 0)
        TREE_MUST(ckpt_options_set(opt, "base", text, err) == 0);
    if (key)
        TREE_MUST(ckpt_options_set(opt, key, value, err) == 0);
    result = ckpt_run_open(path, opt, &run, err);
    if (result == 0)
        result = ckpt_run_view(run, NULL, ret, err);
    ckpt_run_close(run);
    ckpt_options_free(opt);
    return result;
}

static void open_fails(void **state_, struct tree *t, enum ckpt_code code, const char *needle)
{
    struct ckpt_view *view;
    struct ckpt_err err = {0};

    CHECK_FAILS(open_view(t, "run", NULL, NULL, &view, &err), code, needle);
}

static const char *warnings_of(const struct ckpt_view *v)
{
    const char *text = json_string_value(json_array_get(v->cat->warnings, 0));
    return text ? text : "";
}

TEST(dcp_hf, the_step_that_latest_names_is_the_latest)
{
    struct tree t;
    struct ckpt_view *v;
    struct ckpt_err err = {0};

    tree_open(&t);
    step(&t, 10);
    step(&t, 20);
    tree_link(&t, "epoch_0_step_10", "run/LATEST");
    CHECK_OK(open_view(&t, "run", NULL, NULL, &v, &err));
    CHECK_STR(v->source, "dcp_hf, step 10");
    ckpt_view_release(v);
    tree_delete(&t, "run/LATEST");
    tree_text(&t, "run/LATEST.txt", "checkpoints/epoch_0_step_10/\n");
    CHECK_OK(open_view(&t, "run", NULL, NULL, &v, &err));
    CHECK_STR(v->source, "dcp_hf, step 10");
    ckpt_view_release(v);
    tree_close(&t);
}

TEST(dcp_hf, an_incomplete_step_is_none_until_latest_names_it)
{
    struct tree t;
    struct ckpt_view *v;
    struct ckpt_err err = {0};

    tree_open(&t);
    step(&t, 10);
    step(&t, 20);
    tree_text(&t, "run/epoch_0_step_20/.incomplete", "");
    tree_text(&t, "run/LATEST", "epoch_0_step_10");
    CHECK_OK(open_view(&t, "run", NULL, NULL, &v, &err));
    CHECK_STR(v->source, "dcp_hf, step 10");
    ckpt_view_release(v);
    tree_text(&t, "run/LATEST", "epoch_0_step_20");
    CHECK_OK(open_view(&t, "run", NULL, NULL, &v, &err));
    CHECK_STR(v->source, "dcp_hf, step 20");
    ckpt_view_release(v);
    CHECK_OK(open_view(&t, "run/epoch_0_step_20", NULL, NULL, &v, &err));
    CHECK(strstr(warnings_of(v), ".incomplete"));
    ckpt_view_release(v);
    tree_close(&t);
}

TEST(dcp_hf, the_inner_folder_opens_too)
{
    struct tree t;
    struct ckpt_view *v;
    struct ckpt_err err = {0};

    tree_open(&t);
    step(&t, 10);
    CHECK_OK(open_view(&t, "run/epoch_0_step_10/model", NULL, NULL, &v, &err));
    CHECK_EQ(v->cat->tensors.len, 2);
    ckpt_view_release(v);
    tree_close(&t);
}

TEST(dcp_hf, masters_become_what_the_base_has)
{
    struct tree t;
    struct ckpt_view *v;
    struct ckpt_err err = {0};

    tree_open(&t);
    step(&t, 10);
    base(&t, "BF16", two_layers, 8);
    CHECK_OK(open_view(&t, "run", NULL, NULL, &v, &err));
    CHECK_EQ(v->cat->tensors.ptr[0].dtype, CKPT_BF16);
    CHECK_STR(warnings_of(v), "");
    ckpt_view_release(v);
    CHECK_OK(open_view(&t, "run", "dtype", "stored", &v, &err));
    CHECK_EQ(v->cat->tensors.ptr[0].dtype, CKPT_F32);
    ckpt_view_release(v);
    tree_close(&t);
}

TEST(dcp_hf, a_lost_last_shard_does_not_fit_the_base)
{
    struct tree t;

    tree_open(&t);
    step(&t, 10);
    base(&t, "BF16", two_layers, 8);
    tree_delete(&t, "run/epoch_0_step_10/model/shard-00002-model-00001-of-00001.safetensors");
    open_fails(
        state_, &t, CKPT_CONFLICT,
        "2 of another shape: 'model.layers.0.a.weight' is [4, 2], but in the base it is [8, 2]");
    tree_close(&t);
}

TEST(dcp_hf, a_layer_that_others_have_is_lost)
{
    static const char *const three[] = {"model.layers.0.a.weight", "model.layers.1.a.weight",
                                        "model.layers.2.a.weight", "model.head.weight", NULL};
    struct ckpt_view *v;
    struct ckpt_err err = {0};
    struct tree t;

    tree_open(&t);
    step(&t, 10);
    base(&t, "F32", three, 8);
    open_fails(state_, &t, CKPT_MISSING,
               "1 lost, though other layers or experts have them: "
               "model.layers.2.a.weight; 1 of the base are not");
    CHECK_OK(open_view(&t, "run", "allow_partial", NULL, &v, &err));
    CHECK(strstr(warnings_of(v), "model.layers.2.a.weight"));
    ckpt_view_release(v);
    tree_close(&t);
}

TEST(dcp_hf, a_key_mapping_leads_from_the_base_to_the_run)
{
    static const char *const hub[] = {"hub.0.a.weight", "hub.1.a.weight", NULL};
    struct ckpt_view *v;
    struct ckpt_err err = {0};
    struct tree t;
    char path[5000];

    tree_open(&t);
    step(&t, 10);
    base(&t, "BF16", hub, 8);
    tree_text(&t, "map.json", "{\"^hub\\\\.(\\\\d+)\": \"model.layers.\\\\1\"}");
    (void)snprintf(path, sizeof path, "%s/map.json", t.path);
    open_fails(state_, &t, CKPT_CONFLICT, "none of its 2 tensors ('hub.0.a.weight' ...) is among");
    CHECK_OK(open_view(&t, "run", "allow_partial", NULL, &v, &err));
    CHECK_EQ(v->cat->tensors.ptr[0].dtype, CKPT_F32);
    CHECK(strstr(warnings_of(v), "none of its tensors ('hub.0.a.weight' ...)"));
    ckpt_view_release(v);
    CHECK_OK(open_view(&t, "run", "key_mapping", path, &v, &err));
    CHECK_EQ(v->cat->tensors.ptr[0].dtype, CKPT_BF16);
    CHECK_STR(warnings_of(v), "");
    ckpt_view_release(v);
    tree_close(&t);
}

TEST(dcp_hf, a_tensor_smaller_than_config_says_is_refused)
{
    static const char *const names[] = {"model.embed_tokens.weight", NULL};
    struct tree t;

    tree_open(&t);
    shard(&t, "run/epoch_0_step_10/model/", 0, 2, names, 8);
    tree_text(&t, "run/epoch_0_step_10/model/.hf_metadata/config.json",
              "{\"model_type\": \"llama\", \"hidden_size\": 2, \"vocab_size\": 8}");
    open_fails(state_, &t, CKPT_CONFLICT, "is [4, 2], by config.json it is [8, 2]");
    shard(&t, "run/epoch_0_step_10/model/", 1, 2, names, 8);
    struct ckpt_view *v;
    struct ckpt_err err = {0};
    CHECK_OK(open_view(&t, "run", NULL, NULL, &v, &err));
    ckpt_view_release(v);
    tree_close(&t);
}

TEST(dcp_hf, a_query_smaller_than_a_diffusers_config_says_is_refused)
{
    static const char *const names[] = {"blocks.0.attn1.to_q.weight", NULL};
    struct tree t;

    tree_open(&t);
    shard(&t, "run/epoch_0_step_10/model/", 0, 2, names, 8);
    tree_text(&t, "run/epoch_0_step_10/model/.hf_metadata/config.json",
              "{\"num_attention_heads\": 4, \"attention_head_dim\": 2}");
    open_fails(state_, &t, CKPT_CONFLICT, "is [4, 2], by config.json it is [8, 2]");
    tree_close(&t);
}

TESTS(T(dcp_hf, the_step_that_latest_names_is_the_latest),
      T(dcp_hf, an_incomplete_step_is_none_until_latest_names_it),
      T(dcp_hf, the_inner_folder_opens_too), T(dcp_hf, masters_become_what_the_base_has),
      T(dcp_hf, a_lost_last_shard_does_not_fit_the_base),
      T(dcp_hf, a_layer_that_others_have_is_lost),
      T(dcp_hf, a_key_mapping_leads_from_the_base_to_the_run),
      T(dcp_hf, a_tensor_smaller_than_config_says_is_refused),
      T(dcp_hf, a_query_smaller_than_a_diffusers_config_says_is_refused))
