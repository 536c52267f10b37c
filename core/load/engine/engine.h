/* SPDX-License-Identifier: Apache-2.0 */
/* The engine executes a plan (plan.h) on one rank: worker threads read units from storage and copy
 * bytes into the destinations; one pump thread (or, without it, a caller that waits) sends and
 * receives slices and watches the timeouts. load.c starts and ends it; reload.c takes the plan
 * back; agree.c asks how much memory a plan needs.
 *
 * A rank reads its chunks in the order of its plan, each into a read slot, which is a buffer for
 * one chunk; the number of read slots limits how far it reads ahead. Slices that other ranks have
 * read are received into a window slot, which is a buffer for one window, and are passed on from
 * there. Only workers write to host destinations; on a device they are written by copies that the
 * pump queues. Nothing is written after the load has stopped. If the operating system does not
 * return from a read, the worker that is in it keeps the engine's memory alive, and the caller goes
 * on without it. */
#pragma once

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "comm/comm.h"
#include "load/engine/measure.h"
#include "load/plan/plan.h"
#include "tensor/ndcopy.h"
#include "tensor/read.h"

struct ckpt_engine_options {
    uint32_t ahead;   /* number of read slots */
    uint32_t slots;   /* number of window slots: windows in flight */
    uint32_t threads; /* number of workers */
    uint32_t read_timeout_ms, exchange_timeout_ms;
    struct ckpt_engine_mode mode;
    struct ckpt_box_cost cost; /* how holes between the bytes that are wanted are read */
    uint64_t bounce;           /* bytes of each worker's bounce buffer for O_DIRECT; 0: none */
};

/* Statistics of this rank. Durations are in nanoseconds; those of reading and placing are added up
 * over the workers. */
struct ckpt_engine_stats {
    atomic_ullong sent, received; /* bytes */
    atomic_ullong read_ns, place_ns;
    atomic_ullong exchange_ns; /* of the pump's turns, if this rank exchanges anything */
    atomic_ullong arrived;     /* bytes that reads have returned, also of reads under way */
    atomic_ullong first_ns;    /* clock time at which the first want was complete; 0: none yet */
    atomic_ullong end_ns;      /* clock time of the end of the load; 0: it runs */
    double exchange_rate;      /* bytes received per second in the fastest window; of the pump */
    uint64_t start_ns;         /* clock time of ckpt_engine_start */
    uint64_t skipped;          /* bytes of wants that are not sent again */
    uint64_t buffers;          /* bytes of host memory */
    uint64_t device_buffers;   /* bytes of device memory */
    uint64_t kept;             /* bytes of pinned memory, which the device keeps afterwards */
    struct ckpt_read_stats reads;
};

struct ckpt_engine;

/* An engine is started with these. comm is borrowed until ckpt_engine_end; the engine holds a
 * reference to view and copies target. ckpt_engine_start takes plan and job_wants, even if it
 * fails, because workers may use them afterwards: both members are NULL then. */
struct ckpt_engine_inputs {
    struct ckpt_view *view;
    struct ckpt_comm *comm;
    struct ckpt_plan *plan;
    struct ckpt_job_wants *job_wants;
    const struct ckpt_target *target; /* one for each want of this rank */
    size_t ntarget;
    uint64_t needed_bytes, unique_bytes; /* for the statistics of the job */
};

/* Start the load on this rank: make the slots, start the threads. Does not wait for other ranks.
 * After a failure the caller must tell them, by ckpt_engine_refuse. (Only if the engine itself
 * could not be allocated, plan and job_wants remain in *inputs.) */
int ckpt_engine_start(struct ckpt_engine_inputs *inputs, const struct ckpt_engine_options *opt,
                      const struct ckpt_engine_sizes *sizes, struct ckpt_engine **ret,
                      struct ckpt_err *err);

/* This rank could not start the load, because of *err: make it fail on all ranks. Waits until all
 * ranks know, and sets *err to the error that all report. Does nothing in a job of one rank. */
void ckpt_engine_refuse(struct ckpt_comm *comm, uint32_t timeout_ms, struct ckpt_err *err);

/* Wait for the end of the load, as ckpt_load_wait (load.h) does. */
int ckpt_engine_wait(struct ckpt_engine *e, uint32_t timeout_ms, struct ckpt_err *err);

/* Wait for the next want to arrive, as ckpt_load_next does. */
int ckpt_engine_next(struct ckpt_engine *e, uint32_t timeout_ms, size_t *ret_want,
                     struct ckpt_err *err);

/* Stop the load, as ckpt_load_cancel does: returns at once, and may be called from any thread. */
void ckpt_engine_cancel(struct ckpt_engine *e);

/* Pause the load, as ckpt_load_pause does; may be called from any thread. */
int ckpt_engine_pause(struct ckpt_engine *e, uint32_t timeout_ms, struct ckpt_err *err);

/* Go on after a pause, as ckpt_load_resume does. */
int ckpt_engine_resume(struct ckpt_engine *e, struct ckpt_err *err);

/* Stop the load if it runs, and drop the caller's reference to the engine; NULL is allowed. Each
 * read that is under way is waited for until it has lasted 5 s, or read_timeout_ms if that is less.
 * A worker that is still in a read then keeps the engine, and the last worker that returns frees
 * it. */
void ckpt_engine_end(struct ckpt_engine *e);

/* End the engine as ckpt_engine_end does, but give plan and job_wants back to *inputs, for a
 * reload. Each read is waited for until it has lasted read_timeout_ms, or half of
 * exchange_timeout_ms if that is less, because the other ranks wait meanwhile. If a worker is still
 * in a read then, *inputs stays as it is. */
void ckpt_engine_take_back(struct ckpt_engine *e, struct ckpt_engine_inputs *inputs);

/* The statistics of this rank up to now; plan_s is 0. */
void ckpt_engine_own(const struct ckpt_engine *e, struct ckpt_load_stats *ret);

/* The statistics of all ranks; all members are 0 until the load has succeeded. Borrowed. */
const struct ckpt_load_stats *ckpt_engine_job(const struct ckpt_engine *e);
