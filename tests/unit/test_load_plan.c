/* SPDX-License-Identifier: Apache-2.0 */
/* Plans without ranks: every wanted byte has one owner and reaches all who want it. */
#include "load/plan/plan.h"

#include <stdlib.h>

#include "base/ckd.h"
#include "load/plan/cost.h"
#include "load/plan/holders.h"
#include "load_made_up.h"
#include "sanitized.h"
#include "tensor/read.h"

/* ---- plans of all ranks of a job, as each makes its own ---- */

enum { GROUPS = 4, ROUNDS = SANITIZED ? 60 : 300 };

struct job {
    struct ckpt_catalog *cat;
    struct ckpt_job_wants job_wants;
    uint32_t nrank, node[64], group[64]; /* group: of the caller's */
    struct ckpt_sharing sharing;
    struct ckpt_holders holders; /* of some jobs */
    struct ckpt_plan *plan[64];
};

/* Each file is at some of the ranks. */
static void spread_files(struct job *j, uint64_t *rng)
{
    j->holders.nsource = (uint32_t)j->cat->sources.len;
    j->holders.set = calloc(j->holders.nsource, sizeof *j->holders.set);
    for (uint32_t i = 0; i < j->holders.nsource; i++) {
        const uint64_t part = random_range(rng, 1, 5);
        ckpt_numbers ranks = {0};
        for (uint32_t r = 0; r < j->nrank; r++)
            if (random_range(rng, 0, part) == 0)
                assert_int_equal(ckpt_vec_push(&ranks, r), 0);
        j->holders.set[i] = (uint32_t)j->holders.ranks.len;
        assert_int_equal(ckpt_vec_push(&j->holders.ranks, ranks), 0);
    }
    j->sharing.holders = &j->holders;
}

static void make_job(struct job *j, uint64_t *rng)
{
    const uint64_t unit = random_range(rng, 2, 3000);
    const struct ckpt_plan_sizes sizes = {.unit = unit,
                                          .slice = CKPT_UNIT_ALIGN + random_range(rng, 0, 3000),
                                          .window = random_range(rng, 0, 30000),
                                          .chunk = unit + random_range(rng, 0, 5000),
                                          .ahead = (uint32_t)random_range(rng, 0, 9),
                                          .device = random_range(rng, 0, 2)};
    const bool star = random_range(rng, 0, 2);
    struct ckpt_err err = {0};

    j->cat = checkpoint_with(random_range(rng, 0, 2), rng);
    j->nrank = (uint32_t)random_range(rng, 1, random_range(rng, 0, 8) ? 9 : 49);
    random_job_wants(&j->job_wants, j->cat, j->nrank, rng);
    const uint32_t nnode = (uint32_t)random_range(rng, 1, j->nrank + 1);
    for (uint32_t r = 0; r < j->nrank; r++)
        j->node[r] = (uint32_t)random_range(rng, 0, nnode);
    j->sharing = (struct ckpt_sharing){(enum ckpt_readers)random_range(rng, 1, 4), j->node, NULL};
    if (random_range(rng, 0, 3) == 0) {
        for (uint32_t r = 0; r < j->nrank; r++)
            j->group[r] = (uint32_t)random_range(rng, 0, GROUPS);
        j->sharing.share = j->group;
    }
    j->holders = (struct ckpt_holders){0};
    if (random_range(rng, 0, 2))
        spread_files(j, rng);
    for (uint32_t r = 0; r < j->nrank; r++)
        if (ckpt_plan_new(&j->job_wants, r, &j->sharing, star, &sizes, &j->plan[r], &err) < 0)
            fail_msg("%s", err.text);
}

static void free_job(struct job *j)
{
    for (uint32_t r = 0; r < j->nrank; r++)
        ckpt_plan_free(j->plan[r]);
    ckpt_holders_release(&j->holders);
    ckpt_job_wants_release(&j->job_wants);
    ckpt_catalog_free(j->cat);
}

static bool share(const struct job *j, uint32_t a, uint32_t b)
{
    if (j->sharing.share && j->group[a] != j->group[b])
        return a == b;
    return a == b || j->sharing.readers == CKPT_READERS_ONCE ||
           (j->sharing.readers == CKPT_READERS_NODE && j->node[a] == j->node[b]);
}

/* What arrives at a rank. */
struct delivery {
    const struct ckpt_plan *p;
    ckpt_overlaps parts;
};

static int take_box(void *ctx, uint32_t unit, const struct ckpt_box *box, uint64_t at)
{
    struct delivery *d = ctx;
    const size_t before = d->parts.len;
    struct ckpt_err err = {0};

    (void)at;
    if (ckpt_plan_wanted(d->p, unit, box, &d->parts, &err) < 0)
        fail_msg("%s", err.text);
    if (ckpt_tensor_is_decoded(ckpt_plan_unit_tensor(d->p, unit))) /* others may want the rest */
        return 0;
    assert_true(d->parts.len > before);
    for (size_t k = before; k < d->parts.len; k++) /* all of it is wanted */
        assert_int_equal(ckpt_box_numel(&d->parts.ptr[k].box), ckpt_box_numel(box));
    return 0;
}

static void take_slice(struct delivery *d, const struct ckpt_window *w, uint32_t member)
{
    uint64_t lo, hi;

    ckpt_plan_slice(d->p, w, member, &lo, &hi);
    for (uint32_t u = ckpt_plan_unit_at(d->p, w->group, lo);
         u < d->p->stream[w->group].hi && d->p->units.ptr[u].at < hi; u++)
        assert_int_equal(ckpt_plan_boxes(d->p, u, lo, hi, take_box, d), 0);
}

/* A rank gets every element that it wants once. */
static void check_delivery(const struct ckpt_plan *p)
{
    const struct ckpt_job_wants *r = p->job_wants;
    const struct ckpt_wants *w = &r->table[r->class_of[p->self]];
    struct delivery d = {.p = p};

    for (uint32_t g = 0; g < p->groups.len; g++)
        if (p->groups.ptr[g].n == 1)
            for (uint32_t u = p->stream[g].lo; u < p->stream[g].hi; u++)
                (void)ckpt_plan_boxes(p, u, 0, UINT64_MAX, take_box, &d);
    for (size_t i = 0; i < p->windows.len; i++) {
        const struct ckpt_window *win = &p->windows.ptr[i];
        for (uint32_t k = 0; k < p->groups.ptr[win->group].n && p->stream[win->group].nstep; k++)
            take_slice(&d, win, k);
    }
    for (uint32_t e = 0; e < w->entries.len; e++) {
        const struct ckpt_tensor *t = &r->cat->tensors.ptr[w->entries.ptr[e].tensor];
        struct ckpt_box want, x;
        uint64_t got = 0;
        bool any = ckpt_wants_box(w, &w->entries.ptr[e], t, p->self, &want);
        for (size_t i = 0; i < d.parts.len; i++) {
            if (d.parts.ptr[i].entry != e)
                continue;
            assert_int_equal(d.parts.ptr[i].bytes, ckpt_box_numel(&d.parts.ptr[i].box) * 2);
            got += ckpt_box_numel(&d.parts.ptr[i].box);
            for (size_t k = 0; k < i; k++)
                assert_false(d.parts.ptr[k].entry == e &&
                             ckpt_box_intersect(&d.parts.ptr[k].box, &d.parts.ptr[i].box, &x));
        }
        assert_int_equal(got, any ? ckpt_box_numel(&want) : 0);
    }
    ckpt_vec_release(&d.parts);
}

/* Whoever shares with this rank and wants something of a unit, or of a tensor that is decoded, is
 * in its group, and nobody else. */
static void check_members(const struct job *j, const struct ckpt_plan *p)
{
    for (uint32_t u = 0; u < p->units.len; u++) {
        const struct ckpt_region *region = &p->regions.ptr[p->units.ptr[u].region];
        const struct ckpt_group *g = &p->groups.ptr[region->group];
        struct ckpt_box box, want, x;
        uint32_t member = 0;
        ckpt_plan_unit_box(p, u, &box);
        const bool whole = j->sharing.readers != CKPT_READERS_EACH &&
                           ckpt_tensor_is_decoded(ckpt_plan_unit_tensor(p, u));
        for (uint32_t r = 0; r < j->nrank; r++) {
            const struct ckpt_wants *w = &j->job_wants.table[j->job_wants.class_of[r]];
            bool wants = false;
            for (size_t e = 0; e < w->entries.len; e++)
                wants |= w->entries.ptr[e].tensor == region->tensor &&
                         ckpt_wants_box(w, &w->entries.ptr[e], &j->cat->tensors.ptr[region->tensor],
                                        r, &want) &&
                         (whole || ckpt_box_intersect(&want, &box, &x));
            if (wants && share(j, p->self, r)) {
                assert_true(member < g->n && g->rank[member] == r);
                member++;
            }
        }
        assert_int_equal(member, g->n);
        assert_int_equal(g->rank[g->self], p->self);
    }
}

static uint32_t find_group(const struct ckpt_plan *p, const struct ckpt_group *g)
{
    uint32_t i = 0;

    while (i < p->groups.len &&
           (p->groups.ptr[i].n != g->n ||
            memcmp(p->groups.ptr[i].rank, g->rank, g->n * sizeof *g->rank) != 0))
        i++;
    return i;
}

/* Every piece reaches every member, once in each node. */
static void check_way(const struct job *j, const struct ckpt_plan *p, uint32_t group)
{
    const struct ckpt_group *g = &p->groups.ptr[group];

    for (uint32_t reader = 0; reader < g->n; reader++) {
        uint32_t got[64] = {0}, entered[64] = {0}, to[64], depth[64] = {0};
        for (uint32_t k = 0; k < g->n; k++) {
            const struct ckpt_plan *its = j->plan[g->rank[k]];
            const struct ckpt_broadcast *broadcast = &its->broadcast[find_group(its, g)];
            const uint32_t from = ckpt_broadcast_from(broadcast, reader);
            const uint32_t n = ckpt_broadcast_to(broadcast, reader, to);
            assert_true(n <= ckpt_broadcast_most(broadcast));
            assert_true((from == its->self) == (k == reader));
            for (uint32_t i = 0; i < n; i++) {
                got[to[i]]++;
                entered[j->node[to[i]]] += j->node[to[i]] != j->node[its->self];
                const struct ckpt_plan *other = j->plan[to[i]];
                assert_int_equal(
                    ckpt_broadcast_from(&other->broadcast[find_group(other, g)], reader),
                    its->self);
            }
            for (uint32_t at = its->self; at != g->rank[reader]; depth[k]++) { /* no circles */
                const struct ckpt_plan *here = j->plan[at];
                assert_true(depth[k] < g->n);
                at = ckpt_broadcast_from(&here->broadcast[find_group(here, g)], reader);
            }
            assert_true(depth[k] <= 16);
        }
        for (uint32_t k = 0; k < g->n; k++) {
            assert_int_equal(got[g->rank[k]], k != reader);
            assert_int_equal(entered[j->node[g->rank[k]]],
                             j->node[g->rank[k]] != j->node[g->rank[reader]]);
        }
    }
}

static int window_cmp(const struct ckpt_plan *a, const struct ckpt_window *x,
                      const struct ckpt_plan *b, const struct ckpt_window *y)
{
    const struct ckpt_group *g = &a->groups.ptr[x->group], *h = &b->groups.ptr[y->group];

    if (x->number != y->number)
        return x->number < y->number ? -1 : 1;
    if (g->n != h->n)
        return g->n < h->n ? -1 : 1;
    for (uint32_t i = 0; i < g->n; i++)
        if (g->rank[i] != h->rank[i])
            return g->rank[i] < h->rank[i] ? -1 : 1;
    return 0;
}

/* One order on all ranks; members of a group have the same plan of it. */
static void check_agreement(const struct job *j, const struct ckpt_plan *p)
{
    for (size_t i = 1; i < p->windows.len; i++)
        assert_true(window_cmp(p, &p->windows.ptr[i - 1], p, &p->windows.ptr[i]) < 0);
    for (uint32_t i = 0; i < p->groups.len; i++) {
        const struct ckpt_group *g = &p->groups.ptr[i];
        for (uint32_t k = 0; k < g->n; k++) {
            const struct ckpt_plan *its = j->plan[g->rank[k]];
            assert_true(find_group(its, g) < its->groups.len);
        }
        check_way(j, p, i);
    }
}

static bool shares(const struct ckpt_plan *p)
{
    for (uint32_t i = 0; i < p->groups.len; i++)
        if (p->groups.ptr[i].n > 1)
            return true;
    return false;
}

/* Claims match; but not if a rank plans for itself, so that it claims nothing, or plans otherwise.
 */
static void check_claims(const struct job *j)
{
    uint64_t sum = 0, claim[64], other;

    for (uint32_t r = 0; r < j->nrank; r++) {
        claim[r] = ckpt_plan_claim(j->plan[r]);
        sum += claim[r];
    }
    assert_true(sum == 0);
    for (uint32_t r = 0; r < j->nrank; r++) {
        j->plan[r]->sizes.window++;
        other = ckpt_plan_claim(j->plan[r]);
        j->plan[r]->sizes.window--;
        assert_int_equal(claim[r] != 0, shares(j->plan[r]));
        assert_int_equal(other != claim[r], shares(j->plan[r]));
    }
}

/* Slices, chunks and windows are no larger than was said; units lie in the order of the files and
 * of the stream; steps have every member. */
static void check_sizes(const struct ckpt_plan *p)
{
    for (uint32_t g = 0; g < p->groups.len; g++) {
        const struct ckpt_stream *s = &p->stream[g];
        const uint64_t n = p->groups.ptr[g].n;
        uint64_t at = 0, seen = 0;
        for (uint32_t u = s->lo; u < s->hi; at += p->units.ptr[u++].len) {
            const struct ckpt_unit *unit = &p->units.ptr[u];
            assert_int_equal(unit->at, at);
            assert_true(u == s->lo || unit[-1].source < unit->source ||
                        (unit[-1].source == unit->source && unit[-1].off <= unit->off) ||
                        (s->span &&
                         ckpt_plan_reader(p, g, unit[-1].at) < ckpt_plan_reader(p, g, unit->at)));
        }
        assert_int_equal(at, s->len);
        assert_int_equal(s->nstep == 0, n == 1);
        if (n == 1)
            continue;
        assert_true(s->slice <= p->sizes.slice && s->slice % CKPT_UNIT_ALIGN == 0);
        assert_true(s->slice * n <= p->sizes.window || s->slice == CKPT_UNIT_ALIGN);
        assert_true(s->slice * n * s->nwindow >= s->len);
        assert_true(s->span ||
                    s->slice * n * s->nwindow < s->len + n * CKPT_UNIT_ALIGN * (s->nwindow + 1));
        assert_int_equal(s->step[0].n * (s->nstep == 2 ? s->step[1].n : 1), n);
        for (uint32_t i = 0; i < n; i++) {
            assert_true(ckpt_plan_place(p, g, i) < n);
            seen |= (uint64_t)1 << ckpt_plan_place(p, g, i);
        }
        assert_true(seen == ((uint64_t)1 << (n - 1) << 1) - 1);
        for (uint32_t k = 0; k < s->nstep; k++)
            assert_int_equal(s->step[k].rank[s->step[k].self], p->self);
    }
}

/* In the order of windows, a rank never holds more chunks than it can; a window's chunk has its
 * slice. */
static void check_chunks(const struct ckpt_plan *p)
{
    uint32_t next = 0, held = 0, *left = calloc(p->chunks.len + 1, sizeof *left);

    for (size_t i = 0; i < p->windows.len; i++) {
        const struct ckpt_window *w = &p->windows.ptr[i];
        uint64_t lo, hi;
        if (w->chunk == CKPT_NONE) {
            ckpt_plan_slice(p, w, p->groups.ptr[w->group].self, &lo, &hi);
            assert_int_equal(lo, hi);
            continue;
        }
        left[w->chunk]++;
        const struct ckpt_chunk *chunk = &p->chunks.ptr[w->chunk];
        ckpt_plan_slice(p, w, p->groups.ptr[w->group].self, &lo, &hi);
        assert_true(chunk->group == w->group && chunk->lo <= lo && hi <= chunk->lo + chunk->len);
        assert_true(chunk->len <= p->sizes.chunk || left[w->chunk] == 1);
    }
    for (size_t i = 0; i < p->windows.len; i++) {
        const uint32_t chunk = p->windows.ptr[i].chunk;
        for (; chunk != CKPT_NONE && next <= chunk; next++)
            held += left[next] > 0; /* chunks of this rank alone are not held */
        assert_true(held <= p->held);
        held -= chunk != CKPT_NONE && --left[chunk] == 0;
    }
    free(left);
}

static int add_bytes(void *sum, uint32_t unit, const struct ckpt_box *box, uint64_t at)
{
    (void)unit, (void)at;
    *(uint64_t *)sum += ckpt_box_numel(box) * 2;
    return 0;
}

/* Every byte that anybody wants is read once by those who share. */
static void check_unique(const struct job *j)
{
    uint32_t in[64];
    uint64_t unique = 0, read = 0;

    for (uint32_t r = 0; r < j->nrank; r++) {
        const struct ckpt_plan *p = j->plan[r];
        for (size_t i = 0; i < p->chunks.len; i++) {
            const struct ckpt_chunk *chunk = &p->chunks.ptr[i];
            const struct ckpt_stream *s = &p->stream[chunk->group];
            for (uint32_t u = s->lo; u < s->hi; u++)
                (void)ckpt_plan_boxes(p, u, chunk->lo, chunk->lo + chunk->len, add_bytes, &read);
        }
    }
    /* groups of the caller's; without them, all ranks are in the first */
    for (uint32_t g = 0; g < GROUPS; g++) {
        uint32_t n = 0;
        for (uint32_t r = 0; r < j->nrank; r++)
            if ((j->sharing.share ? j->group[r] : 0) == g)
                in[n++] = r;
        unique += wanted_bytes(&j->job_wants, in, n);
    }
    if (j->sharing.readers == CKPT_READERS_ONCE && !j->cat->sources.ptr[1]->ops->stored)
        assert_int_equal(read, unique);
    else
        assert_true(read >= unique);
}

/* The members of a group that have one of these files, as bits; all, if none has. */
static uint64_t members_with(const struct ckpt_holders *h, const struct ckpt_group *g,
                             uint32_t source)
{
    const uint64_t all = ((uint64_t)1 << (g->n - 1) << 1) - 1;
    uint64_t bits = 0;

    for (uint32_t i = 0; i < g->n && source < h->nsource; i++)
        for (size_t k = 0; k < h->ranks.ptr[h->set[source]].len; k++)
            if (h->ranks.ptr[h->set[source]].ptr[k] == g->rank[i])
                bits |= (uint64_t)1 << i;
    return bits ? bits : all;
}

/* A unit is read by a member that has its file, if one has. No member reads more than it must: that
 * is by the files that no other members have, but for the ends, where units are not cut. */
static void check_readers(const struct job *j, const struct ckpt_plan *p, uint32_t group)
{
    const struct ckpt_group *g = &p->groups.ptr[group];
    const struct ckpt_stream *s = &p->stream[group];
    uint64_t with[2], bytes[2] = {0, 0}, other = 0, longest = 0, most = 0, unit = 0, lo, hi;

    for (uint32_t k = 0; k < 2; k++)
        with[k] = members_with(&j->holders, g, k);
    for (uint32_t u = s->lo; u < s->hi; u++) {
        const struct ckpt_unit *one = &p->units.ptr[u];
        const uint32_t reader = ckpt_plan_reader(p, group, one->at);
        *(one->source < 2 ? &bytes[one->source] : &other) += one->len;
        unit = ckpt_max_u64(unit, one->len);
        assert_true(one->source >= 2 || !s->span || with[one->source] >> reader & 1);
        ckpt_plan_span(p, group, reader, &lo, &hi);
        assert_true(lo <= one->at && (!s->span || one->at + one->len <= hi));
    }
    for (uint32_t i = 0; i < g->n; i++) {
        ckpt_plan_span(p, group, i, &lo, &hi);
        longest = ckpt_max_u64(longest, hi - lo);
    }
    for (uint32_t k = 0; k < 2; k++)
        most = ckpt_max_u64(most, bytes[k] / (uint64_t)__builtin_popcountll(with[k]));
    most = ckpt_max_u64(most,
                        (bytes[0] + bytes[1]) / (uint64_t)__builtin_popcountll(with[0] | with[1]));
    most = ckpt_max_u64(most, s->len / g->n);
    assert_true(!s->span || longest <= most + most / 50 + 4 * unit);
    assert_int_equal(bytes[0] + bytes[1] + other, s->len);
}

TEST(plan, every_wanted_element_arrives_once)
{
    uint64_t rng = 12345;
    int chosen = 0; /* groups whose readers were chosen by what they have */

    for (int round = 0; round < ROUNDS; round++) {
        struct job j;
        make_job(&j, &rng);
        for (uint32_t r = 0; r < j.nrank; r++) {
            check_delivery(j.plan[r]);
            check_members(&j, j.plan[r]);
            check_agreement(&j, j.plan[r]);
            check_sizes(j.plan[r]);
            check_chunks(j.plan[r]);
        }
        for (uint32_t r = 0; r < j.nrank && j.sharing.holders; r++)
            for (uint32_t g = 0; g < j.plan[r]->groups.len; g++)
                if (j.plan[r]->groups.ptr[g].n > 1) {
                    check_readers(&j, j.plan[r], g);
                    chosen += j.plan[r]->stream[g].span != NULL;
                }
        check_unique(&j);
        check_claims(&j);
        free_job(&j);
    }
    CHECK(chosen > ROUNDS);
}

TEST(wants, tables_travel_as_bytes)
{
    uint64_t rng = 99;
    int same = 0;

    for (int round = 0; round < 100; round++) {
        struct ckpt_err err = {0};
        struct ckpt_catalog *cat = small_checkpoint(&rng);
        struct ckpt_wants w = {0}, other, back;
        struct ckpt_table text, again;
        random_table(&w, cat, 6, &rng);
        CHECK_OK(ckpt_wants_dump(&w, cat, &text, &err));
        CHECK_OK(ckpt_wants_parse(text.data, text.len, cat, 6, NULL, &back, &err));
        CHECK_OK(ckpt_wants_dump(&back, cat, &again, &err));
        CHECK(text.form == again.form);
        CHECK(text.len == again.len && memcmp(text.data, again.data, text.len) == 0);
        ckpt_wants_release(&back);
        free(again.data);
        other_boxes(&other, &w, cat, &rng); /* which have the same form, and travel alone */
        CHECK_OK(ckpt_wants_dump(&other, cat, &again, &err));
        if (text.form == again.form && memcmp(text.data, again.data, text.form) == 0) {
            same++;
            CHECK_OK(ckpt_wants_parse(again.data + again.form, again.len - again.form, cat, 6, &w,
                                      &back, &err));
            CHECK(back.entries.ptr == w.entries.ptr);
            CHECK(back.boxes.len == other.boxes.len &&
                  memcmp(back.boxes.ptr, other.boxes.ptr, back.boxes.len * sizeof(uint64_t)) == 0);
            ckpt_wants_release(&back);
        }
        ckpt_wants_release(&other);
        for (int lie = 0; lie < 200; lie++) { /* broken tables are refused, or harmless */
            unsigned char *bad = malloc(text.len + 1);
            size_t cut = random_range(&rng, 0, 4) ? text.len : random_range(&rng, 0, text.len);
            struct ckpt_err ignored = {0};
            memcpy(bad, text.data, text.len);
            bad[random_range(&rng, 0, text.len)] ^= (unsigned char)(1u << random_range(&rng, 0, 8));
            if (ckpt_wants_parse(bad, cut, cat, 6, NULL, &back, &ignored) == 0) {
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
        free(text.data);
        free(again.data);
        ckpt_wants_release(&w);
        ckpt_catalog_free(cat);
    }
    CHECK(same > 50);
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
    add_source(cat, false);
    add_tensor(cat, 0, &off, 1, dim);
    struct ckpt_spec spec = {all_ranks(&w, 1, 4), 1, {{0, 1}}};
    struct ckpt_want e = {0, ckpt_wants_spec(&w, &spec, &err)};
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
    CHECK_EQ(ckpt_cost_choose(&c, 0), CKPT_READERS_EACH);
}

/* 8 ranks of a node want all of a model: as two groups that share, as eight that don't. */
TEST(cost, groups_that_share_read_once_each)
{
    const uint64_t model = 64000000000;
    struct ckpt_cost_input in = {8, 1, model, 8 * model, 8 * model, model, model, 1.0, false, true};
    struct ckpt_rates r = {0};
    struct ckpt_cost all, two, none;

    ckpt_rates_assume(&r, true);
    ckpt_cost_estimate(&in, &r, &all);
    in.shared_unique = in.node_shared_unique = 2 * model;
    ckpt_cost_estimate(&in, &r, &two);
    in.shared_unique = in.node_shared_unique = 8 * model;
    ckpt_cost_estimate(&in, &r, &none);
    CHECK(all.once < two.once && two.once < none.once);
    CHECK(all.each == two.each && two.each == none.each);
    CHECK_EQ(ckpt_cost_choose(&none, 0), CKPT_READERS_EACH);
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
    CHECK_EQ(ckpt_cost_choose(&c, 0), CKPT_READERS_EACH);
    in.needed = in.node_needed = 8 * model;
    ckpt_cost_estimate(&in, &r, &c);
    CHECK(ckpt_cost_choose(&c, 0) != CKPT_READERS_EACH);
    in.node_needed = model + model / 100; /* norms: not worth an exchange of all the rest */
    ckpt_cost_estimate(&in, &r, &c);
    CHECK_EQ(ckpt_cost_choose(&c, 0), CKPT_READERS_EACH);
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
    CHECK_EQ(ckpt_cost_choose(&c, 0), CKPT_READERS_ONCE);
    CHECK(c.each > 120 && c.each < 140);
    CHECK(c.once < 10);
}

/* A byte that several ranks of a node want enters the node once, and what one rank alone wants is
 * sent to nobody. */
TEST(cost, only_what_others_want_is_sent)
{
    const uint64_t model = 800000000000;
    struct ckpt_cost_input in = {64, 8, model, 64 * model, 8 * model, model, 8 * model, 0, false};
    const struct ckpt_rates slow_network = {1e12, 0, 1e12, 1e12, 1e12, 1e9};
    const struct ckpt_rates slow_links = {1e12, 0, 1e12, 1e12, 1e9, 1e12};
    struct ckpt_cost c;

    ckpt_cost_estimate(&in, &slow_network, &c); /* 64 replicas: 7/8 of the model at 1 GB/s */
    CHECK(c.once > 699 && c.once < 701);
    ckpt_cost_estimate(&in, &slow_links, &c); /* 8 links: 7 ranks get the model */
    CHECK(c.once > 700 && c.once < 710);
    in.needed = in.sum_node_unique = model; /* as with FSDP */
    in.node_needed = in.node_unique = model / 8;
    ckpt_cost_estimate(&in, &slow_network, &c);
    CHECK(c.once < 1);
    ckpt_cost_estimate(&in, &slow_links, &c);
    CHECK(c.once < 1 && c.node < 1);
}

/* Plan to read all of one tensor of so many elements of two bytes. */
static int plan_one(uint64_t numel, uint64_t unit, struct ckpt_err *err)
{
    const struct ckpt_plan_sizes sizes = {
        .unit = unit, .slice = CKPT_UNIT_ALIGN, .window = 1 << 20, .chunk = unit};
    const struct ckpt_sharing sharing = {CKPT_READERS_EACH, (const uint32_t[]){0}, NULL};
    struct ckpt_wants *table = calloc(1, sizeof *table);
    uint32_t *class_of = calloc(1, sizeof *class_of);
    struct ckpt_job_wants wants = {0};
    struct ckpt_plan *plan = NULL;
    struct ckpt_catalog *cat;
    uint64_t off = 0;

    if (ckpt_catalog_new(&cat, err) < 0)
        return -1;
    add_source(cat, false);
    add_tensor(cat, 0, &off, 1, &numel);
    if (ckpt_wants_add(table, cat, 0, CKPT_NONE, NULL, err) < 0 ||
        ckpt_job_wants_init(&wants, cat, 1, class_of, table, 1, err) < 0)
        return -1;
    const int rc = ckpt_plan_new(&wants, 0, &sharing, false, &sizes, &plan, err);
    ckpt_plan_free(plan);
    ckpt_job_wants_release(&wants);
    ckpt_catalog_free(cat);
    return rc;
}

TEST(plan, parts_that_are_too_large_or_too_many_are_refused)
{
    const uint64_t gib = UINT64_C(1) << 30;
    struct ckpt_err err = {0};

    CHECK_OK(plan_one(2 * gib, gib, &err));
    CHECK_FAILS(plan_one(3 * gib, 8 * gib, &err), CKPT_LIMIT,
                "tensor 't0' would be read in parts of 4 GiB or more");
    CHECK_FAILS(plan_one(gib, 2, &err), CKPT_LIMIT,
                "tensor 't0' would be read in too many small parts");
}

TESTS(T(plan, parts_that_are_too_large_or_too_many_are_refused),
      T(plan, every_wanted_element_arrives_once), T(wants, tables_travel_as_bytes),
      T(wants, are_cut_as_torch_chunks), T(cost, one_node_with_a_hot_cache_reads_each),
      T(cost, devices_of_one_node_share_what_all_want), T(cost, replicas_on_many_nodes_read_once),
      T(cost, groups_that_share_read_once_each), T(cost, only_what_others_want_is_sent))
