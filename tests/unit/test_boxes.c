/* SPDX-License-Identifier: Apache-2.0 */
/* Boxes of tensors against slices of the whole. */

#include <stdlib.h>

#include "base/ckd.h"
#include "random.h"
#include "tensor/read.h"
#include "tensor/strided.h"
#include "tensor/value.h"
#include "test.h"

enum { SIZE = 1 << 20, MOST = 6 };

static void must(bool good, const struct ckpt_err *err)
{
    if (!good)
        fail_msg("%s", err->text);
}

struct fixture {
    struct ckpt_catalog *cat;
    uint64_t used;
};

static struct fixture setup(struct ckpt_err *err)
{
    static unsigned char data[SIZE];
    struct fixture f = {0};
    struct ckpt_source *s = NULL;

    for (size_t i = 0; i < SIZE; i++)
        data[i] = (unsigned char)((i * 2654435761u) >> 13);
    if (ckpt_catalog_new(&f.cat, err) < 0 || ckpt_source_mem_new("data", data, SIZE, &s, err) < 0 ||
        ckpt_catalog_add_source(f.cat, s, err) == UINT32_MAX)
        fail_msg("%s", err->text);
    ckpt_source_unref(s);
    return f;
}

/* A tensor in a random order of source dimensions, in row chunks or column chunks of its own. */
static size_t add_random(struct fixture *f, const char *name, uint64_t *rng, enum ckpt_dtype t)
{
    struct ckpt_err err = {0};
    uint64_t dim[4], stride[4];
    uint32_t rank = (uint32_t)random_range(rng, 0, 5), order[4] = {0, 1, 2, 3};
    struct ckpt_piece_draft piece[8];
    size_t index, npiece = 0;

    for (uint32_t d = 0; d < rank; d++)
        dim[d] = 1 + random_range(rng, 0, 9);
    for (uint32_t d = 1; d < rank; d++) {
        uint32_t k = (uint32_t)random_range(rng, 0, d + 1), keep = order[d];
        order[d] = order[k];
        order[k] = keep;
    }
    uint32_t cut = rank ? (uint32_t)random_range(rng, 0, rank) : 0;
    uint64_t parts = rank ? 1 + random_range(rng, 0, 3) : 1;
    must(ckpt_catalog_add(f->cat, name, t, dim, rank, &index, &err) == 0, &err);
    for (uint64_t p = 0; p < parts; p++) {
        struct ckpt_box box = {.rank = rank};
        uint64_t size = ckpt_dtype_size(t);
        for (uint32_t d = 0; d < rank; d++)
            box.n[d] = dim[d];
        if (rank) {
            box.lo[cut] = dim[cut] * p / parts;
            box.n[cut] = dim[cut] * (p + 1) / parts - box.lo[cut];
        }
        for (uint32_t k = rank; k-- > 0;) {
            stride[order[k]] = size;
            size *= box.n[order[k]];
        }
        if (ckpt_box_numel(&box) == 0)
            continue;
        ckpt_piece_from_box(dim, &box, 0, f->used, stride, &piece[npiece++]);
        f->used += size + random_range(rng, 0, 3) * 4;
    }
    must(ckpt_catalog_set_pieces(f->cat, index, piece, npiece, &err) == 0, &err);
    return index;
}

static struct ckpt_box random_box(const struct ckpt_tensor *t, uint64_t *rng)
{
    struct ckpt_box box = {.rank = t->rank};

    for (uint32_t d = 0; d < t->rank; d++) {
        box.lo[d] = random_range(rng, 0, t->dim[d]);
        box.n[d] = 1 + random_range(rng, 0, t->dim[d] - box.lo[d]);
    }
    return box;
}

/* The box, cut out of the whole. */
static void slice(const struct ckpt_tensor *t, const unsigned char *whole,
                  const struct ckpt_box *box, unsigned char *out)
{
    const size_t esize = ckpt_dtype_size(t->dtype);
    uint64_t unit[CKPT_MAX_RANK], dense[CKPT_MAX_RANK], numel = ckpt_box_numel(box);

    ckpt_shape_strides(t->dim, t->rank, unit);
    ckpt_shape_strides(box->n, t->rank, dense);
    for (uint64_t i = 0; i < numel; i++) {
        uint64_t at = 0;
        for (uint32_t d = 0; d < t->rank; d++)
            at += (box->lo[d] + i / dense[d] % box->n[d]) * unit[d];
        memcpy(out + i * esize, whole + at * esize, esize);
    }
}

static void check_boxes(size_t n, const struct ckpt_tensor *const *t, uint64_t *rng)
{
    struct ckpt_err err = {0};
    struct ckpt_box_read read[MOST];
    const struct ckpt_box_cost cost = {random_range(rng, 0, 64), 1 + random_range(rng, 0, 4096),
                                       random_range(rng, 0, 64)};
    unsigned char *expect[MOST], *whole;

    for (size_t i = 0; i < n; i++) {
        struct ckpt_box box = random_box(t[i], rng);
        size_t len = ckpt_box_numel(&box) * ckpt_dtype_size(t[i]->dtype);
        whole = malloc(ckpt_tensor_nbytes(t[i]) + 1);
        expect[i] = malloc(len);
        must(ckpt_tensor_pread(t[i], NULL, whole, ckpt_tensor_nbytes(t[i]), 0, &err) == 0, &err);
        slice(t[i], whole, &box, expect[i]);
        free(whole);
        read[i] = (struct ckpt_box_read){t[i], box, malloc(len)};
    }
    must(ckpt_boxes_pread(NULL, read, n, &cost, &err) == 0, &err);
    for (size_t i = 0; i < n; i++) {
        size_t len = ckpt_box_numel(&read[i].box) * ckpt_dtype_size(t[i]->dtype);
        assert_memory_equal(read[i].buf, expect[i], len);
        free(read[i].buf);
        free(expect[i]);
    }
}

TEST(boxes, are_slices_of_stored_tensors)
{
    UNUSED_STATE;
    uint64_t rng = 0x9e3779b97f4a7c15ULL;

    for (int round = 0; round < 400; round++) {
        struct ckpt_err err = {0};
        struct fixture f = setup(&err);
        const struct ckpt_tensor *t[MOST];
        char name[16];
        for (int i = 0; i < MOST; i++) {
            (void)snprintf(name, sizeof name, "t%d", i);
            (void)add_random(&f, name, &rng, i % 2 ? CKPT_BF16 : CKPT_F32);
        }
        for (int i = 0; i < MOST; i++)
            t[i] = &f.cat->tensors.ptr[i];
        check_boxes(MOST, t, &rng);
        ckpt_catalog_free(f.cat);
    }
}

TEST(boxes, are_slices_of_casts)
{
    UNUSED_STATE;
    uint64_t rng = 0x9e3779b97f4a7c15ULL;

    for (int round = 0; round < 200; round++) {
        struct ckpt_err err = {0};
        struct fixture f = setup(&err);
        size_t index = add_random(&f, "t", &rng, CKPT_F32);
        must(ckpt_value_cast(f.cat, index, CKPT_BF16, &err) == 0, &err);
        const struct ckpt_tensor *t = &f.cat->tensors.ptr[index];
        check_boxes(1, &t, &rng);
        ckpt_catalog_free(f.cat);
    }
}

TEST(boxes, are_slices_of_elementwise_values)
{
    UNUSED_STATE;
    uint64_t rng = 0x9e3779b97f4a7c15ULL;

    for (int round = 0; round < 100; round++) {
        struct ckpt_err err = {0};
        struct fixture f = setup(&err);
        size_t index = add_random(&f, "t", &rng, CKPT_F32);
        must(ckpt_value_apply(f.cat, index, &ckpt_value_plus_one, 0, &err) == 0, &err);
        must(ckpt_value_cast(f.cat, index, CKPT_F16, &err) == 0, &err);
        const struct ckpt_tensor *t = &f.cat->tensors.ptr[index];
        CHECK(ckpt_tensor_stored(t)->dtype == CKPT_F32);
        check_boxes(1, &t, &rng);
        ckpt_catalog_free(f.cat);
    }
}

TEST(boxes, of_rank_one_are_ranges_of_elements)
{
    UNUSED_STATE;
    uint64_t rng = 0x9e3779b97f4a7c15ULL;
    const struct ckpt_box_cost cost = {CKPT_STRIDED_GAP, CKPT_STRIDED_BOUND, UINT64_MAX};

    for (int round = 0; round < 200; round++) {
        struct ckpt_err err = {0};
        struct fixture f = setup(&err);
        size_t index = add_random(&f, "t", &rng, CKPT_F32);
        const struct ckpt_tensor *t = &f.cat->tensors.ptr[index];
        uint64_t lo = random_range(&rng, 0, t->numel), n = random_range(&rng, 0, t->numel - lo + 1);
        uint32_t *whole = malloc(t->numel * 4), *part = malloc(n * 4 + 4), end = 0xa5a5a5a5;
        struct ckpt_box_read read = {t, {.rank = 1, .lo = {lo}, .n = {n}}, part};
        must(ckpt_tensor_pread(t, NULL, whole, t->numel * 4, 0, &err) == 0, &err);
        part[n] = end;
        must(ckpt_boxes_pread(NULL, &read, 1, &cost, &err) == 0, &err);
        CHECK(memcmp(part, whole + lo, n * 4) == 0 && part[n] == end);
        free(whole);
        free(part);
        ckpt_catalog_free(f.cat);
    }
}

/* A value that is no cast: element i is i. */
static int count_up(const struct ckpt_tensor *t, struct ckpt_reading *rd, void *buf, uint64_t lo,
                    uint64_t hi, struct ckpt_err *err)
{
    (void)t, (void)rd, (void)err;
    for (uint32_t *out = buf; lo < hi; lo++)
        *out++ = (uint32_t)lo;
    return 0;
}

TEST(boxes, are_slices_of_other_values)
{
    UNUSED_STATE;
    static const struct ckpt_value_ops ops = {.name = "count", .compute = count_up};
    static const struct ckpt_value value = {&ops, 0, NULL};
    uint64_t rng = 0x9e3779b97f4a7c15ULL;

    for (int round = 0; round < 200; round++) {
        struct ckpt_err err = {0};
        struct fixture f = setup(&err);
        size_t index = add_random(&f, "t", &rng, CKPT_F32);
        struct ckpt_tensor *t = &f.cat->tensors.ptr[index];
        const struct ckpt_tensor *shown = t;
        t->value = &value;
        t->npiece = 0;
        t->piece = NULL;
        check_boxes(1, &shown, &rng);
        ckpt_catalog_free(f.cat);
    }
}

TEST(boxes, neighbours_are_one_read)
{
    struct ckpt_err err = {0};
    struct fixture f = setup(&err);
    struct ckpt_read_stats stats = {0};
    struct ckpt_reading rd = {.stats = &stats};
    const struct ckpt_box_cost cost = {CKPT_STRIDED_GAP, CKPT_STRIDED_BOUND, UINT64_MAX};
    struct ckpt_box_read read[3];
    unsigned char buf[3][64];
    const uint64_t dim = 8, stride = 4;

    for (size_t i = 0; i < 3; i++) {
        struct ckpt_box box = {.rank = 1, .n = {8}};
        struct ckpt_piece_draft piece;
        char name[2] = {(char)('a' + i), 0};
        size_t index;
        CHECK_OK(ckpt_catalog_add(f.cat, name, CKPT_F32, &dim, 1, &index, &err));
        ckpt_piece_from_box(&dim, &box, 0, i * 32, &stride, &piece);
        CHECK_OK(ckpt_catalog_set_pieces(f.cat, index, &piece, 1, &err));
    }
    for (size_t i = 0; i < 3; i++)
        read[i] = (struct ckpt_box_read){&f.cat->tensors.ptr[i], {.rank = 1, .n = {8}}, buf[i]};
    CHECK_OK(ckpt_boxes_pread(&rd, read, 3, &cost, &err));
    CHECK_EQ(stats.source_reads, 1);
    CHECK_EQ(stats.source_bytes, 96);
    ckpt_catalog_free(f.cat);
}

/* Two tensors whose rows alternate: the holes of one are the other. */
TEST(boxes, what_lies_in_holes_is_not_read_twice)
{
    struct ckpt_err err = {0};
    struct fixture f = setup(&err);
    struct ckpt_read_stats stats = {0};
    struct ckpt_reading rd = {.stats = &stats};
    const struct ckpt_box_cost cost = {CKPT_STRIDED_GAP, CKPT_STRIDED_BOUND, 4096};
    struct ckpt_box_read read[2];
    unsigned char buf[2][64];
    const uint64_t dim[2] = {4, 4}, stride[2] = {32, 4};

    for (size_t i = 0; i < 2; i++) {
        struct ckpt_box box = {.rank = 2, .n = {4, 4}};
        struct ckpt_piece_draft piece;
        char name[2] = {(char)('a' + i), 0};
        size_t index;
        CHECK_OK(ckpt_catalog_add(f.cat, name, CKPT_F32, dim, 2, &index, &err));
        ckpt_piece_from_box(dim, &box, 0, i * 16, stride, &piece);
        CHECK_OK(ckpt_catalog_set_pieces(f.cat, index, &piece, 1, &err));
    }
    for (size_t i = 0; i < 2; i++)
        read[i] = (struct ckpt_box_read){&f.cat->tensors.ptr[i], {.rank = 2, .n = {4, 4}}, buf[i]};
    CHECK_OK(ckpt_boxes_pread(&rd, read, 2, &cost, &err));
    CHECK_EQ(stats.source_bytes, 128);
    ckpt_catalog_free(f.cat);
}

TESTS(T(boxes, what_lies_in_holes_is_not_read_twice), T(boxes, are_slices_of_stored_tensors),
      T(boxes, are_slices_of_casts), T(boxes, are_slices_of_elementwise_values),
      T(boxes, of_rank_one_are_ranges_of_elements), T(boxes, are_slices_of_other_values),
      T(boxes, neighbours_are_one_read))
