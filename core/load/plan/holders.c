/* SPDX-License-Identifier: Apache-2.0 */
/* Puts units into the spans of members that have their files. */
#include "load/plan/holders.h"

#include <stdlib.h>

#include "base/mem.h"
#include "io/source.h"

/* The spans of a group's members. */
struct spans {
    const struct ckpt_catalog *cat;
    const struct ckpt_group *g;
    uint32_t nrank;
    uint64_t len;    /* bytes of a span */
    uint64_t *used;  /* per member: bytes in its span so far */
    bool *has;       /* per rank of the job: it has the file of the last unit that was looked at */
    uint32_t source; /* that file */
    bool known;      /* has[] is filled: not all ranks have all files */
    uint32_t last;   /* the member to whose span a unit was added last; or CKPT_NONE */
};

/* Find out which ranks have a file. */
static void look_at(struct spans *s, uint32_t source)
{
    if (source == s->source)
        return;
    s->source = source;
    s->known = source < s->cat->sources.len &&
               ckpt_source_holders(s->cat->sources.ptr[source], s->has, s->nrank);
}

/* Has member i the file, and its span room? */
static bool is_good(const struct spans *s, uint32_t i)
{
    return s->used[i] < s->len && s->has[s->g->rank[i]];
}

/* The member that is to read a unit of a file: the last one as long as that is good, so that it
 * reads what is together in the file, else the one with most room. CKPT_NONE: none is good. */
static uint32_t choose(const struct spans *s)
{
    uint32_t best = CKPT_NONE;

    if (s->last != CKPT_NONE && is_good(s, s->last))
        return s->last;
    for (uint32_t i = 0; i < s->g->n; i++)
        if (is_good(s, i) && (best == CKPT_NONE || s->used[i] < s->used[best]))
            best = i;
    return best;
}

static void put(struct spans *s, struct ckpt_held *unit, uint32_t member)
{
    unit->member = member;
    s->used[member] += unit->len;
}

/* Put the units whose files members have; false: all ranks have all files. */
static bool put_held(struct spans *s, struct ckpt_held *unit, uint32_t n)
{
    bool any = false;

    for (uint32_t i = 0; i < n; i++) {
        unit[i].member = CKPT_NONE;
        look_at(s, unit[i].source);
        any |= s->known;
        s->last = s->known ? choose(s) : CKPT_NONE;
        if (s->last != CKPT_NONE)
            put(s, &unit[i], s->last);
    }
    return any;
}

/* Put the other units where there is room. */
static void put_rest(struct spans *s, struct ckpt_held *unit, uint32_t n)
{
    uint32_t next = 0;

    for (uint32_t i = 0; i < n; i++) {
        if (unit[i].member != CKPT_NONE)
            continue;
        while (next + 1 < s->g->n && s->used[next] >= s->len)
            next++;
        put(s, &unit[i], next);
    }
}

int ckpt_holders_choose(const struct ckpt_catalog *cat, uint32_t nrank, const struct ckpt_group *g,
                        struct ckpt_held *unit, uint32_t n, bool *ret_any, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) uint64_t *used = calloc(g->n, sizeof *used);
    ckpt_cleanup(ckpt_freep) bool *has = calloc(nrank, sizeof *has);
    struct spans s = {.cat = cat,
                      .g = g,
                      .nrank = nrank,
                      .used = used,
                      .has = has,
                      .source = CKPT_NONE,
                      .last = CKPT_NONE};

    if (!used || !has)
        return ckpt_nomem(err);
    for (uint32_t i = 0; i < n; i++)
        s.len += unit[i].len;
    s.len = (s.len + g->n - 1) / g->n;
    *ret_any = put_held(&s, unit, n);
    if (*ret_any)
        put_rest(&s, unit, n);
    return 0;
}
