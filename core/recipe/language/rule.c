/* SPDX-License-Identifier: Apache-2.0 */
/* Compiling the text of a rule's sides to checked terms with partners. */
#include "recipe/language/rule.h"

#include <string.h>

#include "recipe/language/field.h"

enum { MAX_SIDE = 2 * CKPT_NAME_LEN };

/* A side while it is being compiled, for one choice of words. */
struct draft {
    char *whole; /* prefix and side */
    char *s;     /* with its words chosen */
    uint16_t *pos;
    size_t name_len;
    size_t pattern_at; /* 0: no pattern was written */
};

struct compiler {
    const struct ckpt_rule_context *cx;
    struct ckpt_scope *scope;
    struct draft draft[2][CKPT_RULE_SIDES];
    struct ckpt_side *side[2];
    uint32_t n[2];
    struct ckpt_err *err;
};

static int draft_join(struct compiler *c, struct draft *d, const char *at, const char *side)
{
    const size_t len = strlen(at) + strlen(side);

    if (len > MAX_SIDE)
        return ckpt_fail(c->err, CKPT_LIMIT,
                         "%s: one side of a rule has %zu bytes, which is too many", c->cx->where,
                         len);
    d->whole = ckpt_field_text(c->cx->arena, c->err, "%s%s", at, side);
    return d->whole ? 0 : -1;
}

static int draft_choose(struct compiler *c, struct draft *d, const struct ckpt_words *words,
                        uint32_t k)
{
    if (ckpt_name_choose(c->cx->arena, d->whole, words, k, &d->s, &d->pos, c->err) < 0)
        return -1;
    d->name_len = ckpt_name_extent(d->s);
    size_t i = d->name_len;
    while (d->s[i] == ' ' || d->s[i] == '\t')
        i++;
    d->pattern_at = d->s[i] ? i : 0;
    return 0;
}

static struct ckpt_pattern_text draft_text(const struct compiler *c, const struct draft *d)
{
    return (struct ckpt_pattern_text){c->cx->where, d->whole, d->s, d->pos};
}

/* Parse a side's pattern. A side without one has the pattern of the other side, or "...". */
static int parse_pattern(struct compiler *c, int dir, uint32_t i)
{
    const struct draft *d = &c->draft[dir][i];
    struct ckpt_pattern_text t = draft_text(c, d);
    size_t at = d->pattern_at;

    for (uint32_t k = 0; !at && k < c->n[!dir]; k++)
        if (c->draft[!dir][k].pattern_at) {
            t = draft_text(c, &c->draft[!dir][k]);
            at = c->draft[!dir][k].pattern_at;
        }
    if (!at)
        t = (struct ckpt_pattern_text){c->cx->where, "...", "...", NULL};
    return ckpt_pattern_parse(c->scope, &t, at, &c->side[dir][i].pattern, c->err);
}

static int parse_side(struct compiler *c, int dir, uint32_t i)
{
    const struct draft *d = &c->draft[dir][i];
    struct ckpt_side *side = &c->side[dir][i];
    struct ckpt_pattern_text t = draft_text(c, d);
    struct ckpt_name *name;

    if (ckpt_name_parse(c->scope, &t, d->name_len, &name, &side->nname, c->err) < 0)
        return -1;
    side->text = d->whole;
    side->name = name;
    if (dir == 1 && c->cx->backwards)
        side->nname = 1;
    if (dir == 1 && side->nname > 1)
        return ckpt_fail(c->err, CKPT_FORMAT, "%s: '%.200s': a target has one spelling",
                         c->cx->where, d->whole);
    return parse_pattern(c, dir, i);
}

/* The axes whose names begin with '_'. In a name, they are free: the targets that differ in them
 * only are equal. Terms with one are padding, which exists on one side only. */
static uint32_t free_axes(const struct ckpt_scope *sc)
{
    uint32_t axes = 0;

    for (uint32_t a = 0; a < sc->naxis; a++)
        if (sc->axis[a].name[0] == '_')
            axes |= 1u << a;
    return axes;
}

/* Terms of one direction must differ from each other across its sides too. */
static int check_distinct(struct compiler *c, int dir)
{
    char text[128];

    for (uint32_t i = 0; i < c->n[dir]; i++)
        for (uint32_t k = 0; k < i; k++)
            for (uint32_t a = 0; a < c->side[dir][i].pattern.nterm; a++)
                for (uint32_t b = 0; b < c->side[dir][k].pattern.nterm; b++)
                    if (c->side[dir][i].pattern.term[a].axes ==
                        c->side[dir][k].pattern.term[b].axes)
                        return ckpt_fail(c->err, CKPT_FORMAT,
                                         "%s: '%.150s' and '%.150s' both have the term '%s'",
                                         c->cx->where, c->side[dir][k].text, c->side[dir][i].text,
                                         ckpt_axes_text(c->scope,
                                                        c->side[dir][i].pattern.term[a].axes, text,
                                                        sizeof text));
    return 0;
}

static bool find_partner(struct compiler *c, int dir, struct ckpt_term *term)
{
    for (uint32_t k = 0; k < c->n[!dir]; k++)
        for (uint32_t b = 0; b < c->side[!dir][k].pattern.nterm; b++)
            if (c->side[!dir][k].pattern.term[b].axes == term->axes) {
                term->side = (uint16_t)k;
                term->partner = (uint16_t)b;
                return true;
            }
    return false;
}

static int pair_terms(struct compiler *c, int dir)
{
    char text[128];

    for (uint32_t i = 0; i < c->n[dir]; i++) {
        struct ckpt_pattern *p = &c->side[dir][i].pattern;
        struct ckpt_term *term =
            (struct ckpt_term *)p->term; /* not shared yet, so it can be modified */
        for (uint32_t a = 0; a < p->nterm; a++) {
            bool padding = term[a].axes & free_axes(c->scope);
            if (padding && dir == 1 && !c->cx->backwards)
                return ckpt_fail(c->err, CKPT_FORMAT,
                                 "%s: '%.200s': nothing gives the bytes of '%s' in a target",
                                 c->cx->where, c->side[dir][i].text,
                                 ckpt_axes_text(c->scope, term[a].axes, text, sizeof text));
            if (padding)
                term[a].side = UINT16_MAX;
            else if (!find_partner(c, dir, &term[a]))
                return ckpt_fail(c->err, CKPT_FORMAT,
                                 "%s: '%.200s': the term '%s' has no partner on the other side",
                                 c->cx->where, c->side[dir][i].text,
                                 ckpt_axes_text(c->scope, term[a].axes, text, sizeof text));
        }
    }
    return 0;
}

/* Compile all sides. A number in a name that depends on an axis of unknown extent must be solvable,
 * so only its slowest factor may be unknown. This can be checked only with a checkpoint; here only
 * the form of the text is checked. */
static int compile(struct compiler *c, ckpt_rules *out)
{
    for (int dir = 0; dir < 2; dir++) {
        c->side[dir] = ckpt_arena_alloc(c->cx->arena, c->n[dir] * sizeof *c->side[dir]);
        if (!c->side[dir])
            return ckpt_nomem(c->err);
        memset(c->side[dir], 0, c->n[dir] * sizeof *c->side[dir]);
        for (uint32_t i = 0; i < c->n[dir]; i++)
            if (parse_side(c, dir, i) < 0)
                return -1;
    }
    if (ckpt_scope_close(c->scope, c->err) < 0)
        return ckpt_err_in(c->err, "%s", c->cx->where);
    for (int dir = 0; dir < 2; dir++)
        for (uint32_t i = 0; i < c->n[dir]; i++) {
            struct ckpt_pattern_text t = draft_text(c, &c->draft[dir][i]);
            struct ckpt_side *s = &c->side[dir][i];
            const uint32_t axes = ckpt_name_axes(s->name) & ~free_axes(c->scope);
            if (ckpt_pattern_terms(c->scope, &t, axes, &s->pattern, c->err) < 0)
                return -1;
        }
    if (check_distinct(c, 0) < 0 || check_distinct(c, 1) < 0 || pair_terms(c, 0) < 0 ||
        pair_terms(c, 1) < 0)
        return -1;
    struct ckpt_rule *r;
    if (ckpt_vec_add(out, &r) < 0)
        return ckpt_nomem(c->err);
    *r = (struct ckpt_rule){.where = c->cx->where,
                            .scope = c->scope,
                            .from = c->side[0],
                            .to = c->side[1],
                            .nfrom = c->n[0],
                            .nto = c->n[1],
                            .nwhen = c->cx->nwhen,
                            .value = c->cx->value,
                            .by = c->cx->by};
    memcpy(r->when, c->cx->when, sizeof r->when);
    return 0;
}

/* All sides of a rule with words have the same groups. */
static int common_words(struct compiler *c, struct ckpt_words *ret)
{
    struct ckpt_words w;
    bool first = true;

    for (int dir = 0; dir < 2; dir++)
        for (uint32_t i = 0; i < c->n[dir]; i++) {
            if (ckpt_name_words(c->cx->where, c->draft[dir][i].whole, &w, c->err) < 0)
                return -1;
            if (first)
                *ret = w;
            first = false;
            if (w.n != ret->n || memcmp(w.count, ret->count, w.n * sizeof *w.count) != 0)
                return ckpt_fail(
                    c->err, CKPT_FORMAT,
                    "%s: '%.200s': its groups of words {a|b} have no partners in '%.200s'",
                    c->cx->where, c->draft[dir][i].whole, c->draft[0][0].whole);
        }
    return 0;
}

int ckpt_rule_parse(const struct ckpt_rule_context *cx, const char *const *from, uint32_t nfrom,
                    const char *const *to, uint32_t nto, ckpt_rules *out, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) struct compiler *c = calloc(1, sizeof *c);
    struct ckpt_words w;

    if (!c)
        return ckpt_nomem(err);
    if (nfrom == 0 || nto == 0 || nfrom > CKPT_RULE_SIDES || nto > CKPT_RULE_SIDES)
        return ckpt_fail(err, CKPT_FORMAT, "%s: a rule has 1 to %d sides in 'from' and in 'to'",
                         cx->where, CKPT_RULE_SIDES);
    *c = (struct compiler){.cx = cx, .n = {nfrom, nto}, .err = err};
    for (uint32_t i = 0; i < nfrom; i++)
        if (draft_join(c, &c->draft[0][i], cx->from_at, from[i]) < 0)
            return -1;
    for (uint32_t i = 0; i < nto; i++)
        if (draft_join(c, &c->draft[1][i], cx->to_at, to[i]) < 0)
            return -1;
    if (common_words(c, &w) < 0)
        return -1;
    for (uint32_t k = 0; k < w.total; k++) {
        if (!(c->scope = ckpt_arena_alloc(cx->arena, sizeof *c->scope)))
            return ckpt_nomem(err);
        *c->scope = (struct ckpt_scope){.arena = cx->arena};
        for (int dir = 0; dir < 2; dir++)
            for (uint32_t i = 0; i < c->n[dir]; i++)
                if (draft_choose(c, &c->draft[dir][i], &w, k) < 0)
                    return -1;
        if (compile(c, out) < 0)
            return -1;
    }
    return 0;
}
