/* SPDX-License-Identifier: Apache-2.0 */
/* Plans without ranks: every wanted byte has one owner and reaches all who want it; large jobs are
 * planned in seconds. */
#include "load/plan.h"

#include <stdlib.h>
#include <sys/resource.h>

#include "load/cost.h"
#include "load/demand.h"
#include "load/policy.h"
#include "random.h"
#include "test.h"

enum { MOST_TENSORS = 40 };

/* ---- made-up checkpoints: tensors end to end in a few sources of no bytes ---- */

static int never(struct ckpt_source *s, struct iovec *iov, int n, uint64_t off,
                 struct ckpt_err *err)
{
    (void)s, (void)iov, (void)n, (void)off;
    return ckpt_fail(err, CKPT_IO, "there is nothing to be read");
}

static char *no_name(const struct ckpt_source *s)
{
    (void)s;
    return strdup("made up");
}

static void forget(struct ckpt_source *s) { free(s); }

static const struct ckpt_source_ops nowhere = {.preadv = never, .name = no_name, .free = forget};

static void add_source(struct ckpt_catalog *cat)
{
    struct ckpt_err err = {0};
    struct ckpt_source *s = calloc(1, sizeof *s);

    s->ops = &nowhere;
    s->size = UINT64_MAX / 2;
    atomic_init(&s->refs, 1);
    if (ckpt_catalog_add_source(cat, s, &err) == UINT32_MAX)
        fail_msg("%s", err.text);
    ckpt_source_unref(s);
}

static void add_tensor(struct ckpt_catalog *cat, uint32_t source, uint64_t *off, uint32_t rank,
                       const uint64_t *dim)
{
    struct ckpt_err err = {0};
    struct ckpt_box box = {.rank = rank};
    struct ckpt_piece_draft piece;
    uint64_t stride[CKPT_MAX_RANK];
    char name[32];
    size_t index;

    (void)snprintf(name, sizeof name, "t%zu", cat->tensors.len);
    ckpt_shape_strides(dim, rank, stride);
    for (uint32_t d = 0; d < rank; d++) {
        box.n[d] = dim[d];
        stride[d] *= 2;
    }
    ckpt_piece_from_box(dim, &box, source, *off, stride, &piece);
    *off += ckpt_box_numel(&box) * 2;
    if (ckpt_catalog_add(cat, name, CKPT_BF16, dim, rank, &index, &err) < 0 ||
        ckpt_catalog_set_pieces(cat, index, &piece, 1, &err) < 0)
        fail_msg("%s", err.text);
}

static struct ckpt_catalog *small_checkpoint(uint64_t *rng)
{
    struct ckpt_catalog *cat;
    struct ckpt_err err = {0};
    uint64_t off[2] = {0, 0};

    if (ckpt_catalog_new(&cat, &err) < 0)
        fail_msg("%s", err.text);
    add_source(cat);
    add_source(cat);
    for (uint64_t n = random_range(rng, 1, MOST_TENSORS); n > 0; n--) {
        uint64_t dim[3];
        uint32_t rank = (uint32_t)random_range(rng, 0, 4),
                 source = (uint32_t)random_range(rng, 0, 2);
        for (uint32_t d = 0; d < rank; d++)
            dim[d] = random_range(rng, 1, 40);
        add_tensor(cat, source, &off[source], rank, dim);
    }
    return cat;
}

/* ---- wants ---- */

static uint32_t all_ranks(struct ckpt_wants *w, uint32_t a, uint32_t b)
{
    struct ckpt_err err = {0};
    uint32_t *rank = malloc(a * b * sizeof *rank), dim[2] = {a, b};

    for (uint32_t i = 0; i < a * b; i++)
        rank[i] = i;
    uint32_t g = ckpt_wants_grid(w, 2, dim, rank, &err);
    free(rank);
    return g;
}

static void random_table(struct ckpt_wants *w, const struct ckpt_catalog *cat, uint32_t nrank,
                         uint64_t *rng)
{
    struct ckpt_err err = {0};
    uint32_t a = nrank % 2 == 0 ? 2 : 1;

    for (uint32_t t = 0; t < cat->tensors.len; t++) {
        const struct ckpt_tensor *tensor = &cat->tensors.ptr[t];
        struct ckpt_spec spec = {.grid = all_ranks(w, a, nrank / a)};
        struct ckpt_box box = {.rank = tensor->rank};
        uint32_t number = CKPT_NONE;
        if (random_range(rng, 0, 5) == 0)
            continue;
        for (uint32_t axis = 0; axis < 2; axis++)
            if (tensor->rank && random_range(rng, 0, 2))
                spec.cut[spec.ncut++] =
                    (struct ckpt_cut){(uint32_t)random_range(rng, 0, tensor->rank), axis};
        if (spec.ncut)
            number = ckpt_wants_spec(w, &spec, &err);
        for (uint32_t d = 0; d < tensor->rank; d++) {
            box.lo[d] = random_range(rng, 0, tensor->dim[d]);
            box.n[d] = random_range(rng, 0, tensor->dim[d] - box.lo[d]) + 1;
        }
        if (ckpt_wants_add(w, t, number, random_range(rng, 0, 3) ? NULL : &box, &err) < 0)
            fail_msg("%s", err.text);
    }
}

static void random_roster(struct ckpt_roster *r, const struct ckpt_catalog *cat, uint32_t nrank,
                          uint64_t *rng)
{
    struct ckpt_err err = {0};
    uint32_t nclass = (uint32_t)random_range(rng, 1, nrank < 3 ? nrank + 1 : 4);
    uint32_t *class_of = malloc(nrank * sizeof *class_of);
    struct ckpt_wants *table = calloc(nclass, sizeof *table);

    for (uint32_t k = 0; k < nrank; k++)
        class_of[k] = k < nclass ? k : (uint32_t)random_range(rng, 0, nclass);
    for (uint32_t c = 0; c < nclass; c++)
        random_table(&table[c], cat, nrank, rng);
    if (ckpt_roster_init(r, cat, nrank, class_of, table, nclass, &err) < 0)
        fail_msg("%s", err.text);
}

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

/* ---- replica groups ---- */

static uint64_t wanted(const struct ckpt_roster *r, uint32_t rank, uint32_t tensor,
                       const struct ckpt_box *box)
{
    const struct ckpt_wants *w = &r->table[r->class_of[rank]];
    uint64_t numel = 0;

    for (size_t e = 0; e < w->entries.len; e++) {
        struct ckpt_box want, both;
        if (w->entries.ptr[e].tensor == tensor &&
            ckpt_wants_box(w, &w->entries.ptr[e], &r->cat->tensors.ptr[tensor], rank, &want) &&
            ckpt_box_intersect(&want, box, &both))
            numel += ckpt_box_numel(&both);
    }
    return numel;
}

/* Whatever box is asked for: the sum over different boxes is that over ranks. */
static void check_demand(const struct ckpt_roster *r, const struct ckpt_replicas *groups,
                         uint64_t *rng)
{
    const struct ckpt_domain domain = {r, groups, groups->count};
    ckpt_demands demands = {0};
    struct ckpt_err err = {0};

    for (uint32_t t = 0; t < r->cat->tensors.len; t++) {
        const struct ckpt_tensor *tensor = &r->cat->tensors.ptr[t];
        if (ckpt_demand_of(&domain, t, &demands, &err) < 0)
            fail_msg("%s", err.text);
        for (int k = 0; k < 4; k++) {
            struct ckpt_box box = {.rank = tensor->rank};
            uint64_t sum = 0;
            for (uint32_t d = 0; d < tensor->rank; d++) {
                box.lo[d] = random_range(rng, 0, tensor->dim[d]);
                box.n[d] = random_range(rng, 0, tensor->dim[d] - box.lo[d]) + 1;
            }
            for (uint32_t rank = 0; rank < r->nrank; rank++)
                sum += wanted(r, rank, t, &box);
            assert_int_equal(ckpt_demand_numel(&demands, &box), sum);
        }
    }
    ckpt_vec_release(&demands);
}

TEST(replicas, are_the_ranks_that_want_the_same)
{
    uint64_t rng = 4711;

    for (int round = 0; round < 100; round++) {
        struct ckpt_err err = {0};
        struct ckpt_catalog *cat = small_checkpoint(&rng);
        struct ckpt_roster roster;
        struct ckpt_replicas groups;
        uint32_t nrank = (uint32_t)random_range(&rng, 1, 17), ranks = 0;
        random_roster(&roster, cat, nrank, &rng);
        CHECK_OK(ckpt_replicas_init(&groups, &roster, &err));
        for (uint32_t r = 0; r < nrank; r++) {
            const uint32_t first = groups.rank[groups.of[r]];
            CHECK(first <= r && roster.class_of[first] == roster.class_of[r]);
            for (uint32_t t = 0; t < cat->tensors.len; t++) {
                const struct ckpt_wants *w = &roster.table[roster.class_of[r]];
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
        for (uint32_t g = 0; g < groups.n; g++)
            ranks += groups.count[g];
        CHECK_EQ(ranks, nrank);
        check_demand(&roster, &groups, &rng);
        ckpt_replicas_release(&groups);
        ckpt_roster_release(&roster);
        ckpt_catalog_free(cat);
    }
}

/* ---- large jobs ---- */

enum { TENSORS = 100000 };

/* 100,000 tensors (700 GB), tp 8 by dp: every rank wants an eighth of all but the norms. */
static void large_roster(struct ckpt_roster *roster, uint32_t nrank, uint64_t *ret_bytes)
{
    struct ckpt_err err = {0};
    struct ckpt_catalog *cat;
    struct ckpt_wants *table = calloc(1, sizeof *table);
    uint32_t *class_of = calloc(nrank, sizeof *class_of);

    *ret_bytes = 0;
    if (ckpt_catalog_new(&cat, &err) < 0)
        fail_msg("%s", err.text);
    add_source(cat);
    for (uint32_t t = 0; t < TENSORS; t++) {
        const uint64_t norm[1] = {4096}, expert[2] = {2048, 2048};
        add_tensor(cat, 0, ret_bytes, t % 5 ? 2 : 1, t % 5 ? expert : norm);
    }
    const uint32_t g = all_ranks(table, nrank / 8, 8);
    for (uint32_t t = 0; t < TENSORS; t++) {
        struct ckpt_spec spec = {g, 1, {{t % 2, 1}}};
        uint32_t s = t % 5 ? ckpt_wants_spec(table, &spec, &err) : CKPT_NONE;
        if (ckpt_wants_add(table, t, s, NULL, &err) < 0)
            fail_msg("%s", err.text);
    }
    if (ckpt_roster_init(roster, cat, nrank, class_of, table, 1, &err) < 0)
        fail_msg("%s", err.text);
}

/* Owners read equal parts; the least and the most of them. */
static void check_balance(const struct ckpt_plan *p, uint64_t all)
{
    uint64_t least = UINT64_MAX, most = 0;

    for (uint32_t o = 0; o < p->nowner; o++) {
        uint64_t bytes = 0;
        for (uint32_t u = p->owner_unit[o]; u < p->owner_unit[o + 1]; u++) {
            struct ckpt_box box;
            ckpt_plan_unit_box(p, u, &box);
            bytes += ckpt_box_numel(&box) * 2;
        }
        least = bytes < least ? bytes : least;
        most = bytes > most ? bytes : most;
    }
    assert_true(most - least <= 2 * p->sizes.unit &&
                (double)most < 1.1 * (double)all / p->nowner + 1e6);
}

/* What one rank of a large job plans, with the sizes that a load has there. */
static void plan_as_loads_do(uint32_t nrank)
{
    const struct ckpt_load_options opt = {.readers = CKPT_READERS_ONCE, .host_bytes = 256 << 20};
    uint32_t *rank = malloc(nrank * sizeof *rank), *node = malloc(nrank * sizeof *node);
    struct ckpt_policy_input in = {.opt = &opt, .local = 8, .cpus = 64};
    struct ckpt_policy policy;
    struct ckpt_engine_sizes sizes;
    const struct ckpt_engine_mode mode = {0};
    struct ckpt_roster roster;
    struct ckpt_err err = {0};
    struct ckpt_plan *p;
    ckpt_parts parts = {0};
    uint64_t all;

    large_roster(&roster, nrank, &all);
    for (uint32_t r = 0; r < nrank; r++) {
        rank[r] = r;
        node[r] = r / 8;
    }
    if (ckpt_load_weigh(&roster, node, nrank / 8, &in.cost, &err) < 0)
        fail_msg("%s", err.text);
    assert_int_equal(in.cost.unique, all);
    assert_int_equal(in.cost.node_unique, all);
    if (ckpt_policy_choose(&in, &policy, &err) < 0)
        fail_msg("%s", err.text);
    assert_int_equal(policy.ndomain, nrank);
    assert_true(policy.sizes.piece >= CKPT_LOAD_PIECE_GOOD);
    if (ckpt_plan_new(&roster, rank, nrank, &policy.sizes, &p, &err) < 0)
        fail_msg("%s", err.text);
    assert_int_equal(p->bytes, all);
    check_balance(p, all);
    if (ckpt_plan_receives(p, 17, &parts, &err) < 0)
        fail_msg("%s", err.text);
    if (ckpt_engine_measure(p, 17, &mode, &parts, &sizes, &err) < 0)
        fail_msg("%s", err.text);
    print_message("%u ranks: slots %u, read %zu, stage %zu, receive %zu; piece %zu turns %zu\n",
                  nrank, policy.slots, (size_t)sizes.read, (size_t)sizes.stage,
                  (size_t)sizes.receive, (size_t)policy.sizes.piece, (size_t)policy.sizes.turns);
    assert_true(policy.slots * sizes.host + ckpt_load_aside(&opt) <= opt.host_bytes);
    ckpt_vec_release(&parts);
    ckpt_plan_free(p);
    struct ckpt_catalog *cat = (struct ckpt_catalog *)(uintptr_t)roster.cat;
    ckpt_roster_release(&roster);
    ckpt_catalog_free(cat);
    free(rank);
    free(node);
}

TEST(plan, large_jobs_read_large_pieces)
{
    static const uint32_t nrank[] = {1024, 4096, 16384};

    for (size_t i = 0; i < 3; i++) {
        struct rusage use;
        plan_as_loads_do(nrank[i]);
        (void)getrusage(RUSAGE_SELF, &use);
        CHECK(use.ru_maxrss < 1024 * 1024);
    }
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
      T(wants, are_cut_as_torch_chunks), T(plan, large_jobs_read_large_pieces),
      T(replicas, are_the_ranks_that_want_the_same), T(cost, one_node_with_a_hot_cache_reads_each),
      T(cost, devices_of_one_node_share_what_all_want), T(cost, replicas_on_many_nodes_read_once))
