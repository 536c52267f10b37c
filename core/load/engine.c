/* SPDX-License-Identifier: Apache-2.0 */
/* The life of a load: start, the pump, the end that all ranks agree on. */
#include "load/engine.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "base/ckd.h"
#include "base/clock.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/str.h"
#include "load/inner.h"
#include "load/same.h"
#include "run/checkpoint.h"
#include "tensor/region.h"

enum { PUMP_SLEEP_MS = 20, ASSIST_HEAD = 64, HEAR_TURNS = 20, HEAR_MS = 5 };

/* ---- memory ---- */

static unsigned char *map(uint64_t len)
{
    void *p =
        len ? mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) : NULL;

    return p == MAP_FAILED ? NULL : p;
}

static void unmap(unsigned char *p, uint64_t len)
{
    if (p)
        (void)munmap(p, len);
}

static void unmap_slot(const struct ckpt_engine *e, struct ckpt_slot *s)
{
    unmap(s->read, e->sizes.read);
    unmap(s->stage, e->sizes.stage);
    unmap(s->receive, e->sizes.receive);
}

static void destroy(struct ckpt_engine *e)
{
    for (uint32_t i = 0; e->slot && i < e->opt.slots; i++) {
        struct ckpt_slot *s = &e->slot[i];
        if (!e->leak) {
            ckpt_slot_release(s);
            if (e->device)
                ckpt_device_slot_release(e, s);
            else
                unmap_slot(e, s);
        }
        ckpt_vec_release(&s->sends);
        free(s->unit_off);
    }
    while (e->retry || e->refill) {
        struct ckpt_retry **from = e->retry ? &e->retry : &e->refill, *r = *from;
        *from = r->next;
        free(r);
    }
    while (e->assist || e->assisted) {
        struct ckpt_assist **from = e->assist ? &e->assist : &e->assisted, *a = *from;
        *from = a->next;
        free(a->data);
        free(a);
    }
    if (e->reading.slabs)
        ckpt_slabs_forget(e->reading.slabs, &e->reading);
    free(e->slot);
    for (uint32_t i = 0; e->worker && i < e->opt.threads; i++)
        ckpt_bounce_release(&e->worker[i].bounce);
    free(e->worker);
    free(e->receive_first);
    ckpt_vec_release(&e->receives);
    free(e->target);
    free(e->left);
    free(e->landed);
    ckpt_plan_free(e->plan);
    if (e->roster)
        ckpt_roster_release(e->roster);
    free(e->roster);
    ckpt_view_release(e->view);
    if (e->device && !e->leak)
        e->device->ops->unref(e->device);
    (void)pthread_cond_destroy(&e->work);
    (void)pthread_cond_destroy(&e->news);
    (void)pthread_mutex_destroy(&e->lock);
    free(e);
}

void ckpt_engine_unref(struct ckpt_engine *e)
{
    if (atomic_fetch_sub(&e->refs, 1) == 1)
        destroy(e);
}

/* A worker ends; it has the lock, which is given up. */
void ckpt_engine_leave(struct ckpt_engine *e)
{
    e->nworker--;
    const bool last = atomic_fetch_sub(&e->refs, 1) == 1;
    (void)pthread_cond_broadcast(&e->news);
    (void)pthread_mutex_unlock(&e->lock);
    if (last)
        destroy(e);
}

/* ---- state that others change; each takes or has the lock ---- */

/* A worker may come back long after the comm is gone. */
void ckpt_engine_kick(struct ckpt_engine *e)
{
    if (!e->finished)
        e->comm->x->ops->kick(e->comm->x);
}

void ckpt_engine_fail(struct ckpt_engine *e, const struct ckpt_err *err, bool own)
{
    (void)pthread_mutex_lock(&e->lock);
    if (e->err.code == CKPT_OK) {
        if (own && e->size > 1 && !ckpt_has_prefix(err->text, "rank "))
            (void)ckpt_fail(&e->err, err->code, "rank %" PRIu32 ": %s", e->self, err->text);
        else
            e->err = *err;
        e->own = own;
        e->stopped = true;
        (void)pthread_cond_broadcast(&e->work);
        ckpt_engine_kick(e);
    }
    (void)pthread_mutex_unlock(&e->lock);
}

void ckpt_slot_settle(struct ckpt_engine *e, struct ckpt_slot *s)
{
    if (!s->open || s->unread || !s->received_posted || !s->sends_posted || s->unsent ||
        s->unplaced)
        return;
    s->open = false;
    ckpt_slot_release(s);
    e->nclosed++;
    (void)pthread_cond_broadcast(&e->work);
    if (e->nclosed == e->plan->nwindow)
        ckpt_engine_kick(e);
}

void ckpt_engine_land(struct ckpt_engine *e, uint32_t want, uint64_t bytes)
{
    if (atomic_fetch_sub(&e->left[want], bytes) != bytes)
        return;
    (void)pthread_mutex_lock(&e->lock);
    if (e->nlanded == 0)
        e->stats.first_ns = ckpt_now_ns();
    e->landed[e->nlanded++] = want;
    (void)pthread_cond_broadcast(&e->news);
    (void)pthread_mutex_unlock(&e->lock);
}

/* ---- messages from other ranks ---- */

struct abort_message {
    uint32_t code;
    char text[CKPT_ERR_TEXT];
};

/* A box in another rank's words. */
struct assist_message {
    uint64_t id, off;
    uint32_t tensor, rank, source, unused;
    uint64_t lo[CKPT_MAX_RANK], n[CKPT_MAX_RANK];
};

struct assisted_message { /* then the bytes */
    struct ckpt_ctl_head head;
    uint64_t id;
    uint32_t good;
};
_Static_assert(sizeof(struct assisted_message) <= ASSIST_HEAD, "the reply's head has its room");

static void on_abort(struct ckpt_engine *e, const unsigned char *data, size_t len)
{
    struct abort_message m;
    struct ckpt_err err = {0};

    if (len != sizeof m)
        return;
    memcpy(&m, data, sizeof m);
    m.text[CKPT_ERR_TEXT - 1] = '\0';
    if (m.code == CKPT_OK || m.code > CKPT_CANCELLED || !m.text[0])
        (void)ckpt_fail(&err, CKPT_PEER, "another rank failed, and its message is broken");
    else
        (void)ckpt_fail(&err, (enum ckpt_code)m.code, "%s", m.text);
    ckpt_engine_fail(e, &err, false);
}

static void on_assist(struct ckpt_engine *e, uint32_t peer, const unsigned char *data, size_t len)
{
    struct assist_message m;
    struct ckpt_assist *a;

    if (len != sizeof m)
        return;
    memcpy(&m, data, sizeof m);
    if (m.tensor >= e->cat->tensors.len || !(a = calloc(1, sizeof *a)))
        return;
    const struct ckpt_tensor *t = &e->cat->tensors.ptr[m.tensor];
    a->peer = peer;
    a->id = m.id;
    a->tensor = m.tensor;
    a->source = m.source;
    a->off = m.off;
    a->box.rank = m.rank;
    memcpy(a->box.lo, m.lo, sizeof m.lo);
    memcpy(a->box.n, m.n, sizeof m.n);
    if (!ckpt_box_within(&a->box, t->dim, t->rank)) {
        free(a);
        return;
    }
    (void)pthread_mutex_lock(&e->lock);
    a->next = e->assist;
    e->assist = a;
    (void)pthread_cond_signal(&e->work);
    (void)pthread_mutex_unlock(&e->lock);
}

static void on_assisted(struct ckpt_engine *e, const unsigned char *data, size_t len)
{
    struct assisted_message m;
    struct ckpt_retry **at, *r;
    struct ckpt_err err = {0};

    if (len < ASSIST_HEAD)
        return;
    memcpy(&m, data, sizeof m);
    (void)pthread_mutex_lock(&e->lock);
    for (at = &e->retry; *at && (*at)->id != m.id;)
        at = &(*at)->next;
    r = *at;
    struct ckpt_box box;
    if (r) {
        ckpt_plan_unit_box(e->plan, r->unit, &box);
        uint64_t need =
            ckpt_box_numel(&box) * ckpt_dtype_size(ckpt_plan_unit_tensor(e->plan, r->unit)->dtype);
        *at = r->next;
        if (m.good && len - ASSIST_HEAD == need) {
            memcpy(r->slot->read + r->slot->unit_off[r->unit - r->slot->lo], data + ASSIST_HEAD,
                   need);
            r->next = e->refill;
            e->refill = r;
            (void)pthread_cond_signal(&e->work);
            atomic_fetch_add(&e->stats.retries, 1);
            r = NULL;
        } else {
            err = r->err;
        }
    }
    (void)pthread_mutex_unlock(&e->lock);
    if (r)
        ckpt_engine_fail(e, &err, true);
    free(r);
}

static void on_message(void *ctx, uint32_t peer, const unsigned char *data, size_t len)
{
    struct ckpt_engine *e = ctx;
    struct ckpt_ctl_head head;

    memcpy(&head, data, sizeof head);
    if (head.type == CKPT_CTL_ABORT)
        on_abort(e, data + sizeof head, len - sizeof head);
    else if (head.type == CKPT_CTL_ASSIST)
        on_assist(e, peer, data + sizeof head, len - sizeof head);
    else if (head.type == CKPT_CTL_ASSISTED)
        on_assisted(e, data, len);
}

/* ---- the pump ---- */

static int post_receives(struct ckpt_engine *e, struct ckpt_err *err)
{
    for (; e->next_receive < e->plan->nwindow; e->next_receive++) {
        struct ckpt_slot *s = &e->slot[e->next_receive % e->opt.slots];
        (void)pthread_mutex_lock(&e->lock);
        bool now = s->open && s->window == e->next_receive;
        (void)pthread_mutex_unlock(&e->lock);
        if (!now)
            return 0;
        if (ckpt_slot_receives(e, s, err) < 0 || ckpt_slot_post(e, s->in, s->nin, err) < 0)
            return -1;
        (void)pthread_mutex_lock(&e->lock);
        s->unplaced = (uint32_t)s->nin;
        s->received_posted = true;
        (void)pthread_mutex_unlock(&e->lock);
    }
    return 0;
}

static int post_sends(struct ckpt_engine *e, struct ckpt_err *err)
{
    for (; e->next_send < e->next_receive; e->next_send++) {
        struct ckpt_slot *s = &e->slot[e->next_send % e->opt.slots];
        (void)pthread_mutex_lock(&e->lock);
        bool now = s->open && s->window == e->next_send && s->unread == 0;
        (void)pthread_mutex_unlock(&e->lock);
        if (!now)
            return 0;
        if (ckpt_slot_sends(e, s, err) < 0 || ckpt_slot_post(e, s->out, s->nout, err) < 0)
            return -1;
        (void)pthread_mutex_lock(&e->lock);
        s->unsent = (uint32_t)s->nout;
        s->sends_posted = true;
        ckpt_slot_settle(e, s);
        (void)pthread_mutex_unlock(&e->lock);
    }
    return 0;
}

/* Messages that are done: sent ones are forgotten, received ones go to the workers. */
static void harvest_slot(struct ckpt_engine *e, struct ckpt_slot *s)
{
    for (size_t i = 0; i < s->nout && s->sends_posted; i++) {
        struct ckpt_message *m = &s->out[i];
        if (m->handled || !m->xfer.done)
            continue;
        m->handled = true;
        s->unsent--;
        atomic_fetch_add(&e->stats.sent, m->xfer.len);
    }
    for (size_t i = 0; i < s->nin && s->received_posted; i++) {
        struct ckpt_message *m = &s->in[i];
        if (m->handled || !m->xfer.done)
            continue;
        m->handled = true;
        m->next = NULL;
        *e->place_tail = m;
        e->place_tail = &m->next;
        atomic_fetch_add(&e->stats.received, m->xfer.len);
        (void)pthread_cond_signal(&e->work);
    }
    ckpt_slot_settle(e, s);
}

static void harvest(struct ckpt_engine *e)
{
    (void)pthread_mutex_lock(&e->lock);
    for (uint32_t i = 0; i < e->opt.slots; i++)
        if (e->slot[i].open)
            harvest_slot(e, &e->slot[i]);
    (void)pthread_mutex_unlock(&e->lock);
}

/* Ask the next rank for what we can't read. */
static int ask_retries(struct ckpt_engine *e, uint64_t now, struct ckpt_err *err)
{
    int rc = 0;

    (void)pthread_mutex_lock(&e->lock);
    for (struct ckpt_retry *r = e->retry; r && rc == 0; r = r->next) {
        const struct ckpt_unit *unit = &e->plan->units.ptr[r->unit];
        struct assist_message m = {.id = r->id, .source = unit->source, .off = unit->off};
        struct ckpt_box box;
        /* the rank that was asked notices first that its own read is slow, and says so */
        if (r->asked_ms && now - r->asked_ms > (uint64_t)e->opt.read_timeout_ms * 3 / 2 + 1000)
            rc = ckpt_fail(err, r->err.code, "%s", r->err.text);
        if (r->asked_ms)
            continue;
        r->asked_ms = now;
        ckpt_plan_unit_box(e->plan, r->unit, &box);
        m.tensor = (uint32_t)(ckpt_plan_unit_tensor(e->plan, r->unit) - e->cat->tensors.ptr);
        m.rank = box.rank;
        memcpy(m.lo, box.lo, box.rank * sizeof *m.lo);
        memcpy(m.n, box.n, box.rank * sizeof *m.n);
        if (ckpt_comm_send(e->comm, (e->self + 1) % e->comm->x->size, CKPT_CTL_ASSIST, &m, sizeof m,
                           NULL) < 0)
            rc = ckpt_fail(err, r->err.code, "%s", r->err.text);
    }
    (void)pthread_mutex_unlock(&e->lock);
    return rc;
}

static void answer_assists(struct ckpt_engine *e)
{
    (void)pthread_mutex_lock(&e->lock);
    struct ckpt_assist *a = e->assisted;
    e->assisted = NULL;
    (void)pthread_mutex_unlock(&e->lock);
    while (a) {
        struct ckpt_assist *next = a->next;
        struct assisted_message m = {{CKPT_CTL_ASSISTED, e->comm->epoch}, a->id, a->good};
        unsigned char refusal[ASSIST_HEAD] = {0}, *msg = a->good ? a->data : refusal;
        memcpy(msg, &m, sizeof m);
        (void)e->comm->x->ops->ctl_send(e->comm->x, a->peer, msg,
                                        ASSIST_HEAD + (a->good ? a->len : 0), NULL);
        free(a->data);
        free(a);
        a = next;
    }
}

/* A read that does not come back. */
static int check_reads(struct ckpt_engine *e, uint64_t now, struct ckpt_err *err)
{
    for (uint32_t i = 0; i < e->opt.threads; i++) {
        const uint64_t since = atomic_load(&e->worker[i].since_ms);
        if (since == 0 || now < since + e->opt.read_timeout_ms)
            continue;
        const uint32_t source = atomic_load(&e->worker[i].source);
        const uint64_t off = atomic_load(&e->worker[i].off);
        ckpt_cleanup(ckpt_freep) char *name =
            source < e->cat->sources.len ? ckpt_source_name(e->cat->sources.ptr[source]) : NULL;
        return ckpt_fail(err, CKPT_TIMEOUT,
                         "tensor '%s': reading '%s' at byte %" PRIu64 " takes longer than %.1f s",
                         e->cat->tensors.ptr[atomic_load(&e->worker[i].tensor)].name,
                         name ? name : "its files", off, e->opt.read_timeout_ms / 1000.0);
    }
    return 0;
}

/* What a device waits for, it does not say: rank 0 hears of all ranks, and they of rank 0. */
static int check_silence(struct ckpt_engine *e, uint64_t now, struct ckpt_err *err)
{
    const uint32_t limit = e->opt.exchange_timeout_ms;

    for (uint32_t r = 0; r < e->size; r++)
        if (r != e->self && (e->self == 0 || r == 0) &&
            now > e->comm->heard_ms[r] + (e->self == 0 ? limit : (uint64_t)limit * 3 / 2))
            return ckpt_fail(err, CKPT_TIMEOUT, "rank %" PRIu32 " was silent for %.1f s", r,
                             limit / 1000.0);
    if (now > e->moved_ms + (uint64_t)limit * 2)
        return ckpt_fail(err, CKPT_TIMEOUT,
                         "window %" PRIu32 " of %" PRIu32 " is stuck: nothing moved for %.1f s",
                         e->nclosed, e->plan->nwindow, limit / 500.0);
    return 0;
}

/* Who owes us something, and is silent? */
static int check_peers(struct ckpt_engine *e, uint64_t now, struct ckpt_err *err)
{
    struct ckpt_xport *x = e->comm->x;

    for (uint32_t r = 0; r < x->size; r++)
        if (r != e->self && ckpt_comm_lost(e->comm, r))
            return ckpt_fail(err, CKPT_PEER, "rank %" PRIu32 " is gone", r);
    if (now < e->moved_ms + e->opt.exchange_timeout_ms)
        return 0;
    if (e->device)
        return check_silence(e, now, err);
    int rc = 0;
    (void)pthread_mutex_lock(&e->lock);
    for (uint32_t i = 0; i < e->opt.slots && rc == 0; i++)
        for (size_t k = 0; e->slot[i].open && k < e->slot[i].nin && rc == 0; k++) {
            const struct ckpt_xfer *t = &e->slot[i].in[k].xfer;
            if (!t->done && now > e->comm->heard_ms[t->peer] + e->opt.exchange_timeout_ms)
                rc = ckpt_fail(err, CKPT_TIMEOUT,
                               "rank %" PRIu32 " sent nothing for %.1f s (window %" PRIu32 ")",
                               t->peer, e->opt.exchange_timeout_ms / 1000.0, e->slot[i].window);
        }
    (void)pthread_mutex_unlock(&e->lock);
    return rc;
}

static void tell_abort(struct ckpt_comm *comm, const struct ckpt_err *why)
{
    struct abort_message m = {.code = (uint32_t)why->code};

    memcpy(m.text, why->text, sizeof m.text);
    for (uint32_t r = 0; r < comm->x->size; r++)
        if (r != comm->x->rank)
            (void)ckpt_comm_send(comm, r, CKPT_CTL_ABORT, &m, sizeof m, NULL);
}

/* ---- the end ---- */

void ckpt_engine_own(const struct ckpt_engine *e, struct ckpt_load_stats *s)
{
    const struct ckpt_engine_stats *t = &e->stats;

    *s = (struct ckpt_load_stats){
        .needed_bytes = e->needed_bytes,
        .unique_bytes = e->unique_bytes,
        .read_bytes = atomic_load(&t->reads.source_bytes),
        .reads = atomic_load(&t->reads.source_reads),
        .sent_bytes = atomic_load(&t->sent),
        .received_bytes = atomic_load(&t->received),
        .buffer_bytes = t->buffers,
        .retries = atomic_load(&t->retries),
        .device_bytes = t->device_buffers,
        .wall_s = (double)((t->end_ns ? t->end_ns : ckpt_now_ns()) - t->start_ns) / 1e9,
        .first_s = t->first_ns ? (double)(t->first_ns - t->start_ns) / 1e9 : 0,
        .read_s = (double)atomic_load(&t->read_ns) / 1e9,
        .place_s = (double)atomic_load(&t->place_ns) / 1e9,
        .send_s = (double)atomic_load(&t->exchange_ns) / 1e9,
    };
}

static double larger(double a, double b) { return a > b ? a : b; }

static int add_stats(void *ctx, const unsigned char *const *data, const size_t *len,
                     struct ckpt_str *answer, struct ckpt_err *err)
{
    const struct ckpt_engine *e = ctx;
    struct ckpt_load_stats sum = {.unique_bytes = e->unique_bytes};

    for (uint32_t r = 0; r < e->comm->x->size; r++) {
        struct ckpt_load_stats s;
        if (len[r] != sizeof s)
            return ckpt_fail(err, CKPT_CONFLICT, "rank %" PRIu32 " runs another version", r);
        memcpy(&s, data[r], sizeof s);
        sum.needed_bytes += s.needed_bytes;
        sum.read_bytes += s.read_bytes;
        sum.reads += s.reads;
        sum.sent_bytes += s.sent_bytes;
        sum.received_bytes += s.received_bytes;
        sum.buffer_bytes = ckpt_max_u64(sum.buffer_bytes, s.buffer_bytes);
        sum.retries += s.retries;
        sum.device_bytes = ckpt_max_u64(sum.device_bytes, s.device_bytes);
        sum.wall_s = larger(sum.wall_s, s.wall_s);
        sum.first_s = larger(sum.first_s, s.first_s);
        sum.read_s += s.read_s;
        sum.place_s += s.place_s;
        sum.send_s += s.send_s;
    }
    ckpt_str_append(answer, (const char *)&sum, sizeof sum);
    return 0;
}

/* Nothing is written to destinations from now on. What is being placed takes a moment; but if a
 * read of the page cache, which the kernel does not let wait, waits, nobody hangs for it. */
static void await_placing(struct ckpt_engine *e)
{
    const struct timespec until = ckpt_deadline(e->opt.read_timeout_ms);

    (void)pthread_mutex_lock(&e->lock);
    while (e->placing && pthread_cond_timedwait(&e->news, &e->lock, &until) != ETIMEDOUT)
        ;
    (void)pthread_mutex_unlock(&e->lock);
}

/* A load that has all bytes succeeds only if they are of one save. */
static void check_files(struct ckpt_engine *e)
{
    struct ckpt_err err = {0};

    (void)pthread_mutex_lock(&e->lock);
    const bool failed = e->err.code != CKPT_OK;
    (void)pthread_mutex_unlock(&e->lock);
    if (!failed && ckpt_load_files_unchanged(e->view, &err) < 0)
        ckpt_engine_fail(e, &err, true);
}

/* Nothing moves any more on this rank, for good or bad: agree with the others. */
static int begin_final(struct ckpt_engine *e, struct ckpt_err *err)
{
    struct ckpt_load_stats s;

    check_files(e);
    (void)pthread_mutex_lock(&e->lock);
    const bool failed = e->err.code != CKPT_OK;
    const struct ckpt_err why = e->err;
    const bool own = e->own;
    (void)pthread_mutex_unlock(&e->lock);
    if (failed) {
        if (own)
            tell_abort(e->comm, &why);
        await_placing(e);
        e->leak = !e->comm->x->ops->cancel(e->comm->x);
        e->comm->broken = e->comm->x->ops->one_shot;
    }
    ckpt_engine_own(e, &s);
    e->final = true;
    e->round = (struct ckpt_round){.judge = add_stats, .ctx = e};
    return ckpt_round_start(&e->round, e->comm, failed ? -1 : 0, &s, sizeof s,
                            e->opt.exchange_timeout_ms, &why, err);
}

static void conclude(struct ckpt_engine *e, int rc, const struct ckpt_err *err,
                     const unsigned char *data, size_t len)
{
    if (rc == 0 && len == sizeof e->job)
        memcpy(&e->job, data, len);
    ckpt_round_release(&e->round);
    if (rc < 0) /* others may have given up their side */
        e->comm->broken |= e->comm->x->ops->one_shot;
    ckpt_comm_end(e->comm);
    (void)pthread_mutex_lock(&e->lock);
    e->stats.end_ns = ckpt_now_ns();
    e->result = rc;
    if (rc < 0)
        e->err = *err;
    e->stopped = e->finished = true;
    (void)pthread_cond_broadcast(&e->work);
    (void)pthread_cond_broadcast(&e->news);
    (void)pthread_mutex_unlock(&e->lock);
}

/* One turn while windows are open: 1 if something moved. */
static int load_turn(struct ckpt_engine *e, struct ckpt_err *err)
{
    const uint64_t now = ckpt_now_ms(), begin = ckpt_now_ns();
    bool moved = false, worked = false;

    /* a rank that reads all for itself has nothing to post: its workers close the slots alone */
    if (!e->device && e->plan->nowner > 1 && (post_receives(e, err) < 0 || post_sends(e, err) < 0))
        return -1;
    if (ckpt_comm_poll(e->comm, &moved, err) < 0)
        return -1;
    if (!e->device)
        harvest(e);
    else if (ckpt_device_turn(e, &worked, err) < 0)
        return -1;
    answer_assists(e);
    if (e->device ? worked : moved)
        e->moved_ms = now;
    moved |= worked;
    if (e->plan->nowner > 1)
        atomic_fetch_add(&e->stats.exchange_ns, ckpt_now_ns() - begin);
    ckpt_comm_alive(e->comm, e->opt.exchange_timeout_ms);
    if (ask_retries(e, now, err) < 0 || check_reads(e, now, err) < 0 ||
        check_peers(e, now, err) < 0)
        return -1;
    return moved;
}

static int final_turn(struct ckpt_engine *e, bool *ret_moved)
{
    const unsigned char *data = NULL;
    size_t len = 0;
    struct ckpt_err err = {0};

    (void)ckpt_comm_poll(e->comm, ret_moved, NULL);
    answer_assists(e);
    ckpt_comm_alive(e->comm, e->opt.exchange_timeout_ms);
    int step = ckpt_round_step(&e->round, &data, &len, &err);
    if (step <= 0)
        conclude(e, step, &err, data, len);
    return step;
}

/* A rank that has failed says why, and closes: its word may come a moment after its end. */
static void hear_why(struct ckpt_engine *e)
{
    for (int i = 0; i < HEAR_TURNS; i++) {
        bool moved, known;
        (void)ckpt_comm_poll(e->comm, &moved, NULL);
        (void)pthread_mutex_lock(&e->lock);
        known = e->err.code != CKPT_OK;
        (void)pthread_mutex_unlock(&e->lock);
        if (known)
            return;
        e->comm->x->ops->wait(e->comm->x, HEAR_MS);
    }
}

/* A device does not wake us. */
static const struct timespec device_nap = {0, 50 * 1000};

/* One turn of the pump, asleep for max_ms at most. True: it is over. */
static bool pump_turn(struct ckpt_engine *e, uint32_t max_ms)
{
    struct ckpt_err err = {0};
    bool moved = false;

    if (!e->final) {
        int rc = load_turn(e, &err);
        if (rc < 0 && err.code == CKPT_PEER)
            hear_why(e);
        if (rc < 0)
            ckpt_engine_fail(e, &err, true);
        moved = rc > 0;
        (void)pthread_mutex_lock(&e->lock);
        bool over = e->stopped || e->nclosed == e->plan->nwindow;
        (void)pthread_mutex_unlock(&e->lock);
        if (over && begin_final(e, &err) < 0) {
            conclude(e, -1, &err, NULL, 0);
            return true;
        }
        moved |= over;
    } else if (final_turn(e, &moved) <= 0) {
        return true;
    }
    if (!moved && !e->final && e->device && ckpt_device_busy(e))
        (void)nanosleep(&device_nap, NULL);
    else if (!moved)
        e->comm->x->ops->wait(e->comm->x, max_ms);
    return false;
}

static void *pump_run(void *arg)
{
    struct ckpt_engine *e = arg;

    if (e->device)
        e->device->ops->adopt(e->device);
    while (!pump_turn(e, PUMP_SLEEP_MS))
        ;
    ckpt_engine_unref(e);
    return NULL;
}

/* ---- starting ---- */

static int index_receives(struct ckpt_engine *e, struct ckpt_err *err)
{
    size_t at = 0;

    if (!(e->receive_first = malloc((e->plan->nwindow + 1) * sizeof *e->receive_first)))
        return ckpt_nomem(err);
    for (uint32_t w = 0; w < e->plan->nwindow; w++) {
        e->receive_first[w] = at;
        while (at < e->receives.len && e->receives.ptr[at].window == w)
            at++;
    }
    e->receive_first[e->plan->nwindow] = at;
    return 0;
}

static int make_slots(struct ckpt_engine *e, struct ckpt_err *err)
{
    const uint64_t reading = e->opt.bounce + CKPT_REGION_KEPT * e->opt.cost.bound;
    uint32_t most = 0;

    for (uint32_t w = 0; w < e->plan->nwindow; w++) {
        uint32_t lo, hi;
        ckpt_plan_piece(e->plan, e->owner, w, &lo, &hi);
        most = hi - lo > most ? hi - lo : most;
    }
    if (!(e->slot = calloc(e->opt.slots, sizeof *e->slot)))
        return ckpt_nomem(err);
    for (uint32_t i = 0; i < e->opt.slots; i++) {
        struct ckpt_slot *s = &e->slot[i];
        s->unit_off = malloc(((size_t)most + 1) * sizeof *s->unit_off);
        if (!s->unit_off)
            return ckpt_nomem(err);
        if (e->device && ckpt_device_slot_init(e, s, err) < 0)
            return -1;
        if (e->device)
            continue;
        s->read = map(e->sizes.read);
        s->stage = map(e->sizes.stage);
        s->receive = map(e->sizes.receive);
        if ((e->sizes.read && !s->read) || (e->sizes.stage && !s->stage) ||
            (e->sizes.receive && !s->receive))
            return ckpt_nomem(err);
    }
    e->stats.buffers = e->opt.slots * e->sizes.host + e->opt.threads * reading;
    e->stats.device_buffers = e->opt.slots * e->sizes.device;
    return 0;
}

static int make_wants(struct ckpt_engine *e, const struct ckpt_target *target, struct ckpt_err *err)
{
    const struct ckpt_wants *w = &e->roster->table[e->roster->class_of[e->self]];

    e->target = malloc((e->ntarget + 1) * sizeof *e->target);
    e->left = calloc(e->ntarget + 1, sizeof *e->left);
    e->landed = malloc((e->ntarget + 1) * sizeof *e->landed);
    if (!e->target || !e->left || !e->landed)
        return ckpt_nomem(err);
    if (e->ntarget)
        memcpy(e->target, target, e->ntarget * sizeof *e->target);
    for (size_t i = 0; i < e->ntarget; i++) {
        const uint32_t t = w->entries.ptr[i].tensor;
        const uint64_t numel = ckpt_box_numel(&target[i].box);
        atomic_init(&e->left[i], numel * ckpt_dtype_size(e->cat->tensors.ptr[t].dtype));
        if (numel == 0)
            e->landed[e->nlanded++] = i;
    }
    return 0;
}

static int start_threads(struct ckpt_engine *e, struct ckpt_err *err)
{
    pthread_attr_t detached;
    uint32_t started = 0;

    if (!(e->worker = calloc(e->opt.threads, sizeof *e->worker)))
        return ckpt_nomem(err);
    for (uint32_t i = 0; i < e->opt.threads; i++)
        if (ckpt_bounce_init(&e->worker[i].bounce, e->opt.bounce, err) < 0)
            return -1;
    (void)pthread_attr_init(&detached);
    (void)pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    for (uint32_t i = 0; i < e->opt.threads; i++) {
        pthread_t id;
        e->worker[i].e = e;
        atomic_fetch_add(&e->refs, 1);
        (void)pthread_mutex_lock(&e->lock);
        e->nworker++;
        (void)pthread_mutex_unlock(&e->lock);
        if (pthread_create(&id, &detached, ckpt_worker_run, &e->worker[i]) != 0) {
            atomic_fetch_sub(&e->refs, 1);
            (void)pthread_mutex_lock(&e->lock);
            e->nworker--;
            (void)pthread_mutex_unlock(&e->lock);
            break;
        }
        started++;
    }
    (void)pthread_attr_destroy(&detached);
    if (started == 0)
        return ckpt_fail(err, CKPT_NOMEM, "no thread could be started");
    if (e->comm->x->driven)
        return 0;
    atomic_fetch_add(&e->refs, 1);
    if (pthread_create(&e->pump, NULL, pump_run, e) != 0) {
        atomic_fetch_sub(&e->refs, 1);
        return ckpt_fail(err, CKPT_NOMEM, "no thread could be started");
    }
    e->has_pump = true;
    return 0;
}

static void stop_workers(struct ckpt_engine *e)
{
    (void)pthread_mutex_lock(&e->lock);
    e->stopped = e->finished = true;
    (void)pthread_cond_broadcast(&e->work);
    (void)pthread_mutex_unlock(&e->lock);
}

int ckpt_engine_start(struct ckpt_engine_parts *parts, const struct ckpt_engine_options *opt,
                      const struct ckpt_engine_sizes *sizes, struct ckpt_engine **ret,
                      struct ckpt_err *err)
{
    struct ckpt_engine *e = calloc(1, sizeof *e);

    if (!e)
        return ckpt_nomem(err);
    atomic_init(&e->refs, 1);
    (void)pthread_mutex_init(&e->lock, NULL);
    (void)pthread_cond_init(&e->work, NULL);
    ckpt_cond_init(&e->news);
    e->view = ckpt_view_hold(parts->view);
    e->cat = parts->roster->cat;
    e->reading = (struct ckpt_reading){parts->view->reading.slabs, &e->stats.reads};
    e->comm = parts->comm;
    e->self = e->comm->x->rank;
    e->size = e->comm->x->size;
    e->plan = ckpt_steal(&parts->plan);
    e->roster = ckpt_steal(&parts->roster);
    e->receives.ptr = parts->receives.ptr;
    e->receives.len = parts->receives.len;
    e->receives.cap = parts->receives.cap;
    memset(&parts->receives, 0, sizeof parts->receives);
    e->ntarget = parts->ntarget;
    e->needed_bytes = parts->needed_bytes;
    e->unique_bytes = parts->unique_bytes;
    e->opt = *opt;
    e->sizes = *sizes;
    if ((e->device = e->comm->x->device))
        e->device->ops->ref(e->device);
    e->place_tail = &e->place;
    while (e->plan->owner[e->owner] != e->self)
        e->owner++;
    e->stats.start_ns = ckpt_now_ns();
    e->moved_ms = ckpt_now_ms();
    if (index_receives(e, err) < 0 || make_slots(e, err) < 0 ||
        make_wants(e, parts->target, err) < 0) {
        ckpt_engine_unref(e);
        return -1;
    }
    ckpt_comm_begin(e->comm, on_message, e);
    if (start_threads(e, err) < 0) {
        stop_workers(e);
        ckpt_comm_begin_again(e->comm);
        ckpt_engine_unref(e);
        return -1;
    }
    *ret = e;
    return 0;
}

static void ignore_message(void *ctx, uint32_t peer, const unsigned char *data, size_t len)
{
    (void)ctx, (void)peer, (void)data, (void)len;
}

void ckpt_engine_refuse(struct ckpt_comm *comm, uint32_t timeout_ms, struct ckpt_err *err)
{
    const struct ckpt_load_stats none = {0};
    struct ckpt_round round = {0};
    struct ckpt_err why = {0};

    if (comm->x->size == 1)
        return;
    (void)ckpt_fail(&why, err->code, "rank %" PRIu32 ": %s", comm->x->rank, err->text);
    ckpt_comm_begin(comm, ignore_message, NULL);
    tell_abort(comm, &why);
    (void)ckpt_round_run(&round, comm, -1, &none, sizeof none, timeout_ms, NULL, NULL, &why);
    comm->broken |= comm->x->ops->one_shot;
    ckpt_comm_end(comm);
    *err = why;
}

/* ---- waiting ---- */

/* Until the load is over, or a want has landed that was not taken (if `landed`). False: time is up.
 * Returns with the lock held. */
static bool wait_for(struct ckpt_engine *e, uint32_t timeout_ms, bool landed)
{
    const uint64_t until = ckpt_now_ms() + timeout_ms;
    const struct timespec t = ckpt_deadline(timeout_ms);

    (void)pthread_mutex_lock(&e->lock);
    while (!e->finished && !(landed && e->ntaken < e->nlanded)) {
        if (e->has_pump) {
            int rc = timeout_ms == UINT32_MAX ? pthread_cond_wait(&e->news, &e->lock)
                                              : pthread_cond_timedwait(&e->news, &e->lock, &t);
            if (rc == ETIMEDOUT)
                return false;
            continue;
        }
        uint64_t now = ckpt_now_ms();
        (void)pthread_mutex_unlock(&e->lock);
        bool over =
            pump_turn(e, (uint32_t)ckpt_min_u64(PUMP_SLEEP_MS, until > now ? until - now : 0));
        (void)pthread_mutex_lock(&e->lock);
        if (!over && !e->finished && timeout_ms != UINT32_MAX && ckpt_now_ms() >= until)
            return false;
    }
    return true;
}

int ckpt_engine_wait(struct ckpt_engine *e, uint32_t timeout_ms, struct ckpt_err *err)
{
    int rc = wait_for(e, timeout_ms, false) ? e->result : 1;

    if (rc < 0)
        (void)ckpt_fail(err, e->err.code, "%s", e->err.text);
    (void)pthread_mutex_unlock(&e->lock);
    return rc;
}

int ckpt_engine_next(struct ckpt_engine *e, uint32_t timeout_ms, size_t *ret_want,
                     struct ckpt_err *err)
{
    int rc = 1;

    if (wait_for(e, timeout_ms, true)) {
        if (e->finished && e->result < 0)
            rc = ckpt_fail(err, e->err.code, "%s", e->err.text);
        else if (e->ntaken < e->nlanded)
            rc = 0;
        else
            rc = 2;
    }
    if (rc == 0)
        *ret_want = e->landed[e->ntaken++];
    (void)pthread_mutex_unlock(&e->lock);
    return rc;
}

void ckpt_engine_cancel(struct ckpt_engine *e)
{
    struct ckpt_err err = {0};

    (void)ckpt_fail(&err, CKPT_CANCELLED, "the load was cancelled");
    ckpt_engine_fail(e, &err, true);
}

/* Until all workers have left but for those that the operating system does not return from: what
 * the load had is given back now, not some time. */
static void await_workers(struct ckpt_engine *e)
{
    const struct timespec look = {0, 50000};

    for (;;) {
        uint32_t reading = 0;
        (void)pthread_mutex_lock(&e->lock);
        for (uint32_t i = 0; i < e->opt.threads && e->worker; i++)
            reading += atomic_load(&e->worker[i].since_ms) != 0;
        const bool over = e->nworker <= reading;
        (void)pthread_mutex_unlock(&e->lock);
        if (over)
            return;
        (void)nanosleep(&look, NULL);
    }
}

void ckpt_engine_end(struct ckpt_engine *e)
{
    (void)pthread_mutex_lock(&e->lock);
    bool over = e->finished;
    (void)pthread_mutex_unlock(&e->lock);
    if (!over) {
        ckpt_engine_cancel(e);
        (void)ckpt_engine_wait(e, UINT32_MAX, NULL);
    }
    if (e->has_pump)
        (void)pthread_join(e->pump, NULL);
    await_workers(e);
    ckpt_engine_unref(e);
}

const struct ckpt_load_stats *ckpt_engine_job(const struct ckpt_engine *e) { return &e->job; }
