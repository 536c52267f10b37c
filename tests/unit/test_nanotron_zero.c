/* SPDX-License-Identifier: Apache-2.0 */
/* ZeRO-1: which interval a rank has, and the boxes that it is. */
#include "test.h"

#include "format/nanotron/shards.h"
#include "random.h"

TEST(share, ranks_follow_each_other_and_the_first_are_longer)
{
    static const struct {
        uint64_t numel;
        uint32_t rank, size;
        uint64_t lo, hi;
    } shares[] = {
        {352, 0, 3, 0, 118},   {352, 1, 3, 118, 235}, {352, 2, 3, 235, 352}, /* as nanotron wrote */
        {16, 0, 3, 0, 6},      {16, 1, 3, 6, 11},     {16, 2, 3, 11, 16},
        {384, 1, 3, 128, 256}, {2, 1, 4, 1, 2},       {2, 2, 4, 2, 2},
        {2, 3, 4, 2, 2},       {0, 0, 2, 0, 0},       {7, 0, 1, 0, 7},
    };
    for (size_t i = 0; i < sizeof shares / sizeof shares[0]; i++) {
        struct ckpt_nt_interval in =
            ckpt_nt_zero_share(shares[i].numel, shares[i].rank, shares[i].size);
        CHECK_EQ(in.lo, shares[i].lo);
        CHECK_EQ(in.hi, shares[i].hi);
    }
    struct ckpt_nt_interval last = ckpt_nt_zero_share(UINT64_MAX, UINT32_MAX - 1, UINT32_MAX);
    CHECK_EQ(last.hi, UINT64_MAX);
}

TEST(interval, what_the_file_says_goes_before_the_rule)
{
    struct ckpt_nt_interval in;
    struct ckpt_err err = {0};
    json_t *offsets;
    const char *text = "{\"w\": {\"0\": [\"0\", \"3\"], \"1\": [3, 10], \"2\": [\"9\", \"11\"]}}";
    CHECK_OK(ckpt_json_parse(text, strlen(text), "offsets", &offsets, &err));
    CHECK_OK(ckpt_nt_zero_interval(offsets, "w", 10, 0, 2, &in, &err));
    CHECK(in.lo == 0 && in.hi == 3);
    CHECK_OK(ckpt_nt_zero_interval(offsets, "w", 10, 1, 2, &in, &err));
    CHECK(in.lo == 3 && in.hi == 10);
    CHECK_OK(ckpt_nt_zero_interval(offsets, "v", 10, 1, 2, &in, &err));
    CHECK(in.lo == 5 && in.hi == 10);
    CHECK_OK(ckpt_nt_zero_interval(NULL, "w", 10, 1, 2, &in, &err));
    CHECK(in.lo == 5 && in.hi == 10);
    CHECK_FAILS(ckpt_nt_zero_interval(offsets, "w", 10, 2, 4, &in, &err), CKPT_FORMAT, "9..11");
    CHECK_FAILS(ckpt_nt_zero_interval(offsets, "w", 10, 3, 4, &in, &err), CKPT_CONFLICT, "nothing");
    json_decref(offsets);
}

static bool inside(const struct ckpt_box *b, const uint64_t *at)
{
    bool in = true;
    for (uint32_t d = 0; d < b->rank; d++)
        in &= at[d] >= b->lo[d] && at[d] - b->lo[d] < b->n[d];
    return in;
}

/* Its global box is as far from its local one as in the whole pair. */
static bool moved_alike(const struct ckpt_box_pair *p, const struct ckpt_box_pair *whole)
{
    bool same = p->local.rank == whole->local.rank && p->global.rank == whole->local.rank;
    for (uint32_t d = 0; d < p->local.rank; d++)
        same &= p->global.n[d] == p->local.n[d] &&
                p->global.lo[d] - p->local.lo[d] == whole->global.lo[d] - whole->local.lo[d];
    return same;
}

static bool clip_is_right(const struct ckpt_box_pair *pair, const uint64_t *dim, uint64_t numel,
                          const struct ckpt_nt_interval *in)
{
    struct ckpt_box_pair piece[CKPT_MAX_SPANS];
    const uint32_t rank = pair->local.rank;
    size_t n = ckpt_pair_clip(pair, dim, in->lo, in->hi, piece);
    bool right = n <= (rank ? 2 * rank - 1 : 1);

    for (size_t k = 0; k < n; k++)
        right &= moved_alike(&piece[k], pair);
    for (uint64_t i = 0; i < numel; i++) {
        uint64_t rest = i, at[CKPT_MAX_RANK];
        unsigned found = 0;
        for (uint32_t d = rank; d-- > 0; rest /= dim[d])
            at[d] = rest % dim[d];
        for (size_t k = 0; k < n; k++)
            found += inside(&piece[k].local, at);
        right &= found == (i >= in->lo && i < in->hi && inside(&pair->local, at));
    }
    return right;
}

TEST(clip, pieces_equal_brute_force)
{
    uint64_t rng = 1;
    for (int round = 0; round < 3000; round++) {
        uint64_t dim[CKPT_MAX_RANK], numel = 1;
        struct ckpt_box_pair pair = {0};
        pair.local.rank = pair.global.rank = (uint32_t)random_range(&rng, 0, 5);
        for (uint32_t d = 0; d < pair.local.rank; d++) {
            dim[d] = random_range(&rng, 1, 6);
            numel *= dim[d];
            pair.local.lo[d] = random_range(&rng, 0, dim[d]);
            pair.local.n[d] = random_range(&rng, 0, dim[d] - pair.local.lo[d] + 1);
            pair.global.lo[d] = random_range(&rng, 0, 100);
            pair.global.n[d] = pair.local.n[d];
        }
        uint64_t lo = random_range(&rng, 0, numel + 1);
        const struct ckpt_nt_interval some = {lo, random_range(&rng, lo, numel + 1)};
        const struct ckpt_nt_interval all = {0, UINT64_MAX};
        CHECK(clip_is_right(&pair, dim, numel, &some));
        CHECK(clip_is_right(&pair, dim, numel, &all));
    }
}

TEST(clip, all_of_a_pair_is_one_piece)
{
    const uint64_t dim[] = {6, 7, 8};
    const struct ckpt_box_pair pair = {{3, {1, 2, 3}, {4, 4, 4}}, {3, {10, 2, 3}, {4, 4, 4}}};
    const struct ckpt_nt_interval all = {0, UINT64_MAX}, before = {0, 75}, none = {80, 80};
    struct ckpt_box_pair piece[CKPT_MAX_SPANS];
    CHECK_EQ(ckpt_pair_clip(&pair, dim, all.lo, all.hi, piece), 1);
    CHECK(memcmp(piece[0].global.lo, pair.global.lo, 3 * sizeof pair.global.lo[0]) == 0);
    CHECK_EQ(ckpt_pair_clip(&pair, dim, before.lo, before.hi, piece), 0);
    CHECK_EQ(ckpt_pair_clip(&pair, dim, none.lo, none.hi, piece), 0);
}

TESTS(T(share, ranks_follow_each_other_and_the_first_are_longer),
      T(interval, what_the_file_says_goes_before_the_rule), T(clip, pieces_equal_brute_force),
      T(clip, all_of_a_pair_is_one_piece))
