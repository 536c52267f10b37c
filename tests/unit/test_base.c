/* SPDX-License-Identifier: Apache-2.0 */
/* The base layer: errors, JSON, strings, maps, memory, threads. */
#include "test.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "base/ckd.h"
#include "base/crc32.h"
#include "base/json.h"
#include "base/map.h"
#include "base/mem.h"
#include "base/par.h"
#include "base/sized.h"
#include "base/str.h"
#include "base/vec.h"

TEST(err, the_first_failure_stays_and_context_goes_before_it)
{
    struct ckpt_err err = {0};
    CHECK_EQ(ckpt_err_in(&err, "nothing"), -1);
    CHECK_EQ(err.code, CKPT_OK);
    CHECK_EQ(ckpt_fail(&err, CKPT_FORMAT, "first %d", 1), -1);
    CHECK_EQ(ckpt_fail(&err, CKPT_IO, "second"), -1);
    CHECK_EQ(ckpt_err_in(&err, "file '%s'", "x"), -1);
    CHECK_EQ(err.code, CKPT_FORMAT);
    CHECK_STR(err.text, "file 'x': first 1");
    CHECK_EQ(ckpt_fail(NULL, CKPT_IO, "nobody listens"), -1);
}

TEST(err, hostile_names_become_one_printable_line)
{
    struct ckpt_err err = {0};
    char name[5000];
    (void)ckpt_fail(&err, CKPT_FORMAT, "'%s'", "a\nb\x1b[31m\xff\xc3\xa9");
    CHECK_STR(err.text, "'a\\x0ab\\x1b[31m\\xff\xc3\xa9'");
    memset(name, 'n', sizeof name - 1);
    name[sizeof name - 1] = '\0';
    for (int i = 0; i < 3; i++) {
        err = (struct ckpt_err){0};
        (void)ckpt_fail(&err, CKPT_FORMAT, "%s", name);
        (void)ckpt_err_in(&err, "%s", name);
        CHECK(memchr(err.text, 0, sizeof err.text));
    }
}

TEST(err, an_error_moves_only_where_none_is)
{
    struct ckpt_err first = {0}, second = {0}, err = {0};

    (void)ckpt_fail(&first, CKPT_FORMAT, "the first");
    (void)ckpt_fail(&second, CKPT_IO, "the second");
    CHECK_EQ(ckpt_err_move(&err, &first), -1);
    CHECK_EQ(ckpt_err_move(&err, &second), -1);
    CHECK_EQ(err.code, CKPT_FORMAT);
    CHECK_STR(err.text, "the first");
    CHECK_EQ(ckpt_err_move(NULL, &second), -1);
}

TEST(err, system_errors_have_codes)
{
    static const struct {
        int errnum;
        enum ckpt_code code;
    } pairs[] = {{ENOENT, CKPT_MISSING}, {ENOTDIR, CKPT_MISSING}, {ENOMEM, CKPT_NOMEM},
                 {ESTALE, CKPT_STALE},   {EIO, CKPT_IO},          {EACCES, CKPT_IO}};
    for (size_t i = 0; i < sizeof pairs / sizeof pairs[0]; i++) {
        struct ckpt_err err = {0};
        (void)ckpt_fail_errno(&err, pairs[i].errnum, "opening");
        CHECK_EQ(err.code, pairs[i].code);
        CHECK(strstr(err.text, strerror(pairs[i].errnum)));
    }
}

TEST(json, floats_are_spelled_as_python_does)
{
    static const char *const texts[][2] = {
        {"1e-5", "1e-05"},
        {"10000.0", "10000.0"},
        {"1.0", "1.0"},
        {"0.1", "0.1"},
        {"1e16", "1e+16"},
        {"1e15", "1000000000000000.0"},
        {"123456.789", "123456.789"},
        {"0.0001", "0.0001"},
        {"0.00001", "1e-05"},
        {"-0.0", "-0.0"},
        {"1e22", "1e+22"},
        {"5e-324", "5e-324"},
        {"1.7976931348623157e308", "1.7976931348623157e+308"},
        {"0.30000000000000004", "0.30000000000000004"},
        {"1e100", "1e+100"},
        {"9007199254740993.0", "9007199254740992.0"},
        {"1.5e-7", "1.5e-07"},
    };
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        struct ckpt_err err = {0};
        char text[64], want[64], *got;
        json_t *j;
        (void)snprintf(text, sizeof text, "[%s]", texts[i][0]);
        (void)snprintf(want, sizeof want, "[%s]", texts[i][1]);
        CHECK_OK(ckpt_json_parse(text, strlen(text), "t", &j, &err));
        CHECK_OK(ckpt_json_dump(j, CKPT_JSON_COMPACT, false, &got, NULL, &err));
        CHECK_STR(got, want);
        free(got);
        json_decref(j);
    }
}

TEST(json, text_is_written_as_python_does)
{
    struct ckpt_err err = {0};
    const char *text = "{\"b\":[1,{}],\"a\":\"\\u00e9\\ud83d\\ude00\\n\\u007f/\",\"c\":[]}";
    char *got;
    json_t *j;
    CHECK_OK(ckpt_json_parse(text, strlen(text), "t", &j, &err));
    CHECK_OK(ckpt_json_dump(j, CKPT_JSON_PYTHON, true, &got, NULL, &err));
    CHECK_STR(got, "{\n  \"a\": \"\\u00e9\\ud83d\\ude00\\n\\u007f/\",\n  \"b\": [\n    1,\n    {}\n"
                   "  ],\n  \"c\": []\n}\n");
    free(got);
    json_decref(j);
}

TEST(json, what_is_not_strict_json_is_refused)
{
    static const char *const texts[] = {
        "",
        "{",
        "[1,]",
        "{\"a\":1,\"a\":2}",
        "NaN",
        "[Infinity]",
        "'a'",
        "[01]",
        "{a:1}",
        "[1] x",
        "[\"\\u0000\"]",
        "[\"\\ud800\"]",
        "[1e999]",
        "[99999999999999999999]",
        "[\"\xff\"]",
        "/* */ {}",
    };
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        struct ckpt_err err = {0};
        json_t *j;
        CHECK_FAILS(ckpt_json_parse_strict(texts[i], strlen(texts[i]), "file", &j, &err),
                    CKPT_FORMAT, "file: not valid JSON");
    }
}

/* Every line is what json.dumps(json.loads(text)) writes, but for numbers that are none (those are
 * as transformers 5 writes them). */
TEST(json, text_of_python_is_read_as_python_does)
{
    static const char *const texts[][2] = {
        {"{\"a\": 1, \"b\": 2, \"a\": 3}", "{\"a\":3,\"b\":2}"},
        {"[NaN, Infinity, -Infinity]",
         "[{\"__float__\":\"NaN\"},{\"__float__\":\"Infinity\"},{\"__float__\":\"-Infinity\"}]"},
        {"[1e400, -1e400, 1e-400]",
         "[{\"__float__\":\"Infinity\"},{\"__float__\":\"-Infinity\"},0.0]"},
        {"[9223372036854775807, 9223372036854775808, -9223372036854775809]",
         "[9223372036854775807,9223372036854775808,-9223372036854775809]"},
        {"{\"n\": 1000000000000000019884624838656}", "{\"n\":1000000000000000019884624838656}"},
        {"[\"\\ud800\", \"\\udc00\\ud83d\\ude00\", \"x\\uDBFFy\", \"\\\\ud800\"]",
         "[\"\\ud800\",\"\\udc00\\ud83d\\ude00\",\"x\\udbffy\",\"\\\\ud800\"]"},
        {"[\"NaN and \\\" Infinity\", NaN]", "[\"NaN and \\\" Infinity\",{\"__float__\":\"NaN\"}]"},
    };
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        struct ckpt_err err = {0};
        char *got;
        json_t *j;
        CHECK_OK(ckpt_json_parse(texts[i][0], strlen(texts[i][0]), "t", &j, &err));
        CHECK_OK(ckpt_json_dump(j, CKPT_JSON_COMPACT, false, &got, NULL, &err));
        CHECK_STR(got, texts[i][1]);
        free(got);
        json_decref(j);
    }
}

TEST(json, text_that_python_does_not_read_is_refused)
{
    static const char *const texts[] = {
        "",          "[1,]",          "[nan]",        "[inf]", "[+Infinity]",
        "[Infinit]", "[--Infinity]",  "[\"\\ud80\"]", "['a']", "[01]",
        "[1e400",    "{\"a\":1 NaN}", "[\"\\ud800]",
    };
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        struct ckpt_err err = {0};
        json_t *j;
        CHECK_FAILS(ckpt_json_parse(texts[i], strlen(texts[i]), "file", &j, &err), CKPT_FORMAT,
                    "file: not valid JSON");
    }
}

TEST(json, depth_has_a_limit)
{
    struct ckpt_err err = {0};
    char text[200] = "";
    json_t *j;
    for (int n = 64; n <= 65; n++) {
        memset(text, '[', (size_t)n);
        memset(text + n, ']', (size_t)n);
        if (n == 64) {
            CHECK_OK(ckpt_json_parse(text, 128, "t", &j, &err));
            json_decref(j);
        } else {
            CHECK_FAILS(ckpt_json_parse(text, 130, "t", &j, &err), CKPT_LIMIT, "deeper than 64");
        }
    }
}

TEST(str, order_is_natural)
{
    static const char *const sorted[] = {"",  "a",      "a1",      "a2",       "a10",     "a10b",
                                         "b", "step-9", "step-10", "step-010", "step-11", "x"};
    size_t n = sizeof sorted / sizeof sorted[0];
    for (size_t i = 0; i < n; i++)
        for (size_t k = 0; k < n; k++) {
            int c = ckpt_natural_cmp(sorted[i], sorted[k]);
            /* "010" and "10" are equal numbers: any order, but total */
            if (atoi(sorted[i] + 5 * (strlen(sorted[i]) > 5)) == 10 &&
                atoi(sorted[k] + 5 * (strlen(sorted[k]) > 5)) == 10 && i != k)
                CHECK(c != 0 && (c < 0) == (ckpt_natural_cmp(sorted[k], sorted[i]) > 0));
            else
                CHECK((c < 0) == (i < k) && (c == 0) == (i == k));
        }
}

TEST(str, numbers_are_digits_and_fit)
{
    unsigned long long v;
    CHECK(ckpt_parse_u64("18446744073709551615", 20, &v) && v == UINT64_MAX);
    CHECK(!ckpt_parse_u64("18446744073709551616", 20, &v));
    CHECK(!ckpt_parse_u64("", 0, &v) && !ckpt_parse_u64("-1", 2, &v));
    CHECK(!ckpt_parse_u64(" 1", 2, &v) && !ckpt_parse_u64("1x", 2, &v));
}

TEST(str, utf8_is_checked)
{
    static const char *const good[] = {"", "a", "\xc3\xa9", "\xe2\x82\xac", "\xf0\x9f\x98\x80"};
    static const char *const bad[] = {"\xff",         "\xc3",         "\xc0\x80",
                                      "\xe0\x80\x80", "\xed\xa0\x80", "\xf4\x90\x80\x80",
                                      "\x80",         "\xf0\x9f\x98"};
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++)
        CHECK(ckpt_utf8_ok(good[i]));
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        CHECK(!ckpt_utf8_ok(bad[i]));
}

TEST(map, many_keys_are_found_again)
{
    enum { N = 10000 };
    static char keys[N][16];
    struct ckpt_map m = {0};
    uint32_t v;
    bool is_new;
    CHECK(!ckpt_map_get(&m, "x", 1, &v));
    for (uint32_t i = 0; i < N; i++) {
        (void)snprintf(keys[i], sizeof keys[i], "key%u", i);
        CHECK_EQ(ckpt_map_put(&m, keys[i], strlen(keys[i]), i, &v, &is_new), 0);
        CHECK(is_new && v == i);
    }
    CHECK_EQ(ckpt_map_put(&m, "key7", 4, 99, &v, &is_new), 0);
    CHECK(!is_new && v == 7);
    for (uint32_t i = 0; i < N; i++)
        CHECK(ckpt_map_get(&m, keys[i], strlen(keys[i]), &v) && v == i);
    CHECK(!ckpt_map_get(&m, "key", 3, &v) && m.len == N);
    ckpt_map_release(&m);
}

TEST(mem, the_arena_aligns_and_keeps)
{
    struct ckpt_arena a = {0};
    char *s[2000];
    for (int i = 0; i < 2000; i++) {
        char text[32];
        (void)snprintf(text, sizeof text, "text %d", i);
        CHECK((s[i] = ckpt_arena_strdup(&a, text)) != NULL);
        void *p = ckpt_arena_alloc(&a, (size_t)(i * 37 % 50000));
        CHECK(p && (uintptr_t)p % _Alignof(max_align_t) == 0);
        memset(p, 0xaa, (size_t)(i * 37 % 50000));
    }
    for (int i = 0; i < 2000; i++)
        CHECK(atoi(s[i] + 5) == i);
    CHECK(ckpt_arena_alloc(&a, SIZE_MAX) == NULL && ckpt_arena_alloc(&a, SIZE_MAX - 20) == NULL);
    ckpt_arena_release(&a);
}

TEST(vec, growth_that_does_not_fit_changes_nothing)
{
    CKPT_VEC(uint64_t) v = {0};
    CHECK_EQ(ckpt_vec_push(&v, 1), 0);
    CHECK(ckpt_vec_reserve(&v, SIZE_MAX) < 0 && ckpt_vec_reserve(&v, SIZE_MAX / 8) < 0);
    CHECK(ckpt_vec_reserve(&v, SIZE_MAX / 8 + 100) < 0); /* their bytes have no number */
    CHECK(v.len == 1 && v.ptr[0] == 1);
    ckpt_vec_release(&v);
}

static int visit(void *ctx, size_t i, struct ckpt_err *err)
{
    atomic_int *seen = ctx;
    atomic_fetch_add(&seen[i], 1);
    return i >= 700 && i % 100 == 0 ? ckpt_fail(err, CKPT_FORMAT, "item %zu", i) : 0;
}

TEST(par, the_first_failure_is_reported_and_all_before_it_is_done)
{
    static atomic_int seen[1000];
    struct ckpt_err err = {0};
    for (unsigned threads = 0; threads < 9; threads += 4) {
        memset(seen, 0, sizeof seen);
        CHECK_OK(ckpt_parallel(700, threads, visit, seen, &err));
        for (int i = 0; i < 700; i++)
            CHECK_EQ(seen[i], 1);
        memset(seen, 0, sizeof seen);
        CHECK_FAILS(ckpt_parallel(1000, threads, visit, seen, &err), CKPT_FORMAT, "item 700");
        for (int i = 0; i < 700; i++)
            CHECK_EQ(seen[i], 1);
        err = (struct ckpt_err){0};
    }
    CHECK_OK(ckpt_parallel(0, 4, visit, seen, &err));
}

struct sized {
    size_t size;
    uint64_t first, second;
};

TEST(sized, a_caller_s_struct_is_used_as_far_as_it_goes)
{
    const struct sized given = {sizeof given, 1, 2};
    struct sized own = {0, 7, 8}, small = {offsetof(struct sized, second), 7, 8};
    struct sized large = {sizeof large + 8, 7, 8}, none = {0, 7, 8};
    struct ckpt_err err = {0};

    CHECK_OK(ckpt_sized_give(&small, &given, sizeof given, "sized", &err));
    CHECK(small.size == offsetof(struct sized, second) && small.first == 1 && small.second == 8);
    CHECK_OK(ckpt_sized_give(&large, &given, sizeof given, "sized", &err));
    CHECK(large.size == sizeof large + 8 && large.first == 1 && large.second == 2);
    CHECK_FAILS(ckpt_sized_give(&none, &given, sizeof given, "sized", &err), CKPT_USAGE,
                "the caller's struct sized has size 0");
    err = (struct ckpt_err){0};
    CHECK(none.size == 0 && none.first == 7 && none.second == 8);
    CHECK_OK(ckpt_sized_take(&own, sizeof own, &small, "sized", &err));
    CHECK(own.size == sizeof own && own.first == 1 && own.second == 8);
    CHECK_FAILS(ckpt_sized_take(&own, sizeof own, &none, "sized", &err), CKPT_USAGE,
                "the caller's struct sized has size 0: set its size to sizeof(struct sized)");
    err = (struct ckpt_err){0};
    CHECK_FAILS(ckpt_sized_take(&own, sizeof own, &large, "sized", &err), CKPT_USAGE, "32");
}

/* The check values of both polynomials (of Williams' catalogue). */
TEST(crc32, the_check_values_come_out_in_one_part_and_in_two)
{
    CHECK_EQ(ckpt_crc32(0, "123456789", 9), 0xcbf43926);
    CHECK_EQ(ckpt_crc32c(0, "123456789", 9), 0xe3069283);
    CHECK_EQ(ckpt_crc32c(ckpt_crc32c(0, "1234", 4), "56789", 5), 0xe3069283);
}

TESTS(T(err, the_first_failure_stays_and_context_goes_before_it),
      T(err, hostile_names_become_one_printable_line), T(err, an_error_moves_only_where_none_is),
      T(err, system_errors_have_codes), T(json, floats_are_spelled_as_python_does),
      T(json, text_is_written_as_python_does), T(json, what_is_not_strict_json_is_refused),
      T(json, text_of_python_is_read_as_python_does),
      T(json, text_that_python_does_not_read_is_refused), T(json, depth_has_a_limit),
      T(str, order_is_natural), T(str, numbers_are_digits_and_fit), T(str, utf8_is_checked),
      T(map, many_keys_are_found_again), T(mem, the_arena_aligns_and_keeps),
      T(vec, growth_that_does_not_fit_changes_nothing),
      T(par, the_first_failure_is_reported_and_all_before_it_is_done),
      T(crc32, the_check_values_come_out_in_one_part_and_in_two),
      T(sized, a_caller_s_struct_is_used_as_far_as_it_goes))
