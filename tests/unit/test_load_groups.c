/* SPDX-License-Identifier: Apache-2.0 */
/* Jobs of many ranks: who wants the same, and what a rank of them plans. */
#include <sys/resource.h>
#include <xxhash.h>

#include "base/ckd.h"
#include "load/engine/measure.h"
#include "load/plan/policy.h"
#include "load/plan/weigh.h"
#include "load_made_up.h"

/* ---- replica groups ---- */

/* What the ranks with this number want, each byte once. */
static uint64_t unique_bytes(const struct ckpt_job_wants *r, const uint32_t *number, uint32_t of)
{
    uint32_t rank[16], n = 0;

    for (uint32_t k = 0; k < r->nrank; k++)
        if (number[k] == of)
            rank[n++] = k;
    return wanted_bytes(r, rank, n);
}

/* Weigh a job as its ranks do, each its own groups (alone), or as one who weighs all. */
static void weigh_job(const struct ckpt_job_wants *r, const struct ckpt_load_places *at, bool alone,
                      struct ckpt_cost_input *in)
{
    const struct ckpt_plan_sizes sizes = {.slice = 4096, .window = 32768};
    struct ckpt_weight *all = calloc(r->nrank, sizeof *all), *own = calloc(r->nrank, sizeof *own);
    struct ckpt_weighing w = {.job_wants = r, .at = at, .sizes = &sizes, .weight = all};
    struct ckpt_err err = {0};

    for (uint32_t k = 0; k < r->nrank; k++) {
        if (ckpt_load_weigh(&w, k, &err) < 0)
            fail_msg("%s", err.text);
        if (alone) {
            own[k] = all[k];
            memset(all, 0, r->nrank * sizeof *all);
            ckpt_weighing_release(&w);
        }
    }
    ckpt_weighing_release(&w);
    if (ckpt_load_add_weights(alone ? own : all, r->nrank, at, in, &err) < 0)
        fail_msg("%s", err.text);
    free(all);
    free(own);
}

/* What a rank wants of files, and what of that others of its node want too: counted once more. */
static void check_use(const struct ckpt_job_wants *r, const struct ckpt_load_places *at,
                      uint32_t rank)
{
    const struct ckpt_plan_sizes sizes = {.slice = 4096, .window = 32768};
    struct ckpt_weight *weight = calloc(r->nrank, sizeof *weight);
    struct ckpt_file_use *use = calloc(r->cat->sources.len, sizeof *use), all = {0};
    struct ckpt_weighing w = {r, at, &sizes, .weight = weight, .use = use};
    struct ckpt_err err = {0};
    uint32_t other[16], n = 0;

    assert_int_equal(ckpt_load_weigh(&w, rank, &err), 0);
    ckpt_weighing_release(&w);
    for (size_t i = 0; i < r->cat->sources.len; i++) {
        all.wanted += use[i].wanted;
        all.again += use[i].again;
    }
    for (uint32_t k = 0; k < r->nrank; k++)
        if (k != rank && at->node[k] == at->node[rank])
            other[n++] = k;
    other[n] = rank;
    const uint64_t own = wanted_bytes(r, &rank, 1);
    if (!ckpt_class_is_alone(r, r->class_of[rank])) {
        assert_int_equal(all.wanted, own);
        assert_int_equal(all.again,
                         own + wanted_bytes(r, other, n) - wanted_bytes(r, other, n + 1));
    }
    free(use);
    free(weight);
}

/* Bytes of a job, of its nodes, groups that share, and ranks: as counted rank by rank, node by
 * node. */
static void check_weights(const struct ckpt_job_wants *r, uint64_t *rng)
{
    const uint32_t nnode = (uint32_t)random_range(rng, 1, r->nrank + 1);
    const uint32_t nshare = (uint32_t)random_range(rng, 1, r->nrank + 1);
    uint32_t node[16], share[16], cell[16];
    uint64_t needed = 0, sum = 0, most = 0, own, stored;
    struct ckpt_cost_input in = {0};
    struct ckpt_err err = {0};

    for (uint32_t k = 0; k < r->nrank; k++) {
        const struct ckpt_wants *w = &r->table[r->class_of[k]];
        const uint64_t before = needed;
        node[k] = k < nnode ? k : (uint32_t)random_range(rng, 0, nnode);
        for (size_t e = 0; e < w->entries.len; e++) {
            const struct ckpt_want *want = &w->entries.ptr[e];
            struct ckpt_box box;
            if (ckpt_wants_box(w, want, &r->cat->tensors.ptr[want->tensor], k, &box))
                needed += ckpt_box_numel(&box) * 2;
        }
        if (ckpt_load_needed(r, k, &own, &stored, &err) < 0)
            fail_msg("%s", err.text);
        assert_int_equal(own, needed - before);
        assert_int_equal(stored, own);
    }
    for (uint32_t m = 0; m < nnode; m++) {
        const uint64_t unique = unique_bytes(r, node, m);
        sum += unique;
        most = unique > most ? unique : most;
    }
    uint64_t shared = 0, cells = 0;
    for (uint32_t k = 0; k < r->nrank; k++) {
        share[k] = k < nshare ? k : (uint32_t)random_range(rng, 0, nshare);
        cell[k] = node[k] * nshare + share[k];
    }
    for (uint32_t s = 0; s < nshare; s++)
        shared += unique_bytes(r, share, s);
    for (uint32_t c = 0; c < nnode * nshare; c++)
        cells += unique_bytes(r, cell, c);
    const struct ckpt_load_places at = {node, share, nnode, nshare};
    check_use(r, &at, (uint32_t)random_range(rng, 0, r->nrank));
    for (int alone = 0; alone < 2; alone++) {
        const uint64_t mean = cells / nnode;
        in = (struct ckpt_cost_input){0};
        weigh_job(r, &at, alone, &in);
        assert_int_equal(in.needed, needed);
        assert_int_equal(in.sum_node_unique, sum);
        assert_int_equal(in.node_unique, most);
        assert_int_equal(in.shared_unique, nshare > 1 ? shared : 0);
        assert_int_equal(in.node_shared_unique, nshare == 1 ? 0 : mean > most ? mean : most);
    }
}

TEST(replicas, are_the_ranks_that_want_the_same)
{
    uint64_t rng = 4711;

    for (int round = 0; round < 100; round++) {
        struct ckpt_err err = {0};
        struct ckpt_catalog *cat = small_checkpoint(&rng);
        struct ckpt_job_wants job_wants;
        struct ckpt_replicas groups;
        uint32_t nrank = (uint32_t)random_range(&rng, 1, 17);
        random_job_wants(&job_wants, cat, nrank, &rng);
        CHECK_OK(ckpt_replicas_find(&job_wants, &groups, &err));
        for (uint32_t r = 0; r < nrank; r++) {
            const uint32_t first = groups.rank[groups.of[r]];
            CHECK(groups.of[r] < groups.n && groups.of[first] == groups.of[r]);
            CHECK(first <= r && job_wants.class_of[first] == job_wants.class_of[r]);
            for (uint32_t t = 0; t < cat->tensors.len; t++) {
                const struct ckpt_wants *w = &job_wants.table[job_wants.class_of[r]];
                struct ckpt_box a = {0}, b = {0};
                for (size_t e = 0; e < w->entries.len; e++) {
                    const struct ckpt_want *want = &w->entries.ptr[e];
                    const bool any =
                        ckpt_wants_box(w, want, &cat->tensors.ptr[want->tensor], r, &a);
                    CHECK(any ==
                          ckpt_wants_box(w, want, &cat->tensors.ptr[want->tensor], first, &b));
                    CHECK(!any || (memcmp(a.lo, b.lo, a.rank * sizeof *a.lo) == 0 &&
                                   memcmp(a.n, b.n, a.rank * sizeof *a.n) == 0));
                }
            }
        }
        check_weights(&job_wants, &rng);
        free(groups.of);
        free(groups.rank);
        ckpt_job_wants_release(&job_wants);
        ckpt_catalog_free(cat);
    }
}

/* ---- large jobs ---- */

enum { TENSORS = 100000 };

/* 100,000 tensors (700 GB), tp 8 by dp: every rank wants an eighth of all but the norms. */
static void large_job(struct ckpt_job_wants *job_wants, uint32_t nrank, uint64_t *ret_bytes)
{
    struct ckpt_err err = {0};
    struct ckpt_catalog *cat;
    struct ckpt_wants *table = calloc(1, sizeof *table);
    uint32_t *class_of = calloc(nrank, sizeof *class_of);

    *ret_bytes = 0;
    if (ckpt_catalog_new(&cat, &err) < 0)
        fail_msg("%s", err.text);
    add_source(cat, false);
    for (uint32_t t = 0; t < TENSORS; t++) {
        const uint64_t norm[1] = {4096}, expert[2] = {2048, 2048};
        add_tensor(cat, 0, ret_bytes, t % 5 ? 2 : 1, t % 5 ? expert : norm);
    }
    const uint32_t g = all_ranks(table, nrank / 8, 8);
    for (uint32_t t = 0; t < TENSORS; t++) {
        struct ckpt_spec spec = {g, 1, {{t % 2, 1}}};
        uint32_t s = t % 5 ? ckpt_wants_spec(table, &spec, &err) : CKPT_NONE;
        if (ckpt_wants_add(table, cat, t, s, NULL, &err) < 0)
            fail_msg("%s", err.text);
    }
    if (ckpt_job_wants_init(job_wants, cat, nrank, class_of, table, 1, &err) < 0)
        fail_msg("%s", err.text);
}

/* Members of a group read equal parts. */
static void check_balance(const struct ckpt_plan *p, uint32_t group)
{
    const struct ckpt_stream *s = &p->stream[group];
    const uint32_t n = p->groups.ptr[group].n;
    const uint64_t span = (uint64_t)s->slice * s->nwindow;

    assert_true(span * n < s->len + (uint64_t)n * CKPT_UNIT_ALIGN * (s->nwindow + 1));
}

/* What one rank of a large job plans, with the sizes that a load has there. */
static void plan_as_loads_do(uint32_t nrank)
{
    const struct ckpt_load_options opt = {.readers = CKPT_READERS_ONCE, .host_bytes = 256 << 20};
    uint32_t *node = malloc(nrank * sizeof *node);
    struct ckpt_policy_input in = {.opt = &opt, .local = 8, .cpus = 64};
    struct ckpt_policy policy;
    struct ckpt_engine_sizes sizes;
    const struct ckpt_engine_mode mode = {0};
    struct ckpt_job_wants job_wants;
    struct ckpt_err err = {0};
    struct ckpt_plan *p;
    uint64_t all, own = 0;

    large_job(&job_wants, nrank, &all);
    for (uint32_t r = 0; r < nrank; r++)
        node[r] = r / 8;
    in.cost = (struct ckpt_cost_input){nrank, nrank / 8, all, all * nrank / 8, 8 * all, all, all};
    if (ckpt_policy_choose(&in, &policy, &err) < 0)
        fail_msg("%s", err.text);
    const struct ckpt_sharing sharing = {policy.readers, node};
    if (ckpt_plan_new(&job_wants, 17, &sharing, true, &policy.slots.sizes, &p, &err) < 0)
        fail_msg("%s", err.text);
    assert_int_equal(p->groups.len, 2); /* norms; the ranks of one part */
    for (uint32_t g = 0; g < 2; g++)
        check_balance(p, g);
    for (size_t i = 0; i < p->chunks.len; i++)
        own += p->chunks.ptr[i].len;
    assert_true(own <= 2 * all / nrank + (8 << 20));
    assert_true(ckpt_plan_memory(p) < 64 << 20);
    if (ckpt_engine_measure(p, &mode, &sizes, &err) < 0)
        fail_msg("%s", err.text);
    assert_true(policy.slots.ahead * sizes.read + policy.slots.windows * sizes.window_host +
                    ckpt_load_aside(&opt) <=
                opt.host_bytes);
    ckpt_plan_free(p);
    struct ckpt_catalog *cat = (struct ckpt_catalog *)(uintptr_t)job_wants.cat;
    ckpt_job_wants_release(&job_wants);
    ckpt_catalog_free(cat);
    free(node);
}

/* As FSDP has them where nobody says so by a mesh: 16,384 ranks, each with a box of its own of
 * every tensor, in any order; and one that wants all. */
TEST(plan, boxes_given_one_by_one_are_sorted)
{
    enum { RANKS = 16384, BOXED = 40 };
    struct ckpt_err err = {0};
    struct ckpt_catalog *cat;
    struct ckpt_job_wants job_wants;
    struct ckpt_wants *table = calloc(RANKS, sizeof *table);
    uint32_t *class_of = malloc(RANKS * sizeof *class_of), *node = calloc(RANKS, sizeof *node);
    const struct ckpt_plan_sizes sizes = {
        .unit = 4 << 20, .chunk = 4 << 20, .slice = 4 << 20, .window = 32 << 20};
    const struct ckpt_sharing sharing = {CKPT_READERS_ONCE, node};
    const uint64_t dim[2] = {RANKS, 64};
    uint64_t off = 0;
    struct ckpt_plan *p;

    CHECK_OK(ckpt_catalog_new(&cat, &err));
    add_source(cat, false);
    for (uint32_t t = 0; t < BOXED; t++)
        add_tensor(cat, 0, &off, 2, dim);
    for (uint32_t r = 0; r < RANKS; r++) {
        for (uint32_t t = 0; t < BOXED; t++) {
            const struct ckpt_box box = {2, {(r * 5167) % RANKS, 0}, {1, 64}};
            const bool all = r == 0 && t % 2;
            CHECK_OK(ckpt_wants_add(&table[r], cat, t, CKPT_NONE, all ? NULL : &box, &err));
        }
        class_of[r] = r;
    }
    CHECK_OK(ckpt_job_wants_init(&job_wants, cat, RANKS, class_of, table, RANKS, &err));
    CHECK_OK(ckpt_plan_new(&job_wants, 17, &sharing, true, &sizes, &p, &err));
    CHECK_EQ(p->regions.len, BOXED);
    CHECK_EQ(p->groups.len, 2); /* alone; with the one that wants all */
    ckpt_plan_free(p);
    CHECK_OK(ckpt_plan_new(&job_wants, 0, &sharing, true, &sizes, &p, &err));
    CHECK_EQ(p->groups.len, RANKS);
    CHECK_EQ(p->regions.len, BOXED / 2 * (RANKS + 1));
    ckpt_plan_free(p);
    ckpt_job_wants_release(&job_wants);
    ckpt_catalog_free(cat);
    free(node);
}

/* ---- FSDP's rows, given box by box: weights and two states of Adam ---- */

enum { ROW_RANKS = 1024, ROW_TENSORS = 3 * 1137 };

/* The tensors of Llama 3.1 405B, three times; `uneven`: no two of one copy have equally many rows.
 */
static struct ckpt_catalog *adam_checkpoint(bool uneven)
{
    static const uint64_t layer[9][2] = {{16384, 1},     {16384, 16384}, {1024, 16384},
                                         {1024, 16384},  {16384, 16384}, {16384, 1},
                                         {53248, 16384}, {53248, 16384}, {16384, 53248}};
    struct ckpt_catalog *cat;
    struct ckpt_err err = {0};
    uint64_t off = 0;

    if (ckpt_catalog_new(&cat, &err) < 0)
        fail_msg("%s", err.text);
    add_source(cat, false);
    for (uint64_t i = 0; i < ROW_TENSORS; i++) {
        const uint64_t t = i % 1137, *row = layer[t % 9];
        const uint64_t dim[2] = {t < 1134 ? row[0] : 128256, t < 1134 ? row[1] : 16384};
        const uint64_t own[2] = {dim[0] + (uneven ? 5123 * t : 0), dim[1]};
        add_tensor(cat, 0, &off, 2, own);
    }
    return cat;
}

static void rows_of(struct ckpt_wants *w, const struct ckpt_catalog *cat, uint32_t rank)
{
    struct ckpt_err err = {0};

    for (uint32_t t = 0; t < cat->tensors.len; t++) {
        const uint64_t *dim = cat->tensors.ptr[t].dim, chunk = (dim[0] - 1) / ROW_RANKS + 1;
        const uint64_t lo = chunk * rank;
        if (lo >= dim[0])
            continue;
        const struct ckpt_box box = {2, {lo, 0}, {ckpt_min_u64(chunk, dim[0] - lo), dim[1]}};
        if (ckpt_wants_add(w, cat, t, CKPT_NONE, &box, &err) < 0)
            fail_msg("%s", err.text);
    }
}

/* Plan rank 17 of the job, as after a message with the tables of all ranks; returns the length of
 * that message. Rank 1000 wants the same, and so on; all others want nothing of that. */
static size_t plan_rows(bool uneven)
{
    struct ckpt_catalog *cat = adam_checkpoint(uneven);
    struct ckpt_wants *table = calloc(ROW_RANKS, sizeof *table);
    uint32_t *class_of = malloc(ROW_RANKS * sizeof *class_of);
    uint32_t *node = calloc(ROW_RANKS, sizeof *node), owner = 0;
    XXH64_hash_t form[ROW_RANKS];
    const struct ckpt_plan_sizes sizes = {
        .unit = 4 << 20, .chunk = 4 << 20, .slice = 4 << 20, .window = 32 << 20};
    const struct ckpt_sharing sharing = {CKPT_READERS_ONCE, node};
    struct ckpt_job_wants job_wants;
    struct ckpt_wants own = {0};
    struct ckpt_err err = {0};
    struct ckpt_plan *p;
    size_t sent = 0;

    rows_of(&own, cat, 17);
    for (uint32_t r = 0; r < ROW_RANKS; r++) {
        struct ckpt_wants w = {0};
        struct ckpt_table text;
        bool meet;
        rows_of(&w, cat, r < 1000 ? r : r - 983);
        if (ckpt_wants_dump(&w, cat, &text, &err) < 0)
            fail_msg("%s", err.text);
        form[r] = XXH3_64bits(text.data, text.form);
        for (owner = 0; form[owner] != form[r];)
            owner++;
        const size_t skip = owner == r ? 0 : text.form;
        if (ckpt_wants_parse(text.data + skip, text.len - skip, cat, ROW_RANKS,
                             owner == r ? NULL : &table[owner], &table[r], &err) < 0)
            fail_msg("%s", err.text);
        sent += text.len - skip;
        class_of[r] = r;
        if (ckpt_wants_meet(&table[r], &own, cat, 17, &meet, &err) < 0)
            fail_msg("%s", err.text);
        assert_int_equal(meet, r == 17 || r == 1000);
        if (!meet && table[r].form)
            ckpt_wants_release(&table[r]);
        free(text.data);
        ckpt_wants_release(&w);
    }
    if (ckpt_job_wants_init(&job_wants, cat, ROW_RANKS, class_of, table, ROW_RANKS, &err) < 0 ||
        ckpt_plan_new(&job_wants, 17, &sharing, true, &sizes, &p, &err) < 0)
        fail_msg("%s", err.text);
    assert_int_equal(p->groups.len, 1);
    assert_int_equal(p->groups.ptr[0].n, 2);
    assert_int_equal(p->regions.len, ROW_TENSORS);
    assert_in_range(ckpt_job_wants_memory(&job_wants), 1, 4 << 20);
    assert_true(ckpt_plan_memory(p) > ckpt_job_wants_memory(&job_wants));
    ckpt_plan_free(p);
    ckpt_job_wants_release(&job_wants);
    ckpt_wants_release(&own);
    ckpt_catalog_free(cat);
    free(node);
    return sent;
}

TEST(plan, rows_given_box_by_box_cost_a_rank_little)
{
    CHECK(plan_rows(false) < 256 << 10);
    CHECK(plan_rows(true) < 8 << 20);
}

TEST(plan, large_jobs_cost_a_rank_what_it_gets)
{
    static const uint32_t nrank[] = {1024, 4096, 16384};

    for (size_t i = 0; i < 3; i++) {
        struct rusage use;
        plan_as_loads_do(nrank[i]);
        (void)getrusage(RUSAGE_SELF, &use);
        CHECK(use.ru_maxrss < 512 * 1024);
    }
}

/* The first one looks at the most memory that the process has had. */
TESTS(T(plan, large_jobs_cost_a_rank_what_it_gets), T(replicas, are_the_ranks_that_want_the_same),
      T(plan, boxes_given_one_by_one_are_sorted), T(plan, rows_given_box_by_box_cost_a_rank_little))
