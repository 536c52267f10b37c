/* SPDX-License-Identifier: Apache-2.0 */
/* Facts of model types: what files state, inherit and get wrong. */
#include "recipe/library/types.h"

#include "base/mem.h"
#include "recipe/library/files.h"
#include "recipe/library/recipe.h"
#include "test.h"

/* A set of files types/NAME.json from pairs of name and text, which ends with NULL. */
static int load(const char *const *file, struct ckpt_types **ret, struct ckpt_err *err)
{
    struct ckpt_files set = {0};
    int rc;

    for (; file[0]; file += 2) {
        const struct ckpt_file f = {file[0], file[1], strlen(file[1]), false};
        (void)ckpt_vec_push(&set.list, f);
    }
    rc = ckpt_types_load(&set, ret, err);
    ckpt_files_release(&set);
    return rc;
}

static void check_fails(void **state_, const char *text, const char *needle)
{
    const char *const files[] = {"types/x", text, NULL};
    struct ckpt_types *t;
    struct ckpt_err err = {0};

    CHECK_FAILS(load(files, &t, &err), CKPT_FORMAT, needle);
}

/* The beginning of types/common: what it must have. */
#define LISTS "{\"generation\": \"g\", \"tokenizer_files\": \"t\", \"weight_files\": \"w\", "

TEST(types, facts_that_a_file_does_not_state_are_common)
{
    const char *const files[] = {
        "types/a",
        "{\"like\": \"b\", \"model_types\": [\"one\"], \"embedding\": \"e.a\"}",
        "types/b",
        "{\"model_types\": [\"two\"], \"output\": \"o.b\", \"converted\": true}",
        "types/common",
        LISTS "\"embedding\": [\"e\"], \"output\": \"o\", \"ties\": {\"o\": null}}",
        NULL};
    ckpt_cleanup(ckpt_types_freep) struct ckpt_types *t = NULL;
    struct ckpt_err err = {0};

    CHECK_OK(load(files, &t, &err));
    const struct ckpt_type *one = ckpt_types_find(t, "one"), *two = ckpt_types_find(t, "two");
    CHECK_STR(one->embedding.text[0], "e.a");
    CHECK_STR(one->output.text[0], "o.b");
    CHECK(one->converted && one->ties.n == 1 && !one->ties.pair[0].to);
    CHECK_STR(two->embedding.text[0], "e");
}

TEST(types, a_type_that_no_file_lists_is_recognised_by_the_names_of_all)
{
    const char *const files[] = {
        "types/a",
        "{\"model_types\": [\"one\"], \"embedding\": \"a\", \"converted\": true}",
        "types/b",
        "{\"model_types\": [\"two\"], \"embedding\": [\"b\", \"c\"]}",
        "types/common",
        LISTS "\"embedding\": \"c\"}",
        NULL};
    ckpt_cleanup(ckpt_types_freep) struct ckpt_types *t = NULL;
    struct ckpt_err err = {0};

    CHECK_OK(load(files, &t, &err));
    const struct ckpt_type *any = ckpt_types_find(t, "three");
    CHECK(any == ckpt_types_find(t, NULL) && any == ckpt_types_any(t));
    CHECK_EQ(any->embedding.n, 3);
    CHECK_STR(any->embedding.text[0], "c");
    CHECK_STR(any->embedding.text[1], "a");
    CHECK_STR(any->embedding.text[2], "b");
    CHECK(!any->converted);
}

TEST(types, the_first_file_that_lists_a_type_counts)
{
    const char *const files[] = {"types/a", "{\"model_types\": [\"x\"], \"fused_on_hub\": true}",
                                 "types/b", "{\"model_types\": [\"x\"]}", NULL};
    ckpt_cleanup(ckpt_types_freep) struct ckpt_types *t = NULL;
    struct ckpt_err err = {0};

    CHECK_OK(load(files, &t, &err));
    CHECK_STR(ckpt_types_find(t, "x")->name, "types/a");
}

TEST(types, errors_name_file_and_key)
{
    static const char *const cases[][2] = {
        {"[]", "types/x: an object"},
        {"{\"models\": 1}", "types/x: models: unknown key"},
        {"{\"embedding\": \"e\"}", "types/x: 'model_types' is missing"},
        {"{\"like\": \"y\", \"model_types\": \"t\"}", "types/x: like: there is no such file"},
        {"{\"like\": \"x\", \"model_types\": \"t\"}",
         "types/x: like: the files include each other"},
        {"{\"embedding\": 1}", "types/x: embedding: a string or a list"},
        {"{\"last_norm\": []}", "types/x: last_norm: a string"},
        {"{\"converted\": 1}", "types/x: converted: true or false"},
        {"{\"ties\": []}", "types/x: ties: an object"},
        {"{\"ties\": {\"a\": 1}}", "types/x: ties: the value of a pair"},
        {"{\"renames\": {\"a\": null}}", "types/x: renames: the value of a pair"},
        {"{\"experts\": {}}", "types/x: experts: a list"},
        {"{\"experts\": [{\"module\": \"m\", \"parameter\": \"p\", \"parts\": []}]}",
         "types/x: experts: 'parts' are one or two"},
        {"{\"experts_turned\": \"x\"}", "types/x: experts_turned: expected 'no'"},
        {"{\"least\": [{\"names\": \"(\", \"shape\": [[]]}]}", "types/x: least"},
        {"{\"least\": [{\"names\": \"a\", \"shape\": []}]}", "types/x: least: 'shape' has"},
        {"{\"stages\": {\"middle\": \"a\"}}", "types/x: middle: unknown key"},
    };

    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        check_fails(state_, cases[i][0], cases[i][1]);
}

/* The embeddings are those of transformers' classes (get_input_embeddings). */
TEST(types, the_trees_own_files_are_read)
{
    static const char *const cases[][2] = {
        {"llama", "model.embed_tokens.weight"},
        {"opt", "model.decoder.embed_tokens.weight"},
        {"gpt2", "transformer.wte.weight"},
        {"bert", "bert.embeddings.word_embeddings.weight"},
        {"t5", "shared.weight"},
        {"deberta-v2", "deberta.embeddings.word_embeddings.weight"},
    };
    ckpt_cleanup(ckpt_recipes_freep) struct ckpt_recipes *r = NULL;
    struct ckpt_err err = {0};

    CHECK_OK(ckpt_recipes_load(NULL, &r, &err));
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const struct ckpt_type *t = ckpt_types_find(ckpt_recipes_types(r), cases[i][0]);
        CHECK_STR(t->embedding.text[0], cases[i][1]);
    }
    CHECK_STR(ckpt_types_find(ckpt_recipes_types(r), "bert")->ties.pair[1].to,
              "cls.predictions.bias");
}

TEST(types, the_common_file_has_lists_of_files)
{
    const char *const files[] = {"types/common", "{\"embedding\": \"c\"}", NULL};
    ckpt_cleanup(ckpt_types_freep) struct ckpt_types *t = NULL;
    struct ckpt_err err = {0};

    CHECK_FAILS(load(files, &t, &err), CKPT_FORMAT, "types/common: 'generation'");
}

TESTS(T(types, the_common_file_has_lists_of_files),
      T(types, facts_that_a_file_does_not_state_are_common),
      T(types, a_type_that_no_file_lists_is_recognised_by_the_names_of_all),
      T(types, the_first_file_that_lists_a_type_counts), T(types, errors_name_file_and_key),
      T(types, the_trees_own_files_are_read))
