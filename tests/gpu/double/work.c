/* SPDX-License-Identifier: Apache-2.0 */
/* The driver's calls about work: copies, streams, events and kernels. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "enter.h"
#include "kernels.h"
#include "memory.h"
#include "stream.h"

enum { MODULE = 0x11b, FUNCTION = 0x4e12, GONE = 0xdead, MOST_THREADS = 1024 };

/* The newest PTX that the driver of CUDA 12.0 knows, and what the devices of the double are. */
enum { PTX_MAJOR = 8, PTX_MINOR = 0, TARGET = 90 };

static atomic_size_t modules;

size_t gpu_module_leaks(void) { return atomic_load(&modules); }

static void *allocate(size_t len)
{
    void *p = calloc(1, len);

    if (!p)
        gpu_die("the host has no memory");
    return p;
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

    const struct gpu_links *k = gpu_links();
    const double begin = gpu_clock_begin(w->use, 2);

    if (gpu_lost())
        ;
    else if (w->src)
        memcpy(w->dst, w->src, w->len);
    else
        memset(w->dst, w->value, w->len);
    gpu_clock_end(w->use, 2, begin + (k && w->src ? (double)w->len / k->upload_bytes_s : 0),
                  GPU_CLOCK_COPY);
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
    const struct gpu_memory *m = gpu_memory_find(p, 0, false, "cuMemcpy");

    return m && m->where == GPU_DEVICE;
}

static void stage(struct copy_work *w)
{
    w->staged = allocate(w->len);
    memcpy(w->staged, w->src, w->len);
    w->src = w->staged;
}

/* Where the two sides are. */
struct sides {
    bool from, to; /* device memory */
    bool waits;    /* the caller does: pageable memory will do */
};

/* False: the bytes are taken, and no more need be waited for. */
static bool push_copy(void *dst, const void *src, size_t len, struct sides is, CUstream stream,
                      const char *call)
{
    struct copy_work *w = allocate(sizeof *w);

    w->work.run = run_copy;
    w->dst = side(dst, len, is.to, is.waits, &w->use[0], call);
    w->src = side(src, len, is.from, is.waits, &w->use[1], call);
    w->len = len;
    if (w->dst < w->src + len && w->src < w->dst + len)
        gpu_die("%s: source and destination overlap", call);
    const bool staged = is.to && !w->use[1];
    if (staged)
        stage(w);
    gpu_stream_push(stream, &w->work, false, call);
    return !staged;
}

static CUresult copy_later(void *dst, const void *src, size_t len, struct sides is, CUstream stream,
                           const char *call)
{
    CUresult e;

    if (!gpu_enter_stream(call, stream, &e) && len)
        (void)push_copy(dst, src, len, is, stream, call);
    return e;
}

static void *pointer(CUdeviceptr p) { return (void *)(uintptr_t)p; }

CUresult cuMemcpyHtoDAsync(CUdeviceptr dst, const void *src, size_t len, CUstream stream)
{
    return copy_later(pointer(dst), src, len, (struct sides){.to = true}, stream, __func__);
}

CUresult cuMemcpyDtoHAsync(void *dst, CUdeviceptr src, size_t len, CUstream stream)
{
    return copy_later(dst, pointer(src), len, (struct sides){.from = true}, stream, __func__);
}

CUresult cuMemcpyDtoDAsync(CUdeviceptr dst, CUdeviceptr src, size_t len, CUstream stream)
{
    return copy_later(pointer(dst), pointer(src), len, (struct sides){.from = true, .to = true},
                      stream, __func__);
}

/* On the default stream, which waits for no other: the strictest reading. What comes from pageable
 * memory may be under way when this returns. */
CUresult cuMemcpy(CUdeviceptr dst, CUdeviceptr src, size_t len)
{
    const struct sides is = {is_device(pointer(src)), is_device(pointer(dst)), true};
    bool wait = true;
    CUresult e;

    gpu_check_capture(__func__);
    if (!gpu_enter_stream(__func__, NULL, &e) && len)
        wait = push_copy(pointer(dst), pointer(src), len, is, NULL, __func__);
    return e != CUDA_SUCCESS || !wait ? e : gpu_stream_wait(NULL);
}

CUresult cuMemsetD8Async(CUdeviceptr dst, unsigned char value, size_t len, CUstream stream)
{
    CUresult e;

    if (gpu_enter_stream(__func__, stream, &e) || !len)
        return e;
    struct copy_work *w = allocate(sizeof *w);
    w->work.run = run_copy;
    w->value = value;
    w->len = len;
    w->dst = side(pointer(dst), len, true, false, &w->use[0], __func__);
    gpu_stream_push(stream, &w->work, false, __func__);
    return e;
}

/* ---- streams ---- */

CUresult cuStreamCreate(CUstream *stream, unsigned flags)
{
    const CUresult e = gpu_enter(__func__);

    if (e == CUDA_SUCCESS && flags != CU_STREAM_NON_BLOCKING)
        gpu_die("%s: the default stream's order with others is not in the double", __func__);
    return e != CUDA_SUCCESS ? e : gpu_stream_new(stream, gpu_device);
}

CUresult cuStreamDestroy(CUstream stream)
{
    const CUresult e = gpu_enter(__func__);

    return e != CUDA_SUCCESS ? e : gpu_stream_free(stream);
}

CUresult cuStreamSynchronize(CUstream stream)
{
    const CUresult e = gpu_enter(__func__);

    gpu_check_capture(__func__);
    return e != CUDA_SUCCESS ? e : gpu_stream_wait(stream);
}

CUresult cuStreamQuery(CUstream stream)
{
    const CUresult e = gpu_enter(__func__);

    gpu_check_capture(__func__);
    return e != CUDA_SUCCESS ? e : gpu_stream_idle(stream) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags)
{
    CUresult e;

    (void)flags;
    if (!gpu_enter_stream(__func__, stream, &e))
        gpu_stream_await(stream, event);
    return e;
}

/* ---- events ---- */

CUresult cuEventCreate(CUevent *event, unsigned flags)
{
    const CUresult e = gpu_enter(__func__);

    if (e == CUDA_SUCCESS && (flags & ~(unsigned)CU_EVENT_DISABLE_TIMING))
        gpu_die("%s: flags %#x are not in the double", __func__, flags);
    return e != CUDA_SUCCESS ? e : gpu_event_new(event, gpu_device, !flags);
}

CUresult cuEventElapsedTime(float *ms, CUevent from, CUevent to)
{
    const CUresult e = gpu_enter(__func__);

    return e != CUDA_SUCCESS ? e : gpu_event_between(from, to, ms);
}

CUresult cuEventDestroy(CUevent event)
{
    const CUresult e = gpu_enter(__func__);

    return e != CUDA_SUCCESS ? e : gpu_event_free(event);
}

CUresult cuEventRecord(CUevent event, CUstream stream)
{
    CUresult e;

    (void)gpu_enter_stream(__func__, stream, &e); /* after a loss, or never, if so ordered */
    if (e == CUDA_SUCCESS)
        gpu_event_record(event, stream);
    return e;
}

CUresult cuEventQuery(CUevent event)
{
    const CUresult e = gpu_enter(__func__);

    gpu_check_capture(__func__);
    return e != CUDA_SUCCESS ? e : gpu_event_done(event) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult cuEventSynchronize(CUevent event)
{
    const CUresult e = gpu_enter(__func__);

    gpu_check_capture(__func__);
    return e != CUDA_SUCCESS ? e : gpu_event_wait(event);
}

/* ---- kernels ---- */

struct CUmod_st {
    unsigned magic;
    const char *code;
    struct CUfunc_st *functions;
};

struct CUfunc_st {
    unsigned magic;
    const struct gpu_kernel *kernel;
    struct CUfunc_st *next;
    atomic_bool loaded; /* on the device */
};

static struct CUfunc_st *function_of(CUfunction f, const char *call)
{
    if (!f || f->magic != FUNCTION)
        gpu_die("%s: %p is no kernel", call, (void *)f);
    return f;
}

/* PTX alone is in the double, as text with a NUL. */
static CUresult check_ptx(const char *code)
{
    const char *version = strstr(code, "\n.version "), *target = strstr(code, "\n.target sm_");
    unsigned major, minor, sm;

    if (code[0] != '/' || !version || !target ||
        sscanf(version, "\n.version %u.%u", &major, &minor) != 2 ||
        sscanf(target, "\n.target sm_%u", &sm) != 1)
        return CUDA_ERROR_INVALID_IMAGE;
    if (major > PTX_MAJOR || (major == PTX_MAJOR && minor > PTX_MINOR) || sm > TARGET)
        return CUDA_ERROR_UNSUPPORTED_PTX_VERSION;
    return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule *module, const void *code)
{
    CUresult e = gpu_enter(__func__);

    gpu_check_capture(__func__);
    if (e == CUDA_SUCCESS)
        e = check_ptx(code);
    if (e != CUDA_SUCCESS)
        return e;
    struct CUmod_st *m = allocate(sizeof *m);
    *m = (struct CUmod_st){MODULE, code, NULL};
    (void)atomic_fetch_add(&modules, 1);
    *module = m;
    return e;
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name)
{
    const CUresult e = gpu_enter(__func__);
    char entry[128];

    if (e != CUDA_SUCCESS)
        return e;
    if (module->magic != MODULE)
        gpu_die("%s: %p is no module", __func__, (void *)module);
    (void)snprintf(entry, sizeof entry, ".visible .entry %s(", name);
    const struct gpu_kernel *known = gpu_kernel_find(name);
    if (!known || !strstr(module->code, entry))
        return CUDA_ERROR_NOT_FOUND;
    struct CUfunc_st *f = allocate(sizeof *f);
    *f = (struct CUfunc_st){.magic = FUNCTION, .kernel = known, .next = module->functions};
    *function = module->functions = f;
    return e;
}

CUresult cuModuleUnload(CUmodule module)
{
    const CUresult e = gpu_enter(__func__);

    if (e != CUDA_SUCCESS)
        return e;
    if (module->magic != MODULE)
        gpu_die("%s: %p is no module", __func__, (void *)module);
    while (module->functions) {
        struct CUfunc_st *f = module->functions;
        module->functions = f->next;
        f->magic = GONE;
        free(f);
    }
    module->magic = GONE;
    free(module);
    (void)atomic_fetch_sub(&modules, 1);
    return e;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function)
{
    const CUresult e = gpu_enter(__func__);

    if (e != CUDA_SUCCESS)
        return e;
    if (attribute != CU_FUNC_ATTRIBUTE_NUM_REGS)
        gpu_die("%s: attribute %d is not in the double", __func__, (int)attribute);
    *value = 32;
    atomic_store(&function_of(function, __func__)->loaded, true);
    return e;
}

struct launch_work {
    struct gpu_work work;
    const struct gpu_kernel *kernel;
    struct gpu_grid grid;
    int device;
    unsigned char arg[GPU_MOST_ARGS][16];
};

static void run_launch(struct gpu_work *work)
{
    struct launch_work *w = (struct launch_work *)work;

    if (!gpu_lost())
        w->kernel->run((const unsigned char(*)[16])w->arg, &w->grid, w->device);
    free(w);
}

static CUresult push_launch(const struct CUfunc_st *f, const struct gpu_grid *grid, CUstream stream,
                            void **args)
{
    const unsigned *t = grid->thread;

    if (!grid->block[0] || !t[0] || t[0] * t[1] * t[2] > MOST_THREADS)
        return CUDA_ERROR_INVALID_VALUE;
    struct launch_work *w = allocate(sizeof *w);
    *w = (struct launch_work){{run_launch}, f->kernel, *grid, gpu_device, {{0}}};
    for (int i = 0; i < GPU_MOST_ARGS && f->kernel->arg[i]; i++)
        memcpy(w->arg[i], args[i], f->kernel->arg[i]);
    gpu_stream_push(stream, &w->work, false, "cuLaunchKernel");
    return CUDA_SUCCESS;
}

CUresult cuLaunchKernel(CUfunction function, unsigned blocks, unsigned blocks_y, unsigned blocks_z,
                        unsigned threads, unsigned threads_y, unsigned threads_z, unsigned shared,
                        CUstream stream, void **args, void **extra)
{
    const struct gpu_grid grid = {{blocks, blocks_y, blocks_z}, {threads, threads_y, threads_z}};
    CUresult e;

    if (gpu_enter_stream(__func__, stream, &e))
        return e;
    const struct CUfunc_st *f = function_of(function, __func__);
    if (!atomic_load(&f->loaded))
        gpu_die("%s: a kernel that is not loaded: loading it may wait for all that the device does",
                __func__);
    if (gpu_stream_device(stream, __func__) != gpu_device)
        gpu_die("%s: the stream is of device %d, the thread's is %d", __func__,
                gpu_stream_device(stream, __func__), gpu_device);
    return shared || extra ? CUDA_ERROR_INVALID_VALUE : push_launch(f, &grid, stream, args);
}

struct host_work {
    struct gpu_work work;
    CUhostFn fn;
    void *arg;
};

static void run_host(struct gpu_work *work)
{
    struct host_work *w = (struct host_work *)work;

    if (!gpu_lost())
        w->fn(w->arg);
    free(w);
}

CUresult cuLaunchHostFunc(CUstream stream, CUhostFn fn, void *arg)
{
    CUresult e;

    if (gpu_enter_stream(__func__, stream, &e))
        return e;
    struct host_work *w = allocate(sizeof *w);
    *w = (struct host_work){{run_host}, fn, arg};
    gpu_stream_push(stream, &w->work, false, __func__);
    return e;
}
