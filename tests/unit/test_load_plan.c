/* SPDX-License-Identifier: Apache-2.0 */
/* Plans without ranks: every wanted byte has one owner and reaches all who want it. */
#include "load/plan.h"

#include <stdlib.h>

#include "load/cost.h"
#include "load_made_up.h"

/* ---- the tests ---- */

/* A rank gets every element that it wants once: from its own units, or from others. */
static void check_delivery(const struct ckpt_plan *p, uint32_t rank)
{
    const struct ckpt_roster *r = p->roster;
    const struct ckpt_wants *w = &r->table[r->class_of[rank]];
    ckpt_parts parts = {0};
    struct ckpt_err err = {0};

    if (ckpt_plan_receives(p, rank, &parts, &err) < 0)
        fail_msg("%s", err.text);
    for (uint32_t o = 0; o < p->nowner; o++)
        for (uint32_t u = p->owner_unit[o]; p->owner[o] == rank && u < p->owner_unit[o + 1]; u++) {
            struct ckpt_box box;
            ckpt_plan_unit_box(p, u, &box);
            if (ckpt_plan_wanted(p, rank, u, &box, &parts, &err) < 0)
                fail_msg("%s", err.text);
        }
    for (size_t i = 0; i < parts.len; i++) {
        uint64_t numel = ckpt_box_numel(&parts.ptr[i].box);
        assert_int_equal(parts.ptr[i].bytes, numel * 2);
    }
    for (uint32_t e = 0; e < w->entries.len; e++) {
        const struct ckpt_tensor *t = &r->cat->tensors.ptr[w->entries.ptr[e].tensor];
        struct ckpt_box want, x;
        uint64_t got = 0;
        bool any = ckpt_wants_box(w, &w->entries.ptr[e], t, rank, &want);
        for (size_t i = 0; i < parts.len; i++) {
            if (parts.ptr[i].entry != e)
                continue;
            assert_true(any && ckpt_box_intersect(&parts.ptr[i].box, &want, &x));
            assert_int_equal(ckpt_box_numel(&x), ckpt_box_numel(&parts.ptr[i].box));
            got += ckpt_box_numel(&x);
            for (size_t k = 0; k < i; k++)
                assert_false(parts.ptr[k].entry == e &&
                             ckpt_box_intersect(&parts.ptr[k].box, &parts.ptr[i].box, &x));
        }
        assert_int_equal(got, any ? ckpt_box_numel(&want) : 0);
    }
    ckpt_vec_release(&parts);
}

/* What one sends is what the other expects, in the same order. */
static void check_messages(const struct ckpt_plan *p)
{
    struct ckpt_err err = {0};

    for (uint32_t r = 0; r < p->nowner; r++) {
        ckpt_parts in = {0};
        if (ckpt_plan_receives(p, p->owner[r], &in, &err) < 0)
            fail_msg("%s", err.text);
        for (uint32_t o = 0; o < p->nowner; o++) {
            ckpt_parts out = {0};
            size_t at = 0;
            if (ckpt_plan_sends(p, p->owner[o], p->owner_unit[o], p->owner_unit[o + 1], &out,
                                &err) < 0)
                fail_msg("%s", err.text);
            for (size_t i = 0; i < in.len; i++) {
                if (in.ptr[i].peer != p->owner[o])
                    continue;
                while (at < out.len && out.ptr[at].peer != p->owner[r])
                    at++;
                assert_true(at < out.len);
                assert_int_equal(out.ptr[at].unit, in.ptr[i].unit);
                assert_int_equal(out.ptr[at].entry, in.ptr[i].entry);
                assert_int_equal(out.ptr[at].window, in.ptr[i].window);
                assert_int_equal(out.ptr[at].bytes, in.ptr[i].bytes);
                at++;
            }
            while (at < out.len && out.ptr[at].peer != p->owner[r])
                at++;
            assert_int_equal(at, out.len);
            ckpt_vec_release(&out);
        }
        ckpt_vec_release(&in);
    }
}

/* No element is read twice, and no window is larger than was said. */
static void check_units(const struct ckpt_plan *p)
{
    struct ckpt_box a, b, x;
    uint64_t bytes = 0;

    for (uint32_t u = 0; u < p->units.len; u++) {
        uint32_t owner, window, lo, hi;
        ckpt_plan_unit_box(p, u, &a);
        bytes += ckpt_box_numel(&a) * 2;
        ckpt_plan_find(p, u, &owner, &window);
        ckpt_plan_piece(p, owner, window, &lo, &hi);
        assert_true(lo <= u && u < hi);
        for (uint32_t k = 0; k < u; k++)
            if (ckpt_plan_unit_tensor(p, k) == ckpt_plan_unit_tensor(p, u)) {
                ckpt_plan_unit_box(p, k, &b);
                assert_false(ckpt_box_intersect(&a, &b, &x));
            }
    }
    assert_int_equal(bytes, p->bytes);
    for (uint32_t o = 0; o < p->nowner; o++)
        for (uint32_t w = 0; w < p->nwindow; w++) {
            uint32_t lo, hi;
            uint64_t piece = 0;
            ckpt_plan_piece(p, o, w, &lo, &hi);
            for (uint32_t u = lo; u < hi; u++) {
                ckpt_plan_unit_box(p, u, &a);
                piece += ckpt_box_numel(&a) * 2;
            }
            assert_true(piece <= p->sizes.piece || hi - lo == 1);
            assert_true(lo == hi || p->sizes.turns < 2 || w % p->sizes.turns == o % p->sizes.turns);
        }
}

TEST(plan, every_wanted_element_arrives_once)
{
    uint64_t rng = 12345;

    for (int round = 0; round < 150; round++) {
        struct ckpt_err err = {0};
        struct ckpt_catalog *cat = small_checkpoint(&rng);
        struct ckpt_roster roster;
        uint32_t nrank = (uint32_t)random_range(&rng, 1, 9), rank[8], n = 0;
        struct ckpt_plan *p;
        random_roster(&roster, cat, nrank, &rng);
        for (uint32_t r = 0; r < nrank; r++)
            if (random_range(&rng, 0, 4) || (n == 0 && r + 1 == nrank))
                rank[n++] = r;
        uint64_t unit = random_range(&rng, 2, 3000);
        const struct ckpt_plan_sizes sizes = {.unit = unit,
                                              .piece = unit + random_range(&rng, 0, 5000),
                                              .turns = random_range(&rng, 0, n + 1)};
        CHECK_OK(ckpt_plan_new(&roster, rank, n, &sizes, &p, &err));
        check_units(p);
        check_messages(p);
        for (uint32_t k = 0; k < n; k++)
            check_delivery(p, rank[k]);
        ckpt_plan_free(p);
        ckpt_roster_release(&roster);
        ckpt_catalog_free(cat);
    }
}

TEST(wants, tables_travel_as_bytes)
{
    uint64_t rng = 99;

    for (int round = 0; round < 100; round++) {
        struct ckpt_err err = {0};
        struct ckpt_catalog *cat = small_checkpoint(&rng);
        struct ckpt_wants w = {0}, back;
        unsigned char *data, *again;
        size_t len, len2;
        random_table(&w, cat, 6, &rng);
        CHECK_OK(ckpt_wants_dump(&w, &data, &len, &err));
        CHECK_OK(ckpt_wants_parse(data, len, cat, 6, &back, &err));
        CHECK_OK(ckpt_wants_dump(&back, &again, &len2, &err));
        CHECK(len == len2 && memcmp(data, again, len) == 0);
        ckpt_wants_release(&back);
        for (int lie = 0; lie < 200; lie++) { /* broken tables are refused, or harmless */
            unsigned char *bad = malloc(len + 1);
            size_t cut = random_range(&rng, 0, 4) ? len : random_range(&rng, 0, len);
            struct ckpt_err ignored = {0};
            memcpy(bad, data, len);
            bad[random_range(&rng, 0, len)] ^= (unsigned char)(1u << random_range(&rng, 0, 8));
            if (ckpt_wants_parse(bad, cut, cat, 6, &back, &ignored) == 0) {
                for (size_t e = 0; e < back.entries.len; e++)
                    for (uint32_t r = 0; r < 6; r++) {
                        const struct ckpt_tensor *t = &cat->tensors.ptr[back.entries.ptr[e].tensor];
                        struct ckpt_box box;
                        if (ckpt_wants_box(&back, &back.entries.ptr[e], t, r, &box))
                            CHECK(ckpt_box_within(&box, t->dim, t->rank));
                    }
                ckpt_wants_release(&back);
            }
            free(bad);
        }
        free(data);
        free(again);
        ckpt_wants_release(&w);
        ckpt_catalog_free(cat);
    }
}

TEST(wants, are_cut_as_torch_chunks)
{
    struct ckpt_err err = {0};
    struct ckpt_catalog *cat;
    struct ckpt_wants w = {0};
    const uint64_t dim[1] = {10}, lo[4] = {0, 3, 6, 9}, n[4] = {3, 3, 3, 1};
    uint64_t off = 0;
    struct ckpt_box box;

    CHECK_OK(ckpt_catalog_new(&cat, &err));
    add_source(cat);
    add_tensor(cat, 0, &off, 1, dim);
    struct ckpt_spec spec = {all_ranks(&w, 1, 4), 1, {{0, 1}}};
    struct ckpt_want e = {0, ckpt_wants_spec(&w, &spec, &err), CKPT_NONE};
    for (uint32_t r = 0; r < 4; r++) {
        CHECK(ckpt_wants_box(&w, &e, &cat->tensors.ptr[0], r, &box));
        CHECK_EQ(box.lo[0], lo[r]);
        CHECK_EQ(box.n[0], n[r]);
    }
    struct ckpt_spec many = {all_ranks(&w, 1, 8), 1, {{0, 1}}}; /* chunks of 2: 3 ranks have none */
    e.spec = ckpt_wants_spec(&w, &many, &err);
    for (uint32_t r = 0; r < 8; r++)
        CHECK(ckpt_wants_box(&w, &e, &cat->tensors.ptr[0], r, &box) == (r < 5));
    ckpt_wants_release(&w);
    ckpt_catalog_free(cat);
}

/* ---- which way ---- */

TEST(cost, one_node_with_a_hot_cache_reads_each)
{
    const struct ckpt_cost_input in = {4,          1,          1000000000, 1000000000, 1000000000,
                                       1000000000, 1000000000, 1.0,        false};
    struct ckpt_rates r = {0};
    struct ckpt_cost c;

    ckpt_rates_assume(&r, false);
    ckpt_cost_estimate(&in, &r, &c);
    CHECK_EQ(ckpt_cost_choose(&c), CKPT_READERS_EACH);
}

/* Devices are linked faster than a page cache reads: slices are read by each rank, copies once. */
TEST(cost, devices_of_one_node_share_what_all_want)
{
    const uint64_t model = 64000000000;
    struct ckpt_cost_input in = {8, 1, model, model, model, model, model, 1.0, false, true};
    struct ckpt_rates r = {0};
    struct ckpt_cost c;

    ckpt_rates_assume(&r, true);
    ckpt_cost_estimate(&in, &r, &c);
    CHECK_EQ(ckpt_cost_choose(&c), CKPT_READERS_EACH);
    in.needed = in.node_needed = 8 * model;
    ckpt_cost_estimate(&in, &r, &c);
    CHECK(ckpt_cost_choose(&c) != CKPT_READERS_EACH);
    in.node_needed = model + model / 100; /* norms: not worth an exchange of all the rest */
    ckpt_cost_estimate(&in, &r, &c);
    CHECK_EQ(ckpt_cost_choose(&c), CKPT_READERS_EACH);
}

/* 16 replicas of an 810 GB model on 16 nodes, one storage of 100 GB/s: once a job wins by the
 * number of replicas. */
TEST(cost, replicas_on_many_nodes_read_once)
{
    const uint64_t model = 810000000000;
    const struct ckpt_cost_input in = {128,   16,         model, 16 * model, model,
                                       model, 16 * model, 0.0,   true};
    const struct ckpt_rates r = {20e9, 100e9, 200e9, 200e9, 300e9, 90e9};
    struct ckpt_cost c;

    ckpt_cost_estimate(&in, &r, &c);
    CHECK_EQ(ckpt_cost_choose(&c), CKPT_READERS_ONCE);
    CHECK(c.each > 120 && c.each < 140);
    CHECK(c.once < 10);
}

TESTS(T(plan, every_wanted_element_arrives_once), T(wants, tables_travel_as_bytes),
      T(wants, are_cut_as_torch_chunks), T(cost, one_node_with_a_hot_cache_reads_each),
      T(cost, devices_of_one_node_share_what_all_want), T(cost, replicas_on_many_nodes_read_once))
