/* SPDX-License-Identifier: Apache-2.0 */
/* Which parts are asked for, and copying from them. */
#include "io/far/far.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/ckd.h"
#include "base/clock.h"
#include "base/mem.h"
#include "base/thread.h"
#include "io/far/calls.h"
#include "io/iov.h"

/* Reads of up to ITEM bytes look at an item of many, of which the next one and the end lie near. */
enum { ITEM = 4096 };

/* ---- answers ---- */

void ckpt_far_arrived(struct ckpt_far *f, struct ckpt_part *part)
{
    f->answered_ms = ckpt_now_ms();
    f->latest_ms = ckpt_max_u64(f->latest_ms, part->begun_ms);
    part->state = CKPT_PART_READY;
    (void)pthread_cond_broadcast(&part->done);
    (void)pthread_cond_broadcast(&f->parts.freed);
}

void ckpt_far_failed(struct ckpt_far *f, struct ckpt_part *part, enum ckpt_code code,
                     const char *text)
{
    if (code != CKPT_TIMEOUT)
        f->answered_ms = ckpt_now_ms();
    part->state = CKPT_PART_FAILED;
    part->code = code;
    part->text = strdup(text);
    (void)pthread_cond_broadcast(&part->done);
    if (part->pins == 0) /* it was read ahead: whoever needs it asks again */
        ckpt_parts_free(&f->parts, part);
}

void ckpt_far_all_failed(struct ckpt_far *f, enum ckpt_code code, const char *text)
{
    for (size_t i = 0; i < CKPT_PARTS; i++)
        if (f->parts.part[i].state == CKPT_PART_FETCHING)
            ckpt_far_failed(f, &f->parts.part[i], code, text);
    (void)pthread_cond_broadcast(&f->parts.freed);
}

/* Wait for a moment, or until the condition is signalled. */
static void wait_a_while(struct ckpt_far *f, pthread_cond_t *cond, uint32_t timeout_ms)
{
    const struct timespec until =
        ckpt_deadline(timeout_ms ? ckpt_min_u64(timeout_ms / 8 + 1, 1000) : 1000);

    (void)pthread_cond_timedwait(cond, &f->lock, &until);
}

/* Has nothing come since then, for too long? */
static bool is_silent(const struct ckpt_far *f, uint64_t since_ms, uint32_t timeout_ms)
{
    return timeout_ms && ckpt_now_ms() >= ckpt_max_u64(since_ms, f->answered_ms) + timeout_ms;
}

int ckpt_far_wait(struct ckpt_far *f, struct ckpt_part *part, uint32_t timeout_ms,
                  struct ckpt_err *err)
{
    const uint64_t begin = ckpt_now_ms();

    while (part->state == CKPT_PART_FETCHING) {
        const uint64_t begun = part->begun_ms;
        if (is_silent(f, begun ? begun : begin, timeout_ms) ||
            (timeout_ms && begun && f->latest_ms >= begun + timeout_ms))
            return ckpt_call_hangs(timeout_ms, err);
        wait_a_while(f, &part->done, timeout_ms);
    }
    if (part->state == CKPT_PART_READY || part->code == CKPT_OK)
        return part->state != CKPT_PART_READY;
    return part->text ? ckpt_fail(err, part->code, "%s", part->text) : ckpt_nomem(err);
}

/* Not for ever: the room may be elsewhere, as in the helper's socket. */
int ckpt_far_wait_for_room(struct ckpt_far *f, uint64_t begin_ms, uint32_t timeout_ms,
                           struct ckpt_err *err)
{
    if (is_silent(f, begin_ms, timeout_ms))
        return ckpt_call_hangs(timeout_ms, err);
    wait_a_while(f, &f->parts.freed, timeout_ms);
    return 0;
}

/* ---- asking; all with the lock held ---- */

/* Fetch what is not held of [off, end), in parts of at most `most` bytes (which end at multiples of
 * it), as far as there is room: 0, and 1 if there is no more. */
static int want(struct ckpt_far *f, const struct ckpt_far_object *o, uint64_t off, uint64_t end,
                uint64_t most, bool prefetch, struct ckpt_err *err)
{
    const uint64_t align = f->ops->align;

    while (off < end) {
        uint64_t stop = ckpt_min_u64(end, (off / most + 1) * most);
        if (prefetch && end - stop < most / 8) /* a small rest is no request of its own */
            stop = end;
        struct ckpt_part *s = ckpt_parts_find(&f->parts, o->name, off, &stop);
        if (!s) {
            off -= off % align;
            stop = ckpt_min_u64(o->size, (stop + align - 1) / align * align);
            s = ckpt_parts_add(&f->parts, o->name, off, (uint32_t)(stop - off), prefetch);
            const int rc = s ? f->ops->ask(f, s, o, err) : 1;
            if (rc != 0)
                return rc;
        } else if (prefetch) { /* is not to be taken for what was read long ago */
            s->tick = f->parts.tick;
        }
        off = s->off + s->len;
    }
    return 0;
}

/* Get a part from the cache, unless some of it is held. */
static void recall(struct ckpt_far *f, const struct ckpt_far_object *o, uint64_t off, uint32_t len)
{
    ckpt_cleanup(ckpt_freep) char *buf = malloc(len);

    (void)pthread_mutex_unlock(&f->lock);
    const bool kept = buf && f->ops->recall(f, o->name, off, buf, len);
    (void)pthread_mutex_lock(&f->lock);
    uint64_t end = off + len;
    struct ckpt_part *s =
        kept && !ckpt_parts_find(&f->parts, o->name, off, &end) && end == off + len
            ? ckpt_parts_add(&f->parts, o->name, off, len, false)
            : NULL;
    if (!s)
        return;
    memcpy(ckpt_part_bytes(&f->parts, s), buf, len);
    s->state = CKPT_PART_READY;
}

/* Fetch an end of an object, which is at most ops->end, or get it from the cache. */
static int want_end(struct ckpt_far *f, const struct ckpt_far_object *o, uint64_t off,
                    struct ckpt_err *err)
{
    const uint32_t len = (uint32_t)ckpt_min_u64(f->ops->end, o->size - off);

    if (f->ops->recall)
        recall(f, o, off, len);
    if (want(f, o, off, off + len, f->ops->block, false, err) < 0)
        return -1;
    struct ckpt_part *s = ckpt_parts_find(&f->parts, o->name, off, NULL);
    if (s && s->state == CKPT_PART_FETCHING && s->off == off && s->len == len)
        s->is_end = f->ops->keep;
    return 0;
}

/* Begin to fetch what a read needs. */
static int prepare(struct ckpt_far *f, const struct ckpt_far_object *o, uint64_t off, uint64_t end,
                   enum ckpt_read_how how, struct ckpt_err *err)
{
    const struct ckpt_far_ops *ops = f->ops;
    const uint64_t len = end - off;
    const bool begun = ckpt_parts_find(&f->parts, o->name, off, NULL) != NULL;

    if (how == CKPT_READ_EXACT) {   /* a large one by several requests */
        uint64_t part = ops->block; /* halved, so that parts of different reads fit together */
        while (part > ops->least && part > len / 4)
            part /= 2;
        return want(f, o, off, end, part, false, err);
    }
    if (!begun && end <= ops->end) /* headers are at an end of a file */
        return want_end(f, o, 0, err);
    if (!begun && ops->end && off + ops->end >= o->size)
        return want_end(f, o, o->size > ops->end ? o->size - ops->end : 0, err);
    if (!begun && ops->around && len <= ITEM)
        return want(f, o, off - ckpt_min_u64(off, ops->around),
                    ckpt_min_u64(o->size, end + ops->around), ops->block, false, err);
    return want(f, o, off, end, ops->block, false, err);
}

/* ---- reading ---- */

/* Copy what the part has from `off` on, at most up to `end`; *ret_len bytes. A part that was read
 * ahead, or is large, is done with when its last bytes were read, unless it was by a look at an
 * item, whose data come next. */
static int copy(struct ckpt_far *f, struct ckpt_part *s, uint32_t timeout_ms, uint64_t off,
                uint64_t end, bool is_look, struct ckpt_iov_cursor *to, uint64_t *ret_len,
                struct ckpt_err *err)
{
    s->pins++;
    const int rc = ckpt_far_wait(f, s, timeout_ms, err);
    if (rc == 0) {
        const uint64_t stop = ckpt_min_u64(end, s->off + s->len);
        const bool keep = s->is_end, once = !is_look && (s->ahead || s->nunit > 1);
        *ret_len = stop - off;
        s->is_end = s->ahead = s->unread = false;
        (void)pthread_mutex_unlock(&f->lock);
        if (keep)
            f->ops->keep(f, s);
        ckpt_iov_put(to, (const unsigned char *)ckpt_part_bytes(&f->parts, s) + (off - s->off),
                     (size_t)*ret_len);
        (void)pthread_mutex_lock(&f->lock);
        if (is_look) /* no time passes: many looks are no sign that other parts are not needed */
            s->tick = f->parts.tick;
        else
            s->tick = stop == s->off + s->len && once ? 0 : ++f->parts.tick;
    }
    if (--s->pins == 0 && s->state == CKPT_PART_FAILED)
        ckpt_parts_free(&f->parts, s);
    else if (s->pins == 0)
        (void)pthread_cond_signal(&f->parts.freed);
    return rc;
}

/* Is all of it there, or, unless it must be ready, on its way? Nothing is fetched. */
static bool has_all(struct ckpt_far *f, const struct ckpt_far_object *o, uint64_t off, uint64_t end,
                    bool ready)
{
    if (f->owner != getpid())
        return false;
    while (off < end) {
        const struct ckpt_part *s = ckpt_parts_find(&f->parts, o->name, off, NULL);
        if (!s || (ready && s->state != CKPT_PART_READY))
            return false;
        off = s->off + s->len;
    }
    return true;
}

bool ckpt_far_has_all(struct ckpt_far *f, const struct ckpt_far_object *o, uint64_t off,
                      uint64_t end)
{
    ckpt_cleanup(ckpt_unlockp) pthread_mutex_t *held = ckpt_lock(&f->lock);

    return has_all(f, o, off, end, false);
}

int ckpt_far_read(struct ckpt_far *f, const struct ckpt_far_object *o, const struct iovec *iov,
                  int n, uint64_t off, enum ckpt_read_how how, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_unlockp) pthread_mutex_t *held = ckpt_lock(&f->lock);
    const uint64_t end = off + ckpt_iov_len(iov, n), block = f->ops->block;
    const uint64_t begin_ms = ckpt_now_ms();
    struct ckpt_iov_cursor to = {iov, 0};

    assert(end <= o->size);
    if (how == CKPT_READ_CACHED && !has_all(f, o, off, end, true))
        return 1;
    if (f->ops->begin(f, err) < 0)
        return -1;
    /* the whole of an end: as if it were read, so that it comes from the cache, or is kept there */
    if (how == CKPT_READ_PREFETCH && off == 0 && end == ckpt_min_u64(f->ops->end, o->size))
        return prepare(f, o, off, end, CKPT_READ_AHEAD, err);
    if (how == CKPT_READ_PREFETCH)
        return want(f, o, off, end, block, true, err);
    if (prepare(f, o, off, end, how, err) < 0)
        return -1;
    while (off < end) {
        uint64_t len = 0;
        const uint64_t stop = ckpt_min_u64(end, (off / block + 1) * block);
        if (want(f, o, off, stop, block, false, err) < 0)
            return -1;
        struct ckpt_part *s = ckpt_parts_find(&f->parts, o->name, off, NULL);
        if (!s && ckpt_far_wait_for_room(f, begin_ms, o->timeout_ms, err) < 0)
            return -1;
        if (s && copy(f, s, o->timeout_ms, off, end, how == CKPT_READ_LOOK, &to, &len, err) < 0)
            return -1;
        if (f->dead)
            return f->ops->begin(f, err);
        off += len;
    }
    return 0;
}
