/* SPDX-License-Identifier: Apache-2.0 */
/* Merged weights against their definition, to the bit. */
#include "tensor/lora.h"

#include <math.h>

#include "stored.h"
#include "tensor/dtype.h"
#include "tensor/value.h"
#include "test.h"

static float *random_floats(uint64_t n, uint64_t *random)
{
    float *x = malloc((n + 1) * sizeof *x);

    for (uint64_t i = 0; i < n; i++)
        x[i] = (float)random_range(random, 0, 1 << 20) / (1 << 19) - 1;
    return x;
}

/* As `dtype` in the catalogue; x becomes what is left of it. */
static size_t add(struct ckpt_catalog *cat, const char *name, enum ckpt_dtype dtype, uint32_t rank,
                  const uint64_t *dim, float *x, uint64_t n)
{
    void *stored = malloc(n * 4 + 1);

    ckpt_dtype_cast(stored, dtype, x, CKPT_F32, n);
    ckpt_dtype_cast(x, CKPT_F32, stored, dtype, n);
    size_t at = stored_add(cat, name, dtype, rank, dim, stored, 0);
    free(stored);
    return at;
}

struct problem {
    uint64_t stack, rows, cols, rank, first, nrow;
    double scale;
    enum ckpt_dtype dtype, adapter;
    bool dora;
};

static void check(const struct problem *p, uint64_t *random)
{
    const uint64_t adim[3] = {p->stack, p->rank, p->cols}, bdim[3] = {p->stack, p->rows, p->rank};
    const uint64_t wdim[2] = {p->nrow, p->cols}, na = p->stack * p->rank * p->cols;
    const uint64_t nb = p->stack * p->rows * p->rank, n = p->nrow * p->cols;
    float *a = random_floats(na, random), *b = random_floats(nb, random);
    float *w = random_floats(n, random), *m = random_floats(p->nrow, random);
    struct ckpt_catalog *cat = stored_catalog();
    struct ckpt_err err = {0};

    size_t at = add(cat, "w", p->dtype, 2, wdim, w, n);
    size_t ia = add(cat, "a", p->adapter, 3, adim, a, na),
           ib = add(cat, "b", p->adapter, 3, bdim, b, nb);
    size_t im = add(cat, "m", p->adapter, 1, &p->nrow, m, p->nrow);
    const struct ckpt_lora lora = {.a = &cat->tensors.ptr[ia],
                                   .b = &cat->tensors.ptr[ib],
                                   .magnitude = p->dora ? &cat->tensors.ptr[im] : NULL,
                                   .scale = p->scale};
    if (ckpt_value_lora(cat, at, &lora, p->first, &err) < 0)
        fail_msg("%s", err.text);
    const struct ckpt_tensor *t = &cat->tensors.ptr[at];
    assert_int_equal(t->dtype, p->dtype);
    for (uint64_t i = 0; i < p->nrow; i++) {
        const uint64_t e = (p->first + i) / p->rows, row = (p->first + i) % p->rows;
        double square = 0;
        for (uint64_t c = 0; c < p->cols; c++) {
            float sum = 0;
            for (uint64_t k = 0; k < p->rank; k++)
                sum = fmaf(b[(e * p->rows + row) * p->rank + k], a[(e * p->rank + k) * p->cols + c],
                           sum);
            float *x = &w[i * p->cols + c];
            *x += sum * (float)p->scale;
            square += (double)*x * (double)*x;
        }
        for (uint64_t c = 0; p->dora && c < p->cols; c++)
            w[i * p->cols + c] *= m[i] / (float)sqrt(square);
    }
    void *want = malloc(n * 4 + 1);
    ckpt_dtype_cast(want, p->dtype, w, CKPT_F32, n);
    unsigned char *got = stored_read(t, NULL, n * ckpt_dtype_size(p->dtype), 0);
    assert_memory_equal(got, want, n * ckpt_dtype_size(p->dtype));
    stored_check_ranges(t, random, 12);
    free(got);
    free(want);
    ckpt_catalog_free(cat);
    free(a);
    free(b);
    free(w);
    free(m);
}

TEST(lora, merged_weights_are_those_of_the_definition)
{
    static const enum ckpt_dtype dtypes[] = {CKPT_F32, CKPT_BF16, CKPT_F16};
    uint64_t random = 31;

    UNUSED_STATE;
    for (int i = 0; i < 40; i++) {
        struct problem p = {.stack = random_range(&random, 1, 5),
                            .rows = random_range(&random, 1, 40),
                            .cols = random_range(&random, 1, 140),
                            .rank = random_range(&random, 1, 20),
                            .scale = (double)random_range(&random, 1, 64) / 7,
                            .dtype = dtypes[i % 3],
                            .adapter = dtypes[i % 2]};
        p.first = random_range(&random, 0, p.stack * p.rows);
        p.nrow = random_range(&random, 1, p.stack * p.rows - p.first + 1);
        check(&p, &random);
        p.stack = 1;
        p.first = 0;
        p.nrow = p.rows;
        p.dora = true;
        check(&p, &random);
    }
}

/* Several tiles of A's columns, several groups of rows, more than one slab. */
TEST(lora, large_ones_too)
{
    uint64_t random = 32;

    UNUSED_STATE;
    check(&(struct problem){1, 3, 70000, 20, 0, 3, 0.5, CKPT_BF16, CKPT_F32, false}, &random);
    check(&(struct problem){2, 700, 2000, 3, 100, 1200, 2, CKPT_F32, CKPT_BF16, false}, &random);
}

TEST(lora, a_weight_may_be_computed_and_have_more_dimensions)
{
    const uint64_t wdim[3] = {2, 3, 4}, adim[3] = {2, 1, 4}, bdim[3] = {2, 3, 1};
    float w[24], a[8], b[6];
    struct ckpt_catalog *cat = stored_catalog();
    struct ckpt_err err = {0};
    uint64_t random = 1;

    for (int i = 0; i < 24; i++)
        w[i] = (float)i;
    for (int i = 0; i < 8; i++)
        a[i] = (float)(i + 1);
    for (int i = 0; i < 6; i++)
        b[i] = (float)(10 * i);
    size_t at = add(cat, "w", CKPT_F32, 3, wdim, w, 24);
    size_t ia = add(cat, "a", CKPT_F32, 3, adim, a, 8), ib = add(cat, "b", CKPT_F32, 3, bdim, b, 6);
    CHECK_OK(ckpt_value_apply(cat, at, &ckpt_value_plus_one, 0, &err));
    CHECK_OK(ckpt_value_cast(cat, at, CKPT_F16, &err));
    const struct ckpt_lora lora = {
        .a = &cat->tensors.ptr[ia], .b = &cat->tensors.ptr[ib], .scale = 0.5};
    CHECK_OK(ckpt_value_lora(cat, at, &lora, 0, &err));
    CHECK_OK(ckpt_value_cast(cat, at, CKPT_F32, &err));
    float *got = (float *)stored_read(&cat->tensors.ptr[at], NULL, sizeof w, 0);
    for (int i = 0; i < 24; i++)
        CHECK(got[i] == w[i] + 1 + b[i / 4] * a[i / 12 * 4 + i % 4] / 2);
    stored_check_ranges(&cat->tensors.ptr[at], &random, 50);
    free(got);
    ckpt_catalog_free(cat);
}

TEST(lora, biases)
{
    float x[5] = {1, 2, 3, 4, 5}, y[5] = {0.5F, -1, 0.001F, 8, 0};
    const uint64_t dim = 5, other = 4;
    struct ckpt_catalog *cat = stored_catalog();
    struct ckpt_err err = {0};
    size_t at = add(cat, "bias", CKPT_BF16, 1, &dim, x, 5),
           i = add(cat, "y", CKPT_F32, 1, &dim, y, 5);
    size_t bad = add(cat, "short", CKPT_F32, 1, &other, y, 4);
    uint16_t want[5], *got;

    CHECK_FAILS(ckpt_value_lora_bias(cat, at, &cat->tensors.ptr[bad], 3, &err), CKPT_CONFLICT,
                "short");
    CHECK_OK(ckpt_value_lora_bias(cat, at, &cat->tensors.ptr[i], 3, &err));
    got = (uint16_t *)stored_read(&cat->tensors.ptr[at], NULL, 10, 0);
    for (int k = 0; k < 5; k++)
        x[k] += y[k] * 3;
    ckpt_dtype_cast(want, CKPT_BF16, x, CKPT_F32, 5);
    assert_memory_equal(got, want, 10);
    free(got);
    ckpt_catalog_free(cat);
}

TEST(lora, what_does_not_fit_is_refused)
{
    static const struct {
        uint64_t a[3], b[3], first, magnitude;
        enum ckpt_dtype weight;
        enum ckpt_code code;
        const char *needle;
    } bad[] = {
        {{1, 2, 5}, {1, 4, 2}, 0, 0, CKPT_F8_E4M3, CKPT_UNSUPPORTED, "F8_E4M3"},
        {{1, 2, 5}, {1, 4, 2}, 0, 0, CKPT_F64, CKPT_UNSUPPORTED, "F64"},
        {{1, 2, 6}, {1, 4, 2}, 0, 0, CKPT_F32, CKPT_CONFLICT, "[1, 2, 6]"},
        {{1, 2, 5}, {1, 4, 3}, 0, 0, CKPT_F32, CKPT_CONFLICT, "[1, 4, 3]"},
        {{2, 2, 5}, {1, 4, 2}, 0, 0, CKPT_F32, CKPT_CONFLICT, "[2, 2, 5]"},
        {{1, 2, 5}, {1, 3, 2}, 0, 0, CKPT_F32, CKPT_CONFLICT, "[1, 3, 2]"},
        {{1, 2, 5}, {1, 4, 2}, 1, 0, CKPT_F32, CKPT_CONFLICT, "do not fit"},
        {{1, 2, 5}, {1, 4, 2}, UINT64_MAX, 0, CKPT_F32, CKPT_CONFLICT, "do not fit"},
        {{1, 2, 5}, {1, 4, 2}, 0, 3, CKPT_F32, CKPT_CONFLICT, "'m' [3]"},
        {{1, 2, 5}, {1, 5, 2}, 0, 4, CKPT_F32, CKPT_CONFLICT, "'m' [4]"},
    };
    static const unsigned char zeros[1024];

    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct ckpt_catalog *cat = stored_catalog();
        struct ckpt_err err = {0};
        size_t w = stored_add(cat, "w", bad[i].weight, 2, (const uint64_t[]){4, 5}, zeros, 9);
        size_t a = stored_add(cat, "a", CKPT_F32, 3, bad[i].a, zeros, 9);
        size_t b = stored_add(cat, "b", CKPT_F32, 3, bad[i].b, zeros, 9);
        size_t m = stored_add(cat, "m", CKPT_F32, 1, &bad[i].magnitude, zeros, 9);
        const struct ckpt_lora lora = {.a = &cat->tensors.ptr[a],
                                       .b = &cat->tensors.ptr[b],
                                       .magnitude = bad[i].magnitude ? &cat->tensors.ptr[m] : NULL,
                                       .scale = 1};
        CHECK_FAILS(ckpt_value_lora(cat, w, &lora, bad[i].first, &err), bad[i].code, bad[i].needle);
        CHECK(!cat->tensors.ptr[w].value);
        ckpt_catalog_free(cat);
    }
}

TESTS(T(lora, merged_weights_are_those_of_the_definition), T(lora, large_ones_too),
      T(lora, a_weight_may_be_computed_and_have_more_dimensions), T(lora, biases),
      T(lora, what_does_not_fit_is_refused))
