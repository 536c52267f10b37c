/* SPDX-License-Identifier: Apache-2.0 */
/* Waiting for NCCL with a deadline; and checking and splitting the caller's communicator. */
#include "comm/nccl/inner.h"

#include <inttypes.h>
#include <stdlib.h>
#include <time.h>

#include "base/clock.h"
#include "base/err.h"
#include "comm/detached.h"
#include "comm/xport.h"
#include "device/cuda.h"

enum { RENDEZVOUS_MS = 300 * 1000, LOOK_US = 200, TICK_MS = 2, GRACE_MS = 500 };
static const char WHAT[] = "splitting the communicator given";

/* ---- errors and waiting ---- */

int ckpt_nccl_failed(ncclComm_t comm, ncclResult_t rc, const char *what, struct ckpt_err *err)
{
    const char *why = comm ? ncclGetLastError(comm) : NULL;

    return ckpt_fail(err, CKPT_PEER, "NCCL: %s: %s%s%s", what, ncclGetErrorString(rc),
                     why && *why ? ": " : "", why ? why : "");
}

uint32_t ckpt_nccl_rendezvous_ms(void)
{
    uint32_t ms = RENDEZVOUS_MS;

    (void)ckpt_comm_rendezvous_ms(&ms, NULL);
    return ms;
}

int ckpt_nccl_settle(ncclComm_t comm, struct ckpt_comm *ctl, uint64_t until, const char *what,
                     struct ckpt_err *err)
{
    const struct timespec look = {0, LOOK_US * 1000};

    for (;;) {
        ncclResult_t state = ncclSuccess, rc = ncclCommGetAsyncError(comm, &state);
        if (rc == ncclSuccess && state == ncclSuccess)
            return 0;
        if (rc != ncclSuccess || state != ncclInProgress)
            return ckpt_nccl_failed(comm, rc != ncclSuccess ? rc : state, what, err);
        const int seen = ctl ? ckpt_comm_look(ctl, err) : 0;
        if (seen != 0)
            return seen;
        if (ckpt_now_ms() > until)
            return ckpt_fail(err, CKPT_TIMEOUT, "NCCL: %s takes longer than %u s", what,
                             ckpt_nccl_rendezvous_ms() / 1000);
        (void)nanosleep(&look, NULL);
    }
}

/* ---- the caller's communicator ---- */

int ckpt_nccl_check(ncclComm_t comm, const struct ckpt_comm *ctl, int number, struct ckpt_err *err)
{
    int rank = -1, size = -1, device = -1;
    ncclResult_t rc = ncclCommUserRank(comm, &rank);

    if (rc == ncclSuccess)
        rc = ncclCommCount(comm, &size);
    if (rc == ncclSuccess)
        rc = ncclCommCuDevice(comm, &device);
    if (rc != ncclSuccess)
        return ckpt_nccl_failed(comm, rc, "the communicator given", err);
    if (rank != (int)ckpt_comm_rank(ctl) || size != (int)ckpt_comm_size(ctl))
        return ckpt_fail(err, CKPT_USAGE,
                         "this is rank %" PRIu32 " of %" PRIu32
                         ", in the NCCL communicator rank %d of %d",
                         ckpt_comm_rank(ctl), ckpt_comm_size(ctl), rank, size);
    if (device != number)
        return ckpt_fail(err, CKPT_USAGE,
                         "the NCCL communicator is of CUDA device %d, this rank's is %d", device,
                         number);
    return 0;
}

int ckpt_nccl_idle(ncclComm_t comm, bool busy, struct ckpt_err *err)
{
    ncclResult_t state = ncclSuccess;

    if (busy)
        return ckpt_fail(err, CKPT_PEER,
                         "the NCCL communicator given is still being split, for a load that "
                         "failed: abort it, and make a new comm with another one");
    const ncclResult_t rc = ncclCommGetAsyncError(comm, &state);
    if (rc == ncclSuccess && state == ncclSuccess)
        return 0;
    return ckpt_nccl_failed(comm, rc != ncclSuccess ? rc : state,
                            "the communicator given is not idle", err);
}

/* ---- splitting ---- */

/* The caller's communicator may be a blocking one, and wait for ranks that never come: a detached
 * thread splits it, and this one gives up after the deadline. */
struct splitting {
    struct ckpt_detached task;
    struct ckpt_cuda *at; /* a reference */
    ncclComm_t from, made;
    int rank;
    uint64_t until;
    bool pending; /* NCCL may still write to `made` */
    bool taken;   /* `made` belongs to the waiting thread */
    int result;
    struct ckpt_err err;
};

static void splitting_free(struct ckpt_detached *e)
{
    struct splitting *s = (struct splitting *)e;
    struct ckpt_cuda_scope scope;

    if (s->pending)
        return;
    if (s->made && !s->taken && ckpt_cuda_enter(s->at, &scope, NULL) == 0) {
        (void)ncclCommAbort(s->made);
        ckpt_cuda_leave(s->at, &scope);
    }
    s->at->base.ops->unref(&s->at->base);
    free(s);
}

/* splitShare 0: the new communicator shares no resources with the caller's, which stays usable when
 * the new one, and those that are split from it, are aborted. */
static int split_now(struct splitting *s, struct ckpt_err *err)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;

    config.blocking = 0;
    config.splitShare = 0;
    const ncclResult_t rc = ncclCommSplit(s->from, 0, s->rank, &s->made, &config);
    if (!ckpt_nccl_good(rc))
        return ckpt_nccl_failed(s->from, rc, WHAT, err);
    if (ckpt_nccl_settle(s->from, NULL, s->until, WHAT, err) < 0) {
        ncclResult_t state = ncclSuccess;
        s->pending =
            ncclCommGetAsyncError(s->from, &state) == ncclSuccess && state == ncclInProgress;
        return -1;
    }
    return ckpt_nccl_settle(s->made, NULL, s->until, WHAT, err);
}

static void split(struct ckpt_detached *e)
{
    struct splitting *s = (struct splitting *)e;
    struct ckpt_err err = {0};

    ckpt_cuda_adopt(&s->at->base); /* the thread belongs to the loader */
    const int result = split_now(s, &err);
    (void)pthread_mutex_lock(&e->lock);
    s->result = result;
    s->err = err;
    (void)pthread_mutex_unlock(&e->lock);
}

/* Wait for the thread. 1: another rank has failed. */
static int await(struct splitting *s, struct ckpt_comm *control, struct ckpt_err *err)
{
    while (!ckpt_detached_wait(&s->task, TICK_MS)) {
        const int seen = ckpt_comm_look(control, err);
        if (seen != 0)
            return seen;
        if (ckpt_now_ms() > s->until + GRACE_MS)
            return ckpt_fail(err, CKPT_TIMEOUT, "NCCL: %s takes longer than %u s", WHAT,
                             ckpt_nccl_rendezvous_ms() / 1000);
    }
    return s->result < 0 ? ckpt_err_move(err, &s->err) : 0;
}

int ckpt_nccl_split(struct ckpt_cuda *at, ncclComm_t from, struct ckpt_comm *control,
                    ncclComm_t *ret, bool *ret_busy, struct ckpt_err *err)
{
    struct splitting *s = calloc(1, sizeof *s);

    if (!s)
        return ckpt_nomem(err);
    ckpt_detached_init(&s->task, split, splitting_free);
    at->base.ops->ref(&at->base);
    s->at = at;
    s->from = from;
    s->rank = (int)ckpt_comm_rank(control);
    s->until = ckpt_now_ms() + ckpt_nccl_rendezvous_ms();
    if (ckpt_detached_start(&s->task, 1) == 0) {
        ckpt_detached_unref(&s->task);
        return ckpt_fail(err, CKPT_NOMEM, "no thread could be started");
    }
    const int rc = await(s, control, err);
    *ret_busy = !ckpt_detached_wait(&s->task, 0) || s->pending;
    if (!*ret_busy) {
        *ret = s->made;
        s->taken = true;
    }
    ckpt_detached_unref(&s->task);
    return rc;
}
