/* SPDX-License-Identifier: Apache-2.0 */
/* Where the tensors of a model are in a checkpoint: the prefix that makes most of them fit. */
#include "model/fit.h"

#include "base/mem.h"
#include "test.h"

/* A catalogue of float tensors of one dimension, from pairs of name and size, which ends with NULL.
 */
struct entry {
    const char *name;
    uint64_t n;
};

static struct ckpt_catalog *catalog(const struct entry *e)
{
    struct ckpt_catalog *cat;
    struct ckpt_err err = {0};
    size_t index;

    if (ckpt_catalog_new(&cat, &err) < 0)
        fail_msg("%s", err.text);
    for (; e->name; e++)
        if (ckpt_catalog_add(cat, e->name, CKPT_BF16, &e->n, 1, &index, &err) < 0)
            fail_msg("%s", err.text);
    return cat;
}

/* Find the model; "": below no prefix, NULL: it is nowhere. */
static const char *place(const struct entry *run, const struct entry *model, bool packed,
                         struct ckpt_fit *fit)
{
    static char text[64], two[64]; /* the names are freed */
    ckpt_cleanup(ckpt_catalog_freep) struct ckpt_catalog *cat = catalog(run),
                                                         *theirs = catalog(model);
    ckpt_cleanup(ckpt_fit_model_release) struct ckpt_fit_model m = {.cat = theirs,
                                                                    .packed = packed};
    ckpt_cleanup(ckpt_freep) const char **name = ckpt_catalog_names(cat);
    struct ckpt_err err = {0};
    bool found;

    if (ckpt_fit_model_init(&m, &err) < 0 || ckpt_fit_find(cat, name, &m, fit, &found, &err) < 0)
        fail_msg("%s", err.text);
    if (!found)
        return NULL;
    (void)snprintf(text, sizeof text, "%.*s", (int)fit->len, fit->at);
    fit->at = text;
    if (fit->two) {
        (void)snprintf(two, sizeof two, "%.*s", (int)fit->two_len, fit->two);
        fit->two = two;
    }
    return text;
}

static const struct entry model[] = {{"a.w", 4}, {"b.w", 4}, {"b.x", 2}, {"c", 3}, {NULL, 0}};

TEST(fit, the_prefix_is_the_one_below_which_most_tensors_are)
{
    /* "b.w" is below "tower." first, but the rest is not */
    const struct entry run[] = {{"tower.b.w", 4}, {"m.a.w", 4}, {"m.b.w", 4},
                                {"m.b.x", 2},     {"m.c", 3},   {NULL, 0}};
    struct ckpt_fit fit;

    CHECK_STR(place(run, model, false, &fit), "m.");
    CHECK(fit.named == 4 && fit.shaped == 4 && !fit.two);
}

TEST(fit, names_that_are_the_model_s_own_have_no_prefix)
{
    struct ckpt_fit fit;

    CHECK_STR(place(model, model, false, &fit), "");
    CHECK(fit.shaped == 4);
}

TEST(fit, shapes_tell_two_models_of_one_class_apart)
{
    const struct entry run[] = {{"big.a.w", 8}, {"big.b.w", 8}, {"big.b.x", 4},
                                {"big.c", 6},   {"m.a.w", 4},   {"m.b.w", 4},
                                {"m.b.x", 2},   {"m.c", 3},     {NULL, 0}};
    struct ckpt_fit fit;

    CHECK_STR(place(run, model, false, &fit), "m.");
    CHECK(!fit.two);
}

TEST(fit, two_models_of_one_shape_are_told)
{
    const struct entry run[] = {{"p.a.w", 4}, {"p.b.w", 4}, {"p.b.x", 2}, {"p.c", 3}, {"q.a.w", 4},
                                {"q.b.w", 4}, {"q.b.x", 2}, {"q.c", 3},   {NULL, 0}};
    struct ckpt_fit fit;

    CHECK_STR(place(run, model, false, &fit), "p.");
    CHECK(fit.two && fit.two_len == 2 && strncmp(fit.two, "q.", 2) == 0);
}

TEST(fit, half_of_the_names_is_not_enough)
{
    const struct entry run[] = {{"m.a.w", 4}, {"m.b.w", 4}, {"y", 1}, {"z", 1}, {NULL, 0}};
    struct ckpt_fit fit;

    CHECK(!place(run, model, false, &fit));
}

TEST(fit, another_size_of_the_model_is_still_found_by_its_names)
{
    const struct entry run[] = {{"m.a.w", 8}, {"m.b.w", 8}, {"m.b.x", 4}, {"m.c", 6}, {NULL, 0}};
    struct ckpt_fit fit;

    CHECK_STR(place(run, model, false, &fit), "m.");
    CHECK(fit.shaped == 0 && fit.named == 4);
}

TEST(fit, packed_tensors_of_a_module_stand_for_its_weight)
{
    const struct entry
        packed[] = {{"n.weight", 4},       {"q.weight_packed", 1}, {"q.weight_scale", 1},
                    {"q.weight_shape", 2}, {"k.weight.absmax", 1}, {"k.weight", 9},
                    {"e.up_blocks", 1},    {"e.up_scales", 1},     {NULL, 0}},
        run[] = {{"m.n.weight", 4}, {"m.q.weight", 8}, {"m.k.weight", 8}, {"m.e.up", 8}, {NULL, 0}};
    const struct entry plain[] = {
        {"n.weight", 4}, {"q.weight", 8}, {"k.weight", 8}, {"e.up", 8}, {NULL, 0}};
    ckpt_cleanup(ckpt_catalog_freep) struct ckpt_catalog *own = catalog(plain);
    struct ckpt_fit fit;

    CHECK_STR(place(run, packed, true, &fit), "m.");
    CHECK(fit.named == 4);
    CHECK(ckpt_fit_stands_for(own, "q.weight_packed") && ckpt_fit_stands_for(own, "q.g_idx"));
    CHECK(ckpt_fit_stands_for(own, "k.weight.quant_state.nf4"));
    CHECK(!ckpt_fit_stands_for(own, "v.weight_packed") && !ckpt_fit_stands_for(own, "n"));
}

TEST(fit, a_place_is_better_by_shapes_then_by_names)
{
    const struct ckpt_fit less = {.shaped = 3, .named = 9}, more = {.shaped = 4, .named = 5},
                          named = {.shaped = 4, .named = 6};

    CHECK(ckpt_fit_better(&more, &less) && !ckpt_fit_better(&less, &more));
    CHECK(ckpt_fit_better(&named, &more) && !ckpt_fit_better(&more, &named));
    CHECK(!ckpt_fit_better(&more, &more));
}

TESTS(T(fit, the_prefix_is_the_one_below_which_most_tensors_are),
      T(fit, names_that_are_the_model_s_own_have_no_prefix),
      T(fit, shapes_tell_two_models_of_one_class_apart), T(fit, two_models_of_one_shape_are_told),
      T(fit, half_of_the_names_is_not_enough),
      T(fit, another_size_of_the_model_is_still_found_by_its_names),
      T(fit, packed_tensors_of_a_module_stand_for_its_weight),
      T(fit, a_place_is_better_by_shapes_then_by_names))
