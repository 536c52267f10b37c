/* SPDX-License-Identifier: Apache-2.0 */
/* One rank (or, with threads, all) of loads into device memory; every byte is copied back and
 * compared with a load into host memory by this rank alone. For real devices and for the double.
 *
 *     gpu_ranks [-c COMM] [-o OPTION]... [-f FAULT] [-x RANK:MS] [-b S] [-p N] [-aegknrsw] RUN --
 * LAYOUT:READERS[:HOST_BYTES[:DEVICE_BYTES]]...
 *
 * COMM says who makes the communicator: env (CKPTFS_TRANSPORT=nccl), tcp, mpi, or threads=N, of
 * which each CKPTFS_GPU_NODE are on a node of their own (without it, all are on this machine). -m
 * FILE: with an ncclComm_t and a stream of ours; its id passes through FILE. -x: that rank cancels
 * each load after so long. -a: device memory comes from an allocator of ours (with -c tcp). -e:
 * each load comes after a stream of its own. -g: a stream is captured in a graph meanwhile. -p:
 * pause each load so often, and use our communicator then (N < 0: without the pauses, which is an
 * error). -k: keep what loads that fail had, and our communicator. -r: the comm of a load that
 * failed serves the next one. -n: the communicator of ours does not block. RUN may have a %r: the
 * rank. Rank 0 prints a line for each load; one that failed, every rank, and the exit status is
 * 1. */
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <ckptfs/load_nccl.h>
#ifdef GPU_RANKS_MPI
#include <ckptfs/load_mpi.h>
#endif

#include "calls.h"
#include "faults.h"
#include "random.h"
#include "random_wants.h"

/* OWN_VIEWS: more threads than these share one view, and its files. */
enum {
    MOST_RANKS = 1024,
    OWN_VIEWS = 64,
    MOST_JOBS = 64,
    GARBAGE = 0xa5,
    TAIL = 64,
    MEET_MS = 60000,
    STUCK_S = 8
};

struct job {
    const char *layout;
    struct ckpt_load_options opt;
};

struct world {
    const char *how; /* -c */
    const char *meet, *path;
    uint32_t nthread;
    struct ckpt_options *options;
    struct job job[MOST_JOBS];
    size_t njob;
    uint32_t cancel_rank, cancel_ms;
    int pauses;
    unsigned busy_s;
    bool own_memory, capture, keep, nonblocking, reuse, stray_stream, combined, each_stream;
};

struct rank {
    const struct world *w;
    uint32_t number, size;
    int device;
    ncclComm_t theirs;
    CUstream stream;
    struct ckpt_comm *host; /* of threads: before it has a device */
    struct ckpt_comm *comm; /* NULL: to be made */
    struct ckpt_view *view;
    bool failed;
    atomic_int nalloc; /* with an allocator of ours: what it has given */
};

/* Where a want goes. */
struct want {
    enum { OF_COMM, OF_CUDA, PINNED, ON_HOST, BY_FUNCTION } kind;
    unsigned char *mem, *got, *expect;
    size_t len, first, esize;        /* bytes; of the first element; of an element */
    uint64_t stride[CKPT_LOAD_RANK]; /* elements */
    uint32_t rank;
    char dtype[16];
};

/* After a failure a device may be lost, and nothing works any more. */
static void tidy(const struct rank *r, CUresult e, const char *what)
{
    if (!r->failed)
        cuda(e, what);
}

/* Of a communicator that does not block: until it is done. */
static void settle(ncclComm_t comm, ncclResult_t e, const char *what)
{
    while (e == ncclInProgress) {
        (void)usleep(100);
        nccl(ncclCommGetAsyncError(comm, &e), what);
    }
    nccl(e, what);
}

static int number_of(const char *variable, int otherwise)
{
    const char *text = getenv(variable);

    return text ? atoi(text) : otherwise;
}

/* Each node that threads play has another CKPTFS_NODE: this stands in for the C library's, also for
 * the libraries. */
static _Thread_local char node[16];

__attribute__((visibility("default"))) char *getenv(const char *name)
{
    const size_t n = strlen(name);

    if (*node && strcmp(name, "CKPTFS_NODE") == 0)
        return node;
    for (char **at = environ; at && *at; at++)
        if (strncmp(*at, name, n) == 0 && (*at)[n] == '=')
            return *at + n + 1;
    return NULL;
}

/* So do naps, which are longer the more ranks share this machine's processors: they all look after
 * their devices. */
static unsigned patience = 1;
enum { RANKS_A_NAP = 8 };

__attribute__((visibility("default"))) int nanosleep(const struct timespec *t,
                                                     struct timespec *left)
{
    struct timespec longer = {t->tv_sec, t->tv_nsec * patience};

    longer.tv_sec += longer.tv_nsec / 1000000000;
    longer.tv_nsec %= 1000000000;
    return clock_nanosleep(CLOCK_REALTIME, 0, &longer, left) ? -1 : 0;
}

/* ---- memory ---- */

static int allocate(struct rank *r, struct want *w, struct ckpt_err *err)
{
    if (w->kind == PINNED) {
        const unsigned flags =
            r->w->combined ? CU_MEMHOSTALLOC_WRITECOMBINED : CU_MEMHOSTALLOC_PORTABLE;
        cuda(cuMemHostAlloc((void **)&w->mem, w->len, flags), "pinned memory");
        memset(w->mem, GARBAGE, w->len);
        return 0;
    }
    if (w->kind >= ON_HOST) {
        if (!(w->mem = malloc(w->len)))
            die("host memory", "there is none");
        memset(w->mem, GARBAGE, w->len);
        return 0;
    }
    if (w->kind == OF_CUDA)
        w->mem = allocate_on_device(w->len);
    else if (ckpt_comm_alloc(r->comm, w->len, (void **)&w->mem, err) < 0) {
        if (!r->w->own_memory)
            die("device memory", err->text);
        return -1;
    }
    /* not waited for: the load comes after it */
    cuda(cuMemsetD8Async(on_device(w->mem), GARBAGE, w->len, r->stream), "setting memory");
    return 0;
}

static void release(struct rank *r, struct want *w, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        free(w[i].got);
        free(w[i].expect);
        if (!w[i].mem || (r->failed && r->w->keep))
            continue;
        if (w[i].kind >= ON_HOST)
            free(w[i].mem);
        else if (w[i].kind == PINNED)
            tidy(r, cuMemFreeHost(w[i].mem), "freeing");
        else if (w[i].kind == OF_CUDA)
            tidy(r, cuMemFree(on_device(w[i].mem)), "freeing");
        else
            ckpt_comm_dealloc(r->comm, w[i].mem);
    }
    free(w);
}

/* A destination that is a function: copies elements, one after the other. */
static int put(void *ctx, const uint64_t *lo, const uint64_t *n, const void *data,
               const uint64_t *stride, const char *dtype)
{
    const struct want *w = ctx;
    const size_t esize = w->esize;
    uint64_t at[CKPT_LOAD_RANK] = {0};

    if (strcmp(dtype, w->dtype) != 0)
        return -1;
    for (;;) {
        uint64_t from = 0, to = 0;
        uint32_t d = w->rank;
        for (uint32_t k = 0; k < w->rank; k++) {
            from += at[k] * stride[k];
            to += (lo[k] + at[k]) * w->stride[k];
        }
        memcpy(w->mem + w->first + to * esize, (const unsigned char *)data + from * esize, esize);
        while (d > 0 && ++at[d - 1] == n[d - 1])
            at[--d] = 0;
        if (d == 0)
            return 0;
    }
}

/* Random jobs have holes between rows, do not begin where the memory begins, and some have their
 * destinations in pinned memory, or on the host. */
static int give_memory(struct rank *r, struct ckpt_load *load, struct want *want, uint64_t seed,
                       bool random, struct ckpt_err *err)
{
    uint64_t rng = seed + r->number * 7919 + 1;

    for (size_t i = 0; i < ckpt_load_wants(load); i++) {
        struct ckpt_want_info info = {.size = sizeof info};
        struct want *w = &want[i];
        uint64_t step = 1, numel = 1;
        (void)ckpt_load_want_info(load, i, &info, NULL);
        for (uint32_t d = info.rank; d-- > 0;) {
            w->stride[d] = step;
            step = step * (info.n[d] ? info.n[d] : 1) + (random ? random_range(&rng, 0, 3) : 0);
            numel *= info.n[d];
        }
        if (numel == 0)
            step = 1;
        const size_t esize = numel ? info.nbytes / numel : 1;
        w->first = random ? esize * random_range(&rng, 0, 3) : 0;
        w->len = w->first + step * esize + TAIL;
        w->kind = random ? random_range(&rng, 0, 6) % 4 : OF_COMM;
        (void)snprintf(w->dtype, sizeof w->dtype, "%s", info.dtype);
        w->rank = info.rank;
        w->esize = esize;
        if (w->kind == ON_HOST && random_range(&rng, 0, 1))
            w->kind = BY_FUNCTION;
        if (allocate(r, w, err) < 0)
            return -1;
        struct ckpt_dest dest = {sizeof dest, w->mem + w->first, w->stride, w->dtype};
        dest.host = w->kind == ON_HOST;
        if (w->kind == BY_FUNCTION)
            dest = (struct ckpt_dest){sizeof dest, .dtype = w->dtype, .put = put, .ctx = w};
        if (ckpt_load_set_dest(load, i, &dest, err) < 0)
            return -1;
    }
    return 0;
}

/* ---- comparing ---- */

/* The same wants, into host memory. */
static int load_again(struct rank *r, struct ckpt_load *load, struct want *want,
                      struct ckpt_load *own, struct ckpt_err *err)
{
    for (size_t i = 0; i < ckpt_load_wants(load); i++) {
        struct ckpt_want_info info = {.size = sizeof info};
        struct want *w = &want[i];
        (void)ckpt_load_want_info(load, i, &info, NULL);
        if (!(w->expect = malloc(w->len)) || !(w->got = malloc(w->len)))
            die("comparing", "no memory");
        memset(w->expect, GARBAGE, w->len);
        const struct ckpt_dest dest = {sizeof dest, w->expect + w->first, w->stride, w->dtype};
        if (ckpt_load_want(own, info.tensor, info.lo, info.n, &dest, NULL, err) < 0)
            return -1;
        if (w->kind >= ON_HOST)
            memcpy(w->got, w->mem, w->len);
        else if (ckpt_comm_fetch(r->comm, w->got, w->mem, w->len, err) < 0)
            return -1;
    }
    if (ckpt_load_plan(own, err) < 0 || ckpt_load_start(own, err) < 0)
        return -1;
    return ckpt_load_wait(own, UINT32_MAX, err);
}

static int wrong(const struct ckpt_load *load, size_t i, const struct want *w, struct ckpt_err *err)
{
    struct ckpt_want_info info = {.size = sizeof info};
    size_t at = 0;

    (void)ckpt_load_want_info(load, i, &info, NULL);
    while (w->got[at] == w->expect[at])
        at++;
    err->code = CKPT_CONFLICT;
    (void)snprintf(err->text, sizeof err->text,
                   "want %zu of '%s' is wrong at byte %zu of %zu: %02x instead of %02x", i,
                   info.tensor, at, w->len, w->got[at], w->expect[at]);
    return -1;
}

static int compare(struct rank *r, struct ckpt_load *load, struct want *want, struct ckpt_err *err)
{
    struct ckpt_comm *self = NULL;
    struct ckpt_load *own = NULL;
    int rc = ckpt_comm_self(&self, err);

    if (rc == 0)
        rc = ckpt_load_new(r->view, self, NULL, &own, err);
    if (rc == 0)
        rc = load_again(r, load, want, own, err);
    for (size_t i = 0; i < ckpt_load_wants(load) && rc == 0; i++)
        if (memcmp(want[i].got, want[i].expect, want[i].len) != 0)
            rc = wrong(load, i, &want[i], err);
    ckpt_load_free(own);
    ckpt_comm_free(self);
    return rc;
}

static bool theirs_works(struct rank *r);

/* ---- one load ---- */

/* Every want lands once. */
static int take_all(struct ckpt_load *load, struct ckpt_err *err)
{
    size_t want, count = 0;
    int rc;

    while ((rc = ckpt_load_next(load, UINT32_MAX, &want, err)) == 0)
        count++;
    if (rc == 2 && count == ckpt_load_wants(load))
        return 0;
    if (err->code == CKPT_OK) {
        err->code = CKPT_CONFLICT;
        (void)snprintf(err->text, sizeof err->text, "%zu of %zu wants landed", count,
                       ckpt_load_wants(load));
    }
    return -1;
}

static void *cancel_later(void *load)
{
    void **arg = load;

    (void)usleep(*(uint32_t *)arg[1] * 1000);
    ckpt_load_cancel(arg[0]);
    return NULL;
}

/* A collective of ours in the middle of a load. */
static int use_theirs(struct rank *r, struct ckpt_load *load, struct ckpt_err *err)
{
    const bool pause = r->w->pauses > 0;

    (void)usleep(r->number * 500);
    if (pause && ckpt_load_pause(load, UINT32_MAX, err) < 0)
        return -1;
    if (!theirs_works(r))
        die("our communicator", "wrong bytes");
    return pause ? ckpt_load_resume(load, err) : 0;
}

static int wait_for(struct rank *r, struct ckpt_load *load, bool random, struct ckpt_err *err)
{
    uint32_t ms = r->w->cancel_ms;
    void *arg[2] = {load, &ms};
    pthread_t thread;
    const bool cancels = ms && r->w->cancel_rank == r->number;

    if (cancels && pthread_create(&thread, NULL, cancel_later, arg) != 0)
        die("cancelling", "no thread");
    int rc = 0;
    for (int i = 0; i < abs(r->w->pauses) && rc == 0; i++)
        rc = use_theirs(r, load, err);
    if (random && rc == 0)
        rc = take_all(load, err);
    if (rc == 0)
        rc = ckpt_load_wait(load, UINT32_MAX, err);
    if (cancels)
        (void)pthread_join(thread, NULL);
    return rc;
}

/* A stream of ours, captured so that no thread of the process may disturb it. */
static CUstream capture(void)
{
    CUstream stream;

    cuda(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), "a stream");
    cuda(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL), "a capture");
    return stream;
}

static void end_capture(CUstream stream)
{
    CUgraph graph = NULL;

    cuda(cuStreamEndCapture(stream, &graph), "a capture that was disturbed");
    if (graph)
        cuda(cuGraphDestroy(graph), "destroying");
    cuda(cuStreamDestroy(stream), "destroying");
}

static int do_load(struct rank *r, const struct job *j, uint64_t seed, struct ckpt_load *load,
                   struct ckpt_err *err)
{
    const bool random = strcmp(j->layout, "random") == 0;
    int rc = random ? random_wants(load, r->view, r->size, r->number, seed, err)
                    : ckpt_load_want_layout(load, j->layout, err);

    if (rc < 0)
        return -1;
    const size_t n = ckpt_load_wants(load);
    struct want *want = calloc(n + 1, sizeof *want);
    rc = give_memory(r, load, want, seed, random, err);
    CUstream captured = r->w->capture ? capture() : NULL;
    if (rc == 0)
        rc = ckpt_load_plan(load, err);
    faults_arm();
    if (rc == 0)
        rc = ckpt_load_start(load, err);
    if (rc == 0)
        rc = wait_for(r, load, random, err);
    faults_disarm();
    if (captured)
        end_capture(captured);
    if (rc == 0)
        rc = compare(r, load, want, err);
    r->failed = rc < 0;
    if (!rc || !r->w->keep)
        tidy(r, cuStreamSynchronize(r->stream), "the caller's stream");
    release(r, want, n);
    return rc;
}

static void tell(const struct rank *r, const struct job *j, struct ckpt_load *load)
{
    struct ckpt_load_stats s = {.size = sizeof s};

    (void)ckpt_load_stats(load, NULL, &s, NULL);
    (void)printf("%s %u ranks %s over %s needed %" PRIu64 " unique %" PRIu64 " read %" PRIu64
                 " sent %" PRIu64 " buffers %" PRIu64 "\n",
                 j->layout, r->size, ckpt_load_readers(load), ckpt_comm_transport(r->comm),
                 s.needed_bytes, s.unique_bytes, s.read_bytes, s.sent_bytes, s.buffer_bytes);
}

static int run_job(struct rank *r, const struct job *j, uint64_t seed, struct ckpt_err *err)
{
    struct ckpt_load_options options = j->opt;
    const char *share = getenv("LOAD_SHARE"); /* so many ranks share */
    struct ckpt_load *load = NULL;

    options.share = share ? r->number / (uint32_t)atoi(share) : 0;
    int rc = ckpt_load_new(r->view, r->comm, &options, &load, err);

    if (rc == 0)
        rc = do_load(r, j, seed, load, err);
    if (rc == 0 && r->number == 0)
        tell(r, j, load);
    ckpt_load_free(load);
    if (rc == 0 && getenv("LOAD_RELEASE") && r->number % 2) /* the others keep what they have */
        (void)ckpt_comm_release(r->comm);
    return rc;
}

/* ---- communicators ---- */

static void make_theirs(struct rank *r)
{
    ncclUniqueId id;

    pass_id(r->w->meet, r->number == 0, MEET_MS, &id);
    if (r->w->stray_stream)
        choose_device(r->device + 1);
    cuda(cuStreamCreate(&r->stream, CU_STREAM_NON_BLOCKING), "a stream");
    choose_device(r->device);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = !r->w->nonblocking;
    const ncclResult_t e =
        ncclCommInitRankConfig(&r->theirs, (int)r->size, id, (int)r->number, &config);
    settle(r->theirs, e, "a communicator");
}

/* Is the caller's communicator as good as ever? */
static bool theirs_works(struct rank *r)
{
    unsigned char *mem = allocate_on_device(MOST_RANKS), all[MOST_RANKS];
    bool good = true;

    cuda(cuMemsetD8Async(on_device(mem) + r->number, (unsigned char)(r->number + 1), 1, r->stream),
         "setting memory");
    settle(r->theirs, ncclAllGather(mem + r->number, mem, 1, ncclUint8, r->theirs, r->stream),
           "an all-gather");
    cuda(cuStreamSynchronize(r->stream), "an all-gather");
    cuda(cuMemcpy(on_device(all), on_device(mem), r->size), "copying");
    cuda(cuMemFree(on_device(mem)), "freeing");
    for (uint32_t i = 0; i < r->size; i++)
        good &= all[i] == i + 1;
    return good;
}

#ifdef GPU_RANKS_MPI
static int comm_over_mpi(struct ckpt_comm **ret, struct ckpt_err *err)
{
    int level, there;

    (void)MPI_Initialized(&there);
    if (!there && MPI_Init_thread(NULL, NULL, MPI_THREAD_MULTIPLE, &level) != MPI_SUCCESS)
        die("MPI", "can't be initialised");
    return ckpt_comm_mpi(MPI_COMM_WORLD, ret, err);
}
#endif

/* What carries the messages. */
static int make_control(struct rank *r, struct ckpt_comm **ret, struct ckpt_err *err)
{
    *ret = NULL;
    if (r->host) {
        *ret = r->host;
        r->host = NULL;
        return 0;
    }
#ifdef GPU_RANKS_MPI
    if (strcmp(r->w->how, "mpi") == 0)
        return comm_over_mpi(ret, err);
#endif
    return ckpt_comm_from_env(ret, err);
}

/* An allocator of the caller's, which counts. */
/* As a caching allocator: work that was queued on the stream still uses the memory. */
static void *own_alloc(void *user, size_t len, CUstream stream)
{
    CUdeviceptr mem;

    if (cuMemAlloc(&mem, len) != CUDA_SUCCESS)
        return NULL;
    cuda(cuMemsetD8Async(mem, GARBAGE, len, stream), "setting memory");
    (void)atomic_fetch_add(&((struct rank *)user)->nalloc, 1);
    return (void *)(uintptr_t)mem;
}

static void own_dealloc(void *user, void *mem)
{
    struct rank *r = user;

    tidy(r, cuStreamSynchronize(r->stream), "what the memory was set to"); /* our own work */
    tidy(r, cuMemFree(on_device(mem)), "freeing");
    if (atomic_fetch_sub(&r->nalloc, 1) <= 0)
        die("our memory", "freed twice, or not ours");
}

static int make_comm(struct rank *r, struct ckpt_err *err)
{
    struct ckpt_nccl how = {.size = sizeof how, .device = r->device, .stream = r->stream};

    if (r->w->own_memory) {
        how.alloc = own_alloc;
        how.dealloc = own_dealloc;
        how.user = r;
    }
    struct ckpt_comm *control;

    if (strcmp(r->w->how, "env") == 0)
        return ckpt_comm_from_env(&r->comm, err);
    if (make_control(r, &control, err) < 0)
        return -1;
    if (ckpt_comm_nccl(control, &how, &r->comm, err) == 0)
        return 0;
    ckpt_comm_free(control);
    return -1;
}

/* ---- ranks ---- */

/* Has each rank a part of the run? */
static bool is_local(const struct rank *r) { return strstr(r->w->path, "{rank}"); }

static int open_view(struct rank *r, struct ckpt_err *err)
{
    char path[4096];
    const char *mark = strstr(r->w->path, "%r");
    struct ckpt_run *run = NULL;

    if (is_local(r))
        return ckpt_load_open_local(r->comm, r->w->path, r->w->options, NULL, MEET_MS, NULL, NULL,
                                    &r->view, err);
    if (mark)
        (void)snprintf(path, sizeof path, "%.*s%u%s", (int)(mark - r->w->path), r->w->path,
                       r->number, mark + 2);
    else
        (void)snprintf(path, sizeof path, "%s", r->w->path);
    int rc = ckpt_run_open(path, r->w->options, &run, err);
    if (rc == 0)
        rc = ckpt_run_view(run, NULL, &r->view, err);
    ckpt_run_close(run);
    return rc;
}

static int one_job(struct rank *r, size_t i, struct ckpt_err *err)
{
    if (!r->comm && make_comm(r, err) < 0)
        return -1;
    if (!r->view && ckpt_comm_agree(r->comm, open_view(r, err), MEET_MS, err) < 0)
        return -1;
    if (!r->w->each_stream)
        return run_job(r, &r->w->job[i], i + 1, err);
    const CUstream former = r->stream;
    cuda(cuStreamCreate(&r->stream, CU_STREAM_NON_BLOCKING), "a stream");
    int rc = ckpt_comm_nccl_stream(r->comm, r->stream, err);
    if (rc == 0)
        rc = run_job(r, &r->w->job[i], i + 1, err);
    cuda(cuStreamDestroy(r->stream), "destroying");
    r->stream = former;
    return ckpt_comm_nccl_stream(r->comm, former, rc == 0 ? err : NULL) < 0 ? -1 : rc;
}

static void be_busy(void *arg)
{
    const struct world *w = arg;

    (void)sleep(w->busy_s);
}

static void *run_rank(void *arg)
{
    struct rank *r = arg;
    const struct world *w = r->w;
    bool any = false;

    if (w->nthread && number_of("CKPTFS_GPU_NODE", 0))
        (void)snprintf(node, sizeof node, "%u",
                       r->number / (uint32_t)number_of("CKPTFS_GPU_NODE", 0));
    choose_device(r->device);
    if (r->w->meet)
        make_theirs(r);
    for (size_t i = 0; i < r->w->njob; i++) {
        struct ckpt_err err = {0};
        if (one_job(r, i, &err) == 0)
            continue;
        any = true;
        (void)printf("%s rank %u: %s: %s\n", r->w->job[i].layout, r->number,
                     ckpt_code_name(err.code), err.text);
        if (!w->reuse) {
            ckpt_comm_free(r->comm); /* the next job has a new one */
            r->comm = NULL;
        }
        if (r->theirs && !r->w->keep && theirs_works(r))
            (void)printf("rank %u: the caller's communicator works\n", r->number);
        (void)fflush(stdout);
    }
    if (is_local(r) && r->comm) /* others may still read this rank's part, to compare */
        (void)ckpt_comm_agree(r->comm, 0, MEET_MS, NULL);
    if (r->w->busy_s)
        cuda(cuLaunchHostFunc(r->stream, be_busy, (void *)r->w), "being busy");
    ckpt_comm_free(r->comm);
    if (w->own_memory && atomic_load(&r->nalloc))
        die("our memory", "was not given back");
    if (r->w->busy_s) /* what the comm had goes when the device has done */
        (void)sleep(r->w->busy_s);
    if (r->theirs && !(any && r->w->keep)) {
        nccl(ncclCommDestroy(r->theirs), "destroying");
        cuda(cuStreamDestroy(r->stream), "destroying");
    }
    if (w->nthread <= OWN_VIEWS)
        ckpt_view_release(r->view);
    r->failed = any;
    return NULL;
}

static bool run_threads(const struct world *w, int devices)
{
    static struct rank rank[MOST_RANKS];
    static struct ckpt_comm *comm[MOST_RANKS];
    static pthread_t thread[MOST_RANKS];
    struct ckpt_err err = {0};
    bool failed = false;

    if (w->nthread > RANKS_A_NAP)
        patience = w->nthread / RANKS_A_NAP;
    if (w->nthread > MOST_RANKS || ckpt_comm_threads(w->nthread, comm, &err) < 0)
        die("threads", err.text);
    for (uint32_t i = 0; i < w->nthread; i++) {
        rank[i] = (struct rank){.w = w, .number = i, .size = w->nthread, .host = comm[i]};
        rank[i].device = (int)i % devices;
        if (i && w->nthread > OWN_VIEWS)
            rank[i].view = rank[0].view;
        else if (open_view(&rank[i], &err) < 0)
            die(w->path, err.text);
        if (pthread_create(&thread[i], NULL, run_rank, &rank[i]) != 0)
            die("threads", "can't be started");
    }
    for (uint32_t i = 0; i < w->nthread; i++) {
        (void)pthread_join(thread[i], NULL);
        failed |= rank[i].failed;
    }
    if (w->nthread > OWN_VIEWS)
        ckpt_view_release(rank[0].view);
    return failed;
}

static bool run_process(const struct world *w, int devices)
{
    struct rank r = {.w = w};

    r.number = (uint32_t)number_of("OMPI_COMM_WORLD_RANK", number_of("RANK", 0));
    r.size = (uint32_t)number_of("OMPI_COMM_WORLD_SIZE", number_of("WORLD_SIZE", 1));
    r.device = number_of("OMPI_COMM_WORLD_LOCAL_RANK", number_of("LOCAL_RANK", 0)) % devices;
    (void)run_rank(&r);
#ifdef GPU_RANKS_MPI
    int there = 0;
    (void)MPI_Initialized(&there);
    if (there && strcmp(w->how, "mpi") == 0)
        (void)MPI_Finalize();
#endif
    return r.failed;
}

static void parse_job(char *text, struct job *j)
{
    static const char *const name[] = {"auto", "once", "node", "each"};
    char *at, *layout = strtok_r(text, ":", &at), *readers = strtok_r(NULL, ":", &at);
    const char *host = strtok_r(NULL, ":", &at), *device = strtok_r(NULL, ":", &at);

    if (!layout || !readers)
        die(text, "expected LAYOUT:READERS[:HOST_BYTES[:DEVICE_BYTES]]");
    j->layout = layout;
    j->opt = (struct ckpt_load_options){.size = sizeof j->opt};
    j->opt.host_bytes = host ? strtoull(host, NULL, 10) : 0;
    j->opt.device_bytes = device ? strtoull(device, NULL, 10) : 0;
    j->opt.read_timeout_ms = faults_timeout();
    j->opt.exchange_timeout_ms = faults_timeout() * 2;
    j->opt.verify = getenv("LOAD_VERIFY") != NULL;
    j->opt.threads = (uint32_t)number_of("LOAD_THREADS", 0);
    j->opt.window_bytes = (uint64_t)number_of("LOAD_WINDOW", 0);
    for (int i = 0; i < 4; i++)
        if (strcmp(readers, name[i]) == 0)
            j->opt.readers = (enum ckpt_readers)i;
}

static void set_option(struct world *w, char *text)
{
    struct ckpt_err err = {0};
    char *value = strchr(text, '=');

    if (value)
        *value++ = '\0';
    if (ckpt_options_set(w->options, text, value, &err) < 0)
        die(text, err.text);
}

int main(int argc, char **argv)
{
    struct world w = {.how = "env"};
    struct ckpt_err err = {0};
    const int devices = count_devices();
    int opt;

    if (ckpt_options_new(&w.options, &err) < 0)
        die("options", err.text);
    while ((opt = getopt(argc, argv, "+c:o:f:x:m:b:p:aegknrsw")) != -1) {
        if (opt == 'c')
            w.how = optarg;
        else if (opt == 'o')
            set_option(&w, optarg);
        else if (opt == 'f')
            faults_set(optarg);
        else if (opt == 'x')
            (void)sscanf(optarg, "%u:%u", &w.cancel_rank, &w.cancel_ms);
        else if (opt == 'm')
            w.meet = optarg;
        else if (opt == 'p')
            w.pauses = atoi(optarg);
        else if (opt == 'a')
            w.own_memory = true;
        else if (opt == 'e')
            w.each_stream = true;
        else if (opt == 'g')
            w.capture = true;
        else if (opt == 'k')
            w.keep = true;
        else if (opt == 'n')
            w.nonblocking = true;
        else if (opt == 'r')
            w.reuse = true;
        else if (opt == 'b')
            w.busy_s = (unsigned)atoi(optarg);
        else if (opt == 's')
            w.stray_stream = true;
        else if (opt == 'w')
            w.combined = true;
        else
            return 2;
    }
    if (argc - optind < 3 || strcmp(argv[optind + 1], "--") != 0)
        die("arguments", "expected RUN -- JOB...");
    w.path = argv[optind];
    for (int i = optind + 2; i < argc && w.njob < MOST_JOBS; i++)
        parse_job(argv[i], &w.job[w.njob++]);
    (void)sscanf(w.how, "threads=%u", &w.nthread);
    if (w.pauses < 0)
        (void)alarm(STUCK_S); /* one rank says what is wrong, the others are stuck */
    if (devices < 1) {
        (void)fprintf(stderr, "gpu_ranks: there is no CUDA device\n");
        return 77;
    }
    const bool failed = w.nthread ? run_threads(&w, devices) : run_process(&w, devices);
    ckpt_options_free(w.options);
    return failed;
}
