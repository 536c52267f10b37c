/* SPDX-License-Identifier: Apache-2.0 */
/* The life of communicators. */
#include "comm.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <unistd.h>

enum { GONE = 0xdead, LAUNCH_US = 300, FINALIZE = 2, SPLIT = 3, POLL_US = 200 };

static atomic_int comms;
static pthread_mutex_t registry = PTHREAD_MUTEX_INITIALIZER;
static struct ncclComm *first; /* of those that are not buried */

static void at_exit(int status, void *ctx)
{
    const int n = atomic_load(&comms);

    (void)ctx;
    if (!n || !gpu_leaks_matter())
        return;
    (void)fprintf(stderr, "gpu double: leak: %d communicators\n", n);
    gpu_report_leaks(status, (size_t)n);
}

static __attribute__((constructor)) void begin(void) { (void)on_exit(at_exit, NULL); }

struct ncclComm *comm_ref(struct ncclComm *c)
{
    (void)atomic_fetch_add_explicit(&c->refs, 1, memory_order_relaxed);
    return c;
}

static void family_unref(struct comm_family *f)
{
    if (atomic_fetch_sub(&f->refs, 1) != 1)
        return;
    (void)close(f->wake);
    free(f);
}

void comm_unref(struct ncclComm *c)
{
    if (atomic_fetch_sub_explicit(&c->refs, 1, memory_order_release) != 1)
        return;
    (void)atomic_load_explicit(&c->refs, memory_order_acquire);
    comm_part(c);
    family_unref(c->family);
    free(c->link);
    free(c->pair);
    free(c);
}

struct ncclComm *comm_live(ncclComm_t comm, const char *call)
{
    if (!comm || comm->magic != COMM_MAGIC)
        gpu_die("%s: %p is no communicator, or no more", call, (void *)comm);
    return comm;
}

static void join_job(struct ncclComm *c)
{
    if (c->has_job)
        (void)pthread_join(c->job, NULL);
    c->has_job = false;
}

ncclResult_t comm_usable(ncclComm_t comm, const char *call)
{
    struct ncclComm *c = comm_live(comm, call);
    const ncclResult_t state = (ncclResult_t)atomic_load(&c->state);

    if (atomic_load(&c->family->aborted))
        gpu_die("%s: on a communicator that shares with one that was aborted", call);
    if (state == ncclInProgress)
        gpu_die("%s: before the previous call returned ncclSuccess", call);
    if (c->finalized)
        gpu_die("%s: after ncclCommFinalize", call);
    join_job(c);
    return state;
}

void comm_open_stream(struct ncclComm *c)
{
    if (c->closed)
        gpu_stream_open(c->stream);
    c->closed = false;
}

/* ---- jobs ---- */

struct job {
    struct ncclComm *c;
    ncclResult_t (*fn)(struct ncclComm *c, void *arg);
    void *arg;
};

static void *run_job(void *arg)
{
    struct job *j = arg;
    int busy = ncclInProgress;

    (void)usleep(LAUNCH_US);
    const ncclResult_t result = j->fn(j->c, j->arg);
    (void)atomic_compare_exchange_strong(&j->c->state, &busy, (int)result);
    comm_unref(j->c);
    free(j);
    return NULL;
}

ncclResult_t comm_do(struct ncclComm *c, ncclResult_t (*fn)(struct ncclComm *c, void *arg),
                     void *arg)
{
    if (c->blocking) {
        const ncclResult_t result = fn(c, arg);
        if (result != ncclSuccess)
            atomic_store(&c->state, (int)result);
        return result;
    }
    struct job *j = malloc(sizeof *j);
    if (!j)
        gpu_die("the host has no memory");
    *j = (struct job){comm_ref(c), fn, arg};
    int well = ncclSuccess; /* an error stays */
    (void)atomic_compare_exchange_strong(&c->state, &well, ncclInProgress);
    if (pthread_create(&c->job, NULL, run_job, j) != 0)
        gpu_die("no thread for a job");
    c->has_job = true;
    return ncclInProgress;
}

/* ---- beginning ---- */

static struct comm_family *family_new(void)
{
    struct comm_family *f = calloc(1, sizeof *f);

    if (!f || (f->wake = eventfd(0, EFD_CLOEXEC)) < 0)
        gpu_die("no memory or no eventfd");
    return f;
}

static struct ncclComm *comm_new(int rank, int size, int nodes, int device, const char *name,
                                 const ncclConfig_t *config, struct comm_family *family)
{
    struct ncclComm *c = calloc(1, sizeof *c);
    const char *multi = getenv("NCCL_MULTI_RANK_GPU_ENABLE");
    const bool sockets = !gpu_number("CKPTFS_GPU_THREADS", 0);

    if (!c || !(c->pair = calloc((size_t)size, sizeof *c->pair)) ||
        (sockets && !(c->link = calloc((size_t)size, sizeof *c->link))))
        gpu_die("the host has no memory");
    if (!family)
        family = family_new();
    (void)atomic_fetch_add(&family->refs, 1);
    c->family = family;
    c->magic = COMM_MAGIC;
    atomic_init(&c->refs, 1);
    c->rank = rank;
    c->size = size;
    c->nodes = nodes;
    c->device = device;
    c->identity = gpu_device_identity(device);
    c->multi = multi && strcmp(multi, "1") == 0;
    (void)snprintf(c->name, sizeof c->name, "%s", name);
    c->config = *config;
    c->blocking = gpu_number("NCCL_COMM_BLOCKING", config->blocking != 0); /* also if not said */
    for (int r = 0; c->link && r < size; r++) {
        c->link[r].data = c->link[r].agree = -1;
        c->link[r].out_tail = &c->link[r].out;
    }
    (void)atomic_fetch_add(&comms, 1);
    (void)pthread_mutex_lock(&registry);
    c->next = first;
    first = c;
    (void)pthread_mutex_unlock(&registry);
    return c;
}

static void wait_for_abort(struct ncclComm *c)
{
    while (comm_poll(c, -1, 0))
        ;
}

static ncclResult_t meet(struct ncclComm *c, void *hang)
{
    ncclResult_t result = ncclSuccess;

    if (hang)
        wait_for_abort(c);
    return comm_meet(c, &result) ? ncclSuccess : result == ncclSuccess ? ncclInternalError : result;
}

ncclResult_t ncclGetVersion(int *version)
{
    *version = (int)gpu_number("CKPTFS_GPU_NCCL", NCCL_VERSION_CODE);
    return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id)
{
    uint64_t word[2];

    if (gpu_fault(__func__) != GPU_WELL)
        return ncclSystemError;
    if (getrandom(word, sizeof word, 0) != (ssize_t)sizeof word)
        gpu_die("no random numbers");
    memset(id, 0, sizeof *id);
    (void)snprintf(id->internal, sizeof id->internal, "%016lx%016lx", (unsigned long)word[0],
                   (unsigned long)word[1]);
    return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *ret, int size, ncclUniqueId id, int rank,
                                    ncclConfig_t *config)
{
    const enum gpu_fault fault = gpu_fault(__func__);
    const ncclConfig_t standard = NCCL_CONFIG_INITIALIZER;
    CUdevice device;

    *ret = NULL;
    if (fault == GPU_ERROR)
        return ncclSystemError;
    if (comm_in_group())
        gpu_die("%s: within a group is not in the double", __func__);
    if (size < 1 || rank < 0 || rank >= size)
        return ncclInvalidArgument;
    if (config && (config->magic != NCCL_API_MAGIC || config->size > sizeof *config))
        return ncclInvalidArgument;
    if (!memchr(id.internal, '\0', COMM_NAME) || !id.internal[0])
        gpu_die("%s: the id is not one of ncclGetUniqueId", __func__);
    if (cuCtxGetDevice(&device) != CUDA_SUCCESS)
        return ncclUnhandledCudaError;
    *ret = comm_new(rank, size, links_nodes(size), device, id.internal, config ? config : &standard,
                    NULL);
    return comm_do(*ret, meet, fault == GPU_WELL ? NULL : *ret);
}

/* ---- splitting ---- */

/* FNV: a name for a name. */
static uint64_t hash_name(const char *name)
{
    uint64_t h = 14695981039346656037u;

    for (; *name; name++)
        h = (h ^ (unsigned char)*name) * 1099511628211u;
    return h;
}

void comm_others(const struct ncclComm *c, struct wire_other ret[WIRE_OTHERS])
{
    int n = 0;

    memset(ret, 0, WIRE_OTHERS * sizeof *ret);
    (void)pthread_mutex_lock(&registry);
    for (const struct ncclComm *o = first; o && n < WIRE_OTHERS; o = o->next)
        if (o != c && o->device == c->device && o->identity == c->identity && o->size > 1)
            ret[n++] = (struct wire_other){hash_name(o->name), atomic_load(&o->ngroup)};
    (void)pthread_mutex_unlock(&registry);
}

struct splitting {
    int colour, key;
    ncclConfig_t config;
    ncclComm_t *ret;
    bool hang;
};

static ncclResult_t run_split(struct ncclComm *c, void *arg)
{
    struct splitting *s = arg;
    const int64_t own[3] = {SPLIT, s->colour, s->key};
    int64_t(*all)[3] = calloc((size_t)c->size, sizeof *all);
    char name[COMM_NAME];
    int rank = 0, size = 0, nodes = 0, last = -1;
    ncclResult_t result = ncclSuccess;

    if (!all)
        gpu_die("the host has no memory");
    if (s->hang)
        wait_for_abort(c);
    bool well = comm_exchange(c, own, all);
    for (int r = 0; well && r < c->size; r++) {
        if (all[r][1] != s->colour)
            continue;
        size++;
        nodes += links_node(r) != last; /* the split one has all ranks of the job, in order */
        last = links_node(r);
        rank += all[r][2] < s->key || (all[r][2] == s->key && r < c->rank);
    }
    free(all);
    (void)snprintf(name, sizeof name, "%.40s.%u.%d", c->name, atomic_fetch_add(&c->nsplit, 1),
                   s->colour);
    if (well && s->colour >= 0) {
        struct ncclComm *made = comm_new(rank, size, nodes, c->device, name, &s->config,
                                         c->config.splitShare == 1 ? c->family : NULL);
        *s->ret = made;
        well = comm_meet(made, &result);
    }
    free(s);
    return well ? ncclSuccess : result == ncclSuccess ? ncclInternalError : result;
}

/* Whether they share is asked of the old one, not of the new one's configuration. The new one is
 * known when the old one is done, which may wait for other ranks. */
ncclResult_t ncclCommSplit(ncclComm_t comm, int colour, int key, ncclComm_t *ret,
                           ncclConfig_t *config)
{
    const enum gpu_fault fault = gpu_fault(__func__);
    const ncclResult_t e = comm_usable(comm, __func__);
    struct splitting *s = malloc(sizeof *s);

    *ret = NULL;
    if (!s)
        gpu_die("the host has no memory");
    if (e != ncclSuccess || fault == GPU_ERROR) {
        free(s);
        return e != ncclSuccess ? e : ncclSystemError;
    }
    if (comm_in_group())
        gpu_die("%s: within a group is not in the double", __func__);
    *s = (struct splitting){colour, key, config ? *config : comm->config, ret, fault != GPU_WELL};
    return comm_do(comm, run_split, s);
}

/* ---- ending ---- */

static ncclResult_t run_finalize(struct ncclComm *c, void *arg)
{
    const int64_t own[3] = {FINALIZE, 0, 0};
    int64_t(*all)[3] = calloc((size_t)c->size, sizeof *all);

    (void)arg;
    if (!all)
        gpu_die("the host has no memory");
    while (atomic_load(&c->queued) && !comm_aborted(c))
        (void)usleep(POLL_US);
    const bool well = comm_exchange(c, own, all); /* as the real one, with all ranks of the node */
    free(all);
    return well ? ncclSuccess : ncclInternalError;
}

ncclResult_t ncclCommFinalize(ncclComm_t comm)
{
    const ncclResult_t e = comm_usable(comm, __func__);

    if (e != ncclSuccess)
        return e;
    if (gpu_fault(__func__) == GPU_ERROR)
        return ncclSystemError;
    comm->finalized = true;
    return comm_do(comm, run_finalize, NULL);
}

static void unregister(struct ncclComm *c)
{
    (void)pthread_mutex_lock(&registry);
    for (struct ncclComm **at = &first; *at; at = &(*at)->next)
        if (*at == c) {
            *at = c->next;
            break;
        }
    (void)pthread_mutex_unlock(&registry);
}

static void bury(struct ncclComm *c)
{
    unregister(c);
    join_job(c);
    comm_open_stream(c);
    c->magic = GONE;
    (void)atomic_fetch_sub(&comms, 1);
    comm_unref(c);
}

ncclResult_t ncclCommDestroy(ncclComm_t comm)
{
    if (!comm)
        return ncclSuccess;
    struct ncclComm *c = comm_live(comm, __func__);
    if (atomic_load(&c->state) == ncclInProgress)
        gpu_die("%s: before the previous call returned ncclSuccess", __func__);
    join_job(c);
    if (!c->finalized && atomic_load(&c->state) == ncclSuccess)
        (void)run_finalize(c, NULL);
    bury(c);
    return ncclSuccess;
}

static void wake_family(const struct comm_family *f)
{
    (void)pthread_mutex_lock(&registry);
    for (struct ncclComm *c = first; c; c = c->next)
        if (c->family == f)
            room_wake(c);
    (void)pthread_mutex_unlock(&registry);
}

/* Queued groups end without effect; that frees memory of the device, which waits for all its work.
 */
ncclResult_t ncclCommAbort(ncclComm_t comm)
{
    if (!comm)
        return ncclSuccess;
    struct ncclComm *c = comm_live(comm, __func__);
    struct comm_family *f = c->family;
    (void)gpu_fault(__func__);
    (void)atomic_fetch_add(&f->refs, 1);
    if (atomic_exchange(&f->aborting, true))
        gpu_die("%s: on communicators that share, from two threads at once", __func__);
    atomic_store(&f->aborted, true);
    (void)eventfd_write(f->wake, 1);
    wake_family(f);
    gpu_device_wait(c->device);
    bury(c);
    atomic_store(&f->aborting, false);
    family_unref(f);
    return ncclSuccess;
}

/* ---- asking ---- */

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *ret)
{
    struct ncclComm *c = comm_live(comm, __func__);

    *ret = (ncclResult_t)atomic_load(&c->state);
    if (*ret != ncclInProgress)
        comm_open_stream(c);
    return ncclSuccess;
}

ncclResult_t ncclCommCount(const ncclComm_t comm, int *ret)
{
    const ncclResult_t e = comm_usable(comm, __func__);

    *ret = comm->size;
    return e;
}

ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *ret)
{
    const ncclResult_t e = comm_usable(comm, __func__);

    *ret = comm->rank;
    return e;
}

ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int *ret)
{
    const ncclResult_t e = comm_usable(comm, __func__);

    *ret = comm->device;
    return e;
}

const char *ncclGetErrorString(ncclResult_t e)
{
    static const char *const text[] = {"no error",
                                       "unhandled cuda error",
                                       "unhandled system error",
                                       "internal error",
                                       "invalid argument",
                                       "invalid usage",
                                       "remote process exited or there was a network error",
                                       "NCCL operation in progress"};

    return (size_t)e < sizeof text / sizeof *text ? text[e] : "unknown result code";
}

const char *ncclGetLastError(ncclComm_t comm)
{
    (void)comm;
    return "";
}
