/* SPDX-License-Identifier: Apache-2.0 */
/* The requests that run, and those that wait for their turn. */
#include "mount/admission.h"

#include <errno.h>

#include "base/clock.h"

enum { WAITS = -1 };

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

static void begin_to_run(struct ckptfs_admission *a, struct ckptfs_turn *t)
{
    TAILQ_INSERT_TAIL(&a->running, t, link);
    a->nrunning++;
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
    *t = (struct ckptfs_turn){.admission = a, .of = *of, .error = EIO};
    (void)pthread_mutex_lock(&a->lock);
    const bool refused = a->stopping || a->nrunning + a->nwaiting == CKPTFS_MOST_JOBS;
    const bool waits = !refused && !has_room(a, of);
    if (waits) {
        ckpt_cond_init(&t->changed);
        TAILQ_INSERT_TAIL(&a->waiting, t, link);
        a->nwaiting++;
        t->error = WAITS;
    } else if (!refused) {
        begin_to_run(a, t);
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
