/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks with a CUDA device each: NCCL moves windows between devices, another transport the small
 * messages. The communicator is our own, and does not block: what it does is looked at. */
#include <ckptfs/load_nccl.h>

#include <inttypes.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/err.h"
#include "load/cuda.h"
#include "load/errand.h"
#include "load/xport.h"

enum { LEAST_VERSION = NCCL_VERSION(2, 18, 0) };

#if NCCL_VERSION_CODE < NCCL_VERSION(2, 18, 0)
#error "NCCL 2.18 or later is needed"
#endif

enum { MEET_S = 300, MOST_MEET_S = 1000000, LOOK_US = 200, GRACE_MS = 500, ABORT_MS = 10000 };

struct nccl_device {
    struct ckpt_cuda cuda;
    ncclComm_t comm; /* NULL: one rank alone, or given up */
};

struct xport_nccl {
    struct ckpt_xport x;
    struct ckpt_xport *control;
    struct nccl_device *device;
};

static struct nccl_device *of(struct ckpt_device *d)
{
    return (struct nccl_device *)(void *)((char *)d - offsetof(struct nccl_device, cuda.base));
}

static int failed(ncclComm_t comm, ncclResult_t rc, const char *what, struct ckpt_err *err)
{
    const char *why = comm ? ncclGetLastError(comm) : NULL;

    return ckpt_fail(err, CKPT_PEER, "NCCL: %s: %s%s%s", what, ncclGetErrorString(rc),
                     why && *why ? ": " : "", why ? why : "");
}

static bool good(ncclResult_t rc) { return rc == ncclSuccess || rc == ncclInProgress; }

/* ---- exchanges ---- */

/* 0: the communicator has done what it was told; 1: not yet. */
static int nccl_exchanged(struct ckpt_device *d, struct ckpt_err *err)
{
    struct nccl_device *n = of(d);
    ncclResult_t state = ncclSuccess, rc = ncclCommGetAsyncError(n->comm, &state);

    if (rc == ncclSuccess && state == ncclInProgress)
        return 1;
    if (rc == ncclSuccess)
        rc = state;
    return rc == ncclSuccess ? 0 : failed(n->comm, rc, "an exchange", err);
}

static ncclResult_t issue(struct nccl_device *n, const struct ckpt_exchange *x)
{
    switch (x->kind) {
    case CKPT_SEND:
        return ncclSend(x->buf, x->len, ncclUint8, (int)x->peer, n->comm, n->cuda.work);
    case CKPT_RECEIVE:
        return ncclRecv(x->buf, x->len, ncclUint8, (int)x->peer, n->comm, n->cuda.work);
    default:
        return ncclBroadcast(x->buf, x->buf, x->len, ncclUint8, (int)x->peer, n->comm,
                             n->cuda.work);
    }
}

/* One group: broadcasts of several roots in it go round as one all-gather since NCCL 2.29. */
static int nccl_exchange(struct ckpt_device *d, const struct ckpt_exchange *list, size_t count,
                         struct ckpt_err *err)
{
    struct nccl_device *n = of(d);
    ncclResult_t rc, end;
    int before;

    if (ckpt_cuda_enter(&n->cuda, &before, err) < 0)
        return -1;
    rc = ncclGroupStart();
    for (size_t i = 0; i < count && good(rc); i++)
        rc = issue(n, &list[i]);
    end = ncclGroupEnd();
    ckpt_cuda_leave(&n->cuda, before);
    if (good(rc))
        rc = end;
    if (!good(rc))
        return failed(n->comm, rc, "an exchange", err);
    return rc == ncclInProgress ? nccl_exchanged(d, err) : 0;
}

static int nccl_reached(struct ckpt_device *d, uint32_t i, struct ckpt_err *err)
{
    int rc = ckpt_cuda_reached(d, i, err);

    if (rc == 1 && of(d)->comm && nccl_exchanged(d, err) < 0)
        return -1;
    return rc;
}

/* ---- giving up ---- */

/* Aborting frees memory of the device, which waits for all that is queued there: what the caller
 * queued too, and that may wait for a rank that is gone. So a thread does it. */
struct aborting {
    struct ckpt_errand errand;
    ncclComm_t comm;
    int number;
};

static void abort_comm(struct ckpt_errand *e)
{
    struct aborting *a = (struct aborting *)e;

    if (cudaSetDevice(a->number) == cudaSuccess)
        (void)ncclCommAbort(a->comm); /* frees it, too */
}

static void aborting_free(struct ckpt_errand *e) { free(e); }

/* False: it is not over after a while. */
static bool give_up(struct nccl_device *n)
{
    struct aborting *a = n->comm ? calloc(1, sizeof *a) : NULL;
    ncclComm_t comm = n->comm;

    n->comm = NULL;
    if (!a)
        return !comm;
    ckpt_errand_init(&a->errand, abort_comm, aborting_free);
    a->comm = comm;
    a->number = n->cuda.number;
    const bool over =
        ckpt_errand_start(&a->errand, 1) == 1 && ckpt_errand_wait(&a->errand, ABORT_MS);
    ckpt_errand_unref(&a->errand);
    return over;
}

static bool nccl_drain(struct ckpt_device *d)
{
    struct nccl_device *n = of(d);
    int before;

    if (!give_up(n) || ckpt_cuda_enter(&n->cuda, &before, NULL) < 0)
        return false;
    bool clean = ckpt_cuda_drain(&n->cuda);
    ckpt_cuda_leave(&n->cuda, before);
    return clean;
}

/* Not by destroying the communicator, which would wait for the other ranks. */
static void device_free(struct nccl_device *n)
{
    if (!give_up(n))
        return; /* what is queued may still use all of it */
    ckpt_cuda_release(&n->cuda);
    free(n);
}

static void nccl_ref(struct ckpt_device *d) { atomic_fetch_add(&of(d)->cuda.refs, 1); }

static void nccl_unref(struct ckpt_device *d)
{
    if (atomic_fetch_sub(&of(d)->cuda.refs, 1) == 1)
        device_free(of(d));
}

static const struct ckpt_device_ops device_ops = {
    .adopt = ckpt_cuda_adopt,
    .alloc = ckpt_cuda_alloc,
    .dealloc = ckpt_cuda_dealloc,
    .pin = ckpt_cuda_pin,
    .unpin = ckpt_cuda_unpin,
    .reaches = ckpt_cuda_reaches,
    .fetch = ckpt_cuda_fetch,
    .begin = ckpt_cuda_begin,
    .upload = ckpt_cuda_upload,
    .fence = ckpt_cuda_fence,
    .copy = ckpt_cuda_copy,
    .download = ckpt_cuda_download,
    .exchange = nccl_exchange,
    .exchanged = nccl_exchanged,
    .mark = ckpt_cuda_mark,
    .reached = nccl_reached,
    .drain = nccl_drain,
    .ref = nccl_ref,
    .unref = nccl_unref,
};

/* ---- the transport: messages go over the other one ---- */

static struct ckpt_xport *control(struct ckpt_xport *x)
{
    return ((struct xport_nccl *)x)->control;
}

static int nccl_post(struct ckpt_xport *x, struct ckpt_xfer *t, struct ckpt_err *err)
{
    (void)x, (void)t;
    return ckpt_fail(err, CKPT_UNSUPPORTED, "data moves between devices here");
}

static int nccl_progress(struct ckpt_xport *x, bool *ret_moved, struct ckpt_err *err)
{
    return control(x)->ops->progress(control(x), ret_moved, err);
}

static void nccl_wait(struct ckpt_xport *x, uint32_t timeout_ms)
{
    control(x)->ops->wait(control(x), timeout_ms);
}

static void nccl_kick(struct ckpt_xport *x) { control(x)->ops->kick(control(x)); }

static int nccl_ctl_send(struct ckpt_xport *x, uint32_t peer, const void *msg, size_t len,
                         struct ckpt_err *err)
{
    return control(x)->ops->ctl_send(control(x), peer, msg, len, err);
}

static int nccl_ctl_recv(struct ckpt_xport *x, uint32_t *ret_peer, void **ret_msg, size_t *ret_len,
                         struct ckpt_err *err)
{
    return control(x)->ops->ctl_recv(control(x), ret_peer, ret_msg, ret_len, err);
}

static bool nccl_gone(struct ckpt_xport *x, uint32_t peer)
{
    return control(x)->ops->gone && control(x)->ops->gone(control(x), peer);
}

static bool nccl_cancel(struct ckpt_xport *x)
{
    struct ckpt_device *d = x->device;
    const bool clean = control(x)->ops->cancel(control(x));

    return d->ops->drain(d) && clean;
}

static void nccl_free(struct ckpt_xport *x)
{
    struct xport_nccl *n = (struct xport_nccl *)x;

    nccl_unref(&n->device->cuda.base);
    n->control->ops->free(n->control);
    free(n);
}

static const struct ckpt_xport_ops nccl_ops = {
    .name = "nccl",
    .post = nccl_post,
    .progress = nccl_progress,
    .wait = nccl_wait,
    .kick = nccl_kick,
    .ctl_send = nccl_ctl_send,
    .ctl_recv = nccl_ctl_recv,
    .gone = nccl_gone,
    .cancel = nccl_cancel,
    .free = nccl_free,
    .one_shot = true,
};

/* ---- making it ---- */

/* How long ranks wait for each other, as for TCP. */
static uint32_t meet_ms(void)
{
    const char *text = getenv("CKPTFS_MEET_TIMEOUT");
    const long s = text && *text ? strtol(text, NULL, 10) : MEET_S;

    return (uint32_t)(s > 0 && s <= MOST_MEET_S ? s : MEET_S) * 1000;
}

/* Until `comm` is done with what it was told. control may be NULL. 1: another rank has failed. */
static int settle(ncclComm_t comm, struct ckpt_comm *ctl, uint64_t until, const char *what,
                  struct ckpt_err *err)
{
    const struct timespec look = {0, LOOK_US * 1000};

    for (;;) {
        ncclResult_t state = ncclSuccess, rc = ncclCommGetAsyncError(comm, &state);
        if (rc == ncclSuccess && state == ncclSuccess)
            return 0;
        if (rc != ncclSuccess || state != ncclInProgress)
            return failed(comm, rc != ncclSuccess ? rc : state, what, err);
        const int seen = ctl ? ckpt_comm_look(ctl, err) : 0;
        if (seen != 0)
            return seen;
        if (ckpt_now_ms() > until)
            return ckpt_fail(err, CKPT_TIMEOUT, "NCCL: %s takes longer than %u s", what,
                             meet_ms() / 1000);
        (void)nanosleep(&look, NULL);
    }
}

/* A communicator that does not block, so that making it ends in time, too: splitting the caller's,
 * if that one blocks, would wait for a rank that has failed without end. 1: another rank has
 * failed. */
static int own_comm(struct nccl_device *n, struct ckpt_comm *ctl, const ncclUniqueId *id,
                    struct ckpt_err *err)
{
    const uint64_t until = ckpt_now_ms() + meet_ms();
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;

    config.blocking = 0;
    ncclResult_t rc = ncclCommInitRankConfig(&n->comm, (int)ckpt_comm_size(ctl), *id,
                                             (int)ckpt_comm_rank(ctl), &config);
    if (!good(rc))
        return failed(NULL, rc, "making a communicator", err);
    return settle(n->comm, ctl, until, "making a communicator", err);
}

/* Do the ranks of a communicator match ours? */
static int check_theirs(const struct ckpt_nccl *how, struct ckpt_comm *ctl, int number,
                        struct ckpt_err *err)
{
    int rank = -1, size = -1, device = -1;
    ncclResult_t rc = ncclCommUserRank(how->comm, &rank);

    if (rc == ncclSuccess)
        rc = ncclCommCount(how->comm, &size);
    if (rc == ncclSuccess)
        rc = ncclCommCuDevice(how->comm, &device);
    if (rc != ncclSuccess)
        return failed(how->comm, rc, "the communicator given", err);
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

/* All ranks have a device, and a communicator if there is more than one. */
static int meet(struct nccl_device *n, const struct ckpt_nccl *how, struct ckpt_comm *ctl,
                struct ckpt_err *err)
{
    ncclUniqueId id;
    int rc = ckpt_cuda_init(&n->cuda, how->device, how->stream, err);

    memset(&id, 0, sizeof id);
    if (rc == 0 && how->comm)
        rc = check_theirs(how, ctl, n->cuda.number, err);
    if (rc == 0 && ckpt_comm_rank(ctl) == 0 && ckpt_comm_size(ctl) > 1) {
        ncclResult_t got = ncclGetUniqueId(&id);
        rc = got == ncclSuccess ? 0 : failed(NULL, got, "a new communicator", err);
    }
    if (ckpt_comm_agree(ctl, rc, meet_ms(), err) < 0 ||
        ckpt_comm_share(ctl, 0, &id, sizeof id, meet_ms(), err) < 0)
        return -1;
    if (ckpt_comm_size(ctl) > 1) {
        int before;
        rc = ckpt_cuda_enter(&n->cuda, &before, err);
        if (rc == 0) {
            rc = own_comm(n, ctl, &id, err) < 0 ? -1 : 0;
            ckpt_cuda_leave(&n->cuda, before);
        }
    }
    return ckpt_comm_agree(ctl, rc, meet_ms(), err);
}

static int upgrade(struct ckpt_comm *ctl, const struct ckpt_nccl *how, struct ckpt_err *err)
{
    struct xport_nccl *x = calloc(1, sizeof *x);
    struct nccl_device *n = calloc(1, sizeof *n);
    struct ckpt_xport *below = ckpt_comm_xport(ctl);

    if (!x || !n) {
        free(x);
        free(n);
        return ckpt_nomem(err);
    }
    n->cuda.base.ops = &device_ops;
    if (meet(n, how, ctl, err) < 0) {
        free(x);
        device_free(n);
        return -1;
    }
    x->x = *below;
    x->x.ops = &nccl_ops;
    x->x.device = &n->cuda.base;
    x->control = below;
    x->device = n;
    ckpt_comm_replace(ctl, &x->x);
    return 0;
}

/* ---- TCP whose addresses travel over the caller's communicator ---- */

/* Every rank's address, by an all-gather in device memory. The caller's communicator may block
 * until all ranks are there: a thread calls it, which is left behind after a while. */
struct gathering {
    struct ckpt_errand errand;
    struct ckpt_cuda at; /* only to be entered and named */
    ncclComm_t comm;
    cudaStream_t stream;
    int rank, size;
    char *all, *mem; /* pinned; the device's: size * CKPT_TCP_ADDRESS bytes */
    bool idle;       /* nothing writes to them any more */
    int result;
    struct ckpt_err err;
};

static void gathering_free(struct ckpt_errand *e)
{
    struct gathering *g = (struct gathering *)e;
    int before;

    if (g->idle && ckpt_cuda_enter(&g->at, &before, NULL) == 0) {
        (void)cudaFreeHost(g->all);
        (void)cudaFree(g->mem);
        ckpt_cuda_leave(&g->at, before);
    }
    free(g);
}

/* Until the stream is idle. */
static int await_stream(struct gathering *g, uint64_t until, struct ckpt_err *err)
{
    const struct timespec look = {0, LOOK_US * 1000};
    cudaError_t rc;

    while ((rc = cudaStreamQuery(g->stream)) == cudaErrorNotReady) {
        (void)cudaGetLastError();
        if (ckpt_now_ms() > until)
            return ckpt_fail(err, CKPT_TIMEOUT, "NCCL: exchanging addresses takes longer than %u s",
                             meet_ms() / 1000);
        (void)nanosleep(&look, NULL);
    }
    return ckpt_cuda_failed(&g->at, rc, "exchanging addresses", err);
}

/* All of it on the caller's stream: that a copy by cudaMemcpy has returned says nothing to others.
 */
static int gather_now(struct gathering *g, struct ckpt_err *err)
{
    const size_t one = CKPT_TCP_ADDRESS, own = (size_t)g->rank * one;
    const uint64_t until = ckpt_now_ms() + meet_ms();
    cudaError_t rc = cudaSetDevice(g->at.number); /* of this thread, which is ours */

    if (rc == cudaSuccess)
        rc = cudaMemcpyAsync(g->mem + own, g->all + own, one, cudaMemcpyHostToDevice, g->stream);
    if (rc != cudaSuccess)
        return ckpt_cuda_failed(&g->at, rc, "exchanging addresses", err);
    const ncclResult_t got =
        ncclAllGather(g->mem + own, g->mem, one, ncclUint8, g->comm, g->stream);
    if (!good(got))
        return failed(g->comm, got, "exchanging addresses", err);
    if (settle(g->comm, NULL, until, "exchanging addresses", err) < 0)
        return -1;
    rc = cudaMemcpyAsync(g->all, g->mem, (size_t)g->size * one, cudaMemcpyDeviceToHost, g->stream);
    if (rc != cudaSuccess)
        return ckpt_cuda_failed(&g->at, rc, "exchanging addresses", err);
    return await_stream(g, until, err);
}

static void gather(struct ckpt_errand *e)
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
    int before;

    if (!g)
        return ckpt_nomem(err);
    ckpt_errand_init(&g->errand, gather, gathering_free);
    g->comm = how->comm;
    g->stream = how->stream;
    g->idle = true;
    ncclResult_t got = ncclCommUserRank(how->comm, &g->rank);
    if (got == ncclSuccess)
        got = ncclCommCount(how->comm, &g->size);
    if (got == ncclSuccess)
        got = ncclCommCuDevice(how->comm, &g->at.number);
    int rc = got == ncclSuccess ? 0 : failed(how->comm, got, "the communicator given", err);
    if (rc == 0)
        rc = ckpt_cuda_enter(&g->at, &before, err);
    if (rc == 0) {
        const size_t len = (size_t)g->size * CKPT_TCP_ADDRESS;
        cudaError_t made = cudaMalloc((void **)&g->mem, len);
        if (made == cudaSuccess)
            made = cudaHostAlloc((void **)&g->all, len, cudaHostAllocPortable);
        ckpt_cuda_leave(&g->at, before);
        rc = ckpt_cuda_failed(&g->at, made, "memory for addresses", err);
    }
    if (rc < 0) {
        ckpt_errand_unref(&g->errand);
        return -1;
    }
    memset(g->all, 0, (size_t)g->size * CKPT_TCP_ADDRESS);
    *ret = g;
    return 0;
}

/* Send the thread, and hear what it has found. */
static int gather_addresses(struct gathering *g, struct ckpt_err *err)
{
    g->idle = false;
    if (ckpt_errand_start(&g->errand, 1) == 0) {
        g->idle = true;
        return ckpt_fail(err, CKPT_NOMEM, "no thread could be started");
    }
    if (!ckpt_errand_wait(&g->errand, meet_ms() + GRACE_MS))
        return ckpt_fail(err, CKPT_TIMEOUT, "NCCL: exchanging addresses takes longer than %u s",
                         meet_ms() / 1000);
    return g->result < 0 ? ckpt_fail(err, g->err.code, "%s", g->err.text) : 0;
}

/* All ranks meet at the addresses found. */
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
    int rc =
        ckpt_tcp_connect(tcp, (uint32_t)g->rank, (uint32_t)g->size, address, meet_ms(), ret, err);
    free(address);
    return rc;
}

static int tcp_over(const struct ckpt_nccl *how, struct ckpt_comm **ret, struct ckpt_err *err)
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
    ckpt_errand_unref(&g->errand);
    return rc;
}

/* ---- the public face ---- */

int ckpt_comm_nccl(struct ckpt_comm *ctl, const struct ckpt_nccl *how, struct ckpt_comm **ret,
                   struct ckpt_err *err)
{
    struct ckpt_nccl own = {.device = -1};
    struct ckpt_comm *tcp = NULL;
    int version = 0;

    if (how && (how->size < offsetof(struct ckpt_nccl, stream) || how->size > sizeof own))
        return ckpt_fail(err, CKPT_USAGE, "struct ckpt_nccl has %zu bytes here, the caller's %zu",
                         sizeof own, how->size);
    if (how)
        memcpy(&own, how, how->size);
    if (ncclGetVersion(&version) != ncclSuccess || version < LEAST_VERSION)
        return ckpt_fail(err, CKPT_UNSUPPORTED, "NCCL %d.%d is too old: 2.18 or later is needed",
                         version / 10000, version / 100 % 100);
    if (!ctl && !own.comm)
        return ckpt_fail(err, CKPT_USAGE, "neither a comm nor a NCCL communicator was given");
    if (ctl && ckpt_comm_xport(ctl)->device)
        return ckpt_fail(err, CKPT_USAGE, "the comm has devices already");
    if (!ctl && tcp_over(&own, &tcp, err) < 0)
        return -1;
    if (upgrade(ctl ? ctl : tcp, &own, err) < 0) {
        ckpt_comm_free(tcp);
        return -1;
    }
    *ret = ctl ? ctl : tcp;
    return 0;
}

/* One device for each rank of a machine, as launchers count them. */
static int local_rank(void)
{
    static const char *const name[] = {"LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK",
                                       "MPI_LOCALRANKID", "SLURM_LOCALID"};

    for (size_t i = 0; i < sizeof name / sizeof *name; i++) {
        const char *text = getenv(name[i]);
        if (text && *text)
            return atoi(text);
    }
    return 0;
}

CKPT_PUBLIC ckpt_comm_device ckpt_comm_device_from_env;

int ckpt_comm_device_from_env(struct ckpt_comm *ctl, struct ckpt_comm **ret, struct ckpt_err *err)
{
    struct ckpt_nccl how = {.size = sizeof how};
    int count = 0;

    if (cudaGetDeviceCount(&count) == cudaSuccess && count > 0)
        how.device = local_rank() % count;
    (void)cudaSetDevice(how.device); /* for good: what fails now fails again */
    return ckpt_comm_nccl(ctl, &how, ret, err);
}
