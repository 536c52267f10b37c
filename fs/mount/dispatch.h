/* SPDX-License-Identifier: Apache-2.0 */
/* Scheduling of requests that may wait for storage, so that slow storage cannot block the whole
 * mount: a shard or step that hangs delays only its own readers.
 *
 * Every job belongs to a lane for its step and a lane for its file, and each lane runs a bounded
 * number of jobs at a time. A job runs at once, on the session thread that received it, as long as
 * enough of those threads stay free for requests that never wait. Otherwise it is queued; a pool of
 * threads runs queued jobs in order, as their lanes have room. A queued job is answered with EINTR
 * if its caller is interrupted, and with EIO after CKPTFS_QUEUE_S seconds. */
#ifndef CKPT_FS_MOUNT_DISPATCH_H
#define CKPT_FS_MOUNT_DISPATCH_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

enum {
    CKPTFS_STEP_JOBS = 16, /* jobs of one step that may run at a time */
    CKPTFS_FILE_JOBS = 8,  /* jobs of one file that may run at a time */
    CKPTFS_OPEN_JOBS = 1,  /* jobs that open one step: further ones would only wait for the first */
    CKPTFS_POOL_THREADS = 64,
    CKPTFS_QUEUE_S = 60, /* limit for the time in the queue, in seconds */
};

struct ckptfs_job {
    /* Answer the request and free the job. run does what the job asks for; refuse answers with an
     * errno. Exactly one of the two is called, from any thread. */
    void (*run)(struct ckptfs_job *job);
    void (*refuse)(struct ckptfs_job *job, int error);
    /* Called with `on` true when the job enters the queue, and false when it leaves it. In between,
     * ckptfs_dispatch_interrupt must be called if the caller no longer waits. The call with `on`
     * false returns only when no call of ckptfs_dispatch_interrupt for the job is in progress. May
     * be NULL. */
    void (*watch)(struct ckptfs_job *job, bool on);
    uint64_t step, file; /* identify the job's two lanes; any numbers */
    unsigned file_jobs;  /* limit of the file's lane: CKPTFS_FILE_JOBS or another */
    /* The members below belong to the dispatcher. */
    struct ckptfs_dispatch *dispatch;
    struct ckptfs_job *prev, *next; /* in the queue */
    bool queued, interrupted;
    time_t since; /* when it was queued, in seconds of the monotonic clock */
};

struct ckptfs_lane {
    uint64_t key;
    unsigned running;
};

struct ckptfs_dispatch {
    pthread_mutex_t lock; /* protects everything below; not held while a job is run or refused */
    pthread_cond_t work;  /* signalled when a queued job may have room, and at the stop */
    pthread_cond_t ended; /* a pool thread has ended */
    struct ckptfs_job *first, *last;
    size_t nqueued;
    struct ckptfs_lane *lane; /* the lanes with running jobs: at most two for each job */
    size_t nlane, caplane;
    unsigned inline_jobs, most_inline; /* jobs running on session threads, and their limit */
    unsigned pool, idle;               /* pool threads: all, and those without a job */
    bool stopping;
};

/* `threads` is the number of threads of the session's loop, two of which are kept free of jobs.
 * Returns 0, or -1 (no memory). */
int ckptfs_dispatch_init(struct ckptfs_dispatch *d, unsigned threads);
void ckptfs_dispatch_release(struct ckptfs_dispatch *d); /* only after ckptfs_dispatch_stop */

/* Run the job now or later. Takes ownership. */
void ckptfs_dispatch(struct ckptfs_dispatch *d, struct ckptfs_job *job);

/* A queued job's caller no longer waits: it is refused with EINTR. */
void ckptfs_dispatch_interrupt(struct ckptfs_job *job);

/* Refuse with EIO the jobs that have been queued for too long; returns their number. To be called
 * about once a second. */
size_t ckptfs_dispatch_expire(struct ckptfs_dispatch *d);

/* Refuse all queued jobs, and wait until no job runs. Jobs that arrive later are refused. */
void ckptfs_dispatch_stop(struct ckptfs_dispatch *d);

/* The number of queued jobs. */
size_t ckptfs_dispatch_queued(struct ckptfs_dispatch *d);

#endif
