/* SPDX-License-Identifier: Apache-2.0 */
/* The files of an export, divided among processes. */
#include "test.h"

#include <stdlib.h>

#include "tool/export/spans.h"

enum { CUT = 256, MOST_ITEMS = 400, MANY = 5000 };

struct division {
    struct ckpt_item item[MANY];
    struct ckpt_items items;
    struct ckpt_spans spans;
    uint32_t parts;
};

/* Divide n files, of which file i has size[i % nsize] bytes. */
static void divide(struct division *d, const uint64_t *size, size_t nsize, size_t n, uint32_t parts)
{
    *d = (struct division){.parts = parts};
    d->items = (struct ckpt_items){.item = d->item, .n = n};
    for (size_t i = 0; i < n; i++) {
        d->item[i].size = size[i % nsize];
        d->items.bytes += d->item[i].size;
    }
    struct ckpt_err err = {0};
    assert_int_equal(ckpt_spans_divide(&d->items, CUT, parts, &d->spans, &err), 0);
}

/* The bytes of the part that gets most. Checks that the units are the files. */
static uint64_t most(const struct division *d)
{
    uint64_t *load = calloc(d->parts, sizeof *load), found = 0, at = 0;
    size_t last = 0;

    assert_non_null(load);
    for (size_t u = 0; u < d->spans.n; u++) {
        uint64_t from, to;
        const size_t item = ckpt_spans_place(&d->spans, &d->items, u, &from, &to);
        at = item == last ? at : 0;
        assert_true(u == 0 || item == last || item == last + 1);
        assert_int_equal(from, at);
        assert_true(to == d->item[item].size || to - from == CUT);
        assert_true(d->spans.owner[u] < d->parts);
        at = to;
        last = item;
        load[d->spans.owner[u]] += to - from;
        if (load[d->spans.owner[u]] > found)
            found = load[d->spans.owner[u]];
    }
    assert_int_equal(last + 1, d->items.n);
    free(load);
    return found;
}

/* How many files several parts write. */
static size_t cut_files(const struct division *d)
{
    size_t n = 0;

    for (size_t i = 0; i < d->items.n; i++)
        for (size_t u = d->spans.first[i] + 1; u < d->spans.first[i + 1]; u++)
            if (d->spans.owner[u] != d->spans.owner[d->spans.first[i]]) {
                n++;
                break;
            }
    return n;
}

TEST(spans, equal_files_stay_whole)
{
    struct division d;

    for (uint32_t parts = 1; parts <= 16; parts *= 2) {
        divide(&d, (const uint64_t[]){5000}, 1, 64, parts);
        CHECK_EQ(most(&d), 64 / parts * 5000);
        CHECK_EQ(cut_files(&d), 0);
        ckpt_spans_release(&d.spans);
    }
}

TEST(spans, one_part_has_everything)
{
    struct division d;

    divide(&d, (const uint64_t[]){100000, 0, 1, CUT, CUT + 1}, 5, 5, 1);
    CHECK_EQ(most(&d), d.items.bytes);
    CHECK_EQ(cut_files(&d), 0);
    CHECK_EQ(d.spans.n, 391 + 1 + 1 + 1 + 2);
    ckpt_spans_release(&d.spans);
}

TEST(spans, a_large_file_is_cut_if_a_part_would_get_too_much)
{
    struct division d;

    divide(&d, (const uint64_t[]){100 * CUT}, 1, 1, 4);
    CHECK_EQ(most(&d), 25 * CUT);
    CHECK_EQ(cut_files(&d), 1);
    ckpt_spans_release(&d.spans);
    /* of five equal files, one part of four would get two */
    divide(&d, (const uint64_t[]){40 * CUT}, 1, 5, 4);
    CHECK(most(&d) * 4 <= d.items.bytes * 6 / 5);
    CHECK_EQ(cut_files(&d), 1);
    ckpt_spans_release(&d.spans);
}

TEST(spans, files_that_cannot_be_cut_are_dealt_out_all_the_same)
{
    struct division d;

    divide(&d, (const uint64_t[]){CUT, 10, 0}, 3, 3, 8);
    CHECK_EQ(most(&d), CUT);
    ckpt_spans_release(&d.spans);
}

TEST(spans, no_part_gets_much_more_than_the_mean)
{
    struct division d;
    uint64_t size[MOST_ITEMS];

    srand(1);
    for (int round = 0; round < 200; round++) {
        const size_t n = 1 + (size_t)rand() % MOST_ITEMS;
        const uint32_t parts = 1 + (uint32_t)rand() % 64;
        for (size_t i = 0; i < n; i++)
            size[i] = (uint64_t)rand() % (rand() % 10 ? CUT : 200 * CUT);
        divide(&d, size, n, n, parts);
        const uint64_t limit = d.items.bytes * 6 / 5 / parts;
        CHECK(most(&d) <=
              (limit > d.items.bytes / parts + CUT ? limit : d.items.bytes / parts + CUT));
        ckpt_spans_release(&d.spans);
    }
}

TEST(spans, small_files_share_claims_where_there_are_thousands_whatever_the_number_of_parts)
{
    static const uint64_t size[] = {0, 1, 10, 3 * CUT, 20, 30, 1};
    struct division d, one;
    size_t claims = 0;

    divide(&one, size, sizeof size / sizeof *size, MANY, 1);
    for (size_t u = 0; u < one.spans.n; u++) {
        const size_t claim = one.spans.claim[u];
        claims += claim == u;
        CHECK_EQ(one.spans.claim[claim], claim);
    }
    CHECK(claims < MANY);
    for (uint32_t parts = 2; parts <= 64; parts *= 2) {
        divide(&d, size, sizeof size / sizeof *size, MANY, parts);
        CHECK(most(&d) * parts <= d.items.bytes * 6 / 5);
        for (size_t i = 0; i < MANY; i++)
            for (size_t u = d.spans.first[i]; u < d.spans.first[i + 1]; u++) {
                CHECK_EQ(d.spans.claim[u], one.spans.claim[u]);
                CHECK_EQ(d.spans.owner[u], d.spans.owner[d.spans.claim[u]]);
                CHECK(d.item[i].size <= CUT || d.spans.claim[u] == u);
            }
        ckpt_spans_release(&d.spans);
    }
    ckpt_spans_release(&one.spans);
    divide(&d, (const uint64_t[]){1}, 1, MOST_ITEMS, 1);
    for (size_t u = 0; u < d.spans.n; u++)
        CHECK_EQ(d.spans.claim[u], u);
    ckpt_spans_release(&d.spans);
}

TESTS(T(spans, equal_files_stay_whole), T(spans, one_part_has_everything),
      T(spans, a_large_file_is_cut_if_a_part_would_get_too_much),
      T(spans, files_that_cannot_be_cut_are_dealt_out_all_the_same),
      T(spans, no_part_gets_much_more_than_the_mean),
      T(spans, small_files_share_claims_where_there_are_thousands_whatever_the_number_of_parts))
