/* SPDX-License-Identifier: Apache-2.0 */
/* Boxes: intersection, coverage, and the clipping of mixed-radix axes against brute force. */
#include "test.h"

#include <stdlib.h>

#include "random.h"
#include "tensor/box.h"

static struct ckpt_box box2(uint64_t r0, uint64_t r1, uint64_t c0, uint64_t c1)
{
    return (struct ckpt_box){.rank = 2, .lo = {r0, c0}, .n = {r1 - r0, c1 - c0}};
}

TEST(box, disjoint_boxes_do_not_intersect)
{
    struct ckpt_box out, a = box2(0, 2, 0, 2), b = box2(2, 4, 0, 2);
    CHECK(!ckpt_box_intersect(&a, &b, &out));
}

TEST(box, the_intersection_is_the_common_part)
{
    struct ckpt_box out, a = box2(0, 3, 1, 5), b = box2(2, 4, 0, 2);
    CHECK(ckpt_box_intersect(&a, &b, &out));
    CHECK_EQ(out.lo[0], 2);
    CHECK_EQ(out.n[0], 1);
    CHECK_EQ(out.lo[1], 1);
    CHECK_EQ(out.n[1], 1);
}

TEST(box, a_box_past_the_end_is_not_within_even_if_its_end_wraps)
{
    uint64_t dim[] = {4, 4};
    struct ckpt_box b = box2(0, 4, 1, 4);
    CHECK(ckpt_box_within(&b, dim, 2));
    b.n[1] = UINT64_MAX;
    CHECK(!ckpt_box_within(&b, dim, 2));
}

TEST(box, numel_overflow_is_noticed_but_not_where_a_dimension_is_zero)
{
    uint64_t big[] = {1ULL << 40, 1ULL << 40}, none[] = {1ULL << 40, 1ULL << 40, 0}, n;
    CHECK(!ckpt_shape_numel(big, 2, &n));
    CHECK(ckpt_shape_numel(none, 3, &n));
    CHECK_EQ(n, 0);
}

/* ---- coverage ---- */

TEST(cover, a_grid_covers)
{
    struct ckpt_err err = {0};
    uint64_t dim[] = {6, 8};
    struct ckpt_box b[12];
    size_t bad;
    for (unsigned i = 0; i < 12; i++)
        b[i] = box2(i / 4 * 2, i / 4 * 2 + 2, i % 4 * 2, i % 4 * 2 + 2);
    CHECK_OK(ckpt_boxes_cover(dim, 2, b, 12, &bad, &err));
}

TEST(cover, an_irregular_tiling_that_no_cut_separates_covers)
{
    /* the pinwheel: four arms around a centre */
    struct ckpt_box b[] = {box2(0, 1, 0, 2), box2(0, 2, 2, 3), box2(2, 3, 1, 3), box2(1, 3, 0, 1),
                           box2(1, 2, 1, 2)};
    struct ckpt_err err = {0};
    uint64_t dim[] = {3, 3};
    size_t bad;
    CHECK_OK(ckpt_boxes_cover(dim, 2, b, 5, &bad, &err));
    b[4] = box2(1, 2, 0, 1);
    CHECK_FAILS(ckpt_boxes_cover(dim, 2, b, 5, &bad, &err), CKPT_CONFLICT, "same elements");
    CHECK_EQ(bad, 4);
}

TEST(cover, a_gap_is_named)
{
    struct ckpt_box b[] = {box2(0, 16, 0, 8), box2(32, 64, 0, 8)};
    struct ckpt_err err = {0};
    uint64_t dim[] = {64, 8};
    size_t bad;
    CHECK_FAILS(ckpt_boxes_cover(dim, 2, b, 2, &bad, &err), CKPT_MISSING, "rows 16..32 of 64");
    CHECK_EQ(bad, SIZE_MAX);
}

TEST(cover, a_gap_that_no_projection_shows_is_counted)
{
    struct ckpt_box b[] = {box2(0, 1, 0, 1), box2(1, 2, 1, 2)};
    struct ckpt_err err = {0};
    uint64_t dim[] = {2, 2};
    size_t bad;
    CHECK_FAILS(ckpt_boxes_cover(dim, 2, b, 2, &bad, &err), CKPT_MISSING, "2 of 4 elements");
}

TEST(cover, scalars_and_empty_tensors)
{
    struct ckpt_box none = {.rank = 0};
    struct ckpt_box two[2] = {{.rank = 0}, {.rank = 0}};
    struct ckpt_err err = {0};
    uint64_t zero[] = {0, 5};
    size_t bad;
    CHECK_OK(ckpt_boxes_cover(NULL, 0, &none, 1, &bad, &err));
    CHECK_FAILS(ckpt_boxes_cover(NULL, 0, NULL, 0, &bad, &err), CKPT_MISSING, "");
    CHECK_FAILS(ckpt_boxes_cover(NULL, 0, two, 2, &bad, &err), CKPT_CONFLICT, "");
    CHECK_OK((memset(&err, 0, sizeof err), ckpt_boxes_cover(zero, 2, NULL, 0, &bad, &err)));
}

TEST(cover, random_tilings_cover_and_with_a_box_less_or_twice_they_do_not)
{
    uint64_t rng = 7;
    for (int round = 0; round < 300; round++) {
        uint64_t dim[3] = {random_range(&rng, 1, 9), random_range(&rng, 1, 9),
                           random_range(&rng, 1, 9)};
        struct ckpt_box b[1000] = {{.rank = 3, .n = {dim[0], dim[1], dim[2]}}};
        struct ckpt_err err = {0};
        size_t n = 1, bad;
        for (int cut = 0; cut < 20; cut++) { /* split a random box at a random place */
            size_t i = random_range(&rng, 0, n);
            unsigned d = (unsigned)random_range(&rng, 0, 3);
            if (b[i].n[d] < 2)
                continue;
            uint64_t at = random_range(&rng, 1, b[i].n[d]);
            b[n] = b[i];
            b[i].n[d] = at;
            b[n].lo[d] += at;
            b[n++].n[d] -= at;
        }
        CHECK_OK(ckpt_boxes_cover(dim, 3, b, n, &bad, &err));
        CHECK_FAILS(ckpt_boxes_cover(dim, 3, b + 1, n - 1, &bad, &err), CKPT_MISSING, "");
        b[n] = b[random_range(&rng, 0, n)];
        CHECK_FAILS(ckpt_boxes_cover(dim, 3, b, n + 1, &bad, &err), CKPT_CONFLICT, "");
    }
}

/* ---- axes ---- */

static uint64_t width(const uint64_t *n, const uint64_t *stride, uint32_t k)
{
    uint64_t w = 1;
    for (uint32_t j = 0; j < k; j++)
        w += (n[j] - 1) * stride[j];
    return w;
}

/* Count how often each sum occurs in the spans; must be once if inside [lo, hi), else never. */
static bool spans_are_right(const uint64_t *n, const uint64_t *stride, uint32_t k, uint64_t lo,
                            uint64_t hi)
{
    struct ckpt_span span[CKPT_MAX_SPANS];
    size_t nspan = ckpt_axes_clip(n, stride, k, lo, hi, span);
    uint64_t total = 1, seen = 0, expected = 0, last = 0;
    if (nspan > (k ? 2 * k - 1 : 1))
        return false;
    for (uint32_t j = 0; j < k; j++)
        total *= n[j];
    for (uint64_t i = 0; i < total; i++) {
        uint64_t rest = i, sum = 0, index[CKPT_MAX_AXES];
        for (uint32_t j = k; j-- > 0; rest /= n[j]) {
            index[j] = rest % n[j];
            sum += index[j] * stride[j];
        }
        expected += sum >= lo && sum < hi;
        for (size_t s = 0; s < nspan; s++) {
            bool in = true;
            for (uint32_t j = 0; j < k; j++)
                in &= index[j] >= span[s].lo[j] && index[j] - span[s].lo[j] < span[s].n[j];
            if (!in)
                continue;
            seen++;
            if (sum < lo || sum >= hi || (seen > 1 && sum <= last))
                return false;
            last = sum;
        }
    }
    return seen == expected;
}

TEST(axes, clipping_equals_brute_force)
{
    uint64_t rng = 1;
    for (int round = 0; round < 20000; round++) {
        uint32_t k = (uint32_t)random_range(&rng, 0, 5);
        uint64_t n[5], stride[5], unit = random_range(&rng, 1, 3);
        for (uint32_t j = k; j-- > 0;) {
            n[j] = random_range(&rng, 1, 5);
            stride[j] = unit;
            unit = unit * n[j] + (random_range(&rng, 0, 2) ? 0 : random_range(&rng, 0, 4));
        }
        uint64_t w = width(n, stride, k) + 2;
        uint64_t a = random_range(&rng, 0, w), b = random_range(&rng, 0, w);
        CHECK(spans_are_right(n, stride, k, a, b));
    }
}

TEST(axes, huge_extents_do_not_overflow)
{
    uint64_t n[] = {1ULL << 20, 1ULL << 20, 1ULL << 20}, stride[] = {1ULL << 40, 1ULL << 20, 1};
    struct ckpt_span span[CKPT_MAX_SPANS];
    CHECK_EQ(ckpt_axes_clip(n, stride, 3, 1, (1ULL << 60) - 1, span), 5);
    CHECK_EQ(ckpt_axes_clip(n, stride, 3, 0, UINT64_MAX, span), 1);
}

TESTS(T(box, disjoint_boxes_do_not_intersect), T(box, the_intersection_is_the_common_part),
      T(box, a_box_past_the_end_is_not_within_even_if_its_end_wraps),
      T(box, numel_overflow_is_noticed_but_not_where_a_dimension_is_zero), T(cover, a_grid_covers),
      T(cover, an_irregular_tiling_that_no_cut_separates_covers), T(cover, a_gap_is_named),
      T(cover, a_gap_that_no_projection_shows_is_counted), T(cover, scalars_and_empty_tensors),
      T(cover, random_tilings_cover_and_with_a_box_less_or_twice_they_do_not),
      T(axes, clipping_equals_brute_force), T(axes, huge_extents_do_not_overflow))
