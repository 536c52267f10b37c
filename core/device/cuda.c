/* SPDX-License-Identifier: Apache-2.0 */
/* Memory, streams and the copy kernel of a CUDA device. The caller's current device is left as it
 * was found. */
#include "device/cuda.h"

#include <time.h>

#include "base/err.h"
#include "device/copy_kernel.h"

enum { DRAIN_MS = 10000, LOOK_US = 100 };

/* The kernel as PTX, which the driver compiles for its device; the build makes it of
 * copy_kernel.cu. */
extern const char ckpt_copy_ptx[];

static struct ckpt_cuda *self(struct ckpt_device *d) { return (struct ckpt_cuda *)d; }

int ckpt_cuda_failed(const struct ckpt_cuda *c, CUresult rc, const char *what, struct ckpt_err *err)
{
    const char *text = NULL, *name = NULL;

    if (rc == CUDA_SUCCESS)
        return 0;
    (void)c->call.error_text(rc, &text);
    (void)c->call.error_name(rc, &name);
    return ckpt_fail(err, rc == CUDA_ERROR_OUT_OF_MEMORY ? CKPT_NOMEM : CKPT_IO,
                     "CUDA device %d: %s: %s (%s)", c->number, what, text ? text : "unknown error",
                     name ? name : "no name");
}

/* ---- the thread's device ---- */

/* Devices and their numbers are the same to the driver. */
static int current_device(const struct ckpt_cuda *c, int *ret, struct ckpt_err *err)
{
    CUcontext now = NULL;
    CUresult rc = c->call.ctx_current(&now);

    *ret = 0;
    if (rc == CUDA_SUCCESS && now)
        rc = c->call.ctx_device(ret);
    return ckpt_cuda_failed(c, rc, "the thread's current device", err);
}

int ckpt_cuda_attach(struct ckpt_cuda *c, struct ckpt_err *err)
{
    CUdevice device = 0;
    int count;

    if (ckpt_cuda_driver_open(&c->call, &count, err) < 0 ||
        (c->number < 0 && current_device(c, &c->number, err) < 0))
        return -1;
    if (c->number >= count)
        return ckpt_fail(err, CKPT_USAGE, "CUDA device %d: there are %d", c->number, count);
    CUresult rc = c->call.device_get(&device, c->number);
    if (rc == CUDA_SUCCESS)
        rc = c->call.primary_retain(&c->context, device);
    return ckpt_cuda_failed(c, rc, "making its context", err);
}

int ckpt_cuda_enter(const struct ckpt_cuda *c, struct ckpt_cuda_scope *scope, struct ckpt_err *err)
{
    CUcontext now = NULL;
    CUresult rc = c->call.ctx_current(&now);

    *scope = (struct ckpt_cuda_scope){.mode = CU_STREAM_CAPTURE_MODE_RELAXED};
    if (rc == CUDA_SUCCESS && now != c->context)
        rc = c->call.ctx_push(c->context);
    if (ckpt_cuda_failed(c, rc, "choosing it", err) < 0)
        return -1;
    scope->pushed = now != c->context;
    (void)c->call.capture_mode(&scope->mode);
    return 0;
}

void ckpt_cuda_leave(const struct ckpt_cuda *c, const struct ckpt_cuda_scope *scope)
{
    CUstreamCaptureMode mode = scope->mode;
    CUcontext ignored;

    (void)c->call.capture_mode(&mode);
    if (scope->pushed)
        (void)c->call.ctx_pop(&ignored);
}

void ckpt_cuda_adopt(struct ckpt_device *d)
{
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;

    (void)self(d)->call.ctx_set(self(d)->context); /* if it fails, so will the first call */
    (void)self(d)->call.capture_mode(&mode);
}

/* The last step of a call: leave, and say what failed in it. */
static int leave(const struct ckpt_cuda *c, const struct ckpt_cuda_scope *scope, CUresult rc,
                 const char *what, struct ckpt_err *err)
{
    ckpt_cuda_leave(c, scope);
    return ckpt_cuda_failed(c, rc, what, err);
}

/* ---- life ---- */

static int make_streams(struct ckpt_cuda *c, struct ckpt_err *err)
{
    CUstream *const stream[] = {&c->up, &c->work, &c->place};
    CUevent *const event[] = {&c->begun, &c->fenced, &c->exchanged};
    CUresult rc = CUDA_SUCCESS;

    for (int i = 0; i < 3 && rc == CUDA_SUCCESS; i++)
        rc = c->call.stream_new(stream[i], CU_STREAM_NON_BLOCKING);
    for (int i = 0; i < 3 && rc == CUDA_SUCCESS; i++)
        rc = c->call.event_new(event[i], CU_EVENT_DISABLE_TIMING);
    return ckpt_cuda_failed(c, rc, "streams and events", err);
}

/* The device of a context that may be another's. */
static CUresult device_of(const struct ckpt_cuda *c, CUcontext context, int *ret)
{
    CUcontext ignored;
    CUresult rc = c->call.ctx_push(context);

    if (rc != CUDA_SUCCESS)
        return rc;
    rc = c->call.ctx_device(ret);
    (void)c->call.ctx_pop(&ignored);
    return rc;
}

/* Streams belong to a context; the default ones to whatever is current. */
static int check_stream(const struct ckpt_cuda *c, CUstream caller, struct ckpt_err *err)
{
    CUcontext context = NULL;
    int device = c->number;

    if (caller == NULL || caller == CU_STREAM_LEGACY || caller == CU_STREAM_PER_THREAD)
        return 0;
    CUresult rc = c->call.stream_ctx(caller, &context);
    if (rc == CUDA_SUCCESS && context == c->context)
        return 0;
    if (rc == CUDA_SUCCESS)
        rc = device_of(c, context, &device);
    if (ckpt_cuda_failed(c, rc, "the stream given", err) < 0)
        return -1;
    return device == c->number
               ? ckpt_fail(err, CKPT_USAGE,
                           "the stream given is not of the primary context of CUDA device %d",
                           device)
               : ckpt_fail(err, CKPT_USAGE,
                           "the stream given is of CUDA device %d, this rank's is %d", device,
                           c->number);
}

/* Asking for an attribute brings the kernel to the device. Left to its first launch, that would
 * wait for all work of the device, an exchange with a rank that never comes included. */
static int load_kernel(struct ckpt_cuda *c, struct ckpt_err *err)
{
    int ignored;
    CUresult rc = c->call.module_load(&c->module, ckpt_copy_ptx);

    if (rc == CUDA_SUCCESS)
        rc = c->call.module_function(&c->kernel, c->module, CKPT_COPY_KERNEL);
    if (rc == CUDA_SUCCESS)
        rc = c->call.function_attribute(&ignored, CU_FUNC_ATTRIBUTE_NUM_REGS, c->kernel);
    return ckpt_cuda_failed(c, rc, "loading the copy kernel", err);
}

int ckpt_cuda_choose_stream(struct ckpt_cuda *c, CUstream caller, struct ckpt_err *err)
{
    struct ckpt_cuda_scope scope;

    if (ckpt_cuda_enter(c, &scope, err) < 0)
        return -1;
    int good = check_stream(c, caller, err);
    ckpt_cuda_leave(c, &scope);
    if (good == 0)
        c->caller = caller;
    return good;
}

int ckpt_cuda_init(struct ckpt_cuda *c, int number, CUstream caller, struct ckpt_err *err)
{
    struct ckpt_cuda_scope scope;

    c->number = number;
    atomic_init(&c->refs, 1);
    (void)pthread_mutex_init(&c->lock, NULL);
    if (ckpt_cuda_attach(c, err) < 0 || ckpt_cuda_choose_stream(c, caller, err) < 0 ||
        ckpt_cuda_enter(c, &scope, err) < 0)
        return -1;
    int made = make_streams(c, err);
    if (made == 0)
        made = load_kernel(c, err);
    ckpt_cuda_leave(c, &scope);
    return made;
}

void ckpt_cuda_release(struct ckpt_cuda *c)
{
    struct ckpt_cuda_scope scope;

    if (c->context && ckpt_cuda_enter(c, &scope, NULL) == 0) {
        ckpt_cuda_unpin_all(c);
        for (size_t i = 0; i < CKPT_DEVICE_MARKS; i++)
            if (c->mark[i])
                (void)c->call.event_free(c->mark[i]);
        const CUevent event[] = {c->begun, c->fenced, c->exchanged};
        const CUstream stream[] = {c->up, c->work, c->place};
        for (int i = 0; i < 3; i++) {
            if (event[i])
                (void)c->call.event_free(event[i]);
            if (stream[i])
                (void)c->call.stream_free(stream[i]);
        }
        if (c->module)
            (void)c->call.module_free(c->module);
        ckpt_cuda_leave(c, &scope);
    }
    (void)pthread_mutex_destroy(&c->lock);
}

/* ---- memory ---- */

static int cuda_alloc(struct ckpt_device *d, size_t len, void **ret, struct ckpt_err *err)
{
    struct ckpt_cuda *c = self(d);
    struct ckpt_cuda_scope scope;

    if (ckpt_cuda_enter(c, &scope, err) < 0)
        return -1;
    CUresult rc = CUDA_SUCCESS;
    if (c->user_alloc)
        *ret = c->user_alloc(c->user, len, c->caller);
    else
        rc = c->call.mem_alloc((CUdeviceptr *)(void *)ret, len);
    ckpt_cuda_leave(c, &scope);
    if (c->user_alloc && !*ret)
        return ckpt_fail(err, CKPT_NOMEM,
                         "CUDA device %d: the caller's allocator (struct ckpt_nccl.alloc) gave no "
                         "%zu bytes",
                         c->number, len);
    if (rc == CUDA_ERROR_OUT_OF_MEMORY)
        return ckpt_fail(err, CKPT_NOMEM, "CUDA device %d has no %zu bytes left", c->number, len);
    return ckpt_cuda_failed(c, rc, "allocating memory", err);
}

static void cuda_dealloc(struct ckpt_device *d, void *ptr)
{
    struct ckpt_cuda_scope scope;

    if (ckpt_cuda_enter(self(d), &scope, NULL) < 0)
        return;
    if (self(d)->user_alloc)
        self(d)->user_dealloc(self(d)->user, ptr);
    else
        (void)self(d)->call.mem_free((CUdeviceptr)(uintptr_t)ptr);
    ckpt_cuda_leave(self(d), &scope);
}

static bool cuda_reaches(struct ckpt_device *d, const void *ptr)
{
    CUpointer_attribute ask[] = {CU_POINTER_ATTRIBUTE_DEVICE_POINTER,
                                 CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_IS_MANAGED,
                                 CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL};
    CUdeviceptr at = 0;
    unsigned type = 0, managed = 0;
    int device = -1;
    void *answer[] = {&at, &type, &managed, &device};
    struct ckpt_cuda_scope scope;

    if (ckpt_cuda_enter(self(d), &scope, NULL) < 0)
        return false;
    CUresult rc = self(d)->call.pointer_attributes(4, ask, answer, (CUdeviceptr)(uintptr_t)ptr);
    if (leave(self(d), &scope, rc, "asking for an address", NULL) < 0 ||
        at != (CUdeviceptr)(uintptr_t)ptr)
        return false; /* nobody's; or known to the device by another address */
    return managed || type != CU_MEMORYTYPE_DEVICE || device == self(d)->number;
}

static int cuda_fetch(struct ckpt_device *d, void *dst, const void *src, size_t len,
                      struct ckpt_err *err)
{
    struct ckpt_cuda_scope scope;

    if (ckpt_cuda_enter(self(d), &scope, err) < 0)
        return -1;
    CUresult rc = self(d)->call.copy((CUdeviceptr)(uintptr_t)dst, (CUdeviceptr)(uintptr_t)src, len);
    return leave(self(d), &scope, rc, "copying to the host", err);
}

/* ---- work ---- */

static int cuda_begin(struct ckpt_device *d, struct ckpt_err *err)
{
    struct ckpt_cuda *c = self(d);
    CUstreamCaptureStatus capture = CU_STREAM_CAPTURE_STATUS_NONE;
    struct ckpt_cuda_scope scope;

    if (ckpt_cuda_enter(c, &scope, err) < 0)
        return -1;
    CUresult rc = c->call.stream_capturing(c->caller, &capture);
    if (rc == CUDA_SUCCESS && capture != CU_STREAM_CAPTURE_STATUS_NONE) {
        ckpt_cuda_leave(c, &scope);
        return ckpt_fail(err, CKPT_USAGE, "the caller's stream is being captured in a graph");
    }
    if (rc == CUDA_SUCCESS)
        rc = c->call.event_record(c->begun, c->caller);
    if (rc == CUDA_SUCCESS)
        rc = c->call.stream_wait(c->work, c->begun, 0);
    if (rc == CUDA_SUCCESS)
        rc = c->call.stream_wait(c->place, c->begun, 0);
    if (rc == CUDA_SUCCESS && c->user_alloc) /* memory that the stream may still use */
        rc = c->call.stream_wait(c->up, c->begun, 0);
    return leave(c, &scope, rc, "waiting for the caller's stream", err);
}

static int cuda_upload(struct ckpt_device *d, void *dst, const void *src, size_t len,
                       struct ckpt_err *err)
{
    struct ckpt_cuda *c = self(d);
    struct ckpt_cuda_scope scope;

    if (ckpt_cuda_enter(c, &scope, err) < 0)
        return -1;
    CUresult rc = c->call.upload((CUdeviceptr)(uintptr_t)dst, src, len, c->up);
    return leave(c, &scope, rc, "uploading", err);
}

static int cuda_fence(struct ckpt_device *d, struct ckpt_err *err)
{
    struct ckpt_cuda *c = self(d);
    struct ckpt_cuda_scope scope;

    if (ckpt_cuda_enter(c, &scope, err) < 0)
        return -1;
    CUresult rc = c->call.event_record(c->fenced, c->up);
    if (rc == CUDA_SUCCESS)
        rc = c->call.stream_wait(c->work, c->fenced, 0);
    if (rc == CUDA_SUCCESS)
        rc = c->call.stream_wait(c->place, c->fenced, 0);
    return leave(c, &scope, rc, "waiting for uploads", err);
}

static int cuda_follow(struct ckpt_device *d, struct ckpt_err *err)
{
    struct ckpt_cuda *c = self(d);
    struct ckpt_cuda_scope scope;

    if (ckpt_cuda_enter(c, &scope, err) < 0)
        return -1;
    CUresult rc = c->call.event_record(c->exchanged, c->work);
    if (rc == CUDA_SUCCESS)
        rc = c->call.stream_wait(c->place, c->exchanged, 0);
    return leave(c, &scope, rc, "waiting for an exchange", err);
}

static int cuda_copy(struct ckpt_device *d, const struct ckpt_device_copy *list, uint32_t n,
                     uint32_t nblock, struct ckpt_err *err)
{
    struct ckpt_cuda *c = self(d);
    void *args[] = {&list, &n};
    struct ckpt_cuda_scope scope;

    if (ckpt_cuda_enter(c, &scope, err) < 0)
        return -1;
    CUresult rc =
        c->call.launch(c->kernel, nblock, 1, 1, CKPT_COPY_THREADS, 1, 1, 0, c->place, args, NULL);
    return leave(c, &scope, rc, "copying", err);
}

static int cuda_download(struct ckpt_device *d, void *dst, const void *src, size_t len,
                         struct ckpt_err *err)
{
    struct ckpt_cuda *c = self(d);
    struct ckpt_cuda_scope scope;

    if (ckpt_cuda_enter(c, &scope, err) < 0)
        return -1;
    CUresult rc = c->call.download(dst, (CUdeviceptr)(uintptr_t)src, len, c->place);
    return leave(c, &scope, rc, "downloading", err);
}

static int cuda_mark(struct ckpt_device *d, uint32_t i, struct ckpt_err *err)
{
    struct ckpt_cuda *c = self(d);
    CUresult rc = CUDA_SUCCESS;
    struct ckpt_cuda_scope scope;

    if (i >= CKPT_DEVICE_MARKS)
        return ckpt_fail(err, CKPT_LIMIT, "more than %d marks", CKPT_DEVICE_MARKS);
    if (ckpt_cuda_enter(c, &scope, err) < 0)
        return -1;
    if (!c->mark[i])
        rc = c->call.event_new(&c->mark[i], CU_EVENT_DISABLE_TIMING);
    if (rc == CUDA_SUCCESS)
        rc = c->call.event_record(c->mark[i], c->place);
    return leave(c, &scope, rc, "setting a mark", err);
}

int ckpt_cuda_reached(struct ckpt_device *d, uint32_t i, struct ckpt_err *err)
{
    struct ckpt_cuda *c = self(d);
    struct ckpt_cuda_scope scope;

    if (ckpt_cuda_enter(c, &scope, err) < 0)
        return -1;
    CUresult rc = c->call.event_query(c->mark[i]);
    ckpt_cuda_leave(c, &scope);
    return rc == CUDA_ERROR_NOT_READY ? 1 : ckpt_cuda_failed(c, rc, "the work of a window", err);
}

bool ckpt_cuda_drain(struct ckpt_cuda *c)
{
    const struct timespec look = {0, LOOK_US * 1000};
    const CUstream stream[] = {c->up, c->work, c->place};

    for (int i = 0; i < DRAIN_MS * 1000 / LOOK_US; i++) {
        int busy = 0;
        for (int k = 0; k < 3; k++)
            busy += c->call.stream_query(stream[k]) == CUDA_ERROR_NOT_READY;
        if (!busy)
            return true;
        (void)nanosleep(&look, NULL);
    }
    return false;
}

const struct ckpt_device_ops ckpt_cuda_ops = {
    .adopt = ckpt_cuda_adopt,
    .alloc = cuda_alloc,
    .dealloc = cuda_dealloc,
    .pin = ckpt_cuda_pin,
    .unpin = ckpt_cuda_unpin,
    .reaches = cuda_reaches,
    .fetch = cuda_fetch,
    .begin = cuda_begin,
    .upload = cuda_upload,
    .fence = cuda_fence,
    .follow = cuda_follow,
    .copy = cuda_copy,
    .download = cuda_download,
    .mark = cuda_mark,
};
