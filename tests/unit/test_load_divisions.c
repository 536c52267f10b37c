/* SPDX-License-Identifier: Apache-2.0 */
/* Which groups of ranks get communicators of their own. */
#include <string.h>

#include "load/plan/divisions.h"
#include "test.h"

enum { RANKS = 24, MOST = 1024 };

static struct ckpt_group_claim claims[MOST];
static size_t nclaim;

/* The ranks first, first + step ... are a group. */
static void group(uint64_t hash, uint64_t bytes, uint32_t first, uint32_t step, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        claims[nclaim++] = (struct ckpt_group_claim){hash, bytes, n, first + i * step};
}

static const struct ckpt_group_place *find(const ckpt_group_places *p, uint64_t hash)
{
    for (size_t i = 0; i < p->len; i++)
        if (p->ptr[i].group == hash)
            return &p->ptr[i];
    return NULL;
}

/* tp=2, dp=12: two replicas of halves, and smaller sets; what all ranks want needs none. */
TEST(divisions, of_a_mesh_are_those_of_its_dimensions)
{
    ckpt_group_places p = {0};
    struct ckpt_err err = {0};

    nclaim = 0;
    group(100, 10, 0, 1, RANKS);
    for (uint32_t t = 0; t < 2; t++)
        group(200 + t, 1000, t, 2, RANKS / 2);
    for (uint32_t d = 0; d < 8; d++)
        group(300 + d, 500, 3 * d, 1, 3);
    for (uint32_t d = 0; d < 12; d++)
        group(400 + d, 100, 2 * d, 1, 2);
    CHECK_OK(ckpt_divisions_choose(claims, nclaim, RANKS, &p, &err));
    CHECK_EQ(p.len, 22);
    CHECK(!find(&p, 100));
    for (uint32_t t = 0; t < 2; t++)
        CHECK(find(&p, 200 + t)->division == 0 && find(&p, 200 + t)->colour == t);
    for (uint32_t d = 0; d < 8; d++)
        CHECK(find(&p, 300 + d)->division == 1 && find(&p, 300 + d)->colour == d);
    CHECK_EQ(find(&p, 400)->division, 2);
    ckpt_vec_release(&p);
}

/* A fifth group of the same ranks gets none, and it is the one with the least bytes. */
TEST(divisions, are_four_at_most)
{
    ckpt_group_places p = {0};
    struct ckpt_err err = {0};

    nclaim = 0;
    for (uint32_t k = 0; k < 5; k++)
        group(10 + k, 100 - 10 * ((k + 2) % 5), 0, 1, 4 + k);
    CHECK_OK(ckpt_divisions_choose(claims, nclaim, RANKS, &p, &err));
    CHECK_EQ(p.len, CKPT_DIVISIONS);
    CHECK(!find(&p, 12));
    ckpt_vec_release(&p);
}

TEST(divisions, have_only_groups_that_all_members_claim)
{
    ckpt_group_places p = {0};
    struct ckpt_err err = {0};

    nclaim = 0;
    group(1, 100, 0, 1, 6);
    group(2, 100, 6, 1, 6);
    nclaim--; /* one rank of group 2 has told of too many others */
    CHECK_OK(ckpt_divisions_choose(claims, nclaim, RANKS, &p, &err));
    CHECK(p.len == 1 && find(&p, 1));
    ckpt_vec_release(&p);
}

TESTS(T(divisions, of_a_mesh_are_those_of_its_dimensions), T(divisions, are_four_at_most),
      T(divisions, have_only_groups_that_all_members_claim))
