/* SPDX-License-Identifier: Apache-2.0 */
/* Requests that may wait for storage, kept from stopping the mount.
 *
 * A hung shard or step must cost its own readers only. Every job belongs to a lane for its step and
 * to a lane for its file, and each lane runs a bounded number of jobs. A job runs at once, on the
 * session's thread that brought it, while enough of those threads stay free for requests that never
 * wait; otherwise it is queued, and a pool of threads runs what is queued, in order, as its lanes
 * have room. A queued job whose caller is interrupted is answered with EINTR, and one that has
 * waited too long with EIO. */
#ifndef CKPT_FS_DISPATCH_H
#define CKPT_FS_DISPATCH_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

enum {
    CKPTFS_STEP_JOBS = 16, /* jobs of one step that run at a time */
    CKPTFS_FILE_JOBS = 8,  /* of one file of it */
    CKPTFS_OPEN_JOBS = 1,  /* that open a step: the others would only wait for the first */
    CKPTFS_POOL_THREADS = 64,
    CKPTFS_QUEUE_S = 60, /* the longest that a job stays queued */
};

struct ckptfs_job {
    /* Answer the request and free the job: by doing what it asks for, or with an errno. Exactly one
     * of the two is called, from any thread. */
    void (*run)(struct ckptfs_job *job);
    void (*refuse)(struct ckptfs_job *job, int error);
    /* While it is queued, call ckptfs_dispatch_interrupt if the caller no longer waits. May be
     * NULL. Calling it with `on` false returns only when no such call is in progress. */
    void (*watch)(struct ckptfs_job *job, bool on);
    uint64_t step, file; /* its lanes: any numbers */
    unsigned file_jobs;  /* how many jobs of `file` may run: CKPTFS_FILE_JOBS ... */
    /* dispatch's own */
    struct ckptfs_dispatch *dispatch;
    struct ckptfs_job *prev, *next; /* in the queue */
    bool queued, interrupted;
    time_t since; /* monotonic seconds */
};

struct ckptfs_lane {
    uint64_t key;
    unsigned running;
};

struct ckptfs_dispatch {
    pthread_mutex_t lock; /* everything below; no job runs or is refused while it is held */
    pthread_cond_t work;  /* a queued job may have room now, or stopping */
    pthread_cond_t ended; /* a pool thread has ended */
    struct ckptfs_job *first, *last;
    size_t nqueued;
    struct ckptfs_lane *lane; /* those with running jobs: two for each */
    size_t nlane, caplane;
    unsigned inline_jobs, most_inline; /* on the session's threads */
    unsigned pool, idle;               /* threads */
    bool stopping;
};

/* `threads`: of the session's loop. Two of them are kept free of jobs. 0 or -1 (no memory). */
int ckptfs_dispatch_init(struct ckptfs_dispatch *d, unsigned threads);
void ckptfs_dispatch_release(struct ckptfs_dispatch *d); /* after stop */

/* Run the job now or later. Takes ownership. */
void ckptfs_dispatch(struct ckptfs_dispatch *d, struct ckptfs_job *job);

/* A queued job's caller no longer waits: it is refused with EINTR. */
void ckptfs_dispatch_interrupt(struct ckptfs_job *job);

/* Refuse jobs that have been queued for too long, with EIO; how many there were. To be called every
 * second or so. */
size_t ckptfs_dispatch_expire(struct ckptfs_dispatch *d);

/* Refuse what is queued, and wait until nothing runs any more. Jobs that come afterwards are
 * refused. */
void ckptfs_dispatch_stop(struct ckptfs_dispatch *d);

size_t ckptfs_dispatch_queued(struct ckptfs_dispatch *d);

#endif
