/* SPDX-License-Identifier: Apache-2.0 */
/* Broadcast trees. A tree is the balanced search tree over 0 .. n-1; it has no fixed root, because
 * a member passes a slice on to all of its neighbours except the one from which it came. */
#include "load/plan/broadcast.h"

#include <stdlib.h>

#include "base/mem.h"
#include "base/sort.h"

void ckpt_broadcast_release(struct ckpt_broadcast *r)
{
    free(r->member);
    free(r->place);
    free(r->node);
    *r = (struct ckpt_broadcast){0};
}

struct seat {
    uint32_t node, rank, index; /* index: in the group */
};

static int seat_cmp(const void *pa, const void *pb)
{
    const struct seat *a = pa, *b = pb;
    const int c = ckpt_u64_cmp(a->node, b->node);

    return c ? c : ckpt_u64_cmp(a->rank, b->rank);
}

int ckpt_broadcast_init(struct ckpt_broadcast *r, const struct ckpt_group *group,
                        const uint32_t *node, bool star, struct ckpt_err *err)
{
    const size_t n = group->n;
    ckpt_cleanup(ckpt_freep) struct seat *seat = malloc((n + 1) * sizeof *seat);

    *r = (struct ckpt_broadcast){.self = group->rank[group->self], .n = group->n, .star = star};
    r->member = malloc((n + 1) * sizeof *r->member);
    r->place = malloc((n + 1) * sizeof *r->place);
    r->node = malloc((n + 1) * sizeof *r->node);
    if (!seat || !r->member || !r->place || !r->node) {
        ckpt_broadcast_release(r);
        return ckpt_nomem(err);
    }
    for (uint32_t i = 0; i < n; i++)
        seat[i] = (struct seat){node[group->rank[i]], group->rank[i], i};
    qsort(seat, n, sizeof *seat, seat_cmp);
    for (uint32_t i = 0; i < n; i++) {
        if (i == 0 || seat[i - 1].node != seat[i].node)
            r->node[r->nnode++] = i;
        if (seat[i].rank == r->self)
            r->own = r->nnode - 1;
        r->member[i] = seat[i].rank;
        r->place[seat[i].index] = i;
    }
    r->node[r->nnode] = (uint32_t)n;
    return 0;
}

/* ---- trees ---- */

struct neighbours {
    uint32_t n, at[3]; /* parent and children */
    uint32_t toward;   /* the neighbour on the way to another place; UINT32_MAX: it is the place */
};

/* The neighbours of x in the tree over 0 .. n-1, and the one of them on the way to y. */
static struct neighbours find_neighbours(uint32_t n, uint32_t x, uint32_t y)
{
    struct neighbours r = {.toward = UINT32_MAX};
    uint32_t lo = 0, hi = n, up = UINT32_MAX, at;

    for (;;) {
        at = lo + (hi - lo) / 2;
        if (at == x)
            break;
        up = at;
        if (x < at)
            hi = at;
        else
            lo = at + 1;
    }
    if (up != UINT32_MAX)
        r.at[r.n++] = up;
    if (lo < at)
        r.at[r.n++] = lo + (at - lo) / 2;
    if (at + 1 < hi)
        r.at[r.n++] = at + 1 + (hi - at - 1) / 2;
    if (y < lo || y >= hi)
        r.toward = up;
    else if (y < x)
        r.toward = lo + (at - lo) / 2;
    else if (y > x)
        r.toward = at + 1 + (hi - at - 1) / 2;
    return r;
}

/* ---- the way of a reader's slices ---- */

struct way {
    uint32_t node, lane; /* the reader's node, and its number among that node's members */
    uint32_t turn;       /* which of the two trees between nodes: 0 or 1 */
};

static struct way way_of(const struct ckpt_broadcast *r, uint32_t reader)
{
    const uint32_t place = r->place[reader];
    uint32_t lo = 0, hi = r->nnode;

    while (hi - lo > 1) {
        const uint32_t mid = lo + (hi - lo) / 2;
        if (r->node[mid] <= place)
            lo = mid;
        else
            hi = mid;
    }
    return (struct way){lo, place - r->node[lo], place & 1};
}

static uint32_t count_of(const struct ckpt_broadcast *r, uint32_t node)
{
    return r->node[node + 1] - r->node[node];
}

/* The head of a node for this reader's slices, as an index in r->member. */
static uint32_t head_of(const struct ckpt_broadcast *r, uint32_t node, const struct way *w)
{
    return r->node[node] + w->lane % count_of(r, node);
}

/* The neighbours of this rank's node. In the second tree, all nodes are shifted by one place. */
static struct neighbours node_neighbours(const struct ckpt_broadcast *r, const struct way *w)
{
    const uint32_t n = r->nnode, shift = w->turn;
    struct neighbours t = find_neighbours(n, (r->own + shift) % n, (w->node + shift) % n);

    for (uint32_t i = 0; i < t.n; i++)
        t.at[i] = (t.at[i] + n - shift) % n;
    if (t.toward != UINT32_MAX)
        t.toward = (t.toward + n - shift) % n;
    return t;
}

/* The neighbours of this rank in the tree within its node; `toward` is on the way to the head. */
static struct neighbours mates(const struct ckpt_broadcast *r, const struct way *w)
{
    const uint32_t n = count_of(r, r->own), first = r->node[r->own];
    const uint32_t head = head_of(r, r->own, w);
    uint32_t self = first;

    while (r->member[self] != r->self)
        self++;
    struct neighbours t = find_neighbours(n, self - first, head - first);
    for (uint32_t i = 0; i < t.n; i++)
        t.at[i] += first;
    if (t.toward != UINT32_MAX)
        t.toward += first;
    return t;
}

uint32_t ckpt_broadcast_from(const struct ckpt_broadcast *r, uint32_t reader)
{
    const struct way w = way_of(r, reader);
    const uint32_t head = head_of(r, r->own, &w);

    if (r->member[head] != r->self)
        return r->member[r->star ? head : mates(r, &w).toward];
    const uint32_t toward = r->own == w.node ? UINT32_MAX : node_neighbours(r, &w).toward;
    return toward == UINT32_MAX ? r->self : r->member[head_of(r, toward, &w)];
}

uint32_t ckpt_broadcast_to(const struct ckpt_broadcast *r, uint32_t reader, uint32_t *ret)
{
    const struct way w = way_of(r, reader);
    const uint32_t head = head_of(r, r->own, &w);
    const bool is_head = r->member[head] == r->self;
    uint32_t n = 0;

    if (is_head && r->nnode > 1) {
        const struct neighbours t = node_neighbours(r, &w);
        for (uint32_t i = 0; i < t.n; i++)
            if (t.at[i] != t.toward)
                ret[n++] = r->member[head_of(r, t.at[i], &w)];
    }
    if (r->star) {
        for (uint32_t i = r->node[r->own]; is_head && i < r->node[r->own + 1]; i++)
            if (i != head)
                ret[n++] = r->member[i];
    } else if (count_of(r, r->own) > 1) {
        const struct neighbours t = mates(r, &w);
        for (uint32_t i = 0; i < t.n; i++)
            if (t.at[i] != t.toward)
                ret[n++] = r->member[t.at[i]];
    }
    return n;
}

uint32_t ckpt_broadcast_most(const struct ckpt_broadcast *r)
{
    return 3 + (r->star ? count_of(r, r->own) - 1 : 3);
}

/* ---- the traffic of all members ---- */

/* Add up the bytes of each lane and tree, which take the same way. Returns the number of lanes. */
static uint32_t sum_lanes(const struct ckpt_broadcast *r, const uint64_t *read, uint64_t *sum)
{
    uint32_t lanes = 0;

    for (uint32_t k = 0; k < r->nnode; k++)
        if (count_of(r, k) > lanes)
            lanes = count_of(r, k);
    for (uint32_t i = 0; i < r->n; i++) {
        const struct way w = way_of(r, i);
        sum[2 * w.lane + w.turn] += read[i];
    }
    return lanes;
}

/* The number of neighbours that a member has, for a lane and tree. */
static uint32_t degree(const struct ckpt_broadcast *r, uint32_t node, uint32_t index, uint32_t lane,
                       uint32_t turn)
{
    const uint32_t n = count_of(r, node), at = (node + turn) % r->nnode;
    const bool head = lane % n == index;
    uint32_t count = head ? find_neighbours(r->nnode, at, at).n : 0;

    if (r->star)
        return count + (head ? n - 1 : 1);
    return count + find_neighbours(n, index, index).n;
}

/* A member sends each byte to all neighbours except the one from which it came; it receives every
 * byte except those that it reads, so that many are subtracted. */
int ckpt_broadcast_sent(const struct ckpt_broadcast *r, const uint64_t *read, uint64_t *ret_sent,
                        struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) uint64_t *sum = calloc(2 * (size_t)r->n + 2, sizeof *sum);
    ckpt_cleanup(ckpt_freep) uint64_t *sent = calloc((size_t)r->n + 1, sizeof *sent);
    uint64_t total = 0;

    if (!sum || !sent)
        return ckpt_nomem(err);
    const uint32_t lanes = sum_lanes(r, read, sum);
    for (uint32_t i = 0; i < r->n; i++)
        total += read[i];
    for (uint32_t k = 0; k < r->nnode; k++)
        for (uint32_t i = 0; i < count_of(r, k); i++)
            for (uint32_t way = 0; way < 2 * lanes; way++)
                if (sum[way])
                    sent[r->node[k] + i] += sum[way] * degree(r, k, i, way / 2, way % 2);
    for (uint32_t i = 0; i < r->n; i++)
        ret_sent[i] = sent[r->place[i]] - (total - read[i]);
    return 0;
}
