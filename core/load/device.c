/* SPDX-License-Identifier: Apache-2.0 */
/* The pump's part of a load into a device's memory. Workers read units into pinned memory; they are
 * uploaded as they come. When a window is there, its work is queued at once: gather what is sent,
 * place what is ours, exchange, place what arrived. Nothing is waited for but by looking. */
#include "load/device.h"

#include <stdlib.h>
#include <string.h>

#include "base/ckd.h"
#include "base/err.h"
#include "load/inner.h"

/* ---- slots ---- */

static uint64_t list_bytes(const struct ckpt_engine *e)
{
    return e->sizes.copies * sizeof(struct ckpt_device_copy);
}

/* Nothing for no bytes. */
static int take(struct ckpt_device *d,
                int (*alloc)(struct ckpt_device *d, size_t len, void **ret, struct ckpt_err *err),
                uint64_t len, unsigned char **ret, struct ckpt_err *err)
{
    void *p = NULL;

    if (len && alloc(d, len, &p, err) < 0)
        return -1;
    *ret = p;
    return 0;
}

int ckpt_device_slot_init(struct ckpt_engine *e, struct ckpt_slot *s, struct ckpt_err *err)
{
    struct ckpt_device *d = e->device;
    const struct ckpt_device_ops *ops = d->ops;
    const bool verify = e->opt.mode.verify;
    unsigned char *pinned = NULL, *list = NULL;

    if (e->sizes.copies > UINT32_MAX)
        return ckpt_fail(err, CKPT_LIMIT, "a window of too many copies");
    int rc = take(d, ops->pin, e->sizes.read, &s->read, err);
    if (rc == 0)
        rc = take(d, ops->pin, verify ? e->sizes.stage : 0, &s->stage, err);
    if (rc == 0)
        rc = take(d, ops->pin, verify ? e->sizes.receive : 0, &s->receive, err);
    if (rc == 0)
        rc = take(d, ops->pin, list_bytes(e), &pinned, err);
    s->dev.copies = (struct ckpt_copies){.ptr = (void *)pinned, .cap = (uint32_t)e->sizes.copies};
    if (rc == 0)
        rc = take(d, ops->alloc, e->sizes.read, &s->dev.read, err);
    if (rc == 0)
        rc = take(d, ops->alloc, e->sizes.stage, &s->dev.stage, err);
    if (rc == 0)
        rc = take(d, ops->alloc, e->sizes.receive, &s->dev.receive, err);
    if (rc == 0)
        rc = take(d, ops->alloc, list_bytes(e), &list, err);
    s->dev.list = (void *)list;
    return rc;
}

void ckpt_device_slot_release(struct ckpt_engine *e, struct ckpt_slot *s)
{
    struct ckpt_device *d = e->device;
    void *pinned[] = {s->read, s->stage, s->receive, s->dev.copies.ptr};
    void *device[] = {s->dev.read, s->dev.stage, s->dev.receive, s->dev.list};

    for (size_t i = 0; i < sizeof pinned / sizeof *pinned; i++)
        if (pinned[i])
            d->ops->unpin(d, pinned[i]);
    for (size_t i = 0; i < sizeof device / sizeof *device; i++)
        if (device[i])
            d->ops->dealloc(d, device[i]);
    ckpt_vec_release(&s->dev.ready);
    ckpt_vec_release(&s->dev.exchange);
    ckpt_vec_release(&s->dev.own);
}

/* ---- uploads ---- */

static uint32_t number_of(const struct ckpt_engine *e, const struct ckpt_slot *s)
{
    return (uint32_t)(s - e->slot);
}

static int upload_ready(struct ckpt_engine *e, struct ckpt_slot *s, bool *moved,
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
        if (e->device->ops->upload(e->device, s->dev.read + lo, s->read + lo, hi - lo, err) < 0)
            return -1;
        *moved = true;
    }
}

/* ---- lists ---- */

static const unsigned char *unit_at(const struct ckpt_slot *s, uint32_t unit)
{
    return s->dev.read + s->unit_off[unit - s->lo];
}

/* Place what this rank wants of a unit that lies at `data` in the device. */
static int list_unit(struct ckpt_engine *e, struct ckpt_slot *s, uint32_t unit,
                     const unsigned char *data, struct ckpt_err *err)
{
    const size_t first = s->dev.own.len;
    struct ckpt_box box;

    ckpt_plan_unit_box(e->plan, unit, &box);
    if (ckpt_plan_wanted(e->plan, e->self, unit, &box, &s->dev.own, err) < 0)
        return -1;
    for (size_t i = first; i < s->dev.own.len; i++) {
        const struct ckpt_part *part = &s->dev.own.ptr[i];
        if (ckpt_copies_place(&s->dev.copies, &e->target[part->entry], &part->box, data, &box,
                              ckpt_plan_unit_tensor(e->plan, unit)->dtype, err) < 0)
            return -1;
    }
    return 0;
}

/* Place what the messages brought. */
static int list_received(struct ckpt_engine *e, struct ckpt_slot *s, struct ckpt_err *err)
{
    for (size_t k = 0; k < s->nin; k++) {
        const struct ckpt_message *m = &s->in[k];
        const unsigned char *at = m->xfer.buf;
        for (uint32_t i = 0; i < m->n; i++) {
            const struct ckpt_part *part = &s->parts[m->first + i];
            if (m->is_pack && ckpt_part_alone(&e->opt.mode, part))
                continue;
            if (ckpt_copies_place(&s->dev.copies, &e->target[part->entry], &part->box, at,
                                  &part->box, ckpt_plan_unit_tensor(e->plan, part->unit)->dtype,
                                  err) < 0)
                return -1;
            at += ckpt_part_room(&e->opt.mode, part->bytes);
        }
    }
    return 0;
}

static int add_exchange(struct ckpt_slot *s, int kind, uint32_t peer, void *buf, size_t len,
                        struct ckpt_err *err)
{
    struct ckpt_exchange x = {.peer = peer, .buf = buf, .len = len};

    x.kind = kind;
    return ckpt_vec_push(&s->dev.exchange, x) < 0 ? ckpt_nomem(err) : 0;
}

/* Runs of units that all want whole: the same list on every rank. `at`: where in `receive` those of
 * others go. What comes from others is placed after the exchange. */
static int list_common(struct ckpt_engine *e, struct ckpt_slot *s, unsigned char *at,
                       struct ckpt_err *err)
{
    const struct ckpt_plan *p = e->plan;

    for (uint32_t o = 0; o < p->nowner && p->common; o++) {
        uint32_t lo, hi, a, b;
        ckpt_plan_piece(p, o, s->window, &lo, &hi);
        for (; ckpt_plan_common_run(p, lo, hi, &a, &b); lo = b) {
            const uint64_t len = ckpt_units_bytes(p, a, b, NULL);
            const bool own = o == e->owner;
            unsigned char *buf = own ? s->dev.read + s->unit_off[a - s->lo] : at;
            if (add_exchange(s, CKPT_BROADCAST, p->owner[o], buf, len, err) < 0)
                return -1;
            if (own)
                continue;
            for (uint32_t u = a; u < b; u++) {
                if (list_unit(e, s, u, at, err) < 0)
                    return -1;
                at += ckpt_units_bytes(p, u, u + 1, NULL);
            }
        }
    }
    return 0;
}

static unsigned char *on_device(const struct ckpt_slot *s, unsigned char *staged, bool verify)
{
    return verify ? s->dev.stage + (staged - s->stage) : staged;
}

static int list_exchange(struct ckpt_engine *e, struct ckpt_slot *s, struct ckpt_err *err)
{
    const bool verify = e->opt.mode.verify;

    for (size_t i = 0; i < s->nout; i++) {
        const struct ckpt_xfer *t = &s->out[i].xfer;
        if (add_exchange(s, CKPT_SEND, t->peer, on_device(s, t->buf, verify), t->len, err) < 0)
            return -1;
    }
    for (size_t i = 0; i < s->nin; i++) {
        const struct ckpt_xfer *t = &s->in[i].xfer;
        if (add_exchange(s, CKPT_RECEIVE, t->peer, t->buf, t->len, err) < 0)
            return -1;
    }
    return 0;
}

/* All that the window asks for: copies before the exchange, the exchange, copies after it. */
static int list_window(struct ckpt_engine *e, struct ckpt_slot *s, struct ckpt_err *err)
{
    struct ckpt_copies *c = &s->dev.copies;

    c->n = c->nblock = 0;
    s->dev.own.len = s->dev.exchange.len = 0;
    if (ckpt_slot_receives(e, s, err) < 0 || ckpt_slot_sends(e, s, err) < 0)
        return -1;
    for (uint32_t u = s->lo; u < s->hi; u++)
        if (list_unit(e, s, u, unit_at(s, u), err) < 0)
            return -1;
    s->dev.early = c->n;
    s->dev.early_blocks = c->nblock;
    c->nblock = 0;
    if (list_exchange(e, s, err) < 0 || list_common(e, s, s->dev.receive + s->expected, err) < 0)
        return -1;
    return list_received(e, s, err);
}

/* ---- one window after the other ---- */

static int queue_late(struct ckpt_engine *e, struct ckpt_slot *s, struct ckpt_err *err)
{
    const struct ckpt_copies *c = &s->dev.copies;

    if (c->n > s->dev.early && e->device->ops->copy(e->device, s->dev.list + s->dev.early,
                                                    c->n - s->dev.early, c->nblock, err) < 0)
        return -1;
    s->dev.phase = CKPT_DEVICE_PLACING;
    return e->device->ops->mark(e->device, number_of(e, s), err);
}

/* The exchange is queued, too. */
static int after_exchange(struct ckpt_engine *e, struct ckpt_slot *s, struct ckpt_err *err)
{
    if (!e->opt.mode.verify || s->expected == 0)
        return queue_late(e, s, err);
    s->dev.phase = CKPT_DEVICE_FETCHING;
    if (e->device->ops->download(e->device, s->receive, s->dev.receive, s->expected, err) < 0)
        return -1;
    return e->device->ops->mark(e->device, number_of(e, s), err);
}

static int queue_window(struct ckpt_engine *e, struct ckpt_slot *s, struct ckpt_err *err)
{
    struct ckpt_device *d = e->device;
    const struct ckpt_copies *c = &s->dev.copies;

    if (list_window(e, s, err) < 0)
        return -1;
    if (c->n && d->ops->upload(d, s->dev.list, c->ptr, c->n * sizeof *c->ptr, err) < 0)
        return -1;
    if (e->opt.mode.verify && s->staged &&
        d->ops->upload(d, s->dev.stage, s->stage, s->staged, err) < 0)
        return -1;
    if (d->ops->fence(d, err) < 0)
        return -1;
    if (s->dev.early && d->ops->copy(d, s->dev.list, s->dev.early, s->dev.early_blocks, err) < 0)
        return -1;
    if (s->dev.exchange.len == 0)
        return after_exchange(e, s, err);
    s->dev.phase = CKPT_DEVICE_EXCHANGE;
    int rc = d->ops->exchange(d, s->dev.exchange.ptr, s->dev.exchange.len, err);
    return rc == 0 ? after_exchange(e, s, err) : rc < 0 ? -1 : 0;
}

static int check_received(const struct ckpt_slot *s, struct ckpt_err *err)
{
    for (size_t i = 0; i < s->nin; i++)
        if (ckpt_message_check(&s->in[i],
                               s->receive + ((unsigned char *)s->in[i].xfer.buf - s->dev.receive),
                               err) < 0)
            return -1;
    return 0;
}

/* Its work is done: wants land, and the slot is free. */
static void finish_window(struct ckpt_engine *e, struct ckpt_slot *s)
{
    for (size_t i = 0; i < s->dev.own.len; i++)
        ckpt_engine_land(e, s->dev.own.ptr[i].entry, s->dev.own.ptr[i].bytes);
    for (size_t i = 0; i < s->nparts; i++)
        ckpt_engine_land(e, s->parts[i].entry, s->parts[i].bytes);
    for (size_t i = 0; i < s->dev.exchange.len; i++) {
        const struct ckpt_exchange *x = &s->dev.exchange.ptr[i];
        if (x->kind == CKPT_SEND)
            atomic_fetch_add(&e->stats.sent, x->len);
        else if (x->kind == CKPT_BROADCAST && x->peer == e->self)
            atomic_fetch_add(&e->stats.sent, x->len * (e->size - 1));
        else
            atomic_fetch_add(&e->stats.received, x->len);
    }
    (void)pthread_mutex_lock(&e->lock);
    s->dev.phase = CKPT_DEVICE_READING;
    s->sends_posted = true;
    ckpt_slot_settle(e, s);
    (void)pthread_mutex_unlock(&e->lock);
}

/* The window whose exchange is not queued whole yet, NULL: nothing may be queued behind it. */
static struct ckpt_slot *exchanging(const struct ckpt_engine *e)
{
    struct ckpt_slot *s = e->next_send ? &e->slot[(e->next_send - 1) % e->opt.slots] : NULL;

    return s && s->dev.phase == CKPT_DEVICE_EXCHANGE ? s : NULL;
}

/* A window whose work is queued: has it come to its mark? */
static int look_after(struct ckpt_engine *e, struct ckpt_slot *s, bool *moved, struct ckpt_err *err)
{
    if (s->dev.phase != CKPT_DEVICE_PLACING &&
        (s->dev.phase != CKPT_DEVICE_FETCHING || exchanging(e)))
        return 0;
    int rc = e->device->ops->reached(e->device, number_of(e, s), err);
    if (rc != 0)
        return rc < 0 ? -1 : 0;
    *moved = true;
    if (s->dev.phase == CKPT_DEVICE_FETCHING)
        return check_received(s, err) < 0 ? -1 : queue_late(e, s, err);
    finish_window(e, s);
    return 0;
}

/* All of its units are uploaded, or their uploads queued. */
static bool may_queue(struct ckpt_engine *e, struct ckpt_slot *s)
{
    if (exchanging(e))
        return false;
    (void)pthread_mutex_lock(&e->lock);
    const bool all =
        s->open && s->window == e->next_send && s->unread == 0 && s->dev.ready.len == 0;
    (void)pthread_mutex_unlock(&e->lock);
    return all;
}

/* An exchange may take several calls. */
static int go_on_exchanging(struct ckpt_engine *e, bool *moved, struct ckpt_err *err)
{
    struct ckpt_slot *s = exchanging(e);

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
    for (uint32_t i = 0; i < e->opt.slots; i++) {
        struct ckpt_slot *s = &e->slot[i];
        if (upload_ready(e, s, ret_moved, err) < 0)
            return -1;
    }
    if (go_on_exchanging(e, ret_moved, err) < 0)
        return -1;
    while (e->next_send < e->plan->nwindow) {
        struct ckpt_slot *s = &e->slot[e->next_send % e->opt.slots];
        if (!may_queue(e, s))
            break;
        *ret_moved = true;
        e->next_send++;
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
    for (uint32_t i = 0; i < e->opt.slots; i++) {
        const struct ckpt_slot *s = &e->slot[i];
        if (s->dev.phase == CKPT_DEVICE_EXCHANGE || s->dev.phase == CKPT_DEVICE_FETCHING ||
            s->dev.phase == CKPT_DEVICE_PLACING)
            return true;
    }
    return false;
}
