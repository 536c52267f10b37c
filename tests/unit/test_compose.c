/* SPDX-License-Identifier: Apache-2.0 */
/* Pieces taken apart into boxes and folded again: the same elements, in as few pieces. */
#include "recipe/apply/instance.h"
#include "tensor/catalog.h"

#include "test.h"

struct boxes {
    struct ckpt_piece_draft at[512];
    size_t n;
};

static int keep(void *ctx, const struct ckpt_piece *box, struct ckpt_err *err)
{
    struct boxes *b = ctx;
    struct ckpt_piece_draft *p = &b->at[b->n++];

    (void)err;
    *p = (struct ckpt_piece_draft){box->dst, box->src, box->naxis, box->source, {{0}}};
    memcpy(p->axis, box->axis, box->naxis * sizeof *p->axis);
    return b->n < 512 ? 0 : -1;
}

/* The source's byte of each element that the pieces have; each element once. */
static void spread(void **state_, const struct ckpt_piece_draft *p, size_t n, int64_t *byte,
                   size_t numel)
{
    for (size_t i = 0; i < numel; i++)
        byte[i] = -1;
    for (size_t k = 0; k < n; k++) {
        uint64_t total = 1;
        for (uint32_t a = 0; a < p[k].naxis; a++)
            total *= p[k].axis[a].n;
        for (uint64_t i = 0; i < total; i++) {
            uint64_t dst = p[k].dst, src = p[k].src, left = i;
            for (uint32_t a = p[k].naxis; a-- > 0; left /= p[k].axis[a].n) {
                dst += left % p[k].axis[a].n * p[k].axis[a].dst;
                src += left % p[k].axis[a].n * p[k].axis[a].src;
            }
            CHECK(dst < numel && byte[dst] == -1);
            byte[dst] = (int64_t)src;
        }
    }
}

static void check(void **state_, const struct ckpt_piece_draft *d, const uint64_t *dim,
                  uint32_t rank, size_t nbox, size_t nfold)
{
    const struct ckpt_piece piece = {d->dst, d->src, d->axis, d->naxis, d->source};
    const struct ckpt_tensor t = {.name = "t", .dim = dim, .rank = (uint8_t)rank};
    static int64_t want[4096], got[4096];
    static struct boxes b;
    struct ckpt_err err = {0};
    uint64_t numel;
    struct ckpt_box box;

    b.n = 0;
    CHECK(ckpt_shape_numel(dim, rank, &numel) && numel <= 4096);
    CHECK_OK(ckpt_compose_boxes(&t, &piece, keep, &b, &err));
    CHECK_EQ(b.n, nbox);
    for (size_t i = 0; i < b.n; i++) {
        const struct ckpt_piece p = {b.at[i].dst, b.at[i].src, b.at[i].axis, b.at[i].naxis, 0};
        CHECK(ckpt_piece_box(&p, dim, rank, &box));
    }
    spread(state_, d, 1, want, numel);
    b.n = ckpt_compose_fold(b.at, b.n, dim, rank);
    CHECK_EQ(b.n, nfold);
    spread(state_, b.at, b.n, got, numel);
    CHECK(memcmp(want, got, numel * sizeof *want) == 0);
}

/* Rows (heads, pairs, 2) of a source as (heads, 2, pairs) of the tensor, and other ones. */
TEST(compose, pieces_of_several_axes_are_boxes_and_come_back_as_one)
{
    static const uint64_t rows[] = {48, 5}, stack[] = {3, 4, 6};
    const struct ckpt_piece_draft rope = {
        .naxis = 4, .axis = {{4, 60, 240}, {2, 30, 20}, {6, 5, 40}, {5, 1, 4}}};
    const struct ckpt_piece_draft group = {
        .dst = 0, .src = 7, .naxis = 3, .axis = {{4, 60, 500}, {8, 5, 20}, {5, 1, 4}}};
    const struct ckpt_piece_draft turned = {
        .src = 3, .naxis = 3, .axis = {{3, 24, 1000}, {4, 6, 4}, {6, 1, 16}}};

    check(state_, &rope, rows, 2, 8, 1);
    check(state_, &group, rows, 2, 4, 1);
    check(state_, &turned, stack, 3, 1, 1);
}

/* Fold the queries (so many rows), keys and values (two each) of three groups, each from a piece of
 * its own; the values lie so many bytes behind the keys. Returns the number of pieces. */
static size_t fold_groups(void **state_, uint64_t nquery, uint64_t gap)
{
    const uint64_t rows = nquery + 4, dim[] = {3 * rows, 5};
    struct ckpt_piece_draft p[9];
    static int64_t want[300], got[300];

    for (uint64_t g = 0; g < 3; g++) {
        p[g] = (struct ckpt_piece_draft){.dst = 5 * rows * g,
                                         .src = 20 * rows * g,
                                         .naxis = 2,
                                         .axis = {{nquery, 5, 20}, {5, 1, 4}}};
        for (uint64_t k = 0; k < 2; k++)
            p[3 + 3 * k + g] =
                (struct ckpt_piece_draft){.dst = 5 * (rows * g + nquery + 2 * k),
                                          .src = 20 * (rows * g + nquery + 2 * k) + gap * k,
                                          .naxis = 2,
                                          .axis = {{2, 5, 20}, {5, 1, 4}}};
    }
    spread(state_, p, 9, want, 15 * rows);
    const size_t n = ckpt_compose_fold(p, 9, dim, 2);
    spread(state_, p, n, got, 15 * rows);
    CHECK(memcmp(want, got, 15 * rows * sizeof *want) == 0);
    return n;
}

TEST(compose, terms_that_follow_each_other_are_one_piece)
{
    CHECK_EQ(fold_groups(state_, 4, 0), 1);
    CHECK_EQ(fold_groups(state_, 6, 0), 1);
    CHECK_EQ(fold_groups(state_, 16, 0), 1);
    /* what does not follow in the source stays apart: in each group, the values */
    CHECK_EQ(fold_groups(state_, 6, 4000), 6);
}

/* A run of rows that would go on in the next plane is not folded across it. */
TEST(compose, no_axis_crosses_a_dimension)
{
    static const uint64_t dim[] = {2, 4, 3};
    struct ckpt_piece_draft p[4];
    static int64_t want[24], got[24];

    for (uint64_t i = 0; i < 4; i++)
        p[i] = (struct ckpt_piece_draft){
            .dst = 6 + 3 * i, .src = 12 * i, .naxis = 1, .axis = {{3, 1, 4}}};
    spread(state_, p, 4, want, 24);
    const size_t n = ckpt_compose_fold(p, 4, dim, 3);
    spread(state_, p, n, got, 24);
    CHECK(memcmp(want, got, sizeof want) == 0);
    for (size_t i = 0; i < n; i++)
        CHECK(p[i].axis[0].n == 1 || p[i].axis[0].dst < 3 ||
              p[i].dst / 12 == (p[i].dst + (p[i].axis[0].n - 1) * p[i].axis[0].dst) / 12);
}

TEST(compose, what_is_no_set_of_boxes_is_refused)
{
    static const uint64_t dim[] = {4, 4};
    static const struct ckpt_axis outside[] = {{2, 16, 4}}, many[] = {{1u << 21, 2, 4}};
    static const uint64_t large[] = {1u << 23};
    const struct ckpt_piece a = {0, 0, outside, 1, 0}, b = {0, 0, many, 1, 0};
    const struct ckpt_tensor t = {.name = "t", .dim = dim, .rank = 2},
                             u = {.name = "u", .dim = large, .rank = 1};
    static struct boxes kept;
    struct ckpt_err err = {0};

    CHECK_FAILS(ckpt_compose_boxes(&t, &a, keep, &kept, &err), CKPT_UNSUPPORTED, "'t'");
    CHECK_FAILS(ckpt_compose_boxes(&u, &b, keep, &kept, &err), CKPT_UNSUPPORTED, "boxes");
}

TESTS(T(compose, pieces_of_several_axes_are_boxes_and_come_back_as_one),
      T(compose, terms_that_follow_each_other_are_one_piece),
      T(compose, no_axis_crosses_a_dimension), T(compose, what_is_no_set_of_boxes_is_refused), )
