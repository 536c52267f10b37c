/* SPDX-License-Identifier: Apache-2.0 */
/* Lists of ranks of parts and groups, each made once and found again by a map. */
#include "load/want/rank_lists.h"

#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "base/sort.h"

/* ---- sets of lists ---- */

void ckpt_lists_forget(struct ckpt_known_lists *k)
{
    for (size_t i = 0; i < k->list.len; i++)
        free(k->list.ptr[i]);
    ckpt_vec_release(&k->list);
    ckpt_map_release(&k->map);
}

int ckpt_lists_know(struct ckpt_known_lists *k, const uint32_t *list, size_t n, uint32_t value,
                    bool *ret_new)
{
    ckpt_cleanup(ckpt_freep) uint32_t *copy = malloc((n + 1) * sizeof *copy);
    uint32_t was;

    if (copy)
        memcpy(copy, list, n * sizeof *list);
    if (!copy || ckpt_vec_reserve(&k->list, 1) < 0 ||
        ckpt_map_put(&k->map, (const char *)copy, n * sizeof *copy, value, &was, ret_new) < 0)
        return -1;
    if (*ret_new)
        k->list.ptr[k->list.len++] = ckpt_steal(&copy);
    return 0;
}

/* ---- the ranks of a part ---- */

struct listing {
    const struct ckpt_rank_lists *m;
    struct ckpt_part_ranks *to;
};

static int list_rank(void *ctx, uint32_t rank)
{
    const struct listing *l = ctx;

    if (l->m->job_wants->class_of[rank] != l->to->class ||
        ckpt_sharing_number(l->m->sharing, rank) != ckpt_sharing_number(l->m->sharing, l->m->self))
        return 0;
    return ckpt_vec_push(&l->to->rank, rank);
}

/* List the ranks of a part: of a placement, or all ranks of the class. */
static int list_ranks(struct ckpt_rank_lists *m, struct ckpt_part_ranks *p)
{
    const struct ckpt_job_wants *r = m->job_wants;
    struct listing l = {m, p};
    int rc = 0;

    if (p->spec != CKPT_NONE) {
        rc = ckpt_spec_ranks(&r->table[p->class], &r->table[p->class].specs.ptr[p->spec], p->part,
                             list_rank, &l);
    } else {
        for (uint32_t i = r->class_first[p->class]; i < r->class_first[p->class + 1] && rc == 0;
             i++)
            rc = list_rank(&l, r->class_rank[i]);
    }
    ckpt_sort(p->rank.ptr, p->rank.len, ckpt_u32s_cmp);
    return rc < 0 ? ckpt_nomem(m->err) : 0;
}

uint32_t ckpt_rank_lists_part(struct ckpt_rank_lists *m, uint32_t class, uint32_t entry,
                              uint32_t part)
{
    const uint32_t key[3] = {class, m->job_wants->table[class].entries.ptr[entry].spec, part};
    uint32_t number;
    bool new;

    if (ckpt_map_get(&m->part_map, (const char *)key, sizeof key, &number))
        return number;
    struct ckpt_part_ranks *p;
    if (ckpt_vec_reserve(&m->parts, 1) < 0 || !(p = calloc(1, sizeof *p)))
        return (void)ckpt_nomem(m->err), CKPT_NONE;
    memcpy(&p->class, key, sizeof key);
    m->parts.ptr[m->parts.len++] = p;
    if (list_ranks(m, p) < 0 || ckpt_map_put(&m->part_map, (const char *)&p->class, sizeof key,
                                             (uint32_t)m->parts.len - 1, &number, &new) < 0)
        return (void)ckpt_nomem(m->err), CKPT_NONE;
    return number;
}

/* ---- groups ---- */

/* The group of exactly these ranks (ascending, no duplicates); a new one if there is none. */
static uint32_t group_of_ranks(struct ckpt_rank_lists *m, const ckpt_numbers *rank)
{
    const size_t len = rank->len * sizeof *rank->ptr;
    struct ckpt_group g = {.n = (uint32_t)rank->len, .found = (uint32_t)m->groups->len};
    uint32_t number;
    bool new;

    if (ckpt_map_get(&m->group_map, (const char *)rank->ptr, len, &number))
        return number;
    while (g.self < g.n && rank->ptr[g.self] != m->self)
        g.self++;
    if (ckpt_vec_reserve(m->groups, 1) < 0 || !(g.rank = malloc(len + 1)))
        return (void)ckpt_nomem(m->err), CKPT_NONE;
    memcpy(g.rank, rank->ptr, len);
    m->groups->ptr[m->groups->len++] = g;
    if (ckpt_map_put(&m->group_map, (const char *)g.rank, len, (uint32_t)m->groups->len - 1,
                     &number, &new) < 0)
        return (void)ckpt_nomem(m->err), CKPT_NONE;
    return number;
}

/* The union of the ranks of some parts, ascending. */
static int unite(struct ckpt_rank_lists *m, const ckpt_numbers *part, ckpt_numbers *rank)
{
    size_t out = 0;

    for (size_t i = 0; i < part->len; i++) {
        const ckpt_numbers *more = &m->parts.ptr[part->ptr[i]]->rank;
        if (ckpt_vec_reserve(rank, more->len + 1) < 0)
            return ckpt_nomem(m->err);
        if (more->len)
            memcpy(rank->ptr + rank->len, more->ptr, more->len * sizeof *more->ptr);
        rank->len += more->len;
    }
    if (part->len > 1)
        ckpt_sort(rank->ptr, rank->len, ckpt_u32s_cmp);
    for (size_t i = 0; i < rank->len; i++)
        if (out == 0 || rank->ptr[out - 1] != rank->ptr[i])
            rank->ptr[out++] = rank->ptr[i];
    rank->len = out;
    return 0;
}

uint32_t ckpt_rank_lists_group(struct ckpt_rank_lists *m, ckpt_numbers *part)
{
    ckpt_cleanup(ckpt_vec_cleanup) ckpt_numbers rank = {0};
    uint32_t group = CKPT_NONE;
    size_t out = 0;
    bool new;

    for (size_t i = 0; i < part->len; i++)
        if (out == 0 || part->ptr[out - 1] != part->ptr[i])
            part->ptr[out++] = part->ptr[i];
    part->len = out;
    if (ckpt_map_get(&m->unions.map, (const char *)part->ptr, out * sizeof *part->ptr, &group))
        return group;
    if (unite(m, part, &rank) < 0)
        return CKPT_NONE;
    group = group_of_ranks(m, &rank);
    if (group != CKPT_NONE && ckpt_lists_know(&m->unions, part->ptr, out, group, &new) < 0)
        return (void)ckpt_nomem(m->err), CKPT_NONE;
    return group;
}

void ckpt_rank_lists_release(struct ckpt_rank_lists *m)
{
    for (size_t i = 0; i < m->parts.len; i++) {
        ckpt_vec_release(&m->parts.ptr[i]->rank);
        free(m->parts.ptr[i]);
    }
    ckpt_vec_release(&m->parts);
    ckpt_map_release(&m->part_map);
    ckpt_map_release(&m->group_map);
    ckpt_lists_forget(&m->unions);
}
