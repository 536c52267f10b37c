/* SPDX-License-Identifier: Apache-2.0 */
/* How a model is divided among the ranks of a Megatron job, and what cannot be. */
#include "base/err.h"
#include "base/mem.h"
#include "format/megatron/writer_plan.h"

#include "test.h"

/* A model of so many layers and, unless they are 0, experts in each; with a layer that looks
 * further ahead, and one of an encoder of images. */
static struct ckpt_catalog *model(unsigned layers, unsigned experts)
{
    struct ckpt_catalog *cat;
    struct ckpt_err err = {0};
    const uint64_t one = 1;
    char name[128];
    size_t index;

    if (ckpt_catalog_new(&cat, &err) < 0)
        fail_msg("%s", err.text);
    for (unsigned i = 0; i < layers; i++) {
        (void)snprintf(name, sizeof name, "decoder.layers.%u.input_layernorm.weight", i);
        if (ckpt_catalog_add(cat, name, CKPT_F32, &one, 1, &index, &err) < 0)
            fail_msg("%s", err.text);
        for (unsigned e = 0; e < experts; e++) {
            (void)snprintf(name, sizeof name,
                           "decoder.layers.%u.mlp.experts.experts.%u.linear_fc1.weight", i, e);
            if (ckpt_catalog_add(cat, name, CKPT_F32, &one, 1, &index, &err) < 0)
                fail_msg("%s", err.text);
        }
    }
    if (ckpt_catalog_add(cat, "mtp.layers.99.eh_proj.weight", CKPT_F32, &one, 1, &index, &err) <
            0 ||
        ckpt_catalog_add(cat, "vision_model.decoder.layers.99.norm.weight", CKPT_F32, &one, 1,
                         &index, &err) < 0)
        fail_msg("%s", err.text);
    return cat;
}

/* What the options of a layout say; 0: not given. */
struct asked {
    uint32_t tp, pp, vpp, ep, etp;
};

static int grid(unsigned layers, unsigned experts, struct asked a, struct ckpt_mg_grid *ret,
                struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_catalog_freep) struct ckpt_catalog *cat = model(layers, experts);
    const struct ckpt_output output = {.cut = {[CKPT_CUT_TP] = a.tp,
                                               [CKPT_CUT_PP] = a.pp,
                                               [CKPT_CUT_VPP] = a.vpp,
                                               [CKPT_CUT_EP] = a.ep,
                                               [CKPT_CUT_ETP] = a.etp}};

    return ckpt_mg_grid_init(ret, &(struct ckpt_writing){.cat = cat, .output = &output}, err);
}

TEST(megatron, names_are_taken_apart_at_lists_of_layers)
{
    static const struct {
        const char *name, *rest;
        uint64_t layer;
        bool in_layer;
    } each[] = {
        {"decoder.layers.12.norm.weight", "norm.weight", 12, true},
        {"language_model.decoder.layers.3.norm.weight", "norm.weight", 3, true},
        {"a.language_model.decoder.layers.4.norm.weight", "norm.weight", 4, true},
        {"vision_model.decoder.layers.5.norm.weight", "norm.weight", 5, false},
        {"my_decoder.layers.6.norm.weight", "my_decoder.layers.6.norm.weight", 0, false},
        {"decoder.final_norm.weight", "decoder.final_norm.weight", 0, false},
        {"decoder.layers.x.norm.weight", "decoder.layers.x.norm.weight", 0, false},
    };

    for (size_t i = 0; i < sizeof each / sizeof *each; i++) {
        const struct ckpt_mg_name n = ckpt_mg_name_parse(each[i].name);
        CHECK_STR(n.rest, each[i].rest);
        CHECK_EQ(n.layer, each[i].layer);
        CHECK_EQ(n.in_layer, each[i].in_layer);
        CHECK_EQ(n.stem,
                 n.rest == each[i].name ? 0 : strstr(each[i].name, "layers.") + 7 - each[i].name);
        CHECK(!n.leaf);
    }
    const char name[] = "decoder.layers.2.mlp.experts.experts.31.linear_fc1.weight";
    const struct ckpt_mg_name n = ckpt_mg_name_parse(name);
    CHECK_STR(n.leaf, "linear_fc1.weight");
    CHECK_EQ(n.expert, 31);
    CHECK_EQ(n.before, strlen("decoder.layers.2.mlp.experts.experts."));
}

static void check_stage(const struct ckpt_mg_grid *g, const char *name, uint32_t stage,
                        uint32_t part)
{
    const struct ckpt_mg_name n = ckpt_mg_name_parse(name);
    uint32_t got;

    assert_int_equal(ckpt_mg_stage(g, &n, &got), stage);
    assert_int_equal(got, part);
}

TEST(megatron, layers_and_experts_that_divide_have_their_ranks)
{
    struct ckpt_mg_grid g;
    struct ckpt_err err = {0};

    CHECK_OK(grid(18, 0, (struct asked){.tp = 2, .pp = 3, .vpp = 3}, &g, &err));
    CHECK_EQ(g.layers, 18);
    CHECK_EQ(g.experts, 0);
    CHECK_EQ(g.size, 2);
    for (unsigned i = 0; i < 18; i++) {
        char name[64];
        (void)snprintf(name, sizeof name, "decoder.layers.%u.input_layernorm.weight", i);
        check_stage(&g, name, i / 2 % 3, i / 6); /* two layers a part, in turns */
    }
    check_stage(&g, "embedding.word_embeddings.weight", 0, 0);
    check_stage(&g, "decoder.final_layernorm.weight", 2, 2);
    check_stage(&g, "mtp.layers.0.eh_proj.weight", 2, 2);
    CHECK_OK(grid(1, 1, (struct asked){0}, &g, &err));
    CHECK_EQ(g.experts, 1);
    CHECK_OK(grid(1, 6, (struct asked){.tp = 4, .ep = 3, .etp = 2}, &g, &err));
    CHECK_EQ(g.layers, 1);
    CHECK_EQ(g.experts, 6);
    CHECK_EQ(g.size, 12); /* the least common multiple of 4 and 3 * 2 */
    CHECK_EQ(ckpt_mg_expert_rank(&g, 1), 0);
    CHECK_EQ(ckpt_mg_expert_rank(&g, 2), 1);
    CHECK_EQ(ckpt_mg_expert_rank(&g, 5), 2);
}

TEST(megatron, layers_and_experts_that_do_not_divide_are_told)
{
    struct ckpt_mg_grid g;
    struct ckpt_err err = {0};
    static const struct {
        unsigned layers, experts;
        struct asked asked;
        const char *says;
    } each[] = {
        {12, 0, {.pp = 5}, "has 12 layers, which cannot be divided among 5 stages"},
        {2, 0, {.pp = 4}, "has 2 layers, which cannot be divided among 4 stages"},
        {1, 0, {.pp = 2}, "has 1 layer, which cannot be divided among 2 stages"},
        {12, 0, {.pp = 2, .vpp = 4}, "divided among 2 stages of 4 parts each"},
        {12, 0, {.vpp = 2}, "option vpp: there is only one stage"},
        {2, 4, {.ep = 3}, "has 4 experts, which cannot be divided among 3 ranks"},
        {2, 0, {.ep = 2}, "option ep: the model has no experts"},
        {2, 0, {.etp = 2}, "option etp: the model has no experts"},
        {2, 4, {.tp = 1024, .pp = 2048}, "the layout has more than 1048576 ranks"},
        {2, 4, {.tp = 1024, .pp = 1024}, "has 2 layers, which cannot be divided among 1024"},
        {2, 4, {.ep = 1024, .etp = 512, .pp = 4}, "the layout has more than 1048576 ranks"},
        {2, 4, {.ep = 65536, .etp = 65536}, "the layout has more than 1048576 ranks"},
        {2, 4, {.ep = 2048, .etp = 1024}, "the layout has more than 1048576 ranks"},
        {2, 4, {.ep = 1024, .etp = 1024}, "has 4 experts, which cannot be divided among 1024"},
    };

    for (size_t i = 0; i < sizeof each / sizeof *each; i++)
        CHECK_FAILS(grid(each[i].layers, each[i].experts, each[i].asked, &g, &err), CKPT_USAGE,
                    each[i].says);
    (void)grid(12, 0, (struct asked){.pp = 5}, &g, memset(&err, 0, sizeof err));
    CHECK_STR(err.text, "option pp: the model has 12 layers, which cannot be divided among 5 "
                        "stages");
}

TESTS(T(megatron, names_are_taken_apart_at_lists_of_layers),
      T(megatron, layers_and_experts_that_divide_have_their_ranks),
      T(megatron, layers_and_experts_that_do_not_divide_are_told))
