/* SPDX-License-Identifier: Apache-2.0 */
/* How a rank's memory is divided. */
#include "base/ckd.h"
#include "load/plan/policy.h"
#include "tensor/strided.h"
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
            struct ckpt_thread_buffers s;
            ckpt_thread_buffers_divide(aside, direct, threads % 5 == 0, &n, &s);
            CHECK(n >= 1 && n <= threads && s.bound >= 32 << 10 && s.bound <= CKPT_STRIDED_BOUND);
            CHECK((s.bounce > 0) == direct && s.bounce % CKPT_BOUNCE_ALIGN == 0);
            CHECK(n * (s.bounce + CKPT_STRIDED_KEPT * s.bound) <= aside);
        }
}

static int sizes(const struct ckpt_load_options *opt, bool shared, uint32_t threads, uint64_t aside,
                 struct ckpt_slots *ret, struct ckpt_err *err)
{
    const struct ckpt_size_input in = {
        .opt = opt, .aside = aside, .threads = threads, .shared = shared};

    return ckpt_load_sizes(&in, ret, err);
}

TEST(budget, windows_get_what_the_threads_leave)
{
    const struct ckpt_load_options opt = {.host_bytes = 16 * MIB};
    struct ckpt_slots s;
    struct ckpt_err err = {0};

    CHECK_OK(sizes(&opt, false, 8, 12 * MIB, &s, &err));
    CHECK(s.ahead * s.sizes.chunk <= 4 * MIB);
    CHECK_OK(sizes(&opt, true, 8, 12 * MIB, &s, &err));
    CHECK(s.ahead * s.sizes.chunk + s.windows * s.sizes.window <= 4 * MIB);
    CHECK_FAILS(sizes(&opt, true, 8, 16 * MIB, &s, &err), CKPT_LIMIT,
                "host_bytes is 16777216, but ranks that share what they read need at least");
}

/* Ranks that share what they read take chunks that are worth a read, several readers a window. */
TEST(budget, chunks_are_large)
{
    for (uint64_t host = 64; host <= 1024; host *= 2) {
        const struct ckpt_load_options opt = {.host_bytes = host * MIB};
        const uint64_t aside = ckpt_load_aside(&opt);
        struct ckpt_slots s;
        struct ckpt_err err = {0};
        CHECK_OK(sizes(&opt, true, 8, aside, &s, &err));
        CHECK(s.sizes.chunk >= MIB && s.sizes.unit <= s.sizes.chunk);
        CHECK(s.sizes.window / s.sizes.chunk >= 8 && s.ahead >= 4 && s.windows == 3);
        CHECK(s.ahead * s.sizes.chunk + s.windows * s.sizes.window <= opt.host_bytes - aside);
    }
}

/* Whatever the threads and processors of a rank, it cuts as the others do. */
TEST(budget, sizes_are_the_same_on_ranks_that_differ)
{
    const struct ckpt_load_options opt = {.host_bytes = 32 * MIB};
    struct ckpt_slots a, b;
    struct ckpt_err err = {0};

    CHECK_OK(sizes(&opt, true, 1, 8 * MIB, &a, &err));
    CHECK_OK(sizes(&opt, true, 16, 8 * MIB, &b, &err));
    CHECK(a.sizes.unit == b.sizes.unit && a.sizes.slice == b.sizes.slice);
    CHECK(a.sizes.window == b.sizes.window);
}

TESTS(T(budget, what_an_error_names_leaves_the_windows_what_they_need),
      T(budget, all_threads_together_stay_within_their_part),
      T(budget, windows_get_what_the_threads_leave), T(budget, chunks_are_large),
      T(budget, sizes_are_the_same_on_ranks_that_differ))
