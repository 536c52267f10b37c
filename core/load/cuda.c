/* SPDX-License-Identifier: Apache-2.0 */
/* Memory, streams and the copy kernel of a CUDA device. The caller's current device is left as it
 * was found. */
#include "load/cuda.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/err.h"
#include "load/copy_kernel.h"

enum { DRAIN_MS = 10000, LOOK_US = 100, MOST_WASTE = 1 << 20 };

/* The kernel for all architectures; the build makes it of copy_kernel.cu. */
extern const unsigned char ckpt_copy_fatbin[];

static struct ckpt_cuda *self(struct ckpt_device *d) { return (struct ckpt_cuda *)d; }

int ckpt_cuda_failed(const struct ckpt_cuda *c, cudaError_t rc, const char *what,
                     struct ckpt_err *err)
{
    if (rc == cudaSuccess)
        return 0;
    (void)cudaGetLastError();
    return ckpt_fail(err, rc == cudaErrorMemoryAllocation ? CKPT_NOMEM : CKPT_IO,
                     "CUDA device %d: %s: %s (%s)", c->number, what, cudaGetErrorString(rc),
                     cudaGetErrorName(rc));
}

/* ---- the thread's device ---- */

enum { DRIVER_VERSION = 12000 };

static int find_call(const struct ckpt_cuda *c, const char *name, void *ret, struct ckpt_err *err)
{
    enum cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    void *fn = NULL;
    const cudaError_t rc =
        cudaGetDriverEntryPointByVersion(name, &fn, DRIVER_VERSION, cudaEnableDefault, &found);

    if (rc == cudaSuccess && (!fn || found != cudaDriverEntryPointSuccess))
        return ckpt_fail(err, CKPT_UNSUPPORTED, "CUDA's driver is too old: it has no %s", name);
    memcpy(ret, &fn, sizeof fn);
    return ckpt_cuda_failed(c, rc, name, err);
}

int ckpt_cuda_attach(struct ckpt_cuda *c, struct ckpt_err *err)
{
    CUdevice device = 0;

    if (find_call(c, "cuDeviceGet", &c->call.device, err) < 0 ||
        find_call(c, "cuDevicePrimaryCtxRetain", &c->call.retain, err) < 0 ||
        find_call(c, "cuCtxPushCurrent", &c->call.push, err) < 0 ||
        find_call(c, "cuCtxPopCurrent", &c->call.pop, err) < 0)
        return -1;
    const CUresult rc = c->call.device(&device, c->number);
    if (rc != CUDA_SUCCESS || c->call.retain(&c->context, device) != CUDA_SUCCESS)
        return ckpt_fail(err, CKPT_IO, "CUDA device %d: its context can't be made", c->number);
    return 0;
}

int ckpt_cuda_enter(const struct ckpt_cuda *c, struct ckpt_cuda_scope *scope, struct ckpt_err *err)
{
    int now = -1;
    cudaError_t rc = cudaGetDevice(&now);

    *scope = (struct ckpt_cuda_scope){.mode = cudaStreamCaptureModeRelaxed};
    if (ckpt_cuda_failed(c, rc, "choosing it", err) < 0)
        return -1;
    if (now != c->number && c->call.push(c->context) != CUDA_SUCCESS)
        return ckpt_fail(err, CKPT_IO, "CUDA device %d can't be chosen", c->number);
    scope->pushed = now != c->number;
    (void)cudaThreadExchangeStreamCaptureMode(&scope->mode);
    return 0;
}

void ckpt_cuda_leave(const struct ckpt_cuda *c, const struct ckpt_cuda_scope *scope)
{
    enum cudaStreamCaptureMode mode = scope->mode;
    CUcontext ignored;

    (void)cudaThreadExchangeStreamCaptureMode(&mode);
    if (scope->pushed)
        (void)c->call.pop(&ignored);
}

void ckpt_cuda_adopt(struct ckpt_device *d)
{
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;

    (void)cudaSetDevice(self(d)->number); /* if it fails, so will the first call */
    (void)cudaThreadExchangeStreamCaptureMode(&mode);
}

/* The last step of a call: leave, and say what failed in it. */
static int leave(const struct ckpt_cuda *c, const struct ckpt_cuda_scope *scope, cudaError_t rc,
                 const char *what, struct ckpt_err *err)
{
    ckpt_cuda_leave(c, scope);
    return ckpt_cuda_failed(c, rc, what, err);
}

/* ---- life ---- */

static int make_streams(struct ckpt_cuda *c, struct ckpt_err *err)
{
    cudaStream_t *const stream[] = {&c->up, &c->work, &c->place};
    cudaEvent_t *const event[] = {&c->begun, &c->fenced, &c->exchanged};
    cudaError_t rc = cudaSuccess;

    for (int i = 0; i < 3 && rc == cudaSuccess; i++)
        rc = cudaStreamCreateWithFlags(stream[i], cudaStreamNonBlocking);
    for (int i = 0; i < 3 && rc == cudaSuccess; i++)
        rc = cudaEventCreateWithFlags(event[i], cudaEventDisableTiming);
    return ckpt_cuda_failed(c, rc, "streams and events", err);
}

/* Streams belong to a device; the default ones to whatever device is current. */
static int check_stream(const struct ckpt_cuda *c, struct ckpt_err *err)
{
    int device = c->number;

    if (c->caller == NULL || c->caller == cudaStreamLegacy || c->caller == cudaStreamPerThread)
        return 0;
    if (ckpt_cuda_failed(c, cudaStreamGetDevice(c->caller, &device), "the stream given", err) < 0)
        return -1;
    return device == c->number
               ? 0
               : ckpt_fail(err, CKPT_USAGE,
                           "the stream given is of CUDA device %d, this rank's is %d", device,
                           c->number);
}

/* Asking for its attributes brings the kernel to the device. Left to its first launch, that would
 * wait for all work of the device, an exchange with a rank that never comes included. */
static int load_kernel(struct ckpt_cuda *c, struct ckpt_err *err)
{
    struct cudaFuncAttributes there;
    cudaError_t rc =
        cudaLibraryLoadData(&c->library, ckpt_copy_fatbin, NULL, NULL, 0, NULL, NULL, 0);

    if (rc == cudaSuccess)
        rc = cudaLibraryGetKernel(&c->kernel, c->library, CKPT_COPY_KERNEL);
    if (rc == cudaSuccess)
        rc = cudaFuncGetAttributes(&there, (const void *)c->kernel);
    return ckpt_cuda_failed(c, rc, "loading the copy kernel", err);
}

int ckpt_cuda_init(struct ckpt_cuda *c, int number, cudaStream_t caller, struct ckpt_err *err)
{
    struct ckpt_cuda_scope scope;
    int count = 0;
    cudaError_t rc = cudaGetDeviceCount(&count);

    c->number = number;
    c->caller = caller;
    atomic_init(&c->refs, 1);
    (void)pthread_mutex_init(&c->lock, NULL);
    if (rc == cudaSuccess && number < 0)
        rc = cudaGetDevice(&c->number);
    if (rc != cudaSuccess || count == 0) {
        (void)cudaGetLastError();
        return ckpt_fail(err, CKPT_UNSUPPORTED, "there is no CUDA device: %s",
                         rc == cudaSuccess ? "none was found" : cudaGetErrorString(rc));
    }
    if (c->number >= count)
        return ckpt_fail(err, CKPT_USAGE, "CUDA device %d: there are %d", c->number, count);
    if (ckpt_cuda_attach(c, err) < 0 || ckpt_cuda_enter(c, &scope, err) < 0)
        return -1;
    int made = check_stream(c, err);
    if (made == 0)
        made = make_streams(c, err);
    if (made == 0)
        made = load_kernel(c, err);
    ckpt_cuda_leave(c, &scope);
    return made;
}

void ckpt_cuda_release(struct ckpt_cuda *c)
{
    struct ckpt_cuda_scope scope;

    if (c->context && ckpt_cuda_enter(c, &scope, NULL) == 0) {
        for (struct ckpt_pinned *p; (p = c->pinned);) {
            c->pinned = p->next;
            (void)cudaFreeHost(p->ptr);
            free(p);
        }
        for (size_t i = 0; i < CKPT_DEVICE_MARKS; i++)
            if (c->mark[i])
                (void)cudaEventDestroy(c->mark[i]);
        const cudaEvent_t event[] = {c->begun, c->fenced, c->exchanged};
        const cudaStream_t stream[] = {c->up, c->work, c->place};
        for (int i = 0; i < 3; i++) {
            if (event[i])
                (void)cudaEventDestroy(event[i]);
            if (stream[i])
                (void)cudaStreamDestroy(stream[i]);
        }
        if (c->library)
            (void)cudaLibraryUnload(c->library);
        ckpt_cuda_leave(c, &scope);
    }
    (void)pthread_mutex_destroy(&c->lock);
}

/* ---- memory ---- */

int ckpt_cuda_alloc(struct ckpt_device *d, size_t len, void **ret, struct ckpt_err *err)
{
    struct ckpt_cuda *c = self(d);
    struct ckpt_cuda_scope scope;

    if (ckpt_cuda_enter(c, &scope, err) < 0)
        return -1;
    cudaError_t rc = cudaSuccess;
    if (!c->user_alloc)
        rc = cudaMalloc(ret, len);
    else if (!(*ret = c->user_alloc(c->user, len)))
        rc = cudaErrorMemoryAllocation;
    ckpt_cuda_leave(c, &scope);
    if (rc == cudaErrorMemoryAllocation) {
        (void)cudaGetLastError();
        return ckpt_fail(err, CKPT_NOMEM, "CUDA device %d has no %zu bytes left", c->number, len);
    }
    return ckpt_cuda_failed(c, rc, "allocating memory", err);
}

void ckpt_cuda_dealloc(struct ckpt_device *d, void *ptr)
{
    struct ckpt_cuda_scope scope;

    if (ckpt_cuda_enter(self(d), &scope, NULL) < 0)
        return;
    if (self(d)->user_alloc)
        self(d)->user_dealloc(self(d)->user, ptr);
    else
        (void)cudaFree(ptr);
    ckpt_cuda_leave(self(d), &scope);
}

/* Pinning costs about half a second a gigabyte: what one load has, the next may take. */
int ckpt_cuda_pin(struct ckpt_device *d, size_t len, void **ret, struct ckpt_err *err)
{
    struct ckpt_cuda *c = self(d);
    struct ckpt_pinned *p;
    struct ckpt_cuda_scope scope;

    (void)pthread_mutex_lock(&c->lock);
    for (p = c->pinned; p; p = p->next)
        if (!p->taken && p->len >= len && p->len - len <= len + MOST_WASTE)
            break;
    if (p)
        p->taken = true;
    (void)pthread_mutex_unlock(&c->lock);
    if (p) {
        *ret = p->ptr;
        return 0;
    }
    if (!(p = calloc(1, sizeof *p)))
        return ckpt_nomem(err);
    if (ckpt_cuda_enter(c, &scope, err) < 0) {
        free(p);
        return -1;
    }
    cudaError_t rc = cudaHostAlloc(&p->ptr, len, cudaHostAllocPortable);
    ckpt_cuda_leave(c, &scope);
    if (rc != cudaSuccess) {
        free(p);
        return ckpt_cuda_failed(c, rc, "pinning host memory", err);
    }
    p->len = len;
    p->taken = true;
    (void)pthread_mutex_lock(&c->lock);
    p->next = c->pinned;
    c->pinned = p;
    (void)pthread_mutex_unlock(&c->lock);
    *ret = p->ptr;
    return 0;
}

void ckpt_cuda_unpin(struct ckpt_device *d, void *ptr)
{
    struct ckpt_cuda *c = self(d);

    (void)pthread_mutex_lock(&c->lock);
    for (struct ckpt_pinned *p = c->pinned; p; p = p->next)
        if (p->ptr == ptr)
            p->taken = false;
    (void)pthread_mutex_unlock(&c->lock);
}

bool ckpt_cuda_reaches(struct ckpt_device *d, const void *ptr)
{
    struct cudaPointerAttributes a;
    struct ckpt_cuda_scope scope;

    if (ckpt_cuda_enter(self(d), &scope, NULL) < 0)
        return false;
    cudaError_t rc = cudaPointerGetAttributes(&a, ptr);
    if (leave(self(d), &scope, rc, "asking for an address", NULL) < 0 || a.devicePointer != ptr)
        return false; /* nobody's; or known to the device by another address */
    return a.type != cudaMemoryTypeDevice || a.device == self(d)->number;
}

int ckpt_cuda_fetch(struct ckpt_device *d, void *dst, const void *src, size_t len,
                    struct ckpt_err *err)
{
    struct ckpt_cuda_scope scope;

    if (ckpt_cuda_enter(self(d), &scope, err) < 0)
        return -1;
    cudaError_t rc = cudaMemcpy(dst, src, len, cudaMemcpyDefault);
    return leave(self(d), &scope, rc, "copying to the host", err);
}

/* ---- work ---- */

int ckpt_cuda_begin(struct ckpt_device *d, struct ckpt_err *err)
{
    struct ckpt_cuda *c = self(d);
    enum cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    struct ckpt_cuda_scope scope;

    if (ckpt_cuda_enter(c, &scope, err) < 0)
        return -1;
    cudaError_t rc = cudaStreamIsCapturing(c->caller, &capture);
    if (rc == cudaSuccess && capture != cudaStreamCaptureStatusNone) {
        ckpt_cuda_leave(c, &scope);
        return ckpt_fail(err, CKPT_USAGE, "the caller's stream is being captured in a graph");
    }
    if (rc == cudaSuccess)
        rc = cudaEventRecord(c->begun, c->caller);
    if (rc == cudaSuccess)
        rc = cudaStreamWaitEvent(c->work, c->begun, 0);
    if (rc == cudaSuccess)
        rc = cudaStreamWaitEvent(c->place, c->begun, 0);
    return leave(c, &scope, rc, "waiting for the caller's stream", err);
}

int ckpt_cuda_upload(struct ckpt_device *d, void *dst, const void *src, size_t len,
                     struct ckpt_err *err)
{
    struct ckpt_cuda *c = self(d);
    struct ckpt_cuda_scope scope;

    if (ckpt_cuda_enter(c, &scope, err) < 0)
        return -1;
    cudaError_t rc = cudaMemcpyAsync(dst, src, len, cudaMemcpyHostToDevice, c->up);
    return leave(c, &scope, rc, "uploading", err);
}

int ckpt_cuda_fence(struct ckpt_device *d, struct ckpt_err *err)
{
    struct ckpt_cuda *c = self(d);
    struct ckpt_cuda_scope scope;

    if (ckpt_cuda_enter(c, &scope, err) < 0)
        return -1;
    cudaError_t rc = cudaEventRecord(c->fenced, c->up);
    if (rc == cudaSuccess)
        rc = cudaStreamWaitEvent(c->work, c->fenced, 0);
    if (rc == cudaSuccess)
        rc = cudaStreamWaitEvent(c->place, c->fenced, 0);
    return leave(c, &scope, rc, "waiting for uploads", err);
}

int ckpt_cuda_follow(struct ckpt_device *d, struct ckpt_err *err)
{
    struct ckpt_cuda *c = self(d);
    struct ckpt_cuda_scope scope;

    if (ckpt_cuda_enter(c, &scope, err) < 0)
        return -1;
    cudaError_t rc = cudaEventRecord(c->exchanged, c->work);
    if (rc == cudaSuccess)
        rc = cudaStreamWaitEvent(c->place, c->exchanged, 0);
    return leave(c, &scope, rc, "waiting for an exchange", err);
}

int ckpt_cuda_copy(struct ckpt_device *d, const struct ckpt_device_copy *list, uint32_t n,
                   uint32_t nblock, struct ckpt_err *err)
{
    struct ckpt_cuda *c = self(d);
    void *args[] = {&list, &n};
    const dim3 grid = {nblock, 1, 1}, block = {CKPT_COPY_THREADS, 1, 1};
    struct ckpt_cuda_scope scope;

    if (ckpt_cuda_enter(c, &scope, err) < 0)
        return -1;
    cudaError_t rc = cudaLaunchKernel((const void *)c->kernel, grid, block, args, 0, c->place);
    return leave(c, &scope, rc, "copying", err);
}

int ckpt_cuda_download(struct ckpt_device *d, void *dst, const void *src, size_t len,
                       struct ckpt_err *err)
{
    struct ckpt_cuda *c = self(d);
    struct ckpt_cuda_scope scope;

    if (ckpt_cuda_enter(c, &scope, err) < 0)
        return -1;
    cudaError_t rc = cudaMemcpyAsync(dst, src, len, cudaMemcpyDeviceToHost, c->place);
    return leave(c, &scope, rc, "downloading", err);
}

int ckpt_cuda_mark(struct ckpt_device *d, uint32_t i, struct ckpt_err *err)
{
    struct ckpt_cuda *c = self(d);
    cudaError_t rc = cudaSuccess;
    struct ckpt_cuda_scope scope;

    if (i >= CKPT_DEVICE_MARKS)
        return ckpt_fail(err, CKPT_LIMIT, "more than %d marks", CKPT_DEVICE_MARKS);
    if (ckpt_cuda_enter(c, &scope, err) < 0)
        return -1;
    if (!c->mark[i])
        rc = cudaEventCreateWithFlags(&c->mark[i], cudaEventDisableTiming);
    if (rc == cudaSuccess)
        rc = cudaEventRecord(c->mark[i], c->place);
    return leave(c, &scope, rc, "setting a mark", err);
}

int ckpt_cuda_reached(struct ckpt_device *d, uint32_t i, struct ckpt_err *err)
{
    struct ckpt_cuda *c = self(d);
    struct ckpt_cuda_scope scope;

    if (ckpt_cuda_enter(c, &scope, err) < 0)
        return -1;
    cudaError_t rc = cudaEventQuery(c->mark[i]);
    if (rc == cudaErrorNotReady)
        (void)cudaGetLastError();
    ckpt_cuda_leave(c, &scope);
    return rc == cudaErrorNotReady ? 1 : ckpt_cuda_failed(c, rc, "the work of a window", err);
}

bool ckpt_cuda_drain(struct ckpt_cuda *c)
{
    const struct timespec look = {0, LOOK_US * 1000};
    const cudaStream_t stream[] = {c->up, c->work, c->place};

    for (int i = 0; i < DRAIN_MS * 1000 / LOOK_US; i++) {
        int busy = 0;
        for (int k = 0; k < 3; k++)
            busy += cudaStreamQuery(stream[k]) == cudaErrorNotReady;
        (void)cudaGetLastError();
        if (!busy)
            return true;
        (void)nanosleep(&look, NULL);
    }
    return false;
}
