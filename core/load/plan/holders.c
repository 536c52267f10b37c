/* SPDX-License-Identifier: Apache-2.0 */
/* Divides the units of a group among members that have their files. */
#include "load/plan/holders.h"

#include <stdlib.h>
#include <string.h>

#include "base/ckd.h"
#include "base/map.h"
#include "base/mem.h"
#include "base/sort.h"
#include "io/source.h"

/* ---- who has what ---- */

void ckpt_holders_release(struct ckpt_holders *h)
{
    for (size_t i = 0; i < h->ranks.len; i++)
        ckpt_vec_release(&h->ranks.ptr[i]);
    ckpt_vec_release(&h->ranks);
    free(h->set);
    *h = (struct ckpt_holders){0};
}

/* The number of the set of these ranks, which is added if it is new; CKPT_NONE: no memory. */
static uint32_t number_set(struct ckpt_holders *h, struct ckpt_map *known, const bool *has,
                           uint32_t nrank)
{
    ckpt_numbers ranks = {0};
    uint32_t number = CKPT_NONE;
    bool is_new = false;
    int rc = ckpt_vec_reserve(&ranks, 1); /* the key of a set without ranks is a pointer, too */

    for (uint32_t r = 0; r < nrank && rc == 0; r++)
        if (has[r])
            rc = ckpt_vec_push(&ranks, r);
    if (rc == 0)
        rc = ckpt_vec_reserve(&h->ranks, 1);
    if (rc == 0)
        rc = ckpt_map_put(known, (const char *)ranks.ptr, ranks.len * sizeof *ranks.ptr,
                          (uint32_t)h->ranks.len, &number, &is_new);
    if (is_new)
        h->ranks.ptr[h->ranks.len++] = ranks;
    else
        ckpt_vec_release(&ranks);
    return rc == 0 ? number : CKPT_NONE;
}

int ckpt_holders_find(const struct ckpt_catalog *cat, uint32_t nrank, struct ckpt_holders *ret,
                      struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) bool *has = malloc((size_t)nrank + 1);
    ckpt_cleanup(ckpt_map_release) struct ckpt_map known = {0};

    ret->nsource = (uint32_t)cat->sources.len;
    ret->set = malloc((cat->sources.len + 1) * sizeof *ret->set);
    if (!has || !ret->set)
        return ckpt_nomem(err);
    for (uint32_t i = 0; i < ret->nsource; i++) {
        ret->set[i] = CKPT_NONE;
        if (!ckpt_source_holders(cat->sources.ptr[i], has, nrank) || !memchr(has, false, nrank))
            continue;
        if ((ret->set[i] = number_set(ret, &known, has, nrank)) == CKPT_NONE)
            return ckpt_nomem(err);
    }
    return 0;
}

/* ---- the members of one group ---- */

enum {
    /* How often every set's bytes are divided anew among its members, as those of other sets leave
     * room. Each time is nearer to the best balance; after 8 it is within a percent. */
    TURNS = 8,
};

/* The units of a group whose files the same members have. */
struct shared {
    ckpt_numbers member; /* indices in the group, ascending */
    uint64_t bytes;      /* of the units */
    uint64_t *quota;     /* per entry of `member`: the bytes that it is to read */
    uint64_t given;      /* bytes of the units that have been put */
    uint64_t limit;      /* the quotas of the members up to the current one */
    uint32_t at;         /* the current one: index in `member` */
};

struct division {
    const struct ckpt_holders *h;
    const struct ckpt_group *g;
    struct shared *of; /* per set of the holders; the last one: all members */
    uint64_t *load;    /* per member: bytes of its quotas */
    uint64_t *room;    /* room for as many numbers as there are members */
};

static uint32_t nset(const struct division *d) { return (uint32_t)d->h->ranks.len; }

static void division_release(struct division *d)
{
    for (uint32_t i = 0; d->of && i <= nset(d); i++) {
        ckpt_vec_release(&d->of[i].member);
        free(d->of[i].quota);
    }
    free(d->of);
    free(d->load);
    free(d->room);
}

/* The set of a unit: the last one if no member has its file, or all have it. */
static struct shared *shared_of(const struct division *d, const struct ckpt_held *unit)
{
    const uint32_t set = ckpt_holders_set(d->h, unit->source);
    const bool is_some =
        set != CKPT_NONE && d->of[set].member.len > 0 && d->of[set].member.len < d->g->n;

    return &d->of[is_some ? set : nset(d)];
}

/* List the members of a group that are in a set. */
static int list_members(const struct ckpt_group *g, const ckpt_numbers *ranks, ckpt_numbers *ret,
                        struct ckpt_err *err)
{
    for (size_t i = 0; i < ranks->len; i++) {
        const uint32_t *found =
            bsearch(&ranks->ptr[i], g->rank, g->n, sizeof *g->rank, ckpt_u32s_cmp);
        if (found && ckpt_vec_push(ret, (uint32_t)(found - g->rank)) < 0)
            return ckpt_nomem(err);
    }
    return 0;
}

static int division_init(struct division *d, struct ckpt_err *err)
{
    d->of = calloc((size_t)nset(d) + 1, sizeof *d->of);
    d->load = calloc((size_t)d->g->n + 1, sizeof *d->load);
    d->room = malloc(((size_t)d->g->n + 1) * sizeof *d->room);
    if (!d->of || !d->load || !d->room)
        return ckpt_nomem(err);
    for (uint32_t i = 0; i < nset(d); i++)
        if (list_members(d->g, &d->h->ranks.ptr[i], &d->of[i].member, err) < 0)
            return -1;
    for (uint32_t i = 0; i < d->g->n; i++)
        if (ckpt_vec_push(&d->of[nset(d)].member, i) < 0)
            return ckpt_nomem(err);
    return 0;
}

/* Up to which bytes must members be filled so that they take `bytes` more? */
static uint64_t find_level(const struct division *d, const ckpt_numbers *member, uint64_t bytes)
{
    uint64_t sum = bytes;

    for (size_t i = 0; i < member->len; i++)
        d->room[i] = d->load[member->ptr[i]];
    ckpt_sort(d->room, member->len, ckpt_u64s_cmp);
    for (size_t i = 0;; i++) { /* the i members with least are filled up to the level */
        if (i == member->len || (i > 0 && sum <= d->room[i] * i))
            return (sum + i - 1) / i;
        sum += d->room[i];
    }
}

/* Divide the bytes of a set anew. */
static void divide(struct division *d, struct shared *s)
{
    uint64_t left = s->bytes;

    for (size_t i = 0; i < s->member.len; i++)
        d->load[s->member.ptr[i]] -= s->quota[i];
    const uint64_t level = find_level(d, &s->member, s->bytes);
    for (size_t i = 0; i < s->member.len; i++) {
        uint64_t *load = &d->load[s->member.ptr[i]];
        s->quota[i] = ckpt_min_u64(left, level > *load ? level - *load : 0);
        left -= s->quota[i];
        *load += s->quota[i];
    }
}

/* Choose the quotas; *ret_any: there is a file that some members have and some have not. */
static int choose_quotas(struct division *d, const struct ckpt_held *unit, uint32_t n,
                         bool *ret_any, struct ckpt_err *err)
{
    uint64_t rest = 0;

    for (uint32_t i = 0; i < n; i++)
        shared_of(d, &unit[i])->bytes += unit[i].len;
    for (uint32_t i = 0; i <= nset(d); i++) {
        struct shared *s = &d->of[i];
        if (s->bytes && !(s->quota = calloc(s->member.len, sizeof *s->quota)))
            return ckpt_nomem(err);
        rest += i < nset(d) ? s->bytes : 0;
    }
    *ret_any = rest > 0;
    for (int turn = 0; turn < TURNS && *ret_any; turn++)
        for (uint32_t i = 0; i <= nset(d); i++)
            if (d->of[i].bytes)
                divide(d, &d->of[i]);
    return 0;
}

/* The member that reads the next unit of a set: the one in whose quota the middle of it lies. */
static uint32_t next_member(struct shared *s, uint32_t len)
{
    if (s->given == 0)
        s->limit = s->quota[0];
    while (s->at + 1 < s->member.len && s->given + len / 2 >= s->limit)
        s->limit += s->quota[++s->at];
    s->given += len;
    return s->member.ptr[s->at];
}

int ckpt_holders_choose(const struct ckpt_holders *h, const struct ckpt_group *g,
                        struct ckpt_held *unit, uint32_t n, bool *ret_any, struct ckpt_err *err)
{
    ckpt_cleanup(division_release) struct division d = {.h = h, .g = g};

    if (division_init(&d, err) < 0 || choose_quotas(&d, unit, n, ret_any, err) < 0)
        return -1;
    for (uint32_t i = 0; i < n && *ret_any; i++)
        unit[i].member = next_member(shared_of(&d, &unit[i]), unit[i].len);
    return 0;
}
