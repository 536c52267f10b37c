/* SPDX-License-Identifier: Apache-2.0 */
#include "container/safetensors.h"

#include "small_catalog.h"

static char *entry(const struct ckpt_tensor *t, uint64_t off)
{
    struct ckpt_str s = {0};
    char *text = NULL;

    ckpt_st_header_tensor(&s, t, off, false);
    assert_true(s.len <= ckpt_st_header_bound(t));
    assert_int_equal(ckpt_str_steal(&s, &text, NULL), 0);
    return text;
}

TEST(st_header, entries_are_spelled_as_serde_json_does)
{
    static const uint64_t dim[] = {2, 3, 0};
    struct ckpt_tensor t = {.name = "a", .dim = dim, .numel = 6, .rank = 2, .dtype = CKPT_F32};
    char *text = entry(&t, 8);

    CHECK_STR(text, ",\"a\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[8,32]}");
    free(text);
    t = (struct ckpt_tensor){
        .name = "\"\\\b\f\n\r\t\x01\x1f\x7f/\xc3\xa9", .numel = 1, .dtype = CKPT_F8_E4M3FNUZ};
    text = entry(&t, 0);
    CHECK_STR(text,
              ",\"\\\"\\\\\\b\\f\\n\\r\\t\\u0001\\u001f\x7f/\xc3\xa9\":{\"dtype\":\"F8_E4M3FNUZ\","
              "\"shape\":[],\"data_offsets\":[0,1]}");
    free(text);
}

TEST(st_header, the_bound_holds_for_the_largest_numbers)
{
    uint64_t dim[CKPT_MAX_RANK];
    struct ckpt_tensor t = {.name = "\x01\x02\"", .dim = dim, .rank = CKPT_MAX_RANK};

    for (int d = 0; d < CKPT_MAX_RANK; d++)
        dim[d] = UINT64_MAX;
    t.dtype = CKPT_F8_E5M2FNUZ;
    t.numel = 1;
    free(entry(&t, UINT64_MAX - 1));
    CHECK(true);
}

TEST(st_header, entries_of_metadata_keep_their_order_and_get_a_format)
{
    static const struct {
        const char *entries, *header;
    } cases[] = {
        {"{}", "{\"__metadata__\":{\"format\":\"pt\"}"},
        {"{\"b\":\"1\",\"a\":\"\"}",
         "{\"__metadata__\":{\"b\":\"1\",\"a\":\"\",\"format\":\"pt\"}"},
        {"{\"format\":\"mlx\",\"a\\\"\":\"\\n\"}",
         "{\"__metadata__\":{\"format\":\"mlx\",\"a\\\"\":\"\\n\"}"},
    };

    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        ckpt_cleanup(ckpt_str_release) struct ckpt_str s = {0};
        ckpt_cleanup(ckpt_json_decrefp) json_t *entries = NULL;
        struct ckpt_err err = {0};
        CHECK_OK(
            ckpt_json_parse(cases[i].entries, strlen(cases[i].entries), "entries", &entries, &err));
        ckpt_st_header_begin_with(&s, entries);
        CHECK_STR(ckpt_str_get(&s), cases[i].header);
    }
}

TEST(st_header, a_header_is_padded_to_eight_bytes)
{
    struct ckpt_str s = {0};

    ckpt_st_header_begin(&s, false);
    ckpt_st_header_end(&s);
    CHECK_STR(ckpt_str_get(&s), "{\"__metadata__\":{\"format\":\"pt\"}}");
    CHECK_EQ(s.len, 32);
    CHECK_EQ(ckpt_st_header_pad(32), 0);
    CHECK_EQ(ckpt_st_header_pad(33), 7);
    CHECK_EQ(ckpt_st_header_pad(39), 1);
    ckpt_str_release(&s);
}

TEST(st_header, names_that_cannot_be_written_are_refused)
{
    struct ckpt_err err = {0};

    CHECK_OK(ckpt_st_check_name("", &err));
    CHECK_OK(ckpt_st_check_name("model.\xe2\x82\xac", &err));
    CHECK_FAILS(ckpt_st_check_name("a\xff", &err), CKPT_FORMAT, "not UTF-8");
    CHECK_FAILS(ckpt_st_check_name("a\xed\xa0\x80", &err), CKPT_FORMAT, "not UTF-8");
    CHECK_FAILS(ckpt_st_check_name("__metadata__", &err), CKPT_FORMAT, "__metadata__");
}

TESTS(T(st_header, entries_are_spelled_as_serde_json_does),
      T(st_header, the_bound_holds_for_the_largest_numbers),
      T(st_header, entries_of_metadata_keep_their_order_and_get_a_format),
      T(st_header, a_header_is_padded_to_eight_bytes),
      T(st_header, names_that_cannot_be_written_are_refused))
