/* SPDX-License-Identifier: Apache-2.0 */
/* The double itself: each case is a program of its own, of one or several ranks. */
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#pragma GCC diagnostic ignored "-Wstrict-prototypes"
#include <cuda.h>
#include <nccl.h>

#include "device/copy_kernel.h"
#include "test.h"

/* All ranks are threads of one process, and meet in memory. */
#define THREADS "CKPTFS_GPU_THREADS=1"

enum { MOST_RANKS = 8, SAID = 4096, LONG_S = 60, N = 100000 };

static _Thread_local int rank;
static int size;
static ncclUniqueId id;
static _Thread_local CUstream stream;
static _Thread_local unsigned char *host, *device; /* N bytes each, in some cases */

#define MUST(call)                                                                                 \
    do {                                                                                           \
        const int e_ = (int)(call);                                                                \
        if (e_) {                                                                                  \
            (void)fprintf(stderr, "line %d: %s: %d\n", __LINE__, #call, e_);                       \
            exit(3);                                                                               \
        }                                                                                          \
    } while (0)
#define EXPECT(what) MUST(!(what))

/* ---- what ranks do ---- */

static CUdeviceptr on_device(const void *p) { return (CUdeviceptr)(uintptr_t)p; }

static void choose(int number)
{
    CUcontext context;

    MUST(cuInit(0));
    MUST(cuDevicePrimaryCtxRetain(&context, number));
    MUST(cuCtxSetCurrent(context));
}

static void *allocate(size_t len)
{
    CUdeviceptr p;

    MUST(cuMemAlloc(&p, len));
    return (void *)(uintptr_t)p;
}

static void begin(void)
{
    choose(rank);
    MUST(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    MUST(cuMemHostAlloc((void **)&host, N, 0));
    device = allocate(N);
}

static void end(void)
{
    MUST(cuStreamSynchronize(stream));
    MUST(cuMemFree(on_device(device)));
    MUST(cuMemFreeHost(host));
    MUST(cuStreamDestroy(stream));
}

/* share: communicators that are split from this one share with it. */
static ncclComm_t meet_for(bool share)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclComm_t comm;

    config.splitShare = share;
    MUST(ncclCommInitRankConfig(&comm, size, id, rank, &config));
    return comm;
}

static ncclComm_t meet(void) { return meet_for(false); }

static ncclResult_t settle(ncclComm_t comm)
{
    ncclResult_t state;

    do {
        MUST(ncclCommGetAsyncError(comm, &state));
        (void)usleep(100);
    } while (state == ncclInProgress);
    return state;
}

/* A receive that no send will meet. */
static void get_stuck(ncclComm_t comm)
{
    MUST(ncclRecv(device, N, ncclInt8, rank ? 0 : 1, comm, stream));
}

static void copies_there_and_back(void)
{
    static unsigned char pageable[N];

    begin();
    memset(host, 1, N);
    MUST(cuMemcpyHtoDAsync(on_device(device), host, N, stream));
    MUST(cuMemsetD8Async(on_device(device + 10), 2, 10, stream));
    MUST(cuStreamSynchronize(stream));
    MUST(cuMemcpy(on_device(pageable), on_device(device), N));
    EXPECT(pageable[9] == 1 && pageable[10] == 2 && pageable[19] == 2 && pageable[N - 1] == 1);
    end();
}

static void a_context_too_many(void)
{
    begin();
    choose(1);
    end();
}

static void an_event_orders_streams(void)
{
    CUstream other;
    CUevent event;

    begin();
    MUST(cuStreamCreate(&other, CU_STREAM_NON_BLOCKING));
    MUST(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    MUST(cuEventQuery(event));
    ncclComm_t comm = meet();
    get_stuck(comm);
    MUST(cuEventRecord(event, stream));
    MUST(cuStreamWaitEvent(other, event, 0));
    MUST(cuMemsetD8Async(on_device(device), 7, 1, other));
    (void)usleep(20000);
    EXPECT(cuEventQuery(event) == CUDA_ERROR_NOT_READY);
    EXPECT(cuStreamQuery(stream) == CUDA_ERROR_NOT_READY);
    EXPECT(cuStreamQuery(other) == CUDA_ERROR_NOT_READY);
    MUST(ncclCommAbort(comm));
    MUST(cuEventSynchronize(event));
    MUST(cuStreamSynchronize(other));
    MUST(cuStreamQuery(other));
    MUST(cuMemcpy(on_device(host), on_device(device), 1));
    EXPECT(host[0] == 7);
    MUST(cuStreamDestroy(other));
    MUST(cuEventDestroy(event));
    end();
}

static void events_tell_the_time(void)
{
    CUevent from, to, timeless;
    float ms = -1;

    begin();
    MUST(cuEventCreate(&from, CU_EVENT_DEFAULT));
    MUST(cuEventCreate(&to, CU_EVENT_DEFAULT));
    MUST(cuEventCreate(&timeless, CU_EVENT_DISABLE_TIMING));
    MUST(cuEventRecord(from, stream));
    EXPECT(cuEventElapsedTime(&ms, from, to) == CUDA_ERROR_INVALID_HANDLE);
    MUST(cuStreamSynchronize(stream));
    (void)usleep(3000);
    MUST(cuEventRecord(timeless, stream));
    MUST(cuEventRecord(to, stream));
    MUST(cuStreamSynchronize(stream));
    EXPECT(cuEventElapsedTime(&ms, from, timeless) == CUDA_ERROR_INVALID_HANDLE);
    MUST(cuEventElapsedTime(&ms, from, to));
    EXPECT(ms >= 3 && ms < 1e3f * LONG_S);
    MUST(cuEventDestroy(from));
    MUST(cuEventDestroy(to));
    MUST(cuEventDestroy(timeless));
    end();
}

static void memory_ends(void)
{
    size_t free_bytes, total;
    CUdeviceptr p;

    choose(0);
    MUST(cuMemGetInfo(&free_bytes, &total));
    EXPECT(free_bytes == total);
    EXPECT(cuMemAlloc(&p, total + 1) == CUDA_ERROR_OUT_OF_MEMORY && !p);
}

static void a_touch(void)
{
    begin();
    *(volatile unsigned char *)device = 1;
}

static void a_copy_of_pageable_memory(void)
{
    static unsigned char pageable[N];

    begin();
    MUST(cuMemcpyHtoDAsync(on_device(device), pageable, N, stream));
}

/* cuMemcpy has taken the bytes when it returns; they may be on their way still. */
static void a_copy_that_is_not_there_yet(void)
{
    static unsigned char pageable[N];
    uint32_t late = 0;

    begin();
    for (unsigned char i = 1; i <= 20; i++) {
        memset(pageable, i, N);
        MUST(cuMemcpy(on_device(device), on_device(pageable), N));
        memset(pageable, 0, N);
        MUST(cuMemcpyDtoHAsync(host, on_device(device), N, stream));
        MUST(cuStreamSynchronize(stream));
        late += host[N - 1] != i;
        MUST(cuMemcpy(on_device(host), on_device(device), N)); /* the same stream waits */
        EXPECT(host[N - 1] == i);
    }
    EXPECT(late);
    end();
}

static void a_copy_too_long(void)
{
    begin();
    MUST(cuMemcpyHtoDAsync(on_device(device + 1), host, N, stream));
}

static void a_free_in_use(void)
{
    begin();
    ncclComm_t comm = meet();
    get_stuck(comm);
    MUST(cuMemFree(on_device(device)));
}

static void a_leak(void) { begin(); }

static void registered_memory(void)
{
    static unsigned char own[N];

    begin();
    MUST(cuMemHostRegister(own, N, 0));
    EXPECT(cuMemHostRegister(own + 5, 5, 0) == CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
    MUST(cuMemcpyHtoDAsync(on_device(device), own, N, stream));
    MUST(cuStreamSynchronize(stream));
    MUST(cuMemHostUnregister(own));
    end();
}

/* ---- the kernel ---- */

/* What a library would embed. */
static const char ptx[] =
    "//\n\n.version 8.0\n.target sm_52\n.visible .entry " CKPT_COPY_KERNEL "(\n";

static void launch_kernel(const struct ckpt_device_copy *list, uint32_t n, uint32_t blocks,
                          bool loaded)
{
    int registers;
    CUmodule module;
    CUfunction kernel;
    void *at = allocate(n * sizeof *list);
    void *args[] = {&at, &n};

    MUST(cuModuleLoadData(&module, ptx));
    MUST(cuModuleGetFunction(&kernel, module, CKPT_COPY_KERNEL));
    if (loaded)
        MUST(cuFuncGetAttribute(&registers, CU_FUNC_ATTRIBUTE_NUM_REGS, kernel));
    MUST(cuMemcpy(on_device(at), on_device(list), n * sizeof *list));
    MUST(cuStreamSynchronize(NULL));
    MUST(cuLaunchKernel(kernel, blocks, 1, 1, CKPT_COPY_THREADS, 1, 1, 0, stream, args, NULL));
    MUST(cuStreamSynchronize(stream));
    MUST(cuMemFree(on_device(at)));
    EXPECT(cuModuleGetFunction(&kernel, module, "nothing") == CUDA_ERROR_NOT_FOUND);
    MUST(cuModuleUnload(module));
}

/* The double's driver is of CUDA 12.0. */
static void kernels_that_are_too_new(void)
{
    static const char newer[] = "//\n.version 8.1\n.target sm_52\n";
    static const char bigger[] = "//\n.version 8.0\n.target sm_100\n";
    CUmodule module;

    choose(0);
    EXPECT(cuModuleLoadData(&module, newer) == CUDA_ERROR_UNSUPPORTED_PTX_VERSION);
    EXPECT(cuModuleLoadData(&module, bigger) == CUDA_ERROR_UNSUPPORTED_PTX_VERSION);
    EXPECT(cuModuleLoadData(&module, "\x50\xed\x55\xba") == CUDA_ERROR_INVALID_IMAGE);
}

/* A thread's contexts are a stack; what is current is its last. */
static void contexts_are_pushed_and_popped(void)
{
    CUcontext first, second, now;
    CUdevice number;

    MUST(cuInit(0));
    MUST(cuCtxGetCurrent(&now));
    EXPECT(!now);
    MUST(cuDevicePrimaryCtxRetain(&first, 0));
    MUST(cuDevicePrimaryCtxRetain(&second, 1));
    MUST(cuCtxGetCurrent(&now));
    EXPECT(!now);
    MUST(cuCtxSetCurrent(first));
    MUST(cuCtxPushCurrent(second));
    MUST(cuCtxGetDevice(&number));
    EXPECT(number == 1);
    MUST(cuCtxPopCurrent(&now));
    EXPECT(now == second);
    MUST(cuCtxGetCurrent(&now));
    EXPECT(now == first);
}

static void a_call_without_a_context(void)
{
    CUdeviceptr p;

    MUST(cuInit(0));
    MUST(cuMemAlloc(&p, 1));
}

static void a_call_before_the_first(void)
{
    CUcontext now;

    MUST(cuCtxGetCurrent(&now));
}

static void launch(const struct ckpt_device_copy *list, uint32_t n, uint32_t blocks)
{
    launch_kernel(list, n, blocks, true);
}

static void a_kernel_not_loaded(void)
{
    struct ckpt_device_copy copy = {.total = 1, .run = 1};

    begin();
    launch_kernel(&copy, 1, 1, false);
}

static void a_kernel_copies(void)
{
    struct ckpt_device_copy copy[2] = {
        {.src = 0,
         .dst = 50000,
         .step_src = {20},
         .step_dst = {10},
         .n = {1000, 1, 1, 1},
         .run = 5,
         .total = 5000,
         .src_size = 2,
         .dst_size = 2,
         .from = CKPT_COPY_PLAIN,
         .to = CKPT_COPY_PLAIN},
        {.src = 4,
         .dst = 80000,
         .n = {1, 1, 1, 1},
         .run = 1,
         .total = 1,
         .first = 2,
         .src_size = 4,
         .dst_size = 4,
         .from = CKPT_COPY_PLAIN,
         .to = CKPT_COPY_PLAIN},
    };

    begin();
    for (int i = 0; i < 2; i++) {
        copy[i].src += (uintptr_t)device;
        copy[i].dst += (uintptr_t)device;
    }
    for (size_t i = 0; i < N; i++)
        host[i] = (unsigned char)(i * 7 + i / 256);
    MUST(cuMemcpy(on_device(device), on_device(host), N));
    launch(copy, 2, 3);
    unsigned char *got = malloc(N);
    MUST(cuMemcpy(on_device(got), on_device(device), N));
    for (size_t i = 0; i < 1000; i++)
        EXPECT(memcmp(got + 50000 + 10 * i, host + 20 * i, 10) == 0);
    EXPECT(memcmp(got + 80000, host + 4, 4) == 0 && got[80004] == host[80004]);
    free(got);
    end();
}

static void a_kernel_off_its_alignment(void)
{
    begin();
    const struct ckpt_device_copy copy = {.src = (uintptr_t)device + 1,
                                          .dst = (uintptr_t)device + 1000,
                                          .n = {1, 1, 1, 1},
                                          .run = 4,
                                          .total = 4,
                                          .src_size = 4,
                                          .dst_size = 4,
                                          .from = CKPT_COPY_PLAIN,
                                          .to = CKPT_COPY_PLAIN};
    launch(&copy, 1, 1);
}

static void a_kernel_out_of_bounds(void)
{
    begin();
    const struct ckpt_device_copy copy = {.src = (uintptr_t)device,
                                          .dst = (uintptr_t)device + N - 8,
                                          .n = {1, 1, 1, 1},
                                          .run = 9,
                                          .total = 9,
                                          .src_size = 1,
                                          .dst_size = 1,
                                          .from = CKPT_COPY_PLAIN,
                                          .to = CKPT_COPY_PLAIN};
    launch(&copy, 1, 1);
}

/* ---- ranks ---- */

static unsigned char mark(int from, size_t i) { return (unsigned char)(from * 37 + 11 + (int)i); }

/* Each rank is a root within one group, sends every other a size of its own, and itself, too. */
static void exchange(ncclComm_t comm)
{
    const size_t part = 1000, at_pairs = part * MOST_RANKS, pair = 5000;
    int self, n;

    MUST(ncclCommUserRank(comm, &self));
    MUST(ncclCommCount(comm, &n));
    for (size_t i = 0; i < N; i++)
        host[i] = mark(self, i);
    MUST(cuMemcpyHtoDAsync(on_device(device), host, N, stream));
    MUST(ncclGroupStart());
    for (int r = 0; r < n; r++) {
        unsigned char *to = device + part * (size_t)r;
        MUST(ncclBroadcast(to, to, part, ncclUint8, r, comm, stream));
    }
    for (int r = 0; r < n; r++) {
        unsigned char *from = device + at_pairs, *to = from + pair * (size_t)(r + 1);
        MUST(ncclSend(from, (size_t)(self * 100 + r), ncclUint8, r, comm, stream));
        MUST(ncclRecv(to, (size_t)(r * 100 + self), ncclUint8, r, comm, stream));
    }
    MUST(ncclGroupEnd());
    MUST(cuMemcpyDtoHAsync(host, on_device(device), N, stream));
    MUST(cuStreamSynchronize(stream));
    for (int r = 0; r < n; r++) {
        const unsigned char *to = host + at_pairs + pair * (size_t)(r + 1);
        for (size_t i = 0; i < part; i++)
            EXPECT(host[part * (size_t)r + i] == mark(r, part * (size_t)r + i));
        for (size_t i = 0; i < (size_t)(r * 100 + self); i++)
            EXPECT(to[i] == mark(r, at_pairs + i));
    }
}

static void many_roots(void)
{
    begin();
    ncclComm_t comm = meet();
    exchange(comm);
    exchange(comm);
    MUST(ncclCommDestroy(comm));
    end();
}

static void all_gather_and_long_transfers(void)
{
    enum { LONG = 3 << 20 };
    unsigned char *big, *check = malloc(LONG);

    begin();
    ncclComm_t comm = meet();
    big = allocate((size_t)LONG * 2);
    MUST(cuMemsetD8Async(on_device(big), rank + 1, LONG, stream));
    const int right = (rank + 1) % size, left = (rank + size - 1) % size;
    MUST(ncclGroupStart()); /* without a group this would be a deadlock, as with the real one */
    MUST(ncclSend(big, LONG, ncclUint8, right, comm, stream));
    MUST(ncclRecv(big + LONG, LONG / 4, ncclFloat32, left, comm, stream));
    MUST(ncclGroupEnd());
    MUST(cuStreamSynchronize(stream));
    MUST(cuMemcpy(on_device(check), on_device(big + LONG), LONG));
    for (size_t i = 0; i < LONG; i++)
        EXPECT(check[i] == left + 1);
    MUST(ncclAllGather(big, device, 10, ncclInt32, comm, stream));
    MUST(cuStreamSynchronize(stream));
    MUST(cuMemcpy(on_device(check), on_device(device), 40 * (size_t)size));
    for (size_t i = 0; i < 40 * (size_t)size; i++)
        EXPECT(check[i] == i / 40 + 1);
    MUST(cuMemFree(on_device(big)));
    free(check);
    MUST(ncclCommFinalize(comm));
    MUST(ncclCommDestroy(comm));
    end();
}

static void calls_that_do_not_block(void)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclComm_t comm;

    begin();
    config.blocking = 0;
    EXPECT(ncclCommInitRankConfig(&comm, size, id, rank, &config) == ncclInProgress);
    MUST(settle(comm));
    for (int i = 0; i < 3; i++) {
        MUST(ncclGroupStart());
        MUST(ncclBroadcast(device, device, N, ncclUint8, i % size, comm, stream));
        EXPECT(ncclGroupEnd() == ncclInProgress);
        MUST(settle(comm));
    }
    MUST(cuStreamSynchronize(stream));
    EXPECT(ncclCommFinalize(comm) == ncclInProgress);
    MUST(settle(comm));
    MUST(ncclCommDestroy(comm));
    end();
}

static void work_before_a_launch_is_over(void)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclComm_t comm;

    begin();
    config.blocking = 0;
    EXPECT(ncclCommInitRankConfig(&comm, size, id, rank, &config) == ncclInProgress);
    MUST(settle(comm));
    EXPECT(ncclAllGather(device, device + 100, 10, ncclUint8, comm, stream) == ncclInProgress);
    (void)usleep(20000); /* it may be over, but that has to be asked */
    MUST(cuMemsetD8Async(on_device(device), 0, 1, stream));
}

/* Rank 1 of 2 is not started. */
static void a_rank_that_never_comes(void)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclComm_t comm;
    ncclResult_t state;

    config.blocking = 0;
    choose(0);
    EXPECT(ncclCommInitRankConfig(&comm, 2, id, 0, &config) == ncclInProgress);
    (void)usleep(20000);
    MUST(ncclCommGetAsyncError(comm, &state));
    EXPECT(state == ncclInProgress);
    MUST(ncclCommAbort(comm));
}

static void a_rank_that_dies(void)
{
    begin();
    ncclComm_t comm = meet();
    if (rank == 1)
        _exit(0);
    MUST(ncclAllGather(device, device + 100, 10, ncclUint8, comm, stream));
    ncclResult_t state;
    do { /* over a network it is an error, some time; within a node, nothing happens */
        (void)usleep(30000);
        MUST(ncclCommGetAsyncError(comm, &state));
    } while (getenv("CKPTFS_GPU_REMOTE") && state != ncclRemoteError);
    EXPECT(state == (getenv("CKPTFS_GPU_REMOTE") ? ncclRemoteError : ncclSuccess));
    EXPECT(cuStreamQuery(stream) == CUDA_ERROR_NOT_READY);
    MUST(ncclCommAbort(comm));
    end();
}

/* One of them aborts; the other is stuck, as it would be. */
static void other_sizes(void)
{
    begin();
    ncclComm_t comm = meet();
    if (rank == 0)
        MUST(ncclSend(device, 100, ncclUint8, 1, comm, stream));
    else
        MUST(ncclRecv(device, 101, ncclUint8, 0, comm, stream));
    (void)usleep(rank ? 200000 : LONG_S * 1000000);
    MUST(ncclCommAbort(comm));
    end();
}

static void other_roots(void)
{
    begin();
    ncclComm_t comm = meet();
    MUST(ncclBroadcast(device, device, 100, ncclUint8, rank, comm, stream));
    (void)usleep(LONG_S * 1000000);
}

/* A communicator of the ranks with the same colour. `share` is for what is split from it later. */
static ncclComm_t split(ncclComm_t from, int colour, bool share)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclComm_t comm;

    config.splitShare = share;
    MUST(ncclCommSplit(from, colour, -rank, &comm, &config));
    return comm;
}

/* Even and odd ranks, in the opposite order; and nothing for the last rank. */
static void groups_that_are_split(void)
{
    int number = -1, count = -1;

    begin();
    ncclComm_t comm = meet();
    ncclComm_t group = split(comm, rank == size - 1 ? NCCL_SPLIT_NOCOLOR : rank % 2, true);
    EXPECT((group == NULL) == (rank == size - 1));
    if (group) {
        const int members = (size - 1 + 1 - rank % 2) / 2;
        MUST(ncclCommCount(group, &count));
        MUST(ncclCommUserRank(group, &number));
        EXPECT(count == members && number == members - 1 - rank / 2);
        MUST(cuMemsetD8Async(on_device(device), rank + 1, 10, stream));
        MUST(ncclBroadcast(device, device, 10, ncclUint8, 0, group, stream));
        MUST(cuStreamSynchronize(stream));
        unsigned char byte = 0;
        MUST(cuMemcpy(on_device(&byte), on_device(device), 1));
        EXPECT(byte == 2 * (members - 1) + rank % 2 + 1);
        MUST(ncclCommAbort(group));
    }
    MUST(ncclCommAbort(comm));
    end();
}

static void a_call_after_the_abort_of_a_relative(void)
{
    begin();
    ncclComm_t comm = meet_for(true), group = split(comm, 0, false);
    MUST(ncclCommAbort(group));
    MUST(ncclBroadcast(device, device, 10, ncclUint8, 0, comm, stream));
}

/* Whether a new communicator shares is asked of the one that is split. */
static void an_abort_of_the_parent_first(void)
{
    begin();
    ncclComm_t comm = meet_for(true), group = split(comm, 0, false);
    if (rank == 0) /* the other ranks never come */
        MUST(ncclBroadcast(device, device, 10, ncclUint8, 0, group, stream));
    MUST(ncclCommAbort(comm));
    MUST(ncclCommAbort(group));
    end();
}

static void an_abort_beside_the_parent(void)
{
    begin();
    ncclComm_t comm = meet(), group = split(comm, 0, true);
    MUST(ncclCommAbort(group));
    MUST(ncclBroadcast(device, device, 10, ncclUint8, 0, comm, stream));
    MUST(cuStreamSynchronize(stream));
    MUST(ncclCommDestroy(comm));
    end();
}

/* Each on a stream of its own, so that nobody need be stuck; on a device that may happen. */
static void another_order(void)
{
    CUstream second;

    begin();
    ncclComm_t comm = meet(), other = split(comm, 0, false);
    MUST(cuStreamCreate(&second, CU_STREAM_NON_BLOCKING));
    for (int i = 0; i < 2; i++)
        if ((i + rank) % 2)
            MUST(ncclBroadcast(device, device, 100, ncclUint8, 0, comm, stream));
        else
            MUST(ncclBroadcast(device + 200, device + 200, 100, ncclUint8, 0, other, second));
    (void)usleep(LONG_S * 1000000);
}

static void overlapping_receives(void)
{
    begin();
    ncclComm_t comm = meet();
    MUST(ncclGroupStart());
    MUST(ncclSend(device, 100, ncclUint8, 1 - rank, comm, stream));
    MUST(ncclRecv(device + 99, 100, ncclUint8, 1 - rank, comm, stream));
    MUST(ncclGroupEnd());
}

static void two_ranks_on_one_device(void)
{
    const char *multi = getenv("NCCL_MULTI_RANK_GPU_ENABLE");
    ncclComm_t comm;

    choose(0);
    const ncclResult_t e = ncclCommInitRankConfig(&comm, size, id, rank, NULL);
    EXPECT(e == (multi ? ncclSuccess : ncclInvalidUsage));
    MUST(ncclCommAbort(comm));
}

static void a_failing_send(void)
{
    begin();
    ncclComm_t comm = meet();
    MUST(ncclGroupStart());
    const ncclResult_t one = ncclSend(device, 1, ncclUint8, 1 - rank, comm, stream);
    MUST(ncclRecv(device + 1, 1, ncclUint8, 1 - rank, comm, stream));
    EXPECT(one == (rank == 1 ? ncclInternalError : ncclSuccess));
    EXPECT(ncclGroupEnd() == one);
    MUST(ncclCommAbort(comm));
    end();
}

static void a_failing_copy(void)
{
    begin();
    MUST(cuMemcpyHtoDAsync(on_device(device), host, N, stream));
    MUST(cuMemcpyHtoDAsync(on_device(device), host, N, stream));
    EXPECT(cuStreamSynchronize(stream) == CUDA_ERROR_ILLEGAL_ADDRESS);
    EXPECT(cuMemFree(on_device(device)) == CUDA_ERROR_ILLEGAL_ADDRESS);
}

/* ---- running them ---- */

static const struct {
    const char *name;
    void (*fn)(void);
} roles[] = {
#define ROLE(fn)                                                                                   \
    {                                                                                              \
#fn, fn                                                                                    \
    }
    ROLE(copies_there_and_back),
    ROLE(a_context_too_many),
    ROLE(an_event_orders_streams),
    ROLE(events_tell_the_time),
    ROLE(memory_ends),
    ROLE(a_touch),
    ROLE(a_copy_of_pageable_memory),
    ROLE(a_copy_that_is_not_there_yet),
    ROLE(a_copy_too_long),
    ROLE(a_free_in_use),
    ROLE(a_leak),
    ROLE(registered_memory),
    ROLE(a_kernel_copies),
    ROLE(a_kernel_not_loaded),
    ROLE(kernels_that_are_too_new),
    ROLE(contexts_are_pushed_and_popped),
    ROLE(a_call_without_a_context),
    ROLE(a_call_before_the_first),
    ROLE(a_kernel_off_its_alignment),
    ROLE(a_kernel_out_of_bounds),
    ROLE(many_roots),
    ROLE(all_gather_and_long_transfers),
    ROLE(calls_that_do_not_block),
    ROLE(work_before_a_launch_is_over),
    ROLE(a_rank_that_never_comes),
    ROLE(a_rank_that_dies),
    ROLE(groups_that_are_split),
    ROLE(a_call_after_the_abort_of_a_relative),
    ROLE(an_abort_of_the_parent_first),
    ROLE(an_abort_beside_the_parent),
    ROLE(another_order),
    ROLE(other_sizes),
    ROLE(other_roots),
    ROLE(overlapping_receives),
    ROLE(two_ranks_on_one_device),
    ROLE(a_failing_send),
    ROLE(a_failing_copy),
};

static void (*part)(void);

static void *play_one(void *number)
{
    rank = (int)(intptr_t)number;
    part();
    return NULL;
}

/* As one rank, or, if that is -1, as all ranks in threads. */
static int play(char **arg)
{
    const int own = atoi(arg[1]);
    pthread_t thread[MOST_RANKS];

    size = atoi(arg[2]);
    (void)snprintf(id.internal, sizeof id.internal, "%s", arg[3]);
    (void)alarm(LONG_S);
    for (size_t i = 0; i < sizeof roles / sizeof *roles; i++)
        if (strcmp(roles[i].name, arg[0]) == 0)
            part = roles[i].fn;
    if (!part)
        return 2;
    if (own >= 0)
        (void)play_one((void *)(intptr_t)own);
    for (int r = 0; own < 0 && r < size; r++)
        EXPECT(pthread_create(&thread[r], NULL, play_one, (void *)(intptr_t)r) == 0);
    for (int r = 0; own < 0 && r < size; r++)
        (void)pthread_join(thread[r], NULL);
    return 0;
}

static char said[SAID]; /* by all ranks, on stderr */

static pid_t start(const char *role, int r, int n, const char *set, int out)
{
    char number[2][16], name[64];
    const pid_t pid = fork();

    if (pid)
        return pid;
    (void)dup2(out, 2);
    if (set)
        (void)putenv(strdup(set));
    (void)snprintf(number[0], sizeof number[0], "%d", r);
    (void)snprintf(number[1], sizeof number[1], "%d", n);
    (void)snprintf(name, sizeof name, "test%d", (int)getppid());
    (void)setenv("CKPTFS_GPU_RANK", number[0], 1);
    (void)execl("/proc/self/exe", "test_double", "--role", role, number[0], number[1], name, NULL);
    _exit(4);
}

/* How many ranks failed. After the first that did so by itself the others are ended. */
static int failures(const char *role, int n, const char *set)
{
    const bool threads = set && strcmp(set, THREADS) == 0;
    const int processes = threads ? 1 : n;
    pid_t pid[MOST_RANKS];
    int pipes[2], failed = 0, status;
    size_t len = 0;

    assert_int_equal(pipe(pipes), 0);
    for (int r = 0; r < processes; r++)
        pid[r] = start(role, threads ? -1 : r, n, set, pipes[1]);
    (void)close(pipes[1]);
    for (int r = 0; r < processes; r++) {
        const pid_t gone = waitpid(-1, &status, 0);
        if (status != 0 && failed++ == 0)
            for (int k = 0; k < processes; k++)
                if (pid[k] != gone)
                    (void)kill(pid[k], SIGKILL);
    }
    for (ssize_t got; (got = read(pipes[0], said + len, SAID - 1 - len)) > 0;)
        len += (size_t)got;
    said[len] = '\0';
    (void)close(pipes[0]);
    return failed;
}

static void works(const char *role, int n, const char *set)
{
    if (failures(role, n, set))
        fail_msg("%s, %d ranks: %s", role, n, said);
}

static void dies(const char *role, int n, const char *set, const char *needle)
{
    if (!failures(role, n, set) || !strstr(said, needle))
        fail_msg("%s: expected '%s', heard '%s'", role, needle, said);
}

TEST(cuda, copies_streams_and_events_do_what_they_say)
{
    UNUSED_STATE;
    works("copies_there_and_back", 1, NULL);
    works("an_event_orders_streams", 2, NULL);
    works("events_tell_the_time", 1, NULL);
    works("memory_ends", 1, "CKPTFS_GPU_MEMORY=1000000");
    works("registered_memory", 1, NULL);
#ifndef __SANITIZE_THREAD__ /* it is a race */
    works("a_copy_that_is_not_there_yet", 1, "CKPTFS_GPU_JITTER_US=2000");
#endif
}

TEST(cuda, misuse_ends_the_program)
{
    UNUSED_STATE;
    dies("a_touch", 1, NULL, "");
    dies("a_copy_of_pageable_memory", 1, NULL, "is not pinned");
    dies("a_copy_too_long", 1, NULL, "leave the 100000 bytes");
    dies("a_free_in_use", 2, NULL, "queued work uses the memory");
    dies("a_leak", 1, NULL, "3 leaks");
    dies("a_call_without_a_context", 1, NULL, "no context is current");
    dies("a_call_before_the_first", 1, NULL, "before cuInit");
}

TEST(cuda, the_kernel_runs_over_its_grid)
{
    UNUSED_STATE;
    works("a_kernel_copies", 1, NULL);
    works("kernels_that_are_too_new", 1, NULL);
    works("contexts_are_pushed_and_popped", 1, "CKPTFS_GPU_CONTEXTS=2");
    works("a_context_too_many", 1, "CKPTFS_GPU_CONTEXTS=2");
    dies("a_context_too_many", 1, "CKPTFS_GPU_CONTEXTS=1", "contexts on 2 devices");
    dies("a_kernel_not_loaded", 1, NULL, "a kernel that is not loaded");
    dies("a_kernel_off_its_alignment", 1, NULL, "not aligned");
    dies("a_kernel_out_of_bounds", 1, NULL, "leave the 100000 bytes");
}

TEST(nccl, groups_with_many_roots_and_sizes)
{
    UNUSED_STATE;
    for (int n = 1; n <= MOST_RANKS; n += n < 3 ? 1 : 5)
        works("many_roots", n, "CKPTFS_GPU_JITTER_US=500");
    for (int i = 0; i < 2; i++)
        works("all_gather_and_long_transfers", 3, i ? THREADS : NULL);
    works("many_roots", MOST_RANKS, THREADS);
}

TEST(nccl, communicators_need_not_block)
{
    UNUSED_STATE;
    works("calls_that_do_not_block", 3, NULL);
    dies("work_before_a_launch_is_over", 1, NULL, "still in progress");
    works("two_ranks_on_one_device", 2, NULL);
    works("two_ranks_on_one_device", 2, "NCCL_MULTI_RANK_GPU_ENABLE=1");
}

TEST(nccl, who_waits_for_nobody_is_stuck_until_the_abort)
{
    UNUSED_STATE;
    works("a_rank_that_never_comes", 1, NULL);
    works("a_rank_that_dies", 2, NULL);
    works("a_rank_that_dies", 2, "CKPTFS_GPU_REMOTE=1");
}

TEST(nccl, what_does_not_match_ends_the_program)
{
    UNUSED_STATE;
    for (int i = 0; i < 2; i++) {
        const char *set = i ? THREADS : NULL;
        dies("other_sizes", 2, set, "of 101 bytes");
        dies("other_roots", 2, set, "does something else there");
        dies("another_order", 2, set, "another order of communicators");
        works("groups_that_are_split", 5, set);
        works("an_abort_of_the_parent_first", 2, set);
        works("an_abort_beside_the_parent", 2, set);
        dies("a_call_after_the_abort_of_a_relative", 1, NULL, "shares with one that was aborted");
        dies("overlapping_receives", 2, set, "also uses otherwise");
    }
}

TEST(faults, happen_as_ordered)
{
    UNUSED_STATE;
    works("a_failing_send", 2, "CKPTFS_GPU_FAULT=ncclSend:rank=1:error");
    works("a_failing_copy", 1, "CKPTFS_GPU_FAULT=cuMemcpyHtoDAsync:after=1:async");
    dies("a_failing_copy", 1, "CKPTFS_GPU_FAULT=cuMemcpyHtoDAsync:after=1:error", ": 999");
    dies("copies_there_and_back", 1, "CKPTFS_GPU_FAULT=cuMemAlloc:error", ": 2");
    dies("copies_there_and_back", 1, "CKPTFS_GPU_FAULT=cuMemAlloc:kill", "");
}

static int tests(int argc, char **argv);
#define main tests
static TESTS(T(cuda, copies_streams_and_events_do_what_they_say), T(cuda, misuse_ends_the_program),
             T(cuda, the_kernel_runs_over_its_grid), T(nccl, groups_with_many_roots_and_sizes),
             T(nccl, communicators_need_not_block),
             T(nccl, who_waits_for_nobody_is_stuck_until_the_abort),
             T(nccl, what_does_not_match_ends_the_program), T(faults, happen_as_ordered))
#undef main

    int main(int argc, char **argv)
{
    if (argc == 6 && strcmp(argv[1], "--role") == 0)
        return play(argv + 2);
    return tests(argc, argv);
}
