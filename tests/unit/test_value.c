/* SPDX-License-Identifier: Apache-2.0 */
#include "tensor/value.h"

#include "small_catalog.h"
#include "tensor/read.h"

/* Bytes [off, off+len) of tensor i are those of the whole cast. */
static bool reads(const struct small_catalog *c, size_t i, const unsigned char *whole, size_t len,
                  uint64_t off)
{
    static unsigned char buf[SMALL_SOURCE];
    struct ckpt_err err = {0};

    return ckpt_tensor_pread(&c->cat->tensors.ptr[i], NULL, buf, len, off, &err) == 0 &&
           memcmp(buf, whole + off, len) == 0;
}

TEST(value, a_cast_tensor_reads_at_any_byte)
{
    struct small_catalog c = small_catalog_new();
    static unsigned char src[SMALL_SOURCE], want[SMALL_SOURCE];
    struct ckpt_err err = {0};

    (void)small_add(&c, "before", CKPT_U8, 3, 0);
    size_t i = small_add(&c, "w", CKPT_F32, 1000, 5);
    for (size_t k = 0; k < 4000; k++)
        src[k] = small_byte(3 + k);
    ckpt_dtype_cast(want, CKPT_BF16, src, CKPT_F32, 1000);
    CHECK_OK(ckpt_value_cast(c.cat, i, CKPT_BF16, &err));
    const struct ckpt_tensor *t = &c.cat->tensors.ptr[i];
    CHECK(t->dtype == CKPT_BF16 && t->value && t->npiece == 0 && t->block == 5);
    CHECK_STR(t->value->ops->name, "cast");
    CHECK_EQ(ckpt_tensor_nbytes(t), 2000);
    CHECK(reads(&c, i, want, 2000, 0));
    CHECK(reads(&c, i, want, 0, 2000));
    for (uint64_t off = 0; off < 12; off++)
        for (size_t len = 0; len < 12; len++)
            CHECK(reads(&c, i, want, len, off));
    CHECK(reads(&c, i, want, 1, 1999));
    small_catalog_free(&c);
}

/* More than one chunk of the operand: a piece with stride 0 makes a large tensor of few bytes. */
TEST(value, a_large_cast_is_read_in_chunks)
{
    struct small_catalog c = small_catalog_new();
    const uint64_t dim[2] = {3, 130000}, stride[2] = {0, 0};
    struct ckpt_box box = {.rank = 2, .n = {3, 130000}};
    struct ckpt_piece_draft p;
    struct ckpt_err err = {0};
    size_t i;

    CHECK_OK(ckpt_catalog_add(c.cat, "w", CKPT_BF16, dim, 2, &i, &err));
    ckpt_piece_from_box(dim, &box, 0, 8, stride, &p);
    CHECK_OK(ckpt_catalog_set_pieces(c.cat, i, &p, 1, &err));
    CHECK_OK(ckpt_value_cast(c.cat, i, CKPT_F64, &err));

    unsigned char src[2] = {small_byte(8), small_byte(9)};
    double want, *got = malloc(390000 * sizeof *got);
    ckpt_dtype_cast(&want, CKPT_F64, src, CKPT_BF16, 1);
    CHECK_OK(ckpt_tensor_pread(&c.cat->tensors.ptr[i], NULL, got, 390000 * sizeof *got, 0, &err));
    for (size_t k = 0; k < 390000; k++)
        CHECK(memcmp(&got[k], &want, sizeof want) == 0);
    free(got);
    small_catalog_free(&c);
}

TEST(value, a_cast_of_a_cast_starts_from_what_is_stored)
{
    struct small_catalog c = small_catalog_new();
    static unsigned char src[400], want[800];
    struct ckpt_err err = {0};
    size_t i = small_add(&c, "w", CKPT_F32, 100, 0);

    for (size_t k = 0; k < 400; k++)
        src[k] = small_byte(k);
    CHECK_OK(ckpt_value_cast(c.cat, i, CKPT_BF16, &err));
    c.cat->tensors.ptr[i].block = 9;
    CHECK_OK(ckpt_value_cast(c.cat, i, CKPT_F64, &err));
    ckpt_dtype_cast(want, CKPT_F64, src, CKPT_F32, 100);
    CHECK(reads(&c, i, want, 800, 0));
    CHECK_OK(ckpt_value_cast(c.cat, i, CKPT_F32, &err));
    CHECK(!c.cat->tensors.ptr[i].value && c.cat->tensors.ptr[i].npiece == 1);
    CHECK_EQ(c.cat->tensors.ptr[i].block, 9);
    CHECK(reads(&c, i, src, 400, 0));
    small_catalog_free(&c);
}

TEST(value, a_cast_to_the_same_type_is_nothing)
{
    struct small_catalog c = small_catalog_new();
    struct ckpt_err err = {0};
    size_t i = small_add(&c, "w", CKPT_F16, 4, 0);

    CHECK_OK(ckpt_value_cast(c.cat, i, CKPT_F16, &err));
    CHECK(!c.cat->tensors.ptr[i].value);
    small_catalog_free(&c);
}

TEST(value, a_cast_beyond_63_bits_of_bytes_is_refused)
{
    struct small_catalog c = small_catalog_new();
    const uint64_t dim = UINT64_C(1) << 61;
    struct ckpt_err err = {0};
    size_t i;

    CHECK_OK(ckpt_catalog_add(c.cat, "huge", CKPT_BF16, &dim, 1, &i, &err));
    CHECK_FAILS(ckpt_value_cast(c.cat, i, CKPT_F32, &err), CKPT_LIMIT, "huge");
    CHECK_EQ(c.cat->tensors.ptr[i].dtype, CKPT_BF16);
    small_catalog_free(&c);
}

/* BF16 has 8 bits: 1 + 2^-8 is a tie, to even; 2^-8 more is not. F32 is computed in F32. */
TEST(value, plus_one_is_rounded_once)
{
    static const struct {
        enum ckpt_dtype dtype;
        double x, want;
    } cases[] = {
        {CKPT_BF16, 0, 1},
        {CKPT_BF16, -1, 0},
        {CKPT_BF16, 0x1p-8, 1},
        {CKPT_BF16, 0x1.02p-8, 1 + 0x1p-7},
        {CKPT_BF16, 3 * 0x1p-8, 1 + 0x1p-6},
        {CKPT_BF16, -0x1p-9, 1},
        {CKPT_BF16, 0x1p127, 0x1p127},
        {CKPT_F16, 0x1p-11, 1},
        {CKPT_F16, 0x1.004p-11, 1 + 0x1p-10},
        {CKPT_F16, 65504, 65504},
        {CKPT_F32, 0x1p-24, 1},
        {CKPT_F32, 0x1.8p-24, 1 + 0x1p-23},
        {CKPT_F64, 0x1p-52, 1 + 0x1p-52},
    };
    enum { N = 1500 }; /* more than one step */

    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct ckpt_err err = {0};
        struct ckpt_catalog *cat;
        struct ckpt_source *s;
        struct ckpt_piece_draft p;
        struct ckpt_box box = {.rank = 1, .n = {N}};
        const uint64_t dim = N, stride = 0;
        unsigned char x[8];
        size_t index;

        ckpt_dtype_cast(x, cases[i].dtype, &cases[i].x, CKPT_F64, 1);
        CHECK_OK(ckpt_catalog_new(&cat, &err));
        CHECK_OK(ckpt_source_mem_new("x", x, sizeof x, &s, &err));
        ckpt_piece_from_box(&dim, &box, ckpt_catalog_add_source(cat, s, &err), 0, &stride, &p);
        ckpt_source_unref(s);
        CHECK_OK(ckpt_catalog_add(cat, "w", cases[i].dtype, &dim, 1, &index, &err));
        CHECK_OK(ckpt_catalog_set_pieces(cat, index, &p, 1, &err));
        CHECK_OK(ckpt_value_apply(cat, index, ckpt_value_find("plus_one"), 0, &err));
        CHECK_EQ(cat->tensors.ptr[index].dtype, cases[i].dtype);
        CHECK_OK(ckpt_value_cast(cat, index, CKPT_F64, &err));
        double got[N];
        CHECK_OK(ckpt_tensor_pread(&cat->tensors.ptr[index], NULL, got, sizeof got, 0, &err));
        for (size_t k = 0; k < N; k++)
            if (got[k] != cases[i].want)
                fail_msg("%s: %a + 1 is %a, not %a", ckpt_dtype_name(cases[i].dtype), cases[i].x,
                         got[k], cases[i].want);
        ckpt_catalog_free(cat);
    }
}

/* As numpy: float32(x) * float32(sqrt(128)), rounded to the type. */
TEST(value, times_is_rounded_once)
{
    static const struct {
        enum ckpt_dtype dtype;
        double x, want;
    } cases[] = {
        {CKPT_F32, 0x1.555556p-2, 0x1.e2b7dep+1},
        {CKPT_BF16, 0x1.02p0, 0x1.6cp3},
        {CKPT_F16, 0x1.004p0, 0x1.6a8p3},
    };

    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct ckpt_err err = {0};
        struct ckpt_catalog *cat;
        struct ckpt_source *s;
        unsigned char x[8];
        const uint64_t one = 1;
        double got;

        ckpt_dtype_cast(x, cases[i].dtype, &cases[i].x, CKPT_F64, 1);
        CHECK_OK(ckpt_catalog_new(&cat, &err));
        CHECK_OK(ckpt_source_mem_new("x", x, sizeof x, &s, &err));
        CHECK_EQ(ckpt_catalog_add_source(cat, s, &err), 0);
        ckpt_source_unref(s);
        CHECK_OK(ckpt_catalog_add_whole(cat, "w", cases[i].dtype, &one, 1, 0, 0, &err));
        CHECK_OK(ckpt_value_apply(cat, 0, ckpt_value_find("times"), 0x1.6a09e667f3bcdp3, &err));
        CHECK_EQ(cat->tensors.ptr[0].dtype, cases[i].dtype);
        CHECK_OK(ckpt_value_cast(cat, 0, CKPT_F64, &err));
        CHECK_OK(ckpt_tensor_pread(&cat->tensors.ptr[0], NULL, &got, sizeof got, 0, &err));
        if (got != cases[i].want)
            fail_msg("%s: %a is %a, not %a", ckpt_dtype_name(cases[i].dtype), cases[i].x, got,
                     cases[i].want);
        ckpt_catalog_free(cat);
    }
}

TEST(value, an_operator_that_is_not_there_and_a_type_that_does_not_do)
{
    struct small_catalog c = small_catalog_new();
    struct ckpt_err err = {0};
    size_t i = small_add(&c, "w", CKPT_U8, 4, 0);

    CHECK(!ckpt_value_find("times_two"));
    CHECK_FAILS(ckpt_value_apply(c.cat, i, &ckpt_value_plus_one, 0, &err), CKPT_UNSUPPORTED, "U8");
    CHECK(!c.cat->tensors.ptr[i].value);
    small_catalog_free(&c);
}

TESTS(T(value, plus_one_is_rounded_once), T(value, times_is_rounded_once),
      T(value, an_operator_that_is_not_there_and_a_type_that_does_not_do),
      T(value, a_cast_tensor_reads_at_any_byte), T(value, a_large_cast_is_read_in_chunks),
      T(value, a_cast_of_a_cast_starts_from_what_is_stored),
      T(value, a_cast_to_the_same_type_is_nothing),
      T(value, a_cast_beyond_63_bits_of_bytes_is_refused))
