/* SPDX-License-Identifier: Apache-2.0 */
/* Parts of objects, whose memory is limited. */
#include "io/far/parts.h"

#include <stdlib.h>

#include "random.h"
#include "test.h"

#define MIB (1U << 20)
#define WHOLE ((uint32_t)((uint64_t)CKPT_PARTS_UNITS * CKPT_PARTS_UNIT / 64)) /* 64 of them fit */

static XXH128_hash_t object(uint64_t n) { return (XXH128_hash_t){.low64 = n, .high64 = 1}; }

static struct ckpt_parts *parts_new(void)
{
    struct ckpt_parts *p = calloc(1, sizeof *p);

    assert_non_null(p);
    ckpt_parts_init(p, CKPT_PARTS_UNITS);
    return p;
}

static void parts_free(struct ckpt_parts *p)
{
    ckpt_parts_release(p);
    free(p);
}

/* 64 parts, which take all memory: part i has byte i of object i. */
static void fill(struct ckpt_parts *p, bool soon)
{
    for (uint64_t i = 0; i < 64; i++)
        assert_non_null(ckpt_parts_add(p, object(i), i, WHOLE, soon));
}

static void make_ready(struct ckpt_parts *p, bool read)
{
    for (size_t i = 0; i < CKPT_PARTS; i++)
        if (p->part[i].state == CKPT_PART_FETCHING) {
            p->part[i].state = CKPT_PART_READY;
            p->part[i].unread = !read;
        }
}

static bool is_held(struct ckpt_parts *p, uint64_t i)
{
    return ckpt_parts_find(p, object(i), i, NULL) != NULL;
}

static size_t nheld(struct ckpt_parts *p)
{
    size_t n = 0;

    for (uint64_t i = 0; i < 64; i++)
        n += is_held(p, i);
    return n;
}

TEST(parts, what_is_fetched_or_read_has_its_place)
{
    struct ckpt_parts *p = parts_new();

    fill(p, false);
    CHECK(!ckpt_parts_add(p, object(100), 0, 1, false));
    make_ready(p, true);
    for (uint64_t i = 0; i < 64; i++)
        ckpt_parts_find(p, object(i), i, NULL)->pins = 1;
    CHECK(!ckpt_parts_add(p, object(100), 0, 1, false) && nheld(p) == 64);
    ckpt_parts_find(p, object(7), 7, NULL)->pins = 0;
    CHECK(ckpt_parts_add(p, object(100), 0, 1, false) && nheld(p) == 63 && !is_held(p, 7));
    parts_free(p);
}

TEST(parts, what_was_read_to_its_end_goes_first_and_then_the_oldest)
{
    struct ckpt_parts *p = parts_new();

    fill(p, false);
    make_ready(p, true);
    ckpt_parts_find(p, object(50), 50, NULL)->tick = 0;
    CHECK(ckpt_parts_add(p, object(100), 0, WHOLE, false) && !is_held(p, 50) && nheld(p) == 63);
    ckpt_parts_find(p, object(0), 0, NULL)->tick = ++p->tick;
    CHECK(ckpt_parts_add(p, object(101), 0, WHOLE, false) && !is_held(p, 1) && nheld(p) == 62);
    parts_free(p);
}

TEST(parts, what_is_ahead_does_not_take_the_place_of_what_is_being_read)
{
    struct ckpt_parts *p = parts_new();

    fill(p, false);
    make_ready(p, true);
    CHECK(!ckpt_parts_add(p, object(100), 0, 1, true) && nheld(p) == 64);
    p->tick += 1000;
    CHECK(ckpt_parts_add(p, object(100), 0, 1, true) && nheld(p) == 63 && !is_held(p, 0));
    parts_free(p);
}

TEST(parts, what_is_needed_now_takes_the_place_of_what_was_asked_for_last)
{
    for (int soon = 0; soon < 2; soon++) {
        struct ckpt_parts *p = parts_new();
        fill(p, soon);
        make_ready(p, false);
        CHECK(!ckpt_parts_add(p, object(100), 0, 1, true) && nheld(p) == 64);
        ckpt_parts_find(p, object(40), 40, NULL)->unread = false;
        CHECK(ckpt_parts_add(p, object(100), 0, WHOLE, false) && nheld(p) == 63 && !is_held(p, 40));
        CHECK(ckpt_parts_add(p, object(101), 0, 1, false) && nheld(p) == 62 && !is_held(p, 63));
        parts_free(p);
    }
}

TEST(parts, what_is_ahead_goes_over_what_was_read_before_it_takes_new_memory)
{
    struct ckpt_parts *p = parts_new();

    for (uint64_t i = 0; i < 4; i++)
        CHECK(ckpt_parts_add(p, object(i), i, WHOLE, true));
    make_ready(p, true);
    ckpt_parts_find(p, object(2), 2, NULL)->tick = 0;
    const uint32_t used = p->used;
    CHECK(ckpt_parts_add(p, object(10), 10, WHOLE, true) && !is_held(p, 2) && p->used == used);
    CHECK(ckpt_parts_add(p, object(11), 11, WHOLE, true) && p->used > used);
    ckpt_parts_find(p, object(3), 3, NULL)->tick = 0;
    CHECK(ckpt_parts_add(p, object(12), 12, WHOLE, false) && is_held(p, 3)); /* may be read again */
    parts_free(p);
}

TEST(parts, a_gap_ends_where_the_next_part_begins)
{
    struct ckpt_parts *p = parts_new();
    uint64_t end = 5 * MIB;

    CHECK(ckpt_parts_add(p, object(1), 2 * MIB, MIB, false));
    CHECK(ckpt_parts_add(p, object(2), MIB, MIB, false));
    CHECK(ckpt_parts_add(p, object(1 + CKPT_PARTS_CHAINS), MIB, MIB, false)); /* of one chain */
    CHECK(!ckpt_parts_find(p, object(1), MIB, &end) && end == 2 * MIB);
    end = MIB + 1;
    CHECK(!ckpt_parts_find(p, object(1), MIB, &end) && end == MIB + 1);
    CHECK(ckpt_parts_find(p, object(1), 3 * MIB - 1, &end) && end == MIB + 1);
    CHECK(!ckpt_parts_find(p, object(1), 3 * MIB, NULL));
    parts_free(p);
}

/* Parts that are there never lie in one place, and what is free is free once. */
static void check_places(struct ckpt_parts *p)
{
    bool taken[CKPT_PARTS_UNITS] = {false};
    size_t nfree = 0, nused = 0;

    for (size_t i = 0; i < CKPT_PARTS; i++) {
        const struct ckpt_part *s = &p->part[i];
        nused += s->state != CKPT_PART_FREE;
        for (uint32_t u = s->unit; s->state != CKPT_PART_FREE && u < s->unit + s->nunit; u++) {
            assert_false(taken[u]);
            taken[u] = true;
        }
    }
    assert_memory_equal(taken, p->taken, sizeof taken);
    for (const struct ckpt_part *s = p->free; s; s = s->next)
        nfree++;
    assert_int_equal(nfree + nused, CKPT_PARTS);
}

TEST(parts, no_byte_is_in_two_parts)
{
    struct ckpt_parts *p = parts_new();
    uint64_t rng = 1;
    UNUSED_STATE;

    for (int i = 0; i < 20000; i++) {
        struct ckpt_part *s = &p->part[random_range(&rng, 0, CKPT_PARTS)];
        const uint32_t len = (uint32_t)random_range(&rng, 1, i % 8 ? 4 * CKPT_PARTS_UNIT : 8 * MIB);
        const bool soon = random_range(&rng, 0, 2);
        (void)ckpt_parts_add(p, object(random_range(&rng, 0, 40)), random_next(&rng), len, soon);
        if (s->state == CKPT_PART_FETCHING)
            s->state = CKPT_PART_READY;
        else if (s->state == CKPT_PART_READY && random_range(&rng, 0, 4) == 0)
            s->tick = random_range(&rng, 0, 2) ? 0 : ++p->tick;
        else if (s->state == CKPT_PART_READY && random_range(&rng, 0, 4) == 0)
            ckpt_parts_free(p, s);
        if (i % 500 == 0)
            check_places(p);
    }
    parts_free(p);
}

TESTS(T(parts, what_is_fetched_or_read_has_its_place),
      T(parts, what_was_read_to_its_end_goes_first_and_then_the_oldest),
      T(parts, what_is_ahead_does_not_take_the_place_of_what_is_being_read),
      T(parts, what_is_needed_now_takes_the_place_of_what_was_asked_for_last),
      T(parts, what_is_ahead_goes_over_what_was_read_before_it_takes_new_memory),
      T(parts, a_gap_ends_where_the_next_part_begins), T(parts, no_byte_is_in_two_parts), )
