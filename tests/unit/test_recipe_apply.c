/* SPDX-License-Identifier: Apache-2.0 */
/* Applying recipes to checkpoints in memory: choices, conditions, what is missing, and files that
 * lie. JSON stands here with ` for ". */
#include <stdlib.h>
#include <time.h>

#include "test.h"

#include "base/str.h"
#include "recipe/library/recipes.h"
#include "tensor/catalog.h"
#include "tensor/read.h"

/* ---- fixtures ---- */

static char *quoted(const char *text)
{
    char *s = strdup(text);
    for (char *p = s; *p; p++)
        if (*p == '`')
            *p = '"';
    return s;
}

static json_t *json(const char *text)
{
    char *s = quoted(text);
    json_error_t je;
    json_t *j = json_loads(s, 0, &je);
    if (!j)
        fail_msg("%s: %s", je.text, text);
    free(s);
    return j;
}

static int parse(const char *text, struct ckpt_recipes **ret, struct ckpt_err *err)
{
    char *s = quoted(text);
    int rc = ckpt_recipes_parse("t", s, strlen(s), ret, err);
    free(s);
    return rc;
}

enum { SOURCE_BYTES = 1 << 16 };

static struct ckpt_catalog *checkpoint(const char *format, const char *config)
{
    static char bytes[SOURCE_BYTES]; /* zeros, but for the last four */
    struct ckpt_err err = {0};
    struct ckpt_catalog *cat;
    struct ckpt_source *s;

    memset(bytes + SOURCE_BYTES - 4, 1, 4);
    if (ckpt_catalog_new(&cat, &err) < 0 ||
        ckpt_source_mem_new("bytes", bytes, sizeof bytes, &s, &err) < 0)
        fail_msg("%s", err.text);
    (void)ckpt_catalog_add_source(cat, s, &err);
    ckpt_source_unref(s);
    json_object_set_new(cat->about, "format", json_string(format));
    cat->config = json(config);
    return cat;
}

static void add(struct ckpt_catalog *cat, const char *name, enum ckpt_dtype dtype, uint32_t rank,
                const uint64_t *dim)
{
    struct ckpt_err err = {0};
    struct ckpt_piece_draft p;
    struct ckpt_box box = {.rank = rank};
    uint64_t stride[CKPT_MAX_RANK];
    size_t i;

    memcpy(box.n, dim, rank * sizeof *dim);
    ckpt_shape_strides(dim, rank, stride);
    for (uint32_t d = 0; d < rank; d++)
        stride[d] *= ckpt_dtype_size(dtype);
    ckpt_piece_from_box(dim, &box, 0, 0, stride, &p);
    if (ckpt_catalog_add(cat, name, dtype, dim, rank, &i, &err) < 0 ||
        ckpt_catalog_set_pieces(cat, i, &p, 1, &err) < 0)
        fail_msg("%s: %s", name, err.text);
}

static void add1(struct ckpt_catalog *cat, const char *name, uint64_t n)
{
    add(cat, name, CKPT_BF16, 1, (uint64_t[]){n});
}

static void add2(struct ckpt_catalog *cat, const char *name, uint64_t a, uint64_t b)
{
    add(cat, name, CKPT_BF16, 2, (uint64_t[]){a, b});
}

/* Apply a recipe text; the outcome as text: the targets in order, or "code: error". The caller
 * frees it. */
static char *outcome(const char *recipe, const struct ckpt_catalog *src,
                     const struct ckpt_recipe_options *opt)
{
    const struct ckpt_recipe_options none = {0};
    struct ckpt_err err = {0};
    struct ckpt_recipes *set;
    struct ckpt_model *m;
    struct ckpt_str s = {0};
    char *text;

    if ((recipe ? parse(recipe, &set, &err) : ckpt_recipes_load(NULL, &set, &err)) < 0)
        fail_msg("%s", err.text);
    if (ckpt_recipe_apply(set, src, opt ? opt : &none, &m, &err) < 0) {
        ckpt_str_printf(&s, "%s: %s", ckpt_code_name(err.code), err.text);
    } else {
        for (size_t i = 0; i < m->catalog->tensors.len; i++)
            ckpt_str_printf(&s, "%s%s", i ? " " : "", m->catalog->tensors.ptr[i].name);
        for (size_t i = 0; i < json_array_size(m->catalog->warnings); i++)
            ckpt_str_printf(&s, " [%s]",
                            json_string_value(json_array_get(m->catalog->warnings, i)));
        ckpt_model_free(m);
    }
    ckpt_recipes_free(set);
    if (ckpt_str_steal(&s, &text, &err) < 0)
        fail();
    return text;
}

static void expect(const char *recipe, const struct ckpt_catalog *src,
                   const struct ckpt_recipe_options *opt, const char *needle)
{
    char *got = outcome(recipe, src, opt);
    if (!strstr(got, needle))
        fail_msg("expected '%s', got '%s'", needle, got);
    free(got);
}

/* ---- files that lie ---- */

#define MODEL "`model`: {`dims`: {`aa`: `a`, `bb`: `b`}, `tensors`: [`y  aa bb`]}"
#define RULE(from, to) "{`format`: `t`, " MODEL ", `rules`: [{`from`: `" from "`, `to`: `" to "`}]}"

TEST(recipe, files_with_faults_are_refused)
{
    static const struct {
        const char *text, *needle;
    } bad[] = {
        {"{", "not valid JSON"},
        {"[]", "an object is expected"},
        {"{}", "'format' is missing: this is a fragment"},
        {"{`format`: `t`}", "'model' is missing"},
        {"{`format`: `t`, `model`: `nonesuch`}", "no file 'nonesuch.json'"},
        {"{`format`: 1, `model`: `llama`}", "'format' must be a string"},
        {"{`format`: `t`, `model`: `llama`, `rulse`: []}", "unknown key 'rulse'"},
        {"{`format`: `t`, `model`: `llama`, `rules`: {}}", "t: rules: a list of rules"},
        {"{`format`: `t`, `model`: `llama`, `rules`: [1]}", "t: rules[0]: an object"},
        {"{`format`: `t`, `model`: `llama`, `rules`: [{}]}", "a rule has 'from' and 'to'"},
        {"{`format`: `t`, `model`: `llama`, `rules`: [{`from`: `x`}]}",
         "a rule has 'from' and 'to'"},
        {"{`format`: `t`, `model`: `llama`, `rules`: [{`from`: [], `to`: `x`}]}", "1 to 32 sides"},
        {"{`format`: `t`, `model`: `llama`, `rules`: [{`rules`: [], `at`: [`x`]}]}",
         "rules[0].at: two texts"},
        {"{`format`: `t`, `model`: `llama`, `prefixes`: [[`a.{l}.`, `b.`]]}",
         "both prefixes have one number"},
        {"{`format`: `t`, `model`: `llama`, `prefixes`: [[`a.{l`, `b.{l}.`]]}", "'}' expected"},
        {"{`format`: `t`, `model`: `llama`, `prefixes`: [[`a.`, ``]]}", "the name is empty"},
        {"{`format`: `t`, `model`: `llama`, `rules`: [{`include`: `nonesuch`}]}",
         "include: no file 'nonesuch.json'"},
        {"{`format`: `t`, `model`: `llama`, `rules`: [{`from`: `x`, `to`: `y`, `value`: `log`}]}",
         "no operator 'log'"},
        {"{`format`: `t`, `model`: `llama`, `rules`: [{`rules`: [], `value`: `plus_one`}]}",
         "'value' stands beside 'from' and 'to'"},
        {"{`format`: `t`, `model`: `llama`, `rules`: [{`from`: `x`, `to`: `y`, `value`: 1}]}",
         "'value'"},
        {"{`format`: `t`, `model`: `llama`, `when`: `1 +`}", "t: when: '1 +' character 4"},
        {"{`format`: `t`, `model`: `llama`, `config`: {`x`: {`when`: `a`}}}",
         "'when' without 'is'"},
        {"{`format`: `t`, `model`: `llama`, `config`: {`x`: `(`}}", "t: config.x: '('"},
        {"{`format`: `t`, `model`: `llama`, `refuse`: [{`when`: `a`}]}", "belong together"},
        {"{`format`: `t`, `model`: `llama`, `has`: [`a<`]}", "t: has: 'a<' character 2"},
        {RULE("x  aa aa", "y  aa bb"), "rules[0]: 'x  aa aa': axis 'aa' occurs twice"},
        {RULE("x  (aa + aa) bb", "y  aa bb"), "has the term 'aa bb' twice"},
        {RULE("x  aa bb", "y  aa bb c"), "the term 'aa bb' has no partner"},
        {RULE("x  (aa + c) bb", "y  aa bb"), "the term 'c bb' has no partner"},
        {RULE("x  aa bb", "y  (aa + _pad) bb"), "nothing gives the bytes of "},
        {RULE("x  cc bb", "y  cc bb"), "'cc' is not one of the dims of t: model"},
        {RULE("x.{layer}  aa", "y  aa"), "has no partner"},
        {RULE("x.{a|b}", "y"), "groups of words"},
        {RULE("x.{a|b}", "y.{a|b|c}"), "groups of words"},
        {RULE("x", "y.<a|b>"), "a target has one spelling"},
        {RULE("x  (aa bb", "y"), "character 4: this '(' is not closed"},
        {"{`format`: `t`, " MODEL ", `rules`: [{`from`: [`x`, `z`], `to`: `y`}]}",
         "both have the term '...'"},
        {"{`format`: `t`, `model`: {`tensors`: [`y  zz`]}}", "'zz' is not one of the dims"},
        {"{`format`: `t`, `model`: {`tensors`: [`y.{i}`]}}", "no 'each' runs over {i}"},
        {"{`format`: `t`, `model`: {`tensors`: [`y  ...`]}}", "a model's shape is spelt out"},
        {"{`format`: `t`, `model`: {`tensors`: [`y<a|b>`]}}", "one spelling"},
        {"{`format`: `t`, `model`: {`tensors`: [{`each`: `x`, `tensors`: []}]}}",
         "'x' is not one of the dims"},
        {"{`format`: `t`, `model`: {`tensors`: [{`when`: `x`}]}}", "a group has 'tensors'"},
        {"{`format`: `t`, `model`: {`dims`: {`x`: `y`}}}", "two letters or more"},
        {"{`format`: `t`, `model`: {`dims`: {`xx`: `(`}}}", "model: dims.xx"},
        {"{`format`: `t`, `model`: {`needs`: [1]}}", "a list of strings"},
    };
    struct ckpt_err err = {0};
    struct ckpt_recipes *set;

    UNUSED_STATE;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        memset(&err, 0, sizeof err);
        if (parse(bad[i].text, &set, &err) == 0 || !strstr(err.text, bad[i].needle))
            fail_msg("%s\nexpected '%s', got '%s'", bad[i].text, bad[i].needle, err.text);
    }
}

TEST(recipe, an_include_of_itself_ends)
{
    struct ckpt_err err = {0};
    struct ckpt_recipes *set;

    CHECK_FAILS(parse("{`format`: `t`, `model`: `llama`, `include`: [`nanotron/llama`, "
                      "`nanotron/dense`], `rules`: [{`include`: `t`}]}",
                      &set, &err),
                CKPT_MISSING, "no file 't.json'");
    CHECK_FAILS(ckpt_recipes_load("/nonexistent/x.json", &set, &err), CKPT_MISSING, "/nonexistent");
}

/* ---- sizes ---- */

TEST(recipe, sizes_that_do_not_fit_name_tensor_dimension_and_option)
{
    struct ckpt_catalog *src = checkpoint("t", "{}");
    json_t *o = json("{`a`: 4, `b`: 3}");
    struct ckpt_recipe_options opt = {.overrides = o}, none = {0};

    UNUSED_STATE;
    add2(src, "x", 8, 3);
    expect(RULE("x", "y"), src, &opt,
           "conflict: t: rules[0]: dimension 0 of 'y' is 8 in the checkpoint ('x'), but the config "
           "makes it 4 (option a=...)");
    expect(RULE("x  aa bb", "y"), src, &opt,
           "dimension 0 of tensor 'x' is 8, but 'x  aa bb' makes it 4 with aa=4 (option a=...)");
    expect(RULE("x  (aa p=2) bb", "y  (p aa) bb"), src, &opt, "dimension 0 of 'y' is 8");
    expect(RULE("x  (k=3 n) bb", "y  (n k) bb"), src, &opt,
           "dimension 0 of tensor 'x' is 8, which does not fit 'x  (k=3 n) bb'");
    expect(RULE("x  aa bb c", "y  aa bb c"), src, &opt,
           "tensor 'x' has the shape [8, 3], the rule 'x  aa bb c'");
    expect(RULE("x  aa bb", "y"), src, &none,
           "does not divide: 'aa' is unknown or not a whole number (option a=...)");
    expect(RULE("x  (aa + _pad) bb", "y  aa bb"), src, &opt, "y");
    json_decref(o);
    ckpt_catalog_free(src);
}

/* ---- what there is ---- */

#define LAYERS                                                                                     \
    "{`format`: `t`, `model`: {`config`: {`n`: 2, `tie`: null}, `takes`: [`kinds`], `dims`: "      \
    "{`layer`: `n`, `two`: `2`}, `tensors`: "
#define RENAME                                                                                     \
    "}, `rules`: [{`from`: `<old.|>{a|b|c|d|head}`, `to`: `{a|b|c|d|head}`}, {`from`: "            \
    "`s.{layer}.{a|b|c|d}`, `to`: `l.{layer}.{a|b|c|d}`}]}"

TEST(recipe, conditions_of_three_values)
{
    struct ckpt_catalog *src = checkpoint("t", "{}");
    json_t *yes = json("{`tie`: true}"), *no = json("{`tie`: false}");
    struct ckpt_recipe_options tied = {.overrides = yes}, untied = {.overrides = no};
    const char *r =
        LAYERS "[`a  two`, {`when`: `not tie`, `tensors`: [`head  two`, `b  two`]}]" RENAME;

    UNUSED_STATE;
    add1(src, "a", 2);
    expect(r, src, &tied, "a");
    expect(r, src, NULL, "a"); /* unknown: all or none */
    expect(r, src, &untied,
           "missing: the model needs 'head', but the checkpoint has no tensor 'old.head' "
           "(missing=base takes it from base=)");
    add1(src, "head", 2);
    expect(r, src, NULL, "missing: the model needs 'b'");
    add1(src, "old.b", 2);
    expect(r, src, NULL, "a head b");
    char *got = outcome(r, src, &tied);
    CHECK(ckpt_has_prefix(got, "conflict: 2 tensors of the checkpoint are not part of the model "
                               "that its config describes (t): 'head', 'old.b';"));
    free(got);
    tied.allow_leftover = true;
    expect(r, src, &tied,
           "a [2 tensors of the checkpoint are not part of the model: 'head', 'old.b'");
    add1(src, "b", 2);
    expect(r, src, &untied, "conflict: 'b' has two sources: 'old.b' and 'b'");
    json_decref(yes);
    json_decref(no);
    ckpt_catalog_free(src);
}

TEST(recipe, one_of_several_lists_fits)
{
    struct ckpt_catalog *src = checkpoint("t", "{}");
    const char *r = LAYERS "[{`each`: `layer`, `at`: `l.{layer}.`, `tensors`: [{`either`: [[`a  "
                           "two`, `b  two`], [`c  two`, `d?  two`]]}]}]" RENAME;

    UNUSED_STATE;
    add1(src, "s.0.a", 2);
    add1(src, "s.1.c", 2);
    expect(r, src, NULL, "missing: the model needs 'l.0.b'");
    add1(src, "s.0.b", 2);
    expect(r, src, NULL, "l.0.a l.0.b l.1.c");
    add1(src, "s.1.d", 2);
    expect(r, src, NULL, "l.0.a l.0.b l.1.c l.1.d");
    add1(src, "s.1.a", 2);
    add1(src, "s.1.b", 2);
    expect(r, src, NULL, "conflict");
    ckpt_catalog_free(src);
}

TEST(recipe, missing_tensors_can_be_left_out)
{
    struct ckpt_catalog *src = checkpoint("t", "{}");
    struct ckpt_recipe_options opt = {.allow_partial = true};
    const char *r = LAYERS "[`a  two`, `b  two`]" RENAME;

    UNUSED_STATE;
    add1(src, "a", 2);
    add1(src, "stranger", 2);
    expect(r, src, &opt, "conflict: 1 tensors of the checkpoint are not part of the model");
    opt.allow_leftover = true;
    expect(r, src, &opt,
           "a ['b' is left out: the checkpoint has no tensor 'old.b'] [1 tensors of the checkpoint "
           "are not part of the model: 'stranger']");
    ckpt_catalog_free(src);
}

TEST(recipe, what_it_ignores_is_left_out_with_the_reason)
{
    struct ckpt_catalog *src = checkpoint("t", "{}");
    const char *r = LAYERS "[`a  two`]}, `ignores`: [{`names`: `^odd[.]`, `why`: `a buffer`}], "
                           "`rules`: [{`from`: `a`, `to`: `a`}]}";

    UNUSED_STATE;
    add1(src, "a", 2);
    add1(src, "odd.1", 2);
    expect(r, src, NULL, "a [1 tensors are left out: a buffer: 'odd.1']");
    add1(src, "very.odd.1", 2);
    expect(r, src, NULL,
           "conflict: 1 tensors of the checkpoint are not part of the model that its "
           "config describes (t): 'very.odd.1'");
    ckpt_catalog_free(src);
}

/* A tensor of two elements, of which the bytes are at `at` of the only source. */
static void add_at(struct ckpt_catalog *cat, const char *name, uint64_t at)
{
    struct ckpt_err err = {0};
    struct ckpt_piece_draft p = {.src = at, .naxis = 1, .axis = {{2, 1, 2}}};
    size_t i;

    if (ckpt_catalog_add(cat, name, CKPT_BF16, (uint64_t[]){2}, 1, &i, &err) < 0 ||
        ckpt_catalog_set_pieces(cat, i, &p, 1, &err) < 0)
        fail_msg("%s: %s", name, err.text);
}

TEST(recipe, what_the_config_ties_must_be_a_copy)
{
    json_t *yes = json("{`tie`: true}");
    struct ckpt_recipe_options tied = {.overrides = yes};
    const char *r =
        LAYERS "[{`when`: `not tie`, `tied`: `a`, `tensors`: [`head  two`]}, `a  two`]" RENAME;
    const uint64_t zeros = 0, zeros_too = 8, others = SOURCE_BYTES - 4;

    UNUSED_STATE;
    struct ckpt_catalog *src = checkpoint("t", "{}");
    add_at(src, "a", zeros);
    add_at(src, "head", zeros);
    expect(r, src, &tied, "a");
    ckpt_catalog_free(src);

    src = checkpoint("t", "{}");
    add_at(src, "a", zeros);
    add_at(src, "head", zeros_too); /* stored twice */
    expect(r, src, &tied, "a");
    ckpt_catalog_free(src);

    src = checkpoint("t", "{}");
    add_at(src, "a", zeros);
    add_at(src, "head", others);
    expect(
        r, src, &tied,
        "conflict: the config ties 'head' to 'a', but the checkpoint stores other values for it");
    tied.allow_leftover = true;
    expect(r, src, &tied, "a ['head' is left out: the config ties it to 'a'");
    ckpt_catalog_free(src);
    json_decref(yes);
}

TEST(recipe, two_rules_that_deliver_are_a_conflict)
{
    struct ckpt_catalog *src = checkpoint("t", "{}");
    const char *r = "{`format`: `t`, `model`: {`config`: {`k`: true}, `dims`: {`two`: `2`}, "
                    "`tensors`: [`y  two`]}, "
                    "`rules`: [{`from`: `a`, `to`: `y`}, {`when`: `k`, `from`: `b`, `to`: `y`}, "
                    "{`when`: `not k`, `from`: `a`, `to`: `y`}]}";

    UNUSED_STATE;
    add1(src, "a", 2);
    expect(r, src, NULL, "y");
    add1(src, "b", 2);
    expect(r, src, NULL, "conflict: two rules give 'y': t: rules[0] and t: rules[1]");
    ckpt_catalog_free(src);
}

TEST(recipe, stacked_sources_must_be_complete_and_of_one_type)
{
    struct ckpt_catalog *src = checkpoint("t", "{}");
    const char *r = "{`format`: `t`, `model`: {`config`: {`e`: 3}, `dims`: {`expert`: `e`, `two`: "
                    "`2`}, `tensors`: [`y  expert two`]}, "
                    "`rules`: [{`from`: `x.{expert}  h`, `to`: `y  expert h`}]}";

    UNUSED_STATE;
    add1(src, "x.0", 2);
    add1(src, "x.2", 2);
    expect(r, src, NULL,
           "missing: the model needs 'y', but the checkpoint has no tensor 'x.1' "
           "(missing=base takes it from base=)");
    add(src, "x.1", CKPT_F32, 1, (uint64_t[]){2});
    expect(r, src, NULL, "conflict: t: rules[0]: 'y' is made of tensors of different types");
    ckpt_catalog_free(src);
}

TEST(recipe, a_plain_copy_has_one_axis_per_dimension)
{
    struct ckpt_err err = {0};
    struct ckpt_catalog *src = checkpoint("t", "{`a`: 4}");
    struct ckpt_recipes *set;
    struct ckpt_model *m;
    struct ckpt_recipe_options opt = {0};
    struct ckpt_box box;

    add2(src, "x", 16, 3);
    CHECK_OK(parse("{`format`: `t`, `model`: {`dims`: {`heads`: `2`, `dd`: `2`, `hh`: `3`}, "
                   "`tensors`: [`q  (heads p=2 dd) hh`, `k  (p=2 heads dd) hh`]}, "
                   "`rules`: [{`from`: `x  (q=heads p=2 dd + k=heads p=2 dd) h`, `to`: [`q  (q p "
                   "dd) h`, `k  (p k dd) h`]}]}",
                   &set, &err));
    CHECK_OK(ckpt_recipe_apply(set, src, &opt, &m, &err));
    const struct ckpt_tensor *q = ckpt_catalog_find(m->catalog, "q"),
                             *k = ckpt_catalog_find(m->catalog, "k");
    CHECK_EQ(q->npiece, 1);
    CHECK(ckpt_piece_box(q->piece, q->dim, q->rank, &box));
    CHECK_EQ(box.n[0], 8);
    CHECK_EQ(q->piece->axis[0].src, 6);
    CHECK_EQ(k->npiece, 1);
    CHECK_EQ(k->piece->naxis, 4);
    CHECK_EQ(k->piece->src, 8 * 3 * 2);
    ckpt_model_free(m);
    ckpt_recipes_free(set);
    ckpt_catalog_free(src);
}

TEST(recipe, explain_names_the_sources)
{
    struct ckpt_err err = {0};
    struct ckpt_catalog *src = checkpoint("t", "{}");
    struct ckpt_recipes *set;
    struct ckpt_recipe_options opt = {0};
    json_t *j;

    add1(src, "s.0.a", 2);
    add1(src, "s.1.a", 2);
    CHECK_OK(
        parse(LAYERS "[{`each`: `layer`, `tensors`: [`l.{layer}.a  two`]}]" RENAME, &set, &err));
    CHECK_OK(ckpt_recipe_explain(set, src, &opt, "l.1.a", &j, &err));
    CHECK_STR(ckpt_json_str(j, "recipe"), "t");
    CHECK_STR(ckpt_json_str(json_array_get(json_object_get(j, "sources"), 0), "tensor"), "s.1.a");
    json_decref(j);
    CHECK_FAILS(ckpt_recipe_explain(set, src, &opt, "l.2.a", &j, &err), CKPT_MISSING,
                "no tensor 'l.2.a'");
    ckpt_recipes_free(set);
    ckpt_catalog_free(src);
}

TEST(recipe, blocks_number_the_runs_of_an_each)
{
    struct ckpt_err err = {0};
    struct ckpt_catalog *src = checkpoint("t", "{}");
    struct ckpt_recipes *set;
    struct ckpt_recipe_options opt = {0};
    struct ckpt_model *m;

    add1(src, "s.0.a", 2);
    add1(src, "s.1.a", 2);
    add1(src, "s.0.b", 2);
    add1(src, "s.1.b", 2);
    add1(src, "a", 2);
    CHECK_OK(parse(LAYERS
                   "[{`each`: `layer`, `block`: true, `tensors`: [`l.{layer}.a  two`]}, {`each`: "
                   "`layer`, `block`: true, `tensors`: [`l.{layer}.b  two`]}, `a  two`]" RENAME,
                   &set, &err));
    CHECK_OK(ckpt_recipe_apply(set, src, &opt, &m, &err));
    const struct ckpt_tensor *t = m->catalog->tensors.ptr;
    CHECK(t[0].block == 1 && t[1].block == 1 && t[2].block == 2 && t[3].block == 2 &&
          t[4].block == 0);
    ckpt_model_free(m);
    ckpt_recipes_free(set);
    ckpt_catalog_free(src);
}

/* ---- the choice and the config of nanotron's recipes ---- */

#define DENSE                                                                                      \
    "`hidden_size`: 8, `intermediate_size`: 6, `num_attention_heads`: 2, `num_hidden_layers`: 1, " \
    "`num_key_value_heads`: 1, `vocab_size`: 10, "                                                 \
    "`max_position_embeddings`: 64, `rms_norm_eps`: 1e-05, `tie_word_embeddings`: true"

static struct ckpt_catalog *dense(const char *config, bool bias)
{
    struct ckpt_catalog *src = checkpoint("nanotron", config);

    json_object_set_new(src->about, "has_config_yaml", json_true());
    add2(src, "model.token_position_embeddings.pp_block.token_embedding.weight", 10, 8);
    add1(src, "model.final_layer_norm.pp_block.weight", 8);
    add1(src, "model.decoder.0.pp_block.input_layernorm.weight", 8);
    add1(src, "model.decoder.0.pp_block.post_attention_layernorm.weight", 8);
    add2(src, "model.decoder.0.pp_block.attn.qkv_proj.weight", 16, 8);
    if (bias)
        add1(src, "model.decoder.0.pp_block.attn.qkv_proj.bias", 16);
    add2(src, "model.decoder.0.pp_block.attn.o_proj.weight", 8, 8);
    add2(src, "model.decoder.0.pp_block.mlp.gate_up_proj.weight", 12, 8);
    add2(src, "model.decoder.0.pp_block.mlp.down_proj.weight", 8, 6);
    return src;
}

static const struct nanotron_case {
    const char *config;   /* beside DENSE */
    const char *override; /* or NULL */
    const char *recipe;   /* the error's text if there is none */
    int interleaved;      /* q is permuted; -1: no model */
    const char *expect;   /* members of the HF config */
    const char *warning;  /* a part of it, or NULL: none */
} nanotron_cases[] = {
    {"`is_llama_config`: true, `rope_interleaved`: false", NULL, "nanotron/llama", 0,
     "{`rope_theta`: 10000.0, `attention_bias`: false, `rope_scaling`: null, "
     "`num_key_value_heads`: 1, `hidden_act`: `silu`, `use_cache`: true}",
     NULL},
    {"`is_llama_config`: true, `rope_interleaved`: true, `rope_theta`: 500000", NULL,
     "nanotron/llama", 1, "{`rope_theta`: 500000}", NULL},
    {"`is_llama_config`: true", NULL, "nanotron/llama", 1, "{}", NULL},
    {"`is_llama_config`: true", "{`_rope`: `half`}", "nanotron/llama", 0, "{}", NULL},
    {"`is_llama_config`: true, `rope_interleaved`: false", "{`_rope`: `interleaved`}",
     "nanotron/llama", 1, "{}", NULL},
    {"`rope_interleaved`: false", NULL, "nanotron/llama", 0, "{`model_type`: `llama`}", NULL},
    {"`vocab`: 1", NULL, "nanotron/llama", 1, "{}", "neither the class"},
    {"`is_llama_config`: true, `rope_interleaved`: false, `rope_scaling`: {`factor`: 2.0, "
     "`rope_type`: `linear`}",
     NULL, "nanotron/llama", 0, "{`rope_scaling`: {`factor`: 2.0, `rope_type`: `linear`}}",
     "ignores it"},
    {"`is_qwen2_config`: true, `rope_interleaved`: false", NULL, "nanotron/llama", 0,
     "{`model_type`: `llama`}", NULL},
    {"`is_qwen2_config`: true", NULL, "nanotron/llama", 0, "{}", NULL},
    {"`is_qwen2_config`: true, `rope_interleaved`: true, `interleaved_rotary`: false", NULL,
     "nanotron/llama", 0, "{}", NULL},
    {"`is_qwen2_config`: true, `rope_interleaved`: false, `interleaved_rotary`: true, "
     "`_use_qkv_packed`: true",
     NULL, "nanotron/llama", 1, "{}", NULL},
    {"`is_qwen2_config`: true, `rope_interleaved`: true", NULL,
     "unsupported: nanotron/llama: it was trained with interleaved", -1, "{}", NULL},
    {"`is_qwen2_config`: true, `rope_interleaved`: true, `_fused_rotary_emb`: true", NULL,
     "nanotron/llama", 1, "{}", NULL},
    {"`is_qwen2_config`: true, `rope_interleaved`: true", "{`_rope`: `interleaved`}",
     "nanotron/llama", 1, "{}", NULL},
    {"`is_qwen2_config`: true, `rope_seq_len_interpolation_factor`: 4.0", NULL, "nanotron/llama", 0,
     "{`rope_scaling`: {`rope_type`: `linear`, `factor`: 4.0}}", NULL},
    {"`is_qwen2_config`: true, `attention_bias`: true", NULL, "nanotron/qwen2", 0,
     "{`model_type`: `qwen2`, `use_sliding_window`: false, `sliding_window`: null, `rope_scaling`: "
     "null}",
     NULL},
    {"`is_qwen2_config`: true, `attention_bias`: true, `sliding_window_size`: 9", NULL,
     "nanotron/qwen2", 0,
     "{`use_sliding_window`: true, `sliding_window`: 9, `max_window_layers`: 0}", NULL},
    {"`is_qwen2_config`: true, `sliding_window_size`: 9", NULL, "nanotron/mistral", 0,
     "{`model_type`: `mistral`, `sliding_window`: 9}", NULL},
    {"`is_qwen2_config`: true, `no_rope_layer`: 4", NULL, "nanotron/smollm3", 0,
     "{`model_type`: `smollm3`, `no_rope_layer_interval`: 4, `no_rope_layers`: [1], "
     "`use_sliding_window`: false, `pad_token_id`: null}",
     NULL},
    {"`is_qwen2_config`: true, `no_rope_layer`: 1, `sliding_window_size`: 9", NULL,
     "nanotron/smollm3", 0,
     "{`no_rope_layers`: [0], `use_sliding_window`: true, `sliding_window`: 9, `layer_types`: "
     "[`full_attention`]}",
     NULL},
    {"`is_qwen2_config`: true, `no_rope_layer`: 4, `attention_bias`: true", NULL,
     "unsupported: nanotron/unsupported: it has both biases", -1, "{}", NULL},
    {"`is_qwen2_config`: true, `no_rope_layer`: 4, `moe_config`: {`num_experts`: 2}", NULL,
     "unsupported: nanotron/unsupported: it has both experts", -1, "{}", NULL},
    {"`is_llamoe_config`: true", NULL, "unsupported: nanotron/unsupported: LlaMoE", -1, "{}", NULL},
    {"`is_falcon_config`: true", NULL, "unsupported: nanotron/unsupported: nanotron's Falcon", -1,
     "{}", NULL},
    {"`is_llama_config`: true", "{`num_key_value_heads`: 2}", "conflict: nanotron/dense", -1, "{}",
     NULL},
    {"`is_gpt3_config`: true, `is_llama_config`: false", NULL, "missing: no recipe fits", -1, "{}",
     NULL},
};

/* q of 2 heads of 4: row 1 comes from row 2 if pairs become halves. */
static bool is_permuted(const struct ckpt_model *m)
{
    const struct ckpt_tensor *q =
        ckpt_catalog_find(m->catalog, "model.layers.0.self_attn.q_proj.weight");
    return q->piece[0].naxis > 2;
}

static void check_nanotron(const struct ckpt_recipes *set, const struct nanotron_case *c)
{
    struct ckpt_err err = {0};
    char *config = ckpt_asprintf("{" DENSE ", %s}", c->config);
    struct ckpt_catalog *src = dense(config, strstr(c->config, "`attention_bias`: true") != NULL);
    json_t *o = c->override ? json(c->override) : NULL, *want = json(c->expect), *v;
    struct ckpt_recipe_options opt = {.overrides = o};
    struct ckpt_model *m;
    const char *key;

    if (ckpt_recipe_apply(set, src, &opt, &m, &err) < 0) {
        char *text = ckpt_asprintf("%s: %s", ckpt_code_name(err.code), err.text);
        if (c->interleaved >= 0 || !strstr(text, c->recipe))
            fail_msg("%s: expected '%s', got '%s'", c->config, c->recipe, text);
        free(text);
    } else {
        size_t nwarn = json_array_size(m->catalog->warnings);
        const char *warning = json_string_value(json_array_get(m->catalog->warnings, 0));
        if (strcmp(m->recipe, c->recipe) != 0 || is_permuted(m) != c->interleaved)
            fail_msg("%s: %s, permuted %d", c->config, m->recipe, is_permuted(m));
        if (c->warning ? nwarn != 1 || !strstr(warning, c->warning) : nwarn > 0)
            fail_msg("%s: warning '%s'", c->config, warning ? warning : "none");
        json_object_foreach(want, key, v)
            if (!json_equal(v, json_object_get(m->config, key)))
                fail_msg("%s: '%s' is wrong", c->config, key);
        ckpt_model_free(m);
    }
    json_decref(o);
    json_decref(want);
    ckpt_catalog_free(src);
    free(config);
}

TEST(nanotron, configs_choose_the_architecture_and_the_rope_rule)
{
    struct ckpt_err err = {0};
    struct ckpt_recipes *set;

    CHECK_OK(ckpt_recipes_load(NULL, &set, &err));
    for (size_t i = 0; i < sizeof nanotron_cases / sizeof *nanotron_cases; i++)
        check_nanotron(set, &nanotron_cases[i]);
    ckpt_recipes_free(set);
}

TEST(nanotron, facts_of_the_reader_refuse_and_warn)
{
    struct ckpt_catalog *src =
        dense("{" DENSE ", `is_llama_config`: true, `rope_interleaved`: false}", false);

    UNUSED_STATE;
    json_object_set_new(src->about, "use_mup", json_true());
    expect(NULL, src, NULL, "unsupported: nanotron/llama: it was trained with muP");
    json_object_set_new(src->about, "use_mup", json_false());
    json_object_set_new(src->about, "has_config_yaml", json_false());
    json_object_set_new(src->about, "has_checkpoint_metadata", json_false());
    expect(NULL, src, NULL, "Hugging Face converter before 2025-03-21");
    ckpt_catalog_free(src);
}

TEST(nanotron, a_base_of_another_type_is_a_conflict)
{
    struct ckpt_catalog *src =
        dense("{" DENSE ", `is_llama_config`: true, `rope_interleaved`: false}", false);
    json_t *qwen = json("{`model_type`: `qwen2`}"),
           *llama = json("{`model_type`: `llama`, `eos_token_id`: 7, `torch_dtype`: `float16`}");
    struct ckpt_recipe_options opt = {.base_config = qwen};
    struct ckpt_err err = {0};
    struct ckpt_recipes *set;
    struct ckpt_model *m;

    expect(NULL, src, &opt,
           "conflict: the base model is of type 'qwen2', which none of the recipes that fit the "
           "checkpoint makes (nanotron/llama)");
    opt.base_config = llama;
    CHECK_OK(ckpt_recipes_load(NULL, &set, &err));
    CHECK_OK(ckpt_recipe_apply(set, src, &opt, &m, &err));
    CHECK_EQ(json_integer_value(json_object_get(m->config, "eos_token_id")), 7);
    CHECK(json_object_get(m->config, "torch_dtype") == NULL);
    ckpt_model_free(m);
    ckpt_recipes_free(set);
    json_decref(qwen);
    json_decref(llama);
    ckpt_catalog_free(src);
}

/* ---- cost ---- */

TEST(recipe, a_hundred_thousand_tensors)
{
    struct ckpt_err err = {0};
    struct ckpt_catalog *src = checkpoint(
        "nanotron", "{`is_llama_config`: true, `rope_interleaved`: true, `hidden_size`: 8, "
                    "`intermediate_size`: 6, `num_attention_heads`: 2, "
                    "`num_hidden_layers`: 11111, `num_key_value_heads`: 1, `vocab_size`: 10, "
                    "`max_position_embeddings`: 64, `rms_norm_eps`: 1e-05}");
    struct ckpt_recipe_options opt = {0};
    struct ckpt_recipes *set;
    struct ckpt_model *m;
    struct timespec a, b;
    char name[128];

    add2(src, "model.token_position_embeddings.pp_block.token_embedding.weight", 10, 8);
    add2(src, "model.lm_head.pp_block.weight", 10, 8);
    add1(src, "model.final_layer_norm.pp_block.weight", 8);
    for (int l = 0; l < 11111; l++) {
        static const struct {
            const char *leaf;
            uint64_t n, k;
        } each[] = {{"input_layernorm", 8, 0},   {"post_attention_layernorm", 8, 0},
                    {"attn.qkv_proj", 16, 8},    {"attn.o_proj", 8, 8},
                    {"mlp.gate_up_proj", 12, 8}, {"mlp.down_proj", 8, 6}};
        for (size_t i = 0; i < 6; i++) {
            (void)snprintf(name, sizeof name, "model.decoder.%d.pp_block.%s.weight", l,
                           each[i].leaf);
            if (each[i].k)
                add2(src, name, each[i].n, each[i].k);
            else
                add1(src, name, each[i].n);
        }
    }
    CHECK_OK(ckpt_recipes_load(NULL, &set, &err));
    (void)clock_gettime(CLOCK_MONOTONIC, &a);
    CHECK_OK(ckpt_recipe_apply(set, src, &opt, &m, &err));
    (void)clock_gettime(CLOCK_MONOTONIC, &b);
    double s = (double)(b.tv_sec - a.tv_sec) + (double)(b.tv_nsec - a.tv_nsec) * 1e-9;
    print_message("%zu tensors in %.3f s, %zu bytes of arena each\n", m->catalog->tensors.len, s,
                  m->catalog->arena.total / m->catalog->tensors.len);
    CHECK_EQ(m->catalog->tensors.len, 11111 * 9 + 3);
    ckpt_model_free(m);
    ckpt_recipes_free(set);
    ckpt_catalog_free(src);
}

TEST(recipe, a_value_is_computed_of_what_the_rule_gathers)
{
    static const char text[] =
        "{`format`: `t`, `model`: {`dims`: {`aa`: `a`}, `config`: {`a`: 4}, `tensors`: [`u  aa`, "
        "`v  aa`]}, `rules`: [{`from`: `x`, `to`: `u`, `value`: `plus_one`}, {`from`: `x`, `to`: "
        "`v`}]}";
    struct ckpt_catalog *src = checkpoint("t", "{}");
    struct ckpt_recipe_options opt = {0};
    struct ckpt_recipes *set;
    struct ckpt_model *m;
    struct ckpt_err err = {0};
    unsigned char got[8];
    json_t *why;

    add1(src, "x", 4);
    CHECK_OK(parse(text, &set, &err));
    CHECK_OK(ckpt_recipe_apply(set, src, &opt, &m, &err));
    const struct ckpt_tensor *u = ckpt_catalog_find(m->catalog, "u");
    CHECK(u && u->value && !ckpt_catalog_find(m->catalog, "v")->value);
    CHECK_EQ(u->dtype, CKPT_BF16);
    CHECK_OK(ckpt_tensor_pread(u, NULL, got, 8, 0, &err));
    CHECK(memcmp(got, "\x80\x3f\x80\x3f\x80\x3f\x80\x3f", 8) == 0); /* 0 + 1 */
    CHECK_OK(ckpt_recipe_explain(set, src, &opt, "u", &why, &err));
    CHECK_STR(json_string_value(json_object_get(why, "value")), "plus_one");
    json_decref(why);
    ckpt_model_free(m);
    ckpt_recipes_free(set);
    ckpt_catalog_free(src);

    src = checkpoint("t", "{}");
    add(src, "x", CKPT_I32, 1, (uint64_t[]){4});
    expect(text, src, NULL, "'u' is I32: plus_one cannot be computed from that dtype");
    ckpt_catalog_free(src);
}

TESTS(T(recipe, files_with_faults_are_refused), T(recipe, an_include_of_itself_ends),
      T(recipe, sizes_that_do_not_fit_name_tensor_dimension_and_option),
      T(recipe, conditions_of_three_values), T(recipe, one_of_several_lists_fits),
      T(recipe, missing_tensors_can_be_left_out),
      T(recipe, what_it_ignores_is_left_out_with_the_reason),
      T(recipe, what_the_config_ties_must_be_a_copy),
      T(recipe, two_rules_that_deliver_are_a_conflict),
      T(recipe, stacked_sources_must_be_complete_and_of_one_type),
      T(recipe, a_plain_copy_has_one_axis_per_dimension), T(recipe, explain_names_the_sources),
      T(recipe, a_value_is_computed_of_what_the_rule_gathers),
      T(recipe, blocks_number_the_runs_of_an_each),
      T(nanotron, configs_choose_the_architecture_and_the_rope_rule),
      T(nanotron, facts_of_the_reader_refuse_and_warn),
      T(nanotron, a_base_of_another_type_is_a_conflict), T(recipe, a_hundred_thousand_tensors))
