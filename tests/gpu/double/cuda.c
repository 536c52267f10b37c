/* SPDX-License-Identifier: Apache-2.0 */
/* The calls of the CUDA runtime. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "double.h"

#include <cuda.h>

#include "kernels.h"
#include "memory.h"
#include "stream.h"

enum { LIBRARY = 0x11b, KERNEL = 0x4e12, GONE = 0xdead, MOST_THREADS = 1024 };
enum { FATBIN_MAGIC = 0xBA55ED50u };

static _Thread_local cudaError_t last_error;
static atomic_size_t libraries;
static atomic_ullong contexts; /* a bit for each device where this process has one */

/* ---- what every call begins and ends with ---- */

static cudaError_t say(cudaError_t e)
{
    if (e != cudaSuccess && e != cudaErrorNotReady)
        last_error = e;
    return e;
}

static cudaError_t enter_faulty(const char *call, enum gpu_fault *ret_fault)
{
    if (gpu_lost())
        return say(gpu_lost());
    *ret_fault = gpu_fault(call);
    if (*ret_fault != GPU_ERROR)
        return cudaSuccess;
    return say(strstr(call, "lloc") ? cudaErrorMemoryAllocation : cudaErrorUnknown);
}

/* Calls make a context on the thread's device if there is none; each takes hundreds of MB there. */
static void need_context(int device) { (void)atomic_fetch_or(&contexts, 1ull << device); }

/* For calls that put no work on a stream. */
static cudaError_t enter_without(const char *call)
{
    enum gpu_fault fault;
    const cudaError_t e = enter_faulty(call, &fault);

    if (e != cudaSuccess || fault == GPU_WELL)
        return e;
    while (fault == GPU_HANG)
        (void)pause();
    gpu_lose(cudaErrorIllegalAddress);
    return say(gpu_lost());
}

static cudaError_t enter(const char *call)
{
    need_context(gpu_device);
    return enter_without(call);
}

/* For those that do: 1 if the fault took the work's place. */
static int enter_stream(const char *call, cudaStream_t stream, cudaError_t *ret)
{
    enum gpu_fault fault;

    need_context(gpu_device);

    *ret = enter_faulty(call, &fault);
    if (*ret != cudaSuccess)
        return 1;
    if (fault == GPU_HANG)
        gpu_stream_push_hang(stream, call);
    else if (fault == GPU_ASYNC)
        gpu_stream_push_loss(stream, call);
    return fault != GPU_WELL;
}

/* 1: there are more contexts than the environment allows. */
static size_t excess_contexts(void)
{
    const int n = __builtin_popcountll(atomic_load(&contexts));

    if ((uint64_t)n <= gpu_number("CKPTFS_GPU_CONTEXTS", GPU_MOST_DEVICES))
        return 0;
    (void)fprintf(stderr, "gpu double: leak: contexts on %d devices\n", n);
    return 1;
}

static void at_exit(int status, void *ctx)
{
    (void)ctx;
    if (!gpu_leaks_matter())
        return;
    gpu_report_leaks(status, excess_contexts());
    gpu_report_leaks(status, gpu_memory_leaks() + gpu_stream_leaks() + atomic_load(&libraries));
}

static __attribute__((constructor)) void begin(void) { (void)on_exit(at_exit, NULL); }

static void check_capture(const char *call);

/* ---- devices ---- */

static int device_count(void)
{
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    int n = (int)gpu_number("CKPTFS_GPU_COUNT", 8);

    if (visible) {
        n = *visible != '\0';
        for (; *visible; visible++)
            n += *visible == ',';
    }
    return n < GPU_MOST_DEVICES ? n : GPU_MOST_DEVICES;
}

int gpu_device_identity(int device)
{
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");

    for (; visible && device > 0 && (visible = strchr(visible, ',')); device--)
        visible++;
    return visible ? atoi(visible) : device;
}

cudaError_t cudaGetDeviceCount(int *count)
{
    const cudaError_t e = enter_without(__func__);

    *count = e == cudaSuccess ? device_count() : 0;
    return e == cudaSuccess && !*count ? say(cudaErrorNoDevice) : e;
}

cudaError_t cudaSetDevice(int device)
{
    const cudaError_t e = enter_without(__func__);

    if (e == cudaSuccess && (device < 0 || device >= device_count()))
        return say(device_count() ? cudaErrorInvalidDevice : cudaErrorNoDevice);
    if (e == cudaSuccess) {
        gpu_device = device;
        need_context(device);
    }
    return e;
}

cudaError_t cudaGetDevice(int *device)
{
    const cudaError_t e = enter_without(__func__);

    *device = gpu_device;
    return e;
}

/* ---- the driver's calls: a thread's contexts ---- */

enum { MOST_CONTEXTS = 8 };

static _Thread_local int pushed[MOST_CONTEXTS];
static _Thread_local int npushed;

/* Contexts are told apart by their devices: the address of a letter. */
static char context[GPU_MOST_DEVICES];

static CUresult driver_device(CUdevice *device, int ordinal)
{
    *device = ordinal;
    return ordinal >= 0 && ordinal < device_count() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

static CUresult driver_retain(CUcontext *ret, CUdevice device)
{
    need_context(device);
    *ret = (CUcontext)(void *)&context[device];
    return CUDA_SUCCESS;
}

static CUresult driver_push(CUcontext c)
{
    const ptrdiff_t device = (char *)(void *)c - context;

    if (device < 0 || device >= GPU_MOST_DEVICES)
        gpu_die("cuCtxPushCurrent: %p is no context", (void *)c);
    if (npushed == MOST_CONTEXTS)
        gpu_die("cuCtxPushCurrent: more than %d contexts", MOST_CONTEXTS);
    pushed[npushed++] = gpu_device;
    gpu_device = (int)device;
    return CUDA_SUCCESS;
}

static CUresult driver_pop(CUcontext *ret)
{
    if (!npushed)
        gpu_die("cuCtxPopCurrent: nothing was pushed");
    *ret = (CUcontext)(void *)&context[gpu_device];
    gpu_device = pushed[--npushed];
    return CUDA_SUCCESS;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **fn, unsigned version,
                                             unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *found)
{
    static const struct {
        const char *name;
        void (*fn)(void);
    } known[] = {{"cuDeviceGet", (void (*)(void))driver_device},
                 {"cuDevicePrimaryCtxRetain", (void (*)(void))driver_retain},
                 {"cuCtxPushCurrent", (void (*)(void))driver_push},
                 {"cuCtxPopCurrent", (void (*)(void))driver_pop}};
    const cudaError_t e = enter_without(__func__);

    *fn = NULL;
    *found = cudaDriverEntryPointSymbolNotFound;
    if (version < 12000 || flags != cudaEnableDefault)
        gpu_die("%s: version %u, flags %llu are not in the double", __func__, version, flags);
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (strcmp(known[i].name, symbol) == 0) {
            memcpy(fn, &known[i].fn, sizeof *fn);
            *found = cudaDriverEntryPointSuccess;
        }
    return e;
}

/* ---- captures ---- */

static atomic_int captures; /* streams that are being captured, in the mode that concerns all */
static _Thread_local enum cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;

/* A call that could disturb a capture, by a thread that did not say that it does not. */
static void check_capture(const char *call)
{
    if (atomic_load(&captures) && capture_mode != cudaStreamCaptureModeRelaxed)
        gpu_die("%s: while a stream is captured, by a thread whose capture mode is not relaxed",
                call);
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode)
{
    const enum cudaStreamCaptureMode before = capture_mode;

    capture_mode = *mode;
    *mode = before;
    return enter_without(__func__);
}

/* Nothing may be put on the stream in between: what a graph would do is not in the double. */
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode)
{
    const cudaError_t e = enter(__func__);

    if (mode != cudaStreamCaptureModeGlobal)
        gpu_die("%s: mode %d is not in the double", __func__, (int)mode);
    if (e == cudaSuccess) {
        gpu_stream_close(stream, __func__);
        (void)atomic_fetch_add(&captures, 1);
    }
    return e;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph)
{
    const cudaError_t e = enter(__func__);

    *graph = NULL;
    if (e == cudaSuccess) {
        gpu_stream_open(stream);
        (void)atomic_fetch_sub(&captures, 1);
    }
    return e;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    (void)graph;
    return enter_without(__func__);
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attr, int device)
{
    const cudaError_t e = enter_without(__func__);

    if (e == cudaSuccess && (device < 0 || device >= device_count()))
        return say(cudaErrorInvalidDevice);
    switch ((int)attr) {
    case cudaDevAttrComputeCapabilityMajor:
        *value = 9;
        break;
    case cudaDevAttrComputeCapabilityMinor:
        *value = 0;
        break;
    case cudaDevAttrMultiProcessorCount:
        *value = 132;
        break;
    case cudaDevAttrMaxThreadsPerBlock:
        *value = MOST_THREADS;
        break;
    case cudaDevAttrAsyncEngineCount:
        *value = 3;
        break;
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrCanMapHostMemory:
    case cudaDevAttrHostRegisterSupported:
        *value = 1;
        break;
    default:
        gpu_die("%s: attribute %d is not in the double", __func__, (int)attr);
    }
    return e;
}

cudaError_t cudaDriverGetVersion(int *version)
{
    *version = CUDART_VERSION;
    return enter_without(__func__);
}

cudaError_t cudaRuntimeGetVersion(int *version)
{
    *version = CUDART_VERSION;
    return enter_without(__func__);
}

/* ---- memory ---- */

cudaError_t cudaMalloc(void **ptr, size_t len)
{
    const cudaError_t e = enter(__func__);

    check_capture(__func__);
    *ptr = NULL;
    return e != cudaSuccess || !len ? e : say(gpu_memory_device(ptr, len, gpu_device));
}

cudaError_t cudaFree(void *ptr)
{
    const cudaError_t e = enter(__func__);

    check_capture(__func__);
    if (e != cudaSuccess || !ptr)
        return e;
    const cudaError_t freed = gpu_memory_free(ptr, GPU_DEVICE, false, __func__);
    gpu_device_wait(gpu_device);
    return say(freed);
}

cudaError_t cudaHostAlloc(void **ptr, size_t len, unsigned flags)
{
    const cudaError_t e = enter(__func__);

    check_capture(__func__);
    *ptr = NULL;
    return e != cudaSuccess || !len
               ? e
               : say(gpu_memory_pinned(ptr, len, gpu_device, flags & cudaHostAllocWriteCombined));
}

cudaError_t cudaFreeHost(void *ptr)
{
    const cudaError_t e = enter(__func__);

    check_capture(__func__);
    if (e != cudaSuccess || !ptr)
        return e;
    const cudaError_t freed = gpu_memory_free(ptr, GPU_PINNED, false, __func__);
    gpu_device_wait(gpu_device);
    return say(freed);
}

cudaError_t cudaHostRegister(void *ptr, size_t len, unsigned flags)
{
    const cudaError_t e = enter(__func__);

    check_capture(__func__);
    (void)flags;
    if (e == cudaSuccess && (!ptr || !len))
        return say(cudaErrorInvalidValue);
    return e != cudaSuccess ? e : say(gpu_memory_register(ptr, len, gpu_device));
}

cudaError_t cudaHostUnregister(void *ptr)
{
    const cudaError_t e = enter(__func__);

    check_capture(__func__);
    return e != cudaSuccess ? e : say(gpu_memory_free(ptr, GPU_PINNED, true, __func__));
}

cudaError_t cudaMemGetInfo(size_t *ret_free, size_t *ret_total)
{
    const cudaError_t e = enter(__func__);

    gpu_memory_info(gpu_device, ret_free, ret_total);
    return e;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *ptr)
{
    const cudaError_t e = enter(__func__);
    const struct gpu_memory *m = gpu_memory_find(ptr, 0, false, __func__);

    *a = (struct cudaPointerAttributes){.type = cudaMemoryTypeUnregistered, .device = -2};
    if (!m)
        return e;
    a->device = m->device;
    a->type = m->where == GPU_DEVICE ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
    a->devicePointer = m->apart ? NULL : (void *)(uintptr_t)ptr;
    a->hostPointer = m->where == GPU_DEVICE ? NULL : (void *)(uintptr_t)ptr;
    return e;
}

/* ---- copies ---- */

struct copy_work {
    struct gpu_work work;
    unsigned char *dst;
    const unsigned char *src; /* NULL: set to value */
    int value;
    size_t len;
    struct gpu_memory *use[2];
    unsigned char *staged; /* what was pageable */
};

static void run_copy(struct gpu_work *work)
{
    struct copy_work *w = (struct copy_work *)work;

    if (gpu_lost())
        ;
    else if (w->src)
        memcpy(w->dst, w->src, w->len);
    else
        memset(w->dst, w->value, w->len);
    gpu_memory_leave(w->use[0]);
    gpu_memory_leave(w->use[1]);
    free(w->staged);
    free(w);
}

/* One side of a copy. Memory that nobody pinned will do only if the caller waits. */
static void *side(const void *p, size_t len, bool on_device, bool may_be_pageable,
                  struct gpu_memory **ret, const char *call)
{
    struct gpu_memory *m = *ret = gpu_memory_find(p, len, true, call);

    if (m && (m->where == GPU_DEVICE) != on_device)
        gpu_die("%s: %p is %s memory", call, p, on_device ? "not device" : "device");
    if (!m && on_device)
        gpu_die("%s: %p is not device memory", call, p);
    if (!m && !may_be_pageable)
        gpu_die("%s: the host memory at %p is not pinned", call, p);
    return m ? gpu_memory_real(m, p) : (void *)(uintptr_t)p;
}

static bool is_device(const void *p)
{
    const struct gpu_memory *m = gpu_memory_find(p, 0, false, "cudaMemcpyDefault");

    return m && m->where == GPU_DEVICE;
}

static void stage(struct copy_work *w)
{
    if (!(w->staged = malloc(w->len)))
        gpu_die("the host has no memory");
    memcpy(w->staged, w->src, w->len);
    w->src = w->staged;
}

/* False: the bytes are taken, and no more need be waited for. */
static bool push_copy(void *dst, const void *src, size_t len, enum cudaMemcpyKind kind, bool waits,
                      cudaStream_t stream, const char *call)
{
    struct copy_work *w = calloc(1, sizeof *w);
    bool from = kind == cudaMemcpyDeviceToHost, to = kind == cudaMemcpyHostToDevice;

    if (!w)
        gpu_die("the host has no memory");
    if (kind == cudaMemcpyDeviceToDevice)
        from = to = true;
    if (kind == cudaMemcpyDefault) {
        from = is_device(src);
        to = is_device(dst);
    }
    w->work.run = run_copy;
    w->dst = side(dst, len, to, waits, &w->use[0], call);
    w->src = side(src, len, from, waits, &w->use[1], call);
    w->len = len;
    if (w->dst < w->src + len && w->src < w->dst + len)
        gpu_die("%s: source and destination overlap", call);
    const bool staged = to && !w->use[1];
    if (staged)
        stage(w);
    gpu_stream_push(stream, &w->work, false, call);
    return !staged;
}

cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t len, enum cudaMemcpyKind kind,
                            cudaStream_t stream)
{
    cudaError_t e;

    if (!enter_stream(__func__, stream, &e) && len)
        (void)push_copy(dst, src, len, kind, false, stream, __func__);
    return e;
}

/* On the default stream, which waits for no other: the strictest reading. What comes from pageable
 * memory may be under way when this returns. */
cudaError_t cudaMemcpy(void *dst, const void *src, size_t len, enum cudaMemcpyKind kind)
{
    bool wait = true;
    cudaError_t e;

    check_capture(__func__);
    if (!enter_stream(__func__, NULL, &e) && len)
        wait = push_copy(dst, src, len, kind, true, NULL, __func__);
    return e != cudaSuccess || !wait ? e : say(gpu_stream_wait(NULL));
}

cudaError_t cudaMemsetAsync(void *dst, int value, size_t len, cudaStream_t stream)
{
    cudaError_t e;

    if (enter_stream(__func__, stream, &e) || !len)
        return e;
    struct copy_work *w = calloc(1, sizeof *w);
    if (!w)
        gpu_die("the host has no memory");
    w->work.run = run_copy;
    w->value = value;
    w->len = len;
    w->dst = side(dst, len, true, false, &w->use[0], __func__);
    gpu_stream_push(stream, &w->work, false, __func__);
    return e;
}

/* ---- streams and events ---- */

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags)
{
    const cudaError_t e = enter(__func__);

    if (e == cudaSuccess && flags != cudaStreamNonBlocking)
        gpu_die("%s: the default stream's order with others is not in the double", __func__);
    return e != cudaSuccess ? e : say(gpu_stream_new(stream, gpu_device));
}

cudaError_t cudaStreamGetDevice(cudaStream_t stream, int *device)
{
    const cudaError_t e = enter(__func__);

    *device = gpu_stream_device(stream, __func__);
    return e;
}

/* That it "fails" says that the stream is being captured. */
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status)
{
    const cudaError_t e = enter(__func__);

    (void)gpu_stream_device(stream, __func__);
    *status = e == cudaErrorUnknown ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return e == cudaErrorUnknown ? cudaSuccess : e;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    const cudaError_t e = enter(__func__);

    return e != cudaSuccess ? e : say(gpu_stream_free(stream));
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    const cudaError_t e = enter(__func__);

    check_capture(__func__);
    return e != cudaSuccess ? e : say(gpu_stream_wait(stream));
}

cudaError_t cudaStreamQuery(cudaStream_t stream)
{
    const cudaError_t e = enter(__func__);

    check_capture(__func__);
    return e != cudaSuccess ? e : gpu_stream_idle(stream) ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags)
{
    cudaError_t e;

    (void)flags;
    if (!enter_stream(__func__, stream, &e))
        gpu_stream_await(stream, event);
    return e;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags)
{
    const cudaError_t e = enter(__func__);

    if (e == cudaSuccess && (flags & ~(unsigned)cudaEventDisableTiming))
        gpu_die("%s: flags %#x are not in the double", __func__, flags);
    return e != cudaSuccess ? e : say(gpu_event_new(event, gpu_device, !flags));
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to)
{
    const cudaError_t e = enter(__func__);

    return e != cudaSuccess ? e : say(gpu_event_between(from, to, ms));
}

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    const cudaError_t e = enter(__func__);

    return e != cudaSuccess ? e : say(gpu_event_free(event));
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    cudaError_t e;

    (void)enter_stream(__func__, stream, &e); /* after a loss, or never, if so ordered */
    if (e == cudaSuccess)
        gpu_event_record(event, stream);
    return e;
}

cudaError_t cudaEventQuery(cudaEvent_t event)
{
    const cudaError_t e = enter(__func__);

    check_capture(__func__);
    return e != cudaSuccess ? e : gpu_event_done(event) ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    const cudaError_t e = enter(__func__);

    check_capture(__func__);
    return e != cudaSuccess ? e : say(gpu_event_wait(event));
}

/* ---- kernels ---- */

struct CUlib_st {
    unsigned magic;
    const unsigned char *code;
    size_t len;
    struct CUkern_st *kernels;
};

struct CUkern_st {
    unsigned magic;
    const struct gpu_kernel *kernel;
    struct CUkern_st *next;
    atomic_bool loaded; /* on the device */
};

/* The beginning of a fat binary, as nvcc's fatbinary writes it. */
struct fatbin_head {
    uint32_t magic;
    uint16_t version, head_len;
    uint64_t len;
};

cudaError_t cudaLibraryLoadData(cudaLibrary_t *library, const void *code,
                                enum cudaJitOption *jit_options, void **jit_values, unsigned njit,
                                enum cudaLibraryOption *options, void **values, unsigned n)
{
    const cudaError_t e = enter(__func__);
    struct fatbin_head head;

    (void)jit_options, (void)jit_values, (void)options, (void)values;
    if (e != cudaSuccess)
        return e;
    memcpy(&head, code, sizeof head);
    if (head.magic != FATBIN_MAGIC || head.version != 1 || head.head_len != sizeof head || njit ||
        n)
        return say(cudaErrorInvalidKernelImage);
    struct CUlib_st *l = calloc(1, sizeof *l);
    if (!l)
        gpu_die("the host has no memory");
    *l = (struct CUlib_st){LIBRARY, code, sizeof head + head.len, NULL};
    (void)atomic_fetch_add(&libraries, 1);
    *library = l;
    return e;
}

cudaError_t cudaLibraryGetKernel(cudaKernel_t *kernel, cudaLibrary_t library, const char *name)
{
    const cudaError_t e = enter(__func__);

    if (e != cudaSuccess)
        return e;
    if (library->magic != LIBRARY)
        gpu_die("%s: %p is no library", __func__, (void *)library);
    const struct gpu_kernel *known = gpu_kernel_find(name);
    if (!known || !memmem(library->code, library->len, name, strlen(name) + 1))
        return say(cudaErrorSymbolNotFound);
    struct CUkern_st *k = calloc(1, sizeof *k);
    if (!k)
        gpu_die("the host has no memory");
    *k = (struct CUkern_st){.magic = KERNEL, .kernel = known, .next = library->kernels};
    *kernel = library->kernels = k;
    return e;
}

cudaError_t cudaLibraryUnload(cudaLibrary_t library)
{
    const cudaError_t e = enter(__func__);

    if (e != cudaSuccess)
        return e;
    if (library->magic != LIBRARY)
        gpu_die("%s: %p is no library", __func__, (void *)library);
    while (library->kernels) {
        struct CUkern_st *k = library->kernels;
        library->kernels = k->next;
        k->magic = GONE;
        free(k);
    }
    library->magic = GONE;
    free(library);
    (void)atomic_fetch_sub(&libraries, 1);
    return e;
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *func)
{
    const cudaError_t e = enter(__func__);
    struct CUkern_st *k = (struct CUkern_st *)(uintptr_t)func;

    if (e != cudaSuccess)
        return e;
    if (!k || k->magic != KERNEL)
        gpu_die("%s: %p is no kernel", __func__, func);
    *a = (struct cudaFuncAttributes){.maxThreadsPerBlock = MOST_THREADS};
    atomic_store(&k->loaded, true);
    return e;
}

struct launch_work {
    struct gpu_work work;
    const struct gpu_kernel *kernel;
    dim3 grid, block;
    int device;
    unsigned char arg[GPU_MOST_ARGS][16];
};

static void run_launch(struct gpu_work *work)
{
    struct launch_work *w = (struct launch_work *)work;

    if (!gpu_lost())
        w->kernel->run((const unsigned char(*)[16])w->arg, w->grid, w->block, w->device);
    free(w);
}

cudaError_t cudaLaunchKernel(const void *func, dim3 grid, dim3 block, void **args, size_t shared,
                             cudaStream_t stream)
{
    const struct CUkern_st *k = func;
    cudaError_t e;

    if (enter_stream(__func__, stream, &e))
        return e;
    if (!k || k->magic != KERNEL)
        gpu_die("%s: %p is no kernel", __func__, func);
    if (!atomic_load(&k->loaded))
        gpu_die("%s: a kernel that is not loaded: loading it may wait for all that the device does",
                __func__);
    if (gpu_stream_device(stream, __func__) != gpu_device)
        gpu_die("%s: the stream is of device %d, the thread's is %d", __func__,
                gpu_stream_device(stream, __func__), gpu_device);
    if (!grid.x || !block.x || block.x * block.y * block.z > MOST_THREADS || shared)
        return say(cudaErrorInvalidConfiguration);
    struct launch_work *w = calloc(1, sizeof *w);
    if (!w)
        gpu_die("the host has no memory");
    *w = (struct launch_work){{run_launch}, k->kernel, grid, block, gpu_device, {{0}}};
    for (int i = 0; i < GPU_MOST_ARGS && k->kernel->arg[i]; i++)
        memcpy(w->arg[i], args[i], k->kernel->arg[i]);
    gpu_stream_push(stream, &w->work, false, __func__);
    return e;
}

struct host_work {
    struct gpu_work work;
    cudaHostFn_t fn;
    void *arg;
};

static void run_host(struct gpu_work *work)
{
    struct host_work *w = (struct host_work *)work;

    if (!gpu_lost())
        w->fn(w->arg);
    free(w);
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t fn, void *arg)
{
    cudaError_t e;

    if (enter_stream(__func__, stream, &e))
        return e;
    struct host_work *w = calloc(1, sizeof *w);
    if (!w)
        gpu_die("the host has no memory");
    *w = (struct host_work){{run_host}, fn, arg};
    gpu_stream_push(stream, &w->work, false, __func__);
    return e;
}

/* ---- errors ---- */

static const struct {
    cudaError_t error;
    const char *name, *text;
} errors[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration",
     "invalid configuration argument"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorInvalidKernelImage, "cudaErrorInvalidKernelImage", "device kernel image is invalid"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorSymbolNotFound, "cudaErrorSymbolNotFound", "named symbol not found"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress",
     "an illegal memory access was encountered"},
    {cudaErrorHostMemoryAlreadyRegistered, "cudaErrorHostMemoryAlreadyRegistered",
     "part or all of the requested memory range is already mapped"},
};

static size_t error_row(cudaError_t e)
{
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].error == e)
            return i;
    return SIZE_MAX;
}

const char *cudaGetErrorName(cudaError_t e)
{
    const size_t i = error_row(e);

    return i == SIZE_MAX ? "cudaErrorUnknown" : errors[i].name;
}

const char *cudaGetErrorString(cudaError_t e)
{
    const size_t i = error_row(e);

    return i == SIZE_MAX ? "unknown error" : errors[i].text;
}

cudaError_t cudaGetLastError(void)
{
    const cudaError_t e = gpu_lost() ? gpu_lost() : last_error;

    last_error = cudaSuccess;
    return e;
}
