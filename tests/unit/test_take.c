/* SPDX-License-Identifier: Apache-2.0 */
/* Texts taken apart. */
#include "base/take.h"

#include "test.h"

TEST(take, what_is_taken_is_passed)
{
    const char *s = "shard-0012-of";
    uint64_t n;
    CHECK(ckpt_take_text(&s, "shard-") && ckpt_take_u64(&s, &n));
    CHECK_EQ(n, 12);
    CHECK_STR(s, "-of");
}

TEST(take, what_is_not_there_moves_nothing)
{
    const char *const text = "-1 18446744073709551616";
    const char *s = text;
    uint64_t n = 7;
    CHECK(!ckpt_take_u64(&s, &n) && s == text && n == 7);
    CHECK(!ckpt_take_text(&s, "-2") && s == text);
    s += 3;
    const char *const large = s;
    CHECK(!ckpt_take_u64(&s, &n) && s == large && n == 7);
}

TESTS(T(take, what_is_taken_is_passed), T(take, what_is_not_there_moves_nothing), )
