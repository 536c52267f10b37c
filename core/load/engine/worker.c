/* SPDX-License-Identifier: Apache-2.0 */
/* Workers: read units and place what this rank wants of them, and place received slices. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/clock.h"
#include "base/err.h"
#include "load/engine/engine_inner.h"

enum {
    /* The most units that a worker reads together, so that small tensors, which are neighbours in a
     * file, become one read. It bounds the arrays of a job, which lie on the stack. */
    JOB_UNITS = 64,

    /* From so many bytes on a destination's pages are faulted in by one call before they are
     * written to; for less the call costs more than the faults. */
    TOUCH_BYTES = 64 * 1024,
};

/* Boxes of a job: its first and its last unit may be cut. */
enum { JOB_BOXES = JOB_UNITS + 4 * CKPT_MAX_RANK };

/* Units [lo, hi) of a read slot, which a worker reads together, as n boxes. */
struct job {
    struct ckpt_worker *w;
    struct ckpt_read_slot *slot;
    uint32_t lo, hi;
    uint32_t n;
    struct ckpt_box_read read[JOB_BOXES];
    uint32_t unit[JOB_BOXES]; /* of each box */
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

/* The destination of a box if it is contiguous there and in the dtype of the view; else NULL. */
static unsigned char *dense_place(const struct ckpt_target *t, const struct ckpt_box *box,
                                  enum ckpt_dtype dtype)
{
    uint64_t dense = ckpt_dtype_size(t->dtype);

    for (uint32_t d = box->rank; d-- > 0;) {
        if (box->n[d] > 1 && t->stride[d] != dense)
            return NULL;
        dense *= box->n[d];
    }
    return t->dtype == dtype ? t->ptr + ckpt_place_to(t, box) : NULL;
}

/* Placing bytes [lo, hi) of a group's stream, which are at `data`. */
struct placing {
    struct ckpt_engine *e;
    const unsigned char *data;
    uint64_t lo;
    ckpt_overlaps *overlaps;
    struct ckpt_err *err;
};

/* Give an overlap to the function that is its destination. */
static int put_overlap(const struct ckpt_target *t, const struct ckpt_overlap *overlap,
                       const unsigned char *data, const struct ckpt_box *box, enum ckpt_dtype dtype,
                       struct ckpt_err *err)
{
    uint64_t stride[CKPT_MAX_RANK], lo[CKPT_MAX_RANK];
    const uint64_t from = ckpt_place_from(&overlap->box, box, stride);

    for (uint32_t d = 0; d < overlap->box.rank; d++)
        lo[d] = overlap->box.lo[d] - t->box.lo[d];
    if (t->put(t->ctx, lo, overlap->box.n, data + from * ckpt_dtype_size(dtype), stride,
               ckpt_dtype_name(dtype)) >= 0)
        return 0;
    return ckpt_fail(err, CKPT_USAGE,
                     "the function that is the destination of want %" PRIu32 " has failed",
                     overlap->entry);
}

static int place_box(void *ctx, uint32_t unit, const struct ckpt_box *box, uint64_t at)
{
    const struct placing *p = ctx;
    struct ckpt_engine *e = p->e;
    const enum ckpt_dtype dtype = ckpt_plan_unit_tensor(e->plan, unit)->dtype;

    p->overlaps->len = 0;
    if (ckpt_plan_wanted(e->plan, unit, box, p->overlaps, p->err) < 0)
        return -1;
    for (size_t i = 0; i < p->overlaps->len; i++) {
        const struct ckpt_overlap *overlap = &p->overlaps->ptr[i];
        const struct ckpt_target *t = &e->target[overlap->entry];
        const unsigned char *data = p->data + (at - p->lo);
        if (e->device && !t->host) /* the pump copies it */
            continue;
        if (t->put) {
            if (put_overlap(t, overlap, data, box, dtype, p->err) < 0)
                return -1;
        } else {
            touch(dense_place(t, &overlap->box, dtype), overlap->bytes);
            ckpt_place(t, &overlap->box, data, box, dtype);
        }
        ckpt_engine_land(e, overlap->entry, overlap->bytes);
    }
    return 0;
}

/* Place what this rank wants of these units of a slice or a chunk. */
static int place_units(struct placing *p, uint32_t unit, uint32_t end, uint64_t hi)
{
    for (; unit < end && p->e->plan->units.ptr[unit].at < hi; unit++)
        if (ckpt_plan_boxes(p->e->plan, unit, p->lo, hi, place_box, p) < 0)
            return -1;
    return 0;
}

static int place_read(struct ckpt_engine *e, struct ckpt_read_slot *s, uint32_t lo, uint32_t hi,
                      struct ckpt_err *err)
{
    const struct ckpt_chunk *chunk = &e->plan->chunks.ptr[s->chunk];
    const uint64_t begin = ckpt_now_ns();
    ckpt_cleanup(ckpt_vec_cleanup) ckpt_overlaps overlaps = {0};
    struct placing p = {e, s->buf, chunk->lo, &overlaps, err};

    if (!place_begin(e))
        return 0;
    int rc = place_units(&p, lo, hi, chunk->lo + chunk->len);
    place_end(e);
    atomic_fetch_add(&e->stats.place_ns, ckpt_now_ns() - begin);
    return rc;
}

/* The destination of a box, if exactly one want has it and its bytes are the same there; else NULL.
 * overlaps->ptr[0] is then its overlap with that want. */
static unsigned char *whole_place(struct ckpt_engine *e, uint32_t unit, const struct ckpt_box *box,
                                  ckpt_overlaps *overlaps)
{
    struct ckpt_err ignored = {0};

    overlaps->len = 0;
    if (ckpt_plan_wanted(e->plan, unit, box, overlaps, &ignored) < 0 || overlaps->len != 1 ||
        e->target[overlaps->ptr[0].entry].put || !ckpt_box_eq(&overlaps->ptr[0].box, box))
        return NULL;
    return dense_place(&e->target[overlaps->ptr[0].entry], box,
                       ckpt_plan_unit_tensor(e->plan, unit)->dtype);
}

/* Verify and place a message. */
static int take_message(struct ckpt_engine *e, struct ckpt_message *m, ckpt_overlaps *overlaps,
                        struct ckpt_err *err)
{
    const struct ckpt_window *w = ckpt_window_of(e, m->slot);
    struct placing p = {e, m->xfer.there ? m->xfer.there : m->xfer.buf, 0, overlaps, err};
    uint64_t hi;

    ckpt_plan_slice(e->plan, w, m->member, &p.lo, &hi);
    if (e->opt.mode.verify && !e->device && /* there the pump has compared them */
        ckpt_slice_check(e, m->slot, m->member, p.data, err) < 0)
        return -1;
    return place_units(&p, ckpt_plan_unit_at(e->plan, w->group, p.lo), e->plan->stream[w->group].hi,
                       hi);
}

/* A message whose bytes are in the sender's memory is used up; copy them first if this rank sends
 * them on. */
static void use_up(struct ckpt_engine *e, struct ckpt_message *m)
{
    if (!m->xfer.there)
        return;
    if (m->passed_on)
        memcpy(m->xfer.buf, m->xfer.there, m->xfer.len);
    e->comm->x->ops->fetched(e->comm->x, &m->xfer);
    (void)pthread_mutex_lock(&e->lock);
    m->arrived = true;
    if (m->passed_on)
        ckpt_engine_kick(e);
    (void)pthread_mutex_unlock(&e->lock);
}

/* False: the message was not placed, because the load has stopped or fails now. */
static bool place_message(struct ckpt_engine *e, struct ckpt_message *m)
{
    const uint64_t begin = ckpt_now_ns();
    struct ckpt_err err = {0};
    ckpt_cleanup(ckpt_vec_cleanup) ckpt_overlaps overlaps = {0};

    if (!place_begin(e))
        return false;
    const bool good = take_message(e, m, &overlaps, &err) == 0;
    if (good)
        use_up(e, m);
    place_end(e);
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

/* How the units of a job are read. */
static enum ckpt_direct way_of(const struct job *j)
{
    const struct ckpt_engine *e = j->w->e;
    const enum ckpt_direct way = e->opt.cost.route.direct;

    return way == CKPT_DIRECT_COLD && ckpt_plan_reads_again(e->plan, j->lo) ? CKPT_DIRECT_NONE
                                                                            : way;
}

/* Read a job into its slot. */
static int read_job(struct job *j, struct ckpt_err *err)
{
    struct ckpt_engine *e = j->w->e;
    const struct ckpt_unit *unit = &e->plan->units.ptr[j->lo];
    const uint64_t begin = ckpt_now_ns();
    struct ckpt_box_cost cost = e->opt.cost;

    cost.route.direct = way_of(j);
    cost.route.bounce = &j->w->bounce;
    reading_begin(j->w, j->read->tensor, unit->source, unit->off);
    int rc = ckpt_boxes_pread(&e->reading, j->read, j->n, &cost, err);
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
    const enum ckpt_direct way = way_of(j);

    if (way != CKPT_DIRECT_COLD)
        return way == CKPT_DIRECT_NONE;
    return unit->source < e->cat->sources.len &&
           ckpt_source_resident(e->cat->sources.ptr[unit->source], unit->off, unit->len) >= 1;
}

/* Read a job straight into its destinations. False: that is not possible, read it into the slot. */
static bool read_direct(struct job *j)
{
    struct ckpt_engine *e = j->w->e;
    const struct ckpt_unit *unit = &e->plan->units.ptr[j->lo];
    const uint64_t begin = ckpt_now_ns();
    void *slot[JOB_BOXES];
    struct ckpt_overlap overlap[JOB_BOXES];
    ckpt_cleanup(ckpt_vec_cleanup) ckpt_overlaps overlaps = {0};
    struct ckpt_err ignored = {0};
    uint32_t tried = 0;
    bool good = true;

    if (e->device || e->plan->stream[e->plan->chunks.ptr[j->slot->chunk].group].nstep ||
        !is_cached(j))
        return false;
    for (; tried < j->n && good; tried++) {
        const uint32_t i = tried;
        slot[i] = j->read[i].buf;
        j->read[i].buf = whole_place(e, j->unit[i], &j->read[i].box, &overlaps);
        good = j->read[i].buf != NULL;
        if (good)
            overlap[i] = overlaps.ptr[0];
    }
    good = good && place_begin(e);
    if (good) {
        for (uint32_t i = 0; i < j->n; i++)
            touch(j->read[i].buf, overlap[i].bytes);
        reading_begin(j->w, j->read->tensor, unit->source, unit->off);
        good = ckpt_boxes_pread_cached(&e->reading, j->read, j->n, &e->opt.cost, &ignored) == 0;
        reading_end(j->w);
        for (uint32_t i = 0; i < j->n && good; i++)
            ckpt_engine_land(e, overlap[i].entry, overlap[i].bytes);
        place_end(e);
        atomic_fetch_add(&e->stats.read_ns, ckpt_now_ns() - begin);
    }
    for (uint32_t i = 0; i < tried && !good; i++)
        j->read[i].buf = slot[i];
    return good;
}

/* Add a box to a job. */
static int add_box(void *ctx, uint32_t unit, const struct ckpt_box *box, uint64_t at)
{
    struct job *j = ctx;
    const struct ckpt_engine *e = j->w->e;

    j->unit[j->n] = unit;
    j->read[j->n++] =
        (struct ckpt_box_read){.tensor = ckpt_plan_unit_tensor(e->plan, unit),
                               .box = *box,
                               .buf = j->slot->buf + (at - e->plan->chunks.ptr[j->slot->chunk].lo)};
    return 0;
}

/* Units [lo, hi) are in the slot's buffer: place them; on a device the pump does so. */
static void run_job(struct job *j)
{
    struct ckpt_engine *e = j->w->e;
    const struct ckpt_chunk *chunk = &e->plan->chunks.ptr[j->slot->chunk];
    struct ckpt_err err = {0};

    j->n = 0;
    for (uint32_t u = j->lo; u < j->hi; u++)
        (void)ckpt_plan_boxes(e->plan, u, chunk->lo, chunk->lo + chunk->len, add_box, j);
    if (!read_direct(j)) {
        if (ckpt_engine_has_stopped(e)) /* then no worker begins a read */
            return;
        if (read_job(j, &err) < 0 ||
            (!e->device && place_read(e, j->slot, j->lo, j->hi, &err) < 0)) {
            ckpt_engine_fail(e, &err, true);
            return;
        }
    }
    units_done(e, j->slot, j->hi - j->lo);
}

/* ---- choosing what to do, under the lock ---- */

/* The open read slot of the oldest chunk of which units are to be read; NULL: there is none. */
static struct ckpt_read_slot *oldest_unread(struct ckpt_engine *e)
{
    struct ckpt_read_slot *oldest = NULL;

    for (uint32_t i = 0; i < e->opt.ahead; i++) {
        struct ckpt_read_slot *s = &e->read[i];
        if (s->open && s->next < s->hi && (!oldest || s->chunk < oldest->chunk))
            oldest = s;
    }
    return oldest;
}

/* Choose the next units to read, of one file, which an error can name if the read takes too long,
 * and in one way. False: there are none in open read slots. */
static bool next_units(struct ckpt_engine *e, struct job *j)
{
    const struct ckpt_unit *unit = e->plan->units.ptr;
    struct ckpt_read_slot *s = oldest_unread(e);
    uint64_t bytes = 0;

    if (!s)
        return false;
    j->slot = s;
    j->lo = s->next;
    const bool again = ckpt_plan_reads_again(e->plan, j->lo);
    while (s->next < s->hi && s->next - j->lo < JOB_UNITS &&
           (s->next == j->lo || (unit[s->next].source == unit[j->lo].source &&
                                 ckpt_plan_reads_again(e->plan, s->next) == again &&
                                 bytes + unit[s->next].len <= e->plan->sizes.unit)))
        bytes += unit[s->next++].len;
    j->hi = s->next;
    return true;
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
