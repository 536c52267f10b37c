/* SPDX-License-Identifier: Apache-2.0 */
/* The requests that run, and those that wait for their turn. */
#include "mount/admission.h"

#include <errno.h>
#include <stdio.h>

#include "base/clock.h"

enum { WAITS = -1 };

enum { IMPATIENT = 8 }; /* the part of the limit after which further requests of a file hang */

void ckptfs_admission_init(struct ckptfs_admission *a)
{
    *a = (struct ckptfs_admission){0};
    (void)pthread_mutex_init(&a->lock, NULL);
    TAILQ_INIT(&a->running);
    TAILQ_INIT(&a->waiting);
}

void ckptfs_admission_release(struct ckptfs_admission *a) { (void)pthread_mutex_destroy(&a->lock); }

/* ---- with the lock held ---- */

static bool has_room(const struct ckptfs_admission *a, const struct ckptfs_lanes *of)
{
    unsigned of_step = 0, of_file = 0;

    for (const struct ckptfs_turn *t = TAILQ_FIRST(&a->running); t; t = TAILQ_NEXT(t, link)) {
        of_step += t->of.step == of->step;
        of_file += t->of.file == of->file;
    }
    return of_step < CKPTFS_STEP_JOBS && of_file < of->file_jobs;
}

/* Was a request of the file claimed for its thread, which hangs? */
static bool file_hangs(const struct ckptfs_admission *a, uint64_t file)
{
    for (const struct ckptfs_turn *t = TAILQ_FIRST(&a->running); t; t = TAILQ_NEXT(t, link))
        if (t->hangs && t->of.file == file)
            return true;
    return false;
}

static void begin_to_run(struct ckptfs_admission *a, struct ckptfs_turn *t)
{
    TAILQ_INSERT_TAIL(&a->running, t, link);
    a->nrunning++;
    t->began_ms = ckpt_now_ms();
    t->error = 0;
}

static void end_to_wait(struct ckptfs_admission *a, struct ckptfs_turn *t, int error)
{
    TAILQ_REMOVE(&a->waiting, t, link);
    a->nwaiting--;
    t->error = error;
    (void)pthread_cond_signal(&t->changed);
}

/* ---- waiting ---- */

static void interrupted(fuse_req_t req, void *data)
{
    struct ckptfs_turn *t = data;

    (void)req;
    (void)pthread_mutex_lock(&t->admission->lock);
    if (t->error == WAITS)
        end_to_wait(t->admission, t, EINTR);
    (void)pthread_mutex_unlock(&t->admission->lock);
}

/* Wait for the turn of a request that is in the list. After fuse_req_interrupt_func has returned,
 * libfuse calls its function no more. */
static void wait_for_turn(struct ckptfs_admission *a, struct ckptfs_turn *t, fuse_req_t req)
{
    const struct timespec until = ckpt_deadline((uint64_t)CKPTFS_QUEUE_S * 1000);

    fuse_req_interrupt_func(req, interrupted, t);
    (void)pthread_mutex_lock(&a->lock);
    while (t->error == WAITS)
        if (pthread_cond_timedwait(&t->changed, &a->lock, &until) != 0 && t->error == WAITS) {
            end_to_wait(a, t, EIO);
            atomic_fetch_add(&a->expired, 1);
        }
    (void)pthread_mutex_unlock(&a->lock);
    fuse_req_interrupt_func(req, NULL, NULL);
}

int ckptfs_admit(struct ckptfs_admission *a, struct ckptfs_turn *t, const struct ckptfs_lanes *of,
                 fuse_req_t req)
{
    *t = (struct ckptfs_turn){.admission = a, .of = *of, .error = EIO, .req = req};
    (void)pthread_mutex_lock(&a->lock);
    const bool refused = a->stopping || a->nrunning + a->nwaiting == CKPTFS_MOST_JOBS;
    const bool fits = !refused && has_room(a, of);
    const bool waits = !refused && !fits && !file_hangs(a, of->file);
    if (waits) {
        ckpt_cond_init(&t->changed);
        TAILQ_INSERT_TAIL(&a->waiting, t, link);
        a->nwaiting++;
        t->error = WAITS;
    } else if (fits) {
        begin_to_run(a, t);
    } else if (!refused) {
        t->error = ETIMEDOUT;
    }
    (void)pthread_mutex_unlock(&a->lock);
    if (waits) {
        wait_for_turn(a, t, req);
        (void)pthread_cond_destroy(&t->changed);
    }
    return t->error;
}

void ckptfs_leave(struct ckptfs_turn *t)
{
    struct ckptfs_admission *a = t->admission;

    (void)pthread_mutex_lock(&a->lock);
    TAILQ_REMOVE(&a->running, t, link);
    a->nrunning--;
    /* what has become free is room for one request of the step at most */
    for (struct ckptfs_turn *w = TAILQ_FIRST(&a->waiting); w; w = TAILQ_NEXT(w, link))
        if (has_room(a, &w->of)) {
            end_to_wait(a, w, 0);
            begin_to_run(a, w);
            break;
        }
    (void)pthread_mutex_unlock(&a->lock);
}

/* Refuse the requests that wait for this file. */
static void refuse_waiting(struct ckptfs_admission *a, uint64_t file)
{
    struct ckptfs_turn *t = TAILQ_FIRST(&a->waiting);

    while (t) {
        struct ckptfs_turn *next = TAILQ_NEXT(t, link);
        if (t->of.file == file)
            end_to_wait(a, t, ETIMEDOUT);
        t = next;
    }
}

bool ckptfs_turn_claim(struct ckptfs_turn *t) { return !atomic_exchange(&t->claimed, true); }

/* With the lock held. */
static bool claim(struct ckptfs_admission *a, struct ckptfs_turn *t, struct ckptfs_overdue *ret)
{
    if (!ckptfs_turn_claim(t))
        return false;
    *ret = (struct ckptfs_overdue){t->req, t->of, t->began_ms};
    t->hangs = true;
    refuse_waiting(a, t->of.file);
    return true;
}

bool ckptfs_admission_overdue(struct ckptfs_admission *a, uint64_t limit_ms,
                              struct ckptfs_overdue *ret)
{
    const uint64_t now = ckpt_now_ms();
    bool found = false;

    (void)pthread_mutex_lock(&a->lock);
    for (struct ckptfs_turn *t = TAILQ_FIRST(&a->running); t && !found; t = TAILQ_NEXT(t, link)) {
        const bool other = file_hangs(a, t->of.file);
        if (t->of.path && now >= t->began_ms + (other ? limit_ms / IMPATIENT : limit_ms))
            found = claim(a, t, ret);
    }
    (void)pthread_mutex_unlock(&a->lock);
    return found;
}

bool ckptfs_admission_any(struct ckptfs_admission *a, struct ckptfs_overdue *ret)
{
    bool found = false;

    (void)pthread_mutex_lock(&a->lock);
    for (struct ckptfs_turn *t = TAILQ_FIRST(&a->running); t && !found; t = TAILQ_NEXT(t, link))
        found = claim(a, t, ret);
    (void)pthread_mutex_unlock(&a->lock);
    return found;
}

bool ckptfs_admission_oldest(struct ckptfs_admission *a, char *buf, size_t cap)
{
    (void)pthread_mutex_lock(&a->lock);
    const struct ckptfs_turn *t = TAILQ_FIRST(&a->running);
    if (t) {
        const char *step = t->of.step_name, *path = t->of.path ? t->of.path : "";
        (void)snprintf(buf, cap, "%s%s%s", step, *step && *path ? "/" : "", path);
    }
    (void)pthread_mutex_unlock(&a->lock);
    return t;
}

void ckptfs_admission_stop(struct ckptfs_admission *a)
{
    (void)pthread_mutex_lock(&a->lock);
    a->stopping = true;
    for (struct ckptfs_turn *t; (t = TAILQ_FIRST(&a->waiting));)
        end_to_wait(a, t, EIO);
    (void)pthread_mutex_unlock(&a->lock);
}

size_t ckptfs_admission_waiting(struct ckptfs_admission *a)
{
    (void)pthread_mutex_lock(&a->lock);
    const size_t n = a->nwaiting;
    (void)pthread_mutex_unlock(&a->lock);
    return n;
}
