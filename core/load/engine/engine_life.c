/* SPDX-License-Identifier: Apache-2.0 */
/* The life of an engine: start, waiting for it, end. */
#include "load/engine/engine.h"

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
#include "comm/shm.h"
#include "load/engine/engine_inner.h"
#include "run/checkpoint.h"
#include "tensor/strided.h"

enum {
    LOOK_MS = 20,        /* between two looks at workers that have not left */
    LONG_MS = 60 * 1000, /* the longest wait for a signal */
    FREE_WAIT_MS = 5000, /* the longest duration of a read that ckpt_engine_end waits for */
};

/* ---- memory ---- */

/* Bytes of host memory for all slots. */
static uint64_t memory_bytes(const struct ckpt_engine *e)
{
    return e->opt.ahead * ckpt_whole_pages(e->sizes.read) +
           e->opt.slots * ckpt_whole_pages(e->sizes.receive);
}

/* May be called twice. */
static void release_slots(struct ckpt_engine *e)
{
    if (e->device && !e->leak)
        ckpt_device_slots_release(e);
    else if (!e->leak)
        ckpt_shm_unmap(e->memory, memory_bytes(e));
    for (uint32_t i = 0; e->slot && i < e->opt.slots && !e->leak; i++) {
        free(e->slot[i]
                 .in); /* they contain transfers, some of which could perhaps not be cancelled */
        free(e->slot[i].out);
    }
    free(ckpt_steal(&e->read));
    free(ckpt_steal(&e->slot));
    e->memory = NULL;
}

static void destroy(struct ckpt_engine *e)
{
    release_slots(e);
    if (e->reading.slabs)
        ckpt_slabs_forget(e->reading.slabs, &e->reading);
    for (uint32_t i = 0; e->worker && i < e->opt.threads; i++)
        ckpt_bounce_release(&e->worker[i].bounce);
    free(e->worker);
    free(e->stamp);
    free(e->peers);
    free(e->target);
    free(e->left);
    free(e->landed);
    ckpt_plan_free(e->plan);
    if (e->job_wants)
        ckpt_job_wants_release(e->job_wants);
    free(e->job_wants);
    ckpt_view_release(e->view);
    if (e->device && !e->leak)
        e->device->ops->unref(e->device);
    (void)pthread_cond_destroy(&e->work);
    (void)pthread_cond_destroy(&e->news);
    (void)pthread_mutex_destroy(&e->lock);
    free(e);
}

/* Give up a reference and the lock. References are counted under the lock, so that nobody frees the
 * engine while another thread still uses the lock to give up its own. */
static void unref_unlock(struct ckpt_engine *e)
{
    const bool last = --e->refs == 0;

    (void)pthread_mutex_unlock(&e->lock);
    if (last)
        destroy(e);
}

void ckpt_engine_unref(struct ckpt_engine *e)
{
    (void)pthread_mutex_lock(&e->lock);
    unref_unlock(e);
}

void ckpt_engine_leave(struct ckpt_engine *e)
{
    e->nworker--;
    (void)pthread_cond_broadcast(&e->news);
    unref_unlock(e);
}

/* ---- changes of state, by any thread ---- */

/* A worker may return from a read long after the comm has been freed. */
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
        e->err_is_own = own;
        e->stopped = true;
        (void)pthread_cond_broadcast(&e->work);
        ckpt_engine_kick(e);
    }
    (void)pthread_mutex_unlock(&e->lock);
}

bool ckpt_engine_has_stopped(struct ckpt_engine *e)
{
    (void)pthread_mutex_lock(&e->lock);
    const bool stopped = e->stopped;
    (void)pthread_mutex_unlock(&e->lock);
    return stopped;
}

void ckpt_engine_land(struct ckpt_engine *e, uint32_t want, uint64_t bytes)
{
    if (atomic_fetch_sub(&e->left[want], bytes) != bytes)
        return;
    (void)pthread_mutex_lock(&e->lock);
    if (e->nlanded == 0)
        atomic_store(&e->stats.first_ns, ckpt_now_ns());
    e->landed[e->nlanded++] = want;
    (void)pthread_cond_broadcast(&e->news);
    (void)pthread_mutex_unlock(&e->lock);
}

/* ---- starting ---- */

static int map_slots(struct ckpt_engine *e, struct ckpt_err *err)
{
    struct ckpt_xport *x = e->comm->x;
    const uint64_t len = memory_bytes(e);

    if (len == 0)
        return 0;
    if (x->ops->shm && e->plan->exchanges)
        e->memory = x->ops->shm(x, len);
    if (!e->memory)
        e->memory = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (e->memory == MAP_FAILED)
        return e->memory = NULL, ckpt_nomem(err);
    unsigned char *at = e->memory;
    for (uint32_t i = 0; i < e->opt.ahead; i++, at += ckpt_whole_pages(e->sizes.read))
        e->read[i].buf = at;
    for (uint32_t i = 0; i < e->opt.slots; i++, at += ckpt_whole_pages(e->sizes.receive))
        e->slot[i].receive = at;
    return 0;
}

static int make_slots(struct ckpt_engine *e, struct ckpt_err *err)
{
    const uint64_t reading = e->opt.bounce + CKPT_STRIDED_KEPT * e->opt.cost.bound;

    e->read = calloc((size_t)e->opt.ahead + 1, sizeof *e->read);
    e->slot = calloc((size_t)e->opt.slots + 1, sizeof *e->slot);
    if (!e->read || !e->slot)
        return ckpt_nomem(err);
    if ((e->device ? ckpt_device_slots_init(e, err) : map_slots(e, err)) < 0)
        return -1;
    e->stats.buffers = e->opt.ahead * e->sizes.read + e->opt.slots * e->sizes.window_host +
                       e->opt.threads * reading + ckpt_plan_memory(e->plan);
    e->stats.device_buffers = e->opt.slots * e->sizes.window_device;
    return 0;
}

/* Allocate room for the receivers of a slice. */
static int make_peers(struct ckpt_engine *e, struct ckpt_err *err)
{
    size_t most = 1;

    for (size_t g = 0; g < e->plan->groups.len; g++)
        most = ckpt_max_u64(most, ckpt_broadcast_most(&e->plan->broadcast[g]));
    e->stamp = calloc((size_t)e->size + 1, sizeof *e->stamp);
    e->peers = malloc(most * sizeof *e->peers);
    return e->stamp && e->peers ? 0 : ckpt_nomem(err);
}

/* Copy the destinations and count the bytes that each want lacks. Wants without elements, and
 * of tensors that are not sent, have landed already. */
static int make_wants(struct ckpt_engine *e, const struct ckpt_target *target, struct ckpt_err *err)
{
    const struct ckpt_wants *w = &e->job_wants->table[e->job_wants->class_of[e->self]];

    e->target = malloc((e->ntarget + 1) * sizeof *e->target);
    e->left = calloc(e->ntarget + 1, sizeof *e->left);
    e->landed = malloc((e->ntarget + 1) * sizeof *e->landed);
    if (!e->target || !e->left || !e->landed)
        return ckpt_nomem(err);
    if (e->ntarget)
        memcpy(e->target, target, e->ntarget * sizeof *e->target);
    for (size_t i = 0; i < e->ntarget; i++) {
        const uint32_t t = w->entries.ptr[i].tensor;
        const bool skip = e->job_wants->skip && e->job_wants->skip[t];
        const uint64_t bytes =
            ckpt_box_numel(&target[i].box) * ckpt_dtype_size(e->cat->tensors.ptr[t].dtype);
        e->stats.skipped += skip ? bytes : 0;
        atomic_init(&e->left[i], skip ? 0 : bytes);
        if (skip || bytes == 0)
            e->landed[e->nlanded++] = i;
    }
    return 0;
}

/* Count references, and workers; or take that back. */
static void count(struct ckpt_engine *e, int refs, int workers)
{
    (void)pthread_mutex_lock(&e->lock);
    e->refs += (uint32_t)refs;
    e->nworker += (uint32_t)workers;
    (void)pthread_mutex_unlock(&e->lock);
}

/* Start the workers, as many as the system permits but at least one, and the pump. */
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
        count(e, 1, 1);
        if (pthread_create(&id, &detached, ckpt_worker_run, &e->worker[i]) != 0) {
            count(e, -1, -1);
            break;
        }
        started++;
    }
    (void)pthread_attr_destroy(&detached);
    if (started == 0)
        return ckpt_fail(err, CKPT_NOMEM, "no thread that reads could be started");
    count(e, 1, 0);
    if (pthread_create(&e->pump, NULL, ckpt_pump_run, e) != 0) {
        ckpt_engine_unref(e);
        return ckpt_fail(err, CKPT_NOMEM, "no thread that exchanges data could be started");
    }
    return 0;
}

/* Wait until all workers have left, except those that have been in one read for limit_ms, from
 * which the operating system may never return. No worker begins a read after the load has stopped,
 * so this takes no longer than limit_ms. */
static void await_workers(struct ckpt_engine *e, uint64_t limit_ms)
{
    (void)pthread_mutex_lock(&e->lock);
    for (;;) {
        const uint64_t now = ckpt_now_ms();
        uint32_t stuck = 0;
        for (uint32_t i = 0; i < e->opt.threads && e->worker; i++) {
            const uint64_t since = atomic_load(&e->worker[i].since_ms);
            stuck += since != 0 && now >= since + limit_ms;
        }
        if (e->nworker <= stuck)
            break;
        const struct timespec look = ckpt_deadline(LOOK_MS);
        (void)pthread_cond_timedwait(&e->news, &e->lock, &look);
    }
    (void)pthread_mutex_unlock(&e->lock);
}

/* End a load whose threads could not all be started: no worker writes to a destination any more. */
static void stop_workers(struct ckpt_engine *e)
{
    (void)pthread_mutex_lock(&e->lock);
    e->stopped = e->finished = true;
    (void)pthread_cond_broadcast(&e->work);
    (void)pthread_mutex_unlock(&e->lock);
    await_workers(e, ckpt_min_u64(e->opt.read_timeout_ms, FREE_WAIT_MS));
}

int ckpt_engine_start(struct ckpt_engine_inputs *inputs, const struct ckpt_engine_options *opt,
                      const struct ckpt_engine_sizes *sizes, struct ckpt_engine **ret,
                      struct ckpt_err *err)
{
    struct ckpt_engine *e = calloc(1, sizeof *e);

    if (!e)
        return ckpt_nomem(err);
    e->refs = 1;
    (void)pthread_mutex_init(&e->lock, NULL);
    (void)pthread_cond_init(&e->work, NULL);
    ckpt_cond_init(&e->news);
    e->view = ckpt_view_hold(inputs->view);
    e->cat = inputs->job_wants->cat;
    e->reading = inputs->view->reading;
    e->reading.stats = &e->stats.reads;
    e->comm = inputs->comm;
    e->self = e->comm->x->rank;
    e->size = e->comm->x->size;
    e->plan = ckpt_steal(&inputs->plan);
    e->job_wants = ckpt_steal(&inputs->job_wants);
    e->ntarget = inputs->ntarget;
    e->needed_bytes = inputs->needed_bytes;
    e->unique_bytes = inputs->unique_bytes;
    e->opt = *opt;
    e->opt.cost.route.arrived = &e->stats.arrived;
    e->sizes = *sizes;
    if ((e->device = e->comm->x->device))
        e->device->ops->ref(e->device);
    e->place_tail = &e->place;
    e->stats.start_ns = ckpt_now_ns();
    e->read_ms = e->looked_ms = ckpt_now_ms();
    if (make_slots(e, err) < 0 || make_peers(e, err) < 0 ||
        make_wants(e, inputs->target, err) < 0) {
        ckpt_engine_unref(e);
        return -1;
    }
    ckpt_comm_begin(e->comm, ckpt_engine_receive, e);
    if (start_threads(e, err) < 0) {
        stop_workers(e);
        ckpt_comm_end(e->comm);
        e->comm->epoch--; /* the next load gets the number of this one */
        ckpt_engine_unref(e);
        return -1;
    }
    *ret = e;
    return 0;
}

void ckpt_engine_refuse(struct ckpt_comm *comm, uint32_t timeout_ms, struct ckpt_err *err)
{
    const struct ckpt_load_stats none = {0};
    struct ckpt_round round = {
        .comm = comm, .timeout_ms = timeout_ms, .own = &none, .own_len = sizeof none};
    struct ckpt_err why = {0};

    if (comm->x->size == 1)
        return;
    (void)ckpt_fail(&why, err->code, "rank %" PRIu32 ": %s", comm->x->rank, err->text);
    ckpt_comm_begin(comm, NULL, NULL);
    ckpt_abort_send(comm, &why);
    (void)ckpt_round_run(&round, -1, NULL, NULL, &why);
    comm->failed = true;
    ckpt_comm_end(comm);
    *err = why;
}

/* ---- waiting ---- */

/* Wait for news until the clock time `until`; false: it has passed. Called and returns with the
 * lock held. */
static bool await_news(struct ckpt_engine *e, uint64_t until)
{
    const uint64_t now = ckpt_now_ms(), left = until > now ? until - now : 0;
    const struct timespec t = ckpt_deadline((uint32_t)ckpt_min_u64(left, LONG_MS));

    (void)pthread_cond_timedwait(&e->news, &e->lock, &t);
    return ckpt_now_ms() < until;
}

/* Wait for the end of the load or for enough() to be true; false: neither came in time. Returns
 * with the lock held. */
static bool wait_for(struct ckpt_engine *e, uint32_t timeout_ms,
                     bool (*enough)(const struct ckpt_engine *e))
{
    const uint64_t until = timeout_ms == UINT32_MAX ? UINT64_MAX : ckpt_now_ms() + timeout_ms;
    bool on = true;

    (void)pthread_mutex_lock(&e->lock);
    while (!e->finished && !(enough && enough(e)) && on)
        on = await_news(e, until);
    return e->finished || (enough && enough(e));
}

int ckpt_engine_wait_for(struct ckpt_engine *e, uint32_t timeout_ms,
                         bool (*enough)(const struct ckpt_engine *e), struct ckpt_err *err)
{
    int rc = wait_for(e, timeout_ms, enough) ? 0 : 1;

    if (e->finished && e->result < 0)
        rc = ckpt_err_move(err, &e->err);
    (void)pthread_mutex_unlock(&e->lock);
    return rc;
}

/* Wait for the end of the pump, by the first thread that asks for it: false for all others. */
static bool join_pump(struct ckpt_engine *e)
{
    (void)pthread_mutex_lock(&e->lock);
    const bool joined = e->joined;
    e->joined = true;
    (void)pthread_mutex_unlock(&e->lock);
    return !joined && pthread_join(e->pump, NULL) == 0;
}

/* The load has succeeded: what it needed buffers for is done, and a load that is kept for the next
 * step keeps none. */
static void give_back(struct ckpt_engine *e)
{
    if (!join_pump(e))
        return;
    await_workers(e, UINT32_MAX); /* none is in a read */
    release_slots(e);
}

int ckpt_engine_wait(struct ckpt_engine *e, uint32_t timeout_ms, struct ckpt_err *err)
{
    const int rc = ckpt_engine_wait_for(e, timeout_ms, NULL, err);

    if (rc == 0)
        give_back(e);
    return rc;
}

static bool has_landed(const struct ckpt_engine *e) { return e->ntaken < e->nlanded; }

int ckpt_engine_next(struct ckpt_engine *e, uint32_t timeout_ms, size_t *ret_want,
                     struct ckpt_err *err)
{
    int rc = 1;

    if (wait_for(e, timeout_ms, has_landed)) {
        if (e->finished && e->result < 0)
            rc = ckpt_err_move(err, &e->err);
        else
            rc = has_landed(e) ? 0 : 2;
    }
    if (rc == 0)
        *ret_want = e->landed[e->ntaken++];
    (void)pthread_mutex_unlock(&e->lock);
    if (rc == 2)
        give_back(e);
    return rc;
}

void ckpt_engine_cancel(struct ckpt_engine *e)
{
    struct ckpt_err err = {0};

    (void)ckpt_fail(&err, CKPT_CANCELLED, "the load was cancelled");
    ckpt_engine_fail(e, &err, true);
}

/* Make the load end, if it has not, and end the pump. Workers may still be in a read. */
static void stop(struct ckpt_engine *e)
{
    (void)pthread_mutex_lock(&e->lock);
    const bool over = e->finished;
    (void)pthread_mutex_unlock(&e->lock);
    if (!over) {
        ckpt_engine_cancel(e);
        (void)ckpt_engine_wait(e, UINT32_MAX, NULL);
    }
    (void)join_pump(e);
}

void ckpt_engine_end(struct ckpt_engine *e)
{
    if (!e)
        return;
    stop(e);
    await_workers(e, ckpt_min_u64(e->opt.read_timeout_ms, FREE_WAIT_MS));
    ckpt_engine_unref(e);
}

void ckpt_engine_take_back(struct ckpt_engine *e, struct ckpt_engine_inputs *inputs)
{
    if (!e)
        return;
    stop(e);
    await_workers(e, ckpt_min_u64(e->opt.read_timeout_ms, e->opt.exchange_timeout_ms / 2));
    (void)pthread_mutex_lock(&e->lock);
    const bool alone = e->nworker == 0;
    (void)pthread_mutex_unlock(&e->lock);
    if (alone) {
        inputs->plan = ckpt_steal(&e->plan);
        inputs->job_wants = ckpt_steal(&e->job_wants);
    }
    ckpt_engine_unref(e);
}

const struct ckpt_load_stats *ckpt_engine_job(const struct ckpt_engine *e) { return &e->job; }
