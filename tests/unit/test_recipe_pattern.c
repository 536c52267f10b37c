/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>

#include "test.h"

#include "base/str.h"
#include "recipe/language/name.h"
#include "recipe/language/pattern.h"

static struct ckpt_arena arena;
static struct ckpt_scope scope;

static int parse(const char *s, struct ckpt_pattern *p, struct ckpt_err *err)
{
    struct ckpt_pattern_text t = {"test", s, s, NULL};

    scope = (struct ckpt_scope){.arena = &arena};
    if (ckpt_pattern_parse(&scope, &t, 0, p, err) < 0 || ckpt_scope_close(&scope, err) < 0)
        return -1;
    return ckpt_pattern_terms(&scope, &t, 0, p, err);
}

static int names(const char *s, struct ckpt_name **n, uint32_t *count, struct ckpt_err *err)
{
    struct ckpt_pattern_text t = {"test", s, s, NULL};

    scope = (struct ckpt_scope){.arena = &arena};
    return ckpt_name_parse(&scope, &t, strlen(s), n, count, err);
}

TEST(pattern, products_and_sums_are_multiplied_out)
{
    struct ckpt_err err = {0};
    struct ckpt_pattern p;
    char text[64];

    CHECK_OK(parse("(g (q=share + k=1 + v=1) d)/tp h", &p, &err));
    CHECK_EQ(p.ndim, 2);
    CHECK_EQ(p.nterm, 3);
    CHECK_STR(ckpt_axes_text(&scope, p.term[0].axes, text, sizeof text), "g q d h");
    CHECK_STR(ckpt_axes_text(&scope, p.term[2].axes, text, sizeof text), "g v d h");
    CHECK_STR(p.dim[0].rank, "tp");
    CHECK_OK(parse("((a + b) (c + (d + e) f)) ... 1", &p, &err));
    CHECK_EQ(p.nterm, 6);
    CHECK_EQ(p.rest_at, 1);
    CHECK_OK(parse("", &p, &err));
    CHECK_EQ(p.nterm, 1);
}

TEST(pattern, a_mark_says_whether_parts_are_shared)
{
    struct ckpt_pattern p;
    struct ckpt_err err = {0};

    CHECK_OK(parse("(kv d)/tp* (k=kv/tp* e + v=kv/tp e)", &p, &err));
    CHECK_STR(p.dim[0].rank, "tp");
    CHECK(p.dim[0].shared);
    CHECK(p.dim[1].child[0].child[0].shared && !p.dim[1].child[1].child[0].shared);
    CHECK_FAILS(parse("(kv d)* h", &p, &err), CKPT_FORMAT, "");
}

TEST(pattern, words_of_two_letters_are_dims)
{
    struct ckpt_err err = {0};
    struct ckpt_pattern p;

    CHECK_OK(parse("(gate=f + heads) h _pad", &p, &err));
    CHECK_EQ(scope.nvar, 4);
    CHECK(!scope.var[0].dim && scope.var[1].dim && !scope.var[2].dim && !scope.var[3].dim);
}

TEST(pattern, errors_name_the_character)
{
    static const struct {
        const char *text, *needle;
    } bad[] = {
        {"(a b", "character 1: this '(' is not closed"},
        {"a)", "character 2: ')' where"},
        {"a b a", "axis 'a' occurs twice"},
        {"(a + a)", "the term 'a' twice"},
        {"(a=2 + b) a=3", "character 13: axis 'a' was given another size"},
        {"a 2", "character 3: the only number that stands alone is 1"},
        {"a=", "character 3: a size"},
        {"a=0", "character 3: not a size"},
        {"a=99999999999999999999999", "character 3: not a size"},
        {"a/ b", "character 3: the name of a rank"},
        {"(a + ) b", "character 6: ')' where an axis"},
        {"... ...", "character 5: '...' occurs twice"},
        {"a...", "character 2: '.'"},
        {"a*b", "character 2: '*'"},
        {"((((((((((((((((((a))))))))))))))))))", "nested deeper"},
        {"a b c d e f g i j k l m n", "more than 12 dimensions"},
        {"((a+b)(c+d)(e+f)(g+i)(j+k)(l+m)(n+o)(p+q)(r+s))", "more than 256 terms"},
    };
    struct ckpt_err err = {0};
    struct ckpt_pattern p;

    UNUSED_STATE;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        memset(&err, 0, sizeof err);
        if (parse(bad[i].text, &p, &err) == 0 || !strstr(err.text, bad[i].needle))
            fail_msg("'%s': expected '%s', got '%s'", bad[i].text, bad[i].needle, err.text);
    }
}

TEST(pattern, one_unknown_is_solved_from_a_dimension)
{
    struct ckpt_err err = {0};
    struct ckpt_pattern p;
    struct ckpt_sizes s = {.scope = &scope};

    CHECK_OK(parse("(gate=f + up=f)", &p, &err));
    CHECK(ckpt_factor_solve(&p.dim[0], &s, 10, false));
    CHECK_EQ(s.var[0], 5);
    s.known = 0;
    CHECK(!ckpt_factor_solve(&p.dim[0], &s, 11, false));
    CHECK_OK(parse("(n (k=3 + m) x=2)", &p, &err));
    s.known = 0;
    CHECK(!ckpt_factor_solve(&p.dim[0], &s, 40, false)); /* two unknowns */
    s.var[0] = 4;
    s.known = 1;
    CHECK(ckpt_factor_solve(&p.dim[0], &s, 40, false)); /* 4 * (3 + m) * 2 */
    CHECK_EQ(s.var[1], 2);
    CHECK_OK(parse("(vocab + _pad)", &p, &err));
    s.var[0] = 7;
    s.known = 1;
    CHECK(ckpt_factor_solve(&p.dim[0], &s, 7, false));
    CHECK_EQ(s.var[1], 0);
    CHECK_OK(parse("(a=f b=f)", &p, &err));
    s.known = 0;
    CHECK(!ckpt_factor_solve(&p.dim[0], &s, 9, false)); /* not linear */
}

TEST(pattern, a_term_has_offset_and_strides)
{
    struct ckpt_err err = {0};
    struct ckpt_pattern p;
    struct ckpt_sizes s = {.scope = &scope};
    struct ckpt_layout l;

    CHECK_OK(parse("(g (q=2 + k=1 + v=1) d)", &p, &err));
    for (uint32_t v = 0; v < scope.nvar; v++) { /* g=3, d=8 */
        s.var[v] = scope.var[v].name[0] == 'g' ? 3 : 8;
        s.known |= 1u << v;
    }
    ckpt_factor_layout(&p.dim[0], &p.term[2], &s, &l);
    CHECK_EQ(l.offset, 24);
    CHECK_EQ(l.n, 3);
    CHECK_EQ(l.at[0].stride, 32);
    CHECK_EQ(l.at[1].stride, 8);
    CHECK_EQ(l.at[2].stride, 1);
}

TEST(name, spellings_numbers_and_absent_parts)
{
    struct ckpt_err err = {0};
    struct ckpt_name *n;
    uint32_t count;
    uint64_t v[CKPT_NAME_NUMBERS];

    CHECK_OK(names("a[.{layer}].<b|c.d>.x", &n, &count, &err));
    CHECK_EQ(count, 4);
    CHECK_STR(n[0].text, "a.{layer}.b.x");
    CHECK_STR(n[3].text, "a.c.d.x");
    CHECK_EQ(n[0].lead, -1);
    CHECK_EQ(n[3].lead, 0);
    CHECK(ckpt_name_match(&n[0], "a.12.b.x", 8, v));
    CHECK_EQ(v[0], 12);
    CHECK(!ckpt_name_match(&n[0], "a.012.b.x", 9, v));
    CHECK(!ckpt_name_match(&n[0], "a.-1.b.x", 8, v));
    CHECK(!ckpt_name_match(&n[0], "a..b.x", 6, v));
    CHECK(!ckpt_name_match(&n[0], "a.99999999999999999999.b.x", 26, v));
    CHECK(!ckpt_name_match(&n[0], "a.1.b.xy", 8, v));
    CHECK_OK(names("w{r j}.{attention:layer}.{k+layers}.{m+3}.{expert/ep}", &n, &count, &err));
    CHECK_EQ(n[0].part[1].naxis, 2);
    CHECK_STR(n[0].part[3].list, "attention");
    CHECK(n[0].part[5].plus_var >= 0);
    CHECK_EQ(n[0].part[7].plus, 3);
    CHECK_STR(n[0].part[9].rank, "ep");
}

TEST(name, skeletons_of_names_and_templates_agree)
{
    struct ckpt_err err = {0};
    struct ckpt_name *n;
    uint32_t count;
    struct ckpt_str a = {0}, b = {0};
    uint64_t v[CKPT_NAME_NUMBERS] = {10, 7};

    CHECK_OK(names("layers.{layer}.fc1.w{j}.x2", &n, &count, &err));
    ckpt_name_render(n, v, &a);
    CHECK_STR(ckpt_str_get(&a), "layers.10.fc1.w7.x2");
    ckpt_name_skeleton(a.ptr, a.len, &b);
    ckpt_str_clear(&a);
    ckpt_name_template_skeleton(n, &a);
    CHECK_STR(ckpt_str_get(&a), ckpt_str_get(&b));
    ckpt_str_release(&a);
    ckpt_str_release(&b);
}

TEST(name, errors_name_the_character)
{
    static const struct {
        const char *text, *needle;
    } bad[] = {
        {"a.{", "character 4: an axis must stand in braces"},
        {"a.{}", "character 4: an axis"},
        {"a.{x", "character 5: '}' expected"},
        {"a.{x}{y}", "character 6: two numbers follow each other without text between them"},
        {"a.{x}1", "character 6: a digit follows a number"},
        {"a.{x}.{x}", "axis 'x' occurs twice"},
        {"a<b", "character 2: this '<' is not closed"},
        {"a]b", "character 2: ']' has no opening bracket"},
        {"a<b[c]>", "character 4: '[' inside '<'"},
        {"a[.b]", "an optional part must hold a number"},
        {"a[.{x y}]", "one plain axis"},
        {"a[.{x}][.{y}]", "one optional part"},
        {"a<.{x}|.b>", "spellings have different numbers"},
        {"a.{l:x y}", "a list is indexed by one axis"},
        {"a.{x+}", "a word or a number must follow '+'"},
        {"", "the name is empty"},
        {"<|>", "the name is empty"},
        {"<a|b><a|b><a|b><a|b><a|b><a|b><a|b>", "more than 64 spellings"},
    };
    struct ckpt_err err = {0};
    struct ckpt_name *n;
    uint32_t count;

    UNUSED_STATE;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        memset(&err, 0, sizeof err);
        if (names(bad[i].text, &n, &count, &err) == 0 || !strstr(err.text, bad[i].needle))
            fail_msg("'%s': expected '%s', got '%s'", bad[i].text, bad[i].needle, err.text);
    }
    ckpt_arena_release(&arena);
}

TESTS(T(pattern, a_mark_says_whether_parts_are_shared),
      T(pattern, products_and_sums_are_multiplied_out), T(pattern, words_of_two_letters_are_dims),
      T(pattern, errors_name_the_character), T(pattern, one_unknown_is_solved_from_a_dimension),
      T(pattern, a_term_has_offset_and_strides), T(name, spellings_numbers_and_absent_parts),
      T(name, skeletons_of_names_and_templates_agree), T(name, errors_name_the_character))
