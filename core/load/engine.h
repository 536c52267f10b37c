/* SPDX-License-Identifier: Apache-2.0 */
/* A load that runs: workers read units and place what arrives, a pump moves pieces between ranks
 * and watches the clock.
 *
 * A rank reads its pieces in the order of its plan, as far ahead as it has read slots (buffers of
 * one piece each). Windows are in flight in a few slots of their own, which hold what comes from
 * others; what has arrived is passed on from there. Destinations are written by workers only, from
 * slots, and never after the load has stopped. A worker that the operating system does not return
 * from keeps the engine alive, not the caller. */
#ifndef CKPT_LOAD_ENGINE_H
#define CKPT_LOAD_ENGINE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "load/comm.h"
#include "load/place.h"
#include "load/plan.h"
#include "tensor/boxes.h"
#include "tensor/read.h"

struct ckpt_engine_mode {
    bool verify; /* with XXH3 */
    bool device; /* windows and destinations are in a device's memory */
};

/* What one slot needs: exact, from the plan. */
struct ckpt_engine_sizes {
    uint64_t read, receive;              /* bytes of a read slot's piece; of a window's others */
    uint64_t units;                      /* of a piece, at most */
    uint64_t read_copies, window_copies; /* descriptors (device) */
    uint64_t read_host, read_device;     /* bytes of a read slot, by where they are */
    uint64_t window_host, window_device; /* and of a window's */
};

int ckpt_engine_measure(const struct ckpt_plan *plan, const struct ckpt_engine_mode *mode,
                        struct ckpt_engine_sizes *ret, struct ckpt_err *err);

struct ckpt_engine_options {
    uint32_t ahead;   /* pieces that are read ahead: read slots */
    uint32_t slots;   /* windows in flight */
    uint32_t threads; /* that read */
    uint32_t helper;  /* the rank that is asked to read what this one can't */
    uint32_t read_timeout_ms, exchange_timeout_ms;
    struct ckpt_engine_mode mode;
    struct ckpt_box_cost cost;
    uint64_t bounce; /* bytes of each thread's bounce buffer */
};

struct ckpt_engine_stats {
    atomic_ullong sent, received, retries;
    atomic_ullong read_ns, place_ns, exchange_ns;
    atomic_ullong first_ns, end_ns; /* 0: not yet */
    uint64_t start_ns;
    uint64_t buffers, device_buffers;
    struct ckpt_read_stats reads;
};

struct ckpt_engine;

/* Everything is borrowed until ckpt_engine_end, but for plan and job_wants, which ckpt_engine_start
 * takes (plan is NULL then): workers may use them after it has failed. view is held. target has an
 * entry per want of this rank. */
struct ckpt_engine_parts {
    struct ckpt_view *view;
    struct ckpt_comm *comm;
    struct ckpt_plan *plan;
    struct ckpt_job_wants *job_wants;
    const struct ckpt_target *target;
    size_t ntarget;
    uint64_t needed_bytes, unique_bytes; /* for the statistics of the job */
};

int ckpt_engine_start(struct ckpt_engine_parts *parts, const struct ckpt_engine_options *opt,
                      const struct ckpt_engine_sizes *sizes, struct ckpt_engine **ret,
                      struct ckpt_err *err);

/* A load that can't start on this rank does not on any: tell the others, and give *err the error
 * that all get. */
void ckpt_engine_refuse(struct ckpt_comm *comm, uint32_t timeout_ms, struct ckpt_err *err);

/* As ckpt_load_wait and ckpt_load_next. */
int ckpt_engine_wait(struct ckpt_engine *e, uint32_t timeout_ms, struct ckpt_err *err);
int ckpt_engine_next(struct ckpt_engine *e, uint32_t timeout_ms, size_t *ret_want,
                     struct ckpt_err *err);
void ckpt_engine_cancel(struct ckpt_engine *e);

/* As ckpt_load_pause and ckpt_load_resume. */
int ckpt_engine_pause(struct ckpt_engine *e, uint32_t timeout_ms, struct ckpt_err *err);
int ckpt_engine_resume(struct ckpt_engine *e, struct ckpt_err *err);

/* Stop the load if it runs, and let go of it (NULL: nothing happens). Reads that are under way are
 * waited for, but no longer than a few seconds or read_timeout_ms after each began: a worker that
 * the operating system does not return from by then keeps the engine, and frees it when it ends. */
void ckpt_engine_end(struct ckpt_engine *e);

/* The same for who wants the plan and the job_wants back: each read is waited for until
 * read_timeout_ms after it began (half of exchange_timeout_ms, if that is less: other ranks wait
 * meanwhile). *parts gets both, unless a worker is in a read even then. */
void ckpt_engine_take_back(struct ckpt_engine *e, struct ckpt_engine_parts *parts);

/* What it cost so far. */
void ckpt_engine_own(const struct ckpt_engine *e, struct ckpt_load_stats *ret);

/* Of all ranks, known after a good end. */
const struct ckpt_load_stats *ckpt_engine_job(const struct ckpt_engine *e);

#endif
