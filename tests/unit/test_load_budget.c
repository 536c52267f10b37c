/* SPDX-License-Identifier: Apache-2.0 */
/* How a rank's memory is divided. */
#include "base/ckd.h"
#include "load/load_inner.h"
#include "test.h"

enum { MIB = 1 << 20 };

TEST(budget, what_an_error_names_leaves_the_windows_what_they_need)
{
    for (uint64_t need = 1; need < (uint64_t)1 << 34; need += 1 + need / 7) {
        const struct ckpt_load_options opt = {.host_bytes = ckpt_load_host_bytes(need, true),
                                              .direct = CKPT_LOAD_DIRECT_ALWAYS};
        const uint64_t bounces = ckpt_load_bounces(&opt, 1);
        CHECK(bounces > 0 && opt.host_bytes >= need + bounces);
        CHECK(opt.host_bytes - bounces < need + 2); /* and hardly more */
        CHECK_EQ(ckpt_load_host_bytes(need, false), need);
    }
}

TEST(budget, bounce_buffers_are_only_where_reads_may_need_them)
{
    struct ckpt_load_options opt = {.host_bytes = 256 * MIB};

    CHECK(ckpt_load_bounces(&opt, 0) > 0);
    CHECK_EQ(ckpt_load_bounces(&opt, 1), 0);
    opt.direct = CKPT_LOAD_DIRECT_NEVER;
    CHECK_EQ(ckpt_load_bounces(&opt, 0), 0);
    opt.io = CKPT_LOAD_IO_URING;
    CHECK(ckpt_load_bounces(&opt, 1) > 0);
}

TEST(budget, all_bounce_buffers_together_stay_within_their_part)
{
    for (uint64_t bounces = 128 << 10; bounces <= 32 * MIB; bounces += 100001)
        for (uint32_t threads = 1; threads <= 256; threads++) {
            uint32_t n = threads;
            const uint64_t each = ckpt_load_bounce(bounces, threads % 2, &n);
            CHECK(n >= 1 && n <= threads && each > 0 && each % CKPT_BOUNCE_ALIGN == 0);
            CHECK(n * each <= bounces);
        }
}

TEST(budget, windows_get_what_bounce_buffers_leave)
{
    const struct ckpt_load_options opt = {.host_bytes = 16 * MIB};
    struct ckpt_plan_sizes sizes;
    struct ckpt_err err = {0};
    uint32_t slots;

    CHECK_OK(ckpt_load_sizes(&opt, 1, 1 << 30, 8, false, 12 * MIB, &sizes, &slots, &err));
    CHECK(slots * sizes.piece <= 4 * MIB);
    CHECK_OK(ckpt_load_sizes(&opt, 4, 1 << 30, 8, false, 12 * MIB, &sizes, &slots, &err));
    CHECK(slots * sizes.piece * 6 <= 4 * MIB);
    CHECK_FAILS(ckpt_load_sizes(&opt, 4, 1 << 30, 8, false, 16 * MIB, &sizes, &slots, &err),
                CKPT_LIMIT, "host_bytes is 16777216, but 4 ranks");
}

TESTS(T(budget, what_an_error_names_leaves_the_windows_what_they_need),
      T(budget, bounce_buffers_are_only_where_reads_may_need_them),
      T(budget, all_bounce_buffers_together_stay_within_their_part),
      T(budget, windows_get_what_bounce_buffers_leave))
