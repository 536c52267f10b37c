/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>

#include "test.h"

#include "recipe/language/expr.h"

static json_t *config;
static struct ckpt_catalog *cat;
static struct ckpt_arena arena;

static json_t *get(void *ctx, const char *key)
{
    (void)ctx;
    return json_incref(ckpt_json_at(config, key));
}

static void setup(void)
{
    struct ckpt_err err = {0};
    const uint64_t dim[2] = {6, 4};
    json_error_t je;
    size_t i;

    config = json_loads("{\"n\": 12, \"zero\": 0, \"r\": 1.5, \"t\": true, \"f\": false, \"s\": "
                        "\"x\", \"nil\": null, \"o\": {\"a\": [1, 5]}}",
                        0, &je);
    if (ckpt_catalog_new(&cat, &err) < 0 ||
        ckpt_catalog_add(cat, "l.0.w", CKPT_BF16, dim, 2, &i, &err) < 0 ||
        ckpt_catalog_add(cat, "l.10.w", CKPT_BF16, dim, 2, &i, &err) < 0 ||
        ckpt_catalog_add(cat, "l.2.w", CKPT_F32, dim, 2, &i, &err) < 0)
        fail_msg("%s", err.text);
}

static void teardown(void)
{
    json_decref(config);
    ckpt_catalog_free(cat);
    ckpt_arena_release(&arena);
}

/* The value as JSON, "unknown" for none; a static buffer. */
static const char *value(const char *text)
{
    static char buf[256];
    const struct ckpt_expr_env env = {get, NULL, cat};
    struct ckpt_err err = {0};
    const struct ckpt_expr *e;

    if (ckpt_expr_parse(&arena, "test", text, &e, &err) < 0)
        fail_msg("%s", err.text);
    json_t *v = ckpt_expr_eval(e, &env);
    char *s = v ? json_dumps(v, JSON_ENCODE_ANY | JSON_COMPACT) : strdup("unknown");
    (void)snprintf(buf, sizeof buf, "%s", s);
    free(s);
    json_decref(v);
    return buf;
}

TEST(expr, values)
{
    static const char *const ok[][2] = {
        {"1 + 2 * 3", "7"},
        {"(1 + 2) * 3", "9"},
        {"7 / 2", "3.5"},
        {"n / 4", "3"},
        {"-n + 1", "-11"},
        {"7 % 4", "3"},
        {"0 - 7 % 4", "-3"},
        {"(0 - 7) % 4", "1"},
        {"r * 2", "3.0"},
        {"1e-05", "1.0000000000000001e-5"},
        {"n / zero", "unknown"},
        {"n % zero", "unknown"},
        {"9223372036854775807 + 1", "unknown"},
        {"9223372036854775807 * 2", "unknown"},
        {"'a' + 1", "unknown"},
        {"o.a", "[1,5]"},
        {"5 in o.a", "true"},
        {"2 in o.a", "false"},
        {"2 in n", "unknown"},
        {"n = 12.0", "true"},
        {"s = 'x'", "true"},
        {"s != 'x'", "false"},
        {"s < 'y'", "unknown"},
        {"n >= 12 and n < 13 and not (n > 12) and n <= 12", "true"},
        {"nil", "unknown"},
        {"missing.key", "unknown"},
        {"not missing", "unknown"},
        {"f and missing", "false"},
        {"missing and f", "false"},
        {"t and missing", "unknown"},
        {"t or missing", "true"},
        {"missing or t", "true"},
        {"f or missing", "unknown"},
        {"missing = 1", "unknown"},
        {"known(missing)", "false"},
        {"known(zero)", "true"},
        {"default(missing, nil, zero, 3)", "0"},
        {"if(t, 1, 2)", "1"},
        {"if(missing, 1, 2)", "unknown"},
        {"float(n)", "12.0"},
        {"int(r)", "1"},
        {"int(t)", "1"},
        {"int(s)", "unknown"},
        {"len(o.a)", "2"},
        {"each(i, 4, int((i + 1) % 2 != 0))", "[1,0,1,0]"},
        {"where(i, 7, not (i in o.a))", "[0,2,3,4,6]"},
        {"where(i, 0, true)", "[]"},
        {"each(i, 2, each(j, 2, i * 2 + j))", "[[0,1],[2,3]]"},
        {"each(i, 99999999, i)", "unknown"},
        {"each(i, 60000, each(j, 60000, 1))", "unknown"},
        {"where(i, 2000, i in each(j, 2000, j))", "unknown"}, /* more work than a config is worth */
        {"shape(l.10.w, 1)", "4"},
        {"shape(l.{layer}.w, 0)", "6"},
        {"shape(l.10.w, 2)", "unknown"},
        {"shape(nothing, 0)", "unknown"},
        {"dtype(l.2.<v|w>)", "\"float32\""},
        {"layers(l.{layer}.w)", "[0,2,10]"},
        {"where(i, 3, i in layers(l.{layer}.w))", "[0,2]"},
        {"has(l.{layer}.w) and not has(l.{layer}.v)", "true"},
    };

    UNUSED_STATE;
    setup();
    for (size_t i = 0; i < sizeof ok / sizeof *ok; i++)
        if (strcmp(value(ok[i][0]), ok[i][1]) != 0)
            fail_msg("'%s' is %s, must be %s", ok[i][0], value(ok[i][0]), ok[i][1]);
    teardown();
}

TEST(expr, errors_name_the_character)
{
    static const struct {
        const char *text, *needle;
    } bad[] = {
        {"", "character 1: the expression ends"},
        {"1 +", "character 4: the expression ends"},
        {"(1", "character 1: this '(' is not closed"},
        {"'x", "character 1: this quote is not closed"},
        {"1 2", "character 3: '2' where the expression should end"},
        {"foo(1)", "character 1: no function 'foo'"},
        {"if(1, 2)", "if() takes 3 arguments"},
        {"len(1, 2)", "at most 1 arguments"},
        {"each(1, 2, 3)", "begins with a word"},
        {"12x", "'12x' is not a number"},
        {"99999999999999999999", "is not a number"},
        {"a = = b", "character 5: '=' where a value"},
        {"a & b", "character 3: '&'"},
        {"shape(a{, 0)", "an axis must stand in braces"},
    };
    struct ckpt_err err = {0};
    const struct ckpt_expr *e;
    char deep[1000];

    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        memset(&err, 0, sizeof err);
        if (ckpt_expr_parse(&arena, "test", bad[i].text, &e, &err) == 0 ||
            !strstr(err.text, bad[i].needle))
            fail_msg("'%s': expected '%s', got '%s'", bad[i].text, bad[i].needle, err.text);
    }
    memset(deep, '(', sizeof deep);
    deep[sizeof deep - 1] = '\0';
    CHECK_FAILS(ckpt_expr_parse(&arena, "test", deep, &e, &err), CKPT_FORMAT, "nested deeper");
    memset(deep, '-', sizeof deep - 1);
    CHECK_FAILS(ckpt_expr_parse(&arena, "test", deep, &e, &err), CKPT_FORMAT, "nested deeper");
    ckpt_arena_release(&arena);
}

TESTS(T(expr, values), T(expr, errors_name_the_character))
