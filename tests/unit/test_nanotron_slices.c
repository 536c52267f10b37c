/* SPDX-License-Identifier: Apache-2.0 */
/* nanotron's names and slices: the spellings that its code of all ages writes. */
#include "test.h"

#include <stdlib.h>

#include "format/nanotron/shards.h"

static void check_pairs(const char *shape, const char *text, uint64_t rows, uint64_t cols,
                        size_t want, const uint64_t (*ranges)[3])
{
    struct ckpt_err err = {0};
    struct ckpt_box_pair *pair;
    uint64_t dim[CKPT_MAX_RANK], local[2] = {rows, cols};
    uint32_t rank;
    size_t n;
    if (ckpt_nt_shape_parse(shape, dim, &rank, &err) < 0 ||
        ckpt_nt_pairs_parse(text, local, dim, rank, &pair, &n, &err) < 0)
        fail_msg("%s", err.text);
    assert_int_equal(rank, cols ? 2 : 1);
    assert_int_equal(n, want);
    for (size_t i = 0; i < n; i++) { /* of the first dimension: local, global, count */
        assert_int_equal(pair[i].local.lo[0], ranges[i][0]);
        assert_int_equal(pair[i].global.lo[0], ranges[i][1]);
        assert_int_equal(pair[i].local.n[0], ranges[i][2]);
        assert_int_equal(pair[i].global.n[0], ranges[i][2]);
    }
    free(pair);
}

TEST(slices, golden_strings_of_the_writer_are_read)
{
    static const uint64_t qkv1[][3] = {{0, 0, 32}, {32, 32, 16}, {48, 48, 16}};
    static const uint64_t qkv2[][3] = {{0, 16, 16}, {16, 40, 8}, {24, 56, 8}};
    static const uint64_t gate[][3] = {{0, 32, 32}, {32, 96, 32}};
    static const uint64_t o[][3] = {{0, 0, 32}}, emb[][3] = {{0, 128, 128}},
                          flat[][3] = {{0, 16, 16}};
    UNUSED_STATE;
    check_pairs("(64, 32)",
                "0,32,None|None,None,None#0,32,None|None,None,None;32,48,None|None,None,None#32,48,"
                "None|None,None,None;48,64,None|None,None,None#48,64,None|None,None,None",
                64, 32, 3, qkv1);
    static const char *const shapes[] = {"(64, 32)", "(np.int64(64), 32)"};
    for (size_t i = 0; i < 2; i++)
        check_pairs(shapes[i],
                    "0,16,None|None,None,None#16,32,None|None,None,None;16,24,None|None,None,None#"
                    "40,48,None|None,None,None;24,32,None|None,None,None#56,64,None|None,None,None",
                    32, 32, 3, qkv2);
    check_pairs("(64,)", "0,16,None#16,32,None;16,24,None#40,48,None;24,32,None#56,64,None", 32, 0,
                3, qkv2);
    check_pairs("(np.int64(64),)",
                "0,16,None#16,32,None;16,24,None#40,48,None;24,32,None#56,64,None", 32, 0, 3, qkv2);
    check_pairs("(np.int64(128), 32)",
                "0,32,None|None,None,None#32,64,None|None,None,None;32,64,None|None,None,None#96,"
                "128,None|None,None,None",
                64, 32, 2, gate);
    check_pairs("(32, 32)", "None,None,None|None,None,None#None,None,None|16,32,None", 32, 16, 1,
                o);
    check_pairs("(256, 32)", "None,None,None|None,None,None#128,256,None|None,None,None", 128, 32,
                1, emb);
    check_pairs("(32,)", "None,None,None#16,32,None", 16, 0, 1, flat);
}

TEST(slices, numpy_sizes_may_stand_anywhere)
{
    static const char *const texts[] = {"(2, np.int64(5))", "(np.int32(2), np.int64(5))", "(2, 5,)",
                                        "(2,5)"};
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        struct ckpt_err err = {0};
        uint64_t dim[CKPT_MAX_RANK];
        uint32_t rank;
        CHECK_OK(ckpt_nt_shape_parse(texts[i], dim, &rank, &err));
        CHECK(rank == 2 && dim[0] == 2 && dim[1] == 5);
    }
}

#define RANKS "_pp-rank-3-of-8_tp-rank-1-of-2"

TEST(name, every_spelling_is_read)
{
    static const struct {
        const char *text, *leaf;
        bool sharded, ep, broken;
    } names[] = {
        {"model_weight.safetensors", "weight", false, false, false},
        {"model_A_log.safetensors", "A_log", false, false, false},
        {"model_D.safetensors", "D", false, false, false},
        {"model_merged_gate_up_proj.safetensors", "merged_gate_up_proj", false, false, false},
        {"model_weight" RANKS ".safetensors", "weight", true, false, false},
        {"model_bias" RANKS "_exp-rank-1-of-2.safetensors", "bias", true, true, false},
        /* The broken names of 1.2 and 1.3; the first is that of a real file but for its ranks. */
        {"model_model_weight.safetensors" RANKS ".safetensors", "weight", true, false, true},
        {"model_model_A_log.safetensors" RANKS "_exp-rank-0-of-4.safetensors", "A_log", true, true,
         true},
        {"model_model_weight.safetensors" RANKS, "weight", true, false, true},
        {"model_model_A_log.safetensors" RANKS "_exp-rank-0-of-4", "A_log", true, true, true},
        {"model_model_x.safetensors", "model_x", false, false, false},
    };
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        struct ckpt_nt_name n;
        CHECK(ckpt_nt_name_parse(names[i].text, &n));
        CHECK(n.leaf_len == strlen(names[i].leaf) &&
              memcmp(n.leaf, names[i].leaf, n.leaf_len) == 0);
        CHECK(n.sharded == names[i].sharded && n.has_ep == names[i].ep &&
              n.broken == names[i].broken);
        CHECK(!n.sharded || (n.pp.rank == 3 && n.pp.size == 8 && n.tp.rank == 1 && n.tp.size == 2));
    }
}

TEST(name, near_misses_are_not_weights)
{
    static const char *const names[] = {
        "",
        "model_",
        "model_.safetensors",
        "weight.safetensors",
        "optimizer_weight.safetensors",
        "model_weight.safetensors.lock",
        "model_weight.bin",
        "model_a.b.safetensors",
        "model_weight_pp-rank-0-of-1.safetensors",
        "model_weight_tp-rank-0-of-1_pp-rank-0-of-1.safetensors",
        "model_weight_pp-rank-1-of-1_tp-rank-0-of-1.safetensors",
        "model_weight_pp-rank-0-of-1_tp-rank-2-of-2.safetensors",
        "model_weight_pp-rank--1-of-1_tp-rank-0-of-2.safetensors",
        "model_weight_pp-rank-0-of-0_tp-rank-0-of-2.safetensors",
        "model_weight_pp-rank-0-of-1_tp-rank-0-of-18446744073709551616.safetensors",
        "model_weight" RANKS,
        "model_weight" RANKS "_exp-rank-0-of-1",
        "model_weight" RANKS "x.safetensors",
        "model_weight.safetensors" RANKS,
        "model_model_.safetensors" RANKS,
        "model_model_weight.safetensors" RANKS ".safetensors.lock",
        "model_model_weight.safetensors" RANKS "x.safetensors",
        "model_model_weight.safetensors_pp-rank-0-of-2.safetensors",
        "model" RANKS ".safetensors",
    };
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        struct ckpt_nt_name n;
        if (ckpt_nt_name_parse(names[i], &n))
            fail_msg("'%s' must not be a weight's name", names[i]);
        UNUSED_STATE;
    }
}

TESTS(T(slices, golden_strings_of_the_writer_are_read), T(slices, numpy_sizes_may_stand_anywhere),
      T(name, every_spelling_is_read), T(name, near_misses_are_not_weights))
