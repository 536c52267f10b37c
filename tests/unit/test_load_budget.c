/* SPDX-License-Identifier: Apache-2.0 */
/* How a rank's memory is divided. */
#include "base/ckd.h"
#include "load/load_inner.h"
#include "tensor/region.h"
#include "test.h"

enum { MIB = 1 << 20 };

TEST(budget, what_an_error_names_leaves_the_windows_what_they_need)
{
    for (uint64_t need = 1; need < (uint64_t)1 << 34; need += 1 + need / 7) {
        const struct ckpt_load_options opt = {.host_bytes = ckpt_load_host_bytes(need)};
        const uint64_t aside = ckpt_load_aside(&opt);
        CHECK(aside > 0 && opt.host_bytes >= need + aside);
        CHECK(opt.host_bytes - aside < need + 2); /* and hardly more */
    }
}

TEST(budget, all_threads_together_stay_within_their_part)
{
    for (uint64_t aside = 256 << 10; aside <= 64 * MIB; aside += 100001)
        for (uint32_t threads = 1; threads <= 256; threads++) {
            const bool direct = threads % 3;
            uint32_t n = threads;
            struct ckpt_load_share s;
            ckpt_load_share(aside, direct, threads % 5 == 0, &n, &s);
            CHECK(n >= 1 && n <= threads && s.bound >= 32 << 10 && s.bound <= CKPT_REGION_BOUND);
            CHECK((s.bounce > 0) == direct && s.bounce % CKPT_BOUNCE_ALIGN == 0);
            CHECK(n * (s.bounce + CKPT_REGION_KEPT * s.bound) <= aside);
        }
}

TEST(budget, windows_get_what_the_threads_leave)
{
    const struct ckpt_load_options opt = {.host_bytes = 16 * MIB};
    struct ckpt_plan_sizes sizes;
    struct ckpt_err err = {0};
    uint32_t slots;

    CHECK_OK(ckpt_load_sizes(&opt, 1, 1 << 30, 8, false, 12 * MIB, &sizes, &slots, &err));
    CHECK(slots * sizes.piece <= 4 * MIB);
    CHECK_OK(ckpt_load_sizes(&opt, 4, 1 << 30, 8, false, 12 * MIB, &sizes, &slots, &err));
    const uint64_t readers = (4 + sizes.turns - 1) / sizes.turns;
    CHECK(slots * sizes.piece * (readers + 2) <= 4 * MIB);
    CHECK_FAILS(ckpt_load_sizes(&opt, 4, 1 << 30, 8, false, 16 * MIB, &sizes, &slots, &err),
                CKPT_LIMIT, "host_bytes is 16777216, but 4 ranks");
}

/* However many ranks share what they read, they read pieces that are worth it, and what all of a
 * window's readers send fits. */
TEST(budget, pieces_are_large_whatever_the_number_of_ranks)
{
    static const uint32_t ranks[] = {2, 8, 64, 512, 1024, 4096, 6143, 16384, 1 << 20};
    const struct ckpt_load_options opt = {.host_bytes = 256 * MIB};
    const uint64_t aside = ckpt_load_aside(&opt);

    for (size_t i = 0; i < sizeof ranks / sizeof *ranks; i++) {
        struct ckpt_plan_sizes sizes;
        struct ckpt_err err = {0};
        uint32_t slots;
        CHECK_OK(ckpt_load_sizes(&opt, ranks[i], (uint64_t)811 << 30, 8, false, aside, &sizes,
                                 &slots, &err));
        const uint64_t turns = sizes.turns ? sizes.turns : 1;
        const uint64_t readers = (ranks[i] + turns - 1) / turns;
        CHECK(sizes.piece >= (ranks[i] > 64 ? 4 : 1) * (uint64_t)MIB && sizes.unit <= sizes.piece);
        CHECK(readers >= 2 && slots * sizes.piece * (readers + 2) <= opt.host_bytes - aside);
    }
}

TESTS(T(budget, what_an_error_names_leaves_the_windows_what_they_need),
      T(budget, all_threads_together_stay_within_their_part),
      T(budget, windows_get_what_the_threads_leave),
      T(budget, pieces_are_large_whatever_the_number_of_ranks))
