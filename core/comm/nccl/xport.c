/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks with a CUDA device each: NCCL exchanges windows between devices, and another transport
 * carries the control messages. The communicator is the loader's own, and non-blocking: the loader
 * polls its state, so that no call waits for ever. */
#include <ckptfs/load_nccl.h>

#include <inttypes.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/err.h"
#include "base/sized.h"
#include "base/vec.h"
#include "comm/detached.h"
#include "comm/nccl/inner.h"
#include "comm/xport.h"
#include "device/cuda.h"

enum { LEAST_VERSION = NCCL_VERSION(2, 18, 0) };

#if NCCL_VERSION_CODE < NCCL_VERSION(2, 18, 0)
#error "NCCL 2.18 or later is needed"
#endif

enum { ABORT_MS = 10000, MOST_CALLS = 1024 }; /* calls: NCCL takes 2048 in a group */

struct nccl_device {
    struct ckpt_cuda cuda;
    ncclComm_t comm; /* of all ranks, made by the first load that exchanges data; NULL: none */
    ncclComm_t group[CKPT_FAMILIES];   /* split from comm; NULL: this rank is in no group of it */
    uint64_t family_id[CKPT_FAMILIES]; /* of the families that were made; 0: none */
    uint32_t
        splitting; /* 1 + the family whose communicator NCCL may still write to group[]; 0: none */
    bool stuck;    /* the device's work did not end after a load failed */
    ncclComm_t theirs; /* the caller's, from which comm is split; NULL: comm has an id of its own */
    bool theirs_busy;  /* it is still being split, for a load that failed */
    /* the current exchange: how much of it is issued, and the communicator of the last call */
    const struct ckpt_exchange *list;
    size_t count, at;
    ncclComm_t last;
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

/* ---- exchanges ---- */

/* 0: the communicator has finished its last call; 1: not yet. */
static int look_at(ncclComm_t comm, struct ckpt_err *err)
{
    ncclResult_t state = ncclSuccess, rc = ncclCommGetAsyncError(comm, &state);

    if (rc == ncclSuccess && state == ncclInProgress)
        return 1;
    if (rc == ncclSuccess)
        rc = state;
    return rc == ncclSuccess ? 0 : ckpt_nccl_failed(comm, rc, "an exchange", err);
}

static ncclResult_t issue(struct nccl_device *n, const struct ckpt_exchange *x)
{
    n->last = x->family ? n->group[x->family - 1] : n->comm;
    switch (x->kind) {
    case CKPT_SEND:
        return ncclSend(x->buf, x->len, ncclUint8, (int)x->peer, n->comm, n->cuda.work);
    case CKPT_RECEIVE:
        return ncclRecv(x->buf, x->len, ncclUint8, (int)x->peer, n->comm, n->cuda.work);
    default:
        return ncclBroadcast(x->buf, x->buf, x->len, ncclUint8, (int)x->peer, n->last,
                             n->cuda.work);
    }
}

/* Issue one NCCL group with as many calls as NCCL takes. Since 2.29, NCCL runs broadcasts of
 * several roots in one group as one all-gather. A window is exchanged by one group of ranks, on one
 * communicator. */
static int issue_some(struct nccl_device *n, struct ckpt_err *err)
{
    struct ckpt_cuda_scope scope;
    ncclResult_t rc, end;

    if (ckpt_cuda_enter(&n->cuda, &scope, err) < 0)
        return -1;
    rc = ncclGroupStart();
    for (size_t i = 0; i < MOST_CALLS && n->at < n->count && ckpt_nccl_good(rc); i++)
        rc = issue(n, &n->list[n->at++]);
    end = ncclGroupEnd();
    ckpt_cuda_leave(&n->cuda, &scope);
    if (ckpt_nccl_good(rc))
        rc = end;
    if (!ckpt_nccl_good(rc))
        return ckpt_nccl_failed(n->last, rc, "an exchange", err);
    return rc == ncclInProgress ? look_at(n->last, err) : 0;
}

static int nccl_exchanged(struct ckpt_device *d, struct ckpt_err *err)
{
    struct nccl_device *n = of(d);
    int rc = n->last ? look_at(n->last, err) : 0;

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

    if (rc == 1 && n->comm && look_at(n->comm, err) < 0)
        return -1;
    for (int k = 0; rc == 1 && k < CKPT_FAMILIES; k++)
        if (n->group[k] && look_at(n->group[k], err) < 0)
            return -1;
    return rc;
}

/* ---- giving up ---- */

static void device_release(struct nccl_device *n)
{
    ckpt_cuda_release(&n->cuda);
    if (!n->splitting) /* else NCCL may still write to it */
        free(n);
}

/* Aborting frees device memory, and so waits for all work that is queued on the device. The
 * caller's work is part of that, and may wait for a rank that is gone: detached threads abort. */
struct aborting {
    struct ckpt_detached task;
    ncclComm_t comm[CKPT_FAMILIES + 1];
    atomic_uint ncomm, next; /* communicators; the next one to be aborted */
    struct nccl_device *device;
    struct nccl_device *last; /* to be released when all are aborted; NULL: nothing */
};

/* Abort one communicator; each has a thread, because an abort may wait for work of the other
 * communicators. */
static void abort_comms(struct ckpt_detached *e)
{
    struct aborting *a = (struct aborting *)e;
    unsigned i;

    ckpt_cuda_adopt(&a->device->cuda.base);
    while ((i = atomic_fetch_add(&a->next, 1)) < atomic_load(&a->ncomm))
        (void)ncclCommAbort(a->comm[i]); /* frees it, too */
}

/* Called by the last user: the waiting thread, or the thread that it did not wait for. */
static void aborting_free(struct ckpt_detached *e)
{
    struct aborting *a = (struct aborting *)e;

    if (a->last)
        device_release(a->last);
    free(a);
}

/* Abort all communicators. for_good: release the device, too. False: the aborts did not end in
 * time. */
static bool give_up(struct nccl_device *n, bool for_good)
{
    if (!n->comm) {
        if (for_good)
            device_release(n);
        return true;
    }
    struct aborting *a = calloc(1, sizeof *a);
    if (!a)
        return false;
    ckpt_detached_init(&a->task, abort_comms, aborting_free);
    unsigned ncomm = 0;
    a->comm[ncomm++] = n->comm;
    for (int i = 0; i < CKPT_FAMILIES; i++)
        if ((uint32_t)i + 1 != n->splitting && n->group[i])
            a->comm[ncomm++] = n->group[i];
    atomic_init(&a->ncomm, ncomm);
    atomic_init(&a->next, 0);
    for (int i = 0; i < CKPT_FAMILIES; i++)
        if ((uint32_t)i + 1 != n->splitting)
            n->group[i] = NULL;
    memset(n->family_id, 0, sizeof n->family_id);
    n->comm = NULL;
    a->device = n;
    a->last = for_good ? n : NULL;
    const bool sent = ckpt_detached_start(&a->task, ncomm) > 0;
    if (!sent)
        a->last = NULL; /* NCCL may still use it */
    const bool over = sent && ckpt_detached_wait(&a->task, ABORT_MS);
    ckpt_detached_unref(&a->task);
    return over;
}

static bool nccl_drain(struct ckpt_device *d)
{
    struct nccl_device *n = of(d);
    struct ckpt_cuda_scope scope;

    n->stuck = true;
    if (!give_up(n, false) || ckpt_cuda_enter(&n->cuda, &scope, NULL) < 0)
        return false;
    bool clean = ckpt_cuda_drain(&n->cuda);
    ckpt_cuda_leave(&n->cuda, &scope);
    n->stuck = !clean;
    return clean;
}

/* Communicators are aborted, not destroyed: ncclCommDestroy waits for the other ranks. */
static void device_free(struct nccl_device *n) { (void)give_up(n, true); }

static void nccl_ref(struct ckpt_device *d) { atomic_fetch_add(&of(d)->cuda.refs, 1); }

static void nccl_unref(struct ckpt_device *d)
{
    if (atomic_fetch_sub(&of(d)->cuda.refs, 1) == 1)
        device_free(of(d));
}

/* ---- communicators ---- */

/* Make a non-blocking communicator, so that this, too, ends at the deadline. 1: another rank has
 * failed. */
static int own_comm(struct nccl_device *n, struct ckpt_comm *ctl, const ncclUniqueId *id,
                    struct ckpt_err *err)
{
    const uint64_t until = ckpt_now_ms() + ckpt_nccl_rendezvous_ms();
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;

    if (n->theirs)
        return ckpt_nccl_split(&n->cuda, n->theirs, ctl, &n->comm, &n->theirs_busy, err);
    config.blocking = 0;
    ncclResult_t rc = ncclCommInitRankConfig(&n->comm, (int)ckpt_comm_size(ctl), *id,
                                             (int)ckpt_comm_rank(ctl), &config);
    if (!ckpt_nccl_good(rc))
        return ckpt_nccl_failed(NULL, rc, "making a communicator", err);
    return ckpt_nccl_settle(n->comm, ctl, until, "making a communicator", err);
}

static int new_id(const struct nccl_device *n, struct ckpt_comm *ctl, ncclUniqueId *ret,
                  struct ckpt_err *err)
{
    memset(ret, 0, sizeof *ret);
    if (n->theirs && !n->comm)
        return ckpt_nccl_idle(n->theirs, n->theirs_busy, err);
    if (n->theirs || ckpt_comm_rank(ctl) != 0)
        return 0;
    const ncclResult_t rc = ncclGetUniqueId(ret);
    return rc == ncclSuccess ? 0 : ckpt_nccl_failed(NULL, rc, "a new communicator", err);
}

/* Make the communicator of this rank's group in a family: split from comm with shared resources.
 * All ranks take part, also those without a group. */
static int split(struct nccl_device *n, struct ckpt_comm *ctl, int i,
                 const struct ckpt_device_family *family, struct ckpt_err *err)
{
    const uint64_t until = ckpt_now_ms() + ckpt_nccl_rendezvous_ms();
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;

    config.blocking = 0;
    config.splitShare = 1;
    n->family_id[i] = family->id;
    n->splitting = (uint32_t)i + 1;
    const int colour = family->colour == CKPT_NONE ? NCCL_SPLIT_NOCOLOR : (int)family->colour;
    const ncclResult_t rc =
        ncclCommSplit(n->comm, colour, (int)family->place, &n->group[i], &config);
    if (!ckpt_nccl_good(rc))
        return ckpt_nccl_failed(n->comm, rc, "splitting a communicator", err);
    /* NCCL writes the new communicator when the old one has finished the call */
    int made = ckpt_nccl_settle(n->comm, ctl, until, "splitting a communicator", err);
    if (made == 0)
        n->splitting = 0;
    if (made == 0 && n->group[i])
        made = ckpt_nccl_settle(n->group[i], ctl, until, "splitting a communicator", err);
    return made;
}

/* 1: another rank has failed. */
static int make_comms(struct nccl_device *n, struct ckpt_comm *ctl, const ncclUniqueId *id,
                      const struct ckpt_device_family *family, struct ckpt_err *err)
{
    struct ckpt_cuda_scope scope;

    if (ckpt_cuda_enter(&n->cuda, &scope, err) < 0)
        return -1;
    int rc = n->comm ? 0 : own_comm(n, ctl, id, err);
    for (int i = 0; i < CKPT_FAMILIES && rc == 0; i++)
        if (family[i].id && n->family_id[i] != family[i].id)
            rc = split(n, ctl, i, &family[i], err);
    ckpt_cuda_leave(&n->cuda, &scope);
    return rc;
}

/* Do the communicators that exist have exactly the groups that this load needs? */
static bool has_all(const struct nccl_device *n, const struct ckpt_device_family *family,
                    bool *ret_other)
{
    bool all = n->comm != NULL;

    *ret_other = false;
    for (int i = 0; i < CKPT_FAMILIES; i++) {
        all &= family[i].id == 0 || family[i].id == n->family_id[i];
        *ret_other |= family[i].id && n->family_id[i] && family[i].id != n->family_id[i];
    }
    return all;
}

/* Communicators are kept for later loads. They are made anew after a failure, which aborts them on
 * all ranks, and for a load with other groups. All ranks know the same families, and so decide
 * alike. */
static int nccl_connect(struct ckpt_device *d, struct ckpt_comm *ctl,
                        const struct ckpt_device_family *family, struct ckpt_err *err)
{
    struct nccl_device *n = of(d);
    ncclUniqueId id;
    bool other;
    int rc = 0;

    if (ckpt_comm_size(ctl) == 1 || has_all(n, family, &other))
        return 0;
    if (other)
        n->stuck |= !give_up(n, false);
    if (n->stuck)
        rc = ckpt_fail(err, CKPT_IO, "CUDA device %d is still busy with the load that failed",
                       n->cuda.number);
    if (rc == 0)
        rc = new_id(n, ctl, &id, err);
    if (ckpt_comm_agree(ctl, rc, ckpt_nccl_rendezvous_ms(), err) < 0 ||
        ckpt_comm_share(ctl, 0, &id, sizeof id, ckpt_nccl_rendezvous_ms(), err) < 0)
        return -1;
    rc = make_comms(n, ctl, &id, family, err) < 0 ? -1 : 0;
    rc = ckpt_comm_agree(ctl, rc, ckpt_nccl_rendezvous_ms(), err);
    if (rc < 0)
        n->stuck |= !give_up(n, false) || n->splitting;
    return rc;
}

static const struct ckpt_device_ops device_ops = {
    .adopt = ckpt_cuda_adopt,
    .alloc = ckpt_cuda_alloc,
    .dealloc = ckpt_cuda_dealloc,
    .pin = ckpt_cuda_pin,
    .unpin = ckpt_cuda_unpin,
    .reaches = ckpt_cuda_reaches,
    .fetch = ckpt_cuda_fetch,
    .connect = nccl_connect,
    .begin = ckpt_cuda_begin,
    .upload = ckpt_cuda_upload,
    .fence = ckpt_cuda_fence,
    .follow = ckpt_cuda_follow,
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

/* ---- the transport: control messages use the other transport ---- */

static struct ckpt_xport *control(struct ckpt_xport *x)
{
    return ((struct xport_nccl *)x)->control;
}

static int nccl_post(struct ckpt_xport *x, struct ckpt_xfer *t, struct ckpt_err *err)
{
    (void)x, (void)t;
    return ckpt_fail(err, CKPT_UNSUPPORTED,
                     "this comm moves data between devices, not in host memory");
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

static void nccl_renew(struct ckpt_xport *x)
{
    if (control(x)->ops->renew)
        control(x)->ops->renew(control(x));
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
    .renew = nccl_renew,
    .free = nccl_free,
};

/* ---- making it ---- */

/* All ranks have a device. */
static int meet(struct nccl_device *n, const struct ckpt_nccl *how, struct ckpt_comm *ctl,
                struct ckpt_err *err)
{
    const bool own = how->split != NULL;
    bool split = own;
    uint32_t ms;
    int rc = ckpt_comm_rendezvous_ms(&ms, err);

    if (rc == 0)
        rc = ckpt_cuda_init(&n->cuda, how->device, how->stream, err);
    if (rc == 0 && own)
        rc = ckpt_nccl_check(how->split, ctl, n->cuda.number, err);
    if (ckpt_comm_agree(ctl, rc, ckpt_nccl_rendezvous_ms(), err) < 0 ||
        ckpt_comm_share(ctl, 0, &split, sizeof split, ckpt_nccl_rendezvous_ms(), err) < 0)
        return -1;
    if (split != own)
        rc = ckpt_fail(err, CKPT_USAGE, "ckpt_nccl.split is %s here, and %s on rank 0",
                       own ? "set" : "not set", own ? "not" : "set");
    return ckpt_comm_agree(ctl, rc, ckpt_nccl_rendezvous_ms(), err);
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
    n->cuda.user_alloc = how->alloc;
    n->cuda.user_dealloc = how->dealloc;
    n->cuda.user = how->user;
    n->theirs = how->split;
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

/* ---- the public face ---- */

int ckpt_comm_nccl(struct ckpt_comm *ctl, const struct ckpt_nccl *how, struct ckpt_comm **ret,
                   struct ckpt_err *err)
{
    struct ckpt_nccl own = {.device = -1};
    int version = 0;

    if (!ctl)
        return ckpt_fail(err, CKPT_USAGE,
                         "`control` is NULL: give a comm over TCP, MPI, threads or one process");
    if (ckpt_comm_size(ctl) > 1 && ckpt_comm_no_secret("NCCL", err) < 0)
        return -1;
    if (how && ckpt_sized_take(&own, sizeof own, how, "ckpt_nccl", err) < 0)
        return -1;
    if (!own.alloc != !own.dealloc)
        return ckpt_fail(err, CKPT_USAGE, "alloc without dealloc, or dealloc without alloc");
    if (ncclGetVersion(&version) != ncclSuccess || version < LEAST_VERSION)
        return ckpt_fail(err, CKPT_UNSUPPORTED, "NCCL %d.%d is too old: 2.18 or later is needed",
                         version / 10000, version / 100 % 100);
    if (ckpt_comm_xport(ctl)->device)
        return ckpt_fail(err, CKPT_USAGE, "the comm has devices already");
    if (upgrade(ctl, &own, err) < 0)
        return -1;
    *ret = ctl;
    return 0;
}

int ckpt_comm_nccl_stream(struct ckpt_comm *comm, cudaStream_t stream, struct ckpt_err *err)
{
    struct ckpt_xport *x = ckpt_comm_xport(comm);

    if (x->ops != &nccl_ops)
        return ckpt_fail(err, CKPT_USAGE, "the comm has no devices, and so no stream");
    return ckpt_cuda_choose_stream(&((struct xport_nccl *)x)->device->cuda, stream, err);
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
