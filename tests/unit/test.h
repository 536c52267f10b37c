/* SPDX-License-Identifier: Apache-2.0 */
/* A thin dress for cmocka: TEST(module, sentence) { CHECK(...); } and TESTS(...) for the list.
 * `test_box disjoint` runs the tests whose names contain "disjoint". */
#ifndef CKPT_TESTS_UNIT_TEST_H
#define CKPT_TESTS_UNIT_TEST_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#define TEST(module, sentence) static void module##_##sentence(void **state_)
#define T(module, sentence) cmocka_unit_test(module##_##sentence)
#define UNUSED_STATE ((void)state_)

#define CHECK(cond) ((void)state_, assert_true(cond))
#define CHECK_EQ(a, b) ((void)state_, assert_int_equal((a), (b)))
#define CHECK_STR(a, b) ((void)state_, assert_string_equal((a), (b)))

/* A call that must succeed, and one that must fail with this code and a text that contains
 * `needle`. `err` is in scope. */
#define CHECK_OK(call)                                                                             \
    do {                                                                                           \
        (void)state_;                                                                              \
        if ((call) < 0)                                                                            \
            fail_msg("%s: %s", #call, err.text);                                                   \
    } while (0)
#define CHECK_FAILS(call, want, needle)                                                            \
    do {                                                                                           \
        (void)state_;                                                                              \
        memset(&err, 0, sizeof err);                                                               \
        assert_int_equal((call), -1);                                                              \
        if (err.code != (want) || !strstr(err.text, needle))                                       \
            fail_msg("expected %s '%s', got %s '%s'", ckpt_code_name(want), needle,                \
                     ckpt_code_name(err.code), err.text);                                          \
    } while (0)

#define TESTS(...) TESTS_UNLESS(-1, __VA_ARGS__)

/* End with this status instead, if it is one: 77 skipped, 0 there is nothing to test here. */
#define TESTS_UNLESS(status, ...)                                                                  \
    int main(int argc, char **argv)                                                                \
    {                                                                                              \
        const struct CMUnitTest tests[] = {__VA_ARGS__};                                           \
        char filter[256];                                                                          \
        const int instead = (status);                                                              \
        if (instead >= 0)                                                                          \
            return instead;                                                                        \
        if (argc > 1) {                                                                            \
            (void)snprintf(filter, sizeof filter, "*%s*", argv[1]);                                \
            cmocka_set_test_filter(filter);                                                        \
        }                                                                                          \
        return cmocka_run_group_tests(tests, NULL, NULL);                                          \
    }

#endif
