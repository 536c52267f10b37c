/* SPDX-License-Identifier: Apache-2.0 */
/* Requests that wait for their turn. */
#include "test.h"

#include <errno.h>
#include <semaphore.h>
#include <unistd.h>

#include "mount/admission.h"

/* A request on a thread of its own, which runs until it may end. */
struct request {
    struct ckptfs_admission *a;
    struct ckptfs_lanes of;
    void *data;
    _Atomic(fuse_interrupt_func_t) interrupt; /* what libfuse would call, with data */
    pthread_t thread;
    sem_t began, may_end;
    int error;
    bool answered; /* by its thread */
};

/* In place of libfuse's: a request is its own number. */
void fuse_req_interrupt_func(fuse_req_t req, fuse_interrupt_func_t func, void *data)
{
    struct request *r = (struct request *)req;

    r->data = data;
    atomic_store(&r->interrupt, func);
}

static void *serve(void *arg)
{
    struct request *r = arg;
    struct ckptfs_turn turn;

    r->error = ckptfs_admit(r->a, &turn, &r->of, (fuse_req_t)r);
    if (r->error)
        return NULL;
    (void)sem_post(&r->began);
    (void)sem_wait(&r->may_end);
    r->answered = ckptfs_turn_claim(&turn);
    ckptfs_leave(&turn);
    return NULL;
}

static void begin(struct request *r, struct ckptfs_admission *a, uint64_t file)
{
    *r = (struct request){.a = a, .of = {1, file, 1, "10", "model.safetensors"}};
    (void)sem_init(&r->began, 0, 0);
    (void)sem_init(&r->may_end, 0, 0);
    assert_int_equal(pthread_create(&r->thread, NULL, serve, r), 0);
}

static void end(struct request *r)
{
    (void)sem_post(&r->may_end);
    assert_int_equal(pthread_join(r->thread, NULL), 0);
}

static void wait_for(struct ckptfs_admission *a, size_t waiting)
{
    while (ckptfs_admission_waiting(a) != waiting)
        (void)usleep(1000);
}

TEST(admission, a_request_runs_when_the_one_before_it_ends)
{
    struct ckptfs_admission a;
    struct request first, second, third, other;

    ckptfs_admission_init(&a);
    begin(&first, &a, 2);
    (void)sem_wait(&first.began);
    begin(&second, &a, 2);
    wait_for(&a, 1);
    begin(&third, &a, 2);
    wait_for(&a, 2);
    begin(&other, &a, 3); /* another file need not wait */
    (void)sem_wait(&other.began);
    end(&other);
    CHECK_EQ(ckptfs_admission_waiting(&a), 2);
    end(&first);
    (void)sem_wait(&second.began);
    CHECK_EQ(ckptfs_admission_waiting(&a), 1);
    end(&second);
    end(&third);
    CHECK_EQ(first.error | second.error | third.error | other.error, 0);
    ckptfs_admission_release(&a);
}

TEST(admission, a_request_that_waits_ends_if_its_caller_is_interrupted)
{
    struct ckptfs_admission a;
    struct request first, second;

    ckptfs_admission_init(&a);
    begin(&first, &a, 2);
    (void)sem_wait(&first.began);
    begin(&second, &a, 2);
    while (!atomic_load(&second.interrupt))
        (void)usleep(1000);
    atomic_load (&second.interrupt)((fuse_req_t)&second, second.data);
    end(&second);
    CHECK_EQ(second.error, EINTR);
    end(&first);
    CHECK_EQ(first.error, 0);
    ckptfs_admission_release(&a);
}

TEST(admission, what_waits_at_the_end_is_refused)
{
    struct ckptfs_admission a;
    struct request first, second, late;

    ckptfs_admission_init(&a);
    begin(&first, &a, 2);
    (void)sem_wait(&first.began);
    begin(&second, &a, 2);
    wait_for(&a, 1);
    ckptfs_admission_stop(&a);
    begin(&late, &a, 3);
    end(&second);
    end(&late);
    CHECK_EQ(second.error, EIO);
    CHECK_EQ(late.error, EIO);
    end(&first);
    ckptfs_admission_release(&a);
}

TEST(admission, a_request_is_answered_once)
{
    struct ckptfs_admission a;
    struct request first, second, waiting, late, opens;
    struct ckptfs_overdue o;
    char name[64];

    ckptfs_admission_init(&a);
    CHECK(!ckptfs_admission_oldest(&a, name, sizeof name));
    begin(&first, &a, 2);
    (void)sem_wait(&first.began);
    begin(&second, &a, 3);
    (void)sem_wait(&second.began);
    CHECK(ckptfs_admission_oldest(&a, name, sizeof name));
    assert_string_equal(name, "10/model.safetensors");
    begin(&waiting, &a, 2);
    wait_for(&a, 1);
    CHECK(!ckptfs_admission_overdue(&a, 3600 * 1000, &o)); /* none is so old */
    CHECK(ckptfs_admission_overdue(&a, 0, &o));
    CHECK(o.req == (fuse_req_t)&first && o.of.file == 2);
    begin(&late, &a, 2); /* nobody waits for a file that hangs */
    end(&late);
    end(&waiting);
    CHECK_EQ(late.error, ETIMEDOUT);
    CHECK_EQ(waiting.error, ETIMEDOUT);
    end(&first); /* too late */
    end(&second);
    CHECK(!first.answered && second.answered);
    CHECK(!ckptfs_admission_any(&a, &o));

    /* a step that is opened is not answered before the end of the mount, but once */
    opens = (struct request){.a = &a, .of = {1, 4, 1, "10", NULL}};
    (void)sem_init(&opens.began, 0, 0);
    (void)sem_init(&opens.may_end, 0, 0);
    assert_int_equal(pthread_create(&opens.thread, NULL, serve, &opens), 0);
    (void)sem_wait(&opens.began);
    CHECK(!ckptfs_admission_overdue(&a, 0, &o));
    CHECK(ckptfs_admission_any(&a, &o));
    CHECK(!ckptfs_admission_any(&a, &o));
    end(&opens);
    CHECK(!opens.answered);
    ckptfs_admission_release(&a);
}

TESTS(T(admission, a_request_is_answered_once),
      T(admission, a_request_runs_when_the_one_before_it_ends),
      T(admission, a_request_that_waits_ends_if_its_caller_is_interrupted),
      T(admission, what_waits_at_the_end_is_refused))
