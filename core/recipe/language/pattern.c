/* SPDX-License-Identifier: Apache-2.0 */
/* Parsing and expanding axis patterns; sizes and strides. */
#include "recipe/language/pattern.h"

#include <assert.h>
#include <ctype.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/ckd.h"
#include "base/str.h"

enum { MAX_DEPTH = 16, MAX_CHILDREN = 48, MAX_SHOWN = 200 };

int ckpt_pattern_fail(const struct ckpt_pattern_text *t, size_t at, struct ckpt_err *err,
                      const char *fmt, ...)
{
    char buf[512];
    va_list ap;

    va_start(ap, fmt);
    (void)vsnprintf(buf, sizeof buf, fmt, ap);
    va_end(ap);
    return ckpt_fail(err, CKPT_FORMAT, "%s: '%.*s' character %zu: %s", t->what, MAX_SHOWN, t->whole,
                     (t->pos ? t->pos[at] : at) + (size_t)1, buf);
}

/* ---- scope ---- */

static bool same_word(const char *name, const char *word, size_t len)
{
    return strlen(name) == len && memcmp(name, word, len) == 0;
}

int ckpt_scope_axis(struct ckpt_scope *sc, const char *name, size_t len, struct ckpt_err *err)
{
    for (uint32_t i = 0; i < sc->naxis; i++)
        if (same_word(sc->axis[i].name, name, len))
            return (int)i;
    if (sc->naxis == CKPT_SCOPE_AXES)
        return ckpt_fail(err, CKPT_LIMIT, "more than %d axes in one rule", CKPT_SCOPE_AXES);
    char *copy = ckpt_arena_strndup(sc->arena, name, len);
    if (!copy)
        return ckpt_nomem(err);
    sc->axis[sc->naxis] = (struct ckpt_scope_axis){.name = copy, .var = -1};
    return (int)sc->naxis++;
}

int ckpt_scope_var(struct ckpt_scope *sc, const char *name, size_t len, struct ckpt_err *err)
{
    for (uint32_t i = 0; i < sc->nvar; i++)
        if (same_word(sc->var[i].name, name, len))
            return (int)i;
    if (sc->nvar == CKPT_SCOPE_VARS)
        return ckpt_fail(err, CKPT_LIMIT, "more than %d sizes in one rule", CKPT_SCOPE_VARS);
    char *copy = ckpt_arena_strndup(sc->arena, name, len);
    if (!copy)
        return ckpt_nomem(err);
    sc->var[sc->nvar] = (struct ckpt_scope_var){.name = copy, .dim = len > 1 && name[0] != '_'};
    return (int)sc->nvar++;
}

int ckpt_scope_close(struct ckpt_scope *sc, struct ckpt_err *err)
{
    for (uint32_t i = 0; i < sc->naxis; i++) {
        struct ckpt_scope_axis *a = &sc->axis[i];
        if (a->sized || a->name[0] == '.')
            continue;
        int v = ckpt_scope_var(sc, a->name, strlen(a->name), err);
        if (v < 0)
            return -1;
        a->var = (int8_t)v;
        a->sized = true;
    }
    return 0;
}

char *ckpt_axes_text(const struct ckpt_scope *sc, uint32_t axes, char *buf, size_t cap)
{
    size_t len = 0;

    assert(cap > 0);
    buf[0] = '\0';
    for (uint32_t i = 0; i < sc->naxis && len + 1 < cap; i++)
        if (axes >> i & 1) {
            int n = snprintf(buf + len, cap - len, "%s%s", len ? " " : "", sc->axis[i].name);
            len += n > 0 ? (size_t)n : 0;
        }
    return buf;
}

/* ---- parser ---- */

struct parser {
    struct ckpt_scope *sc;
    const struct ckpt_pattern_text *t;
    size_t i;
    uint32_t nsum;
    uint32_t axes;
    struct ckpt_err *err;
};

static bool is_blank(char c) { return c == ' ' || c == '\t'; }

static bool is_word_start(char c) { return isalpha((unsigned char)c) || c == '_'; }

static bool is_word(char c) { return isalnum((unsigned char)c) || c == '_'; }

static char peek(struct parser *p)
{
    while (is_blank(p->t->s[p->i]))
        p->i++;
    return p->t->s[p->i];
}

size_t ckpt_word_len(const char *s)
{
    size_t n = 0;

    if (is_word_start(s[0]))
        while (is_word(s[n]))
            n++;
    return n;
}

static bool number(struct parser *p, uint64_t *ret)
{
    const char *s = p->t->s + p->i;
    const size_t n = strspn(s, "0123456789");
    unsigned long long v;

    if (is_word(s[n]) || !ckpt_parse_u64(s, n, &v))
        return false;
    p->i += n;
    *ret = v;
    return true;
}

/* "=word" or "=number" after the axis `a`. */
static int parse_size(struct parser *p, int a)
{
    struct ckpt_scope_axis *ax = &p->sc->axis[a];
    size_t at = ++p->i, n;
    uint64_t size = 0;
    int var = -1;

    if (isdigit((unsigned char)p->t->s[at])) {
        if (!number(p, &size) || size == 0)
            return ckpt_pattern_fail(p->t, at, p->err, "not a size");
    } else if ((n = ckpt_word_len(p->t->s + at)) > 0) {
        if ((var = ckpt_scope_var(p->sc, p->t->s + at, n, p->err)) < 0)
            return -1;
        p->i += n;
    } else {
        return ckpt_pattern_fail(p->t, at, p->err, "a size (a word or a number) must follow '='");
    }
    if (ax->sized && (ax->var != var || ax->size != size))
        return ckpt_pattern_fail(p->t, at, p->err, "axis '%s' was given another size before",
                                 ax->name);
    ax->sized = true;
    ax->var = (int8_t)var;
    ax->size = size;
    return 0;
}

static int parse_rank(struct parser *p, struct ckpt_factor *f)
{
    if (p->t->s[p->i] != '/')
        return 0;
    size_t at = ++p->i, n = ckpt_word_len(p->t->s + at);
    if (n == 0)
        return ckpt_pattern_fail(p->t, at, p->err,
                                 "the name of a rank (tp, ep ...) must follow '/'");
    f->rank = ckpt_arena_strndup(p->sc->arena, p->t->s + at, n);
    p->i += n;
    f->shared = p->t->s[p->i] == '*';
    p->i += f->shared;
    return f->rank ? 0 : ckpt_nomem(p->err);
}

static int parse_axis(struct parser *p, struct ckpt_factor *f)
{
    size_t at = p->i, n = ckpt_word_len(p->t->s + at);
    uint64_t one;

    if (n == 0) {
        if (isdigit((unsigned char)p->t->s[at])) {
            if (!number(p, &one) || one != 1)
                return ckpt_pattern_fail(p->t, at, p->err,
                                         "the only number that stands alone is 1; "
                                         "name the axis: x=%.20s",
                                         p->t->s + at);
            f->kind = CKPT_FACTOR_ONE;
            return 0;
        }
        if (p->t->s[at] == '\0')
            return ckpt_pattern_fail(p->t, at, p->err,
                                     "the pattern ends where an axis should stand");
        return ckpt_pattern_fail(p->t, at, p->err, "'%c' where an axis should stand", p->t->s[at]);
    }
    int a = ckpt_scope_axis(p->sc, p->t->s + at, n, p->err);
    if (a < 0)
        return -1;
    p->i += n;
    f->kind = CKPT_FACTOR_AXIS;
    f->axis = (uint8_t)a;
    p->axes |= 1u << a;
    return p->t->s[p->i] == '=' ? parse_size(p, a) : 0;
}

static int keep_children(struct parser *p, struct ckpt_factor *f, const struct ckpt_factor *child,
                         uint32_t n)
{
    f->nchild = (uint16_t)n;
    f->child = ckpt_arena_dup(p->sc->arena, child, n * sizeof *child);
    return f->child ? 0 : ckpt_nomem(p->err);
}

static int parse_paren(struct parser *p, struct ckpt_factor *f, int depth);

static int parse_item(struct parser *p, struct ckpt_factor *f, int depth)
{
    *f = (struct ckpt_factor){0};
    if ((p->t->s[p->i] == '(' ? parse_paren(p, f, depth + 1) : parse_axis(p, f)) < 0)
        return -1;
    return parse_rank(p, f);
}

/* Items up to '+' or ')'. */
static int parse_product(struct parser *p, struct ckpt_factor *f, int depth)
{
    struct ckpt_factor child[MAX_CHILDREN];
    uint32_t n = 0;

    do {
        if (n == MAX_CHILDREN)
            return ckpt_pattern_fail(p->t, p->i, p->err, "more than %d factors", MAX_CHILDREN);
        (void)peek(p);
        if (parse_item(p, &child[n++], depth) < 0)
            return -1;
        char c = p->t->s[p->i];
        if (!is_blank(c) && c != '+' && c != ')' && c != '(' && c != '\0')
            return ckpt_pattern_fail(p->t, p->i, p->err, "'%c' after an axis", c);
    } while (peek(p) != '+' && peek(p) != ')' && peek(p) != '\0');
    if (n == 1) {
        *f = child[0];
        return 0;
    }
    *f = (struct ckpt_factor){.kind = CKPT_FACTOR_PRODUCT};
    return keep_children(p, f, child, n);
}

static int parse_paren(struct parser *p, struct ckpt_factor *f, int depth)
{
    struct ckpt_factor child[MAX_CHILDREN];
    size_t open = p->i++;
    uint32_t n = 0;

    if (depth > MAX_DEPTH)
        return ckpt_pattern_fail(p->t, open, p->err, "parentheses nested deeper than %d",
                                 MAX_DEPTH);
    for (;;) {
        if (n == MAX_CHILDREN)
            return ckpt_pattern_fail(p->t, p->i, p->err, "more than %d summands", MAX_CHILDREN);
        if (parse_product(p, &child[n++], depth) < 0)
            return -1;
        if (peek(p) != '+')
            break;
        p->i++;
    }
    if (p->t->s[p->i] != ')')
        return ckpt_pattern_fail(p->t, open, p->err, "this '(' is not closed");
    p->i++;
    if (n == 1) {
        /* keep the parenthesis as a product of one factor, so that neither annotation of
         * "(f/tp)/ep" is lost */
        *f = (struct ckpt_factor){.kind = CKPT_FACTOR_PRODUCT};
        return keep_children(p, f, child, n);
    }
    if (p->nsum == CKPT_PATTERN_SUMS)
        return ckpt_pattern_fail(p->t, open, p->err, "more than %d sums", CKPT_PATTERN_SUMS);
    *f = (struct ckpt_factor){.kind = CKPT_FACTOR_SUM, .sum = (uint8_t)p->nsum++};
    return keep_children(p, f, child, n);
}

int ckpt_pattern_parse(struct ckpt_scope *sc, const struct ckpt_pattern_text *t, size_t from,
                       struct ckpt_pattern *out, struct ckpt_err *err)
{
    struct parser p = {.sc = sc, .t = t, .i = from, .err = err};
    struct ckpt_factor dim[CKPT_PATTERN_DIMS], all = {0};
    uint32_t n = 0;

    *out = (struct ckpt_pattern){.rest_at = -1};
    while (peek(&p) != '\0') {
        size_t at = p.i;
        if (strncmp(t->s + at, "...", 3) == 0) {
            if (out->rest_at >= 0)
                return ckpt_pattern_fail(t, at, err, "'...' occurs twice");
            int a = ckpt_scope_axis(sc, "...", 3, err);
            if (a < 0)
                return -1;
            p.axes |= 1u << a;
            out->rest_at = (int32_t)n;
            p.i += 3;
        } else {
            if (n == CKPT_PATTERN_DIMS)
                return ckpt_pattern_fail(t, at, err, "more than %d dimensions", CKPT_PATTERN_DIMS);
            if (parse_item(&p, &dim[n++], 0) < 0)
                return -1;
        }
        char c = t->s[p.i];
        if (!is_blank(c) && c != '\0')
            return ckpt_pattern_fail(t, p.i, err, "'%c' where a blank or the end should be", c);
    }
    if (n > 0 && keep_children(&p, &all, dim, n) < 0)
        return -1;
    out->dim = all.child;
    out->ndim = n;
    out->nsum = p.nsum;
    out->axes = p.axes;
    return 0;
}

/* ---- terms ---- */

/* The partial products while a pattern is expanded: sets of axes with the choices that lead to
 * them. */
struct products {
    struct ckpt_term term[CKPT_PATTERN_TERMS];
    uint32_t n;
};

struct multiplier {
    const struct ckpt_scope *sc;
    const struct ckpt_pattern_text *t;
    struct ckpt_err *err;
};

static int multiply(const struct multiplier *m, const struct ckpt_factor *f, struct products *p);

static int multiply_axis(const struct multiplier *m, uint32_t axis, struct products *p)
{
    for (uint32_t i = 0; i < p->n; i++) {
        if (p->term[i].axes >> axis & 1)
            return ckpt_fail(m->err, CKPT_FORMAT, "%s: '%.*s': axis '%s' occurs twice in one term",
                             m->t->what, MAX_SHOWN, m->t->whole, m->sc->axis[axis].name);
        p->term[i].axes |= 1u << axis;
    }
    return 0;
}

static int multiply_sum(const struct multiplier *m, const struct ckpt_factor *f, struct products *p)
{
    ckpt_cleanup(ckpt_freep) struct products *in = malloc(2 * sizeof *in);

    if (!in)
        return ckpt_nomem(m->err);
    struct products *one = in + 1;
    *in = *p;
    p->n = 0;
    for (uint16_t c = 0; c < f->nchild; c++) {
        *one = *in;
        for (uint32_t i = 0; i < one->n; i++)
            one->term[i].choice[f->sum] = (uint8_t)c;
        if (multiply(m, &f->child[c], one) < 0)
            return -1;
        if (one->n > CKPT_PATTERN_TERMS - p->n)
            return ckpt_fail(m->err, CKPT_LIMIT, "%s: '%.*s' has more than %d terms", m->t->what,
                             MAX_SHOWN, m->t->whole, CKPT_PATTERN_TERMS);
        memcpy(p->term + p->n, one->term, one->n * sizeof *one->term);
        p->n += one->n;
    }
    return 0;
}

static int multiply(const struct multiplier *m, const struct ckpt_factor *f, struct products *p)
{
    switch (f->kind) {
    case CKPT_FACTOR_ONE:
        return 0;
    case CKPT_FACTOR_AXIS:
        return multiply_axis(m, f->axis, p);
    case CKPT_FACTOR_PRODUCT:
        for (uint16_t c = 0; c < f->nchild; c++)
            if (multiply(m, &f->child[c], p) < 0)
                return -1;
        return 0;
    case CKPT_FACTOR_SUM:
        return multiply_sum(m, f, p);
    }
    return 0;
}

int ckpt_pattern_terms(struct ckpt_scope *sc, const struct ckpt_pattern_text *t, uint32_t name_axes,
                       struct ckpt_pattern *p, struct ckpt_err *err)
{
    const struct multiplier m = {sc, t, err};
    ckpt_cleanup(ckpt_freep) struct products *all = calloc(1, sizeof *all);
    char text[128];

    if (!all)
        return ckpt_nomem(err);
    all->n = 1;
    all->term[0].axes = name_axes;
    for (uint32_t a = 0; a < sc->naxis; a++) /* "..." is a factor that no dimension spells out */
        if (p->rest_at >= 0 && sc->axis[a].name[0] == '.')
            all->term[0].axes |= 1u << a;
    for (uint32_t d = 0; d < p->ndim; d++)
        if (multiply(&m, &p->dim[d], all) < 0)
            return -1;
    for (uint32_t i = 0; i < all->n; i++)
        for (uint32_t j = 0; j < i; j++)
            if (all->term[i].axes == all->term[j].axes)
                return ckpt_fail(err, CKPT_FORMAT, "%s: '%.*s' has the term '%s' twice", t->what,
                                 MAX_SHOWN, t->whole,
                                 ckpt_axes_text(sc, all->term[i].axes, text, sizeof text));
    p->term = ckpt_arena_dup(sc->arena, all->term, all->n * sizeof *all->term);
    if (!p->term)
        return ckpt_nomem(err);
    p->nterm = all->n;
    return 0;
}

/* ---- sizes ---- */

bool ckpt_axis_size(const struct ckpt_sizes *s, uint32_t axis, uint64_t *ret)
{
    const struct ckpt_scope_axis *a = &s->scope->axis[axis];

    if (a->var < 0) {
        *ret = a->size;
        return true;
    }
    *ret = s->var[a->var];
    return s->known >> a->var & 1;
}

enum ckpt_size_state ckpt_factor_size(const struct ckpt_factor *f, const struct ckpt_sizes *s,
                                      uint64_t *ret, uint32_t *ret_var)
{
    uint64_t total = f->kind == CKPT_FACTOR_SUM ? 0 : 1, one;

    if (f->kind == CKPT_FACTOR_AXIS) {
        if (ckpt_axis_size(s, f->axis, ret))
            return CKPT_SIZE_KNOWN;
        *ret_var = (uint32_t)s->scope->axis[f->axis].var;
        return CKPT_SIZE_UNKNOWN;
    }
    for (uint16_t c = 0; c < f->nchild; c++) {
        enum ckpt_size_state st = ckpt_factor_size(&f->child[c], s, &one, ret_var);
        if (st != CKPT_SIZE_KNOWN)
            return st;
        if (f->kind == CKPT_FACTOR_SUM ? ckd_add(&total, total, one) : ckd_mul(&total, total, one))
            return CKPT_SIZE_OVERFLOW;
    }
    *ret = total;
    return CKPT_SIZE_KNOWN;
}

/* a*x + b in the one unknown x. */
struct linear {
    uint64_t a, b;
};

static bool linear_of(const struct ckpt_factor *f, const struct ckpt_sizes *s, uint32_t x,
                      struct linear *out)
{
    struct linear one;

    if (f->kind == CKPT_FACTOR_AXIS) {
        uint64_t size;
        if (s->scope->axis[f->axis].var == (int8_t)x)
            *out = (struct linear){1, 0};
        else if (ckpt_axis_size(s, f->axis, &size))
            *out = (struct linear){0, size};
        else
            return false;
        return true;
    }
    *out = f->kind == CKPT_FACTOR_SUM ? (struct linear){0, 0} : (struct linear){0, 1};
    for (uint16_t c = 0; c < f->nchild; c++) {
        if (!linear_of(&f->child[c], s, x, &one))
            return false;
        if (f->kind == CKPT_FACTOR_SUM) {
            if (ckd_add(&out->a, out->a, one.a) || ckd_add(&out->b, out->b, one.b))
                return false;
            continue;
        }
        if (out->a && one.a)
            return false;
        uint64_t a = out->a ? out->a : one.a, k = out->a ? one.b : out->b;
        if (ckd_mul(&out->a, a, k) || ckd_mul(&out->b, out->b, one.b))
            return false;
    }
    return true;
}

bool ckpt_factor_solve(const struct ckpt_factor *f, struct ckpt_sizes *s, uint64_t size, bool dims)
{
    struct linear l;
    uint64_t known;
    uint32_t x;

    if (ckpt_factor_size(f, s, &known, &x) != CKPT_SIZE_UNKNOWN ||
        (s->scope->var[x].dim && !dims) || !linear_of(f, s, x, &l))
        return false;
    if (l.a == 0 || size < l.b || (size - l.b) % l.a != 0)
        return false;
    s->var[x] = (size - l.b) / l.a;
    s->known |= 1u << x;
    return true;
}

/* ---- layout ---- */

static uint64_t sure_size(const struct ckpt_factor *f, const struct ckpt_sizes *s)
{
    uint64_t n = 0;
    uint32_t var;
    enum ckpt_size_state st = ckpt_factor_size(f, s, &n, &var);

    assert(st == CKPT_SIZE_KNOWN);
    (void)st;
    return n;
}

/* Appends the axes of f fastest first; `unit` is the distance of neighbours in f. */
static void walk(const struct ckpt_factor *f, const struct ckpt_term *term,
                 const struct ckpt_sizes *s, uint64_t unit, struct ckpt_layout *out)
{
    switch (f->kind) {
    case CKPT_FACTOR_ONE:
        return;
    case CKPT_FACTOR_AXIS:
        out->at[out->n++] = (struct ckpt_layout_axis){unit, f->axis};
        return;
    case CKPT_FACTOR_PRODUCT:
        for (uint16_t c = f->nchild; c-- > 0;) {
            walk(&f->child[c], term, s, unit, out);
            unit *= sure_size(&f->child[c], s);
        }
        return;
    case CKPT_FACTOR_SUM:
        for (uint16_t c = 0; c < term->choice[f->sum]; c++)
            out->offset += unit * sure_size(&f->child[c], s);
        walk(&f->child[term->choice[f->sum]], term, s, unit, out);
        return;
    }
}

void ckpt_factor_layout(const struct ckpt_factor *f, const struct ckpt_term *term,
                        const struct ckpt_sizes *s, struct ckpt_layout *out)
{
    out->offset = 0;
    out->n = 0;
    walk(f, term, s, 1, out);
    for (uint32_t i = 0, j = out->n; i + 1 < j; i++) {
        struct ckpt_layout_axis swap = out->at[i];
        out->at[i] = out->at[--j];
        out->at[j] = swap;
    }
}
