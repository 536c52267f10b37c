/* SPDX-License-Identifier: Apache-2.0 */
/* The messages of a window: which parts travel together, where they lie in the slot's buffers. */
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "base/ckd.h"
#include "base/mem.h"
#include "load/inner.h"

/* ---- layout: the same on both sides ---- */

/* Call fn for every message of parts[0..n), which are sorted by peer: the large ones in order, then
 * the pack. */
static int each_message(const struct ckpt_part *part, size_t n, bool verify,
                        int (*fn)(void *ctx, const struct ckpt_message *m), void *ctx)
{
    const size_t tail = verify ? CKPT_MESSAGE_HASH : 0;

    for (size_t lo = 0, hi; lo < n; lo = hi) {
        struct ckpt_message pack = {.first = (uint32_t)lo, .is_pack = true};
        for (hi = lo; hi < n && part[hi].peer == part[lo].peer; hi++) {
            struct ckpt_message alone = {.first = (uint32_t)hi, .n = 1};
            if (!ckpt_part_alone(&part[hi])) {
                pack.xfer.len += part[hi].bytes;
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

/* twin[i]: the first part with the same box, for parts that travel alone. */
static int find_twins(const ckpt_parts *parts, uint32_t *twin, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) const struct ckpt_part **order =
        malloc((parts->len + 1) * sizeof *order);
    size_t n = 0;

    if (!order)
        return ckpt_nomem(err);
    for (size_t i = 0; i < parts->len; i++)
        if (ckpt_part_alone(&parts->ptr[i]))
            order[n++] = &parts->ptr[i];
    qsort(order, n, sizeof *order, same_cmp);
    for (size_t i = 0; i < n; i++) {
        uint32_t at = (uint32_t)(order[i] - parts->ptr);
        twin[at] = i > 0 && same_box(order[i - 1], order[i]) ? twin[order[i - 1] - parts->ptr] : at;
    }
    return 0;
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

    if (m->is_pack || s->verify ||
        (s->twin[m->first] == m->first && !run_of(s->plan, &s->parts->ptr[m->first], s)))
        s->bytes += aligned(m->xfer.len);
    return 0;
}

static uint64_t piece_bytes(const struct ckpt_plan *plan, uint32_t lo, uint32_t hi, uint64_t *off)
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

int ckpt_engine_measure(const struct ckpt_plan *plan, uint32_t self, bool verify,
                        const ckpt_parts *receives, struct ckpt_engine_sizes *ret,
                        struct ckpt_err *err)
{
    const uint32_t owner = owner_of(plan, self);
    ckpt_parts sends = {0};
    CKPT_VEC(uint32_t) twin = {0};
    int rc = 0;

    *ret = (struct ckpt_engine_sizes){0};
    for (uint32_t w = 0; w < plan->nwindow && rc == 0; w++) {
        uint32_t lo, hi;
        ckpt_plan_piece(plan, owner, w, &lo, &hi);
        ret->read = ckpt_max_u64(ret->read, piece_bytes(plan, lo, hi, NULL));
        if (plan->nowner == 1)
            continue;
        sends.len = 0;
        rc = ckpt_plan_sends(plan, self, lo, hi, &sends, err);
        twin.len = 0;
        if (rc == 0 && ckpt_vec_reserve(&twin, sends.len + 1) < 0)
            rc = ckpt_nomem(err);
        if (rc == 0)
            rc = find_twins(&sends, twin.ptr, err);
        struct stager s = {plan, &sends, twin.ptr, verify, 0};
        if (rc == 0)
            (void)each_message(sends.ptr, sends.len, verify, stage_message, &s);
        ret->stage = ckpt_max_u64(ret->stage, s.bytes);
    }
    ckpt_vec_release(&sends);
    ckpt_vec_release(&twin);
    for (size_t lo = 0, hi; lo < receives->len && rc == 0; lo = hi) {
        struct tally t = {0};
        for (hi = lo; hi < receives->len && receives->ptr[hi].window == receives->ptr[lo].window;)
            hi++;
        (void)each_message(receives->ptr + lo, hi - lo, verify, count_message, &t);
        ret->receive = ckpt_max_u64(ret->receive, t.bytes);
    }
    return rc;
}

/* ---- slots ---- */

void ckpt_slot_open(struct ckpt_engine *e, struct ckpt_slot *s, uint32_t window)
{
    s->open = true;
    s->window = window;
    ckpt_plan_piece(e->plan, e->owner, window, &s->lo, &s->hi);
    (void)piece_bytes(e->plan, s->lo, s->hi, s->unit_off);
    s->next = s->lo;
    s->unread = s->hi - s->lo;
    s->received_posted = s->sends_posted = e->plan->nowner == 1;
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
    const void **data; /* per part that travels alone: where it is */
    uint64_t at;       /* in stage or receive */
    struct ckpt_err *err;
};

static int prepare_receive(void *ctx, const struct ckpt_message *m)
{
    struct poster *p = ctx;
    struct ckpt_message *in = &p->s->in[p->s->nin++];

    *in = *m;
    in->slot = p->s;
    in->xfer.buf = p->s->receive + p->at;
    p->at += aligned(m->xfer.len);
    return 0;
}

/* Messages are posted in the order of windows: both sides count on it. */
int ckpt_slot_post_receives(struct ckpt_engine *e, struct ckpt_slot *s, struct ckpt_err *err)
{
    struct tally t = {0};
    struct poster p = {.e = e, .s = s, .err = err};

    s->parts = e->receives.ptr + e->receive_first[s->window];
    s->nparts = e->receive_first[s->window + 1] - e->receive_first[s->window];
    (void)each_message(s->parts, s->nparts, e->opt.verify, count_message, &t);
    if (!(s->in = calloc(t.n + 1, sizeof *s->in)))
        return ckpt_nomem(err);
    (void)each_message(s->parts, s->nparts, e->opt.verify, prepare_receive, &p);
    for (size_t i = 0; i < s->nin; i++)
        if (e->comm->x->ops->post(e->comm->x, &s->in[i].xfer, err) < 0)
            return -1;
    return 0;
}

static void hash_tail(unsigned char *buf, size_t len)
{
    XXH64_hash_t h = XXH3_64bits(buf, len);

    memcpy(buf + len, &h, sizeof h);
}

static void part_out(const struct poster *p, const struct ckpt_part *part, unsigned char *to)
{
    const struct ckpt_plan *plan = p->e->plan;
    struct ckpt_box box;

    ckpt_plan_unit_box(plan, part->unit, &box);
    ckpt_place_out(to, &part->box, p->s->read + p->s->unit_off[part->unit - p->s->lo], &box,
                   ckpt_dtype_size(ckpt_plan_unit_tensor(plan, part->unit)->dtype));
}

static int prepare_send(void *ctx, const struct ckpt_message *m)
{
    struct poster *p = ctx;
    struct ckpt_slot *s = p->s;
    struct ckpt_message *out = &s->out[s->nout++];
    unsigned char *to = s->stage + p->at;
    const struct ckpt_part *part = &s->sends.ptr[m->first];
    size_t len = 0;

    *out = *m;
    out->slot = s;
    out->xfer.send = true;
    if (!m->is_pack && !p->e->opt.verify) {
        const uint32_t twin = p->twin[m->first];
        const void *run = twin != m->first
                              ? p->data[twin]
                              : run_of(p->e->plan, part, s->read + s->unit_off[part->unit - s->lo]);
        if (run) {
            p->data[m->first] = run;
            out->xfer.buf = (void *)(uintptr_t)run;
            return 0;
        }
        p->data[m->first] = to;
    }
    for (uint32_t i = 0; i < m->n; i++) {
        if (m->is_pack && ckpt_part_alone(&part[i]))
            continue;
        part_out(p, &part[i], to + len);
        len += part[i].bytes;
    }
    if (p->e->opt.verify)
        hash_tail(to, len);
    out->xfer.buf = to;
    p->at += aligned(m->xfer.len);
    return 0;
}

int ckpt_slot_post_sends(struct ckpt_engine *e, struct ckpt_slot *s, struct ckpt_err *err)
{
    struct tally t = {0};
    struct poster p = {.e = e, .s = s, .err = err};

    s->sends.len = 0;
    if (ckpt_plan_sends(e->plan, e->self, s->lo, s->hi, &s->sends, err) < 0)
        return -1;
    ckpt_cleanup(ckpt_freep) uint32_t *twin = malloc((s->sends.len + 1) * sizeof *twin);
    ckpt_cleanup(ckpt_freep) const void **data = malloc((s->sends.len + 1) * sizeof *data);
    (void)each_message(s->sends.ptr, s->sends.len, e->opt.verify, count_message, &t);
    s->out = calloc(t.n + 1, sizeof *s->out);
    if (!twin || !data || !s->out)
        return ckpt_nomem(err);
    if (find_twins(&s->sends, twin, err) < 0)
        return -1;
    p.twin = twin;
    p.data = data;
    (void)each_message(s->sends.ptr, s->sends.len, e->opt.verify, prepare_send, &p);
    for (size_t i = 0; i < s->nout; i++)
        if (e->comm->x->ops->post(e->comm->x, &s->out[i].xfer, err) < 0)
            return -1;
    return 0;
}
