/* SPDX-License-Identifier: Apache-2.0 */
/* One save or two: what times and identities say. Seconds, not files. */
#include "test.h"

#include <string.h>

#include "random.h"
#include "run/save.h"
#include "run/save_times.h"

#define S INT64_C(1000000000)

enum { MOST = 64 };

struct story {
    struct ckpt_written w[MOST];
    size_t n;
};

/* A shard that was last written at `end`, created at `begin` (0: nobody knows). */
static void shard(struct story *s, double begin, double end, uint64_t size)
{
    s->w[s->n++] = (struct ckpt_written){(int64_t)(begin * S), (int64_t)(end * S), size, NULL};
}

static enum ckpt_save_times say(struct story *s, double marker)
{
    const int64_t ns = (int64_t)(marker * S);

    return ckpt_save_times(s->w, s->n, marker >= 0 ? &ns : NULL);
}

static bool two(struct story *s, double marker) { return say(s, marker) == CKPT_TIMES_TWO; }

#define NO_MARKER (-1.0)

TEST(times, a_save_ends_with_its_marker)
{
    struct story s = {.n = 0};
    shard(&s, 0, 1000, 9);
    shard(&s, 0, 1400, 9); /* a rank that was late */
    CHECK(!two(&s, 1401));
    CHECK(!two(&s, 9000)); /* a copy, the marker last */
    struct story none = {.n = 0};
    CHECK(!two(&none, 5));
    CHECK(!two(&none, NO_MARKER));
}

TEST(times, shards_an_hour_after_the_marker_are_of_another_save)
{
    struct story s = {.n = 0};
    shard(&s, 0, 1000, 9);
    shard(&s, 0, 1003, 9);
    shard(&s, 0, 4600, 9);
    shard(&s, 0, 4601, 9);
    CHECK(two(&s, 1004));
    CHECK_EQ(s.w[0].end_ns, 1000 * S); /* sorted, for the message */
    CHECK_EQ(s.w[3].end_ns, 4601 * S);
    CHECK(
        !two(&s, 4602)); /* that save has ended: half of its shards took an hour, or were copied */
}

TEST(times, a_second_save_that_writes_over_or_beside_the_first_is_another_save)
{
    struct story over = {.n = 0}, renamed = {.n = 0};
    shard(&over, 990, 1000, 1 << 30);
    shard(&over, 990, 4600, 1 << 30); /* created by the first save */
    CHECK(two(&over, 1004));
    shard(&renamed, 990, 1000, 1 << 30);
    shard(&renamed, 4599, 4600, 1 << 30);
    CHECK(two(&renamed, 1004));
}

TEST(times, a_marker_long_before_all_shards_is_that_of_another_save)
{
    struct story s = {.n = 0}, copy = {.n = 0}, slow = {.n = 0};
    shard(&s, 990, 4600, 9);
    shard(&s, 990, 4601, 9);
    CHECK_EQ(say(&s, 980), CKPT_TIMES_PAUSE); /* an error while it is young */
    CHECK_EQ(say(&s, 4570), CKPT_TIMES_ONE);
    shard(&copy, 1000, 1400, UINT64_C(40) << 30);
    shard(&copy, 1400, 1400.01, 9);
    CHECK_EQ(say(&copy, 1000), CKPT_TIMES_ONE);
    for (int i = 1; i <= 8; i++)
        shard(&slow, 0, 1000 + 300 * i, 9); /* nobody knows when they were created */
    CHECK_EQ(say(&slow, 1000), CKPT_TIMES_ONE);
}

TEST(times, a_minute_of_silence_or_four_times_the_last_is_slack)
{
    struct story s = {.n = 0};
    shard(&s, 0, 1000, 9);
    shard(&s, 0, 1059, 9);
    CHECK(!two(&s, 1000));
    shard(&s, 0, 1059 + 4 * 59, 9);
    CHECK(!two(&s, 1000));
    shard(&s, 0, 1059 + 4 * 59 + 17 * 59, 9);
    CHECK(two(&s, 1000));
}

TEST(times, a_large_file_of_a_copy_takes_its_time)
{
    struct story s = {.n = 0};
    shard(&s, 990, 1000, 100);
    shard(&s, 1000.01, 1400, UINT64_C(40) << 30);
    CHECK(!two(&s, 1000));
    s.w[1].size = 100; /* not 400 s */
    CHECK(two(&s, 1000));
    s.w[1].size = UINT64_C(40) << 30;
    s.w[1].begin_ns = 0;
    CHECK(two(&s, 1000));
}

TEST(times, without_a_marker_a_pause_proves_nothing)
{
    struct story s = {.n = 0};
    shard(&s, 0, 1000, 9);
    shard(&s, 0, 1002, 9);
    CHECK_EQ(say(&s, NO_MARKER), CKPT_TIMES_ONE);
    shard(&s, 0, 4600, 9);
    CHECK_EQ(say(&s, NO_MARKER), CKPT_TIMES_PAUSE);
    struct story copy = {.n = 0};
    shard(&copy, 1000, 1100, UINT64_C(20) << 30);
    shard(&copy, 1100, 1200, UINT64_C(20) << 30);
    CHECK_EQ(say(&copy, NO_MARKER), CKPT_TIMES_ONE);
}

/* cp -r, git clone, a download: one file after the other in any order, each for as long as it
 * takes, the marker somewhere among them. */
TEST(times, copies_in_any_order_and_at_any_pace_are_one_save)
{
    uint64_t r = 1;
    for (int round = 0; round < 2000; round++) {
        struct story s = {.n = 0};
        const double rate = 2e6 + (double)random_range(&r, 0, 500) * 1e6;
        const size_t n = random_range(&r, 1, 41);
        const size_t at = random_range(&r, 0, n + 1);
        double now = 1000, marker = 1000;
        for (size_t i = 0; i <= n; i++) {
            const uint64_t size = UINT64_C(1) << random_range(&r, 0, 36);
            const double end = now + (double)size / rate;
            if (i == at)
                marker = now;
            else
                shard(&s, now, end, size);
            now = i == at ? now : end;
        }
        CHECK_EQ(say(&s, marker), CKPT_TIMES_ONE);
    }
}

TEST(judge, some_equal_and_some_other_is_the_middle_of_a_save)
{
    static const struct {
        struct ckpt_save_counts counts;
        enum ckpt_save_state state;
    } cases[] = {
        {{4, 0, 0, false}, CKPT_SAVE_SAME},  {{4, 0, 0, true}, CKPT_SAVE_SAME},
        {{0, 4, 0, false}, CKPT_SAVE_OLD},   {{0, 2, 2, false}, CKPT_SAVE_OLD},
        {{0, 0, 4, true}, CKPT_SAVE_SAME}, /* removed: open descriptors go on */
        {{2, 0, 2, false}, CKPT_SAVE_SAME},  {{1, 3, 0, false}, CKPT_SAVE_MIXED},
        {{3, 1, 0, false}, CKPT_SAVE_MIXED}, {{1, 1, 2, true}, CKPT_SAVE_MIXED},
        {{0, 4, 0, true}, CKPT_SAVE_MIXED}, /* of which save had it been? */
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        CHECK_EQ(ckpt_save_state_of(&cases[i].counts), cases[i].state);
}

TESTS(T(times, a_save_ends_with_its_marker),
      T(times, shards_an_hour_after_the_marker_are_of_another_save),
      T(times, a_second_save_that_writes_over_or_beside_the_first_is_another_save),
      T(times, a_marker_long_before_all_shards_is_that_of_another_save),
      T(times, a_minute_of_silence_or_four_times_the_last_is_slack),
      T(times, a_large_file_of_a_copy_takes_its_time),
      T(times, without_a_marker_a_pause_proves_nothing),
      T(times, copies_in_any_order_and_at_any_pace_are_one_save),
      T(judge, some_equal_and_some_other_is_the_middle_of_a_save))
