/* SPDX-License-Identifier: Apache-2.0 */
/* Slots of an engine: which transfers are posted from and to them, and when they are free again. */
#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "base/clock.h"
#include "load/engine/engine_inner.h"
#include "load/plan/divisions.h"

enum { RATED_BYTES = 1 << 20 }; /* smaller windows say nothing about the rate */

/* ---- chunks of this rank ---- */

static struct ckpt_read_slot *free_slot(struct ckpt_engine *e)
{
    for (uint32_t i = 0; i < e->opt.ahead; i++)
        if (!e->read[i].open)
            return &e->read[i];
    return NULL;
}

bool ckpt_read_open(struct ckpt_engine *e)
{
    struct ckpt_read_slot *s = e->next_chunk < e->plan->chunks.len ? free_slot(e) : NULL;

    if (!s)
        return false;
    const struct ckpt_chunk *chunk = &e->plan->chunks.ptr[e->next_chunk];
    const uint64_t end = chunk->lo + chunk->len;
    s->open = true;
    s->chunk = e->next_chunk++;
    s->lo = s->next = s->hi = ckpt_plan_unit_at(e->plan, chunk->group, chunk->lo);
    while (s->hi < e->plan->stream[chunk->group].hi && e->plan->units.ptr[s->hi].at < end)
        s->hi++;
    assert(s->lo < s->hi && e->plan->units.ptr[s->lo].at <= chunk->lo);
    s->unread = s->hi - s->lo;
    s->unsent = ckpt_plan_fed(e->plan, chunk);
    const struct ckpt_unit *unit = &e->plan->units.ptr[s->lo];
    if (s->pinned)
        s->buf = s->pinned + (unit->off + (chunk->lo - unit->at)) % CKPT_DEVICE_PAGE;
    return true;
}

static void kick_at_end(struct ckpt_engine *e)
{
    if (e->nread == e->plan->chunks.len && e->nclosed == e->plan->windows.len)
        ckpt_engine_kick(e);
}

void ckpt_read_settle(struct ckpt_engine *e, struct ckpt_read_slot *s)
{
    if (!s->open || s->unread || s->unsent)
        return;
    s->open = false;
    e->nread++;
    (void)pthread_cond_broadcast(&e->work);
    kick_at_end(e);
}

/* The open read slot of a chunk; NULL: the chunk is not begun, or is done. */
static struct ckpt_read_slot *find_read(struct ckpt_engine *e, uint32_t chunk)
{
    for (uint32_t i = 0; i < e->opt.ahead; i++)
        if (e->read[i].open && e->read[i].chunk == chunk)
            return &e->read[i];
    return NULL;
}

/* ---- windows ---- */

void ckpt_window_settle(struct ckpt_engine *e, struct ckpt_window_slot *s)
{
    if (!s->open || s->left)
        return;
    struct ckpt_read_slot *own = find_read(e, ckpt_window_of(e, s)->chunk);
    if (own) {
        assert(own->unsent > 0); /* the chunk waits for each window that it feeds, and once */
        own->unsent--;
        ckpt_read_settle(e, own);
    }
    s->open = false; /* its messages remain until the pump opens the next window in it */
    e->nclosed++;
    assert(e->nclosed <= e->plan->windows.len);
    ckpt_engine_kick(e);
}

void ckpt_window_rate(struct ckpt_engine *e, const struct ckpt_window_slot *s, uint64_t bytes)
{
    const uint64_t now = ckpt_now_ns();
    const double rate =
        s->since_ns && now > s->since_ns ? (double)bytes * 1e9 / (double)(now - s->since_ns) : 0;

    if (bytes >= RATED_BYTES && rate > e->stats.exchange_rate)
        e->stats.exchange_rate = rate;
}

unsigned char *ckpt_window_own(struct ckpt_engine *e, struct ckpt_window_slot *s, size_t *ret_len)
{
    const struct ckpt_window *w = ckpt_window_of(e, s);
    uint64_t lo, hi;

    *ret_len = 0;
    if (w->chunk == CKPT_NONE)
        return NULL;
    ckpt_plan_slice(e->plan, w, e->plan->groups.ptr[w->group].self, &lo, &hi);
    *ret_len = hi - lo;
    (void)pthread_mutex_lock(&e->lock);
    const struct ckpt_read_slot *own = find_read(e, w->chunk);
    unsigned char *data =
        own && own->unread == 0 ? own->buf + (lo - e->plan->chunks.ptr[w->chunk].lo) : NULL;
    (void)pthread_mutex_unlock(&e->lock);
    if (data && s->since_ns == 0)
        s->since_ns = ckpt_now_ns();
    if (data && e->opt.mode.verify && e->plan->stream[w->group].nstep && !s->hashed) {
        const XXH64_hash_t h = XXH3_64bits(data, *ret_len);
        memcpy(data + *ret_len, &h, sizeof h);
        s->hashed = true;
    }
    return data;
}

/* Bytes that are sent after each slice: its hash. */
static uint64_t tail_bytes(const struct ckpt_engine *e)
{
    return e->opt.mode.verify ? CKPT_MESSAGE_HASH : 0;
}

/* Add a transfer for each rank to which this rank sends a member's slice. */
static void add_outgoing(struct ckpt_engine *e, struct ckpt_window_slot *s, uint32_t member,
                         size_t len, struct ckpt_message *in)
{
    const uint32_t group = ckpt_window_of(e, s)->group;
    const uint32_t n = ckpt_broadcast_to(&e->plan->broadcast[group], member, e->peers);

    assert(n <= ckpt_broadcast_most(&e->plan->broadcast[group])); /* s->out has room for these */
    for (uint32_t i = 0; i < n; i++) {
        struct ckpt_outgoing *o = &s->out[s->nout++];
        *o = (struct ckpt_outgoing){.in = in};
        o->xfer.peer = e->peers[i];
        o->xfer.len = len + tail_bytes(e);
        o->xfer.send = true;
    }
    if (in)
        in->passed_on = n > 0;
}

/* Add the receive of a member's slice. */
static struct ckpt_message *add_message(struct ckpt_engine *e, struct ckpt_window_slot *s,
                                        uint32_t member, size_t len)
{
    const uint32_t group = ckpt_window_of(e, s)->group;
    struct ckpt_message *m = &s->in[s->nin++];

    *m = (struct ckpt_message){.slot = s, .member = member};
    m->xfer.peer = ckpt_broadcast_from(&e->plan->broadcast[group], member);
    m->xfer.len = len + tail_bytes(e);
    m->xfer.buf = s->receive + ckpt_window_offset(e, ckpt_window_of(e, s), member);
    return m;
}

/* Do the slices of a group come by all-gathers? The members decide alike (agree.c). Two ranks only
 * send to each other. */
static bool is_gathered(const struct ckpt_engine *e, const struct ckpt_stream *s)
{
    bool all = e->comm->x->ops->gather && (s->nstep == 2 || s->step[0].n >= CKPT_DIVISION_LEAST);

    for (uint32_t k = 0; k < s->nstep; k++)
        all = all && s->step[k].division != CKPT_DIVISION_NONE;
    return all;
}

static int fill_window(struct ckpt_engine *e, struct ckpt_window_slot *s, struct ckpt_err *err)
{
    const struct ckpt_window *w = ckpt_window_of(e, s);
    const struct ckpt_group *g = &e->plan->groups.ptr[w->group];
    const size_t most = ckpt_broadcast_most(&e->plan->broadcast[w->group]);

    free(s->in);
    free(s->out);
    s->nin = s->nout = s->step = 0;
    s->gathers = is_gathered(e, &e->plan->stream[w->group]);
    s->in = calloc(g->n, sizeof *s->in);
    s->out = calloc(g->n * most, sizeof *s->out);
    if (!s->in || !s->out)
        return ckpt_nomem(err);
    for (uint32_t i = 0; i < g->n; i++) {
        uint64_t lo, hi;
        ckpt_plan_slice(e->plan, w, i, &lo, &hi);
        if (hi <= lo)
            continue;
        struct ckpt_message *in = i == g->self ? NULL : add_message(e, s, i, hi - lo);
        if (!s->gathers)
            add_outgoing(e, s, i, hi - lo, in);
    }
    s->left = (uint32_t)(s->nin + s->nout) + s->gathers;
    return 0;
}

int ckpt_windows_open(struct ckpt_engine *e, struct ckpt_err *err)
{
    while (e->next_window < e->plan->windows.len) {
        struct ckpt_window_slot *s = &e->slot[e->next_window % e->opt.slots];
        (void)pthread_mutex_lock(&e->lock);
        const bool busy = s->open;
        (void)pthread_mutex_unlock(&e->lock);
        if (busy || !ckpt_pause_allows(e, &e->plan->windows.ptr[e->next_window]))
            return 0;
        s->window = e->next_window++;
        s->hashed = false;
        s->since_ns = 0;
        s->left = 1;
        if (!e->device && fill_window(e, s, err) < 0)
            return -1;
        (void)pthread_mutex_lock(&e->lock);
        s->open = true;
        (void)pthread_mutex_unlock(&e->lock);
        for (size_t i = 0; i < s->nin && !e->device && !s->gathers; i++)
            if (e->comm->x->ops->post(e->comm->x, &s->in[i].xfer, err) < 0)
                return -1;
    }
    return 0;
}

/* ---- sending ---- */

static int send_slice(struct ckpt_engine *e, struct ckpt_window_slot *s, struct ckpt_outgoing *o,
                      bool *ret_posted, struct ckpt_err *err)
{
    unsigned char *data;

    if (o->in) {
        (void)pthread_mutex_lock(&e->lock);
        data = o->in->arrived ? o->in->xfer.buf : NULL;
        (void)pthread_mutex_unlock(&e->lock);
    } else {
        size_t len;
        data = ckpt_window_own(e, s, &len);
    }
    *ret_posted = data != NULL;
    if (!data)
        return 0;
    o->posted = true;
    o->xfer.buf = data;
    return e->comm->x->ops->post(e->comm->x, &o->xfer, err);
}

/* The k-th slot in the order of windows, done or in flight; NULL: there are no more. */
static struct ckpt_window_slot *in_flight(struct ckpt_engine *e, uint32_t k)
{
    const uint32_t first = e->next_window > e->opt.slots ? e->next_window - e->opt.slots : 0;

    return first + k < e->next_window ? &e->slot[(first + k) % e->opt.slots] : NULL;
}

/* Start the next all-gather of a window. 1: not yet. This rank's slice is copied to its place
 * before only if it is shorter than the others', or travels on in the second step. */
static int gather_step(struct ckpt_engine *e, struct ckpt_window_slot *s, struct ckpt_err *err)
{
    const struct ckpt_window *w = ckpt_window_of(e, s);
    const struct ckpt_stream *t = &e->plan->stream[w->group];
    const uint32_t step = s->step;
    struct ckpt_xfer x = {0};
    size_t len = 0;

    if (step > 0 && !s->gather.done)
        return 1;
    x.buf = s->receive + ckpt_step_buffer(t, &e->opt.mode, step, &x.len);
    unsigned char *place = (unsigned char *)x.buf + t->step[step].self * x.len;
    const unsigned char *own = step == 0 ? ckpt_window_own(e, s, &len) : NULL;
    if (!own && len)
        return 1;
    assert(len <= x.len);
    if (own && (len < x.len || t->nstep == 2))
        memcpy(place, own, len + tail_bytes(e));
    s->gather = x;
    s->step++;
    return e->comm->x->ops->gather(e->comm->x, t->step[step].division,
                                   own && len == x.len && t->nstep == 1 ? own : place, &s->gather,
                                   err);
}

/* All ranks start all-gathers in one order, by window, group and step, and none before those that
 * precede it, so that no ranks wait for each other in a circle. */
static int gather(struct ckpt_engine *e, struct ckpt_err *err)
{
    for (; e->next_issue < e->next_window; e->next_issue++) {
        /* a window whose all-gathers have not all begun still has its slot */
        assert(e->next_window - e->next_issue <= e->opt.slots);
        struct ckpt_window_slot *s = &e->slot[e->next_issue % e->opt.slots];
        const struct ckpt_stream *t = &e->plan->stream[ckpt_window_of(e, s)->group];
        while (s->gathers && s->step < t->nstep) {
            const int rc = gather_step(e, s, err);
            if (rc != 0)
                return rc < 0 ? -1 : 0;
        }
    }
    return 0;
}

int ckpt_windows_send(struct ckpt_engine *e, struct ckpt_err *err)
{
    struct ckpt_window_slot *s;

    e->stamped++;
    for (uint32_t k = 0; (s = in_flight(e, k)); k++)
        for (size_t i = 0; i < s->nout; i++) {
            struct ckpt_outgoing *o = &s->out[i];
            bool posted = false;
            if (o->posted || e->stamp[o->xfer.peer] == e->stamped)
                continue;
            if (send_slice(e, s, o, &posted, err) < 0)
                return -1;
            if (!posted) /* transfers between two ranks match by their order */
                e->stamp[o->xfer.peer] = e->stamped;
        }
    return gather(e, err);
}

/* ---- what is done ---- */

/* If the all-gathers of a window have ended, all slices have arrived. */
static void harvest_gather(struct ckpt_engine *e, struct ckpt_window_slot *s)
{
    const struct ckpt_window *w = ckpt_window_of(e, s);
    const struct ckpt_group *g = &e->plan->groups.ptr[w->group];
    uint64_t lo, hi;

    if (!s->gathers || s->step < e->plan->stream[w->group].nstep || !s->gather.done)
        return;
    s->gathers = false;
    s->left--;
    for (size_t i = 0; i < s->nin; i++)
        s->in[i].xfer.done = true;
    ckpt_plan_slice(e->plan, w, g->self, &lo, &hi);
    if (hi > lo)
        atomic_fetch_add(&e->stats.sent, (hi - lo + tail_bytes(e)) * (g->n - 1));
}

void ckpt_message_hand(struct ckpt_engine *e, struct ckpt_message *m)
{
    m->next = NULL;
    *e->place_tail = m;
    e->place_tail = &m->next;
    (void)pthread_cond_signal(&e->work);
}

static void harvest_slot(struct ckpt_engine *e, struct ckpt_window_slot *s)
{
    uint64_t bytes = 0;
    bool all = true, some = false;

    harvest_gather(e, s);
    for (size_t i = 0; i < s->nout; i++) {
        struct ckpt_outgoing *o = &s->out[i];
        if (!o->posted || o->handled || !o->xfer.done)
            continue;
        o->handled = true;
        assert(s->left > 0);
        s->left--;
        atomic_fetch_add(&e->stats.sent, o->xfer.len);
    }
    for (size_t i = 0; i < s->nin; i++) {
        struct ckpt_message *m = &s->in[i];
        bytes += m->xfer.len;
        all &= m->handled || m->xfer.done;
        if (m->handled || !m->xfer.done)
            continue;
        m->handled = some = true;
        m->arrived = !m->xfer.there;
        ckpt_message_hand(e, m);
        atomic_fetch_add(&e->stats.received, m->xfer.len);
    }
    if (all && some)
        ckpt_window_rate(e, s, bytes);
    ckpt_window_settle(e, s);
}

void ckpt_windows_harvest(struct ckpt_engine *e)
{
    (void)pthread_mutex_lock(&e->lock);
    for (uint32_t i = 0; i < e->opt.slots; i++)
        if (e->slot[i].open)
            harvest_slot(e, &e->slot[i]);
    (void)pthread_mutex_unlock(&e->lock);
}

int ckpt_slice_check(const struct ckpt_engine *e, const struct ckpt_window_slot *s, uint32_t member,
                     const unsigned char *data, struct ckpt_err *err)
{
    const struct ckpt_window *w = ckpt_window_of(e, s);
    XXH64_hash_t expected, actual;
    uint64_t lo, hi;

    ckpt_plan_slice(e->plan, w, member, &lo, &hi);
    if (lo == hi)
        return 0;
    actual = XXH3_64bits(data, hi - lo);
    memcpy(&expected, data + (hi - lo), sizeof expected);
    if (expected == actual)
        return 0;
    return ckpt_fail(err, CKPT_IO,
                     "bytes that rank %" PRIu32 " read and sent in window %" PRIu32
                     " changed on the way (XXH3 %016" PRIx64 ", expected %016" PRIx64 ")",
                     e->plan->groups.ptr[w->group].rank[member], s->window, (uint64_t)actual,
                     (uint64_t)expected);
}
