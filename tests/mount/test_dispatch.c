/* SPDX-License-Identifier: Apache-2.0 */
/* Requests in their lanes. */
#include "test.h"

#include <errno.h>
#include <semaphore.h>

#include "mount/dispatch.h"

/* A request that begins, waits until it may end, and says how it was answered. */
struct request {
    struct ckptfs_job job; /* first */
    sem_t began, may_end, answered;
    int error; /* -1: it ran */
};

static void run(struct ckptfs_job *job)
{
    struct request *r = (struct request *)job;

    (void)sem_post(&r->began);
    (void)sem_wait(&r->may_end);
    r->error = -1;
    (void)sem_post(&r->answered);
}

static void refuse(struct ckptfs_job *job, int error)
{
    struct request *r = (struct request *)job;

    r->error = error;
    (void)sem_post(&r->answered);
}

static void request_init(struct request *r)
{
    *r = (struct request){
        .job = {.run = run, .refuse = refuse, .step = 1, .file = 2, .file_jobs = 1}};
    (void)sem_init(&r->began, 0, 0);
    (void)sem_init(&r->may_end, 0, 0);
    (void)sem_init(&r->answered, 0, 0);
}

struct session_thread {
    struct ckptfs_dispatch *d;
    struct request *r;
};

static void *session(void *arg)
{
    struct session_thread *s = arg;

    ckptfs_dispatch(s->d, &s->r->job);
    return NULL;
}

TEST(dispatch, a_queued_job_runs_when_the_one_before_it_ends)
{
    struct ckptfs_dispatch d;
    struct request first, second;
    struct session_thread s = {&d, &first};
    pthread_t thread;

    request_init(&first);
    request_init(&second);
    CHECK_EQ(ckptfs_dispatch_init(&d, 10), 0);
    CHECK_EQ(pthread_create(&thread, NULL, session, &s), 0);
    (void)sem_wait(&first.began);
    ckptfs_dispatch(&d, &second.job);
    CHECK_EQ(ckptfs_dispatch_queued(&d), 1);
    (void)sem_post(&second.may_end);
    (void)sem_post(&first.may_end);
    (void)sem_wait(&second.answered);
    CHECK_EQ(first.error, -1);
    CHECK_EQ(second.error, -1);
    CHECK_EQ(pthread_join(thread, NULL), 0);
    ckptfs_dispatch_stop(&d);
    ckptfs_dispatch_release(&d);
}

TEST(dispatch, what_is_queued_at_the_end_is_refused)
{
    struct ckptfs_dispatch d;
    struct request first, second;
    struct session_thread s = {&d, &first};
    pthread_t thread;

    request_init(&first);
    request_init(&second);
    CHECK_EQ(ckptfs_dispatch_init(&d, 10), 0);
    CHECK_EQ(pthread_create(&thread, NULL, session, &s), 0);
    (void)sem_wait(&first.began);
    ckptfs_dispatch(&d, &second.job);
    ckptfs_dispatch_stop(&d);
    (void)sem_wait(&second.answered);
    CHECK_EQ(second.error, EIO);
    (void)sem_post(&first.may_end);
    CHECK_EQ(pthread_join(thread, NULL), 0);
    ckptfs_dispatch_release(&d);
}

TESTS(T(dispatch, a_queued_job_runs_when_the_one_before_it_ends),
      T(dispatch, what_is_queued_at_the_end_is_refused))
