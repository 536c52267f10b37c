/* SPDX-License-Identifier: Apache-2.0 */
/* Names, file split and dtypes, against what NeMo Automodel's own functions gave
 * (tests/golden/automodel/index_mapping.json), and Python's re against ours. */
#include "test.h"

#include <stdlib.h>

#include "base/json.h"
#include "base/mem.h"
#include "base/regex.h"
#include "format/automodel/export.h"
#include "model/base.h"
#include "model/opening.h"
#include "recipe/library/recipe.h"
#include "recipe/library/types.h"
#include "tensor/fqn.h"

static json_t *golden(const char *key)
{
    static json_t *all;
    const char *source = getenv("CKPTFS_SOURCE");
    char path[4096];

    (void)snprintf(path, sizeof path, "%s/tests/golden/automodel/index_mapping.json",
                   source ? source : ".");
    if (!all)
        all = json_load_file(path, 0, NULL);
    assert_true(json_is_array(json_object_get(all, key)));
    return json_object_get(all, key);
}

TEST(split, file_numbers_are_automodels)
{
    size_t i;
    json_t *row;

    json_array_foreach(golden("extract_file_index"), i, row) {
        uint64_t want, got;
        CHECK(ckpt_json_u64(row, "index", &want));
        CHECK(ckpt_automodel_file_number(ckpt_json_str(row, "file"), &got) ==
              ckpt_json_bool(row, "recognised", false));
        CHECK(got == want);
    }
}

static int text_cmp(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

TEST(split, files_are_numbered_as_automodel_does)
{
    size_t i, k;
    json_t *row, *keys, *key;

    json_array_foreach(golden("fqn_to_file_index"), i, row) {
        const char *name[8], *file;
        uint64_t number[8], want;
        size_t n = 0;
        json_object_foreach(json_object_get(row, "files"), file, keys)
            name[n++] = file;
        qsort(name, n, sizeof *name, text_cmp);
        ckpt_automodel_number_files(name, n, number);
        for (size_t f = 0; f < n; f++)
            json_array_foreach(json_object_get(json_object_get(row, "files"), name[f]), k, key) {
                CHECK(ckpt_json_u64(json_object_get(row, "index"), json_string_value(key), &want));
                CHECK(number[f] == want);
            }
    }
}

TEST(split, keys_are_divided_equally_as_automodel_does)
{
    size_t i, k;
    json_t *row, *key;

    json_array_foreach(golden("equally_divide_layers"), i, row) {
        uint64_t nfile, want;
        const json_t *keys = json_object_get(row, "keys");
        CHECK(ckpt_json_u64(row, "num_shards", &nfile));
        json_array_foreach(keys, k, key) {
            CHECK(ckpt_json_u64(json_object_get(row, "index"), json_string_value(key), &want));
            CHECK(ckpt_automodel_equally(k, json_array_size(keys), nfile) == want);
        }
    }
}

TEST(split, keys_are_divided_by_size_as_automodel_does)
{
    size_t i;
    json_t *row, *size;

    json_array_foreach(golden("divide_keys_by_size"), i, row) {
        uint64_t len[64], number[64], want, max;
        const char *key;
        size_t n = 0;
        CHECK(ckpt_json_u64(row, "target_shard_bytes", &max));
        json_object_foreach(json_object_get(row, "sizes"), key, size)
            len[n++] = (uint64_t)json_integer_value(size);
        ckpt_automodel_by_size(len, n, max, number);
        n = 0;
        json_object_foreach(json_object_get(row, "sizes"), key, size) {
            CHECK(ckpt_json_u64(json_object_get(row, "index"), key, &want));
            CHECK(number[n++] == want);
        }
    }
}

static bool dtype_at(const json_t *row, size_t i, enum ckpt_dtype *ret)
{
    static const char *const shorts[][2] = {{"bf16", "BF16"}, {"f32", "F32"}};
    const char *name = json_string_value(json_array_get(row, i));

    for (size_t k = 0; name && k < 2; k++)
        if (strcmp(name, shorts[k][0]) == 0)
            name = shorts[k][1];
    return name && ckpt_dtype_parse(name, strlen(name), ret);
}

TEST(dtypes, exports_have_automodels)
{
    size_t i;
    json_t *row;

    json_array_foreach(golden("output_dtype"), i, row) {
        enum ckpt_dtype stored, mapped, cast, want;
        CHECK(dtype_at(row, 0, &stored) && dtype_at(row, 3, &want));
        bool has_mapped = dtype_at(row, 1, &mapped), has_cast = dtype_at(row, 2, &cast);
        CHECK(ckpt_dtype_as_base(stored, has_mapped ? &mapped : NULL, has_cast ? &cast : NULL) ==
              want);
    }
}

/* ---- names ---- */

static struct ckpt_renames *renames_of(const json_t *mapping)
{
    struct ckpt_renames *r = NULL;
    struct ckpt_err err = {0};
    char path[] = "/tmp/ckptfs-test-XXXXXX";
    int fd = mkstemp(path);
    FILE *f = fdopen(fd, "w");

    assert_true(json_dumpf(mapping, f, 0) == 0 && fclose(f) == 0);
    assert_true(ckpt_renames_load(path, &r, &err) == 0);
    (void)remove(path);
    return r;
}

TEST(rename, keys_are_renamed_as_automodel_does)
{
    size_t i;
    json_t *row;

    json_array_foreach(golden("key_mapping"), i, row) {
        struct ckpt_renames *r = renames_of(json_object_get(row, "mapping"));
        struct ckpt_err err = {0};
        char *name;
        CHECK_OK(ckpt_renames_apply(r, ckpt_json_str(row, "key"), &name, &err));
        assert_string_equal(name, ckpt_json_str(row, "renamed"));
        free(name);
        ckpt_renames_free(r);
    }
}

TEST(rename, types_whose_names_transformers_changes_are_built_in)
{
    static const char *const cases[][3] = {
        {"gemma3", "language_model.model.norm.weight", "model.language_model.norm.weight"},
        {"gemma3", "language_model.lm_head.weight", "lm_head.weight"},
        {"gemma3", "vision_tower.encoder.layers.0.w", "model.vision_tower.encoder.layers.0.w"},
        {"llava_next", "image_newline", "model.image_newline"},
        {"qwen2_5_vl", "model.layers.0.w", "model.language_model.layers.0.w"},
        {"qwen2_5_vl", "visual.blocks.0.w", "model.visual.blocks.0.w"},
        {"qwen2_5_vl", "model.visual.blocks.0.w", "model.visual.blocks.0.w"},
        {"mllama", "vision_model.w", "model.vision_model.w"},
        {"aria", "language_model.model.norm.weight", "model.language_model.norm.weight"},
        {"voxtral", "audio_tower.w", "model.audio_tower.w"},
    };
    ckpt_cleanup(ckpt_recipes_freep) struct ckpt_recipes *recipes = NULL;
    struct ckpt_err err = {0};

    CHECK_OK(ckpt_recipes_load(NULL, &recipes, &err));
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct ckpt_renames *r;
        char *name;
        CHECK_OK(ckpt_renames_of_type(ckpt_types_find(ckpt_recipes_types(recipes), cases[i][0]), &r,
                                      &err));
        CHECK_OK(ckpt_renames_apply(r, cases[i][1], &name, &err));
        assert_string_equal(name, cases[i][2]);
        free(name);
        ckpt_renames_free(r);
    }
    struct ckpt_renames *none;
    CHECK_OK(
        ckpt_renames_of_type(ckpt_types_find(ckpt_recipes_types(recipes), "llama"), &none, &err));
    CHECK(!none);
}

TEST(regex, replaces_as_python)
{
    /* pattern, replacement, text, re.sub(...); NULL: no match */
    static const char *const cases[][4] = {
        {"a", "b", "banana", "bbnbnb"},
        {"x", "b", "banana", NULL},
        {"(a)(n)?", "<\\1\\2>", "banana", "b<an><an><a>"},
        {"(?P<n>\\d+)", "[\\g<n>|\\g<1>|\\g<0>]", "l.12.x", "l.[12|12|12].x"},
        {"a*", "-", "baac", "-b--c-"},
        {"", "-", "ab", "-a-b-"},
        {"$", "!", "ab", "ab!"},
        {"b\\Z", "!", "ab", "a!"},
        {"^model(?!\\.(language_model|visual))", "m", "model.visual", NULL},
        {"\\.", "\\.", "a.b", "a\\.b"},
        {"-", "\\n\\t\\\\", "a-b", "a\n\t\\b"},
        {"\\w+", "w", "\xc3\xa9t\xc3\xa9.x", "w.w"},
        {".", "c", "\xc3\xa9", "c"},
        {"(a)|(b)", "\\2", "ab", "b"},
        {"\\d", "\\g<0>0", "1.2", "10.20"},
        {"(a)", "$1${1}$$\\1", "a", "$1${1}$$a"},
    };

    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct ckpt_regex *r;
        struct ckpt_err err = {0};
        char *text = NULL;
        CHECK_OK(ckpt_regex_new(cases[i][0], cases[i][1], &r, &err));
        CHECK_OK(ckpt_regex_sub(r, cases[i][2], &text, &err));
        CHECK(!text == !cases[i][3]);
        if (text)
            assert_string_equal(text, cases[i][3]);
        free(text);
        ckpt_regex_free(r);
    }
}

TEST(regex, refuses_what_python_refuses)
{
    static const char *const cases[][2] = {{"(", "x"},     {"a", "\\1"},   {"a", "\\g<x>"},
                                           {"a", "\\g<"},  {"a", "\\q"},   {"a", "\\"},
                                           {"(a)", "\\2"}, {"a{2,1}", ""}, {"(?P<a>b)", "\\g<b>"}};

    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct ckpt_regex *r;
        struct ckpt_err err = {0};
        CHECK_FAILS(ckpt_regex_new(cases[i][0], cases[i][1], &r, &err), CKPT_USAGE, "");
    }
}

TEST(regex, a_letter_is_no_escape_unless_python_knows_it)
{
    struct ckpt_err err = {0};

    for (int c = '!'; c <= '~'; c++) {
        const bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
        const char template[] = {'\\', (char)c, '\0'};
        struct ckpt_regex *r;
        if (c >= '0' && c <= '9')
            continue; /* groups */
        if (c == 'g' || (letter && !strchr("abfnrtv", c))) {
            CHECK_FAILS(ckpt_regex_new("x", template, &r, &err), CKPT_USAGE, "\\");
            continue;
        }
        char *text = NULL;
        CHECK_OK(ckpt_regex_new("x", template, &r, &err));
        CHECK_OK(ckpt_regex_sub(r, "x", &text, &err));
        if (!letter)
            CHECK_STR(text, c == '\\' ? "\\" : template);
        free(text);
        ckpt_regex_free(r);
    }
}

TEST(regex, gives_up_on_patterns_that_never_end)
{
    struct ckpt_regex *r;
    struct ckpt_err err = {0};
    char *text;

    CHECK_OK(ckpt_regex_new("(a+)+$", "x", &r, &err));
    CHECK_FAILS(ckpt_regex_sub(r, "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!", &text, &err),
                CKPT_LIMIT, "takes too long");
    ckpt_regex_free(r);
}

TEST(order, is_that_of_llama)
{
    static const char *const order[] = {
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.self_attn.k_proj.weight",
        "model.layers.0.self_attn.v_proj.weight",
        "model.layers.0.self_attn.o_proj.weight",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.0.mlp.down_proj.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.post_attention_layernorm.weight",
        "model.layers.2.self_attn.q_proj.weight",
        "model.layers.10.self_attn.q_proj.weight",
        "model.norm.weight",
        "lm_head.weight",
        "other.weight",
    };
    const size_t n = sizeof order / sizeof order[0];
    ckpt_cleanup(ckpt_recipes_freep) struct ckpt_recipes *recipes = NULL;
    struct ckpt_err err = {0};

    CHECK_OK(ckpt_recipes_load(NULL, &recipes, &err));
    const struct ckpt_texts *words = &ckpt_types_find(ckpt_recipes_types(recipes), "llama")->order;

    for (size_t i = 0; i < n; i++)
        for (size_t k = 0; k < n; k++) {
            int c = ckpt_order_cmp(words->text, words->n, order[i], order[k]);
            CHECK((c > 0) - (c < 0) == (i > k) - (i < k));
        }
}

TESTS(T(split, file_numbers_are_automodels), T(split, files_are_numbered_as_automodel_does),
      T(split, keys_are_divided_equally_as_automodel_does),
      T(split, keys_are_divided_by_size_as_automodel_does), T(dtypes, exports_have_automodels),
      T(rename, keys_are_renamed_as_automodel_does),
      T(rename, types_whose_names_transformers_changes_are_built_in), T(regex, replaces_as_python),
      T(regex, refuses_what_python_refuses), T(regex, a_letter_is_no_escape_unless_python_knows_it),
      T(regex, gives_up_on_patterns_that_never_end), T(order, is_that_of_llama))
