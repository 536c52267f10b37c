/* SPDX-License-Identifier: Apache-2.0 */
/* What programs on devices share: calls that must not fail, and the id of a communicator. */
#ifndef CKPT_TESTS_GPU_CALLS_H
#define CKPT_TESTS_GPU_CALLS_H

#include <errno.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <cuda.h>

#include <ckptfs/load_nccl.h>

_Noreturn static inline void die(const char *what, const char *why)
{
    (void)fprintf(stderr, "%s: %s: %s\n", program_invocation_short_name, what, why);
    exit(2);
}

static inline void cuda(CUresult e, const char *what)
{
    const char *why = NULL;

    if (e == CUDA_SUCCESS)
        return;
    (void)cuGetErrorString(e, &why);
    die(what, why ? why : "unknown error");
}

static inline CUdeviceptr on_device(const void *p) { return (CUdeviceptr)(uintptr_t)p; }

/* How many there are. */
static inline int count_devices(void)
{
    int n = 0;

    return cuInit(0) == CUDA_SUCCESS && cuDeviceGetCount(&n) == CUDA_SUCCESS ? n : 0;
}

/* The thread's device from now on, as cudaSetDevice makes it. */
static inline void choose_device(int number)
{
    CUdevice device;
    CUcontext context;

    cuda(cuDeviceGet(&device, number), "a device");
    cuda(cuDevicePrimaryCtxRetain(&context, device), "its context");
    cuda(cuCtxSetCurrent(context), "its context");
}

static inline void *allocate_on_device(size_t len)
{
    CUdeviceptr p = 0;

    cuda(cuMemAlloc(&p, len), "device memory");
    return (void *)(uintptr_t)p;
}

static inline void nccl(ncclResult_t e, const char *what)
{
    if (e != ncclSuccess)
        die(what, ncclGetErrorString(e));
}

/* The id passes through a file: the first rank makes both, the others wait for it. */
static inline void pass_id(const char *path, bool first, uint32_t most_ms, ncclUniqueId *id)
{
    char part[4096];
    FILE *f;

    (void)snprintf(part, sizeof part, "%s.part", path);
    if (first) {
        nccl(ncclGetUniqueId(id), "an id");
        if (!(f = fopen(part, "w")) || fwrite(id, sizeof *id, 1, f) != 1 || fclose(f) != 0 ||
            rename(part, path) != 0)
            die(path, "can't be written");
        return;
    }
    for (uint32_t ms = 0; !(f = fopen(path, "r")); ms++) {
        if (ms > most_ms)
            die(path, "nobody wrote it");
        (void)usleep(1000);
    }
    if (fread(id, sizeof *id, 1, f) != 1 || fclose(f) != 0)
        die(path, "can't be read");
}

#endif
