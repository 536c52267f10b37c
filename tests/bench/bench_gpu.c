/* SPDX-License-Identifier: Apache-2.0 */
/* One rank of tests/bench/bench_gpu.py: loads into a GPU's memory beside what CUDA and NCCL do
 * alone.
 *
 *     bench_gpu [RUN IDFILE WINDOW_BYTES ROUNDS]
 *
 * Without arguments it prints how many GPUs there are, and ends with 77 if there is none.
 * The ranks connect as under torchrun, with CKPTFS_TRANSPORT=tcp; the id of the bench's own NCCL
 * communicator passes through IDFILE. Rounds
 * are interleaved, the first of each method warms up. Rank 0 prints a line of JSON for each
 * measurement: from all ranks being there to all being through. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <ckptfs/load_nccl.h>

#include "../gpu/calls.h"
#include "device/copy_kernel.h"

enum {
    BARRIER_MS = 600000,
    HOLE = 8,         /* elements between rows of strided destinations */
    PINNED = 1 << 28, /* most that a copy moves at once */
    KERNEL = 1 << 28, /* most that the kernel moves, elements of 16 bytes; half for casts */
    ROW = 4096,       /* bytes, of strided copies by the kernel */
    MEET_S = 60,
};

extern const char ckpt_copy_ptx[];

struct bench {
    uint32_t rank, size;
    int device;
    uint64_t window, bytes; /* bytes: of the model */
    struct ckpt_view *view;
    struct ckpt_comm *comm;
    ncclComm_t nccl;
    CUstream stream;
    CUevent begin, end;
    CUmodule module;
    CUfunction kernel;
    unsigned char *host, *mem, *other; /* pinned; of the device, two pieces */
    size_t len;                        /* of each */
};

struct result {
    uint64_t bytes; /* that this rank has at the end, of the model's dtypes */
    double gpu_s;   /* of this rank's stream, by events; 0: unknown */
    struct ckpt_load_stats job;
    const char *readers; /* of a load; NULL: none */
};

struct method {
    const char *name;
    void (*run)(struct bench *b, const struct method *m, struct result *r);
    uint32_t least, most;      /* ranks */
    enum ckpt_readers readers; /* of a load: */
    const char *dim;           /* "tp": its layout; NULL: every tensor whole */
    const char *dtype;
    bool strided;
    enum { PLAIN, ROWS, CAST } copy; /* of the kernel */
};

static void good(int rc, const struct ckpt_err *err, const char *what)
{
    if (rc < 0)
        die(what, err->text);
}

static double now_s(void)
{
    struct timespec t;

    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static void barrier(struct bench *b)
{
    struct ckpt_err err = {0};

    good(ckpt_comm_agree(b->comm, 0, BARRIER_MS, &err), &err, "a barrier");
}

/* ---- CUDA and NCCL alone ---- */

static void start_clock(struct bench *b) { cuda(cuEventRecord(b->begin, b->stream), "an event"); }

static void stop_clock(struct bench *b, struct result *r)
{
    float ms = 0;

    cuda(cuEventRecord(b->end, b->stream), "an event");
    cuda(cuEventSynchronize(b->end), "waiting");
    cuda(cuEventElapsedTime(&ms, b->begin, b->end), "the time");
    r->gpu_s = ms / 1e3;
}

static void copy_pinned(struct bench *b, const struct method *m, struct result *r)
{
    (void)m;
    start_clock(b);
    for (; r->bytes < b->bytes; r->bytes += b->len)
        cuda(cuMemcpyHtoDAsync(on_device(b->mem), b->host, b->len, b->stream), "a copy");
    stop_clock(b, r);
}

static void copy_device(struct bench *b, const struct method *m, struct result *r)
{
    (void)m;
    start_clock(b);
    for (; r->bytes < b->bytes; r->bytes += b->len)
        cuda(cuMemcpyDtoDAsync(on_device(b->other), on_device(b->mem), b->len, b->stream),
             "a copy");
    stop_clock(b, r);
}

/* Windows as a load's: in a group, an equal part of each from every rank. */
static void broadcast_all(struct bench *b, const struct method *m, struct result *r)
{
    const size_t part = b->window / b->size / 16 * 16;

    (void)m;
    start_clock(b);
    for (; r->bytes < b->bytes; r->bytes += part * b->size) {
        nccl(ncclGroupStart(), "a group");
        for (uint32_t root = 0; root < b->size; root++)
            nccl(ncclBroadcast(b->mem + root * part, b->mem + root * part, part, ncclUint8,
                               (int)root, b->nccl, b->stream),
                 "a broadcast");
        nccl(ncclGroupEnd(), "a group");
    }
    stop_clock(b, r);
}

static void broadcast_one(struct bench *b, const struct method *m, struct result *r)
{
    (void)m;
    start_clock(b);
    for (; r->bytes < b->bytes; r->bytes += b->window)
        nccl(ncclBroadcast(b->mem, b->mem, b->window, ncclUint8, 0, b->nccl, b->stream),
             "a broadcast");
    stop_clock(b, r);
}

/* ---- our kernel alone ---- */

static struct ckpt_device_copy describe(const struct bench *b, const struct method *m,
                                        uint64_t *ret_bytes)
{
    const uint64_t half =
        b->len / 2 / (2 * ROW) * (2 * ROW); /* what it reads; casts write double */
    struct ckpt_device_copy c = {.src = (uintptr_t)b->mem,
                                 .dst = (uintptr_t)b->other,
                                 .n = {1, 1, 1, 1},
                                 .src_size = 16,
                                 .dst_size = 16,
                                 .from = CKPT_COPY_PLAIN,
                                 .to = CKPT_COPY_PLAIN};

    *ret_bytes = half;
    if (m->copy == CAST) {
        c.src_size = 2;
        c.dst_size = 4;
        c.from = CKPT_COPY_BF16;
        c.to = CKPT_COPY_F32;
    }
    c.run = c.total = (uint32_t)(half / c.src_size);
    if (m->copy == ROWS) { /* every other row, as of a matrix's left half */
        c.run = ROW / 16;
        c.n[3] = (uint32_t)(half / ROW);
        c.step_src[3] = (uint64_t)2 * ROW;
        c.step_dst[3] = ROW;
    }
    return c;
}

static void run_kernel(struct bench *b, const struct method *m, struct result *r)
{
    uint64_t bytes;
    struct ckpt_device_copy c = describe(b, m, &bytes), *list = NULL;
    uint32_t n = 1;
    void *args[] = {&list, &n};
    const unsigned blocks = (c.total + CKPT_COPY_BLOCK - 1) / CKPT_COPY_BLOCK;

    memcpy(b->host, &c, sizeof c);
    list = allocate_on_device(sizeof c);
    cuda(cuMemcpyHtoDAsync(on_device(list), b->host, sizeof c, b->stream), "a copy");
    start_clock(b);
    for (; r->bytes < b->bytes; r->bytes += bytes)
        cuda(cuLaunchKernel(b->kernel, blocks, 1, 1, CKPT_COPY_THREADS, 1, 1, 0, b->stream, args,
                            NULL),
             "the kernel");
    stop_clock(b, r);
    cuda(cuMemFree(on_device(list)), "freeing");
}

/* ---- loads ---- */

static void declare(struct bench *b, const struct method *m, struct ckpt_load *load)
{
    struct ckpt_err err = {0};
    char layout[32];

    if (m->dim) {
        (void)snprintf(layout, sizeof layout, "%s=%u", m->dim, b->size);
        good(ckpt_load_want_layout(load, layout, &err), &err, layout);
        return;
    }
    for (size_t i = 0; i < ckpt_view_tensors(b->view); i++) {
        const struct ckpt_dest later = {.size = sizeof later, .dtype = m->dtype};
        struct ckpt_tensor_info t = {.size = sizeof t};
        (void)ckpt_view_tensor(b->view, i, &t, NULL);
        good(ckpt_load_want(load, t.name, NULL, NULL, &later, NULL, &err), &err, t.name);
    }
}

static void *allocate(struct bench *b, const struct method *m, struct ckpt_load *load, size_t i)
{
    struct ckpt_want_info info = {.size = sizeof info};
    struct ckpt_err err = {0};
    uint64_t stride[CKPT_LOAD_RANK], numel = 1, step = 1;
    void *mem;

    (void)ckpt_load_want_info(load, i, &info, NULL);
    for (uint32_t d = info.rank; d-- > 0;) {
        stride[d] = step;
        step = step * info.n[d] + (m->strided && d + 1 == info.rank ? HOLE : 0);
        numel *= info.n[d];
    }
    const size_t len = numel ? info.nbytes / numel * step : 1;
    good(ckpt_comm_alloc(b->comm, len, &mem, &err), &err, "device memory");
    const struct ckpt_dest dest = {.size = sizeof dest, .ptr = mem, .stride = stride};
    good(ckpt_load_set_dest(load, i, &dest, &err), &err, info.tensor);
    return mem;
}

/* Memory for destinations is taken before the clock starts; that of windows after it. */
static void run_load(struct bench *b, const struct method *m, struct result *r)
{
    const struct ckpt_load_options opt = {
        .size = sizeof opt, .readers = m->readers, .window_bytes = b->window};
    struct ckpt_err err = {0};
    struct ckpt_load *load;

    good(ckpt_load_new(b->view, b->comm, &opt, &load, &err), &err, "a load");
    declare(b, m, load);
    good(ckpt_load_plan(load, &err), &err, "a plan");
    const size_t n = ckpt_load_wants(load);
    void **mem = calloc(n + 1, sizeof *mem);
    if (!mem)
        die("a load", "no memory");
    for (size_t i = 0; i < n; i++)
        mem[i] = allocate(b, m, load, i);
    barrier(b);
    good(ckpt_load_start(load, &err), &err, "starting");
    good(ckpt_load_wait(load, UINT32_MAX, &err), &err, "loading");
    struct ckpt_load_stats own = {.size = sizeof own};
    r->job.size = sizeof r->job;
    (void)ckpt_load_stats(load, &own, &r->job, NULL);
    r->bytes = own.needed_bytes;
    r->readers = ckpt_load_readers(load);
    ckpt_load_free(load);
    for (size_t i = 0; i < n; i++)
        ckpt_comm_dealloc(b->comm, mem[i]);
    free(mem);
}

/* ---- all of them ---- */

static const struct method methods[] = {
    {"cuMemcpyAsync to the device", copy_pinned, 1, 64},
    {"load whole", run_load, 1, 1, CKPT_READERS_EACH},
    {"load strided", run_load, 1, 1, CKPT_READERS_EACH, .strided = true},
    {"load as F32", run_load, 1, 1, CKPT_READERS_EACH, .dtype = "F32"},
    {"cuMemcpyAsync in the device", copy_device, 1, 1},
    {"kernel plain", run_kernel, 1, 1, .copy = PLAIN},
    {"kernel rows", run_kernel, 1, 1, .copy = ROWS},
    {"kernel BF16 to F32", run_kernel, 1, 1, .copy = CAST},
    {"ncclBroadcast, one root", broadcast_one, 2, 64},
    {"ncclBroadcast, all roots", broadcast_all, 2, 64},
    {"load once, replicated", run_load, 2, 64, CKPT_READERS_ONCE, "dp"},
    {"load once, sharded", run_load, 2, 64, CKPT_READERS_ONCE, "tp"},
    {"load each, sharded", run_load, 2, 64, CKPT_READERS_EACH, "tp"},
    {"load auto, replicated", run_load, 2, 64, CKPT_READERS_AUTO, "dp"},
};
enum { METHODS = sizeof methods / sizeof *methods };

static void tell(const struct bench *b, const struct method *m, uint32_t round, double s,
                 const struct result *r)
{
    const struct ckpt_load_stats *j = &r->job;

    (void)printf("{\"method\": \"%s\", \"ranks\": %u, \"round\": %u, \"s\": %.6f, \"gpu_s\": %.6f, "
                 "\"bytes\": %" PRIu64,
                 m->name, b->size, round, s, r->gpu_s, r->bytes);
    if (r->readers)
        (void)printf(", \"readers\": \"%s\", \"needed_bytes\": %" PRIu64
                     ", \"unique_bytes\": %" PRIu64 ", \"read_bytes\": %" PRIu64
                     ", \"sent_bytes\": %" PRIu64 ", \"wall_s\": %.6f, \"plan_s\": %.6f, "
                     "\"first_s\": %.6f, \"busy_s\": {\"read\": %.6f, \"place\": %.6f, "
                     "\"send\": %.6f}",
                     r->readers, j->needed_bytes, j->unique_bytes, j->read_bytes, j->sent_bytes,
                     j->wall_s, j->plan_s, j->first_s, j->read_s, j->place_s, j->send_s);
    (void)printf("}\n");
    (void)fflush(stdout);
}

static void measure(struct bench *b, const struct method *m, uint32_t round)
{
    struct result r = {0};

    if (b->size < m->least || b->size > m->most)
        return;
    barrier(b);
    const double begin = now_s();
    m->run(b, m, &r);
    barrier(b);
    const double s = r.readers ? r.job.wall_s : now_s() - begin;
    if (b->rank == 0)
        tell(b, m, round, s, &r);
}

/* ---- beginning ---- */

static uint32_t number_of(const char *variable, uint32_t otherwise)
{
    const char *text = getenv(variable);

    return text ? (uint32_t)strtoul(text, NULL, 10) : otherwise;
}

static void open_run(struct bench *b, const char *path)
{
    struct ckpt_err err = {0};
    struct ckpt_run *run;

    good(ckpt_run_open(path, NULL, &run, &err), &err, path);
    good(ckpt_run_view(run, NULL, &b->view, &err), &err, path);
    ckpt_run_close(run);
    for (size_t i = 0; i < ckpt_view_tensors(b->view); i++) {
        struct ckpt_tensor_info t = {.size = sizeof t};
        (void)ckpt_view_tensor(b->view, i, &t, NULL);
        b->bytes += t.nbytes;
    }
}

static void load_kernel(struct bench *b)
{
    int ignored;

    cuda(cuModuleLoadData(&b->module, ckpt_copy_ptx), "the kernel");
    cuda(cuModuleGetFunction(&b->kernel, b->module, CKPT_COPY_KERNEL), "the kernel");
    cuda(cuFuncGetAttribute(&ignored, CU_FUNC_ATTRIBUTE_NUM_REGS, b->kernel), "the kernel");
}

static void begin(struct bench *b, const char *id_path)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    struct ckpt_comm *control = NULL;
    struct ckpt_err err = {0};
    ncclUniqueId id;

    choose_device(b->device);
    cuda(cuStreamCreate(&b->stream, CU_STREAM_NON_BLOCKING), "a stream");
    cuda(cuEventCreate(&b->begin, CU_EVENT_DEFAULT), "an event");
    cuda(cuEventCreate(&b->end, CU_EVENT_DEFAULT), "an event");
    b->len = b->bytes < PINNED ? b->bytes / 4096 * 4096 : PINNED;
    if (b->len < b->window)
        b->len = b->window;
    cuda(cuMemHostAlloc((void **)&b->host, b->len, 0), "pinned memory");
    memset(b->host, 1, b->len);
    b->mem = allocate_on_device(b->len);
    b->other = allocate_on_device(b->len);
    cuda(cuMemsetD8Async(on_device(b->mem), 1, b->len, b->stream), "device memory");
    pass_id(id_path, b->rank == 0, MEET_S * 1000, &id);
    nccl(ncclCommInitRankConfig(&b->nccl, (int)b->size, id, (int)b->rank, &config),
         "a communicator");
    const struct ckpt_nccl how = {.size = sizeof how, .device = b->device, .stream = b->stream};
    good(ckpt_comm_from_env(&control, &err), &err, "a comm");
    good(ckpt_comm_nccl(control, &how, &b->comm, &err), &err, "a comm");
}

static void end(struct bench *b)
{
    ckpt_comm_free(b->comm);
    nccl(ncclCommDestroy(b->nccl), "destroying");
    cuda(cuModuleUnload(b->module), "the kernel");
    cuda(cuMemFree(on_device(b->mem)), "freeing");
    cuda(cuMemFree(on_device(b->other)), "freeing");
    cuda(cuMemFreeHost(b->host), "freeing");
    cuda(cuEventDestroy(b->begin), "an event");
    cuda(cuEventDestroy(b->end), "an event");
    cuda(cuStreamDestroy(b->stream), "a stream");
    ckpt_view_release(b->view);
}

int main(int argc, char **argv)
{
    struct bench b = {.rank = number_of("RANK", 0), .size = number_of("WORLD_SIZE", 1)};
    const int devices = count_devices();
    int version = 0;

    if (devices < 1) {
        (void)fprintf(stderr, "bench_gpu: there is no CUDA device\n");
        return 77;
    }
    if (argc == 1)
        return printf("%d\n", devices) < 0;
    if (argc != 5)
        die("arguments", "expected RUN IDFILE WINDOW_BYTES ROUNDS");
    b.window = strtoull(argv[3], NULL, 10);
    b.device = (int)number_of("LOCAL_RANK", 0) % devices;
    open_run(&b, argv[1]);
    begin(&b, argv[2]);
    load_kernel(&b);
    nccl(ncclGetVersion(&version), "its version");
    if (b.rank == 0)
        (void)printf("{\"devices\": %d, \"nccl\": %d, \"model_bytes\": %" PRIu64 "}\n", devices,
                     version, b.bytes);
    const uint32_t rounds = (uint32_t)strtoul(argv[4], NULL, 10);
    for (uint32_t round = 0; round <= rounds; round++)
        for (uint32_t i = 0; i < METHODS; i++)
            measure(&b, &methods[(i + round) % METHODS], round);
    end(&b);
    return 0;
}
