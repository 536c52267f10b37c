/* SPDX-License-Identifier: Apache-2.0 */
/* An object's members, one at a time, are what jansson says of the whole. */
#include "test.h"

#include <stdlib.h>
#include <string.h>

#include "base/json_members.h"

/* The object put together again from its members; NULL: refused. Counts them. */
static json_t *by_members(const char *text, size_t len, size_t *ret_n)
{
    char *own = malloc(len + 1);
    struct ckpt_json_members m;
    struct ckpt_err err = {0};
    json_t *all = json_object(), *value;
    const char *name;
    int rc;

    memcpy(own, text, len);
    own[len] = '\0';
    *ret_n = 0;
    if ((rc = ckpt_json_members_begin(&m, own, len, "text", &err)) == 0) {
        while ((rc = ckpt_json_members_next(&m, &name, &value, &err)) > 0) {
            ++*ret_n;
            (void)json_object_set(all, name, value);
        }
        ckpt_json_members_release(&m);
        assert_true(memcmp(own, text, len) == 0); /* restored */
    }
    assert_true(rc == 0 || err.text[0]);
    free(own);
    if (rc < 0) {
        json_decref(all);
        return NULL;
    }
    return all;
}

static void same(const char *text, size_t len)
{
    struct ckpt_err err = {0};
    json_t *whole = NULL;
    size_t n;

    (void)ckpt_json_parse(text, len, "text", &whole, &err);
    if (whole && !json_is_object(whole)) {
        json_decref(whole);
        whole = NULL;
    }
    json_t *parts = by_members(text, len, &n);
    if (parts && n != json_object_size(parts)) { /* two of a name, which the caller refuses */
        json_decref(parts);
        parts = NULL;
    }
    if (!whole != !parts || (whole && (!json_equal(whole, parts) || n != json_object_size(whole))))
        fail_msg("'%.*s': jansson says %s, the members say %s", (int)len, text,
                 whole ? "yes" : err.text, parts ? "yes" : "no");
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

TEST(json_members, agree_with_jansson_on_the_whole)
{
    UNUSED_STATE;
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++)
        same(texts[i], strlen(texts[i]));
    same("{\"a\":1}\0", 8);
    same("{\"a\0\":1}", 8);
}

/* Every text cut short, and with one byte changed. */
TEST(json_members, agree_with_jansson_on_damaged_texts)
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

TEST(json_members, two_of_a_name_are_the_callers_to_refuse)
{
    size_t n;
    json_t *j = by_members("{\"a\":1,\"a\":2}", 13, &n);

    UNUSED_STATE;
    CHECK(j != NULL);
    CHECK_EQ(n, 2);
    json_decref(j);
}

TESTS(T(json_members, agree_with_jansson_on_the_whole),
      T(json_members, agree_with_jansson_on_damaged_texts),
      T(json_members, two_of_a_name_are_the_callers_to_refuse))
