/* SPDX-License-Identifier: Apache-2.0 */
/* The pump: its turns, the timeouts, and the end, on which all ranks agree. */
#include <errno.h>
#include <inttypes.h>
#include <string.h>
#include <time.h>

#include "base/ckd.h"
#include "base/clock.h"
#include "base/err.h"
#include "base/mem.h"
#include "load/engine/engine_inner.h"
#include "load/engine/same.h"

enum {
    PUMP_SLEEP_MS =
        20,          /* the longest sleep of the pump; transfers and workers wake it, not clocks */
    HEAR_TURNS = 20, /* turns of HEAR_MS, so 100 ms: how long a rank with a lost connection ... */
    HEAR_MS = 5,     /* ... waits to hear from others why the load has failed */
    LOOK_MS = 50,    /* between two looks for lost ranks, which cost a little for each rank */
};

/* ---- deadlines ---- */

/* TIMEOUT if a worker has been in one read for longer than read_timeout_ms, or if this rank, for
 * which others wait, has been in it for exchange_timeout_ms without reading anything. */
static int check_reads(struct ckpt_engine *e, uint64_t now, struct ckpt_err *err)
{
    const uint64_t arrived = atomic_load(&e->stats.arrived);

    if (arrived != e->arrived)
        e->read_ms = now;
    e->arrived = arrived;
    for (uint32_t i = 0; i < e->opt.threads; i++) {
        const uint64_t since = atomic_load(&e->worker[i].since_ms);
        const uint64_t idle = ckpt_max_u64(since, e->read_ms);
        const bool slow = now >= since + e->opt.read_timeout_ms;
        if (since == 0 || (!slow && (e->size == 1 || now < idle + e->opt.exchange_timeout_ms)))
            continue;
        const uint32_t source = atomic_load(&e->worker[i].source);
        const uint64_t off = atomic_load(&e->worker[i].off);
        ckpt_cleanup(ckpt_freep) char *name =
            source < e->cat->sources.len ? ckpt_source_name(e->cat->sources.ptr[source]) : NULL;
        const char *file = name ? name : "its files";
        const char *reader =
            source < e->cat->sources.len ? ckpt_source_reader(e->cat->sources.ptr[source]) : NULL;
        if (!slow)
            return ckpt_fail(err, CKPT_TIMEOUT,
                             "rank %" PRIu32 " has been reading '%s' at byte %" PRIu64
                             "%s%s for %.1f s, and other ranks wait for it",
                             e->self, file, off, reader ? " from " : "", reader ? reader : "",
                             e->opt.exchange_timeout_ms / 1000.0);
        return ckpt_fail(
            err, CKPT_TIMEOUT,
            "tensor '%s': reading '%s' at byte %" PRIu64 "%s%s takes longer than %.1f s",
            e->cat->tensors.ptr[atomic_load(&e->worker[i].tensor)].name, file, off,
            reader ? " from " : "", reader ? reader : "", e->opt.read_timeout_ms / 1000.0);
    }
    return 0;
}

/* Is this rank in a read? That takes limited time. */
static bool is_reading(const struct ckpt_engine *e)
{
    for (uint32_t i = 0; i < e->opt.threads; i++)
        if (atomic_load(&e->worker[i].since_ms))
            return true;
    return false;
}

/* Has this rank read or moved bytes since it looked last, or is it about to? */
static bool was_busy(struct ckpt_engine *e)
{
    const struct ckpt_engine_stats *s = &e->stats;
    const uint64_t before = e->done;

    e->done = atomic_load(&s->sent) + atomic_load(&s->received) + atomic_load(&s->arrived) +
              e->comm->x->moved;
    return e->done != before || is_reading(e);
}

/* TIMEOUT if no rank of the job has done anything for twice the timeout, although all are alive:
 * they wait for each other. */
static int check_stuck(const struct ckpt_engine *e, uint64_t now, struct ckpt_err *err)
{
    const uint64_t limit = (uint64_t)e->opt.exchange_timeout_ms * 2;

    return now <= e->comm->busy_ms + limit
               ? 0
               : ckpt_fail(err, CKPT_TIMEOUT,
                           "window %" PRIu32 " of %zu is stuck: no rank has read or moved anything "
                           "for %.1f s",
                           e->nclosed, e->plan->windows.len, (double)limit / 1000);
}

/* TIMEOUT if a neighbour in the tree of ranks was silent for so long: it has sent heartbeats during
 * this load, and sends none now. A neighbour that has not begun the load is late only if this rank
 * exchanges data. */
static int check_silence(struct ckpt_engine *e, uint32_t limit_ms, struct ckpt_err *err)
{
    for (uint32_t i = 0, r; ckpt_tree_neighbour(e->self, e->size, i, &r); i++)
        if ((e->comm->peer[r].heard_ms > e->comm->begun_ms || e->plan->exchanges) &&
            !ckpt_comm_lost(e->comm, r) && ckpt_comm_check_heard(e->comm, r, limit_ms, err) < 0)
            return -1;
    return 0;
}

/* Has a neighbour missed its last heartbeats? It may be frozen. */
static bool is_one_silent(struct ckpt_engine *e)
{
    return check_silence(e, e->opt.exchange_timeout_ms / 8, NULL) < 0;
}

/* Now and then: fail if a rank is gone or frozen, or if nothing has moved for too long. */
static int check_peers(struct ckpt_engine *e, uint64_t now, struct ckpt_err *err)
{
    struct ckpt_xport *x = e->comm->x;

    if (now < e->looked_ms + LOOK_MS)
        return 0;
    e->looked_ms = now;
    if (was_busy(e))
        e->comm->busy_ms = now;
    for (uint32_t r = 0; r < x->size; r++)
        if (r != e->self && ckpt_comm_lost(e->comm, r))
            return ckpt_xport_fail_gone(e->comm->x, r, err);
    return check_silence(e, e->opt.exchange_timeout_ms, err) < 0 || check_stuck(e, now, err) < 0
               ? -1
               : 0;
}

/* ---- the end ---- */

void ckpt_engine_own(const struct ckpt_engine *e, struct ckpt_load_stats *s)
{
    const struct ckpt_engine_stats *t = &e->stats;
    const uint64_t first = atomic_load(&t->first_ns), end = atomic_load(&t->end_ns);

    *s = (struct ckpt_load_stats){
        .needed_bytes = e->needed_bytes,
        .unique_bytes = e->unique_bytes,
        .read_bytes = atomic_load(&t->reads.source_bytes),
        .reads = atomic_load(&t->reads.source_reads),
        .sent_bytes = atomic_load(&t->sent),
        .received_bytes = atomic_load(&t->received),
        .buffer_bytes = t->buffers,
        .device_bytes = t->device_buffers,
        .kept_bytes = t->kept,
        .wall_s = (double)((end ? end : ckpt_now_ns()) - t->start_ns) / 1e9,
        .first_s = first ? (double)(first - t->start_ns) / 1e9 : 0,
        .read_s = (double)atomic_load(&t->read_ns) / 1e9,
        .place_s = (double)atomic_load(&t->place_ns) / 1e9,
        .send_s = (double)atomic_load(&t->exchange_ns) / 1e9,
        .exchange_rate = t->exchange_rate,
        .setup_s = e->device ? (double)e->device->setup_ns / 1e9 : 0,
        .skipped_bytes = t->skipped,
        .skipped_tensors = e->job_wants->nskip,
        .asked_bytes = atomic_load(&t->reads.asked_bytes),
    };
}

static double larger(double a, double b) { return a > b ? a : b; }

/* On rank 0: the statistics of the job from those of all ranks. */
static int add_stats(void *ctx, const unsigned char *const *data, const size_t *len,
                     struct ckpt_str *answer, struct ckpt_err *err)
{
    const struct ckpt_engine *e = ctx;
    struct ckpt_load_stats sum = {.unique_bytes = e->unique_bytes};

    for (uint32_t r = 0; r < e->comm->x->size; r++) {
        struct ckpt_load_stats s;
        if (len[r] != sizeof s)
            return ckpt_fail(err, CKPT_CONFLICT, "rank %" PRIu32 " runs another version of ckptfs",
                             r);
        memcpy(&s, data[r], sizeof s);
        sum.needed_bytes += s.needed_bytes;
        sum.read_bytes += s.read_bytes;
        sum.reads += s.reads;
        sum.sent_bytes += s.sent_bytes;
        sum.received_bytes += s.received_bytes;
        sum.buffer_bytes = ckpt_max_u64(sum.buffer_bytes, s.buffer_bytes);
        sum.device_bytes = ckpt_max_u64(sum.device_bytes, s.device_bytes);
        sum.kept_bytes = ckpt_max_u64(sum.kept_bytes, s.kept_bytes);
        sum.wall_s = larger(sum.wall_s, s.wall_s);
        sum.first_s = larger(sum.first_s, s.first_s);
        sum.read_s += s.read_s;
        sum.place_s += s.place_s;
        sum.send_s += s.send_s;
        sum.setup_s = larger(sum.setup_s, s.setup_s);
        sum.skipped_bytes += s.skipped_bytes;
        sum.skipped_tensors = s.skipped_tensors;
        sum.asked_bytes += s.asked_bytes;
        if (s.exchange_rate > 0 && (sum.exchange_rate <= 0 || s.exchange_rate < sum.exchange_rate))
            sum.exchange_rate = s.exchange_rate;
    }
    ckpt_str_append(answer, (const char *)&sum, sizeof sum);
    return 0;
}

/* Wait until no worker writes to destinations any more. That takes a moment, and the wait is
 * bounded: even a read from the page cache that the kernel promised not to block might block. */
static void await_placing(struct ckpt_engine *e)
{
    const struct timespec until = ckpt_deadline(e->opt.read_timeout_ms);

    (void)pthread_mutex_lock(&e->lock);
    while (e->placing && pthread_cond_timedwait(&e->news, &e->lock, &until) != ETIMEDOUT)
        ;
    (void)pthread_mutex_unlock(&e->lock);
}

static void hear(struct ckpt_engine *e)
{
    bool moved;

    (void)ckpt_comm_poll(e->comm, &moved, NULL);
    ckpt_comm_heartbeat(e->comm, e->opt.exchange_timeout_ms);
    e->comm->x->ops->wait(e->comm->x, HEAR_MS);
}

/* This rank has finished, or has failed: begin the round in which all ranks agree on the end. */
static int begin_final(struct ckpt_engine *e, struct ckpt_err *err)
{
    struct ckpt_err changed = {0};
    struct ckpt_load_stats s;

    /* all bytes are here, but if a file has changed they may be of two saves */
    if (!ckpt_engine_has_stopped(e) && ckpt_load_files_unchanged(e->view, &changed) < 0)
        ckpt_engine_fail(e, &changed, true);
    (void)pthread_mutex_lock(&e->lock);
    const bool failed = e->err.code != CKPT_OK;
    const struct ckpt_err why = e->err;
    const bool own = e->err_is_own;
    (void)pthread_mutex_unlock(&e->lock);
    if (failed) {
        if (own)
            ckpt_abort_send(e->comm, &why);
        /* a frozen neighbour does not pass that on: stay until others have noticed it, too */
        const uint64_t until = ckpt_now_ms() + e->opt.exchange_timeout_ms / 8;
        while (is_one_silent(e) && ckpt_now_ms() < until)
            hear(e);
        await_placing(e);
        e->leak = !e->comm->x->ops->cancel(e->comm->x);
    }
    ckpt_engine_own(e, &s);
    e->final = true;
    e->round = (struct ckpt_round){.comm = e->comm,
                                   .timeout_ms = e->opt.exchange_timeout_ms,
                                   .own = &s,
                                   .own_len = sizeof s,
                                   .reduce = add_stats,
                                   .ctx = e,
                                   .live = true};
    return ckpt_round_start(&e->round, failed ? -1 : 0, &why, err);
}

/* The load is over, with the result of the final round (or of the failure to begin it). */
static void conclude(struct ckpt_engine *e, int rc, const struct ckpt_err *err,
                     const unsigned char *data, size_t len)
{
    if (rc == 0 && len == sizeof e->job)
        memcpy(&e->job, data, len);
    if (rc == 0 && e->job.exchange_rate > 0)
        e->comm->exchange_rate = e->job.exchange_rate;
    ckpt_round_release(&e->round);
    if (rc < 0) /* other ranks may have cancelled their transfers */
        e->comm->failed = true;
    ckpt_comm_end(e->comm);
    (void)pthread_mutex_lock(&e->lock);
    atomic_store(&e->stats.end_ns, ckpt_now_ns());
    e->result = rc;
    if (rc < 0)
        e->err = *err;
    e->stopped = e->finished = true;
    (void)pthread_cond_broadcast(&e->work);
    (void)pthread_cond_broadcast(&e->news);
    (void)pthread_mutex_unlock(&e->lock);
}

/* ---- turns ---- */

/* A turn before the final round: 1 if anything moved, 0 if not. */
static int load_turn(struct ckpt_engine *e, struct ckpt_err *err)
{
    const uint64_t now = ckpt_now_ms(), begin = ckpt_now_ns();
    bool moved = false, worked = false;

    if (ckpt_windows_open(e, err) < 0 || (!e->device && ckpt_windows_send(e, err) < 0))
        return -1;
    if (ckpt_comm_poll(e->comm, &moved, err) < 0)
        return -1;
    if (!e->device)
        ckpt_windows_harvest(e);
    else if (ckpt_device_turn(e, &worked, err) < 0)
        return -1;
    const bool paused = ckpt_pause_turn(e);
    /* in a pause, in the first turn after it, and if this process was itself stopped for a while,
     * nobody is late */
    if (paused || e->paused || now > e->looked_ms + e->opt.exchange_timeout_ms / 4) {
        ckpt_comm_restart_clocks(e->comm);
        e->read_ms = now;
    }
    e->paused = paused;
    moved |= worked;
    if (e->plan->exchanges)
        atomic_fetch_add(&e->stats.exchange_ns, ckpt_now_ns() - begin);
    ckpt_comm_heartbeat(e->comm, e->opt.exchange_timeout_ms);
    if (check_reads(e, now, err) < 0 || check_peers(e, now, err) < 0 ||
        ckpt_pause_check(e, now, err) < 0)
        return -1;
    return moved;
}

/* A turn during the final round: 1 if it is not over, else its result. */
static int final_turn(struct ckpt_engine *e, bool *ret_moved)
{
    const unsigned char *data = NULL;
    size_t len = 0;
    struct ckpt_err err = {0};

    (void)ckpt_comm_poll(e->comm, ret_moved, NULL);
    (void)ckpt_pause_turn(e);
    ckpt_comm_heartbeat(e->comm, e->opt.exchange_timeout_ms);
    int step = ckpt_round_step(&e->round, &data, &len, &err);
    if (step <= 0)
        conclude(e, step, &err, data, len);
    return step;
}

/* A rank is gone, as *err says. Its message that says why may arrive a moment after its connection
 * has closed: wait for it briefly. It may also have left because of a frozen rank, which passes no
 * messages on: while a neighbour is silent, wait until that is heard, or is too late itself. */
static void hear_why(struct ckpt_engine *e, struct ckpt_err *err)
{
    for (int i = 0; i < HEAR_TURNS || is_one_silent(e); i++) {
        struct ckpt_err late = {0};
        hear(e);
        if (ckpt_engine_has_stopped(e))
            return;
        if (check_silence(e, e->opt.exchange_timeout_ms, &late) < 0) {
            *err = late;
            return;
        }
    }
}

/* A device does not wake the pump, so the pump polls it every 50 us. A window takes milliseconds:
 * twice as long would add some percent to each, half as long would take more of a core. */
static const struct timespec device_nap = {0, 50 * 1000};

/* True if this rank has nothing more to read, send or place, or has failed. */
static bool is_over(struct ckpt_engine *e)
{
    (void)pthread_mutex_lock(&e->lock);
    const bool over =
        e->stopped || (e->nread == e->plan->chunks.len && e->nclosed == e->plan->windows.len);
    (void)pthread_mutex_unlock(&e->lock);
    return over;
}

/* One turn of the pump. True: the load is over. */
static bool turn(struct ckpt_engine *e)
{
    struct ckpt_err err = {0};
    bool moved = false;

    if (!e->final) {
        int rc = load_turn(e, &err);
        if (rc < 0 && err.code == CKPT_PEER)
            hear_why(e, &err);
        if (rc < 0)
            ckpt_engine_fail(e, &err, true);
        moved = rc > 0;
        const bool over = is_over(e);
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
        e->comm->x->ops->wait(e->comm->x, PUMP_SLEEP_MS);
    return false;
}

void *ckpt_pump_run(void *engine)
{
    struct ckpt_engine *e = engine;

    if (e->device)
        e->device->ops->adopt(e->device);
    while (!turn(e))
        ;
    ckpt_engine_unref(e);
    return NULL;
}
