/* SPDX-License-Identifier: Apache-2.0 */
/* Parts: free ones, a chain for each object, and who makes room for whom. */
#include "io/far/parts.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"

/* Ages in ticks: a tick is a part that is fetched or read. */
enum {
    FRESH_TICKS = 64,   /* a part that was read since then may be read on: prefetching spares it */
    STALE_TICKS = 4096, /* a part that was fetched before then, and not read since, will not be */
};

void ckpt_parts_init(struct ckpt_parts *p, uint32_t nunit)
{
    assert(nunit <= CKPT_PARTS_UNITS);
    p->nunit = nunit;
    p->used = 0;
    memset(p->taken, false, sizeof p->taken);
    memset(p->chain, 0, sizeof p->chain);
    ckpt_cond_init(&p->freed);
    p->free = p->part;
    for (size_t i = 0; i < CKPT_PARTS; i++) {
        free(p->part[i].text);
        p->part[i] = (struct ckpt_part){.next = i + 1 < CKPT_PARTS ? &p->part[i + 1] : NULL};
        ckpt_cond_init(&p->part[i].done);
    }
}

void ckpt_parts_release(struct ckpt_parts *p)
{
    for (size_t i = 0; i < CKPT_PARTS; i++) {
        free(p->part[i].text);
        (void)pthread_cond_destroy(&p->part[i].done);
    }
    (void)pthread_cond_destroy(&p->freed);
}

static struct ckpt_part **chain_of(struct ckpt_parts *p, XXH128_hash_t object)
{
    return &p->chain[object.low64 % CKPT_PARTS_CHAINS];
}

void ckpt_parts_free(struct ckpt_parts *p, struct ckpt_part *part)
{
    struct ckpt_part **at = chain_of(p, part->object);

    while (*at != part)
        at = &(*at)->next;
    *at = part->next;
    part->next = p->free;
    p->free = part;
    part->state = CKPT_PART_FREE;
    memset(p->taken + part->unit, false, part->nunit);
    free(part->text);
    part->text = NULL;
    (void)pthread_cond_broadcast(&p->freed);
}

/* A place for n of the first `most` units in a row, the first. False: there is none. */
static bool find_units(const struct ckpt_parts *p, uint32_t n, uint32_t most, uint32_t *ret)
{
    uint32_t have = 0;

    for (uint32_t i = 0; i < most; i++)
        if ((have = p->taken[i] ? 0 : have + 1) == n) {
            *ret = i + 1 - n;
            return true;
        }
    return false;
}

static bool is_spent(const struct ckpt_part *part)
{
    return part->state == CKPT_PART_READY && part->pins == 0 && part->tick == 0;
}

/* Free what has been read to its end; false: there is nothing. */
static bool free_spent(struct ckpt_parts *p)
{
    bool freed = false;

    for (size_t i = 0; i < CKPT_PARTS; i++)
        if (is_spent(&p->part[i])) {
            ckpt_parts_free(p, &p->part[i]);
            freed = true;
        }
    return freed;
}

/* A place for n units. Units that were never used are taken last: the kernel has to find memory for
 * them, which takes longer than to fill it. So a stream that is fetched ahead goes over what of it
 * has been read. */
static bool find_place(struct ckpt_parts *p, uint32_t n, bool prefetch, uint32_t *ret)
{
    return find_units(p, n, p->used, ret) ||
           (prefetch && n > 1 && free_spent(p) && find_units(p, n, p->used, ret)) ||
           find_units(p, n, p->nunit, ret);
}

/* Free what is needed least; false: all is in use. */
static bool make_room(struct ckpt_parts *p, bool prefetch)
{
    struct ckpt_part *old = NULL, *last = NULL; /* last: of what is unread */

    if (free_spent(p))
        return true;
    for (size_t i = 0; i < CKPT_PARTS; i++) {
        struct ckpt_part *s = &p->part[i];
        const uint64_t age = p->tick - s->tick;
        if (s->state != CKPT_PART_READY || s->pins)
            continue;
        if (s->unread && age < STALE_TICKS)
            last = !last || s->tick > last->tick ? s : last;
        else if ((!prefetch || age > FRESH_TICKS) && (!old || s->tick < old->tick))
            old = s;
    }
    if (!old && !prefetch)
        old = last;
    if (old)
        ckpt_parts_free(p, old);
    return old;
}

struct ckpt_part *ckpt_parts_add(struct ckpt_parts *p, XXH128_hash_t object, uint64_t off,
                                 uint32_t len, bool prefetch)
{
    const uint32_t n = (len + CKPT_PARTS_UNIT - 1) / CKPT_PARTS_UNIT;
    uint32_t unit;

    while (!p->free || !find_place(p, n, prefetch, &unit))
        if (!make_room(p, prefetch))
            return NULL;
    struct ckpt_part *part = p->free, **chain = chain_of(p, object);
    p->free = part->next;
    part->next = *chain;
    *chain = part;
    part->object = object;
    part->off = off;
    part->len = len;
    part->unit = unit;
    part->nunit = n;
    p->used = p->used > unit + n ? p->used : unit + n;
    memset(p->taken + unit, true, n);
    part->state = CKPT_PART_FETCHING;
    part->pins = 0;
    part->tick = ++p->tick;
    part->begun_ms = 0;
    part->is_end = false;
    part->ahead = prefetch;
    part->unread = true;
    return part;
}

struct ckpt_part *ckpt_parts_find(struct ckpt_parts *p, XXH128_hash_t object, uint64_t off,
                                  uint64_t *end)
{
    for (struct ckpt_part *s = *chain_of(p, object); s; s = s->next) {
        if (s->state == CKPT_PART_FAILED || !XXH128_isEqual(s->object, object))
            continue;
        if (off >= s->off && off - s->off < s->len)
            return s;
        if (end && s->off > off && s->off < *end)
            *end = s->off;
    }
    return NULL;
}
