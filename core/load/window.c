/* SPDX-License-Identifier: Apache-2.0 */
/* The messages of a window: which parts travel together, where they lie in the slot's buffers. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "base/ckd.h"
#include "base/mem.h"
#include "load/inner.h"

/* ---- layout: the same on both sides ---- */

/* Call fn for every message of parts[0..n), which are sorted by peer: the large ones in order, then
 * the pack. */
static int each_message(const struct ckpt_part *part, size_t n, const struct ckpt_engine_mode *mode,
                        int (*fn)(void *ctx, const struct ckpt_message *m), void *ctx)
{
    const size_t tail = mode->verify ? CKPT_MESSAGE_HASH : 0;

    for (size_t lo = 0, hi; lo < n; lo = hi) {
        struct ckpt_message pack = {.first = (uint32_t)lo, .is_pack = true};
        for (hi = lo; hi < n && part[hi].peer == part[lo].peer; hi++) {
            struct ckpt_message alone = {.first = (uint32_t)hi, .n = 1};
            if (!ckpt_part_alone(mode, &part[hi])) {
                pack.xfer.len += ckpt_part_room(mode, part[hi].bytes);
                continue;
            }
            alone.xfer.peer = part[hi].peer;
            alone.xfer.len = part[hi].bytes + tail;
            if (fn(ctx, &alone) < 0)
                return -1;
        }
        if (pack.xfer.len == 0)
            continue;
        pack.n = (uint32_t)(hi - lo);
        pack.xfer.peer = part[lo].peer;
        pack.xfer.len += tail;
        if (fn(ctx, &pack) < 0)
            return -1;
    }
    return 0;
}

static uint64_t aligned(uint64_t n)
{
    return (n + CKPT_UNIT_ALIGN - 1) / CKPT_UNIT_ALIGN * CKPT_UNIT_ALIGN;
}

struct tally {
    size_t n;
    uint64_t bytes;
};

static int count_message(void *ctx, const struct ckpt_message *m)
{
    struct tally *t = ctx;

    t->n++;
    t->bytes += aligned(m->xfer.len);
    return 0;
}

/* ---- staging: what is not one run in its unit is gathered, equal boxes once ---- */

static int same_cmp(const void *pa, const void *pb)
{
    const struct ckpt_part *a = *(const struct ckpt_part *const *)pa;
    const struct ckpt_part *b = *(const struct ckpt_part *const *)pb;
    int c;

    if (a->unit != b->unit)
        return a->unit < b->unit ? -1 : 1;
    if ((c = memcmp(a->box.lo, b->box.lo, a->box.rank * sizeof *a->box.lo)) != 0 ||
        (c = memcmp(a->box.n, b->box.n, a->box.rank * sizeof *a->box.n)) != 0)
        return c;
    return (a > b) - (a < b);
}

static bool same_box(const struct ckpt_part *a, const struct ckpt_part *b)
{
    return a->unit == b->unit &&
           memcmp(a->box.lo, b->box.lo, a->box.rank * sizeof *a->box.lo) == 0 &&
           memcmp(a->box.n, b->box.n, a->box.rank * sizeof *a->box.n) == 0;
}

struct pack {
    XXH128_hash_t parts;
    uint32_t lo;
};

static int pack_cmp(const void *pa, const void *pb)
{
    const struct pack *a = pa, *b = pb;
    const int c = XXH128_cmp(&a->parts, &b->parts);

    return c ? c : (a->lo > b->lo) - (a->lo < b->lo);
}

/* The small parts of the peer whose parts begin at *lo, which moves to the next peer's. */
static void hash_pack(const ckpt_parts *parts, const struct ckpt_engine_mode *mode,
                      XXH3_state_t *state, size_t *lo, struct pack *ret)
{
    const uint32_t peer = parts->ptr[*lo].peer;

    ret->lo = (uint32_t)*lo;
    (void)XXH3_128bits_reset(state);
    for (; *lo < parts->len && parts->ptr[*lo].peer == peer; ++*lo) {
        const struct ckpt_part *p = &parts->ptr[*lo];
        if (ckpt_part_alone(mode, p))
            continue;
        (void)XXH3_128bits_update(state, &p->unit, sizeof p->unit);
        (void)XXH3_128bits_update(state, p->box.lo, p->box.rank * sizeof *p->box.lo);
        (void)XXH3_128bits_update(state, p->box.n, p->box.rank * sizeof *p->box.n);
    }
    ret->parts = XXH3_128bits_digest(state);
}

/* Replicas get the same small parts: packed once. twin[lo]: where the first peer's parts begin
 * whose pack is the same, for each peer's first part. */
static int find_equal_packs(const ckpt_parts *parts, const struct ckpt_engine_mode *mode,
                            uint32_t *twin, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) struct pack *pack = malloc((parts->len + 1) * sizeof *pack);
    XXH3_state_t *state = XXH3_createState();
    size_t n = 0, lo = 0;

    if (!pack || !state) {
        (void)XXH3_freeState(state);
        return ckpt_nomem(err);
    }
    while (lo < parts->len)
        hash_pack(parts, mode, state, &lo, &pack[n++]);
    (void)XXH3_freeState(state);
    qsort(pack, n, sizeof *pack, pack_cmp);
    for (size_t i = 0; i < n; i++)
        twin[pack[i].lo] = i > 0 && XXH128_isEqual(pack[i - 1].parts, pack[i].parts)
                               ? twin[pack[i - 1].lo]
                               : pack[i].lo;
    return 0;
}

/* twin[i]: the first part with the same box, for parts that travel alone; twin[parts->len + lo]: as
 * find_equal_packs says. */
static int find_twins(const ckpt_parts *parts, const struct ckpt_engine_mode *mode, uint32_t *twin,
                      struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) const struct ckpt_part **order =
        malloc((parts->len + 1) * sizeof *order);
    size_t n = 0;

    if (!order)
        return ckpt_nomem(err);
    for (size_t i = 0; i < parts->len; i++)
        if (ckpt_part_alone(mode, &parts->ptr[i]))
            order[n++] = &parts->ptr[i];
    qsort(order, n, sizeof *order, same_cmp);
    for (size_t i = 0; i < n; i++) {
        uint32_t at = (uint32_t)(order[i] - parts->ptr);
        twin[at] = i > 0 && same_box(order[i - 1], order[i]) ? twin[order[i - 1] - parts->ptr] : at;
    }
    return find_equal_packs(parts, mode, twin + parts->len, err);
}

/* Is the part one run of its unit's memory? Then that, else NULL. */
static const void *run_of(const struct ckpt_plan *plan, const struct ckpt_part *part,
                          const void *unit)
{
    struct ckpt_box box;

    ckpt_plan_unit_box(plan, part->unit, &box);
    return ckpt_place_run(&part->box, unit, &box,
                          ckpt_dtype_size(ckpt_plan_unit_tensor(plan, part->unit)->dtype));
}

struct stager {
    const struct ckpt_plan *plan;
    const ckpt_parts *parts;
    const uint32_t *twin;
    bool verify;
    uint64_t bytes;
};

static int stage_message(void *ctx, const struct ckpt_message *m)
{
    struct stager *s = ctx;

    if (m->is_pack ? s->twin[s->parts->len + m->first] == m->first
                   : s->verify || (s->twin[m->first] == m->first &&
                                   !run_of(s->plan, &s->parts->ptr[m->first], s)))
        s->bytes += aligned(m->xfer.len);
    return 0;
}

uint64_t ckpt_units_bytes(const struct ckpt_plan *plan, uint32_t lo, uint32_t hi, uint64_t *off)
{
    uint64_t bytes = 0;

    for (uint32_t u = lo; u < hi; u++) {
        struct ckpt_box box;
        ckpt_plan_unit_box(plan, u, &box);
        if (off)
            off[u - lo] = bytes;
        bytes +=
            aligned(ckpt_box_numel(&box) * ckpt_dtype_size(ckpt_plan_unit_tensor(plan, u)->dtype));
    }
    if (off)
        off[hi - lo] = bytes;
    return bytes;
}

static uint32_t owner_of(const struct ckpt_plan *plan, uint32_t self)
{
    uint32_t o = 0;

    while (plan->owner[o] != self)
        o++;
    return o;
}

/* What measuring needs again and again. */
struct measure {
    const struct ckpt_plan *plan;
    uint32_t self, owner;
    const struct ckpt_engine_mode *mode;
    ckpt_parts parts;
    CKPT_VEC(uint32_t) twin;
};

static uint64_t copies_of(const struct ckpt_part *part, size_t n)
{
    uint64_t sum = 0;

    for (size_t i = 0; i < n; i++)
        sum += ckpt_copies_most(&part[i].box);
    return sum;
}

/* Bytes that are gathered to be sent in a window. */
static int measure_sends(struct measure *m, uint32_t lo, uint32_t hi, uint64_t *ret_stage,
                         uint64_t *copies, struct ckpt_err *err)
{
    *ret_stage = 0;
    m->parts.len = m->twin.len = 0;
    if (m->plan->nowner == 1)
        return 0;
    if (ckpt_plan_sends(m->plan, m->self, lo, hi, &m->parts, err) < 0)
        return -1;
    if (ckpt_vec_reserve(&m->twin, 2 * m->parts.len + 1) < 0)
        return ckpt_nomem(err);
    if (find_twins(&m->parts, m->mode, m->twin.ptr, err) < 0)
        return -1;
    struct stager s = {m->plan, &m->parts, m->twin.ptr, m->mode->verify, 0};
    (void)each_message(m->parts.ptr, m->parts.len, m->mode, stage_message, &s);
    *ret_stage = s.bytes;
    *copies += copies_of(m->parts.ptr, m->parts.len);
    return 0;
}

/* Descriptors for what this rank itself wants of units. */
static int measure_own(struct measure *m, uint32_t lo, uint32_t hi, uint64_t *copies,
                       struct ckpt_err *err)
{
    for (uint32_t u = lo; u < hi && m->mode->device; u++) {
        struct ckpt_box box;
        ckpt_plan_unit_box(m->plan, u, &box);
        m->parts.len = 0;
        if (ckpt_plan_wanted(m->plan, m->self, u, &box, &m->parts, err) < 0)
            return -1;
        *copies += copies_of(m->parts.ptr, m->parts.len);
    }
    return 0;
}

/* What others broadcast in a window. */
static int measure_common(struct measure *m, uint32_t window, uint64_t *bytes, uint64_t *copies,
                          struct ckpt_err *err)
{
    for (uint32_t o = 0; o < m->plan->nowner && m->plan->common; o++) {
        uint32_t lo, hi, run_lo, run_hi;
        ckpt_plan_piece(m->plan, o, window, &lo, &hi);
        for (; o != m->owner && ckpt_plan_common_run(m->plan, lo, hi, &run_lo, &run_hi);
             lo = run_hi) {
            *bytes += ckpt_units_bytes(m->plan, run_lo, run_hi, NULL);
            if (measure_own(m, run_lo, run_hi, copies, err) < 0)
                return -1;
        }
    }
    return 0;
}

static int measure_window(struct measure *m, uint32_t w, const struct ckpt_part *receive, size_t n,
                          struct ckpt_engine_sizes *ret, struct ckpt_err *err)
{
    uint64_t copies = copies_of(receive, n), stage = 0;
    struct tally t = {0};
    uint32_t lo, hi;

    ckpt_plan_piece(m->plan, m->owner, w, &lo, &hi);
    (void)each_message(receive, n, m->mode, count_message, &t);
    if (measure_sends(m, lo, hi, &stage, &copies, err) < 0 ||
        measure_own(m, lo, hi, &copies, err) < 0 ||
        measure_common(m, w, &t.bytes, &copies, err) < 0)
        return -1;
    ret->read = ckpt_max_u64(ret->read, ckpt_units_bytes(m->plan, lo, hi, NULL));
    ret->stage = ckpt_max_u64(ret->stage, stage);
    ret->receive = ckpt_max_u64(ret->receive, t.bytes);
    ret->copies = ckpt_max_u64(ret->copies, copies);
    return 0;
}

int ckpt_engine_measure(const struct ckpt_plan *plan, uint32_t self,
                        const struct ckpt_engine_mode *mode, const ckpt_parts *receives,
                        struct ckpt_engine_sizes *ret, struct ckpt_err *err)
{
    struct measure m = {.plan = plan, .self = self, .owner = owner_of(plan, self), .mode = mode};
    size_t lo = 0, hi;
    int rc = 0;

    *ret = (struct ckpt_engine_sizes){0};
    for (uint32_t w = 0; w < plan->nwindow && rc == 0; w++, lo = hi) {
        for (hi = lo; hi < receives->len && receives->ptr[hi].window == w;)
            hi++;
        rc = measure_window(&m, w, hi > lo ? receives->ptr + lo : NULL, hi - lo, ret, err);
    }
    ckpt_vec_release(&m.parts);
    ckpt_vec_release(&m.twin);
    ret->host = ret->read + ret->stage + ret->receive;
    if (mode->device) {
        const uint64_t list = ret->copies * sizeof(struct ckpt_device_copy);
        ret->device = ret->host + list;
        ret->host = (mode->verify ? ret->host : ret->read) + list;
    }
    return rc;
}

/* ---- slots ---- */

void ckpt_slot_open(struct ckpt_engine *e, struct ckpt_slot *s, uint32_t window)
{
    s->open = true;
    s->window = window;
    ckpt_plan_piece(e->plan, e->owner, window, &s->lo, &s->hi);
    (void)ckpt_units_bytes(e->plan, s->lo, s->hi, s->unit_off);
    s->next = s->lo;
    s->unread = s->hi - s->lo;
    /* on a device, posting is all of a window's work */
    s->received_posted = e->device || e->plan->nowner == 1;
    s->sends_posted = !e->device && e->plan->nowner == 1;
    s->unsent = s->unplaced = 0;
}

void ckpt_slot_release(struct ckpt_slot *s)
{
    free(s->out);
    free(s->in);
    s->out = s->in = NULL;
    s->nout = s->nin = 0;
    s->sends.len = 0;
}

struct poster {
    struct ckpt_engine *e;
    struct ckpt_slot *s;
    const uint32_t *twin;
    const void **data;          /* per part that travels alone, then per pack: where it is */
    const unsigned char *read;  /* where units are gathered from: on the host, unless the device */
    unsigned char *to;          /* does it; stage or receive */
    struct ckpt_copies *copies; /* NULL: gathered at once */
    uint64_t at;                /* in `to` */
    struct ckpt_err *err;
};

static int prepare_receive(void *ctx, const struct ckpt_message *m)
{
    struct poster *p = ctx;
    struct ckpt_message *in = &p->s->in[p->s->nin++];

    *in = *m;
    in->slot = p->s;
    in->xfer.buf = p->to + p->at;
    p->at += aligned(m->xfer.len);
    return 0;
}

int ckpt_slot_receives(struct ckpt_engine *e, struct ckpt_slot *s, struct ckpt_err *err)
{
    struct tally t = {0};
    struct poster p = {.e = e, .s = s, .to = e->device ? s->dev.receive : s->receive, .err = err};

    s->nparts = e->receive_first[s->window + 1] - e->receive_first[s->window];
    s->parts = s->nparts ? &e->receives.ptr[e->receive_first[s->window]] : NULL;
    (void)each_message(s->parts, s->nparts, &e->opt.mode, count_message, &t);
    if (!(s->in = calloc(t.n + 1, sizeof *s->in)))
        return ckpt_nomem(err);
    (void)each_message(s->parts, s->nparts, &e->opt.mode, prepare_receive, &p);
    s->expected = p.at;
    return 0;
}

/* In the order of windows: both sides count on it. */
int ckpt_slot_post(struct ckpt_engine *e, struct ckpt_message *m, size_t n, struct ckpt_err *err)
{
    for (size_t i = 0; i < n; i++)
        if (e->comm->x->ops->post(e->comm->x, &m[i].xfer, err) < 0)
            return -1;
    return 0;
}

static void hash_tail(unsigned char *buf, size_t len)
{
    XXH64_hash_t h = XXH3_64bits(buf, len);

    memcpy(buf + len, &h, sizeof h);
}

int ckpt_message_check(const struct ckpt_message *m, const void *data, struct ckpt_err *err)
{
    const size_t len = m->xfer.len - CKPT_MESSAGE_HASH;
    XXH64_hash_t said, is = XXH3_64bits(data, len);

    memcpy(&said, (const char *)data + len, sizeof said);
    if (said == is)
        return 0;
    return ckpt_fail(err, CKPT_IO,
                     "what rank %" PRIu32 " sent in window %" PRIu32 " arrived changed (XXH3 "
                     "%016" PRIx64 ", sent as %016" PRIx64 ")",
                     m->xfer.peer, m->slot->window, (uint64_t)is, (uint64_t)said);
}

static int part_out(const struct poster *p, const struct ckpt_part *part, unsigned char *to)
{
    const struct ckpt_plan *plan = p->e->plan;
    const size_t esize = ckpt_dtype_size(ckpt_plan_unit_tensor(plan, part->unit)->dtype);
    const unsigned char *unit = p->read + p->s->unit_off[part->unit - p->s->lo];
    struct ckpt_box box;

    ckpt_plan_unit_box(plan, part->unit, &box);
    if (p->copies)
        return ckpt_copies_out(p->copies, to, &part->box, unit, &box, esize, p->err);
    ckpt_place_out(to, &part->box, unit, &box, esize);
    return 0;
}

static int prepare_send(void *ctx, const struct ckpt_message *m)
{
    struct poster *p = ctx;
    struct ckpt_slot *s = p->s;
    struct ckpt_message *out = &s->out[s->nout++];
    const struct ckpt_engine_mode *mode = &p->e->opt.mode;
    unsigned char *to = p->to + p->at;
    const struct ckpt_part *part = &s->sends.ptr[m->first];
    size_t len = 0;

    *out = *m;
    out->slot = s;
    out->xfer.send = true;
    if (!m->is_pack && !mode->verify) {
        const uint32_t twin = p->twin[m->first];
        const void *run = twin != m->first
                              ? p->data[twin]
                              : run_of(p->e->plan, part, p->read + s->unit_off[part->unit - s->lo]);
        if (run) {
            p->data[m->first] = run;
            out->xfer.buf = (void *)(uintptr_t)run;
            return 0;
        }
        p->data[m->first] = to;
    }
    if (m->is_pack) {
        const size_t pack = s->sends.len + m->first, twin = s->sends.len + p->twin[pack];
        if (twin != pack) {
            out->xfer.buf = (void *)(uintptr_t)p->data[twin];
            return 0;
        }
        p->data[pack] = to;
    }
    for (uint32_t i = 0; i < m->n; i++) {
        if (m->is_pack && ckpt_part_alone(mode, &part[i]))
            continue;
        if (part_out(p, &part[i], to + len) < 0)
            return -1;
        len += m->is_pack ? ckpt_part_room(mode, part[i].bytes) : part[i].bytes;
    }
    if (mode->verify)
        hash_tail(to, len);
    out->xfer.buf = to;
    p->at += aligned(m->xfer.len);
    return 0;
}

int ckpt_slot_sends(struct ckpt_engine *e, struct ckpt_slot *s, struct ckpt_err *err)
{
    const bool there = e->device && !e->opt.mode.verify; /* gathered on the device */
    struct tally t = {0};
    struct poster p = {.e = e,
                       .s = s,
                       .read = there ? s->dev.read : s->read,
                       .to = there ? s->dev.stage : s->stage,
                       .copies = there ? &s->dev.copies : NULL,
                       .err = err};

    s->sends.len = 0;
    if (ckpt_plan_sends(e->plan, e->self, s->lo, s->hi, &s->sends, err) < 0)
        return -1;
    ckpt_cleanup(ckpt_freep) uint32_t *twin = malloc((2 * s->sends.len + 1) * sizeof *twin);
    ckpt_cleanup(ckpt_freep) const void **data = malloc((2 * s->sends.len + 1) * sizeof *data);
    (void)each_message(s->sends.ptr, s->sends.len, &e->opt.mode, count_message, &t);
    s->out = calloc(t.n + 1, sizeof *s->out);
    if (!twin || !data || !s->out)
        return ckpt_nomem(err);
    if (find_twins(&s->sends, &e->opt.mode, twin, err) < 0)
        return -1;
    p.twin = twin;
    p.data = data;
    if (each_message(s->sends.ptr, s->sends.len, &e->opt.mode, prepare_send, &p) < 0)
        return -1;
    s->staged = p.at;
    return 0;
}
