/* SPDX-License-Identifier: Apache-2.0 */
/* The pump's part of a load into device memory. Workers read units into pinned memory, and the pump
 * queues an upload of each. When this rank's own piece of a window is there, the whole work of the
 * window is queued at once: place the own piece, exchange, place what was received. The pump never
 * waits for the device; it polls the marks that it has queued. */
#include "device/device.h"

#include <string.h>

#include "base/err.h"
#include "load/engine/engine_inner.h"

/* ---- slots ---- */

/* Allocate device memory; NULL for 0 bytes. ret points to a pointer of any type. */
static int take(struct ckpt_device *d, uint64_t len, void *ret, struct ckpt_err *err)
{
    void *p = NULL;

    if (len && d->ops->alloc(d, len, &p, err) < 0)
        return -1;
    memcpy(ret, &p, sizeof p);
    return 0;
}

/* ---- the slab: pinned memory of all slots ---- */

static uint64_t whole_pages(uint64_t len)
{
    return (len + CKPT_DEVICE_PAGE - 1) / CKPT_DEVICE_PAGE * CKPT_DEVICE_PAGE;
}

static uint64_t list_bytes(uint64_t n) { return whole_pages(n * sizeof(struct ckpt_device_copy)); }

/* Pinned bytes of a window slot for verifying received pieces. */
static uint64_t verified(const struct ckpt_engine *e)
{
    return e->opt.mode.verify ? e->sizes.receive : 0;
}

/* Pinned bytes of a read slot, with room to shift the piece (ckpt_read_slot.dev.pinned). */
static uint64_t read_bytes(const struct ckpt_engine *e)
{
    return e->sizes.read ? whole_pages(e->sizes.read) + CKPT_DEVICE_PAGE : 0;
}

static int pin_slab(struct ckpt_engine *e, struct ckpt_err *err)
{
    const struct ckpt_engine_sizes *z = &e->sizes;
    const uint64_t len = e->opt.ahead * (read_bytes(e) + list_bytes(z->read_copies)) +
                         e->opt.slots * (whole_pages(verified(e)) + list_bytes(z->window_copies));

    return len && e->device->ops->pin(e->device, len, &e->slab, err) < 0 ? -1 : 0;
}

/* Cut the next `len` bytes off the slab, rounded up to pages; NULL for 0 bytes. */
static void *cut(unsigned char **at, uint64_t len)
{
    void *p = len ? *at : NULL;

    *at += whole_pages(len);
    return p;
}

static int take_list(struct ckpt_device *d, uint64_t n, unsigned char **at,
                     struct ckpt_copy_list *l, struct ckpt_err *err)
{
    const uint64_t bytes = n * sizeof *l->list;

    if (n > UINT32_MAX)
        return ckpt_fail(err, CKPT_LIMIT, "a piece or window needs more than 2^32 copies");
    l->copies = (struct ckpt_copies){.ptr = cut(at, bytes), .cap = (uint32_t)n};
    return take(d, bytes, &l->list, err);
}

int ckpt_device_slots_init(struct ckpt_engine *e, struct ckpt_err *err)
{
    struct ckpt_device *d = e->device;
    int rc = pin_slab(e, err);
    unsigned char *at = e->slab;

    for (uint32_t i = 0; i < e->opt.ahead && rc == 0; i++) {
        struct ckpt_read_slot *s = &e->read[i];
        s->buf = s->dev.pinned = cut(&at, read_bytes(e));
        rc = take(d, e->sizes.read, &s->dev.buf, err);
        if (rc == 0)
            rc = take_list(d, e->sizes.read_copies, &at, &s->dev.list, err);
    }
    for (uint32_t i = 0; i < e->opt.slots && rc == 0; i++) {
        struct ckpt_window_slot *s = &e->slot[i];
        s->receive = cut(&at, verified(e));
        rc = take(d, e->sizes.receive, &s->dev.receive, err);
        if (rc == 0)
            rc = take_list(d, e->sizes.window_copies, &at, &s->dev.list, err);
    }
    /* the caller's stream may still use the memory that was allocated */
    return rc == 0 ? d->ops->begin(d, err) : rc;
}

static void give(struct ckpt_device *d, void *buf, void *list)
{
    if (buf)
        d->ops->dealloc(d, buf);
    if (list)
        d->ops->dealloc(d, list);
}

void ckpt_device_slots_release(struct ckpt_engine *e)
{
    for (uint32_t i = 0; e->read && i < e->opt.ahead; i++) {
        struct ckpt_read_slot *s = &e->read[i];
        give(e->device, s->dev.buf, s->dev.list.list);
        ckpt_vec_release(&s->dev.ready);
        ckpt_vec_release(&s->dev.own);
    }
    for (uint32_t i = 0; e->slot && i < e->opt.slots; i++) {
        struct ckpt_window_slot *s = &e->slot[i];
        give(e->device, s->dev.receive, s->dev.list.list);
        ckpt_vec_release(&s->dev.exchange);
        ckpt_vec_release(&s->dev.own);
    }
    if (e->slab)
        e->device->ops->unpin(e->device, e->slab);
}

/* Marks in the device's queue: first those of read slots, then those of window slots. */
static uint32_t read_mark(const struct ckpt_engine *e, const struct ckpt_read_slot *s)
{
    return (uint32_t)(s - e->read);
}

static uint32_t window_mark(const struct ckpt_engine *e, const struct ckpt_window_slot *s)
{
    return e->opt.ahead + (uint32_t)(s - e->slot);
}

/* ---- uploads ---- */

/* Queue the uploads of units that workers have read. */
static int upload_ready(struct ckpt_engine *e, struct ckpt_read_slot *s, bool *moved,
                        struct ckpt_err *err)
{
    for (;;) {
        struct ckpt_units u;
        (void)pthread_mutex_lock(&e->lock);
        const bool any = s->dev.ready.len > 0;
        if (any)
            u = s->dev.ready.ptr[--s->dev.ready.len];
        (void)pthread_mutex_unlock(&e->lock);
        if (!any)
            return 0;
        const uint64_t lo = s->unit_off[u.lo - s->lo], hi = s->unit_off[u.hi - s->lo];
        if (e->device->ops->upload(e->device, s->dev.buf + lo, s->buf + lo, hi - lo, err) < 0)
            return -1;
        *moved = true;
    }
}

/* True if the uploads of all units of the slot's piece are queued or done. */
static bool is_uploaded(struct ckpt_engine *e, const struct ckpt_read_slot *s)
{
    (void)pthread_mutex_lock(&e->lock);
    const bool all = s->open && s->unread == 0 && s->dev.ready.len == 0;
    (void)pthread_mutex_unlock(&e->lock);
    return all;
}

/* The read slot of a piece that this rank reads. */
static struct ckpt_read_slot *find_own(struct ckpt_engine *e, uint32_t piece)
{
    (void)pthread_mutex_lock(&e->lock);
    struct ckpt_read_slot *s = ckpt_read_find(e, piece);
    (void)pthread_mutex_unlock(&e->lock);
    return s;
}

/* ---- lists of copies and exchanges ---- */

/* Add the copies that place what this rank wants of a piece; `data` is its device memory. */
static int list_piece(struct ckpt_engine *e, const struct ckpt_piece_plan *piece,
                      const unsigned char *data, struct ckpt_copies *copies, ckpt_parts *own,
                      struct ckpt_err *err)
{
    for (uint32_t u = piece->lo; u < piece->hi; data += e->plan->units.ptr[u++].len) {
        const size_t first = own->len;
        struct ckpt_box box;
        ckpt_plan_unit_box(e->plan, u, &box);
        if (ckpt_plan_wanted(e->plan, u, &box, own, err) < 0)
            return -1;
        for (size_t i = first; i < own->len; i++)
            if (ckpt_copies_place(copies, &e->target[own->ptr[i].entry], &own->ptr[i].box, data,
                                  &box, ckpt_plan_unit_tensor(e->plan, u)->dtype, err) < 0)
                return -1;
    }
    return 0;
}

static int add_exchange(struct ckpt_window_slot *s, const struct ckpt_exchange *x,
                        struct ckpt_err *err)
{
    return ckpt_vec_push(&s->dev.exchange, *x) < 0 ? ckpt_nomem(err) : 0;
}

/* Add the exchanges of a piece: a broadcast if the group has a communicator or is all ranks, else a
 * send from the reader to each member. */
static int list_transfers(struct ckpt_engine *e, struct ckpt_window_slot *s,
                          const struct ckpt_piece_plan *piece, void *buf, size_t len,
                          struct ckpt_err *err)
{
    const struct ckpt_group *g = &e->plan->groups.ptr[piece->group];
    struct ckpt_exchange x = {.family = e->plan->family[piece->group],
                              .peer = g->rank[piece->reader],
                              .n = g->n,
                              .buf = buf,
                              .len = len};

    x.kind = x.family || g->n == e->size ? CKPT_BROADCAST : CKPT_RECEIVE;
    if (x.family)
        x.peer = piece->reader;
    if (x.kind == CKPT_BROADCAST || piece->reader != g->self)
        return add_exchange(s, &x, err);
    x.kind = CKPT_SEND;
    for (uint32_t i = 0; i < g->n; i++) {
        x.peer = g->rank[i];
        if (i != g->self && add_exchange(s, &x, err) < 0)
            return -1;
    }
    return 0;
}

/* Add the copies of a window. own: of this rank's own piece, which run before the exchange; else of
 * the received pieces, and the exchanges of all pieces. */
static int list_pieces(struct ckpt_engine *e, struct ckpt_window_slot *s, bool own,
                       struct ckpt_err *err)
{
    const struct ckpt_window *w = &e->plan->windows.ptr[s->window];
    size_t at = 0;

    for (uint32_t i = w->lo; i < w->hi; i++) {
        const struct ckpt_piece_plan *piece = &e->plan->pieces.ptr[i];
        const bool ours = piece->reader == e->plan->groups.ptr[w->group].self;
        struct ckpt_read_slot *from = ours ? find_own(e, i) : NULL;
        unsigned char *buf = ours ? from->dev.buf : s->in[at].xfer.buf;
        const size_t len = piece->len + (e->opt.mode.verify ? CKPT_MESSAGE_HASH : 0);
        at += !ours;
        if (!own && list_transfers(e, s, piece, buf, len, err) < 0)
            return -1;
        if (own == ours && list_piece(e, piece, buf, &s->dev.list.copies, &s->dev.own, err) < 0)
            return -1;
    }
    return 0;
}

static int list_window(struct ckpt_engine *e, struct ckpt_window_slot *s, struct ckpt_err *err)
{
    struct ckpt_copies *c = &s->dev.list.copies;

    c->n = c->nblock = 0;
    s->dev.own.len = s->dev.exchange.len = 0;
    if (list_pieces(e, s, true, err) < 0)
        return -1;
    s->dev.early = c->n;
    s->dev.early_blocks = c->nblock;
    c->nblock = 0;
    return list_pieces(e, s, false, err);
}

static int upload_list(struct ckpt_engine *e, const struct ckpt_copy_list *l, struct ckpt_err *err)
{
    const struct ckpt_copies *c = &l->copies;

    return c->n ? e->device->ops->upload(e->device, l->list, c->ptr, c->n * sizeof *c->ptr, err)
                : 0;
}

/* ---- pieces that only this rank wants ---- */

static int queue_alone(struct ckpt_engine *e, struct ckpt_read_slot *s, struct ckpt_err *err)
{
    struct ckpt_device *d = e->device;
    struct ckpt_copies *c = &s->dev.list.copies;

    s->dev.queued = true;
    s->dev.own.len = 0;
    c->n = c->nblock = 0;
    if (list_piece(e, &e->plan->pieces.ptr[e->plan->own.ptr[s->own]], s->dev.buf, c, &s->dev.own,
                   err) < 0 ||
        upload_list(e, &s->dev.list, err) < 0 || d->ops->fence(d, err) < 0)
        return -1;
    if (c->n && d->ops->copy(d, s->dev.list.list, c->n, c->nblock, err) < 0)
        return -1;
    return d->ops->mark(d, read_mark(e, s), err);
}

static void land(struct ckpt_engine *e, const ckpt_parts *own)
{
    for (size_t i = 0; i < own->len; i++)
        ckpt_engine_land(e, own->ptr[i].entry, own->ptr[i].bytes);
}

static void finish_read(struct ckpt_engine *e, struct ckpt_read_slot *s)
{
    (void)pthread_mutex_lock(&e->lock);
    s->dev.queued = false;
    s->unsent = 0;
    ckpt_read_settle(e, s);
    (void)pthread_mutex_unlock(&e->lock);
}

/* ---- windows, one after the other ---- */

/* Queue the copies of received pieces: the last work of a window. */
static int queue_late(struct ckpt_engine *e, struct ckpt_window_slot *s, struct ckpt_err *err)
{
    const struct ckpt_copies *c = &s->dev.list.copies;

    if (c->n > s->dev.early && e->device->ops->copy(e->device, s->dev.list.list + s->dev.early,
                                                    c->n - s->dev.early, c->nblock, err) < 0)
        return -1;
    s->dev.phase = CKPT_DEVICE_PLACING;
    return e->device->ops->mark(e->device, window_mark(e, s), err);
}

/* The exchange is queued: queue what follows, which is the download of received pieces if they are
 * verified, else their copies. */
static int after_exchange(struct ckpt_engine *e, struct ckpt_window_slot *s, struct ckpt_err *err)
{
    if (e->device->ops->follow(e->device, err) < 0)
        return -1;
    if (!e->opt.mode.verify || s->nin == 0)
        return queue_late(e, s, err);
    s->dev.phase = CKPT_DEVICE_FETCHING;
    if (e->device->ops->download(e->device, s->receive, s->dev.receive, e->sizes.receive, err) < 0)
        return -1;
    return e->device->ops->mark(e->device, window_mark(e, s), err);
}

/* Find this rank's own piece of a window; false: it has none. */
static bool reads_for(const struct ckpt_engine *e, const struct ckpt_window *w, uint32_t *ret)
{
    for (*ret = w->lo; *ret < w->hi; ++*ret)
        if (e->plan->pieces.ptr[*ret].reader == e->plan->groups.ptr[w->group].self)
            return true;
    return false;
}

/* With verify: hash this rank's own piece on the host, and queue the upload of the hash. */
static int sign(struct ckpt_engine *e, struct ckpt_window_slot *s, struct ckpt_err *err)
{
    uint32_t piece;

    if (!e->opt.mode.verify || !reads_for(e, &e->plan->windows.ptr[s->window], &piece))
        return 0;
    struct ckpt_read_slot *own = find_own(e, piece);
    const size_t len = e->plan->pieces.ptr[piece].len;
    ckpt_piece_sign(own->buf, len);
    return e->device->ops->upload(e->device, own->dev.buf + len, own->buf + len, CKPT_MESSAGE_HASH,
                                  err);
}

static int queue_window(struct ckpt_engine *e, struct ckpt_window_slot *s, struct ckpt_err *err)
{
    struct ckpt_device *d = e->device;

    if (list_window(e, s, err) < 0 || upload_list(e, &s->dev.list, err) < 0 ||
        sign(e, s, err) < 0 || d->ops->fence(d, err) < 0)
        return -1;
    if (s->dev.early &&
        d->ops->copy(d, s->dev.list.list, s->dev.early, s->dev.early_blocks, err) < 0)
        return -1;
    s->dev.phase = CKPT_DEVICE_EXCHANGE;
    int rc = d->ops->exchange(d, s->dev.exchange.ptr, s->dev.exchange.len, err);
    return rc == 0 ? after_exchange(e, s, err) : rc < 0 ? -1 : 0;
}

static int check_received(const struct ckpt_engine *e, const struct ckpt_window_slot *s,
                          struct ckpt_err *err)
{
    for (size_t i = 0; i < s->nin; i++)
        if (ckpt_message_check(e, &s->in[i],
                               s->receive + ((unsigned char *)s->in[i].xfer.buf - s->dev.receive),
                               err) < 0)
            return -1;
    return 0;
}

static void count_exchange(struct ckpt_engine *e, const struct ckpt_window_slot *s)
{
    const uint32_t self =
        e->plan->groups.ptr[e->plan->windows.ptr[s->window].group].self; /* place in the group */

    for (size_t i = 0; i < s->dev.exchange.len; i++) {
        const struct ckpt_exchange *x = &s->dev.exchange.ptr[i];
        if (x->kind == CKPT_SEND)
            atomic_fetch_add(&e->stats.sent, x->len);
        else if (x->kind == CKPT_BROADCAST && x->peer == (x->family ? self : e->self))
            atomic_fetch_add(&e->stats.sent, x->len * (x->n - 1));
        else
            atomic_fetch_add(&e->stats.received, x->len);
    }
}

/* The work of a window is done: report the wants that have arrived, and free its slots. */
static void finish_window(struct ckpt_engine *e, struct ckpt_window_slot *s)
{
    uint32_t piece;

    land(e, &s->dev.own);
    count_exchange(e, s);
    if (reads_for(e, &e->plan->windows.ptr[s->window], &piece))
        finish_read(e, find_own(e, piece));
    (void)pthread_mutex_lock(&e->lock);
    s->dev.phase = CKPT_DEVICE_WAITING;
    s->left = 0;
    ckpt_window_settle(e, s);
    (void)pthread_mutex_unlock(&e->lock);
}

/* The window whose exchange is only partly queued: nothing else may be queued. NULL: none. */
static struct ckpt_window_slot *exchanging(const struct ckpt_engine *e)
{
    struct ckpt_window_slot *s =
        e->next_issue ? &e->slot[(e->next_issue - 1) % e->opt.slots] : NULL;

    return s && s->dev.phase == CKPT_DEVICE_EXCHANGE ? s : NULL;
}

/* Go on with a window whose work is queued, if the device has reached its mark. */
static int look_after(struct ckpt_engine *e, struct ckpt_window_slot *s, bool *moved,
                      struct ckpt_err *err)
{
    if (s->dev.phase != CKPT_DEVICE_PLACING &&
        (s->dev.phase != CKPT_DEVICE_FETCHING || exchanging(e)))
        return 0;
    int rc = e->device->ops->reached(e->device, window_mark(e, s), err);
    if (rc != 0)
        return rc < 0 ? -1 : 0;
    *moved = true;
    if (s->dev.phase == CKPT_DEVICE_FETCHING)
        return check_received(e, s, err) < 0 ? -1 : queue_late(e, s, err);
    finish_window(e, s);
    return 0;
}

/* True if the next window's own piece is there and nothing else is being queued. */
static bool may_queue(struct ckpt_engine *e, struct ckpt_window_slot *s)
{
    uint32_t piece;

    if (exchanging(e) || e->next_issue >= e->next_window)
        return false;
    if (!reads_for(e, &e->plan->windows.ptr[s->window], &piece))
        return true;
    const struct ckpt_read_slot *own = find_own(e, piece);
    return own && is_uploaded(e, own);
}

/* Go on queueing an exchange, which may take several turns. */
static int go_on_exchanging(struct ckpt_engine *e, bool *moved, struct ckpt_err *err)
{
    struct ckpt_window_slot *s = exchanging(e);

    if (!s)
        return 0;
    int rc = e->device->ops->exchanged(e->device, err);
    if (rc != 0)
        return rc < 0 ? -1 : 0;
    *moved = true;
    return after_exchange(e, s, err);
}

static int turn_reads(struct ckpt_engine *e, bool *moved, struct ckpt_err *err)
{
    for (uint32_t i = 0; i < e->opt.ahead; i++) {
        struct ckpt_read_slot *s = &e->read[i];
        if (upload_ready(e, s, moved, err) < 0)
            return -1;
        if (s->dev.queued) {
            int rc = e->device->ops->reached(e->device, read_mark(e, s), err);
            if (rc < 0)
                return -1;
            if (rc != 0)
                continue;
            *moved = true;
            land(e, &s->dev.own);
            finish_read(e, s);
        } else if (!exchanging(e) && is_uploaded(e, s) && s->alone) {
            *moved = true;
            if (queue_alone(e, s, err) < 0)
                return -1;
        }
    }
    return 0;
}

int ckpt_device_turn(struct ckpt_engine *e, bool *ret_moved, struct ckpt_err *err)
{
    if (turn_reads(e, ret_moved, err) < 0 || go_on_exchanging(e, ret_moved, err) < 0)
        return -1;
    while (e->next_issue < e->plan->windows.len) {
        struct ckpt_window_slot *s = &e->slot[e->next_issue % e->opt.slots];
        if (!may_queue(e, s))
            break;
        *ret_moved = true;
        e->next_issue++;
        if (queue_window(e, s, err) < 0)
            return -1;
    }
    for (uint32_t i = 0; i < e->opt.slots; i++)
        if (look_after(e, &e->slot[i], ret_moved, err) < 0)
            return -1;
    return 0;
}

bool ckpt_device_busy(const struct ckpt_engine *e)
{
    for (uint32_t i = 0; i < e->opt.slots; i++)
        if (e->slot[i].dev.phase != CKPT_DEVICE_WAITING)
            return true;
    for (uint32_t i = 0; i < e->opt.ahead; i++)
        if (e->read[i].dev.queued)
            return true;
    return false;
}
