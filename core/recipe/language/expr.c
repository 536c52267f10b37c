/* SPDX-License-Identifier: Apache-2.0 */
/* A recursive-descent parser. */
#include "recipe/language/expr.h"

#include <ctype.h>
#include <math.h>
#include <string.h>

#include "base/str.h"
#include "recipe/language/expr_node.h"
#include "recipe/language/field.h"

enum { MAX_DEPTH = 48, MAX_ARGS = 16 };

/* The kinds of arguments: an expression, a tensor name, or the name of a list's index. */
static const struct builtin {
    const char *name;
    unsigned char min, max;
    bool takes_name, takes_word;
} builtins[] = {
    [CKPT_CALL_SHAPE] = {"shape", 2, 2, .takes_name = true},
    [CKPT_CALL_DTYPE] = {"dtype", 1, 1, .takes_name = true},
    [CKPT_CALL_LAYERS] = {"layers", 1, 1, .takes_name = true},
    [CKPT_CALL_HAS] = {"has", 1, 1, .takes_name = true},
    [CKPT_CALL_FLOAT] = {"float", 1, 1},
    [CKPT_CALL_INT] = {"int", 1, 1},
    [CKPT_CALL_KNOWN] = {"known", 1, 1},
    [CKPT_CALL_DEFAULT] = {"default", 1, MAX_ARGS},
    [CKPT_CALL_IF] = {"if", 3, 3},
    [CKPT_CALL_EACH] = {"each", 3, 3, .takes_word = true},
    [CKPT_CALL_WHERE] = {"where", 3, 3, .takes_word = true},
    [CKPT_CALL_LEN] = {"len", 1, 1},
    [CKPT_CALL_JOIN] = {"join", 1, 1},
    [CKPT_CALL_CONTAINS] = {"contains", 2, 2},
    [CKPT_CALL_AT] = {"at", 2, 2},
    [CKPT_CALL_PART] = {"part", 2, 2, .takes_name = true},
    [CKPT_CALL_SQRT] = {"sqrt", 1, 1},
    [CKPT_CALL_ROUNDED] = {"rounded", 2, 2},
};

/* ---- parser ---- */

struct parser {
    struct ckpt_arena *arena;
    struct ckpt_pattern_text t;
    size_t i;
    int depth;
    struct ckpt_err *err;
};

/* How tightly operators bind. */
enum level { OR, AND, COMPARISON, SUM, PRODUCT, PRIMARY };

static struct ckpt_expr *parse_or(struct parser *p);

static struct ckpt_expr *parse_level(struct parser *p, enum level level);

static char skip(struct parser *p)
{
    while (isspace((unsigned char)p->t.s[p->i]))
        p->i++;
    return p->t.s[p->i];
}

/* Fails in a function that returns a pointer. */
#define fail_at(p, at, ...) ((void)ckpt_pattern_fail(&(p)->t, (at), (p)->err, __VA_ARGS__), NULL)

static struct ckpt_expr *node(struct parser *p, enum ckpt_expr_op op)
{
    struct ckpt_expr *e = ckpt_arena_alloc(p->arena, sizeof *e);

    if (!e) {
        (void)ckpt_nomem(p->err);
        return NULL;
    }
    *e = (struct ckpt_expr){.op = op};
    return e;
}

static struct ckpt_expr *node_of(struct parser *p, enum ckpt_expr_op op, size_t narg)
{
    struct ckpt_expr *e = node(p, op);

    if (!e || !(e->args = ckpt_arena_alloc(p->arena, (narg + 1) * sizeof *e->args)))
        return (void)ckpt_nomem(p->err), NULL;
    e->narg = (uint32_t)narg;
    return e;
}

static size_t word_at(const char *s)
{
    size_t n = 0;

    if (isalpha((unsigned char)s[0]) || s[0] == '_')
        while (isalnum((unsigned char)s[n]) || s[n] == '_' || (s[n] == '.' && n > 0))
            n++;
    return n;
}

static bool take_word(struct parser *p, const char *word)
{
    (void)skip(p);
    const char *s = p->t.s + p->i;
    size_t n = word_at(s);
    if (n == 0 || n != strlen(word) || memcmp(s, word, n) != 0)
        return false;
    p->i += n;
    return true;
}

static struct ckpt_expr *parse_number(struct parser *p)
{
    const char *s = p->t.s + p->i;
    size_t n = 0;
    bool real = false;
    char buf[64], *end;

    for (; isalnum((unsigned char)s[n]) || s[n] == '.' ||
           ((s[n] == '-' || s[n] == '+') && n > 0 && s[n - 1] == 'e');
         n++)
        real |= s[n] == '.' || s[n] == 'e';
    if (n >= sizeof buf)
        return fail_at(p, p->i, "a number has %zu digits, which is too many", n);
    memcpy(buf, s, n);
    buf[n] = '\0';
    struct ckpt_expr *e = node(p, real ? CKPT_OP_REAL : CKPT_OP_INT);
    if (!e)
        return NULL;
    unsigned long long u = 0;
    if (real)
        e->r = strtod(buf, &end);
    if (real ? *end || !isfinite(e->r) : !ckpt_parse_u64(buf, n, &u) || u > INT64_MAX)
        return fail_at(p, p->i, "'%s' is not a number", buf);
    e->i = (json_int_t)u;
    p->i += n;
    return e;
}

static struct ckpt_expr *parse_text(struct parser *p)
{
    size_t from = ++p->i;
    struct ckpt_expr *e = node(p, CKPT_OP_TEXT);

    while (p->t.s[p->i] && p->t.s[p->i] != '\'')
        p->i++;
    if (!p->t.s[p->i])
        return fail_at(p, from - 1, "this quote is not closed");
    if (e && !(e->text = ckpt_arena_strndup(p->arena, p->t.s + from, p->i - from)))
        return (void)ckpt_nomem(p->err), NULL;
    p->i++;
    return e;
}

/* Parse a tensor's name, up to ',' or ')' outside of braces. */
static int parse_name_arg(struct parser *p, struct ckpt_expr *e)
{
    int depth = 0;

    (void)skip(p);
    size_t from = p->i, len = 0;
    for (const char *s = p->t.s + from; s[len]; len++) {
        if (s[len] == '{' || s[len] == '<')
            depth++;
        else if (s[len] == '}' || s[len] == '>')
            depth--;
        else if (depth <= 0 && (s[len] == ',' || s[len] == ')' || s[len] == ' '))
            break;
    }
    char *text = ckpt_arena_strndup(p->arena, p->t.s + from, len);
    if (!text)
        return ckpt_nomem(p->err);
    if (ckpt_name_parse_alone(p->arena, p->t.what, text, &e->name, &e->nname, p->err) < 0)
        return -1;
    p->i = from + len;
    return 0;
}

static int parse_args(struct parser *p, struct ckpt_expr *e, const struct builtin *b, size_t at)
{
    const struct ckpt_expr *arg[MAX_ARGS];
    uint32_t n = 0, given = 0;

    do {
        if (given == b->max)
            return ckpt_pattern_fail(&p->t, p->i, p->err, "%s() takes at most %d arguments",
                                     b->name, b->max);
        if (given == 0 && b->takes_name) {
            if (parse_name_arg(p, e) < 0)
                return -1;
        } else if (given == 0 && b->takes_word) {
            (void)skip(p);
            size_t len = word_at(p->t.s + p->i);
            if (len == 0)
                return ckpt_pattern_fail(&p->t, p->i, p->err, "%s() begins with a word", b->name);
            if (!(e->text = ckpt_arena_strndup(p->arena, p->t.s + p->i, len)))
                return ckpt_nomem(p->err);
            p->i += len;
        } else if (!(arg[n++] = parse_or(p))) {
            return -1;
        }
        given++;
    } while (skip(p) == ',' && p->i++ < SIZE_MAX);
    if (p->t.s[p->i] != ')')
        return ckpt_pattern_fail(&p->t, p->i, p->err, "',' or ')' expected");
    p->i++;
    if (given < b->min)
        return ckpt_pattern_fail(&p->t, at, p->err, "%s() takes %d arguments", b->name, b->min);
    e->narg = n;
    e->args = ckpt_arena_dup(p->arena, arg, n * sizeof *arg);
    return e->args ? 0 : ckpt_nomem(p->err);
}

static struct ckpt_expr *parse_call(struct parser *p, size_t len)
{
    size_t at = p->i;

    for (size_t c = 0; c < sizeof builtins / sizeof *builtins; c++) {
        const struct builtin *b = &builtins[c];
        if (strlen(b->name) != len || memcmp(b->name, p->t.s + at, len) != 0)
            continue;
        struct ckpt_expr *e = node(p, CKPT_OP_CALL);
        if (!e)
            return NULL;
        e->call = (enum ckpt_expr_call)c;
        p->i += len;
        (void)skip(p);
        p->i++; /* "(" */
        return parse_args(p, e, b, at) < 0 ? NULL : e;
    }
    return fail_at(p, at, "no function '%.*s'", (int)len, p->t.s + at);
}

static struct ckpt_expr *parse_word(struct parser *p)
{
    static const struct {
        const char *word;
        enum ckpt_expr_op op;
    } constants[] = {{"true", CKPT_OP_TRUE}, {"false", CKPT_OP_FALSE}, {"null", CKPT_OP_NULL}};
    const char *s = p->t.s + p->i;
    size_t n = word_at(s), after = n;

    while (isspace((unsigned char)s[after]))
        after++;
    if (s[after] == '(')
        return parse_call(p, n);
    for (size_t i = 0; i < 3; i++)
        if (take_word(p, constants[i].word))
            return node(p, constants[i].op);
    struct ckpt_expr *e = node(p, CKPT_OP_KEY);
    if (e && !(e->text = ckpt_arena_strndup(p->arena, s, n)))
        return (void)ckpt_nomem(p->err), NULL;
    p->i += n;
    return e;
}

/* An operator that stands before its operand, which is one of `level`. */
static struct ckpt_expr *parse_unary(struct parser *p, enum ckpt_expr_op op, enum level level)
{
    if (++p->depth > MAX_DEPTH)
        return fail_at(p, p->i, "nested deeper than %d", MAX_DEPTH);
    struct ckpt_expr *operand = parse_level(p, level), *e = operand ? node_of(p, op, 1) : NULL;
    p->depth--;
    if (e)
        e->args[0] = operand;
    return e;
}

static struct ckpt_expr *parse_primary(struct parser *p)
{
    char c = skip(p);

    if (c == '(') {
        size_t open = p->i++;
        struct ckpt_expr *e = parse_or(p);
        if (e && skip(p) != ')')
            return fail_at(p, open, "this '(' is not closed");
        p->i++;
        return e;
    }
    if (c == '-') {
        p->i++;
        return parse_unary(p, CKPT_OP_NEGATE, PRIMARY);
    }
    if (c == '\'')
        return parse_text(p);
    if (isdigit((unsigned char)c))
        return parse_number(p);
    if (word_at(p->t.s + p->i) > 0)
        return parse_word(p);
    if (c == '\0')
        return fail_at(p, p->i, "the expression ends where a value should stand");
    return fail_at(p, p->i, "'%c' where a value should stand", c);
}

static const struct {
    const char *sign;
    enum level level;
    enum ckpt_expr_op op;
} operators[] = {
    {"or", OR, CKPT_OP_OR},         {"and", AND, CKPT_OP_AND},      {"!=", COMPARISON, CKPT_OP_NE},
    {"<=", COMPARISON, CKPT_OP_LE}, {">=", COMPARISON, CKPT_OP_GE}, {"=", COMPARISON, CKPT_OP_EQ},
    {"<", COMPARISON, CKPT_OP_LT},  {">", COMPARISON, CKPT_OP_GT},  {"in", COMPARISON, CKPT_OP_IN},
    {"+", SUM, CKPT_OP_ADD},        {"-", SUM, CKPT_OP_SUB},        {"*", PRODUCT, CKPT_OP_MUL},
    {"/", PRODUCT, CKPT_OP_DIV},    {"%", PRODUCT, CKPT_OP_MOD},
};

static bool take_operator(struct parser *p, enum level level, enum ckpt_expr_op *ret)
{
    (void)skip(p);
    for (size_t i = 0; i < sizeof operators / sizeof *operators; i++) {
        const char *sign = operators[i].sign;
        if (operators[i].level != level)
            continue;
        *ret = operators[i].op;
        if (isalpha((unsigned char)*sign)) {
            if (take_word(p, sign))
                return true;
        } else if (ckpt_has_prefix(p->t.s + p->i, sign)) {
            p->i += strlen(sign);
            return true;
        }
    }
    return false;
}

/* Parse operands of the next level with the operators of this one between them. Comparisons form no
 * chains, and "not" stands before one. */
static struct ckpt_expr *parse_level(struct parser *p, enum level level)
{
    enum ckpt_expr_op op;

    if (level == PRIMARY)
        return parse_primary(p);
    if (level == COMPARISON && take_word(p, "not"))
        return parse_unary(p, CKPT_OP_NOT, COMPARISON);
    struct ckpt_expr *e = parse_level(p, level + 1);
    while (e && take_operator(p, level, &op)) {
        struct ckpt_expr *left = e, *right = parse_level(p, level + 1);
        if ((e = right ? node_of(p, op, 2) : NULL)) {
            e->args[0] = left;
            e->args[1] = right;
        }
        if (level == COMPARISON)
            break;
    }
    return e;
}

static struct ckpt_expr *parse_or(struct parser *p)
{
    if (++p->depth > MAX_DEPTH)
        return fail_at(p, p->i, "nested deeper than %d", MAX_DEPTH);
    struct ckpt_expr *e = parse_level(p, OR);
    p->depth--;
    return e;
}

/* Chains such as a + a + a ... nest as deeply as they are long, so this bounds the recursion of the
 * evaluation. */
enum { MAX_TEXT = 4096 };

int ckpt_expr_parse(struct ckpt_arena *arena, const char *what, const char *text,
                    const struct ckpt_expr **ret, struct ckpt_err *err)
{
    struct parser p = {.arena = arena, .t = {what, text, text, NULL}, .err = err};

    if (strlen(text) > MAX_TEXT)
        return ckpt_fail(err, CKPT_LIMIT, "%s: an expression has more than %d bytes", what,
                         MAX_TEXT);
    struct ckpt_expr *e = parse_or(&p);
    if (!e)
        return -1;
    if (skip(&p) != '\0')
        return ckpt_pattern_fail(&p.t, p.i, err, "'%c' where the expression should end", text[p.i]);
    *ret = e;
    return 0;
}

/* ---- expressions that are written as JSON ---- */

static int from_json(struct parser *p, const json_t *j, json_t *keep, const struct ckpt_expr **ret);

static struct ckpt_expr *from_list(struct parser *p, const json_t *j, json_t *keep)
{
    struct ckpt_expr *e = node_of(p, CKPT_OP_CALL, json_array_size(j));

    for (size_t i = 0; e && i < e->narg; i++)
        if (from_json(p, json_array_get(j, i), keep, &e->args[i]) < 0)
            return NULL;
    if (e)
        e->call = CKPT_CALL_DEFAULT;
    return e;
}

static struct ckpt_expr *from_condition(struct parser *p, const json_t *j, json_t *keep)
{
    static const char *const known[] = {"when", "is", NULL};
    const json_t *when = json_object_get(j, "when"), *is = json_object_get(j, "is");
    struct ckpt_expr *e = node_of(p, CKPT_OP_CALL, 3);

    if (!e || ckpt_field_object(j, p->t.what, known, p->err) < 0)
        return NULL;
    if (!json_is_string(when) || !is) {
        (void)ckpt_fail(p->err, CKPT_FORMAT, "%s: %s", p->t.what,
                        is ? "'when' must be a string" : "'when' without 'is'");
        return NULL;
    }
    e->call = CKPT_CALL_IF;
    e->args[2] = node(p, CKPT_OP_NULL);
    return e->args[2] && from_json(p, when, keep, &e->args[0]) == 0 &&
                   from_json(p, is, keep, &e->args[1]) == 0
               ? e
               : NULL;
}

static struct ckpt_expr *from_object(struct parser *p, const json_t *j, json_t *keep)
{
    const size_t n = json_object_size(j);
    struct ckpt_expr *e = node_of(p, CKPT_OP_OBJECT, n);
    const char *key;
    json_t *v;
    size_t i = 0;

    if (!e || !(e->key = ckpt_arena_alloc(p->arena, (n + 1) * sizeof *e->key)))
        return (void)ckpt_nomem(p->err), NULL;
    json_object_foreach((json_t *)j, key, v) {
        if (!(e->key[i] = ckpt_arena_strdup(p->arena, key)))
            return (void)ckpt_nomem(p->err), NULL;
        if (from_json(p, v, keep, &e->args[i++]) < 0)
            return NULL;
    }
    return e;
}

static int from_json(struct parser *p, const json_t *j, json_t *keep, const struct ckpt_expr **ret)
{
    struct ckpt_expr *e;

    if (json_is_string(j))
        return ckpt_expr_parse(p->arena, p->t.what, json_string_value(j), ret, p->err);
    if (json_is_array(j))
        e = from_list(p, j, keep);
    else if (json_is_object(j))
        e = json_object_get(j, "when") ? from_condition(p, j, keep) : from_object(p, j, keep);
    else if ((e = node(p, CKPT_OP_LITERAL)) && json_array_append(keep, (json_t *)j) < 0)
        return ckpt_nomem(p->err);
    else if (e)
        e->literal = (json_t *)j;
    *ret = e;
    return e ? 0 : -1;
}

int ckpt_expr_from_json(struct ckpt_arena *arena, const char *what, const json_t *j, json_t *keep,
                        const struct ckpt_expr **ret, struct ckpt_err *err)
{
    struct parser p = {.arena = arena, .t = {.what = what}, .err = err};

    return from_json(&p, j, keep, ret);
}

/* ---- keys ---- */

int ckpt_expr_keys(const struct ckpt_expr *e, int (*fn)(void *ctx, const char *key), void *ctx)
{
    if (e->op == CKPT_OP_KEY && fn(ctx, e->text) < 0)
        return -1;
    for (uint32_t i = 0; i < e->narg; i++)
        if (ckpt_expr_keys(e->args[i], fn, ctx) < 0)
            return -1;
    return 0;
}

const char *ckpt_expr_key(const struct ckpt_expr *e)
{
    return e->op == CKPT_OP_KEY ? e->text : NULL;
}
