/* SPDX-License-Identifier: Apache-2.0 */
/* Admission of requests that may wait for storage, so that slow storage cannot block the whole
 * mount: a shard or step that hangs delays only its own readers.
 *
 * Every such request belongs to a step and to a file, of each of which a bounded number runs at a
 * time. Further ones wait for their turn, in order, on the session threads that received them;
 * libfuse starts another thread whenever none is free. A request that waits is refused with EINTR
 * if its caller is interrupted, with EIO after CKPTFS_QUEUE_S seconds, and with ETIMEDOUT once a
 * request of its file is known to hang. */
#pragma once

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/queue.h>

#include <fuse_lowlevel.h>

enum {
    CKPTFS_STEP_JOBS = 16,   /* requests of one step that may run at a time */
    CKPTFS_FILE_JOBS = 8,    /* requests of one file */
    CKPTFS_OPEN_JOBS = 1,    /* that open one step: further ones would only wait for the first */
    CKPTFS_MOST_JOBS = 1000, /* that run or wait, each on a thread: further ones are refused */
    CKPTFS_QUEUE_S = 60,     /* limit for the time that one waits, in seconds */
};

/* A request is counted by its step and by its file. */
struct ckptfs_lanes {
    uint64_t step, file; /* any numbers that identify them */
    unsigned file_jobs;  /* limit of the file: CKPTFS_FILE_JOBS or another */
    /* Names for the log, which live as long as the request. path: of the file that is read; NULL: a
     * step is opened. */
    const char *step_name, *path;
};

/* A request that runs or waits, in the memory of its thread. */
struct ckptfs_turn {
    struct ckptfs_admission *admission;
    struct ckptfs_lanes of;
    TAILQ_ENTRY(ckptfs_turn) link;
    pthread_cond_t changed;
    int error; /* 0: it runs, WAITS (admission.c), or the errno with which it was refused */
    fuse_req_t req;
    uint64_t began_ms;   /* when it began to run (ckpt_now_ms) */
    atomic_bool claimed; /* somebody answers it, or has */
    bool hangs;          /* and not its thread */
};

/* A list of them, in the order in which they came. */
TAILQ_HEAD(ckptfs_turns, ckptfs_turn);

struct ckptfs_admission {
    pthread_mutex_t lock; /* protects what follows; no other lock is taken while it is held */
    struct ckptfs_turns running, waiting; /* no request waits that could run */
    size_t nrunning, nwaiting;
    bool stopping;
    atomic_size_t expired; /* requests that have waited for too long; anybody may reset it */
};

/* Begin without requests; end when none is left. */
void ckptfs_admission_init(struct ckptfs_admission *a);
void ckptfs_admission_release(struct ckptfs_admission *a);

/* Wait until the request may run. Returns 0, after which ckptfs_leave must be called, or the errno
 * with which to answer. */
int ckptfs_admit(struct ckptfs_admission *a, struct ckptfs_turn *t, const struct ckptfs_lanes *of,
                 fuse_req_t req);
void ckptfs_leave(struct ckptfs_turn *t);

/* Claim the answer to a request that runs, which one alone gets: the thread that serves it, or who
 * answers it in its place, because that thread hangs. False: it belongs to the other, and the
 * request may be gone. */
bool ckptfs_turn_claim(struct ckptfs_turn *t);

/* A request that was claimed for its thread. */
struct ckptfs_overdue {
    fuse_req_t req; /* to be answered */
    struct ckptfs_lanes of;
    uint64_t began_ms;
};

/* Claim a request that reads a file and has run for limit_ms, or for an eighth of that if another
 * one of its file hangs. False: there is none. */
bool ckptfs_admission_overdue(struct ckptfs_admission *a, uint64_t limit_ms,
                              struct ckptfs_overdue *ret);
/* Claim any request that runs, to end all. */
bool ckptfs_admission_any(struct ckptfs_admission *a, struct ckptfs_overdue *ret);

/* Write the name of what the oldest running request is about, its step and file, to buf. False:
 * none runs. */
bool ckptfs_admission_oldest(struct ckptfs_admission *a, char *buf, size_t cap);

/* Refuse all requests that wait, and those that come later, with EIO. */
void ckptfs_admission_stop(struct ckptfs_admission *a);

/* The number of requests that wait. */
size_t ckptfs_admission_waiting(struct ckptfs_admission *a);
