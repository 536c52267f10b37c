/* SPDX-License-Identifier: Apache-2.0 */
/* The driver's calls about devices, contexts, captures, memory and errors. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "enter.h"
#include "memory.h"
#include "stream.h"

static atomic_bool initialised;
static atomic_bool contexts[GPU_MOST_DEVICES]; /* this process has one there */

/* ---- what every call begins with ---- */

static CUresult enter_faulty(const char *call, enum gpu_fault *ret_fault)
{
    if (!atomic_load(&initialised))
        gpu_die("%s: before cuInit", call);
    if (gpu_lost())
        return gpu_lost();
    *ret_fault = gpu_fault(call);
    if (*ret_fault != GPU_ERROR)
        return CUDA_SUCCESS;
    return strstr(call, "lloc") || strstr(call, "Register") ? CUDA_ERROR_OUT_OF_MEMORY
                                                            : CUDA_ERROR_UNKNOWN;
}

CUresult gpu_enter_without(const char *call)
{
    enum gpu_fault fault;
    const CUresult e = enter_faulty(call, &fault);

    if (e != CUDA_SUCCESS || fault == GPU_WELL)
        return e;
    while (fault == GPU_HANG)
        (void)pause();
    gpu_lose(CUDA_ERROR_ILLEGAL_ADDRESS);
    return gpu_lost();
}

static void need_current(const char *call)
{
    if (gpu_device < 0)
        gpu_die("%s: no context is current", call);
}

CUresult gpu_enter(const char *call)
{
    need_current(call);
    return gpu_enter_without(call);
}

int gpu_enter_stream(const char *call, CUstream stream, CUresult *ret)
{
    enum gpu_fault fault;

    need_current(call);
    *ret = enter_faulty(call, &fault);
    if (*ret != CUDA_SUCCESS)
        return 1;
    if (fault == GPU_HANG)
        gpu_stream_push_hang(stream, call);
    else if (fault == GPU_ASYNC)
        gpu_stream_push_loss(stream, call);
    return fault != GPU_WELL;
}

/* 1: there are more contexts than the environment allows; each takes hundreds of MB of a device. */
static size_t excess_contexts(void)
{
    int n = 0;

    for (int i = 0; i < GPU_MOST_DEVICES; i++)
        n += atomic_load(&contexts[i]);
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
    gpu_report_leaks(status, gpu_memory_leaks() + gpu_stream_leaks() + gpu_module_leaks());
}

static __attribute__((constructor)) void begin(void) { (void)on_exit(at_exit, NULL); }

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

CUresult cuInit(unsigned flags)
{
    atomic_store(&initialised, flags == 0);
    const CUresult e = gpu_enter_without(__func__);
    return e == CUDA_SUCCESS && !device_count() ? CUDA_ERROR_NO_DEVICE : e;
}

CUresult cuDriverGetVersion(int *version)
{
    *version = (int)gpu_number("CKPTFS_GPU_DRIVER", 12000);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *count)
{
    *count = device_count();
    return gpu_enter_without(__func__);
}

CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
    const CUresult e = gpu_enter_without(__func__);

    *device = ordinal;
    return e == CUDA_SUCCESS && (ordinal < 0 || ordinal >= device_count())
               ? CUDA_ERROR_INVALID_DEVICE
               : e;
}

CUresult cuDeviceGetPCIBusId(char *ret, int len, CUdevice device)
{
    const int id = gpu_device_identity(device);

    (void)snprintf(ret, (size_t)len, "%04X:%02X:00.0", id / 64, 0xa0 + id % 64);
    return gpu_enter_without(__func__);
}

/* ---- contexts ---- */

enum { MOST_CONTEXTS = 8 };

static _Thread_local int pushed[MOST_CONTEXTS]; /* devices, the current one last */
static _Thread_local int npushed;

/* Contexts are told apart by their devices: the address of a letter. */
static char context[GPU_MOST_DEVICES];

static CUcontext context_of(int device)
{
    return device < 0 ? NULL : (CUcontext)(void *)&context[device];
}

static int device_of(CUcontext c, const char *call)
{
    const ptrdiff_t device = (char *)(void *)c - context;

    if (device < 0 || device >= GPU_MOST_DEVICES)
        gpu_die("%s: %p is no context", call, (void *)c);
    if (!atomic_load(&contexts[device]))
        gpu_die("%s: the context of device %d was not made", call, (int)device);
    return (int)device;
}

static CUresult make_current(int n)
{
    npushed = n;
    gpu_device = n ? pushed[n - 1] : -1;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *ret, CUdevice device)
{
    const CUresult e = gpu_enter_without(__func__);

    if (e != CUDA_SUCCESS)
        return e;
    if (device < 0 || device >= device_count())
        return CUDA_ERROR_INVALID_DEVICE;
    atomic_store(&contexts[device], true);
    *ret = context_of(device);
    return e;
}

CUresult cuCtxGetCurrent(CUcontext *ret)
{
    *ret = context_of(gpu_device);
    return gpu_enter_without(__func__);
}

CUresult cuCtxGetDevice(CUdevice *device)
{
    const CUresult e = gpu_enter(__func__);

    *device = gpu_device;
    return e;
}

CUresult cuCtxPushCurrent(CUcontext c)
{
    const CUresult e = gpu_enter_without(__func__);

    if (e != CUDA_SUCCESS)
        return e;
    if (npushed == MOST_CONTEXTS)
        gpu_die("%s: more than %d contexts", __func__, MOST_CONTEXTS);
    pushed[npushed] = device_of(c, __func__);
    return make_current(npushed + 1);
}

CUresult cuCtxPopCurrent(CUcontext *ret)
{
    if (!npushed)
        gpu_die("%s: no context is current", __func__);
    *ret = context_of(gpu_device);
    return make_current(npushed - 1);
}

/* In the place of the current one. */
CUresult cuCtxSetCurrent(CUcontext c)
{
    const CUresult e = gpu_enter_without(__func__);

    if (e != CUDA_SUCCESS)
        return e;
    const int below = npushed ? npushed - 1 : 0;
    if (!c)
        return make_current(below);
    pushed[below] = device_of(c, __func__);
    return make_current(below + 1);
}

CUresult cuStreamGetCtx(CUstream stream, CUcontext *ret)
{
    const CUresult e = gpu_enter(__func__);

    *ret = context_of(gpu_stream_device(stream, __func__));
    return e;
}

/* ---- captures ---- */

static atomic_int captures; /* streams that are being captured, in the mode that concerns all */
static _Thread_local CUstreamCaptureMode capture_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

/* A call that could disturb a capture, by a thread that did not say that it does not. */
void gpu_check_capture(const char *call)
{
    if (atomic_load(&captures) && capture_mode != CU_STREAM_CAPTURE_MODE_RELAXED)
        gpu_die("%s: while a stream is captured, by a thread whose capture mode is not relaxed",
                call);
}

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode)
{
    const CUstreamCaptureMode before = capture_mode;

    capture_mode = *mode;
    *mode = before;
    return gpu_enter_without(__func__);
}

/* Nothing may be put on the stream in between: what a graph would do is not in the double. */
CUresult cuStreamBeginCapture(CUstream stream, CUstreamCaptureMode mode)
{
    const CUresult e = gpu_enter(__func__);

    if (mode != CU_STREAM_CAPTURE_MODE_GLOBAL)
        gpu_die("%s: mode %d is not in the double", __func__, (int)mode);
    if (e == CUDA_SUCCESS) {
        gpu_stream_close(stream, __func__);
        (void)atomic_fetch_add(&captures, 1);
    }
    return e;
}

CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph)
{
    const CUresult e = gpu_enter(__func__);

    *graph = NULL;
    if (e == CUDA_SUCCESS) {
        gpu_stream_open(stream);
        (void)atomic_fetch_sub(&captures, 1);
    }
    return e;
}

CUresult cuGraphDestroy(CUgraph graph)
{
    (void)graph;
    return gpu_enter_without(__func__);
}

/* That it "fails" says that the stream is being captured. */
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status)
{
    const CUresult e = gpu_enter(__func__);

    (void)gpu_stream_device(stream, __func__);
    *status =
        e == CUDA_ERROR_UNKNOWN ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
    return e == CUDA_ERROR_UNKNOWN ? CUDA_SUCCESS : e;
}

/* ---- memory ---- */

static void *pointer(CUdeviceptr p) { return (void *)(uintptr_t)p; }

CUresult cuMemAlloc(CUdeviceptr *ret, size_t len)
{
    const CUresult e = gpu_enter(__func__);
    void *p = NULL;

    gpu_check_capture(__func__);
    *ret = 0;
    if (e != CUDA_SUCCESS || !len)
        return e != CUDA_SUCCESS ? e : CUDA_ERROR_INVALID_VALUE;
    const CUresult made = gpu_memory_device(&p, len, gpu_device);
    *ret = (CUdeviceptr)(uintptr_t)p;
    return made;
}

CUresult cuMemFree(CUdeviceptr p)
{
    const CUresult e = gpu_enter(__func__);

    gpu_check_capture(__func__);
    if (e != CUDA_SUCCESS)
        return e;
    const CUresult freed = gpu_memory_free(pointer(p), GPU_DEVICE, false, __func__);
    gpu_device_wait(gpu_device);
    return freed;
}

CUresult cuMemHostAlloc(void **ret, size_t len, unsigned flags)
{
    const CUresult e = gpu_enter(__func__);

    gpu_check_capture(__func__);
    *ret = NULL;
    if (e != CUDA_SUCCESS || !len)
        return e != CUDA_SUCCESS ? e : CUDA_ERROR_INVALID_VALUE;
    return gpu_memory_pinned(ret, len, gpu_device, flags & CU_MEMHOSTALLOC_WRITECOMBINED);
}

CUresult cuMemFreeHost(void *p)
{
    const CUresult e = gpu_enter(__func__);

    gpu_check_capture(__func__);
    if (e != CUDA_SUCCESS)
        return e;
    const CUresult freed = gpu_memory_free(p, GPU_PINNED, false, __func__);
    gpu_device_wait(gpu_device);
    return freed;
}

CUresult cuMemHostRegister(void *p, size_t len, unsigned flags)
{
    const CUresult e = gpu_enter(__func__);

    gpu_check_capture(__func__);
    (void)flags;
    if (e == CUDA_SUCCESS && (!p || !len))
        return CUDA_ERROR_INVALID_VALUE;
    return e != CUDA_SUCCESS ? e : gpu_memory_register(p, len, gpu_device);
}

CUresult cuMemHostUnregister(void *p)
{
    const CUresult e = gpu_enter(__func__);

    gpu_check_capture(__func__);
    if (e != CUDA_SUCCESS)
        return e;
    const CUresult freed = gpu_memory_free(p, GPU_PINNED, true, __func__);
    gpu_device_wait(gpu_device);
    return freed;
}

CUresult cuMemGetInfo(size_t *ret_free, size_t *ret_total)
{
    const CUresult e = gpu_enter(__func__);

    gpu_memory_info(gpu_device, ret_free, ret_total);
    return e;
}

static void answer(CUpointer_attribute ask, void *to, const struct gpu_memory *m, CUdeviceptr p)
{
    const unsigned type = m->where == GPU_DEVICE ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;

    if (ask == CU_POINTER_ATTRIBUTE_DEVICE_POINTER)
        *(CUdeviceptr *)to = m->apart ? 0 : p;
    else if (ask == CU_POINTER_ATTRIBUTE_MEMORY_TYPE)
        *(unsigned *)to = type;
    else if (ask == CU_POINTER_ATTRIBUTE_IS_MANAGED)
        *(unsigned *)to = 0;
    else if (ask == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)
        *(int *)to = m->device;
    else
        gpu_die("cuPointerGetAttributes: attribute %d is not in the double", (int)ask);
}

/* Of memory that CUDA does not know nothing is said, and that is no error. */
CUresult cuPointerGetAttributes(unsigned n, CUpointer_attribute *ask, void **to, CUdeviceptr p)
{
    const CUresult e = gpu_enter(__func__);
    const struct gpu_memory *m = gpu_memory_find(pointer(p), 0, false, __func__);

    for (unsigned i = 0; i < n && m && e == CUDA_SUCCESS; i++)
        answer(ask[i], to[i], m, p);
    return e;
}

/* ---- errors ---- */

static const struct {
    CUresult error;
    const char *name, *text;
} errors[] = {
#define ERROR(error, text)                                                                         \
    {                                                                                              \
        error, #error, text                                                                        \
    }
    ERROR(CUDA_SUCCESS, "no error"),
    ERROR(CUDA_ERROR_INVALID_VALUE, "invalid argument"),
    ERROR(CUDA_ERROR_OUT_OF_MEMORY, "out of memory"),
    ERROR(CUDA_ERROR_NO_DEVICE, "no CUDA-capable device is detected"),
    ERROR(CUDA_ERROR_INVALID_DEVICE, "invalid device ordinal"),
    ERROR(CUDA_ERROR_INVALID_IMAGE, "device kernel image is invalid"),
    ERROR(CUDA_ERROR_UNSUPPORTED_PTX_VERSION,
          "the provided PTX was compiled with an unsupported toolchain."),
    ERROR(CUDA_ERROR_INVALID_HANDLE, "invalid resource handle"),
    ERROR(CUDA_ERROR_NOT_FOUND, "named symbol not found"),
    ERROR(CUDA_ERROR_NOT_READY, "device not ready"),
    ERROR(CUDA_ERROR_ILLEGAL_ADDRESS, "an illegal memory access was encountered"),
    ERROR(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED,
          "part or all of the requested memory range is already mapped"),
    ERROR(CUDA_ERROR_UNKNOWN, "unknown error"),
};

static size_t error_row(CUresult e)
{
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].error == e)
            return i;
    gpu_die("error %d is not in the double", (int)e);
}

CUresult cuGetErrorName(CUresult e, const char **ret)
{
    *ret = errors[error_row(e)].name;
    return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult e, const char **ret)
{
    *ret = errors[error_row(e)].text;
    return CUDA_SUCCESS;
}
