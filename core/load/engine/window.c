/* SPDX-License-Identifier: Apache-2.0 */
/* Slots of an engine: which transfers are posted from and to them, and when they are free again. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "base/ckd.h"
#include "load/engine/engine_inner.h"

/* ---- pieces of this rank ---- */

static uint32_t count_receivers(const struct ckpt_engine *e, const struct ckpt_piece_plan *piece)
{
    const uint32_t n = e->plan->groups.ptr[piece->group].n;

    if (e->device) /* all work of the device on the piece counts as one receiver */
        return 1;
    if (n == 1)
        return 0;
    const struct ckpt_broadcast *broadcast = &e->plan->broadcast[piece->group];
    return ckpt_broadcast_to(broadcast, piece->reader, e->peers_worker);
}

bool ckpt_read_open(struct ckpt_engine *e)
{
    if (e->next_own == e->plan->own.len)
        return false;
    struct ckpt_read_slot *s = &e->read[e->next_own % e->opt.ahead];
    if (s->open)
        return false;
    const struct ckpt_piece_plan *piece = &e->plan->pieces.ptr[e->plan->own.ptr[e->next_own]];
    s->open = true;
    s->own = e->next_own++;
    s->lo = s->next = piece->lo;
    s->hi = piece->hi;
    s->unread = piece->hi - piece->lo;
    s->alone = e->plan->groups.ptr[piece->group].n == 1;
    s->unsent = count_receivers(e, piece);
    s->hashed = false;
    if (s->dev.pinned)
        s->buf = s->dev.pinned + e->plan->units.ptr[piece->lo].off % CKPT_DEVICE_PAGE;
    s->unit_off[0] = 0;
    for (uint32_t u = s->lo; u < s->hi; u++)
        s->unit_off[u + 1 - s->lo] = s->unit_off[u - s->lo] + e->plan->units.ptr[u].len;
    return true;
}

static void kick_at_end(struct ckpt_engine *e)
{
    if (e->nread == e->plan->own.len && e->nclosed == e->plan->windows.len)
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

struct ckpt_read_slot *ckpt_read_find(struct ckpt_engine *e, uint32_t piece)
{
    for (uint32_t i = 0; i < e->opt.ahead; i++) {
        struct ckpt_read_slot *s = &e->read[i];
        if (s->open && e->plan->own.ptr[s->own] == piece)
            return s;
    }
    return NULL;
}

/* ---- windows ---- */

void ckpt_window_settle(struct ckpt_engine *e, struct ckpt_window_slot *s)
{
    if (!s->open || s->left)
        return;
    s->open = false; /* its messages remain until the pump opens the next window in it */
    e->nclosed++;
    ckpt_engine_kick(e);
}

static bool reads_itself(const struct ckpt_engine *e, const struct ckpt_piece_plan *piece)
{
    return piece->reader == e->plan->groups.ptr[piece->group].self;
}

/* Bytes that are sent after each piece: its hash. */
static uint64_t tail_bytes(const struct ckpt_engine *e)
{
    return e->opt.mode.verify ? CKPT_MESSAGE_HASH : 0;
}

/* Add a transfer for each rank to which this rank sends a piece. */
static void add_outgoing(struct ckpt_engine *e, struct ckpt_window_slot *s, uint32_t number,
                         struct ckpt_message *in)
{
    const struct ckpt_piece_plan *piece = &e->plan->pieces.ptr[number];
    const uint32_t n =
        ckpt_broadcast_to(&e->plan->broadcast[piece->group], piece->reader, e->peers);

    for (uint32_t i = 0; i < n; i++) {
        struct ckpt_outgoing *o = &s->out[s->nout++];
        *o = (struct ckpt_outgoing){.piece = number, .in = in};
        o->xfer.peer = e->peers[i];
        o->xfer.len = piece->len + tail_bytes(e);
        o->xfer.send = true;
    }
    if (in)
        in->passed_on = n > 0;
}

/* Add the receive of a piece, at *at in the slot's buffer. */
static struct ckpt_message *add_message(struct ckpt_engine *e, struct ckpt_window_slot *s,
                                        uint32_t number, unsigned char **at)
{
    const struct ckpt_piece_plan *piece = &e->plan->pieces.ptr[number];
    struct ckpt_message *m = &s->in[s->nin++];

    *m = (struct ckpt_message){.slot = s, .piece = number};
    m->xfer.peer = e->device
                       ? e->plan->groups.ptr[piece->group].rank[piece->reader]
                       : ckpt_broadcast_from(&e->plan->broadcast[piece->group], piece->reader);
    m->xfer.len = piece->len + tail_bytes(e);
    m->xfer.buf = *at;
    *at += piece->len + ckpt_piece_tail(&e->opt.mode);
    return m;
}

static int fill_window(struct ckpt_engine *e, struct ckpt_window_slot *s, struct ckpt_err *err)
{
    const struct ckpt_window *w = &e->plan->windows.ptr[s->window];
    const size_t most = e->device ? 0 : ckpt_broadcast_most(&e->plan->broadcast[w->group]);
    unsigned char *at = e->device ? s->dev.receive : s->receive;

    free(s->in);
    free(s->out);
    s->nin = s->nout = 0;
    s->in = calloc(w->hi - w->lo + 1, sizeof *s->in);
    s->out = calloc((w->hi - w->lo) * most + 1, sizeof *s->out);
    if (!s->in || !s->out)
        return ckpt_nomem(err);
    for (uint32_t i = w->lo; i < w->hi; i++) {
        struct ckpt_message *in =
            reads_itself(e, &e->plan->pieces.ptr[i]) ? NULL : add_message(e, s, i, &at);
        if (!e->device)
            add_outgoing(e, s, i, in);
    }
    s->left = e->device ? 1 : (uint32_t)(s->nin + s->nout);
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
        s->dev.phase = CKPT_DEVICE_WAITING;
        if (fill_window(e, s, err) < 0)
            return -1;
        (void)pthread_mutex_lock(&e->lock);
        s->open = true;
        (void)pthread_mutex_unlock(&e->lock);
        for (size_t i = 0; i < s->nin && !e->device; i++)
            if (e->comm->x->ops->post(e->comm->x, &s->in[i].xfer, err) < 0)
                return -1;
    }
    return 0;
}

/* ---- sending ---- */

void ckpt_piece_sign(unsigned char *data, size_t len)
{
    const XXH64_hash_t h = XXH3_64bits(data, len);

    memcpy(data + len, &h, sizeof h);
}

/* The bytes of a piece that is to be sent; NULL: they have not been read or received yet (under the
 * lock). *ret_slot: the read slot, if this rank reads the piece. */
static unsigned char *ready_piece(struct ckpt_engine *e, const struct ckpt_outgoing *o,
                                  struct ckpt_read_slot **ret_slot)
{
    *ret_slot = NULL;
    if (o->in)
        return o->in->arrived ? o->in->xfer.buf : NULL;
    struct ckpt_read_slot *s = ckpt_read_find(e, o->piece);
    if (!s || s->unread)
        return NULL;
    *ret_slot = s;
    return s->buf;
}

static int send_piece(struct ckpt_engine *e, struct ckpt_outgoing *o, bool *ret_posted,
                      struct ckpt_err *err)
{
    struct ckpt_read_slot *own;

    (void)pthread_mutex_lock(&e->lock);
    unsigned char *data = ready_piece(e, o, &own);
    (void)pthread_mutex_unlock(&e->lock);
    *ret_posted = data != NULL;
    if (!data)
        return 0;
    if (own && e->opt.mode.verify && !own->hashed) {
        ckpt_piece_sign(data, e->plan->pieces.ptr[o->piece].len);
        own->hashed = true;
    }
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
            if (send_piece(e, o, &posted, err) < 0)
                return -1;
            if (!posted) /* transfers between two ranks match by their order */
                e->stamp[o->xfer.peer] = e->stamped;
        }
    return 0;
}

/* ---- what is done ---- */

static void harvest_slot(struct ckpt_engine *e, struct ckpt_window_slot *s)
{
    for (size_t i = 0; i < s->nout; i++) {
        struct ckpt_outgoing *o = &s->out[i];
        if (!o->posted || o->handled || !o->xfer.done)
            continue;
        o->handled = true;
        s->left--;
        atomic_fetch_add(&e->stats.sent, o->xfer.len);
        struct ckpt_read_slot *own = o->in ? NULL : ckpt_read_find(e, o->piece);
        if (own) {
            own->unsent--;
            ckpt_read_settle(e, own);
        }
    }
    for (size_t i = 0; i < s->nin; i++) {
        struct ckpt_message *m = &s->in[i];
        if (m->handled || !m->xfer.done)
            continue;
        m->handled = true;
        m->arrived = !m->xfer.in_place;
        m->next = NULL;
        *e->place_tail = m;
        e->place_tail = &m->next;
        atomic_fetch_add(&e->stats.received, m->xfer.len);
        (void)pthread_cond_signal(&e->work);
    }
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

int ckpt_message_check(const struct ckpt_engine *e, const struct ckpt_message *m, const void *data,
                       struct ckpt_err *err)
{
    const size_t len = m->xfer.len - CKPT_MESSAGE_HASH;
    const struct ckpt_piece_plan *piece = &e->plan->pieces.ptr[m->piece];
    XXH64_hash_t expected, actual = XXH3_64bits(data, len);

    memcpy(&expected, (const char *)data + len, sizeof expected);
    if (expected == actual)
        return 0;
    return ckpt_fail(err, CKPT_IO,
                     "bytes that rank %" PRIu32 " read and rank %" PRIu32 " sent in window %" PRIu32
                     " changed on the way (XXH3 %016" PRIx64 ", expected %016" PRIx64 ")",
                     e->plan->groups.ptr[piece->group].rank[piece->reader], m->xfer.peer,
                     m->slot->window, (uint64_t)actual, (uint64_t)expected);
}
