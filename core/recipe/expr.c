/* SPDX-License-Identifier: Apache-2.0 */
/* A recursive-descent parser and a tree walk with three-valued logic. */
#include "recipe/expr.h"

#include <assert.h>
#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/ckd.h"
#include "recipe/name.h"

enum { MAX_DEPTH = 48, MAX_ARGS = 16, MAX_LIST = 1 << 16, FUEL = 1 << 22 };

enum op {
    OP_INT,
    OP_REAL,
    OP_TEXT,
    OP_TRUE,
    OP_FALSE,
    OP_NULL,
    OP_KEY,
    OP_OR,
    OP_AND,
    OP_NOT,
    OP_NEGATE,
    OP_ADD,
    OP_SUB,
    OP_MUL,
    OP_DIV,
    OP_MOD,
    OP_EQ,
    OP_NE,
    OP_LT,
    OP_LE,
    OP_GT,
    OP_GE,
    OP_IN,
    OP_CALL,
};

enum call {
    CALL_SHAPE,
    CALL_DTYPE,
    CALL_LAYERS,
    CALL_HAS,
    CALL_FLOAT,
    CALL_INT,
    CALL_KNOWN,
    CALL_DEFAULT,
    CALL_IF,
    CALL_EACH,
    CALL_WHERE,
    CALL_LEN
};

/* What an argument is: an expression, a tensor name, or the word that a list's index is called. */
static const struct builtin {
    const char *name;
    unsigned char min, max;
    bool takes_name, takes_word;
} builtins[] = {
    [CALL_SHAPE] = {"shape", 2, 2, .takes_name = true},
    [CALL_DTYPE] = {"dtype", 1, 1, .takes_name = true},
    [CALL_LAYERS] = {"layers", 1, 1, .takes_name = true},
    [CALL_HAS] = {"has", 1, 1, .takes_name = true},
    [CALL_FLOAT] = {"float", 1, 1},
    [CALL_INT] = {"int", 1, 1},
    [CALL_KNOWN] = {"known", 1, 1},
    [CALL_DEFAULT] = {"default", 1, MAX_ARGS},
    [CALL_IF] = {"if", 3, 3},
    [CALL_EACH] = {"each", 3, 3, .takes_word = true},
    [CALL_WHERE] = {"where", 3, 3, .takes_word = true},
    [CALL_LEN] = {"len", 1, 1},
};

struct ckpt_expr {
    enum op op;
    enum call call;
    uint32_t narg;
    const struct ckpt_expr *arg[2]; /* of operators */
    const struct ckpt_expr **args;  /* of calls */
    const char *text;               /* OP_TEXT, OP_KEY, the word of each/where */
    json_int_t i;
    double r;
    const struct ckpt_name *name; /* of calls on tensors: all spellings */
    uint32_t nname;
};

/* ---- parser ---- */

struct parser {
    struct ckpt_arena *arena;
    struct ckpt_text t;
    size_t i;
    int depth;
    struct ckpt_err *err;
};

static struct ckpt_expr *parse_or(struct parser *p);

static char skip(struct parser *p)
{
    while (isspace((unsigned char)p->t.s[p->i]))
        p->i++;
    return p->t.s[p->i];
}

/* A failing helper that suits functions which return a pointer. */
#define fail_at(p, at, ...) ((void)ckpt_text_fail(&(p)->t, (at), (p)->err, __VA_ARGS__), NULL)

static struct ckpt_expr *node(struct parser *p, enum op op)
{
    struct ckpt_expr *e = ckpt_arena_alloc(p->arena, sizeof *e);

    if (!e) {
        (void)ckpt_nomem(p->err);
        return NULL;
    }
    *e = (struct ckpt_expr){.op = op};
    return e;
}

static struct ckpt_expr *binary(struct parser *p, enum op op, struct ckpt_expr *a,
                                struct ckpt_expr *b)
{
    struct ckpt_expr *e = a && b ? node(p, op) : NULL;

    if (e) {
        e->narg = 2;
        e->arg[0] = a;
        e->arg[1] = b;
    }
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
        return fail_at(p, p->i, "a number of %zu digits", n);
    memcpy(buf, s, n);
    buf[n] = '\0';
    struct ckpt_expr *e = node(p, real ? OP_REAL : OP_INT);
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
    struct ckpt_expr *e = node(p, OP_TEXT);

    while (p->t.s[p->i] && p->t.s[p->i] != '\'')
        p->i++;
    if (!p->t.s[p->i])
        return fail_at(p, from - 1, "this quote is not closed");
    if (e && !(e->text = ckpt_arena_strndup(p->arena, p->t.s + from, p->i - from)))
        return (void)ckpt_nomem(p->err), NULL;
    p->i++;
    return e;
}

/* A tensor's name up to ',' or ')', outside braces. */
static int parse_name_arg(struct parser *p, struct ckpt_expr *e)
{
    ckpt_cleanup(ckpt_freep) struct ckpt_scope *sc = calloc(1, sizeof *sc);
    struct ckpt_name *name;
    int depth = 0;

    if (!sc)
        return ckpt_nomem(p->err);
    sc->arena = p->arena;
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
    struct ckpt_text t = {p->t.what, text, text, NULL};
    if (ckpt_name_parse(sc, &t, len, &name, &e->nname, p->err) < 0)
        return -1;
    e->name = name;
    p->i = from + len;
    return 0;
}

static int parse_args(struct parser *p, struct ckpt_expr *e, const struct builtin *b, size_t at)
{
    const struct ckpt_expr *arg[MAX_ARGS];
    uint32_t n = 0, given = 0;

    do {
        if (given == b->max)
            return ckpt_text_fail(&p->t, p->i, p->err, "%s() takes at most %d arguments", b->name,
                                  b->max);
        if (given == 0 && b->takes_name) {
            if (parse_name_arg(p, e) < 0)
                return -1;
        } else if (given == 0 && b->takes_word) {
            (void)skip(p);
            size_t len = word_at(p->t.s + p->i);
            if (len == 0)
                return ckpt_text_fail(&p->t, p->i, p->err, "%s() begins with a word", b->name);
            if (!(e->text = ckpt_arena_strndup(p->arena, p->t.s + p->i, len)))
                return ckpt_nomem(p->err);
            p->i += len;
        } else if (!(arg[n++] = parse_or(p))) {
            return -1;
        }
        given++;
    } while (skip(p) == ',' && p->i++ < SIZE_MAX);
    if (p->t.s[p->i] != ')')
        return ckpt_text_fail(&p->t, p->i, p->err, "',' or ')' expected");
    p->i++;
    if (given < b->min)
        return ckpt_text_fail(&p->t, at, p->err, "%s() takes %d arguments", b->name, b->min);
    e->narg = n;
    e->args = ckpt_arena_alloc(p->arena, (n + 1) * sizeof *e->args);
    if (!e->args)
        return ckpt_nomem(p->err);
    memcpy(e->args, arg, n * sizeof *arg);
    return 0;
}

static struct ckpt_expr *parse_call(struct parser *p, size_t len)
{
    size_t at = p->i;

    for (size_t c = 0; c < sizeof builtins / sizeof *builtins; c++) {
        const struct builtin *b = &builtins[c];
        if (strlen(b->name) != len || memcmp(b->name, p->t.s + at, len) != 0)
            continue;
        struct ckpt_expr *e = node(p, OP_CALL);
        if (!e)
            return NULL;
        e->call = (enum call)c;
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
        enum op op;
    } constants[] = {{"true", OP_TRUE}, {"false", OP_FALSE}, {"null", OP_NULL}};
    const char *s = p->t.s + p->i;
    size_t n = word_at(s), after = n;

    while (isspace((unsigned char)s[after]))
        after++;
    if (s[after] == '(')
        return parse_call(p, n);
    for (size_t i = 0; i < 3; i++)
        if (take_word(p, constants[i].word))
            return node(p, constants[i].op);
    struct ckpt_expr *e = node(p, OP_KEY);
    if (e && !(e->text = ckpt_arena_strndup(p->arena, s, n)))
        return (void)ckpt_nomem(p->err), NULL;
    p->i += n;
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
        if (++p->depth > MAX_DEPTH)
            return fail_at(p, p->i, "nested deeper than %d", MAX_DEPTH);
        struct ckpt_expr *e = parse_primary(p), *neg = e ? node(p, OP_NEGATE) : NULL;
        p->depth--;
        if (neg)
            neg->narg = 1, neg->arg[0] = e;
        return neg;
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

static struct ckpt_expr *parse_product(struct parser *p)
{
    struct ckpt_expr *e = parse_primary(p);

    while (e) {
        char c = skip(p);
        if (c != '*' && c != '/' && c != '%')
            break;
        p->i++;
        e = binary(p, c == '*' ? OP_MUL : c == '/' ? OP_DIV : OP_MOD, e, parse_primary(p));
    }
    return e;
}

static struct ckpt_expr *parse_sum(struct parser *p)
{
    struct ckpt_expr *e = parse_product(p);

    while (e) {
        char c = skip(p);
        if (c != '+' && c != '-')
            break;
        p->i++;
        e = binary(p, c == '+' ? OP_ADD : OP_SUB, e, parse_product(p));
    }
    return e;
}

static struct ckpt_expr *parse_comparison(struct parser *p)
{
    static const struct {
        const char *sign;
        enum op op;
    } signs[] = {{"!=", OP_NE}, {"<=", OP_LE}, {">=", OP_GE},
                 {"=", OP_EQ},  {"<", OP_LT},  {">", OP_GT}};
    struct ckpt_expr *e = parse_sum(p);

    if (!e)
        return NULL;
    (void)skip(p);
    for (size_t i = 0; i < sizeof signs / sizeof *signs; i++)
        if (strncmp(p->t.s + p->i, signs[i].sign, strlen(signs[i].sign)) == 0) {
            p->i += strlen(signs[i].sign);
            return binary(p, signs[i].op, e, parse_sum(p));
        }
    if (take_word(p, "in"))
        return binary(p, OP_IN, e, parse_sum(p));
    return e;
}

static struct ckpt_expr *parse_not(struct parser *p)
{
    if (!take_word(p, "not"))
        return parse_comparison(p);
    if (++p->depth > MAX_DEPTH)
        return fail_at(p, p->i, "nested deeper than %d", MAX_DEPTH);
    struct ckpt_expr *e = parse_not(p), *no = e ? node(p, OP_NOT) : NULL;
    p->depth--;
    if (no)
        no->narg = 1, no->arg[0] = e;
    return no;
}

static struct ckpt_expr *parse_and(struct parser *p)
{
    struct ckpt_expr *e = parse_not(p);

    while (e && take_word(p, "and"))
        e = binary(p, OP_AND, e, parse_not(p));
    return e;
}

static struct ckpt_expr *parse_or(struct parser *p)
{
    if (++p->depth > MAX_DEPTH)
        return fail_at(p, p->i, "nested deeper than %d", MAX_DEPTH);
    struct ckpt_expr *e = parse_and(p);
    while (e && take_word(p, "or"))
        e = binary(p, OP_OR, e, parse_and(p));
    p->depth--;
    return e;
}

/* Left-leaning chains (a + a + a ...) are as deep as they are long: bound what eval will recurse
 * into. */
enum { MAX_TEXT = 4096 };

int ckpt_expr_parse(struct ckpt_arena *arena, const char *what, const char *text,
                    const struct ckpt_expr **ret, struct ckpt_err *err)
{
    struct parser p = {.arena = arena, .t = {what, text, text, NULL}, .err = err};

    if (strlen(text) > MAX_TEXT)
        return ckpt_fail(err, CKPT_LIMIT, "%s: an expression of more than %d bytes", what,
                         MAX_TEXT);
    struct ckpt_expr *e = parse_or(&p);
    if (!e)
        return -1;
    if (skip(&p) != '\0')
        return ckpt_text_fail(&p.t, p.i, err, "'%c' where the expression should end", text[p.i]);
    *ret = e;
    return 0;
}

void ckpt_expr_keys(const struct ckpt_expr *e, void (*fn)(void *ctx, const char *key), void *ctx)
{
    if (e->op == OP_KEY)
        fn(ctx, e->text);
    for (uint32_t i = 0; i < e->narg; i++)
        ckpt_expr_keys(e->op == OP_CALL ? e->args[i] : e->arg[i], fn, ctx);
}

const char *ckpt_expr_key(const struct ckpt_expr *e) { return e->op == OP_KEY ? e->text : NULL; }

/* ---- evaluation ---- */

/* A name that each() and where() bind. */
struct local {
    const char *name;
    json_int_t value;
    const struct local *up;
};

struct eval {
    const struct ckpt_expr_env *env;
    const struct local *local;
    unsigned fuel; /* bounds nested each() */
};

static json_t *eval(struct eval *ev, const struct ckpt_expr *e);

static enum ckpt_truth truth(const json_t *v)
{
    if (!v || json_is_null(v))
        return CKPT_UNKNOWN;
    if (json_is_boolean(v))
        return json_is_true(v) ? CKPT_TRUE : CKPT_FALSE;
    if (json_is_integer(v))
        return json_integer_value(v) ? CKPT_TRUE : CKPT_FALSE;
    if (json_is_real(v))
        return json_real_value(v) != 0 ? CKPT_TRUE : CKPT_FALSE;
    if (json_is_string(v))
        return json_string_length(v) ? CKPT_TRUE : CKPT_FALSE;
    return (json_is_array(v) ? json_array_size(v) : json_object_size(v)) ? CKPT_TRUE : CKPT_FALSE;
}

static json_t *truth_value(enum ckpt_truth t)
{
    return t == CKPT_UNKNOWN ? NULL : json_boolean(t == CKPT_TRUE);
}

static enum ckpt_truth eval_truth(struct eval *ev, const struct ckpt_expr *e)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *v = eval(ev, e);

    return truth(v);
}

static json_t *eval_key(struct eval *ev, const char *key)
{
    for (const struct local *l = ev->local; l; l = l->up)
        if (strcmp(l->name, key) == 0)
            return json_integer(l->value);
    json_t *v = ev->env->get ? ev->env->get(ev->env->ctx, key) : NULL;
    if (v && json_is_null(v)) {
        json_decref(v);
        v = NULL;
    }
    return v;
}

static json_t *arithmetic_int(enum op op, json_int_t a, json_int_t b)
{
    json_int_t r = 0;
    bool bad = false;

    if ((op == OP_DIV || op == OP_MOD) && (b == 0 || (b == -1 && a == INT64_MIN)))
        return NULL;
    switch (op) {
    case OP_ADD:
        bad = ckd_add(&r, a, b);
        break;
    case OP_SUB:
        bad = ckd_sub(&r, a, b);
        break;
    case OP_MUL:
        bad = ckd_mul(&r, a, b);
        break;
    case OP_MOD: /* as Python's: the sign of b */
        r = a % b;
        if (r && (r < 0) != (b < 0))
            r += b;
        break;
    default:
        if (a % b)
            return json_real((double)a / (double)b);
        r = a / b;
    }
    return bad ? NULL : json_integer(r);
}

static json_t *arithmetic(enum op op, const json_t *a, const json_t *b)
{
    if (json_is_integer(a) && json_is_integer(b))
        return arithmetic_int(op, json_integer_value(a), json_integer_value(b));
    if (!json_is_number(a) || !json_is_number(b))
        return NULL;
    double x = json_number_value(a), y = json_number_value(b), r;
    switch (op) {
    case OP_ADD:
        r = x + y;
        break;
    case OP_SUB:
        r = x - y;
        break;
    case OP_MUL:
        r = x * y;
        break;
    case OP_DIV:
        if (y == 0)
            return NULL;
        r = x / y;
        break;
    default:
        return NULL;
    }
    return isfinite(r) ? json_real(r) : NULL;
}

static bool equal(const json_t *a, const json_t *b)
{
    if (json_is_number(a) && json_is_number(b) && json_typeof(a) != json_typeof(b))
        return json_number_value(a) == json_number_value(b);
    return json_equal(a, b);
}

static json_t *compare(enum op op, const json_t *a, const json_t *b)
{
    int c;

    if (op == OP_EQ || op == OP_NE)
        return json_boolean(equal(a, b) == (op == OP_EQ));
    if (json_is_integer(a) && json_is_integer(b)) {
        json_int_t x = json_integer_value(a), y = json_integer_value(b);
        c = (x > y) - (x < y);
    } else if (json_is_number(a) && json_is_number(b)) {
        double x = json_number_value(a), y = json_number_value(b);
        c = (x > y) - (x < y);
    } else {
        return NULL;
    }
    return json_boolean(op == OP_LT ? c < 0 : op == OP_LE ? c <= 0 : op == OP_GT ? c > 0 : c >= 0);
}

static json_t *eval_in(const json_t *a, const json_t *list)
{
    size_t i;
    json_t *v;

    if (!json_is_array(list))
        return NULL;
    json_array_foreach(list, i, v) if (equal(a, v)) return json_true();
    return json_false();
}

static json_t *eval_binary(struct eval *ev, const struct ckpt_expr *e)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *a = eval(ev, e->arg[0]);
    ckpt_cleanup(ckpt_json_decrefp) json_t *b = eval(ev, e->arg[1]);

    if (!a || !b)
        return NULL;
    if (e->op == OP_IN)
        return eval_in(a, b);
    return e->op >= OP_EQ ? compare(e->op, a, b) : arithmetic(e->op, a, b);
}

static json_t *eval_logic(struct eval *ev, const struct ckpt_expr *e)
{
    const enum ckpt_truth decides = e->op == OP_OR ? CKPT_TRUE : CKPT_FALSE;
    enum ckpt_truth a = eval_truth(ev, e->arg[0]);

    if (a == decides)
        return truth_value(a);
    enum ckpt_truth b = eval_truth(ev, e->arg[1]);
    if (b == decides)
        return truth_value(b);
    return truth_value(a == CKPT_UNKNOWN ? a : b);
}

static bool any_match(const struct ckpt_expr *e, const char *name,
                      uint64_t value[CKPT_NAME_NUMBERS])
{
    size_t len = strlen(name);

    for (uint32_t i = 0; i < e->nname; i++)
        if (ckpt_name_match(&e->name[i], name, len, value))
            return true;
    return false;
}

static const struct ckpt_tensor *find_tensor(const struct eval *ev, const struct ckpt_expr *e)
{
    const struct ckpt_catalog *cat = ev->env->cat;
    uint64_t value[CKPT_NAME_NUMBERS];

    if (!cat)
        return NULL;
    for (uint32_t i = 0; i < e->nname; i++) {
        const struct ckpt_name *n = &e->name[i];
        const struct ckpt_tensor *t;
        if (n->npart == 1 && n->part[0].text && (t = ckpt_catalog_find(cat, n->part[0].text)))
            return t;
    }
    for (size_t i = 0; i < cat->tensors.len; i++)
        if (any_match(e, cat->tensors.ptr[i].name, value))
            return &cat->tensors.ptr[i];
    return NULL;
}

static int by_value(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

    return (x > y) - (x < y);
}

/* The first numbers of the names that fit, ascending, each once. */
static json_t *eval_layers(const struct eval *ev, const struct ckpt_expr *e)
{
    const struct ckpt_catalog *cat = ev->env->cat;
    uint64_t value[CKPT_NAME_NUMBERS] = {0};
    CKPT_VEC(uint64_t) found = {0};
    json_t *list = cat ? json_array() : NULL;

    for (size_t i = 0; list && i < cat->tensors.len; i++)
        if (any_match(e, cat->tensors.ptr[i].name, value) && ckpt_vec_push(&found, value[0]) < 0)
            break;
    if (found.len)
        qsort(found.ptr, found.len, sizeof *found.ptr, by_value);
    for (size_t i = 0; list && i < found.len; i++)
        if (i == 0 || found.ptr[i] != found.ptr[i - 1])
            (void)json_array_append_new(list, json_integer((json_int_t)found.ptr[i]));
    ckpt_vec_release(&found);
    return list;
}

static json_t *eval_shape(struct eval *ev, const struct ckpt_expr *e)
{
    const struct ckpt_tensor *t = find_tensor(ev, e);
    ckpt_cleanup(ckpt_json_decrefp) json_t *d = eval(ev, e->args[0]);

    if (!t || !json_is_integer(d))
        return NULL;
    json_int_t i = json_integer_value(d);
    return i >= 0 && i < t->rank && t->dim[i] <= INT64_MAX ? json_integer((json_int_t)t->dim[i])
                                                           : NULL;
}

/* each(i, n, e): the values of e. where(i, n, e): the i for which e is true. Unknown if any is. */
static json_t *eval_list(struct eval *ev, const struct ckpt_expr *e)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *n = eval(ev, e->args[0]);
    struct local l = {.name = e->text, .up = ev->local};
    json_t *list = json_array();
    bool ok = list && json_is_integer(n) && json_integer_value(n) <= MAX_LIST;

    ev->local = &l;
    for (; ok && l.value < json_integer_value(n); l.value++) {
        ckpt_cleanup(ckpt_json_decrefp) json_t *v = eval(ev, e->args[1]);
        if (!v || (e->call == CALL_WHERE && truth(v) == CKPT_UNKNOWN))
            ok = false;
        else if (e->call == CALL_EACH)
            ok = json_array_append(list, v) == 0;
        else if (truth(v) == CKPT_TRUE)
            ok = json_array_append_new(list, json_integer(l.value)) == 0;
    }
    ev->local = l.up;
    if (ok)
        return list;
    json_decref(list);
    return NULL;
}

static json_t *eval_to_number(struct eval *ev, const struct ckpt_expr *e)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *v = eval(ev, e->args[0]);

    if (json_is_boolean(v) && e->call == CALL_INT)
        return json_integer(json_is_true(v));
    if (!json_is_number(v))
        return NULL;
    if (e->call == CALL_FLOAT)
        return json_real(json_number_value(v));
    double r = json_number_value(v);
    if (json_is_integer(v))
        return json_incref(v);
    return r >= -0x1p62 && r <= 0x1p62 ? json_integer((json_int_t)r) : NULL;
}

static json_t *eval_len(struct eval *ev, const struct ckpt_expr *e)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *v = eval(ev, e->args[0]);

    return json_is_array(v) ? json_integer((json_int_t)json_array_size(v)) : NULL;
}

static json_t *eval_call(struct eval *ev, const struct ckpt_expr *e)
{
    const struct ckpt_tensor *t;
    json_t *v = NULL;
    enum ckpt_truth c;

    switch (e->call) {
    case CALL_SHAPE:
        return eval_shape(ev, e);
    case CALL_DTYPE:
        return (t = find_tensor(ev, e)) ? json_string(ckpt_dtype_torch_name(t->dtype)) : NULL;
    case CALL_LAYERS:
        return eval_layers(ev, e);
    case CALL_HAS:
        return ev->env->cat ? json_boolean(find_tensor(ev, e) != NULL) : NULL;
    case CALL_FLOAT:
    case CALL_INT:
        return eval_to_number(ev, e);
    case CALL_KNOWN:
        v = eval(ev, e->args[0]);
        c = v ? CKPT_TRUE : CKPT_FALSE;
        json_decref(v);
        return truth_value(c);
    case CALL_DEFAULT:
        for (uint32_t i = 0; i < e->narg && !v; i++)
            v = eval(ev, e->args[i]);
        return v;
    case CALL_IF:
        c = eval_truth(ev, e->args[0]);
        return c == CKPT_UNKNOWN ? NULL : eval(ev, e->args[c == CKPT_TRUE ? 1 : 2]);
    case CALL_EACH:
    case CALL_WHERE:
        return eval_list(ev, e);
    case CALL_LEN:
        return eval_len(ev, e);
    }
    return NULL;
}

static json_t *eval_negate(struct eval *ev, const struct ckpt_expr *e)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *v = eval(ev, e->arg[0]);

    if (json_is_integer(v) && json_integer_value(v) != INT64_MIN)
        return json_integer(-json_integer_value(v));
    return json_is_real(v) ? json_real(-json_real_value(v)) : NULL;
}

static json_t *eval(struct eval *ev, const struct ckpt_expr *e)
{
    enum ckpt_truth t;

    if (ev->fuel == 0)
        return NULL;
    ev->fuel--;
    switch (e->op) {
    case OP_INT:
        return json_integer(e->i);
    case OP_REAL:
        return json_real(e->r);
    case OP_TEXT:
        return json_string(e->text);
    case OP_TRUE:
        return json_true();
    case OP_FALSE:
        return json_false();
    case OP_NULL:
        return NULL;
    case OP_KEY:
        return eval_key(ev, e->text);
    case OP_OR:
    case OP_AND:
        return eval_logic(ev, e);
    case OP_NOT:
        t = eval_truth(ev, e->arg[0]);
        return truth_value(t == CKPT_UNKNOWN ? t : t == CKPT_TRUE ? CKPT_FALSE : CKPT_TRUE);
    case OP_NEGATE:
        return eval_negate(ev, e);
    case OP_CALL:
        return eval_call(ev, e);
    default:
        return eval_binary(ev, e);
    }
}

json_t *ckpt_expr_eval(const struct ckpt_expr *e, const struct ckpt_expr_env *env)
{
    struct eval ev = {.env = env, .fuel = FUEL};

    return eval(&ev, e);
}

enum ckpt_truth ckpt_expr_truth(const struct ckpt_expr *e, const struct ckpt_expr_env *env)
{
    struct eval ev = {.env = env, .fuel = FUEL};

    return eval_truth(&ev, e);
}
