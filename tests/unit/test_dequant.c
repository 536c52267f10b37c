/* SPDX-License-Identifier: Apache-2.0 */
/* Block-scaled weights against the definition of each code, and pairs that do not fit. */
#include "tensor/dequant.h"

#include <math.h>

#include "base/err.h"
#include "base/json.h"
#include "made_map.h"
#include "model/dequantize.h"
#include "stored.h"
#include "tensor/value.h"
#include "test.h"

/* ---- codes, by their definition ---- */

static double e4m3(unsigned char x)
{
    const int exponent = x >> 3 & 15, mantissa = x & 7;
    const double sign = x & 0x80 ? -1 : 1;

    if (exponent == 15 && mantissa == 7)
        return NAN;
    return exponent ? sign * ldexp(8 + mantissa, exponent - 10) : sign * ldexp(mantissa, -9);
}

static double e2m1(unsigned x)
{
    static const double magnitude[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    return x & 8 ? -magnitude[x & 7] : magnitude[x & 7];
}

static bool same(float a, float b) { return a == b || (isnan(a) && isnan(b)); }

static void fill(unsigned char *buf, size_t n, uint64_t *random)
{
    for (size_t i = 0; i < n; i++)
        buf[i] = (unsigned char)random_next(random);
}

/* ---- FP8 ---- */

/* A stack of matrices with blocks that the edges cut. */
static void check_fp8(uint64_t lead, uint64_t rows, uint64_t cols, const uint64_t block[2],
                      enum ckpt_dtype scale_dtype, uint64_t *random)
{
    const uint64_t srows = rows / block[0] + (rows % block[0] > 0),
                   scols = cols / block[1] + (cols % block[1] > 0);
    const uint64_t dim[3] = {lead, rows, cols}, sdim[3] = {lead, srows, scols};
    const uint64_t n = lead * rows * cols, ns = lead * srows * scols;
    unsigned char *code = malloc(n), *stored = malloc(ns * 4);
    float *scale = malloc(ns * sizeof *scale), *as_f32 = malloc(ns * sizeof *scale);
    struct ckpt_catalog *cat = stored_catalog();
    struct ckpt_err err = {0};

    fill(code, n, random);
    for (uint64_t i = 0; i < ns; i++)
        scale[i] = ldexpf(1 + (float)(random_next(random) % 4096) / 4096, (int)(i % 40) - 20);
    if (scale_dtype == CKPT_F8_E8M0) {
        for (uint64_t i = 0; i < ns; i++) {
            stored[i] = (unsigned char)(100 + i % 60);
            as_f32[i] = ldexpf(1, stored[i] - 127);
        }
    } else {
        ckpt_dtype_cast(stored, scale_dtype, scale, CKPT_F32, ns);
        ckpt_dtype_cast(as_f32, CKPT_F32, stored, scale_dtype, ns);
    }
    size_t w = stored_add(cat, "w", CKPT_F8_E4M3, 3, dim, code, 1);
    size_t s = stored_add(cat, "w_scale_inv", scale_dtype, 3, sdim, stored, 2);
    if (ckpt_value_fp8(cat, w, &cat->tensors.ptr[s], block, CKPT_F32, &err) < 0)
        fail_msg("%s", err.text);
    const struct ckpt_tensor *t = &cat->tensors.ptr[w];
    float *got = (float *)stored_read(t, NULL, n * sizeof *got, 0);
    for (uint64_t i = 0; i < n; i++) {
        const uint64_t row = i / cols % rows, col = i % cols, e = i / cols / rows;
        const float want =
            (float)e4m3(code[i]) * as_f32[(e * srows + row / block[0]) * scols + col / block[1]];
        if (!same(got[i], want))
            fail_msg("element %llu is %a, not %a", (unsigned long long)i, (double)got[i],
                     (double)want);
    }
    stored_check_ranges(t, random, 40);

    /* a cast of it rounds F32 once */
    unsigned char *half = malloc(n * 2), *cast;
    if (ckpt_value_cast(cat, w, CKPT_BF16, &err) < 0)
        fail_msg("%s", err.text);
    ckpt_dtype_cast(half, CKPT_BF16, got, CKPT_F32, n);
    cast = stored_read(t, NULL, n * 2, 0);
    assert_memory_equal(half, cast, n * 2);
    assert_string_equal(t->value->ops->name, "fp8 dequantisation");
    stored_check_ranges(t, random, 40);
    free(half);
    free(cast);
    free(got);
    ckpt_catalog_free(cat);
    free(code);
    free(stored);
    free(scale);
    free(as_f32);
}

TEST(dequant, fp8_is_code_times_the_scale_of_its_block)
{
    static const enum ckpt_dtype dtypes[] = {CKPT_F32, CKPT_BF16, CKPT_F16, CKPT_F8_E8M0};
    uint64_t random = 5;

    UNUSED_STATE;
    for (size_t i = 0; i < 24; i++) {
        const uint64_t block[2] = {random_range(&random, 1, 140), random_range(&random, 1, 140)};
        check_fp8(random_range(&random, 1, 4), random_range(&random, 1, 200),
                  random_range(&random, 1, 300), block, dtypes[i % 4], &random);
    }
    check_fp8(1, 3, 131073, (const uint64_t[]){128, 128}, CKPT_F32, &random); /* a row of tiles */
    check_fp8(1, 7, 5, (const uint64_t[]){UINT64_MAX / 2, 1000}, CKPT_F32, &random);
}

TEST(dequant, fp8_that_does_not_fit_is_refused)
{
    static const unsigned char zeros[40000];
    static const uint64_t block[2] = {128, 128};
    static const struct {
        enum ckpt_dtype weight, scale;
        uint64_t dim[2];
        uint32_t rank;
        enum ckpt_code code;
        const char *needle;
    } bad[] = {
        {CKPT_F8_E5M2, CKPT_F32, {2, 1}, 2, CKPT_UNSUPPORTED, "is F8_E5M2, not F8_E4M3"},
        {CKPT_BF16, CKPT_F32, {2, 1}, 2, CKPT_UNSUPPORTED, "is BF16"},
        {CKPT_F8_E4M3, CKPT_U8, {2, 1}, 2, CKPT_UNSUPPORTED, "are U8"},
        {CKPT_F8_E4M3, CKPT_F32, {1, 1}, 2, CKPT_CONFLICT, "[1, 1]: not one for each block of 128"},
        {CKPT_F8_E4M3, CKPT_F32, {1, 2}, 2, CKPT_CONFLICT, "'w', [130, 100]"},
        {CKPT_F8_E4M3, CKPT_F32, {2, 2}, 2, CKPT_CONFLICT, "[2, 2]"},
        {CKPT_F8_E4M3, CKPT_F32, {2}, 1, CKPT_CONFLICT, "[2]"},
    };

    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct ckpt_catalog *cat = stored_catalog();
        struct ckpt_err err = {0};
        size_t w = stored_add(cat, "w", bad[i].weight, 2, (const uint64_t[]){130, 100}, zeros, 9);
        size_t s = stored_add(cat, "s", bad[i].scale, bad[i].rank, bad[i].dim, zeros, 9);
        CHECK_FAILS(ckpt_value_fp8(cat, w, &cat->tensors.ptr[s], block, CKPT_BF16, &err),
                    bad[i].code, bad[i].needle);
        ckpt_catalog_free(cat);
    }
}

static int refuse(struct ckpt_source *s, struct iovec *iov, int n, uint64_t off,
                  struct ckpt_err *err)
{
    (void)s, (void)iov, (void)n, (void)off;
    return ckpt_fail(err, CKPT_IO, "the disk is broken");
}

TEST(dequant, codes_or_scales_that_cannot_be_read_are_an_error)
{
    static const unsigned char zeros[4 * 130 * 100];
    unsigned char got[2 * 130 * 100];

    for (uint32_t bad = 0; bad < 3; bad++) { /* the codes, the scales, or nothing */
        struct ckpt_catalog *cat = stored_catalog();
        struct ckpt_err err = {0};
        size_t w = stored_add(cat, "w", CKPT_F8_E4M3, 2, (const uint64_t[]){130, 100}, zeros, 9);
        size_t s = stored_add(cat, "s", CKPT_F32, 2, (const uint64_t[]){2, 1}, zeros, 9);
        CHECK_OK(ckpt_value_fp8(cat, w, &cat->tensors.ptr[s], (const uint64_t[]){128, 128},
                                CKPT_BF16, &err));
        struct ckpt_source_ops broken = *cat->sources.ptr[bad % 2]->ops;
        const struct ckpt_source_ops *whole = cat->sources.ptr[bad % 2]->ops;
        broken.preadv = refuse;
        if (bad < 2)
            cat->sources.ptr[bad]->ops = &broken;
        if (bad == 2)
            CHECK_OK(ckpt_tensor_pread(&cat->tensors.ptr[w], NULL, got, sizeof got, 0, &err));
        else
            CHECK_FAILS(ckpt_tensor_pread(&cat->tensors.ptr[w], NULL, got, sizeof got, 0, &err),
                        CKPT_IO, "the disk is broken");
        cat->sources.ptr[bad % 2]->ops = whole;
        ckpt_catalog_free(cat);
    }
}

/* ---- MXFP4, by the names ---- */

/* All codes at all scales: experts x out x groups = 256 scales, 16 codes twice in a block. */
TEST(dequant, mxfp4_is_the_code_times_a_power_of_two_and_transposed)
{
    enum { E = 4, N = 16, G = 4, K = G * 32 };
    static unsigned char blocks[E][N][G][16], scales[E][N][G];
    struct ckpt_catalog *cat = stored_catalog();
    struct ckpt_err err = {0};
    uint64_t random = 9;

    for (unsigned i = 0; i < E * N * G; i++) {
        (&scales[0][0][0])[i] = (unsigned char)i;
        for (unsigned b = 0; b < 16; b++)
            (&blocks[0][0][0][0])[i * 16 + b] = (unsigned char)(b << 4 | ((b * 7 + i) & 15));
    }
    (void)stored_add(cat, "x_blocks", CKPT_U8, 4, (const uint64_t[]){E, N, G, 16}, blocks, 1);
    (void)stored_add(cat, "x_scales", CKPT_U8, 3, (const uint64_t[]){E, N, G}, scales, 0);
    json_t *config = json_pack("{s:s}", "dtype", "float32");
    struct ckpt_weight_map *map =
        made_map(json_pack("{s:s, s:s}", "x_blocks", "a", "x_scales", "b"));
    CHECK_OK(ckpt_dequantize(cat, config, map, &err));
    CHECK_EQ(cat->tensors.len, 1);
    const struct ckpt_tensor *t = ckpt_catalog_find(cat, "x");
    CHECK(t && t->rank == 3 && t->dim[0] == E && t->dim[1] == K && t->dim[2] == N);
    CHECK_STR(map->files.ptr[ckpt_weight_map_find(map, "x")], "a");
    float *got = (float *)stored_read(t, NULL, sizeof(float) * E * K * N, 0);
    for (size_t i = 0; i < E * K * N; i++) {
        const size_t e = i / N / K, k = i / N % K, n = i % N;
        const unsigned code = blocks[e][n][k / 32][k % 32 / 2] >> (k % 2 * 4) & 15;
        const unsigned s = scales[e][n][k / 32];
        const float want = s == 255 ? NAN : (float)ldexp(e2m1(code), (int)s - 127);
        if (!same(got[i], want) || (want == 0 && signbit(want) != signbit(got[i])))
            fail_msg("[%zu, %zu, %zu] is %a, not %a", e, k, n, (double)got[i], (double)want);
    }
    stored_check_ranges(t, &random, 200);
    free(got);
    json_decref(config);
    ckpt_weight_map_unref(map);
    ckpt_catalog_free(cat);
}

/* Larger than what is read at once, and than what is transposed without slabs. */
TEST(dequant, mxfp4_of_many_rows)
{
    enum { N = 700, G = 110 };
    unsigned char *blocks = malloc(N * G * 16), *scales = malloc(N * G);
    struct ckpt_catalog *cat = stored_catalog();
    struct ckpt_err err = {0};
    uint64_t random = 10;

    fill(blocks, N * G * 16, &random);
    for (size_t i = 0; i < N * G; i++)
        scales[i] = (unsigned char)random_range(&random, 120, 134);
    (void)stored_add(cat, "x_blocks", CKPT_U8, 4, (const uint64_t[]){1, N, G, 16}, blocks, 1);
    (void)stored_add(cat, "x_scales", CKPT_U8, 3, (const uint64_t[]){1, N, G}, scales, 9);
    CHECK_OK(ckpt_dequantize(cat, NULL, NULL, &err));
    const struct ckpt_tensor *t = ckpt_catalog_find(cat, "x");
    CHECK(t && t->dtype == CKPT_BF16);
    uint16_t *got = (uint16_t *)stored_read(t, NULL, 2 * t->numel, 0);
    for (size_t i = 0; i < t->numel; i++) {
        const size_t k = i / N, n = i % N;
        const float want =
            (float)ldexp(e2m1(blocks[(n * G + k / 32) * 16 + k % 32 / 2] >> (k % 2 * 4) & 15),
                         scales[n * G + k / 32] - 127);
        uint16_t bf16;
        ckpt_dtype_cast(&bf16, CKPT_BF16, &want, CKPT_F32, 1);
        CHECK_EQ(got[i], bf16);
    }
    stored_check_ranges(t, &random, 25);
    free(got);
    free(blocks);
    free(scales);
    ckpt_catalog_free(cat);
}

/* ---- pairs ---- */

struct named {
    const char *name;
    enum ckpt_dtype dtype;
    uint32_t rank;
    uint64_t dim[4];
};

static struct ckpt_catalog *catalog_of(const struct named *list)
{
    static const unsigned char zeros[1 << 16];
    struct ckpt_catalog *cat = stored_catalog();

    for (; list->name; list++)
        (void)stored_add(cat, list->name, list->dtype, list->rank, list->dim, zeros, 9);
    return cat;
}

TEST(dequant, half_pairs_and_wrong_ones_are_refused)
{
    static const struct {
        struct named t[4];
        enum ckpt_code code;
        const char *needle;
    } bad[] = {
        {{{"a.weight_scale_inv", CKPT_F32, 2, {1, 1}}},
         CKPT_MISSING,
         "'a.weight_scale_inv' have no tensor"},
        {{{"a.weight", CKPT_F8_E4M3, 2, {4, 4}}},
         CKPT_MISSING,
         "without scales 'a.weight_scale_inv'"},
        {{{"a.weight", CKPT_F8_E4M3, 2, {200, 4}}, {"a.weight_scale_inv", CKPT_F32, 2, {1, 1}}},
         CKPT_CONFLICT,
         "[1, 1]"},
        {{{"x_blocks", CKPT_U8, 4, {2, 3, 4, 16}}}, CKPT_MISSING, "'..._scales'"},
        {{{"x_scales", CKPT_U8, 3, {2, 3, 4}}}, CKPT_MISSING, "'..._blocks'"},
        {{{"x_blocks", CKPT_U8, 4, {2, 3, 4, 16}}, {"x_scales", CKPT_F32, 3, {2, 3, 4}}},
         CKPT_UNSUPPORTED,
         "'x_scales' is F32, not U8"},
        {{{"x_blocks", CKPT_U8, 4, {2, 3, 4, 16}}, {"x_scales", CKPT_U8, 3, {2, 3, 5}}},
         CKPT_CONFLICT,
         "[2, 3, 5]"},
        {{{"x_blocks", CKPT_U8, 4, {2, 3, 4, 8}}, {"x_scales", CKPT_U8, 3, {2, 3, 4}}},
         CKPT_CONFLICT,
         "[2, 3, 4, 8]"},
        {{{"x", CKPT_BF16, 1, {2}},
          {"x_blocks", CKPT_U8, 4, {2, 3, 4, 16}},
          {"x_scales", CKPT_U8, 3, {2, 3, 4}}},
         CKPT_CONFLICT,
         "'x'"},
    };

    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct ckpt_catalog *cat = catalog_of(bad[i].t);
        struct ckpt_err err = {0};
        CHECK_FAILS(ckpt_dequantize(cat, NULL, NULL, &err), bad[i].code, bad[i].needle);
        ckpt_catalog_free(cat);
    }
}

TEST(dequant, what_is_not_quantised_stays_and_the_config_gives_block_and_dtype)
{
    static const struct named list[] = {
        {"a.weight", CKPT_F8_E4M3, 2, {9, 4}}, {"a.weight_scale_inv", CKPT_F32, 2, {3, 1}},
        {"blocks", CKPT_U8, 1, {3}},           {"up_scales", CKPT_F32, 2, {3, 3}},
        {"norm.weight", CKPT_BF16, 1, {4}},    {NULL, 0, 0, {0}}};
    struct ckpt_catalog *cat = catalog_of(list);
    struct ckpt_err err = {0};
    json_t *config = json_pack("{s:s, s:{s:[i, i]}}", "torch_dtype", "float16",
                               "quantization_config", "weight_block_size", 3, 8);

    CHECK(ckpt_is_quantized(cat));
    CHECK_OK(ckpt_dequantize(cat, config, NULL, &err));
    CHECK_EQ(cat->tensors.len, 4);
    CHECK_EQ(ckpt_catalog_find(cat, "a.weight")->dtype, CKPT_F16);
    CHECK(!ckpt_catalog_find(cat, "norm.weight")->value);
    json_decref(config);
    ckpt_catalog_free(cat);
}

TESTS(T(dequant, fp8_is_code_times_the_scale_of_its_block),
      T(dequant, fp8_that_does_not_fit_is_refused),
      T(dequant, codes_or_scales_that_cannot_be_read_are_an_error),
      T(dequant, mxfp4_is_the_code_times_a_power_of_two_and_transposed),
      T(dequant, mxfp4_of_many_rows), T(dequant, half_pairs_and_wrong_ones_are_refused),
      T(dequant, what_is_not_quantised_stays_and_the_config_gives_block_and_dtype))
