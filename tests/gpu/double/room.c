/* SPDX-License-Identifier: Apache-2.0 */
/* A communicator whose ranks are all threads of this process (CKPTFS_GPU_THREADS=1) has no sockets:
 * its ranks meet in a room, which is found by the communicator's name. A rank shows the launch that
 * it runs at its seat; the receiver of a transfer waits until the sender's launch is there, and
 * copies. So 1,024 ranks need neither 1,024 sockets each nor a message for each pair of ranks. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "launch.h"

struct seat {
    struct launch *now; /* NULL: this rank runs none */
    bool taken;
    int identity;          /* of the rank's device */
    int64_t number[2][3];  /* what the rank says in an exchange: this one, and the next */
    pthread_cond_t arrive; /* `now` was set */
    pthread_cond_t leave;  /* nobody else needs `now` any more */
};

struct room {
    struct room *next;
    char name[COMM_NAME];
    int size, refs; /* refs: under rooms_lock */
    pthread_mutex_t lock;
    pthread_cond_t together; /* all have met, or an exchange is over */
    int met, said[2];        /* of an exchange: ranks that have said their numbers */
    bool clash;              /* two ranks are on one device */
    uint64_t exchanges;      /* that are over */
    struct seat seat[];
};

static pthread_mutex_t rooms_lock = PTHREAD_MUTEX_INITIALIZER;
static struct room *rooms;

static struct room *room_new(const struct ncclComm *c)
{
    struct room *r = calloc(1, sizeof *r + (size_t)c->size * sizeof *r->seat);

    if (!r)
        gpu_die("the host has no memory");
    (void)snprintf(r->name, sizeof r->name, "%s", c->name);
    r->size = c->size;
    (void)pthread_mutex_init(&r->lock, NULL);
    (void)pthread_cond_init(&r->together, NULL);
    for (int i = 0; i < r->size; i++) {
        (void)pthread_cond_init(&r->seat[i].arrive, NULL);
        (void)pthread_cond_init(&r->seat[i].leave, NULL);
    }
    r->next = rooms;
    return rooms = r;
}

static struct room *enter(const struct ncclComm *c)
{
    (void)pthread_mutex_lock(&rooms_lock);
    struct room *r = rooms;
    while (r && strcmp(r->name, c->name) != 0)
        r = r->next;
    if (!r)
        r = room_new(c);
    r->refs++;
    (void)pthread_mutex_unlock(&rooms_lock);
    if (r->size != c->size)
        gpu_die("ncclCommInitRank: rank %d says %d ranks, another says %d", c->rank, c->size,
                r->size);
    return r;
}

static void sit_down(struct ncclComm *c, struct room *r)
{
    struct seat *own = &r->seat[c->rank];

    if (own->taken)
        gpu_die("ncclCommInitRank: rank %d of this communicator is there already", c->rank);
    for (int i = 0; i < r->size; i++) {
        if (!r->seat[i].taken || r->seat[i].identity != c->identity || c->multi)
            continue;
        (void)fprintf(stderr, "gpu double: ranks %d and %d are both on device %d\n", c->rank, i,
                      c->identity);
        r->clash = true;
    }
    own->taken = true;
    own->identity = c->identity;
    if (++r->met == r->size)
        (void)pthread_cond_broadcast(&r->together);
}

bool room_meet(struct ncclComm *c, ncclResult_t *ret)
{
    struct room *r = c->room = enter(c);

    (void)pthread_mutex_lock(&r->lock);
    sit_down(c, r);
    while (r->met < r->size && !comm_aborted(c))
        (void)pthread_cond_wait(&r->together, &r->lock);
    const bool well = r->met == r->size;
    *ret = r->clash ? ncclInvalidUsage : ncclSuccess;
    (void)pthread_mutex_unlock(&r->lock);
    return well && *ret == ncclSuccess;
}

void room_part(struct ncclComm *c)
{
    struct room *r = c->room;

    if (!r)
        return;
    (void)pthread_mutex_lock(&rooms_lock);
    const bool last = --r->refs == 0;
    for (struct room **at = &rooms; last && *at; at = &(*at)->next)
        if (*at == r) {
            *at = r->next;
            break;
        }
    (void)pthread_mutex_unlock(&rooms_lock);
    if (!last)
        return;
    for (int i = 0; i < r->size; i++) {
        (void)pthread_cond_destroy(&r->seat[i].arrive);
        (void)pthread_cond_destroy(&r->seat[i].leave);
    }
    (void)pthread_cond_destroy(&r->together);
    (void)pthread_mutex_destroy(&r->lock);
    free(r);
}

void room_wake(struct ncclComm *c)
{
    struct room *r = c->room;

    if (!r)
        return;
    (void)pthread_mutex_lock(&r->lock);
    for (int i = 0; i < r->size; i++) {
        (void)pthread_cond_broadcast(&r->seat[i].arrive);
        (void)pthread_cond_broadcast(&r->seat[i].leave);
    }
    (void)pthread_cond_broadcast(&r->together);
    (void)pthread_mutex_unlock(&r->lock);
}

/* A rank may be in the next exchange while others still read the numbers of this one, but not in
 * the one after that. */
bool room_exchange(struct ncclComm *c, const int64_t own[3], int64_t (*ret)[3])
{
    struct room *r = c->room;
    const uint64_t nth = c->nexchange++;
    const int which = nth & 1;

    (void)pthread_mutex_lock(&r->lock);
    memcpy(r->seat[c->rank].number[which], own, sizeof r->seat->number[which]);
    if (++r->said[which] == r->size) {
        r->said[which] = 0;
        r->exchanges = nth + 1;
        (void)pthread_cond_broadcast(&r->together);
    }
    while (r->exchanges <= nth && !comm_aborted(c))
        (void)pthread_cond_wait(&r->together, &r->lock);
    const bool well = r->exchanges > nth;
    for (int i = 0; well && i < r->size; i++)
        memcpy(ret[i], r->seat[i].number[which], sizeof ret[i]);
    (void)pthread_mutex_unlock(&r->lock);
    return well;
}

/* ---- launches ---- */

/* The peer's side of a transfer; NULL: its launch is not there, or is an earlier one. */
static struct transfer *counterpart(const struct launch *l, const struct transfer *t)
{
    const struct launch *p = l->comm->room->seat[t->peer].now;
    struct transfer *s = p ? launch_find(p, l->comm->rank, !t->send, &t->is) : NULL;

    if (p && !s && t->is.kind == WIRE_COLLECTIVE && t->is.seq < p->collectives)
        launch_differs(p, l->comm->rank, &t->is, !t->send);
    if (s)
        launch_match(l, t, &s->is);
    return s && !s->stuck ? s : NULL;
}

/* Copy what the peer sends. False: aborted. */
static bool take(struct launch *l, struct transfer *t)
{
    struct room *r = l->comm->room;
    struct seat *peer = &r->seat[t->peer];
    struct transfer *s = NULL;

    while (!comm_aborted(l->comm) && (t->stuck || !(s = counterpart(l, t))))
        (void)pthread_cond_wait(&peer->arrive, &r->lock);
    if (!s)
        return false;
    struct launch *p = peer->now;
    p->readers++;
    (void)pthread_mutex_unlock(&r->lock);
    if (t->is.len)
        memcpy(t->real, s->real, t->is.len);
    (void)pthread_mutex_lock(&r->lock);
    s->done = t->done = true;
    l->latest = l->latest > p->at ? l->latest : p->at;
    p->latest = p->latest > l->at ? p->latest : l->at;
    p->readers--;
    l->left--;
    if (--p->left == 0 || p->readers == 0)
        (void)pthread_cond_signal(&peer->leave);
    return true;
}

void room_execute(struct launch *l)
{
    struct ncclComm *c = l->comm;
    struct room *r = c->room;
    struct seat *own = &r->seat[c->rank];
    bool well = true;

    (void)pthread_mutex_lock(&r->lock);
    own->now = l;
    (void)pthread_cond_broadcast(&own->arrive);
    for (size_t i = 0; i < l->ntransfer; i++) /* what does not match is seen by who comes last */
        (void)counterpart(l, &l->transfer[i]);
    for (size_t i = 0; well && i < l->ntransfer; i++)
        if (!l->transfer[i].send)
            well = take(l, &l->transfer[i]);
    while (l->readers || (l->left && !comm_aborted(c)))
        (void)pthread_cond_wait(&own->leave, &r->lock);
    own->now = NULL;
    (void)pthread_mutex_unlock(&r->lock);
}
