/* SPDX-License-Identifier: Apache-2.0 */
/* Slices of tensors: the same elements as in the tensor, from as few pieces. */
#include "tensor/slice.h"

#include "small_catalog.h"

/* The source's byte of each element. */
static void bytes_of(void **state_, const struct ckpt_tensor *t, int64_t *byte)
{
    for (uint64_t i = 0; i < t->numel; i++)
        byte[i] = -1;
    for (size_t k = 0; k < t->npiece; k++) {
        const struct ckpt_piece *p = &t->piece[k];
        for (uint64_t i = 0; i < ckpt_piece_numel(p); i++) {
            uint64_t dst = p->dst, src = p->src, left = i;
            for (uint32_t a = p->naxis; a-- > 0; left /= p->axis[a].n) {
                dst += left % p->axis[a].n * p->axis[a].dst;
                src += left % p->axis[a].n * p->axis[a].src;
            }
            CHECK(dst < t->numel && byte[dst] == -1);
            byte[dst] = (int64_t)src;
        }
    }
}

static void check(void **state_, const struct ckpt_piece_draft *d, size_t n, const uint64_t *dim,
                  uint32_t rank, uint32_t along, const struct ckpt_interval *part, size_t npart,
                  size_t npiece)
{
    static int64_t all[4096], got[4096];
    struct small_catalog c = small_catalog_new();
    struct ckpt_err err = {0};
    struct ckpt_tensor s;
    uint64_t before = 1, after = 1, at = 0;
    size_t i;

    CHECK_OK(ckpt_catalog_add(c.cat, "t", CKPT_F32, dim, rank, &i, &err));
    CHECK_OK(ckpt_catalog_set_pieces(c.cat, i, d, n, &err));
    CHECK_OK(ckpt_tensor_slice(c.cat, &c.cat->tensors.ptr[0], along, part, npart, &s, &err));
    CHECK_EQ(s.npiece, npiece);
    bytes_of(state_, &c.cat->tensors.ptr[0], all);
    bytes_of(state_, &s, got);
    for (uint32_t k = 0; k < rank; k++)
        *(k < along ? &before : &after) *= k == along ? 1 : dim[k];
    for (uint64_t o = 0; o < before; o++)
        for (size_t p = 0; p < npart; p++)
            for (uint64_t k = part[p].lo; k < part[p].lo + part[p].n; k++)
                for (uint64_t x = 0; x < after; x++)
                    CHECK_EQ(got[at++], all[(o * dim[along] + k) * after + x]);
    CHECK_EQ(s.numel, at);
    small_catalog_free(&c);
}

/* A row-parallel matrix of two shards, at another number of ranks. */
TEST(slice, columns_of_boxes)
{
    static const uint64_t dim[] = {5, 12};
    static const struct ckpt_piece_draft d[] = {
        {.dst = 0, .src = 0, .naxis = 2, .axis = {{5, 12, 24}, {6, 1, 4}}},
        {.dst = 6, .src = 200, .naxis = 2, .axis = {{5, 12, 24}, {6, 1, 4}}}};
    static const struct ckpt_interval first = {0, 4}, across = {4, 4}, none = {3, 0},
                                      two[] = {{1, 2}, {9, 3}}, all = {0, 12};

    check(state_, d, 2, dim, 2, 1, &first, 1, 1);
    check(state_, d, 2, dim, 2, 1, &across, 1, 2);
    check(state_, d, 2, dim, 2, 1, two, 2, 2);
    check(state_, d, 2, dim, 2, 1, &all, 1, 2);
    check(state_, d, 2, dim, 2, 1, &none, 1, 0);
    check(state_, d, 2, dim, 2, 0, &first, 1, 2);
}

/* Pairs of a rotary embedding, query groups, a transpose. */
TEST(slice, of_pieces_with_several_axes)
{
    static const uint64_t rows[] = {48, 5}, stack[] = {3, 4, 6}, thin[] = {1, 8, 1};
    static const struct ckpt_piece_draft rope = {
        .naxis = 4, .axis = {{4, 60, 240}, {2, 30, 20}, {6, 5, 40}, {5, 1, 4}}};
    static const struct ckpt_piece_draft turned = {
        .src = 3, .naxis = 3, .axis = {{3, 24, 1000}, {4, 6, 4}, {6, 1, 16}}};
    static const struct ckpt_piece_draft line = {.naxis = 3,
                                                 .axis = {{1, 8, 32}, {8, 1, 4}, {1, 1, 4}}};
    static const struct ckpt_interval half = {24, 24}, odd = {5, 22}, two = {1, 2};

    check(state_, &rope, 1, rows, 2, 0, &half, 1, 1);
    check(state_, &rope, 1, rows, 2, 0, &odd, 1, 4);
    check(state_, &rope, 1, rows, 2, 1, &two, 1, 1);
    check(state_, &turned, 1, stack, 3, 1, &two, 1, 1);
    check(state_, &turned, 1, stack, 3, 2, &two, 1, 1);
    check(state_, &line, 1, thin, 3, 1, &two, 1, 1);
}

TESTS(T(slice, columns_of_boxes), T(slice, of_pieces_with_several_axes), )
