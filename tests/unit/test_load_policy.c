/* SPDX-License-Identifier: Apache-2.0 */
/* What a load decides to do, from sizes and rates. */
#include "load/plan/policy.h"
#include "test.h"

enum { MIB = 1 << 20 };

/* 64 ranks on 8 nodes that all want the same 100 GB, with the values that loads have by default. */
static struct ckpt_policy_input replicas(const struct ckpt_load_options *opt, double hot)
{
    const uint64_t model = 100000000000;

    return (struct ckpt_policy_input){
        .opt = opt,
        .cost = {64, 8, model, 64 * model, 8 * model, model, 8 * model, hot, false, false},
        .local = 8,
        .cpus = 64};
}

static struct ckpt_load_options defaults(enum ckpt_readers readers)
{
    return (struct ckpt_load_options){.readers = readers, .host_bytes = 256 * MIB};
}

TEST(policy, cold_files_that_all_want_are_read_once_and_past_the_page_cache)
{
    const struct ckpt_load_options opt = defaults(CKPT_READERS_ONCE);
    const struct ckpt_policy_input in = replicas(&opt, 0);
    struct ckpt_policy p;
    struct ckpt_err err = {0};

    CHECK_OK(ckpt_policy_choose(&in, &p, &err));
    CHECK(p.readers == CKPT_READERS_ONCE && p.direct == CKPT_DIRECT_COLD);
    CHECK(p.threads == 8 && p.slots.windows == 3 && p.buffers.bounce > 0);
    CHECK(p.slots.sizes.chunk >= MIB && p.rates.network == 3e9);
}

TEST(policy, hot_files_of_one_node_are_read_by_each)
{
    const struct ckpt_load_options opt = defaults(CKPT_READERS_AUTO);
    struct ckpt_policy_input in = replicas(&opt, 1);
    struct ckpt_policy p;
    struct ckpt_err err = {0};

    in.cost.nrank = 8;
    in.cost.nnode = 1;
    in.cost.needed = in.cost.node_needed = in.cost.unique; /* slices */
    in.cost.sum_node_unique = in.cost.unique;
    CHECK_OK(ckpt_policy_choose(&in, &p, &err));
    CHECK(p.readers == CKPT_READERS_EACH && p.direct == CKPT_DIRECT_NONE);
    in.cost.cached = 0; /* which files several ranks read, the plan says */
    CHECK_OK(ckpt_policy_sizes(&in, CKPT_READERS_EACH, &p, &err));
    CHECK(p.direct == CKPT_DIRECT_COLD);
    in.cost.cached = 1;
    CHECK_OK(ckpt_policy_choose(&in, &p, &err));
    CHECK(p.buffers.bounce == 0 && p.slots.ahead > 1);
}

/* Memory for one reader's windows, not for what ranks share: AUTO goes on with less. */
TEST(policy, auto_shares_less_where_sharing_has_no_room)
{
    struct ckpt_load_options opt = defaults(CKPT_READERS_ONCE);
    struct ckpt_policy_input in = replicas(&opt, 0);
    struct ckpt_policy p;
    struct ckpt_err err = {0};

    opt.rates.node_storage = 1e6; /* once is fastest by far */
    opt.host_bytes = ckpt_load_host_bytes(2 * CKPT_LOAD_CHUNK_LEAST);
    CHECK_FAILS(ckpt_policy_choose(&in, &p, &err), CKPT_LIMIT, "host_bytes is ");
    opt.readers = CKPT_READERS_AUTO;
    CHECK_OK(ckpt_policy_choose(&in, &p, &err));
    CHECK_EQ(p.readers, CKPT_READERS_EACH);
    opt.host_bytes = 1;
    CHECK_FAILS(ckpt_policy_choose(&in, &p, &err), CKPT_LIMIT, "host_bytes is 1, but ranks that ");
}

TESTS(T(policy, cold_files_that_all_want_are_read_once_and_past_the_page_cache),
      T(policy, hot_files_of_one_node_are_read_by_each),
      T(policy, auto_shares_less_where_sharing_has_no_room))
