/* SPDX-License-Identifier: Apache-2.0 */
/* Waiting for NCCL with a deadline; and connecting ranks over TCP, with the caller's communicator
 * to exchange the addresses. */
#include "comm/nccl/inner.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/err.h"
#include "comm/detached.h"
#include "comm/xport.h"
#include "device/cuda.h"

enum { MEET_MS = 300 * 1000, LOOK_US = 200, GRACE_MS = 500 };

int ckpt_nccl_failed(ncclComm_t comm, ncclResult_t rc, const char *what, struct ckpt_err *err)
{
    const char *why = comm ? ncclGetLastError(comm) : NULL;

    return ckpt_fail(err, CKPT_PEER, "NCCL: %s: %s%s%s", what, ncclGetErrorString(rc),
                     why && *why ? ": " : "", why ? why : "");
}

uint32_t ckpt_nccl_rendezvous_ms(void)
{
    uint32_t ms = MEET_MS;

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

/* ---- addresses ---- */

/* All ranks' addresses, exchanged by an all-gather in device memory. The caller's communicator may
 * be a blocking one, and wait for ranks that never come: a detached thread uses it, and this one
 * gives up after the deadline. */
struct gathering {
    struct ckpt_detached task;
    struct ckpt_cuda at; /* attached only: no streams, no kernel */
    ncclComm_t comm;
    CUstream stream;
    int rank, size;
    char *all, *mem; /* size * CKPT_TCP_ADDRESS bytes, pinned; the same in device memory */
    bool idle;       /* no queued work uses them any more */
    int result;
    struct ckpt_err err;
};

static void gathering_free(struct ckpt_detached *e)
{
    struct gathering *g = (struct gathering *)e;
    struct ckpt_cuda_scope scope;

    if (g->idle && g->at.context && ckpt_cuda_enter(&g->at, &scope, NULL) == 0) {
        (void)g->at.call.host_free(g->all);
        (void)g->at.call.mem_free((CUdeviceptr)(uintptr_t)g->mem);
        ckpt_cuda_leave(&g->at, &scope);
    }
    free(g);
}

/* Wait until the stream is idle. */
static int await_stream(struct gathering *g, uint64_t until, struct ckpt_err *err)
{
    const struct timespec look = {0, LOOK_US * 1000};
    CUresult rc;

    while ((rc = g->at.call.stream_query(g->stream)) == CUDA_ERROR_NOT_READY) {
        if (ckpt_now_ms() > until)
            return ckpt_fail(err, CKPT_TIMEOUT, "NCCL: exchanging addresses takes longer than %u s",
                             ckpt_nccl_rendezvous_ms() / 1000);
        (void)nanosleep(&look, NULL);
    }
    return ckpt_cuda_failed(&g->at, rc, "exchanging addresses", err);
}

/* Upload, all-gather and download, all queued on the caller's stream: other streams are not ordered
 * with a cuMemcpy that has returned. */
static int gather_now(struct gathering *g, struct ckpt_err *err)
{
    const size_t one = CKPT_TCP_ADDRESS, own = (size_t)g->rank * one;
    const uint64_t until = ckpt_now_ms() + ckpt_nccl_rendezvous_ms();

    ckpt_cuda_adopt(&g->at.base); /* the thread belongs to the loader */
    CUresult rc =
        g->at.call.upload((CUdeviceptr)(uintptr_t)(g->mem + own), g->all + own, one, g->stream);
    if (rc != CUDA_SUCCESS)
        return ckpt_cuda_failed(&g->at, rc, "exchanging addresses", err);
    const ncclResult_t got =
        ncclAllGather(g->mem + own, g->mem, one, ncclUint8, g->comm, g->stream);
    if (!ckpt_nccl_good(got))
        return ckpt_nccl_failed(g->comm, got, "exchanging addresses", err);
    if (ckpt_nccl_settle(g->comm, NULL, until, "exchanging addresses", err) < 0)
        return -1;
    rc = g->at.call.download(g->all, (CUdeviceptr)(uintptr_t)g->mem, (size_t)g->size * one,
                             g->stream);
    if (rc != CUDA_SUCCESS)
        return ckpt_cuda_failed(&g->at, rc, "exchanging addresses", err);
    return await_stream(g, until, err);
}

static void gather(struct ckpt_detached *e)
{
    struct gathering *g = (struct gathering *)e;
    struct ckpt_err err = {0};
    const int result = gather_now(g, &err);

    (void)pthread_mutex_lock(&e->lock);
    g->result = result;
    g->idle = result == 0;
    g->err = err;
    (void)pthread_mutex_unlock(&e->lock);
}

static int gathering_new(const struct ckpt_nccl *how, struct gathering **ret, struct ckpt_err *err)
{
    struct gathering *g = calloc(1, sizeof *g);
    struct ckpt_cuda_scope scope;

    if (!g)
        return ckpt_nomem(err);
    ckpt_detached_init(&g->task, gather, gathering_free);
    g->comm = how->comm;
    g->stream = how->stream;
    g->idle = true;
    ncclResult_t got = ncclCommUserRank(how->comm, &g->rank);
    if (got == ncclSuccess)
        got = ncclCommCount(how->comm, &g->size);
    if (got == ncclSuccess)
        got = ncclCommCuDevice(how->comm, &g->at.number);
    int rc =
        got == ncclSuccess ? 0 : ckpt_nccl_failed(how->comm, got, "the communicator given", err);
    if (rc == 0)
        rc = ckpt_cuda_attach(&g->at, err) < 0 ? -1 : ckpt_cuda_enter(&g->at, &scope, err);
    if (rc == 0) {
        const size_t len = (size_t)g->size * CKPT_TCP_ADDRESS;
        CUresult made = g->at.call.mem_alloc((CUdeviceptr *)(void *)&g->mem, len);
        if (made == CUDA_SUCCESS)
            made = g->at.call.host_alloc((void **)&g->all, len, CU_MEMHOSTALLOC_PORTABLE);
        ckpt_cuda_leave(&g->at, &scope);
        rc = ckpt_cuda_failed(&g->at, made, "memory for addresses", err);
    }
    if (rc < 0) {
        ckpt_detached_unref(&g->task);
        return -1;
    }
    memset(g->all, 0, (size_t)g->size * CKPT_TCP_ADDRESS);
    *ret = g;
    return 0;
}

/* Start the thread, and wait for its result. */
static int gather_addresses(struct gathering *g, struct ckpt_err *err)
{
    g->idle = false;
    if (ckpt_detached_start(&g->task, 1) == 0) {
        g->idle = true;
        return ckpt_fail(err, CKPT_NOMEM, "no thread could be started");
    }
    if (!ckpt_detached_wait(&g->task, ckpt_nccl_rendezvous_ms() + GRACE_MS))
        return ckpt_fail(err, CKPT_TIMEOUT, "NCCL: exchanging addresses takes longer than %u s",
                         ckpt_nccl_rendezvous_ms() / 1000);
    return g->result < 0 ? ckpt_fail(err, g->err.code, "%s", g->err.text) : 0;
}

/* Connect all ranks at these addresses. */
static int connect_all(const struct gathering *g, struct ckpt_tcp *tcp, struct ckpt_comm **ret,
                       struct ckpt_err *err)
{
    const char **address = calloc((size_t)g->size, sizeof *address);

    if (!address) {
        ckpt_tcp_free(tcp);
        return ckpt_nomem(err);
    }
    for (int r = 0; r < g->size; r++)
        address[r] = g->all + (size_t)r * CKPT_TCP_ADDRESS;
    int rc = ckpt_tcp_connect(tcp, (uint32_t)g->rank, (uint32_t)g->size, address,
                              ckpt_nccl_rendezvous_ms(), ret, err);
    free(address);
    return rc;
}

int ckpt_nccl_tcp(const struct ckpt_nccl *how, struct ckpt_comm **ret, struct ckpt_err *err)
{
    struct ckpt_tcp *tcp = NULL;
    struct gathering *g = NULL;

    if (gathering_new(how, &g, err) < 0)
        return -1;
    int rc = ckpt_tcp_listen(NULL, &tcp, err);
    if (rc == 0) {
        (void)strncpy(g->all + (size_t)g->rank * CKPT_TCP_ADDRESS, ckpt_tcp_address(tcp),
                      CKPT_TCP_ADDRESS - 1);
        rc = gather_addresses(g, err);
    }
    if (rc == 0)
        rc = connect_all(g, tcp, ret, err);
    else
        ckpt_tcp_free(tcp);
    ckpt_detached_unref(&g->task);
    return rc;
}
