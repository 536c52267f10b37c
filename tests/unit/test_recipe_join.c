/* SPDX-License-Identifier: Apache-2.0 */
/* Ranked tensors: each rank's part as the marks of a rule say, byte by byte. */
#include "recipe/apply/resolve.h"

#include <stdlib.h>

#include "base/str.h"
#include "model/options.h"
#include "recipe/library/recipes.h"
#include "tensor/read.h"
#include "test.h"

enum { MOST = 4096 };

/* The parts of `n` ranks, one after the other: part t of the tensor `local` holds the bytes
 * 100 t, 100 t + 1, ... */
static struct ckpt_catalog *ranked(const char *name, uint16_t n, uint32_t rank,
                                   const uint64_t *local)
{
    static unsigned char data[MOST];
    struct ckpt_err err = {0};
    struct ckpt_catalog *cat;
    struct ckpt_source *s;
    struct ckpt_piece_draft piece[8];
    uint64_t dim[4] = {n}, stride[4], numel;
    size_t index;

    memcpy(dim + 1, local, rank * sizeof *local);
    if (!ckpt_shape_numel(local, rank, &numel) || n * numel > sizeof data || n > 8)
        fail();
    for (size_t i = 0; i < n * numel; i++)
        data[i] = (unsigned char)(i / numel * 100 + i % numel);
    if (ckpt_catalog_new(&cat, &err) < 0 ||
        ckpt_source_mem_new("parts", data, sizeof data, &s, &err) < 0 ||
        ckpt_catalog_add_source(cat, s, &err) == UINT32_MAX ||
        ckpt_catalog_add(cat, name, CKPT_U8, dim, rank + 1, &index, &err) < 0)
        fail_msg("%s", err.text);
    ckpt_source_unref(s);
    ckpt_shape_strides(dim, rank + 1, stride);
    for (uint64_t t = 0; t < n; t++) {
        struct ckpt_box box = {.rank = rank + 1, .lo = {t}};
        memcpy(box.n, dim, sizeof dim);
        box.n[0] = 1;
        ckpt_piece_from_box(dim, &box, 0, t * numel, stride, &piece[t]);
    }
    if (ckpt_catalog_set_pieces(cat, index, piece, n, &err) < 0)
        fail_msg("%s", err.text);
    cat->tensors.ptr[index].ranks = n;
    json_object_set_new(cat->about, "format", json_string("t"));
    return cat;
}

/* Apply rules to it; the tensor that comes out, as "[4, 2] 0 1 100 101 ...", or the error. The
 * caller frees it. */
static char *joined(struct ckpt_catalog *src, const char *model, const char *rules)
{
    char *text = ckpt_asprintf("{\"format\":\"t\",\"model\":%s,\"rules\":[%s]}", model, rules),
         *out;
    struct ckpt_recipe_options opt = {0};
    struct ckpt_recipes *set;
    struct ckpt_model *m;
    struct ckpt_err err = {0};
    struct ckpt_str s = {0};
    unsigned char got[MOST];

    for (char *p = text; *p; p++)
        *p = *p == '`' ? '"' : *p;
    if (ckpt_recipes_parse("t", text, strlen(text), &set, &err) < 0)
        fail_msg("%s: %s", err.text, text);
    if (ckpt_recipe_apply(set, src, &opt, &m, &err) < 0) {
        ckpt_str_puts(&s, err.text);
    } else {
        for (size_t k = 0; k < m->catalog->tensors.len; k++) {
            const struct ckpt_tensor *t = &m->catalog->tensors.ptr[k];
            if (ckpt_tensor_pread(t, NULL, got, (size_t)t->numel, 0, &err) < 0)
                fail_msg("%s", err.text);
            ckpt_str_printf(&s, "%s%s", k ? "; " : "", ckpt_shape_text(t->dim, t->rank).text);
            for (size_t i = 0; i < t->numel; i++)
                ckpt_str_printf(&s, " %d", got[i]);
        }
        ckpt_model_free(m);
    }
    ckpt_recipes_free(set);
    ckpt_catalog_free(src);
    free(text);
    if (ckpt_str_steal(&s, &out, &err) < 0)
        fail();
    return out;
}

#define MODEL(dims, config, shape)                                                                 \
    "{`config`:{" config "},`dims`:{" dims "},`tensors`:[`y  " shape "`]}"
#define AB MODEL("`aa`:`aa`,`bb`:`bb`", "`aa`:4,`bb`:2", "aa bb")

static void check(struct ckpt_catalog *src, const char *model, const char *rules, const char *want)
{
    char *got = joined(src, model, rules);

    if (!strstr(got, want))
        fail_msg("expected '%s', got '%s'", want, got);
    free(got);
}

TEST(join, a_marked_dimension_is_the_ranks_parts_one_after_the_other)
{
    UNUSED_STATE;
    check(ranked("x", 2, 2, (uint64_t[]){2, 2}), AB, "{`from`:`x  a/tp b`,`to`:`y`}",
          "[4, 2] 0 1 2 3 100 101 102 103");
    check(ranked("x", 2, 2, (uint64_t[]){4, 1}), AB, "{`from`:`x  a b/tp`,`to`:`y`}",
          "[4, 2] 0 100 1 101 2 102 3 103");
}

TEST(join, summands_are_cut_one_by_one)
{
    UNUSED_STATE;
    check(ranked("x", 2, 1, (uint64_t[]){4}), MODEL("`aa`:`aa`", "`aa`:4", "aa"),
          "{`from`:`x  (g=f/tp + u=f/tp)`,`to`:[`y  g`,`z  u`]}", "[4] 0 1 100 101");
    check(ranked("x", 2, 1, (uint64_t[]){6}),
          MODEL("`aa`:`aa`,`bb`:`bb`,`cc`:`cc`", "`aa`:4,`bb`:2,`cc`:2", "(p=aa + q=bb + r=cc)"),
          "{`from`:`x  (p=aa/tp + q=bb/tp + r=cc)`,`to`:`y  (p + q + r)`}", "is 6 on each of 2");
    check(ranked("x", 2, 1, (uint64_t[]){4}),
          MODEL("`aa`:`aa`,`bb`:`bb`,`cc`:`cc`", "`aa`:2,`bb`:2,`cc`:2", "(p=aa + q=bb + r=cc)"),
          "{`from`:`x  (p=aa/tp + q=bb/tp + r=cc)`,`to`:`y  (p + q + r)`}", "[6] 0 100 1 101 2 3");
}

TEST(join, a_factor_within_a_product_is_cut_in_each_of_the_outer_ones)
{
    UNUSED_STATE;
    check(ranked("x", 2, 1, (uint64_t[]){4}), MODEL("`aa`:`aa`", "`aa`:8", "aa"),
          "{`from`:`x  (p=2 f/tp)`,`to`:`y  (f p)`}", "[8] 0 2 1 3 100 102 101 103");
    check(ranked("x", 2, 1, (uint64_t[]){6}), MODEL("`aa`:`aa`", "`aa`:12", "aa"),
          "{`from`:`x  (f/tp p=3)`,`to`:`y`}", "[12] 0 1 2 3 4 5 100 101");
}

TEST(join, without_a_mark_and_where_the_whole_is_known_the_first_copy_serves)
{
    UNUSED_STATE;
    check(ranked("x", 3, 1, (uint64_t[]){2}), MODEL("`aa`:`aa`", "`aa`:2", "aa"),
          "{`from`:`x  a`,`to`:`y`}", "[2] 0 1");
    check(ranked("x", 3, 1, (uint64_t[]){2}), MODEL("`aa`:`aa`", "`aa`:2", "aa"),
          "{`from`:`x  aa/tp`,`to`:`y`}", "[2] 0 1");
    check(ranked("x", 2, 1, (uint64_t[]){2}), MODEL("`aa`:`aa`", "`aa`:4", "aa"),
          "{`from`:`x  aa/tp`,`to`:`y`}", "[4] 0 1 100 101");
    check(ranked("x", 2, 1, (uint64_t[]){3}), MODEL("`aa`:`aa`", "`aa`:4", "aa"),
          "{`from`:`x  aa/tp`,`to`:`y`}", "makes it 4");
}

TEST(join, rules_that_take_a_tensor_must_agree)
{
    UNUSED_STATE;
    check(ranked("x", 2, 2, (uint64_t[]){2, 2}), AB,
          "{`from`:`x  a/tp b`,`to`:`y`},{`from`:`x  a b/tp`,`to`:`z`}", "is joined otherwise by");
    check(ranked("x", 2, 2, (uint64_t[]){2, 2}), AB, "{`from`:`x  a/tp`,`to`:`y`}",
          "has 2 dimensions");
}

TEST(join, what_a_model_needs_can_be_given_as_an_option)
{
    struct ckpt_recipes *all;
    const struct ckpt_recipe_folder *set;
    struct ckpt_err err = {0};

    CHECK_OK(ckpt_recipes_load(NULL, &all, &err));
    CHECK_OK(ckpt_recipes_models(all, &set, &err));
    CHECK(set->families.len > 20);
    for (size_t i = 0; i < set->families.len; i++)
        for (size_t k = 0; k < set->families.ptr[i]->needs.n; k++)
            if (!ckpt_options_knows(set->families.ptr[i]->needs.text[k]))
                fail_msg("%s needs '%s', which is no option", set->families.ptr[i]->name,
                         set->families.ptr[i]->needs.text[k]);
    ckpt_recipes_free(all);
}

TEST(join, options_are_the_keys_that_model_files_name)
{
    static const char *const yes[] = {"time_step_rank", "use_qk_norm", "use_sliding_window",
                                      "rope_theta", "tie_word_embeddings"};
    static const char *const no[] = {"layers", "_vocab", "language_model_config", "allow_other",
                                     ""};

    for (size_t i = 0; i < sizeof yes / sizeof *yes; i++)
        CHECK(ckpt_options_knows(yes[i]));
    for (size_t i = 0; i < sizeof no / sizeof *no; i++)
        CHECK(!ckpt_options_knows(no[i]));
}

TESTS(T(join, options_are_the_keys_that_model_files_name),
      T(join, a_marked_dimension_is_the_ranks_parts_one_after_the_other),
      T(join, summands_are_cut_one_by_one),
      T(join, a_factor_within_a_product_is_cut_in_each_of_the_outer_ones),
      T(join, without_a_mark_and_where_the_whole_is_known_the_first_copy_serves),
      T(join, rules_that_take_a_tensor_must_agree),
      T(join, what_a_model_needs_can_be_given_as_an_option))
