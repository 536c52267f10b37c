/* SPDX-License-Identifier: Apache-2.0 */
/* The pump's part of a load into device memory. Workers read chunks into pinned memory. When this
 * rank's slice of a window is there, the whole work of the window is queued at once: upload the
 * slice, exchange, place what this rank wants of all slices. What no other rank wants is a window
 * without an exchange. The pump never waits for the device; it polls the marks that it has queued.
 */
#include "device/device.h"

#include <stdlib.h>
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

/* ---- pinned memory of all slots ---- */

static uint64_t list_bytes(uint64_t n)
{
    return ckpt_whole_pages(n * sizeof(struct ckpt_device_copy));
}

/* Pinned bytes of a read slot, with room to shift the chunk (ckpt_read_slot.dev.pinned). */
static uint64_t read_bytes(const struct ckpt_engine *e)
{
    return e->sizes.read ? ckpt_whole_pages(e->sizes.read) + CKPT_DEVICE_PAGE : 0;
}

static int pin_memory(struct ckpt_engine *e, struct ckpt_err *err)
{
    const uint64_t len =
        e->opt.ahead * read_bytes(e) +
        e->opt.slots * (ckpt_whole_pages(e->sizes.fetch) + list_bytes(e->sizes.copies));

    if (len && e->device->ops->pin(e->device, len, &e->memory, err) < 0)
        return -1;
    e->stats.kept = len;
    return 0;
}

/* Cut the next `len` bytes off the pinned memory, rounded up to pages; NULL for 0 bytes. */
static void *cut(unsigned char **at, uint64_t len)
{
    void *p = len ? *at : NULL;

    *at += ckpt_whole_pages(len);
    return p;
}

int ckpt_device_slots_init(struct ckpt_engine *e, struct ckpt_err *err)
{
    struct ckpt_device *d = e->device;
    const uint64_t n = e->sizes.copies, bytes = n * sizeof(struct ckpt_device_copy);
    int rc = pin_memory(e, err);
    unsigned char *at = e->memory;

    if (rc == 0 && n > UINT32_MAX)
        return ckpt_fail(err, CKPT_LIMIT, "a chunk or window needs more than 2^32 copies");
    for (uint32_t i = 0; i < e->opt.ahead && rc == 0; i++)
        e->read[i].buf = e->read[i].pinned = cut(&at, read_bytes(e));
    for (uint32_t i = 0; i < e->opt.slots && rc == 0; i++) {
        struct ckpt_window_slot *s = &e->slot[i];
        s->receive = cut(&at, e->sizes.fetch);
        s->dev.copies = (struct ckpt_copies){.ptr = cut(&at, bytes), .cap = (uint32_t)n};
        rc = take(d, e->sizes.receive, &s->dev.receive, err);
        if (rc == 0)
            rc = take(d, bytes, &s->dev.list, err);
    }
    /* the caller's stream may still use the memory that was allocated */
    return rc == 0 ? d->ops->begin(d, err) : rc;
}

void ckpt_device_slots_release(struct ckpt_engine *e)
{
    struct ckpt_device *d = e->device;

    for (uint32_t i = 0; e->slot && i < e->opt.slots; i++) {
        struct ckpt_window_slot *s = &e->slot[i];
        if (s->dev.receive)
            d->ops->dealloc(d, s->dev.receive);
        if (s->dev.list)
            d->ops->dealloc(d, s->dev.list);
        ckpt_vec_release(&s->dev.exchange);
        ckpt_vec_release(&s->dev.own);
    }
    if (e->memory)
        (void)d->ops->unpin(d, e->memory);
}

/* A slot's mark in the device's queue. */
static uint32_t mark_of(const struct ckpt_engine *e, const struct ckpt_window_slot *s)
{
    return (uint32_t)(s - e->slot);
}

/* ---- lists of copies and exchanges ---- */

/* Listing the copies of a slice, which begins at byte `lo` of the stream, at `data`. */
struct listing {
    struct ckpt_engine *e;
    struct ckpt_window_slot *slot;
    const unsigned char *data;
    uint64_t lo;
    bool hosts; /* some of it goes to host memory */
    struct ckpt_err *err;
};

static int list_box(void *ctx, uint32_t unit, const struct ckpt_box *box, uint64_t at)
{
    struct listing *l = ctx;
    struct ckpt_engine *e = l->e;
    ckpt_overlaps *own = &l->slot->dev.own;
    size_t kept = own->len, i = kept;

    if (ckpt_plan_wanted(e->plan, unit, box, own, l->err) < 0)
        return -1;
    for (; i < own->len; i++) {
        const struct ckpt_target *t = &e->target[own->ptr[i].entry];
        l->hosts |= t->host;
        if (t->host)
            continue;
        own->ptr[kept] = own->ptr[i];
        if (ckpt_copies_place(&l->slot->dev.copies, t, &own->ptr[kept++].box,
                              l->data + (at - l->lo), box,
                              ckpt_plan_unit_tensor(e->plan, unit)->dtype, l->err) < 0)
            return -1;
    }
    own->len = kept;
    return 0;
}

/* List the copies that place what this rank wants of a member's slice. What goes to host memory is
 * a message for the workers: this rank's slice from where it was read, others' once downloaded. */
static int list_slice(struct listing *l, const struct ckpt_window *w, uint32_t member)
{
    const struct ckpt_plan *p = l->e->plan;
    struct ckpt_window_slot *s = l->slot;
    uint64_t hi;
    size_t len;

    l->hosts = false;
    ckpt_plan_slice(p, w, member, &l->lo, &hi);
    l->data = l->slot->dev.receive + ckpt_window_offset(l->e, w, member);
    for (uint32_t u = ckpt_plan_unit_at(p, w->group, l->lo);
         u < p->stream[w->group].hi && p->units.ptr[u].at < hi; u++)
        if (ckpt_plan_boxes(p, u, l->lo, hi, list_box, l) < 0)
            return -1;
    if (!l->hosts)
        return 0;
    s->in[s->nin] = (struct ckpt_message){.slot = s, .member = member};
    s->in[s->nin++].xfer.buf = member == p->groups.ptr[w->group].self
                                   ? ckpt_window_own(l->e, s, &len)
                                   : s->receive + ckpt_window_offset(l->e, w, member);
    return 0;
}

static int add_exchange(struct ckpt_window_slot *s, const struct ckpt_exchange *x,
                        struct ckpt_err *err)
{
    return ckpt_vec_push(&s->dev.exchange, *x) < 0 ? ckpt_nomem(err) : 0;
}

/* Add the exchanges of a step: an all-gather of `len` bytes of each rank, in place; or, without a
 * communicator, a send and a receive for each other rank. */
static int list_step(struct ckpt_window_slot *s, const struct ckpt_collective *c, uint32_t step,
                     unsigned char *buf, size_t len, struct ckpt_err *err)
{
    struct ckpt_exchange x = {.kind = CKPT_GATHER,
                              .step = step,
                              .division = c->division,
                              .peer = c->self,
                              .n = c->n,
                              .buf = buf,
                              .len = len};

    if (c->division != CKPT_DIVISION_NONE)
        return add_exchange(s, &x, err);
    x.division = CKPT_DIVISION_ALL;
    for (uint32_t i = 0; i < c->n; i++) {
        if (i == c->self)
            continue;
        x.peer = c->rank[i];
        x.kind = CKPT_SEND;
        x.buf = buf + c->self * len;
        if (add_exchange(s, &x, err) < 0)
            return -1;
        x.kind = CKPT_RECEIVE;
        x.buf = buf + i * len;
        if (add_exchange(s, &x, err) < 0)
            return -1;
    }
    return 0;
}

/* The bytes of a member's slice that are exchanged: its hash follows it. */
static size_t exchanged_bytes(const struct ckpt_engine *e, const struct ckpt_window *w,
                              uint32_t member)
{
    uint64_t lo, hi;

    ckpt_plan_slice(e->plan, w, member, &lo, &hi);
    return hi == lo ? 0 : (size_t)(hi - lo) + (e->opt.mode.verify ? CKPT_MESSAGE_HASH : 0);
}

/* Add the exchanges of a window in which members have slices of different lengths: a send of this
 * rank's and a receive of the other's for each other member, unless the slice is empty. */
static int list_pairs(struct ckpt_engine *e, struct ckpt_window_slot *s, struct ckpt_err *err)
{
    const struct ckpt_window *w = ckpt_window_of(e, s);
    const struct ckpt_group *g = &e->plan->groups.ptr[w->group];
    const size_t own = exchanged_bytes(e, w, g->self);
    struct ckpt_exchange x = {.division = CKPT_DIVISION_ALL, .n = g->n};

    for (uint32_t i = 0; i < g->n; i++) {
        const size_t len = exchanged_bytes(e, w, i);
        if (i == g->self)
            continue;
        x.peer = g->rank[i];
        x.kind = CKPT_SEND;
        x.buf = s->dev.receive + ckpt_window_offset(e, w, g->self);
        x.len = own;
        if (own && add_exchange(s, &x, err) < 0)
            return -1;
        x.kind = CKPT_RECEIVE;
        x.buf = s->dev.receive + ckpt_window_offset(e, w, i);
        x.len = len;
        if (len && add_exchange(s, &x, err) < 0)
            return -1;
    }
    return 0;
}

static int list_exchange(struct ckpt_engine *e, struct ckpt_window_slot *s, struct ckpt_err *err)
{
    const struct ckpt_stream *t = &e->plan->stream[ckpt_window_of(e, s)->group];

    if (t->pairs)
        return list_pairs(e, s, err);
    for (uint32_t k = 0; k < t->nstep; k++) {
        size_t len;
        unsigned char *buf = s->dev.receive + ckpt_step_buffer(t, &e->opt.mode, k, &len);
        if (list_step(s, &t->step[k], k, buf, len, err) < 0)
            return -1;
    }
    return 0;
}

static int list_window(struct ckpt_engine *e, struct ckpt_window_slot *s, struct ckpt_err *err)
{
    const struct ckpt_window *w = ckpt_window_of(e, s);
    const uint32_t n = e->plan->groups.ptr[w->group].n;
    struct listing l = {.e = e, .slot = s, .err = err};

    s->dev.copies.n = s->dev.copies.nblock = 0;
    s->dev.own.len = s->dev.exchange.len = s->nin = 0;
    free(s->in);
    s->in = e->opt.mode.hosts ? calloc(n, sizeof *s->in) : NULL;
    if (e->opt.mode.hosts && !s->in)
        return ckpt_nomem(err);
    for (uint32_t i = 0; i < n; i++)
        if (list_slice(&l, w, i) < 0)
            return -1;
    return list_exchange(e, s, err);
}

/* ---- windows, one after the other ---- */

/* Queue the copies: the last work of a window. Workers place what goes to host memory. */
static int queue_copies(struct ckpt_engine *e, struct ckpt_window_slot *s, struct ckpt_err *err)
{
    const struct ckpt_copies *c = &s->dev.copies;

    (void)pthread_mutex_lock(&e->lock);
    s->left += (uint32_t)s->nin;
    for (size_t i = 0; i < s->nin; i++)
        ckpt_message_hand(e, &s->in[i]);
    (void)pthread_mutex_unlock(&e->lock);
    if (c->n && e->device->ops->copy(e->device, s->dev.list, c->n, c->nblock, err) < 0)
        return -1;
    s->dev.phase = CKPT_DEVICE_PLACING;
    return e->device->ops->mark(e->device, mark_of(e, s), err);
}

/* The exchange is queued: queue what follows, which is the download of the slices if they are
 * verified or placed on the host, else their copies. */
static int after_exchange(struct ckpt_engine *e, struct ckpt_window_slot *s, struct ckpt_err *err)
{
    const uint32_t group = ckpt_window_of(e, s)->group;
    const struct ckpt_stream *t = &e->plan->stream[group];

    if (e->device->ops->follow(e->device, err) < 0)
        return -1;
    if ((!e->opt.mode.verify && s->nin == 0) || t->nstep == 0)
        return queue_copies(e, s, err);
    s->dev.phase = CKPT_DEVICE_FETCHING;
    if (e->device->ops->download(e->device, s->receive, s->dev.receive,
                                 ckpt_slice_stride(t, &e->opt.mode) * e->plan->groups.ptr[group].n,
                                 err) < 0)
        return -1;
    return e->device->ops->mark(e->device, mark_of(e, s), err);
}

/* Queue the upload of this rank's slice, and of its hash. */
static int upload_own(struct ckpt_engine *e, struct ckpt_window_slot *s, struct ckpt_err *err)
{
    const struct ckpt_window *w = ckpt_window_of(e, s);
    size_t len;
    const unsigned char *data = ckpt_window_own(e, s, &len);

    if (!data)
        return 0;
    if (e->opt.mode.verify && e->plan->stream[w->group].nstep)
        len += CKPT_MESSAGE_HASH;
    return e->device->ops->upload(
        e->device, s->dev.receive + ckpt_window_offset(e, w, e->plan->groups.ptr[w->group].self),
        data, len, err);
}

static int queue_window(struct ckpt_engine *e, struct ckpt_window_slot *s, struct ckpt_err *err)
{
    const struct ckpt_copies *c = &s->dev.copies;
    struct ckpt_device *d = e->device;

    if (list_window(e, s, err) < 0 ||
        (c->n && d->ops->upload(d, s->dev.list, c->ptr, c->n * sizeof *c->ptr, err) < 0) ||
        upload_own(e, s, err) < 0 || d->ops->fence(d, err) < 0)
        return -1;
    s->dev.phase = CKPT_DEVICE_EXCHANGE;
    int rc = s->dev.exchange.len
                 ? d->ops->exchange(d, s->dev.exchange.ptr, s->dev.exchange.len, err)
                 : 0;
    return rc == 0 ? after_exchange(e, s, err) : rc < 0 ? -1 : 0;
}

static int check_received(const struct ckpt_engine *e, const struct ckpt_window_slot *s,
                          struct ckpt_err *err)
{
    const struct ckpt_window *w = ckpt_window_of(e, s);
    const struct ckpt_group *g = &e->plan->groups.ptr[w->group];

    for (uint32_t i = 0; i < g->n; i++)
        if (i != g->self &&
            ckpt_slice_check(e, s, i, s->receive + ckpt_window_offset(e, w, i), err) < 0)
            return -1;
    return 0;
}

static void count_exchange(struct ckpt_engine *e, const struct ckpt_window_slot *s)
{
    uint64_t received = 0;

    for (size_t i = 0; i < s->dev.exchange.len; i++) {
        const struct ckpt_exchange *x = &s->dev.exchange.ptr[i];
        const uint64_t bytes = x->kind == CKPT_GATHER ? x->len * (x->n - 1) : x->len;
        if (x->kind != CKPT_RECEIVE)
            atomic_fetch_add(&e->stats.sent, bytes);
        if (x->kind != CKPT_SEND)
            received += bytes;
    }
    atomic_fetch_add(&e->stats.received, received);
    ckpt_window_rate(e, s, received);
}

/* The work of a window is done: report the wants that have arrived, and free its slots. */
static void finish_window(struct ckpt_engine *e, struct ckpt_window_slot *s)
{
    for (size_t i = 0; i < s->dev.own.len; i++)
        ckpt_engine_land(e, s->dev.own.ptr[i].entry, s->dev.own.ptr[i].bytes);
    count_exchange(e, s);
    (void)pthread_mutex_lock(&e->lock);
    s->dev.phase = CKPT_DEVICE_WAITING;
    s->left--;
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
    int rc = e->device->ops->reached(e->device, mark_of(e, s), err);
    if (rc != 0)
        return rc < 0 ? -1 : 0;
    *moved = true;
    if (s->dev.phase == CKPT_DEVICE_FETCHING)
        return e->opt.mode.verify && check_received(e, s, err) < 0 ? -1 : queue_copies(e, s, err);
    finish_window(e, s);
    return 0;
}

/* True if this rank's slice of the next window is there and nothing else is being queued. */
static bool may_queue(struct ckpt_engine *e, struct ckpt_window_slot *s)
{
    size_t len;

    if (exchanging(e) || e->next_issue >= e->next_window)
        return false;
    return ckpt_window_own(e, s, &len) || len == 0;
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

int ckpt_device_turn(struct ckpt_engine *e, bool *ret_moved, struct ckpt_err *err)
{
    if (go_on_exchanging(e, ret_moved, err) < 0)
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
    return false;
}
