/* SPDX-License-Identifier: Apache-2.0 */
/* Parsing, matching and rendering of name templates. */
#include "recipe/language/name.h"

#include <ctype.h>
#include <string.h>

enum { MAX_SPELLINGS = 64, MAX_DIGITS = 18 };

size_t ckpt_name_extent(const char *side)
{
    size_t i = 0;
    int depth = 0;

    for (; side[i]; i++) {
        if (side[i] == '{')
            depth++;
        else if (side[i] == '}')
            depth--;
        else if ((side[i] == ' ' || side[i] == '\t') && depth <= 0)
            break;
    }
    return i;
}

/* ---- groups of words ---- */

/* The length of a group {a|b} at s, and its number of words; 0: there is no group. */
static size_t group_at(const char *s, uint32_t *ret_words)
{
    size_t i = 1;

    *ret_words = 1;
    if (s[0] != '{')
        return 0;
    for (; s[i] && s[i] != '}' && s[i] != '{'; i++)
        if (s[i] == '|')
            ++*ret_words;
    return s[i] == '}' && *ret_words > 1 ? i + 1 : 0;
}

int ckpt_name_words(const char *what, const char *s, struct ckpt_words *ret, struct ckpt_err *err)
{
    *ret = (struct ckpt_words){.total = 1};
    for (size_t i = 0; s[i];) {
        uint32_t words;
        size_t len = group_at(s + i, &words);
        if (len && ret->n == CKPT_NAME_NUMBERS)
            return ckpt_fail(err, CKPT_LIMIT, "%s: more than %d groups of words in '%.200s'", what,
                             CKPT_NAME_NUMBERS, s);
        if (len && words > CKPT_NAME_CHOICES / ret->total)
            return ckpt_fail(err, CKPT_LIMIT, "%s: more than %d combinations of words", what,
                             CKPT_NAME_CHOICES);
        if (len) {
            ret->count[ret->n++] = words;
            ret->total *= words;
        }
        i += len ? len : 1;
    }
    return 0;
}

int ckpt_name_choose(struct ckpt_arena *arena, const char *s, const struct ckpt_words *words,
                     uint32_t k, char **ret, uint16_t **ret_pos, struct ckpt_err *err)
{
    const size_t most = strlen(s);
    char *out = ckpt_arena_alloc(arena, most + 1);
    uint16_t *pos = ckpt_arena_alloc(arena, (most + 1) * sizeof *pos);
    uint32_t group = 0, each = words->total, count;
    size_t n = 0;

    if (!out || !pos)
        return ckpt_nomem(err);
    for (size_t i = 0; s[i];) {
        size_t len = group_at(s + i, &count), from = i, to = i + 1;
        if (len) {
            each /= words->count[group++]; /* combinations with the same word */
            uint32_t skip = k / each % count;
            for (from = i + 1; skip; from++)
                skip -= s[from] == '|';
            for (to = from; s[to] != '|' && s[to] != '}';)
                to++;
        }
        for (; from < to; from++) {
            pos[n] = (uint16_t)from;
            out[n++] = s[from];
        }
        i += len ? len : 1;
    }
    out[n] = '\0';
    pos[n] = (uint16_t)most;
    *ret = out;
    *ret_pos = pos;
    return 0;
}

/* ---- spellings ---- */

/* One spelling: its bytes and their positions in the text. */
struct spelling {
    char s[CKPT_NAME_LEN + 1];
    uint16_t pos[CKPT_NAME_LEN + 1];
    size_t len;
    size_t opt_from, opt_to; /* the absent optional part, in the text */
    bool absent;
};

struct namer {
    struct ckpt_scope *sc;
    const struct ckpt_pattern_text *t;
    size_t end;
    struct ckpt_name *out;
    uint32_t n;
    struct ckpt_err *err;
};

static bool word_char(char c) { return isalnum((unsigned char)c) || c == '_'; }

struct number_parser {
    struct namer *nm;
    size_t i; /* in the text */
    struct ckpt_name_part *part;
};

static int number_fail(struct number_parser *p, const char *what)
{
    return ckpt_pattern_fail(p->nm->t, p->i, p->nm->err, "%s", what);
}

static size_t number_word(struct number_parser *p)
{
    while (p->nm->t->s[p->i] == ' ')
        p->i++;
    return ckpt_word_len(p->nm->t->s + p->i);
}

/* "+layers" or "+1" */
static int number_offset(struct number_parser *p)
{
    p->i++;
    size_t n = number_word(p);
    const char *s = p->nm->t->s + p->i;
    if (n > 0) {
        int v = ckpt_scope_var(p->nm->sc, s, n, p->nm->err);
        if (v < 0)
            return -1;
        p->part->plus_var = (int8_t)v;
        p->i += n;
        return 0;
    }
    unsigned long long plus = 0;
    for (n = 0; isdigit((unsigned char)s[n]);)
        n++;
    if (n == 0 || n > 9 || !ckpt_parse_u64(s, n, &plus))
        return number_fail(p, "a word or a number must follow '+'");
    p->part->plus = plus;
    p->i += n;
    return 0;
}

/* Parse the inside of {...}: [list:] axis {axis} [+offset] [/rank]. p->i is after '{'. */
static int parse_number(struct number_parser *p)
{
    struct namer *nm = p->nm;
    const char *s = nm->t->s;
    struct ckpt_name_part *part = p->part;
    size_t n;

    *part = (struct ckpt_name_part){.plus_var = -1};
    size_t colon = p->i;
    while (word_char(s[colon]) || s[colon] == '.')
        colon++;
    if (s[colon] == ':') {
        if (colon == p->i)
            return number_fail(p, "the name of a list must stand before ':'");
        part->list = ckpt_arena_strndup(nm->sc->arena, s + p->i, colon - p->i);
        if (!part->list)
            return ckpt_nomem(nm->err);
        p->i = colon + 1;
    }
    while ((n = number_word(p)) > 0) {
        if (part->naxis == CKPT_NAME_FACTORS)
            return number_fail(p, "too many factors in one number");
        int a = ckpt_scope_axis(nm->sc, s + p->i, n, nm->err);
        if (a < 0)
            return -1;
        part->axis[part->naxis++] = (uint8_t)a;
        p->i += n;
        if (s[p->i] == '/') {
            p->i++;
            if ((n = number_word(p)) == 0)
                return number_fail(p, "the name of a rank must follow '/'");
            part->rank = ckpt_arena_strndup(nm->sc->arena, s + p->i, n);
            if (!part->rank)
                return ckpt_nomem(nm->err);
            p->i += n;
        }
    }
    if (part->naxis == 0)
        return number_fail(p, "an axis must stand in braces");
    if (part->list && part->naxis > 1)
        return number_fail(p, "a list is indexed by one axis");
    if (s[p->i] == '+' && number_offset(p) < 0)
        return -1;
    if (s[p->i] != '}')
        return number_fail(p, "'}' expected");
    p->i++;
    return 0;
}

static int add_axes(struct namer *nm, const struct ckpt_name_part *part, size_t at, uint32_t *axes)
{
    for (uint8_t k = 0; k < part->naxis; k++) {
        if (*axes >> part->axis[k] & 1)
            return ckpt_pattern_fail(nm->t, at, nm->err, "axis '%s' occurs twice in the name",
                                     nm->sc->axis[part->axis[k]].name);
        *axes |= 1u << part->axis[k];
    }
    return 0;
}

static bool is_plain(const struct ckpt_name_part *part)
{
    return part->naxis == 1 && !part->list && !part->plus && part->plus_var < 0;
}

/* The axis that is the tensor's first dimension if the optional part is absent. */
static int absent_axis(struct namer *nm, const struct spelling *sp, int8_t *ret)
{
    struct ckpt_name_part part;

    *ret = -1;
    for (size_t i = sp->opt_from; i < sp->opt_to; i++)
        if (nm->t->s[i] == '{') {
            struct number_parser np = {nm, i + 1, &part};
            if (*ret >= 0)
                return ckpt_pattern_fail(nm->t, i, nm->err, "an optional part has one number");
            if (parse_number(&np) < 0)
                return -1;
            if (!is_plain(&part))
                return ckpt_pattern_fail(nm->t, i, nm->err, "an optional number is one plain axis");
            *ret = (int8_t)part.axis[0];
        }
    if (*ret < 0)
        return ckpt_pattern_fail(nm->t, sp->opt_from, nm->err,
                                 "an optional part must hold a number; spellings are <a|b>");
    return 0;
}

static int parse_spelling(struct namer *nm, const struct spelling *sp)
{
    struct ckpt_name_part part[CKPT_NAME_PARTS];
    uint32_t n = 0, numbers = 0;
    struct ckpt_name *name = &nm->out[nm->n];

    *name = (struct ckpt_name){.lead = -1};
    for (size_t i = 0; i < sp->len;) {
        size_t to = i, at = sp->pos[i];
        if (n == CKPT_NAME_PARTS)
            return ckpt_pattern_fail(nm->t, at, nm->err, "more than %d parts in a name",
                                     CKPT_NAME_PARTS);
        if (sp->s[i] == '{') {
            struct number_parser np = {nm, at + 1, &part[n]};
            if (n > 0 && !part[n - 1].text)
                return ckpt_pattern_fail(nm->t, at, nm->err,
                                         "two numbers follow each other without text between them");
            if (++numbers > CKPT_NAME_NUMBERS)
                return ckpt_pattern_fail(nm->t, at, nm->err, "more than %d numbers",
                                         CKPT_NAME_NUMBERS);
            if (parse_number(&np) < 0 || add_axes(nm, &part[n], at, &name->axes) < 0)
                return -1;
            i += np.i - at;
        } else {
            while (to < sp->len && sp->s[to] != '{')
                to++;
            if (n > 0 && isdigit((unsigned char)sp->s[i]))
                return ckpt_pattern_fail(nm->t, at, nm->err, "a digit follows a number");
            part[n] = (struct ckpt_name_part){.plus_var = -1, .len = to - i};
            if (!(part[n].text = ckpt_arena_strndup(nm->sc->arena, sp->s + i, to - i)))
                return ckpt_nomem(nm->err);
            i = to;
        }
        n++;
    }
    if (n == 0)
        return ckpt_pattern_fail(nm->t, 0, nm->err, "the name is empty");
    if (sp->absent && absent_axis(nm, sp, &name->lead) < 0)
        return -1;
    name->part = ckpt_arena_dup(nm->sc->arena, part, n * sizeof *part);
    name->text = ckpt_arena_strndup(nm->sc->arena, sp->s, sp->len);
    if (!name->part || !name->text)
        return ckpt_nomem(nm->err);
    name->npart = n;
    nm->n++;
    return 0;
}

static void take(struct spelling *sp, const struct ckpt_pattern_text *t, size_t from, size_t to)
{
    for (; from < to; from++) {
        sp->s[sp->len] = t->s[from];
        sp->pos[sp->len++] = (uint16_t)from;
    }
}

/* Expand the text after t->s[i]; sp has the choices so far. */
static int spell(struct namer *nm, struct spelling *sp, size_t i)
{
    const char *s = nm->t->s;
    const size_t len = sp->len;

    for (; i < nm->end && s[i] != '<' && s[i] != '['; i++) {
        if (s[i] == '>' || s[i] == ']')
            return ckpt_pattern_fail(nm->t, i, nm->err, "'%c' has no opening bracket", s[i]);
        take(sp, nm->t, i, i + 1);
    }
    if (i == nm->end) {
        if (nm->n == MAX_SPELLINGS)
            return ckpt_pattern_fail(nm->t, 0, nm->err, "more than %d spellings", MAX_SPELLINGS);
        int r = parse_spelling(nm, sp);
        sp->len = len;
        return r;
    }
    const bool optional = s[i] == '[';
    const size_t chosen = sp->len;
    size_t close = i + 1;
    while (close < nm->end && s[close] != (optional ? ']' : '>'))
        close++;
    if (close == nm->end)
        return ckpt_pattern_fail(nm->t, i, nm->err, "this '%c' is not closed", s[i]);
    for (size_t k = i + 1; k < close; k++)
        if (s[k] == '<' || s[k] == '[' || s[k] == '>' || s[k] == ']')
            return ckpt_pattern_fail(nm->t, k, nm->err, "'%c' inside '%c'", s[k], s[i]);
    for (size_t from = i + 1, to; from <= close; from = to + 1) {
        for (to = from; to < close && (optional || s[to] != '|');)
            to++;
        take(sp, nm->t, from, to);
        if (spell(nm, sp, close + 1) < 0)
            return -1;
        sp->len = chosen;
    }
    if (optional) {
        if (sp->absent)
            return ckpt_pattern_fail(nm->t, i, nm->err, "a name has one optional part");
        sp->absent = true;
        sp->opt_from = i + 1;
        sp->opt_to = close;
        if (spell(nm, sp, close + 1) < 0)
            return -1;
        sp->absent = false;
    }
    sp->len = len;
    return 0;
}

int ckpt_name_parse(struct ckpt_scope *sc, const struct ckpt_pattern_text *t, size_t len,
                    struct ckpt_name **ret, uint32_t *ret_n, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) struct spelling *sp = calloc(1, sizeof *sp);
    struct namer nm = {.sc = sc, .t = t, .end = len, .err = err};

    if (len > CKPT_NAME_LEN)
        return ckpt_fail(err, CKPT_LIMIT, "%s: a name has %zu bytes, which is too many", t->what,
                         len);
    nm.out = ckpt_arena_alloc(sc->arena, MAX_SPELLINGS * sizeof *nm.out);
    if (!sp || !nm.out)
        return ckpt_nomem(err);
    if (spell(&nm, sp, 0) < 0)
        return -1;
    for (uint32_t i = 1; i < nm.n; i++) {
        if (ckpt_name_axes(&nm.out[0]) != ckpt_name_axes(&nm.out[i]))
            return ckpt_fail(err, CKPT_FORMAT, "%s: '%.200s': spellings have different numbers",
                             t->what, t->whole);
    }
    *ret = nm.out;
    *ret_n = nm.n;
    return 0;
}

int ckpt_name_parse_alone(struct ckpt_arena *arena, const char *what, const char *text,
                          const struct ckpt_name **ret, uint32_t *ret_n, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) struct ckpt_scope *sc = calloc(1, sizeof *sc);
    const struct ckpt_pattern_text t = {what, text, text, NULL};
    struct ckpt_name *name;

    if (!sc)
        return ckpt_nomem(err);
    sc->arena = arena;
    if (ckpt_name_parse(sc, &t, strlen(text), &name, ret_n, err) < 0)
        return -1;
    *ret = name;
    return 0;
}

int ckpt_name_parse_start(struct ckpt_arena *arena, const char *what, const char *text,
                          const struct ckpt_name **ret, struct ckpt_err *err)
{
    uint32_t n;
    bool plain;

    if (ckpt_name_parse_alone(arena, what, text, ret, &n, err) < 0)
        return -1;
    plain = n == 1 && (*ret)->axes <= 1;
    for (uint32_t p = 0; plain && p < (*ret)->npart; p++)
        plain = (*ret)->part[p].text || is_plain(&(*ret)->part[p]);
    return plain ? 0
                 : ckpt_fail(err, CKPT_FORMAT,
                             "%s: '%.200s': the beginning of names has one spelling, and at most "
                             "one number, {l}",
                             what, text);
}

/* ---- use ---- */

static bool match_number(const char *name, size_t len, size_t *i, uint64_t *value)
{
    size_t n = 0;
    uint64_t v = 0;

    for (; *i + n < len && isdigit((unsigned char)name[*i + n]) && n <= MAX_DIGITS; n++)
        v = v * 10 + (uint64_t)(name[*i + n] - '0');
    if (n == 0 || n > MAX_DIGITS || (n > 1 && name[*i] == '0'))
        return false;
    *i += n;
    *value = v;
    return true;
}

size_t ckpt_name_match_start(const struct ckpt_name *n, const char *name, size_t len,
                             uint64_t value[CKPT_NAME_NUMBERS])
{
    size_t i = 0, k = 0;

    for (uint32_t p = 0; p < n->npart; p++) {
        const struct ckpt_name_part *part = &n->part[p];
        if (!part->text) {
            if (!match_number(name, len, &i, &value[k++]))
                return 0;
            continue;
        }
        if (part->len > len - i || memcmp(part->text, name + i, part->len) != 0)
            return 0;
        i += part->len;
    }
    return i;
}

bool ckpt_name_match(const struct ckpt_name *n, const char *name, size_t len,
                     uint64_t value[CKPT_NAME_NUMBERS])
{
    return len > 0 && ckpt_name_match_start(n, name, len, value) == len;
}

void ckpt_name_render(const struct ckpt_name *n, const uint64_t value[CKPT_NAME_NUMBERS],
                      struct ckpt_str *out)
{
    size_t k = 0;

    for (uint32_t p = 0; p < n->npart; p++)
        if (n->part[p].text)
            ckpt_str_append(out, n->part[p].text, n->part[p].len);
        else
            ckpt_str_put_u64(out, value[k++]);
}

void ckpt_name_skeleton(const char *s, size_t len, struct ckpt_str *out)
{
    for (size_t i = 0; i < len;) {
        size_t from = i;
        while (i < len && !isdigit((unsigned char)s[i]))
            i++;
        ckpt_str_append(out, s + from, i - from);
        if (i == len)
            break;
        while (i < len && isdigit((unsigned char)s[i]))
            i++;
        ckpt_str_putc(out, '#');
    }
}

void ckpt_name_template_skeleton(const struct ckpt_name *n, struct ckpt_str *out)
{
    for (uint32_t p = 0; p < n->npart; p++) {
        const struct ckpt_name_part *part = &n->part[p];
        bool merge = !part->text && out->len > 0 && out->ptr[out->len - 1] == '#';
        if (part->text)
            ckpt_name_skeleton(part->text, part->len, out);
        else if (!merge)
            ckpt_str_putc(out, '#');
    }
}
