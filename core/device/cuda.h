/* SPDX-License-Identifier: Apache-2.0 */
/* A CUDA device: all members of struct ckpt_device_ops but the exchanges, which comm/nccl/xport.c
 * adds. Functions work in the device's primary context and restore the caller's current context
 * before they return. */
#pragma once

#include <pthread.h>
#include <stdatomic.h>

#include "device/cuda_driver.h"
#include "device/device.h"

/* Pinned host memory, which is kept until the device is released. */
struct ckpt_pinned {
    struct ckpt_pinned *next;
    void *ptr;
    size_t len;
    bool taken; /* a load uses it */
};

struct ckpt_cuda {
    struct ckpt_device base;
    atomic_uint refs;
    int number;        /* the device's ordinal */
    CUcontext context; /* the device's primary context, which the CUDA runtime uses, too */
    struct ckpt_cuda_driver call;
    CUstream caller;          /* of the user */
    CUstream up, work, place; /* of ours: uploads; exchanges; placing */
    CUevent begun, fenced, exchanged, mark[CKPT_DEVICE_MARKS];
    CUmodule module;
    CUfunction kernel;
    void *(*user_alloc)(void *user, size_t len, CUstream stream); /* NULL: cuMemAlloc */
    void (*user_dealloc)(void *user, void *mem);
    void *user;
    pthread_mutex_t lock;       /* protects pinned */
    struct ckpt_pinned *pinned; /* memory of this load, and memory kept for the next one */
};

/* Make streams, events and the copy kernel on a device. c is zero-initialised. number -1: the
 * device of the calling thread's current context, or device 0 if there is none. USAGE: no such
 * device, or the caller's stream is of another device or context. Release c after a failure, too.
 */
int ckpt_cuda_init(struct ckpt_cuda *c, int number, CUstream caller, struct ckpt_err *err);
void ckpt_cuda_release(struct ckpt_cuda *c);
/* Choose the caller's stream anew. USAGE, and no change: it is of another device or context. */
int ckpt_cuda_choose_stream(struct ckpt_cuda *c, CUstream caller, struct ckpt_err *err);

/* Find the driver and retain the device's primary context, which the driver creates if the process
 * has none yet. Only c->number must be set (-1: as above). The context is kept until the process
 * ends. */
int ckpt_cuda_attach(struct ckpt_cuda *c, struct ckpt_err *err);

/* The state of a thread before ckpt_cuda_enter. */
struct ckpt_cuda_scope {
    CUstreamCaptureMode mode;
    bool pushed;
};

/* Make the device's context current for this thread; leave restores the previous one. Contexts are
 * pushed and popped, because choosing a device by its number (cudaSetDevice) would create a context
 * on it. Between the two calls the thread's capture mode is relaxed, so that no call of ours
 * invalidates a graph that another thread is capturing. */
int ckpt_cuda_enter(const struct ckpt_cuda *c, struct ckpt_cuda_scope *scope, struct ckpt_err *err);
void ckpt_cuda_leave(const struct ckpt_cuda *c, const struct ckpt_cuda_scope *scope);

/* 0 if rc is CUDA_SUCCESS; else -1, and *err says which device, what was being done and why it
 * failed. */
int ckpt_cuda_failed(const struct ckpt_cuda *c, CUresult rc, const char *what,
                     struct ckpt_err *err);

/* Wait at most ten seconds for all queued work. False: it did not end. */
bool ckpt_cuda_drain(struct ckpt_cuda *c);

/* Free all pinned memory. The caller has entered the device, and no load uses the memory. */
void ckpt_cuda_unpin_all(struct ckpt_cuda *c);

/* The members that need no exchanges. */
extern const struct ckpt_device_ops ckpt_cuda_ops;

/* Members that other files use, or have. */
void ckpt_cuda_adopt(struct ckpt_device *d);
int ckpt_cuda_pin(struct ckpt_device *d, size_t len, void **ret, struct ckpt_err *err);
uint64_t ckpt_cuda_unpin(struct ckpt_device *d, void *ptr);
int ckpt_cuda_reached(struct ckpt_device *d, uint32_t i, struct ckpt_err *err);
