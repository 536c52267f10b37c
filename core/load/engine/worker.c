/* SPDX-License-Identifier: Apache-2.0 */
/* Workers: read units and place what this rank wants of them, and place received pieces. */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/clock.h"
#include "base/err.h"
#include "load/engine/engine_inner.h"
#include "run/checkpoint.h"

enum { JOB_UNITS = 64, TOUCH_BYTES = 64 * 1024, FETCH_BYTES = 64 * 1024 };

/* Units [lo, hi) of a read slot, which a worker reads together. */
struct job {
    struct ckpt_worker *w;
    struct ckpt_read_slot *slot;
    uint32_t lo, hi;
    struct ckpt_box_read read[JOB_UNITS];
};

/* ---- placing: between place_begin and place_end, and never after the load has stopped ---- */

static bool place_begin(struct ckpt_engine *e)
{
    (void)pthread_mutex_lock(&e->lock);
    bool go = !e->stopped;
    e->placing += go;
    (void)pthread_mutex_unlock(&e->lock);
    return go;
}

static void place_end(struct ckpt_engine *e)
{
    (void)pthread_mutex_lock(&e->lock);
    if (--e->placing == 0 && e->stopped)
        (void)pthread_cond_broadcast(&e->news);
    (void)pthread_mutex_unlock(&e->lock);
}

/* Fault in fresh memory with one call, which costs less than a page fault for each page. */
static void touch(void *ptr, size_t len)
{
#ifdef MADV_POPULATE_WRITE
    const uintptr_t page = 4096, lo = (uintptr_t)ptr & ~(page - 1);
    const uintptr_t hi = ((uintptr_t)ptr + len + page - 1) & ~(page - 1);

    if (ptr && len >= TOUCH_BYTES)
        (void)madvise((void *)lo, hi - lo, MADV_POPULATE_WRITE);
#else
    (void)ptr, (void)len;
#endif
}

/* The destination of a part if it is contiguous there and in the dtype of the view; else NULL. */
static unsigned char *dense_place(const struct ckpt_target *t, const struct ckpt_box *part,
                                  enum ckpt_dtype dtype)
{
    uint64_t dense = ckpt_dtype_size(t->dtype);

    for (uint32_t d = part->rank; d-- > 0;) {
        if (part->n[d] > 1 && t->stride[d] != dense)
            return NULL;
        dense *= part->n[d];
    }
    return t->dtype == dtype ? t->ptr + ckpt_place_to(t, part) : NULL;
}

/* Place what this rank wants of a unit, whose bytes are at `data`. */
static int place_unit(struct ckpt_engine *e, uint32_t unit, const void *data, ckpt_parts *parts,
                      struct ckpt_err *err)
{
    const enum ckpt_dtype dtype = ckpt_plan_unit_tensor(e->plan, unit)->dtype;
    struct ckpt_box box;

    ckpt_plan_unit_box(e->plan, unit, &box);
    parts->len = 0;
    if (ckpt_plan_wanted(e->plan, unit, &box, parts, err) < 0)
        return -1;
    for (size_t i = 0; i < parts->len; i++) {
        const struct ckpt_part *part = &parts->ptr[i];
        const struct ckpt_target *t = &e->target[part->entry];
        touch(dense_place(t, &part->box, dtype), part->bytes);
        ckpt_place(t, &part->box, data, &box, dtype);
        ckpt_engine_land(e, part->entry, part->bytes);
    }
    return 0;
}

/* Place units that follow each other in memory. */
static int place_units(struct ckpt_engine *e, const unsigned char *data, uint32_t lo, uint32_t hi,
                       ckpt_parts *parts, struct ckpt_err *err)
{
    for (uint32_t u = lo; u < hi; data += e->plan->units.ptr[u++].len)
        if (place_unit(e, u, data, parts, err) < 0)
            return -1;
    return 0;
}

static int place_read(struct ckpt_engine *e, struct ckpt_read_slot *s, uint32_t lo, uint32_t hi,
                      struct ckpt_err *err)
{
    const uint64_t begin = ckpt_now_ns();
    ckpt_parts parts = {0};

    if (!place_begin(e))
        return 0;
    int rc = place_units(e, s->buf + s->unit_off[lo - s->lo], lo, hi, &parts, err);
    place_end(e);
    ckpt_vec_release(&parts);
    atomic_fetch_add(&e->stats.place_ns, ckpt_now_ns() - begin);
    return rc;
}

/* The destination of a whole unit, if exactly one want has it and its bytes are the same there;
 * else NULL. parts->ptr[0] is then that part. */
static unsigned char *whole_place(struct ckpt_engine *e, uint32_t unit, ckpt_parts *parts)
{
    struct ckpt_err ignored = {0};
    struct ckpt_box box;

    ckpt_plan_unit_box(e->plan, unit, &box);
    parts->len = 0;
    if (ckpt_plan_wanted(e->plan, unit, &box, parts, &ignored) < 0 || parts->len != 1 ||
        ckpt_box_numel(&parts->ptr[0].box) != ckpt_box_numel(&box))
        return NULL;
    return dense_place(&e->target[parts->ptr[0].entry], &box,
                       ckpt_plan_unit_tensor(e->plan, unit)->dtype);
}

/* Copy a piece out of the sender's memory: large units straight to their destinations if possible,
 * the others by way of the slot's buffer. False: the sender is gone, or *err says what failed. */
static bool fetch_units(struct ckpt_engine *e, struct ckpt_message *m, ckpt_parts *parts,
                        struct ckpt_err *err)
{
    const struct ckpt_piece_plan *piece = &e->plan->pieces.ptr[m->piece];
    struct ckpt_xport *x = e->comm->x;
    unsigned char *buf = m->xfer.buf;
    size_t at = 0, from = 0;
    uint32_t first = piece->lo;

    for (uint32_t u = piece->lo; u <= piece->hi; u++) {
        const bool end = u == piece->hi;
        unsigned char *to =
            !end && e->plan->units.ptr[u].len >= FETCH_BYTES ? whole_place(e, u, parts) : NULL;
        if ((end || to) && at > from &&
            (!x->ops->fetch(x, &m->xfer, buf + from, at - from, from) ||
             place_units(e, buf + from, first, u, parts, err) < 0))
            return false;
        if (end)
            break;
        at += e->plan->units.ptr[u].len;
        if (!to)
            continue;
        if (whole_place(e, u, parts) != to)
            return false;
        const struct ckpt_part part = parts->ptr[0];
        touch(to, part.bytes);
        if (!x->ops->fetch(x, &m->xfer, to, part.bytes, at - e->plan->units.ptr[u].len))
            return false;
        ckpt_engine_land(e, part.entry, part.bytes);
        from = at;
        first = u + 1;
    }
    return true;
}

/* The message's bytes are in its buffer, so they may be sent on. */
static void message_arrived(struct ckpt_engine *e, struct ckpt_message *m)
{
    (void)pthread_mutex_lock(&e->lock);
    m->arrived = true;
    if (m->passed_on)
        ckpt_engine_kick(e);
    (void)pthread_mutex_unlock(&e->lock);
}

/* If a message's bytes are still in the sender's memory, copy them; then verify and place them. */
static bool take_message(struct ckpt_engine *e, struct ckpt_message *m, ckpt_parts *parts,
                         struct ckpt_err *err)
{
    const struct ckpt_piece_plan *piece = &e->plan->pieces.ptr[m->piece];
    struct ckpt_xport *x = e->comm->x;
    const bool there = m->xfer.in_place, whole = m->passed_on || e->opt.mode.verify;

    if (there && whole && !x->ops->fetch(x, &m->xfer, m->xfer.buf, m->xfer.len, 0))
        return false;
    if (there && !whole && !fetch_units(e, m, parts, err))
        return false;
    if (there)
        x->ops->fetched(x, &m->xfer);
    if (e->opt.mode.verify && ckpt_message_check(e, m, m->xfer.buf, err) < 0)
        return false;
    if (there && whole)
        message_arrived(e, m);
    return (there && !whole) || place_units(e, m->xfer.buf, piece->lo, piece->hi, parts, err) == 0;
}

/* False: the message was not placed, because the load has stopped or fails now. */
static bool place_message(struct ckpt_engine *e, struct ckpt_message *m)
{
    const uint64_t begin = ckpt_now_ns();
    struct ckpt_err err = {0};
    ckpt_parts parts = {0};

    if (!place_begin(e))
        return false;
    const bool good = take_message(e, m, &parts, &err);
    place_end(e);
    ckpt_vec_release(&parts);
    if (err.code != CKPT_OK)
        ckpt_engine_fail(e, &err, true);
    atomic_fetch_add(&e->stats.place_ns, ckpt_now_ns() - begin);
    return good;
}

/* ---- reading ---- */

/* From now on the pump watches the read, and names its tensor and file if it takes too long. */
static void reading_begin(struct ckpt_worker *w, const struct ckpt_tensor *t, uint32_t source,
                          uint64_t off)
{
    atomic_store(&w->tensor, (unsigned)(t - w->e->cat->tensors.ptr));
    atomic_store(&w->source, source);
    atomic_store(&w->off, off);
    atomic_store(&w->since_ms, ckpt_now_ms());
}

static void reading_end(struct ckpt_worker *w) { atomic_store(&w->since_ms, 0); }

/* Read a job into its slot. */
static int read_job(struct job *j, struct ckpt_err *err)
{
    struct ckpt_engine *e = j->w->e;
    const struct ckpt_unit *unit = &e->plan->units.ptr[j->lo];
    const uint64_t begin = ckpt_now_ns();
    struct ckpt_box_cost cost = e->opt.cost;

    for (uint32_t u = j->lo; u < j->hi; u++)
        j->read[u - j->lo].buf = j->slot->buf + j->slot->unit_off[u - j->slot->lo];
    cost.route.bounce = &j->w->bounce;
    reading_begin(j->w, j->read->tensor, unit->source, unit->off);
    int rc = ckpt_boxes_pread(&e->reading, j->read, j->hi - j->lo, &cost, err);
    reading_end(j->w);
    atomic_fetch_add(&e->stats.read_ns, ckpt_now_ns() - begin);
    return rc;
}

static void units_done(struct ckpt_engine *e, struct ckpt_read_slot *s, uint32_t n)
{
    (void)pthread_mutex_lock(&e->lock);
    s->unread -= n;
    if (s->unread == 0 && s->unsent)
        ckpt_engine_kick(e);
    ckpt_read_settle(e, s);
    (void)pthread_mutex_unlock(&e->lock);
}

/* On a device: units are in pinned memory and may be uploaded. */
static int units_ready(struct ckpt_engine *e, struct ckpt_read_slot *s, uint32_t lo, uint32_t hi,
                       struct ckpt_err *err)
{
    const struct ckpt_units units = {lo, hi};

    (void)pthread_mutex_lock(&e->lock);
    int rc = ckpt_vec_push(&s->dev.ready, units);
    if (rc == 0) {
        s->unread -= hi - lo;
        ckpt_engine_kick(e);
    }
    (void)pthread_mutex_unlock(&e->lock);
    return rc < 0 ? ckpt_nomem(err) : 0;
}

/* Units [lo, hi) are in the slot's buffer: place them, or have them uploaded. */
static int units_read(struct ckpt_engine *e, struct ckpt_read_slot *s, uint32_t lo, uint32_t hi,
                      struct ckpt_err *err)
{
    if (e->device)
        return units_ready(e, s, lo, hi, err);
    if (place_read(e, s, lo, hi, err) < 0)
        return -1;
    units_done(e, s, hi - lo);
    return 0;
}

/* True if the load has stopped: then no worker begins a read. */
static bool has_stopped(struct ckpt_engine *e)
{
    (void)pthread_mutex_lock(&e->lock);
    const bool stopped = e->stopped;
    (void)pthread_mutex_unlock(&e->lock);
    return stopped;
}

static uint64_t unit_len(const struct ckpt_read_slot *s, uint32_t u)
{
    return s->unit_off[u + 1 - s->lo] - s->unit_off[u - s->lo];
}

/* ---- reads straight into the destination ----
 *
 * If no other rank wants a unit, and whole_place finds its destination, no buffer is needed between
 * file and destination. Only bytes in the page cache are read so: such a read does not block, and
 * so cannot write to the destination after the load has stopped. */

/* True if the job's first unit is in the page cache, or reads never bypass it. Asked before,
 * because even a read that must not block makes Linux read ahead into a cache that the load would
 * rather bypass. */
static bool is_cached(const struct job *j)
{
    const struct ckpt_engine *e = j->w->e;
    const struct ckpt_unit *unit = &e->plan->units.ptr[j->lo];

    if (e->opt.cost.route.direct != CKPT_DIRECT_COLD)
        return e->opt.cost.route.direct == CKPT_DIRECT_NONE;
    return unit->source < e->cat->sources.len &&
           ckpt_source_resident(e->cat->sources.ptr[unit->source], unit->off,
                                unit_len(j->slot, j->lo)) >= 1;
}

/* Read a job straight into its destinations. False: that is not possible, read it into the slot. */
static bool read_direct(struct job *j)
{
    struct ckpt_engine *e = j->w->e;
    const struct ckpt_unit *unit = &e->plan->units.ptr[j->lo];
    const uint64_t begin = ckpt_now_ns();
    const uint32_t n = j->hi - j->lo;
    uint32_t entry[JOB_UNITS];
    uint64_t bytes[JOB_UNITS];
    ckpt_parts parts = {0};
    struct ckpt_err ignored = {0};
    bool good = true;

    if (!j->slot->alone || e->device || !is_cached(j))
        return false;
    for (uint32_t i = 0; i < n && good; i++) {
        good = (j->read[i].buf = whole_place(e, j->lo + i, &parts)) != NULL;
        entry[i] = good ? parts.ptr[0].entry : 0;
        bytes[i] = good ? parts.ptr[0].bytes : 0;
    }
    ckpt_vec_release(&parts);
    if (!good || !place_begin(e))
        return false;
    for (uint32_t i = 0; i < n; i++)
        touch(j->read[i].buf, bytes[i]);
    reading_begin(j->w, j->read->tensor, unit->source, unit->off);
    good = ckpt_boxes_pread_cached(&e->reading, j->read, n, &e->opt.cost, &ignored) == 0;
    reading_end(j->w);
    for (uint32_t i = 0; i < n && good; i++)
        ckpt_engine_land(e, entry[i], bytes[i]);
    place_end(e);
    atomic_fetch_add(&e->stats.read_ns, ckpt_now_ns() - begin);
    return good;
}

static void run_job(struct job *j)
{
    struct ckpt_engine *e = j->w->e;
    struct ckpt_err err = {0};

    for (uint32_t u = j->lo; u < j->hi; u++) {
        struct ckpt_box_read *r = &j->read[u - j->lo];
        r->tensor = ckpt_plan_unit_tensor(e->plan, u);
        ckpt_plan_unit_box(e->plan, u, &r->box);
    }
    if (read_direct(j)) {
        units_done(e, j->slot, j->hi - j->lo);
        return;
    }
    if (has_stopped(e))
        return;
    if (read_job(j, &err) < 0 || units_read(e, j->slot, j->lo, j->hi, &err) < 0)
        ckpt_engine_fail(e, &err, true);
}

/* ---- choosing what to do, under the lock ---- */

/* Choose the next units to read; false: there are none in open read slots. */
static bool next_units(struct ckpt_engine *e, struct job *j)
{
    const struct ckpt_unit *unit = e->plan->units.ptr;

    for (uint32_t k = 0; k < e->opt.ahead; k++) {
        /* the oldest piece first */
        struct ckpt_read_slot *s = &e->read[(e->next_own + k) % e->opt.ahead];
        uint64_t bytes = 0;
        if (!s->open || s->next == s->hi)
            continue;
        j->slot = s;
        j->lo = s->next;
        /* of one file, which an error can name if the read takes too long */
        while (s->next < s->hi && s->next - j->lo < JOB_UNITS &&
               (s->next == j->lo || (unit[s->next].source == unit[j->lo].source &&
                                     bytes + unit_len(s, s->next) <= e->plan->sizes.unit)))
            bytes += unit_len(s, s->next++);
        j->hi = s->next;
        return true;
    }
    return false;
}

void *ckpt_worker_run(void *arg)
{
    struct ckpt_worker *w = arg;
    struct ckpt_engine *e = w->e;
    struct job *j = calloc(1, sizeof *j);
    struct ckpt_err err = {0};

    if (!j) {
        (void)ckpt_nomem(&err);
        ckpt_engine_fail(e, &err, true);
        (void)pthread_mutex_lock(&e->lock);
        ckpt_engine_leave(e);
        return NULL;
    }
    j->w = w;
    if (e->device) /* the last worker to leave may free device memory */
        e->device->ops->adopt(e->device);
    (void)pthread_mutex_lock(&e->lock);
    while (!e->stopped) {
        struct ckpt_message *m = e->place;
        if (m) {
            if (!(e->place = m->next))
                e->place_tail = &e->place;
        } else if (!next_units(e, j)) {
            if (!ckpt_read_open(e))
                (void)pthread_cond_wait(&e->work, &e->lock);
            continue;
        }
        (void)pthread_mutex_unlock(&e->lock);
        const bool placed = m && place_message(e, m);
        if (!m)
            run_job(j);
        (void)pthread_mutex_lock(&e->lock);
        if (placed) {
            m->slot->left--;
            ckpt_window_settle(e, m->slot);
        }
    }
    free(j);
    ckpt_engine_leave(e);
    return NULL;
}
