/* SPDX-License-Identifier: Apache-2.0 */
/* Pulled values are what jansson reads, and what is refused is what jansson refuses. */
#include "test.h"

#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "pull_tree.h"
#include "random.h"

static void same(const char *text, size_t len)
{
    struct ckpt_err err = {0}, own = {0}, skipped = {0};
    json_t *whole = NULL;

    (void)ckpt_json_parse_strict(text, len, "text", &whole, &err);
    json_t *parts = pull_tree(text, len, false, &own);
    (void)pull_tree(text, len, true, &skipped);
    if (own.code != skipped.code)
        fail_msg("'%.*s': read '%s', skipped '%s'", (int)len, text, own.text, skipped.text);
    /* jansson alone wants an object or an array */
    if (parts && !json_is_object(parts) && !json_is_array(parts)) {
        json_decref(parts);
        parts = NULL;
    }
    if (!whole != !parts || (whole && !json_equal(whole, parts)))
        fail_msg("'%.*s': jansson says %s, pulling says %s", (int)len, text,
                 whole ? "yes" : err.text, parts ? "yes" : own.text);
    json_decref(whole);
    json_decref(parts);
}

static const char *const texts[] = {
    "{}",
    " { } ",
    "{\"a\":1}",
    "{\"a\":1,\"b\":[1,2,{\"c\":\"}\"}]}",
    "{\"a\" : \"x,y\" , \"b\" : {\"c\" : [ ] } }\n",
    "{\"\\\"\":\"\\\\\",\"\\u00e9\":1,\"\\ud83d\\ude00\":2}",
    "{\"a\":\"\\\\\\\"\"}",
    "",
    "{",
    "{\"a\":1",
    "{\"a\":1}}",
    "{\"a\":1} x",
    "{\"a\":1,}",
    "{,\"a\":1}",
    "{,}",
    "{\"a\":1,,\"b\":2}",
    "{\"a\"}",
    "{\"a\":}",
    "{\"a\":1 \"b\":2}",
    "{\"a\":[}",
    "{\"a\":[1}]",
    "{\"a\":]}",
    "{\"a\":1]",
    "{a:1}",
    "{\"a\":NaN}",
    "{\"a\":1e999}",
    "{\"a\":[-1,-0,1.5,-1.5e-3,9223372036854775807,-9223372036854775808]}",
    "{\"a\":9223372036854775808}",
    "{\"a\":-9223372036854775809}",
    "{\"a\":01}",
    "{\"a\":1.}",
    "{\"a\":.5}",
    "{\"a\":1e}",
    "{\"a\":-}",
    "{\"a\":[true,false,null,tru]}",
    "{\"a\":[true,false,null]}",
    "{\"a\":\"\\/\\b\\f\\n\\r\\t\\u20AC\\uFFFF\"}",
    "{\"a\":\"\\x\"}",
    "{\"a\":\"\\udc00\"}",
    "{\"a\":18446744073709551616}",
    "{\"a\\u0000\":1}",
    "{\"\\ud800\":1}",
    "{\"\\ud800\\u0041\":1}",
    "{\"\xff\":1}",
    "{\"a\":\"\x01\"}",
    "{\"a\":{\"b\":1,\"b\":2}}",
    "[]",
    "\"{}\"",
    "1",
};

TEST(json_pull, agree_with_jansson_on_the_whole)
{
    UNUSED_STATE;
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++)
        same(texts[i], strlen(texts[i]));
    same("{\"a\":1}\0", 8);
    same("{\"a\0\":1}", 8);
    same("{\"a\":10\0}", 9);
}

/* Every text cut short, and with one byte changed. */
TEST(json_pull, agree_with_jansson_on_damaged_texts)
{
    static const char bytes[] = "{}[],:\"\\ 1a";
    char buf[128];

    UNUSED_STATE;
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        const size_t len = strlen(texts[i]);
        memcpy(buf, texts[i], len);
        for (size_t at = 0; at < len; at++) {
            same(texts[i], at);
            for (size_t b = 0; b < sizeof bytes - 1; b++) {
                buf[at] = bytes[b];
                same(buf, len);
            }
            buf[at] = texts[i][at];
        }
    }
}

TEST(json_pull, agree_with_jansson_on_random_texts)
{
    static const char *const token[] = {
        "{",           "}",           "[",      "]",    ",",    ":", "\"a\"",
        "\"\\u00e9\"", "1",           "-1.5e3", "true", "null", " ", "\"\\ud83d\\ude00\"",
        "0",           "\"\xc3\xa9\""};
    uint64_t rng = 7;
    char buf[256];

    UNUSED_STATE;
    for (int round = 0; round < 200000; round++) {
        size_t len = 0;
        for (uint64_t n = random_range(&rng, 1, 12); n > 0; n--) {
            const char *t = token[random_range(&rng, 0, sizeof token / sizeof *token)];
            memcpy(buf + len, t, strlen(t));
            len += strlen(t);
        }
        same(buf, len);
    }
}

TEST(json_pull, nesting_has_a_limit)
{
    struct ckpt_err err = {0};
    char text[200];

    UNUSED_STATE;
    memset(text, '[', 100);
    memset(text + 100, ']', 100);
    same(text + 36, 128);
    CHECK(pull_tree(text, 200, true, &err) == NULL);
    CHECK(err.code == CKPT_LIMIT && strstr(err.text, "nested deeper than 64"));
}

TESTS(T(json_pull, agree_with_jansson_on_the_whole),
      T(json_pull, agree_with_jansson_on_damaged_texts),
      T(json_pull, agree_with_jansson_on_random_texts), T(json_pull, nesting_has_a_limit))
