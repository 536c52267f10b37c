/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks with a CUDA device each: NCCL exchanges windows between devices, and another transport
 * carries the control messages. The communicator is the loader's own, and non-blocking: the loader
 * polls its state, so that no call waits for ever. */
#include <ckptfs/load_nccl.h>

#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/err.h"
#include "base/sized.h"
#include "base/vec.h"
#include "comm/detached.h"
#include "comm/env.h"
#include "comm/xport.h"
#include "device/cuda.h"

enum {
    LEAST_VERSION = NCCL_VERSION(2, 18, 0),
    LOGARITHMIC_VERSION = NCCL_VERSION(2, 23, 0), /* has the algorithm "PAT" */
};

#if NCCL_VERSION_CODE < NCCL_VERSION(2, 18, 0)
#error "NCCL 2.18 or later is needed"
#endif

enum {
    RENDEZVOUS_MS = 300 * 1000,
    ABORT_MS = 10000,
    LOOK_US = 200,
    MOST_CALLS = 1024, /* NCCL takes 2048 in a group */
    MOST_CTAS = 8,
    KEPT = 16, /* communicators of groups on each rank */
};

/* The communicators of a device, which are made, kept and aborted together. They lie apart from the
 * device because NCCL writes a new communicator here when its split ends: that may be at any time
 * until `world`, which is split, has been aborted. */
struct comms {
    struct ckpt_detached abort;
    struct nccl_device *device; /* counted in its references while an abort is under way */
    ncclComm_t world;           /* of all ranks; NULL: not made */
    size_t nkept;
    struct kept {
        uint64_t id;     /* of the division (struct ckpt_device_division) */
        ncclComm_t comm; /* split from `world`; NULL: this rank is in no group of the division */
    } kept[KEPT];
};

struct nccl_device {
    struct ckpt_cuda cuda;
    struct ckpt_device_ops device_ops;
    struct ckpt_xport_ops ops;            /* of the comm's transport from now on, */
    const struct ckpt_xport_ops *control; /* and its own, which carry the control messages */
    struct comms *comms; /* made by the first load that exchanges data; NULL: none */
    bool stuck;          /* the device's work did not end after a load failed */
    /* those of comms that the current load uses */
    ncclComm_t comm;
    ncclComm_t group[CKPT_DIVISIONS]; /* NULL: this rank is in no group of the division */
    /* the current exchange: how much of it is issued, and the communicator of the last call */
    const struct ckpt_exchange *list;
    size_t count, at;
    ncclComm_t last;
};

static const char EXCHANGE[] = "an exchange";

static struct nccl_device *of(struct ckpt_device *d)
{
    return (struct nccl_device *)(void *)((char *)d - offsetof(struct nccl_device, cuda.base));
}

/* ---- errors and waiting ---- */

static bool good(ncclResult_t rc) { return rc == ncclSuccess || rc == ncclInProgress; }

/* Fill *err from an NCCL result, and from the communicator's last error if comm is not NULL. Always
 * returns -1. */
static int failed(ncclComm_t comm, ncclResult_t rc, const char *what, struct ckpt_err *err)
{
    const char *why = comm ? ncclGetLastError(comm) : NULL;

    return ckpt_fail(err, CKPT_PEER, "NCCL: %s: %s%s%s", what, ncclGetErrorString(rc),
                     why && *why ? ": " : "", why ? why : "");
}

/* CKPTFS_MEET_TIMEOUT, or the default if that is no number: meet reports this. */
static uint32_t rendezvous_ms(void)
{
    uint32_t ms = RENDEZVOUS_MS;

    (void)ckpt_comm_rendezvous_ms(&ms, NULL);
    return ms;
}

/* 0: the communicator has finished its last call; 1: not yet. */
static int look_at(ncclComm_t comm, const char *what, struct ckpt_err *err)
{
    ncclResult_t state = ncclSuccess, rc = ncclCommGetAsyncError(comm, &state);

    if (rc == ncclSuccess && state == ncclInProgress)
        return 1;
    if (rc == ncclSuccess)
        rc = state;
    return rc == ncclSuccess ? 0 : failed(comm, rc, what, err);
}

/* Wait until the communicator has finished its last call, or until the deadline. ctl: the comm to
 * watch meanwhile. 1: another rank has failed. */
static int settle(ncclComm_t comm, struct ckpt_comm *ctl, uint64_t until, const char *what,
                  struct ckpt_err *err)
{
    const struct timespec look = {0, LOOK_US * 1000};
    int rc;

    while ((rc = look_at(comm, what, err)) == 1) {
        if ((rc = ckpt_comm_look(ctl, err)) != 0)
            return rc;
        if (ckpt_now_ms() > until)
            return ckpt_fail(err, CKPT_TIMEOUT, "NCCL: %s takes longer than %u s", what,
                             rendezvous_ms() / 1000);
        (void)nanosleep(&look, NULL);
    }
    return rc;
}

/* ---- exchanges ---- */

static ncclResult_t issue(struct nccl_device *n, const struct ckpt_exchange *x)
{
    n->last = x->division ? n->group[x->division - 1] : n->comm;
    switch (x->kind) {
    case CKPT_SEND:
        return ncclSend(x->buf, x->len, ncclUint8, (int)x->peer, n->comm, n->cuda.work);
    case CKPT_RECEIVE:
        return ncclRecv(x->buf, x->len, ncclUint8, (int)x->peer, n->comm, n->cuda.work);
    default:
        return ncclAllGather((unsigned char *)x->buf + x->peer * x->len, x->buf, x->len, ncclUint8,
                             n->last, n->cuda.work);
    }
}

/* Issue one NCCL group with as many calls of one step as NCCL takes. A step is exchanged by one
 * group of ranks, on one communicator. */
static int issue_some(struct nccl_device *n, struct ckpt_err *err)
{
    struct ckpt_cuda_scope scope;
    ncclResult_t rc, end;

    if (ckpt_cuda_enter(&n->cuda, &scope, err) < 0)
        return -1;
    const uint32_t step = n->list[n->at].step;
    rc = ncclGroupStart();
    for (size_t i = 0;
         i < MOST_CALLS && n->at < n->count && n->list[n->at].step == step && good(rc); i++)
        rc = issue(n, &n->list[n->at++]);
    end = ncclGroupEnd();
    ckpt_cuda_leave(&n->cuda, &scope);
    if (good(rc))
        rc = end;
    if (!good(rc))
        return failed(n->last, rc, EXCHANGE, err);
    return rc == ncclInProgress ? look_at(n->last, EXCHANGE, err) : 0;
}

static int nccl_exchanged(struct ckpt_device *d, struct ckpt_err *err)
{
    struct nccl_device *n = of(d);
    int rc = n->last ? look_at(n->last, EXCHANGE, err) : 0;

    while (rc == 0 && n->at < n->count)
        rc = issue_some(n, err);
    return rc;
}

static int nccl_exchange(struct ckpt_device *d, const struct ckpt_exchange *list, size_t count,
                         struct ckpt_err *err)
{
    struct nccl_device *n = of(d);

    n->list = list;
    n->count = count;
    n->at = 0;
    n->last = NULL;
    return nccl_exchanged(d, err);
}

static int nccl_reached(struct ckpt_device *d, uint32_t i, struct ckpt_err *err)
{
    struct nccl_device *n = of(d);
    int rc = ckpt_cuda_reached(d, i, err);

    if (rc == 1 && n->comm && look_at(n->comm, EXCHANGE, err) < 0)
        return -1;
    for (int k = 0; rc == 1 && k < CKPT_DIVISIONS; k++)
        if (n->group[k] && look_at(n->group[k], EXCHANGE, err) < 0)
            return -1;
    return rc;
}

/* ---- giving up ---- */

static void device_free(struct nccl_device *n);

static void nccl_ref(struct ckpt_device *d) { atomic_fetch_add(&of(d)->cuda.refs, 1); }

/* The thread that aborts the communicators holds a reference: what it gives up last releases the
 * device. */
static void nccl_unref(struct ckpt_device *d)
{
    if (atomic_fetch_sub(&of(d)->cuda.refs, 1) == 1)
        device_free(of(d));
}

/* The communicators share their abort flag (config_of): an abort of `world` ends what is queued on
 * any of them, and a split that has not ended, whose result NCCL has written when the abort
 * returns. So `world` comes first, as NCCL's guide wants it ("Creating more communicators"), and
 * all in one thread: NCCL forbids calls on communicators that share from several threads at once.
 */
static void abort_comms(struct ckpt_detached *e)
{
    struct comms *c = (struct comms *)e;

    ckpt_cuda_adopt(&c->device->cuda.base);
    (void)ncclCommAbort(c->world); /* frees it, too */
    for (size_t i = 0; i < c->nkept; i++)
        (void)ncclCommAbort(c->kept[i].comm);
}

static void comms_free(struct ckpt_detached *e)
{
    struct comms *c = (struct comms *)e;

    nccl_unref(&c->device->cuda.base);
    free(c);
}

/* Abort all communicators. They are aborted, not destroyed: ncclCommDestroy waits for the other
 * ranks. That loses nothing: a load succeeds when all ranks have all of their bytes. Aborting frees
 * device memory, and so waits for all work that is queued on the device; the caller's work is part
 * of that, and may wait for a rank that is gone: a detached thread aborts. False: it did not end in
 * time. */
static bool give_up(struct nccl_device *n)
{
    struct comms *c = n->comms;

    if (!c)
        return true;
    n->comms = NULL;
    n->comm = NULL;
    n->cuda.base.connected = false;
    memset(n->group, 0, sizeof n->group);
    nccl_ref(&n->cuda.base);
    c->device = n;
    ckpt_detached_init(&c->abort, abort_comms, comms_free);
    if (ckpt_detached_start(&c->abort, NULL) < 0)
        return false; /* NCCL may still use the device: neither is ever freed */
    const bool over = ckpt_detached_wait(&c->abort, ABORT_MS);
    ckpt_detached_unref(&c->abort);
    return over;
}

static void device_free(struct nccl_device *n)
{
    if (n->comms) {
        (void)give_up(n); /* and comes back here when they are aborted */
        return;
    }
    ckpt_cuda_release(&n->cuda);
    free(n);
}

static bool nccl_drain(struct ckpt_device *d)
{
    struct nccl_device *n = of(d);
    struct ckpt_cuda_scope scope;

    n->stuck = true;
    if (!give_up(n) || ckpt_cuda_enter(&n->cuda, &scope, NULL) < 0)
        return false;
    bool clean = ckpt_cuda_drain(&n->cuda);
    ckpt_cuda_leave(&n->cuda, &scope);
    n->stuck = !clean;
    return clean;
}

/* ---- communicators ---- */

/* The configuration of all communicators. Non-blocking: making one ends at the deadline.
 * splitShare: NCCL asks the communicator that is split, not the new one, whether the two share
 * connections, the proxy thread and the abort flag. maxCTAs bounds the memory: by default there are
 * up to 32 channels, and each takes 9 MiB of buffers for each peer (4 MiB for one protocol, 5 for
 * the others), and more with NVLink SHARP. NCCL's tuning tables give a channel 20 GB/s (A100) to 37
 * GB/s (H100): eight are enough for any storage, and for a network of 50 GB/s for each GPU. */
static ncclConfig_t config_of(void)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;

    config.blocking = 0;
    config.splitShare = 1;
    config.maxCTAs = MOST_CTAS;
    return config;
}

/* 1: another rank has failed. */
static int make_world(struct nccl_device *n, struct ckpt_comm *ctl, const ncclUniqueId *id,
                      struct ckpt_err *err)
{
    static const char what[] = "making a communicator";
    const uint64_t until = ckpt_now_ms() + rendezvous_ms();
    ncclConfig_t config = config_of();

    n->comms = calloc(1, sizeof *n->comms);
    if (!n->comms)
        return ckpt_nomem(err);
    ncclResult_t rc = ncclCommInitRankConfig(&n->comms->world, (int)ckpt_comm_size(ctl), *id,
                                             (int)ckpt_comm_rank(ctl), &config);
    if (!good(rc))
        return failed(NULL, rc, what, err);
    return settle(n->comms->world, ctl, until, what, err);
}

/* Make the communicator of this rank's group in a division. All ranks take part, also those without
 * a group. 1: another rank has failed. */
static int split(struct comms *c, struct ckpt_comm *ctl,
                 const struct ckpt_device_division *division, struct ckpt_err *err)
{
    static const char what[] = "splitting a communicator";
    const uint64_t until = ckpt_now_ms() + rendezvous_ms();
    ncclConfig_t config = config_of();
    struct kept *k = &c->kept[c->nkept++];

    k->id = division->id;
    const int colour = division->colour == CKPT_NONE ? NCCL_SPLIT_NOCOLOR : (int)division->colour;
    const ncclResult_t rc =
        ncclCommSplit(c->world, colour, (int)division->place, &k->comm, &config);
    if (!good(rc))
        return failed(c->world, rc, what, err);
    /* NCCL writes the new communicator when the old one has finished the call */
    int made = settle(c->world, ctl, until, what, err);
    if (made == 0 && k->comm)
        made = settle(k->comm, ctl, until, what, err);
    return made;
}

/* The communicator of a division if it is kept; else NULL. */
static const struct kept *find(const struct comms *c, uint64_t id)
{
    for (size_t i = 0; c && i < c->nkept; i++)
        if (c->kept[i].id == id)
            return &c->kept[i];
    return NULL;
}

/* 1: another rank has failed. */
static int make_comms(struct nccl_device *n, struct ckpt_comm *ctl, const ncclUniqueId *id,
                      const struct ckpt_device_division *division, struct ckpt_err *err)
{
    struct ckpt_cuda_scope scope;

    if (ckpt_cuda_enter(&n->cuda, &scope, err) < 0)
        return -1;
    int rc = n->comms ? 0 : make_world(n, ctl, id, err);
    for (int i = 0; i < CKPT_DIVISIONS && rc == 0; i++)
        if (division[i].id && !find(n->comms, division[i].id))
            rc = split(n->comms, ctl, &division[i], err);
    ckpt_cuda_leave(&n->cuda, &scope);
    return rc;
}

/* Make what is missing. */
static int make_together(struct nccl_device *n, struct ckpt_comm *ctl,
                         const struct ckpt_device_division *division, struct ckpt_err *err)
{
    ncclUniqueId id = {0};
    int rc = 0;

    if (n->stuck)
        rc = ckpt_fail(err, CKPT_IO, "CUDA device %d is still busy with the load that failed",
                       n->cuda.number);
    if (rc == 0 && !n->comms && ckpt_comm_rank(ctl) == 0) {
        const ncclResult_t made = ncclGetUniqueId(&id);
        rc = made == ncclSuccess ? 0 : failed(NULL, made, "a new communicator", err);
    }
    if (ckpt_comm_agree(ctl, rc, rendezvous_ms(), err) < 0 ||
        ckpt_comm_broadcast(ctl, 0, &id, sizeof id, rendezvous_ms(), err) < 0)
        return -1;
    rc = make_comms(n, ctl, &id, division, err) < 0 ? -1 : 0;
    rc = ckpt_comm_agree(ctl, rc, rendezvous_ms(), err);
    if (rc < 0)
        n->stuck |= !give_up(n);
    return rc;
}

/* Communicators are kept for later loads, those of groups that this load lacks, too: an abort of
 * one would end all that share with it, and to destroy it all ranks would have to wait for each
 * other. If there would be more than KEPT, or after a failure, all are aborted and made anew. All
 * ranks know the same divisions, and so decide alike. */
static int connect_all(struct nccl_device *n, struct ckpt_comm *ctl,
                       const struct ckpt_device_division *division, struct ckpt_err *err)
{
    size_t missing = 0;

    for (int i = 0; i < CKPT_DIVISIONS; i++)
        missing += division[i].id && !find(n->comms, division[i].id);
    if (n->comms && n->comms->nkept + missing > KEPT)
        n->stuck |= !give_up(n);
    if ((!n->comms || missing) && make_together(n, ctl, division, err) < 0)
        return -1;
    n->comm = n->comms->world;
    n->cuda.base.connected = true;
    for (int i = 0; i < CKPT_DIVISIONS; i++)
        n->group[i] = division[i].id ? find(n->comms, division[i].id)->comm : NULL;
    return 0;
}

/* ---- what differs from the transport that carries the control messages ---- */

static int nccl_post(struct ckpt_xport *x, struct ckpt_xfer *t, struct ckpt_err *err)
{
    (void)x, (void)t;
    return ckpt_fail(err, CKPT_UNSUPPORTED,
                     "this comm moves data between devices, not in host memory");
}

static int nccl_connect(struct ckpt_xport *x, struct ckpt_comm *comm,
                        const struct ckpt_device_division *division, struct ckpt_err *err)
{
    const uint64_t begin = ckpt_now_ns();
    const int rc = x->size == 1 ? 0 : connect_all(of(x->device), comm, division, err);

    x->device->setup_ns += ckpt_now_ns() - begin;
    return rc;
}

static bool nccl_cancel(struct ckpt_xport *x)
{
    struct ckpt_device *d = x->device;
    const bool clean = of(d)->control->cancel(x);

    return d->ops->drain(d) && clean;
}

static void nccl_free(struct ckpt_xport *x)
{
    x->ops = of(x->device)->control;
    nccl_unref(x->device);
    x->ops->free(x);
}

/* ---- making it ---- */

/* All ranks have a device. */
static int meet(struct nccl_device *n, const struct ckpt_nccl *how, struct ckpt_comm *ctl,
                struct ckpt_err *err)
{
    uint32_t ms;
    int rc = ckpt_comm_rendezvous_ms(&ms, err);

    if (rc == 0)
        rc = ckpt_cuda_init(&n->cuda, how->device, how->stream, err);
    return ckpt_comm_agree(ctl, rc, rendezvous_ms(), err);
}

/* NCCL prefers its environment to what a program configures. NULL: nothing is wrong there. */
static const char *remark(void)
{
    const char *blocking = getenv("NCCL_COMM_BLOCKING");

    return blocking && strtol(blocking, NULL, 0) == 1
               ? "NCCL_COMM_BLOCKING=1 is set: NCCL's calls wait for the other ranks, and no "
                 "timeout of a load can end them if a rank is missing or stuck; unset it"
               : NULL;
}

static int upgrade(struct ckpt_comm *ctl, const struct ckpt_nccl *how, int version,
                   struct ckpt_err *err)
{
    struct nccl_device *n = calloc(1, sizeof *n);
    struct ckpt_xport *x = ckpt_comm_xport(ctl);

    if (!n)
        return ckpt_nomem(err);
    n->device_ops = ckpt_cuda_ops;
    n->device_ops.exchange = nccl_exchange;
    n->device_ops.exchanged = nccl_exchanged;
    n->device_ops.reached = nccl_reached;
    n->device_ops.drain = nccl_drain;
    n->device_ops.ref = nccl_ref;
    n->device_ops.unref = nccl_unref;
    n->cuda.base.ops = &n->device_ops;
    n->cuda.base.logarithmic = version >= LOGARITHMIC_VERSION;
    n->cuda.user_alloc = how->alloc;
    n->cuda.user_dealloc = how->dealloc;
    n->cuda.user = how->user;
    if (meet(n, how, ctl, err) < 0) {
        device_free(n);
        return -1;
    }
    n->control = x->ops;
    n->ops = *x->ops;
    n->ops.name = "nccl";
    n->ops.post = nccl_post;
    n->ops.connect = nccl_connect;
    n->ops.gather = NULL;
    n->ops.shm = NULL;
    n->ops.cancel = nccl_cancel;
    n->ops.free = nccl_free;
    x->ops = &n->ops;
    x->device = &n->cuda.base;
    if (remark())
        x->remark = remark();
    return 0;
}

/* ---- the public face ---- */

int ckpt_comm_nccl(struct ckpt_comm *ctl, const struct ckpt_nccl *how, struct ckpt_comm **ret,
                   struct ckpt_err *err)
{
    struct ckpt_nccl own = {.device = -1};
    int version = 0;

    if (!ctl)
        return ckpt_fail(err, CKPT_USAGE,
                         "`control` is NULL: give a comm over TCP, MPI, threads or one process");
    if (how && ckpt_sized_take(&own, sizeof own, how, "ckpt_nccl", err) < 0)
        return -1;
    if (!own.alloc != !own.dealloc)
        return ckpt_fail(err, CKPT_USAGE, "alloc without dealloc, or dealloc without alloc");
    if (ncclGetVersion(&version) != ncclSuccess || version < LEAST_VERSION)
        return ckpt_fail(err, CKPT_UNSUPPORTED, "NCCL %d.%d is too old: 2.18 or later is needed",
                         version / 10000, version / 100 % 100);
    if (ckpt_comm_xport(ctl)->device)
        return ckpt_fail(err, CKPT_USAGE, "the comm has devices already");
    if (upgrade(ctl, &own, version, err) < 0)
        return -1;
    *ret = ctl;
    return 0;
}

int ckpt_comm_nccl_stream(struct ckpt_comm *comm, cudaStream_t stream, struct ckpt_err *err)
{
    struct ckpt_device *d = ckpt_comm_xport(comm)->device;

    if (!d)
        return ckpt_fail(err, CKPT_USAGE, "the comm has no devices, and so no stream");
    return ckpt_cuda_choose_stream(&of(d)->cuda, stream, err);
}

/* The device whose number is the rank's number on its machine, as the launcher counts. */
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
    struct ckpt_cuda cuda = {0}; /* attached only, and made current for the calling thread */
    int count;

    if (ckpt_cuda_driver_open(&cuda.call, &count, NULL) == 0) {
        cuda.number = how.device = local_rank() % count;
        if (ckpt_cuda_attach(&cuda, NULL) == 0)
            (void)cuda.call.ctx_set(cuda.context);
    }
    return ckpt_comm_nccl(ctl, &how, ret, err); /* a failure above is reported there */
}
