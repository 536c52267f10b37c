/* SPDX-License-Identifier: Apache-2.0 */
/* Streams are queues, each run by a thread; events are promises that a stream keeps.
 *
 * A queue orders what was pushed before what is run, but what was run before nothing: only events
 * and queries that say "done" do that. So no lock is held by both sides. */
#include "stream.h"

#include <pthread.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "memory.h"

enum {
    STREAM = 0x57ea,
    EVENT = 0xe7e7,
    GONE = 0xdead,
    LOOK_MS = 20,
    MOST_LOOK_MS = 1280,
    WAIT_US = 100
};

struct node {
    _Atomic(struct node *) next;
    struct gpu_work *work; /* NULL: the stream ends */
};

struct CUstream_st {
    struct CUstream_st *next; /* of all that are there */
    unsigned magic;
    int device;
    pthread_t thread;
    sem_t ready;
    pthread_mutex_t lock; /* of those who push */
    struct node *tail;
    bool closed;
    struct node *head; /* the thread's: run already */
    atomic_ullong pushed, done;
};

/* A promise: all before it on some stream is done. */
struct record {
    atomic_uint refs;
    atomic_bool done;
    uint64_t ns; /* when it was kept */
    double at;   /* the same, simulated */
    pthread_mutex_t lock;
    pthread_cond_t cond;
};

struct CUevent_st {
    unsigned magic;
    int device;
    bool timed;
    pthread_mutex_t lock;
    struct record *latest; /* NULL: never recorded */
};

_Thread_local int gpu_device = -1;
static pthread_mutex_t defaults_lock = PTHREAD_MUTEX_INITIALIZER;
static struct CUstream_st *defaults[GPU_MOST_DEVICES];
static pthread_mutex_t all_lock = PTHREAD_MUTEX_INITIALIZER;
static struct CUstream_st *all;
static atomic_size_t streams, events;
static atomic_int lost;

void gpu_lose(CUresult error) { atomic_store(&lost, (int)error); }
CUresult gpu_lost(void) { return (CUresult)atomic_load_explicit(&lost, memory_order_relaxed); }

static void *allocate(size_t n)
{
    void *p = calloc(1, n);

    if (!p)
        gpu_die("the host has no memory");
    return p;
}

/* ---- streams ---- */

static void run_keep(struct gpu_work *work);

/* A stream whose last promise was kept is idle, even if its thread is not yet back. */
static unsigned counts(const struct gpu_work *work) { return work->run != run_keep; }

static void jitter(uint64_t *rng, uint64_t most_us)
{
    if (!most_us)
        return;
    *rng ^= *rng << 13;
    *rng ^= *rng >> 7;
    *rng ^= *rng << 17;
    (void)usleep((useconds_t)(*rng % most_us));
}

static void *stream_run(void *arg)
{
    struct CUstream_st *s = arg;
    const uint64_t most_us = gpu_number("CKPTFS_GPU_JITTER_US", 0);
    uint64_t rng = (uint64_t)(uintptr_t)s | 1;

    for (;;) {
        while (sem_wait(&s->ready) != 0)
            ;
        struct node *n = atomic_load_explicit(&s->head->next, memory_order_acquire);
        free(s->head);
        s->head = n;
        if (!n->work)
            break;
        const unsigned count = counts(n->work);
        jitter(&rng, most_us);
        n->work->run(n->work);
        (void)atomic_fetch_add_explicit(&s->done, count, memory_order_release);
    }
    free(s->head);
    (void)sem_destroy(&s->ready);
    (void)pthread_mutex_destroy(&s->lock);
    free(s);
    return NULL;
}

CUresult gpu_stream_new(CUstream *ret, int device)
{
    struct CUstream_st *s = allocate(sizeof *s);

    s->magic = STREAM;
    s->device = device;
    s->head = s->tail = allocate(sizeof *s->head);
    (void)sem_init(&s->ready, 0, 0);
    (void)pthread_mutex_init(&s->lock, NULL);
    if (pthread_create(&s->thread, NULL, stream_run, s) != 0)
        gpu_die("no thread for a stream");
    (void)pthread_detach(s->thread);
    (void)atomic_fetch_add(&streams, 1);
    (void)pthread_mutex_lock(&all_lock);
    s->next = all;
    all = s;
    (void)pthread_mutex_unlock(&all_lock);
    *ret = s;
    return CUDA_SUCCESS;
}

static void forget(struct CUstream_st *s)
{
    (void)pthread_mutex_lock(&all_lock);
    for (struct CUstream_st **at = &all; *at; at = &(*at)->next)
        if (*at == s) {
            *at = s->next;
            break;
        }
    (void)pthread_mutex_unlock(&all_lock);
}

static struct CUstream_st *default_stream(void)
{
    (void)pthread_mutex_lock(&defaults_lock);
    if (!defaults[gpu_device]) {
        (void)gpu_stream_new(&defaults[gpu_device], gpu_device);
        (void)atomic_fetch_sub(&streams, 1); /* nobody has to destroy it */
    }
    struct CUstream_st *s = defaults[gpu_device];
    (void)pthread_mutex_unlock(&defaults_lock);
    return s;
}

static struct CUstream_st *live(CUstream stream, const char *call)
{
    if (!stream)
        return default_stream();
    if (stream == CU_STREAM_LEGACY || stream == CU_STREAM_PER_THREAD || stream->magic != STREAM)
        gpu_die("%s: %p is no stream that the double knows", call, (void *)stream);
    return stream;
}

static void push_locked(struct CUstream_st *s, struct gpu_work *work)
{
    struct node *n = allocate(sizeof *n);

    n->work = work;
    (void)atomic_fetch_add_explicit(&s->pushed, counts(work), memory_order_relaxed);
    atomic_store_explicit(&s->tail->next, n, memory_order_release);
    s->tail = n;
    (void)sem_post(&s->ready);
}

void gpu_stream_push(CUstream stream, struct gpu_work *work, bool through, const char *call)
{
    struct CUstream_st *s = live(stream, call);

    (void)pthread_mutex_lock(&s->lock);
    if (s->closed && !through)
        gpu_die("%s: on a stream on which a launch of NCCL is still in progress", call);
    push_locked(s, work);
    (void)pthread_mutex_unlock(&s->lock);
}

int gpu_stream_device(CUstream stream, const char *call) { return live(stream, call)->device; }

void gpu_stream_close(CUstream stream, const char *call)
{
    struct CUstream_st *s = live(stream, call);

    (void)pthread_mutex_lock(&s->lock);
    if (s->closed)
        gpu_die("%s: on a stream on which a launch of NCCL is still in progress", call);
    s->closed = true;
    (void)pthread_mutex_unlock(&s->lock);
}

void gpu_stream_open(CUstream stream)
{
    struct CUstream_st *s = live(stream, "NCCL");

    (void)pthread_mutex_lock(&s->lock);
    s->closed = false;
    (void)pthread_mutex_unlock(&s->lock);
}

/* Its work goes on to the end, as with the real one. */
CUresult gpu_stream_free(CUstream stream)
{
    struct CUstream_st *s = live(stream, "cuStreamDestroy");

    if (!stream)
        return CUDA_ERROR_INVALID_HANDLE;
    forget(s);
    s->magic = GONE;
    (void)pthread_mutex_lock(&s->lock);
    if (s->closed)
        gpu_die("cuStreamDestroy: a launch of NCCL is still in progress");
    struct node *n = allocate(sizeof *n);
    atomic_store_explicit(&s->tail->next, n, memory_order_release);
    (void)pthread_mutex_unlock(&s->lock);
    (void)sem_post(&s->ready); /* from here on it is the thread's */
    (void)atomic_fetch_sub(&streams, 1);
    return CUDA_SUCCESS;
}

static bool idle(struct CUstream_st *s)
{
    const unsigned long long pushed = atomic_load_explicit(&s->pushed, memory_order_relaxed);

    return atomic_load_explicit(&s->done, memory_order_relaxed) >= pushed &&
           atomic_load_explicit(&s->done, memory_order_acquire) >= pushed;
}

bool gpu_stream_idle(CUstream stream) { return idle(live(stream, "cuStreamQuery")); }

void gpu_device_wait(int device)
{
    bool busy = true;

    while (busy && !gpu_lost()) {
        busy = false;
        (void)pthread_mutex_lock(&all_lock);
        for (struct CUstream_st *s = all; s; s = s->next)
            busy |= s->device == device && !idle(s);
        (void)pthread_mutex_unlock(&all_lock);
        if (busy)
            (void)usleep(WAIT_US);
    }
}

/* ---- records ---- */

static struct record *record_new(void)
{
    struct record *r = allocate(sizeof *r);

    atomic_init(&r->refs, 1);
    (void)pthread_mutex_init(&r->lock, NULL);
    (void)pthread_cond_init(&r->cond, NULL);
    return r;
}

static struct record *record_ref(struct record *r)
{
    if (r)
        (void)atomic_fetch_add_explicit(&r->refs, 1, memory_order_relaxed);
    return r;
}

static void record_unref(struct record *r)
{
    if (!r || atomic_fetch_sub_explicit(&r->refs, 1, memory_order_release) != 1)
        return;
    (void)atomic_load_explicit(&r->refs, memory_order_acquire);
    (void)pthread_mutex_destroy(&r->lock);
    (void)pthread_cond_destroy(&r->cond);
    free(r);
}

static void record_keep(struct record *r)
{
    struct timespec t;

    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    (void)pthread_mutex_lock(&r->lock);
    r->at = gpu_now;
    r->ns = (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
    atomic_store_explicit(&r->done, true, memory_order_release);
    (void)pthread_cond_broadcast(&r->cond);
    (void)pthread_mutex_unlock(&r->lock);
}

static bool record_done(struct record *r)
{
    return atomic_load_explicit(&r->done, memory_order_relaxed) &&
           atomic_load_explicit(&r->done, memory_order_acquire);
}

static void record_wait(struct record *r)
{
    long ms = LOOK_MS; /* thousands of streams that look often would do nothing else */

    (void)pthread_mutex_lock(&r->lock);
    for (; !record_done(r) && !gpu_lost(); ms = ms < MOST_LOOK_MS ? 2 * ms : ms) {
        struct timespec t;
        (void)clock_gettime(CLOCK_REALTIME, &t);
        t.tv_nsec += ms * 1000000L;
        t.tv_sec += t.tv_nsec / 1000000000L;
        t.tv_nsec %= 1000000000L;
        (void)pthread_cond_timedwait(&r->cond, &r->lock, &t);
    }
    (void)pthread_mutex_unlock(&r->lock);
}

struct record_work {
    struct gpu_work work;
    struct record *record;
};

static void run_keep(struct gpu_work *work)
{
    struct record_work *w = (struct record_work *)work;

    if (!gpu_lost())
        record_keep(w->record);
    record_unref(w->record);
    free(w);
}

static void run_await(struct gpu_work *work)
{
    struct record_work *w = (struct record_work *)work;

    record_wait(w->record);
    gpu_clock_reach(w->record->at);
    record_unref(w->record);
    free(w);
}

static struct gpu_work *record_work(struct record *r, void (*run)(struct gpu_work *))
{
    struct record_work *w = allocate(sizeof *w);

    *w = (struct record_work){{run}, record_ref(r)};
    return &w->work;
}

CUresult gpu_stream_wait(CUstream stream)
{
    struct record *r = record_new();

    gpu_stream_push(stream, record_work(r, run_keep), false, "cuStreamSynchronize");
    record_wait(r);
    record_unref(r);
    return gpu_lost();
}

/* ---- events ---- */

CUresult gpu_event_new(CUevent *ret, int device, bool timed)
{
    struct CUevent_st *e = allocate(sizeof *e);

    e->magic = EVENT;
    e->device = device;
    e->timed = timed;
    (void)pthread_mutex_init(&e->lock, NULL);
    (void)atomic_fetch_add(&events, 1);
    *ret = e;
    return CUDA_SUCCESS;
}

static struct record *latest(CUevent event, const char *call)
{
    if (!event || event->magic != EVENT)
        gpu_die("%s: %p is no event", call, (void *)event);
    (void)pthread_mutex_lock(&event->lock);
    struct record *r = record_ref(event->latest);
    (void)pthread_mutex_unlock(&event->lock);
    return r;
}

CUresult gpu_event_free(CUevent event)
{
    struct record *r = latest(event, "cuEventDestroy");

    record_unref(r);
    record_unref(event->latest);
    event->magic = GONE;
    (void)pthread_mutex_destroy(&event->lock);
    free(event);
    (void)atomic_fetch_sub(&events, 1);
    return CUDA_SUCCESS;
}

void gpu_event_record(CUevent event, CUstream stream)
{
    struct record *r = record_new();

    record_unref(latest(event, "cuEventRecord"));
    if (event->device != gpu_stream_device(stream, "cuEventRecord"))
        gpu_die("cuEventRecord: an event of device %d on a stream of device %d", event->device,
                gpu_stream_device(stream, "cuEventRecord"));
    gpu_stream_push(stream, record_work(r, run_keep), false, "cuEventRecord");
    (void)pthread_mutex_lock(&event->lock);
    struct record *old = event->latest;
    event->latest = r;
    (void)pthread_mutex_unlock(&event->lock);
    record_unref(old);
}

bool gpu_event_done(CUevent event)
{
    struct record *r = latest(event, "cuEventQuery");
    const bool done = !r || record_done(r);

    record_unref(r);
    return done;
}

CUresult gpu_event_between(CUevent from, CUevent to, float *ret_ms)
{
    struct record *a = latest(from, "cuEventElapsedTime");
    struct record *b = latest(to, "cuEventElapsedTime");
    CUresult e = CUDA_SUCCESS;

    if (!a || !b || !from->timed || !to->timed)
        e = CUDA_ERROR_INVALID_HANDLE;
    else if (!record_done(a) || !record_done(b))
        e = CUDA_ERROR_NOT_READY;
    else
        *ret_ms = (float)((double)b->ns - (double)a->ns) / 1e6f;
    record_unref(a);
    record_unref(b);
    return e;
}

CUresult gpu_event_wait(CUevent event)
{
    struct record *r = latest(event, "cuEventSynchronize");

    if (r)
        record_wait(r);
    record_unref(r);
    return gpu_lost();
}

void gpu_stream_await(CUstream stream, CUevent event)
{
    struct record *r = latest(event, "cuStreamWaitEvent");

    if (r)
        gpu_stream_push(stream, record_work(r, run_await), false, "cuStreamWaitEvent");
    record_unref(r);
}

/* ---- faults ---- */

static void run_hang(struct gpu_work *work)
{
    free(work);
    while (!gpu_lost())
        (void)usleep(LOOK_MS * 1000);
}

static void run_loss(struct gpu_work *work)
{
    free(work);
    gpu_lose(CUDA_ERROR_ILLEGAL_ADDRESS);
}

static void push_simple(CUstream stream, void (*run)(struct gpu_work *), const char *call)
{
    struct gpu_work *w = allocate(sizeof *w);

    w->run = run;
    gpu_stream_push(stream, w, false, call);
}

void gpu_stream_push_hang(CUstream stream, const char *call)
{
    push_simple(stream, run_hang, call);
}

void gpu_stream_push_loss(CUstream stream, const char *call)
{
    push_simple(stream, run_loss, call);
}

size_t gpu_stream_leaks(void)
{
    const size_t s = atomic_load(&streams), e = atomic_load(&events);

    if (s || e)
        (void)fprintf(stderr, "gpu double: leak: %zu streams, %zu events\n", s, e);
    return s + e;
}
