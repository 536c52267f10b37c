/* SPDX-License-Identifier: Apache-2.0 */
/* Lanes, a queue, and the threads that empty it. */
#include "mount/dispatch.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { KEPT_FREE = 2 };

static time_t now_s(void)
{
    struct timespec t;

    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec;
}

int ckptfs_dispatch_init(struct ckptfs_dispatch *d, unsigned threads)
{
    const unsigned most = threads > KEPT_FREE ? threads - KEPT_FREE : 0;

    /* every running job has at most two lanes, so with this much room no lane can fail to be added
     */
    *d = (struct ckptfs_dispatch){.most_inline = most,
                                  .caplane = 2 * (most + (size_t)CKPTFS_POOL_THREADS)};
    (void)pthread_mutex_init(&d->lock, NULL);
    (void)pthread_cond_init(&d->work, NULL);
    (void)pthread_cond_init(&d->ended, NULL);
    d->lane = calloc(d->caplane, sizeof *d->lane);
    return d->lane ? 0 : -1;
}

void ckptfs_dispatch_release(struct ckptfs_dispatch *d)
{
    free(d->lane);
    (void)pthread_cond_destroy(&d->ended);
    (void)pthread_cond_destroy(&d->work);
    (void)pthread_mutex_destroy(&d->lock);
}

/* ---- lanes, with the lock held ---- */

static struct ckptfs_lane *find_lane(struct ckptfs_dispatch *d, uint64_t key)
{
    for (size_t i = 0; i < d->nlane; i++)
        if (d->lane[i].key == key)
            return &d->lane[i];
    return NULL;
}

static unsigned running(struct ckptfs_dispatch *d, uint64_t key)
{
    const struct ckptfs_lane *lane = find_lane(d, key);

    return lane ? lane->running : 0;
}

static void enter_lane(struct ckptfs_dispatch *d, uint64_t key)
{
    struct ckptfs_lane *lane = find_lane(d, key);

    if (!lane) {
        lane = &d->lane[d->nlane++];
        *lane = (struct ckptfs_lane){.key = key};
    }
    lane->running++;
}

static void leave_lane(struct ckptfs_dispatch *d, uint64_t key)
{
    struct ckptfs_lane *lane = find_lane(d, key);

    if (--lane->running == 0)
        *lane = d->lane[--d->nlane];
}

static bool has_room(struct ckptfs_dispatch *d, const struct ckptfs_job *job)
{
    return running(d, job->step) < CKPTFS_STEP_JOBS && running(d, job->file) < job->file_jobs;
}

static void enter(struct ckptfs_dispatch *d, const struct ckptfs_job *job)
{
    enter_lane(d, job->step);
    enter_lane(d, job->file);
}

static void leave(struct ckptfs_dispatch *d, uint64_t step, uint64_t file)
{
    leave_lane(d, step);
    leave_lane(d, file);
    if (d->nqueued)
        (void)pthread_cond_signal(&d->work);
}

/* ---- the queue, with the lock held ---- */

static void append(struct ckptfs_dispatch *d, struct ckptfs_job *job)
{
    job->queued = true;
    job->since = now_s();
    job->next = NULL;
    job->prev = d->last;
    *(d->last ? &d->last->next : &d->first) = job;
    d->last = job;
    d->nqueued++;
}

static void take_out(struct ckptfs_dispatch *d, struct ckptfs_job *job)
{
    job->queued = false;
    *(job->prev ? &job->prev->next : &d->first) = job->next;
    *(job->next ? &job->next->prev : &d->last) = job->prev;
    d->nqueued--;
}

static struct ckptfs_job *next_job(struct ckptfs_dispatch *d)
{
    struct ckptfs_job *job = d->first;

    while (job && !has_room(d, job))
        job = job->next;
    return job;
}

/* Is an older job of the same lane queued? A younger job must not overtake it. */
static bool is_waited_for(const struct ckptfs_dispatch *d, const struct ckptfs_job *job)
{
    for (const struct ckptfs_job *q = d->first; q; q = q->next)
        if (q->file == job->file || q->step == job->step)
            return true;
    return false;
}

/* ---- running ---- */

static void watch(struct ckptfs_job *job, bool on)
{
    if (job->watch)
        job->watch(job, on);
}

/* Run a job that has left the queue and entered its lanes. Called with the lock held; the lock is
 * released while the job runs. */
static void run_unlocked(struct ckptfs_dispatch *d, struct ckptfs_job *job, bool watched)
{
    const uint64_t step = job->step, file = job->file;

    (void)pthread_mutex_unlock(&d->lock);
    if (watched)
        watch(job, false);
    job->run(job);
    (void)pthread_mutex_lock(&d->lock);
    leave(d, step, file);
}

static void *work(void *arg)
{
    struct ckptfs_dispatch *d = arg;

    (void)pthread_mutex_lock(&d->lock);
    while (!d->stopping) {
        struct ckptfs_job *job = next_job(d);
        if (!job) {
            d->idle++;
            (void)pthread_cond_wait(&d->work, &d->lock);
            d->idle--;
            continue;
        }
        take_out(d, job);
        enter(d, job);
        if (next_job(d))
            (void)pthread_cond_signal(&d->work);
        run_unlocked(d, job, true);
    }
    d->pool--;
    (void)pthread_cond_broadcast(&d->ended);
    (void)pthread_mutex_unlock(&d->lock);
    return NULL;
}

/* Wake or start a pool thread. Called with the lock held. If no thread can be created, the existing
 * ones take the job later. */
static void call_worker(struct ckptfs_dispatch *d)
{
    pthread_attr_t attr;
    pthread_t thread;

    if (d->idle) {
        (void)pthread_cond_signal(&d->work);
        return;
    }
    if (d->pool == CKPTFS_POOL_THREADS || !next_job(d))
        return;
    (void)pthread_attr_init(&attr);
    (void)pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
    if (pthread_create(&thread, &attr, work, d) == 0)
        d->pool++;
    (void)pthread_attr_destroy(&attr);
}

/* Run the job on this thread if possible. True: it ran or was refused. False: it must be queued. */
static bool try_now(struct ckptfs_dispatch *d, struct ckptfs_job *job)
{
    (void)pthread_mutex_lock(&d->lock);
    const bool stopping = d->stopping;
    const bool now =
        !stopping && d->inline_jobs < d->most_inline && has_room(d, job) && !is_waited_for(d, job);
    if (now) {
        d->inline_jobs++;
        enter(d, job);
        run_unlocked(d, job, false);
        d->inline_jobs--;
        /* a job that was queued meanwhile because this lane was full may have found no pool thread
         */
        if (d->nqueued)
            call_worker(d);
    }
    (void)pthread_mutex_unlock(&d->lock);
    if (stopping)
        job->refuse(job, EIO);
    return now || stopping;
}

void ckptfs_dispatch(struct ckptfs_dispatch *d, struct ckptfs_job *job)
{
    job->dispatch = d;
    job->queued = job->interrupted = false;
    if (try_now(d, job))
        return;
    watch(job, true);
    (void)pthread_mutex_lock(&d->lock);
    const int error = job->interrupted ? EINTR : d->stopping ? EIO : 0;
    if (!error) {
        append(d, job);
        call_worker(d);
    }
    (void)pthread_mutex_unlock(&d->lock);
    if (error) {
        watch(job, false);
        job->refuse(job, error);
    }
}

void ckptfs_dispatch_interrupt(struct ckptfs_job *job)
{
    struct ckptfs_dispatch *d = job->dispatch;

    (void)pthread_mutex_lock(&d->lock);
    const bool queued = job->queued;
    job->interrupted = true;
    if (queued)
        take_out(d, job);
    (void)pthread_mutex_unlock(&d->lock);
    if (queued)
        job->refuse(job, EINTR);
}

/* Refuse the first queued job if it was queued at `until` or earlier; false if there is none. */
static bool refuse_first(struct ckptfs_dispatch *d, time_t until)
{
    (void)pthread_mutex_lock(&d->lock);
    struct ckptfs_job *job = d->first;
    if (job && job->since > until)
        job = NULL;
    if (job)
        take_out(d, job);
    (void)pthread_mutex_unlock(&d->lock);
    if (!job)
        return false;
    watch(job, false);
    job->refuse(job, EIO);
    return true;
}

size_t ckptfs_dispatch_expire(struct ckptfs_dispatch *d)
{
    const time_t until = now_s() - CKPTFS_QUEUE_S;
    size_t n = 0;

    while (refuse_first(d, until))
        n++;
    return n;
}

void ckptfs_dispatch_stop(struct ckptfs_dispatch *d)
{
    (void)pthread_mutex_lock(&d->lock);
    d->stopping = true;
    (void)pthread_cond_broadcast(&d->work);
    (void)pthread_mutex_unlock(&d->lock);
    while (refuse_first(d, now_s()))
        continue;
    (void)pthread_mutex_lock(&d->lock);
    while (d->pool)
        (void)pthread_cond_wait(&d->ended, &d->lock);
    (void)pthread_mutex_unlock(&d->lock);
}

size_t ckptfs_dispatch_queued(struct ckptfs_dispatch *d)
{
    (void)pthread_mutex_lock(&d->lock);
    const size_t n = d->nqueued;
    (void)pthread_mutex_unlock(&d->lock);
    return n;
}
