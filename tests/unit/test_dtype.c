/* SPDX-License-Identifier: Apache-2.0 */
#include "tensor/dtype.h"

#include <math.h>
#include <stdlib.h>

#include "test.h"

static bool parses(const char *name, enum ckpt_dtype want)
{
    enum ckpt_dtype got = CKPT_NDTYPE;
    return ckpt_dtype_parse(name, strlen(name), &got) && got == want;
}

static bool unknown(const char *name)
{
    enum ckpt_dtype got;
    return !ckpt_dtype_parse(name, strlen(name), &got);
}

TEST(dtype, every_name_is_read_back)
{
    for (int t = CKPT_OPAQUE + 1; t < CKPT_NDTYPE; t++) {
        char full[64];
        (void)snprintf(full, sizeof full, "torch.%s", ckpt_dtype_torch_name((enum ckpt_dtype)t));
        CHECK(parses(ckpt_dtype_name((enum ckpt_dtype)t), (enum ckpt_dtype)t));
        CHECK(parses(ckpt_dtype_torch_name((enum ckpt_dtype)t), (enum ckpt_dtype)t));
        CHECK(parses(full, (enum ckpt_dtype)t));
        size_t size = ckpt_dtype_size((enum ckpt_dtype)t);
        CHECK(size == 1 || size == 2 || size == 4 || size == 8 ||
              (size == 3 && ckpt_dtype_pack((enum ckpt_dtype)t) == 4));
    }
    CHECK(parses("half", CKPT_F16));
    CHECK(parses("torch.float", CKPT_F32));
    CHECK(parses("double", CKPT_F64));
    CHECK(parses("long", CKPT_I64));
}

TEST(dtype, other_names_are_unknown)
{
    CHECK(unknown(""));
    CHECK(unknown("torch."));
    CHECK(unknown("torch.BF16"));
    CHECK(unknown("bf16 "));
    CHECK(unknown("BF1"));
    CHECK(unknown("F3"));
    CHECK(unknown("(opaque)"));
    CHECK(unknown("torch.torch.float32"));
}

TEST(dtype, only_four_types_are_castable)
{
    int n = 0;
    for (int t = 0; t < CKPT_NDTYPE; t++)
        n += ckpt_dtype_is_castable((enum ckpt_dtype)t);
    CHECK_EQ(n, 4);
    CHECK(ckpt_dtype_is_float(CKPT_F8_E4M3) && !ckpt_dtype_is_castable(CKPT_F8_E4M3));
    CHECK(!ckpt_dtype_is_float(CKPT_I32) && !ckpt_dtype_is_float(CKPT_C64));
}

static uint16_t from_f32(float f, enum ckpt_dtype to)
{
    uint16_t h;
    ckpt_dtype_cast(&h, to, &f, CKPT_F32, 1);
    return h;
}

TEST(dtype, casts_round_to_nearest_even)
{
    CHECK_EQ(from_f32(1.0f, CKPT_BF16), 0x3f80);
    CHECK_EQ(from_f32(1.0f + 0x1p-8f, CKPT_BF16), 0x3f80);
    CHECK_EQ(from_f32(1.0f + 0x3p-8f, CKPT_BF16), 0x3f82);
    CHECK_EQ(from_f32(1.0f + 0x1.02p-8f, CKPT_BF16), 0x3f81);
    CHECK_EQ(from_f32(0x1.fffffep127f, CKPT_BF16), 0x7f80);
    CHECK_EQ(from_f32(1.0f + 0x1p-11f, CKPT_F16), 0x3c00);
    CHECK_EQ(from_f32(1.0f + 0x3p-11f, CKPT_F16), 0x3c02);
    CHECK_EQ(from_f32(65519.0f, CKPT_F16), 0x7bff);
    CHECK_EQ(from_f32(65520.0f, CKPT_F16), 0x7c00);
    CHECK_EQ(from_f32(-0x1p-25f, CKPT_F16), 0x8000);
    CHECK_EQ(from_f32(0x1.8p-25f, CKPT_F16), 0x0001);
    CHECK_EQ(from_f32(0x1p-24f, CKPT_F16), 0x0001);
}

TEST(dtype, nan_stays_nan_whatever_its_payload)
{
    static const uint32_t nans[] = {0x7f800001, 0x7fc00000, 0xff800001, 0xffffffff, 0x7f801000};
    uint16_t h[5], b[5];
    double d[5];

    ckpt_dtype_cast(h, CKPT_F16, nans, CKPT_F32, 5);
    ckpt_dtype_cast(b, CKPT_BF16, nans, CKPT_F32, 5);
    ckpt_dtype_cast(d, CKPT_F64, nans, CKPT_F32, 5);
    for (int i = 0; i < 5; i++) {
        CHECK((h[i] & 0x7fff) > 0x7c00);
        CHECK((b[i] & 0x7fff) > 0x7f80);
        CHECK(isnan(d[i]));
    }
}

static const enum ckpt_dtype castable[] = {CKPT_F16, CKPT_BF16, CKPT_F32, CKPT_F64};

/* Also at odd addresses and lengths: only n elements are written. */
TEST(dtype, instructions_and_plain_code_agree)
{
    enum { N = 3001 };
    static unsigned char src[8 * N + 1], a[8 * N + 2], b[8 * N + 2];
    uint32_t seed = 1;

    for (size_t i = 0; i < sizeof src; i++)
        src[i] = (unsigned char)((seed = seed * 1664525 + 1013904223) >> 24);
    for (int from = 0; from < 4; from++)
        for (int to = 0; to < 4; to++)
            for (size_t n = 0; n <= N; n = n < 40 ? n + 1 : n + 987) {
                size_t end = n * ckpt_dtype_size(castable[to]);
                memset(a, 0x5a, sizeof a);
                memset(b, 0x5a, sizeof b);
                ckpt_dtype_cast(a + 1, castable[to], src + 1, castable[from], n);
                ckpt_dtype_cast_plain(b + 1, castable[to], src + 1, castable[from], n);
                CHECK(memcmp(a, b, sizeof a) == 0);
                CHECK(a[0] == 0x5a && a[1 + end] == 0x5a);
            }
}

TEST(dtype, sixteen_bits_survive_the_way_through_wider_types)
{
    for (int wide = 2; wide < 4; wide++)
        for (int narrow = 0; narrow < 2; narrow++)
            for (unsigned bits = 0; bits < 65536; bits++) {
                uint16_t in = (uint16_t)bits, out;
                double w;
                bool nan = narrow == 0 ? (bits & 0x7fff) > 0x7c00 : (bits & 0x7fff) > 0x7f80;
                ckpt_dtype_cast(&w, castable[wide], &in, castable[narrow], 1);
                ckpt_dtype_cast(&out, castable[narrow], &w, castable[wide], 1);
                CHECK(nan || in == out);
            }
}

TESTS(T(dtype, every_name_is_read_back), T(dtype, other_names_are_unknown),
      T(dtype, only_four_types_are_castable), T(dtype, casts_round_to_nearest_even),
      T(dtype, nan_stays_nan_whatever_its_payload), T(dtype, instructions_and_plain_code_agree),
      T(dtype, sixteen_bits_survive_the_way_through_wider_types))
