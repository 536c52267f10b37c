/* SPDX-License-Identifier: Apache-2.0 */
/* A CUDA device: all of struct ckpt_device_ops but the exchanges, which are NCCL's. */
#ifndef CKPT_LOAD_CUDA_H
#define CKPT_LOAD_CUDA_H

#include <pthread.h>
#include <stdatomic.h>

#include "load/cuda_driver.h"
#include "load/device.h"

struct ckpt_pinned {
    struct ckpt_pinned *next;
    void *ptr;
    size_t len;
    bool taken;
};

struct ckpt_cuda {
    struct ckpt_device base;
    atomic_uint refs;
    int number;
    CUcontext context; /* the device's primary one, as the CUDA runtime uses it */
    struct ckpt_cuda_driver call;
    CUstream caller, up, work, place; /* the user's; uploads; exchanges; all else */
    CUevent begun, fenced, exchanged, mark[CKPT_DEVICE_MARKS];
    CUmodule module;
    CUfunction kernel;
    void *(*user_alloc)(void *user, size_t len, CUstream stream); /* NULL: cuMemAlloc */
    void (*user_dealloc)(void *user, void *mem);
    void *user;
    pthread_mutex_t lock;       /* of: */
    struct ckpt_pinned *pinned; /* is kept for the next load */
};

/* c is zero. number -1: the device of the calling thread's current context; 0 if it has none. */
int ckpt_cuda_init(struct ckpt_cuda *c, int number, CUstream caller, struct ckpt_err *err);
void ckpt_cuda_release(struct ckpt_cuda *c);

/* Find the driver, and the device's primary context, which is made if it is not there: c->number is
 * known, or -1 as above, the rest of c may be zero. The context is kept until the process ends. */
int ckpt_cuda_attach(struct ckpt_cuda *c, struct ckpt_err *err);

/* What a thread of the caller's was before it entered. */
struct ckpt_cuda_scope {
    CUstreamCaptureMode mode;
    bool pushed;
};

/* Make the device current for this thread, and put back what was: by the context, since choosing
 * another device by its number would make a context there. In between, no call disturbs a capture
 * of another thread's stream in a graph. */
int ckpt_cuda_enter(const struct ckpt_cuda *c, struct ckpt_cuda_scope *scope, struct ckpt_err *err);
void ckpt_cuda_leave(const struct ckpt_cuda *c, const struct ckpt_cuda_scope *scope);

int ckpt_cuda_failed(const struct ckpt_cuda *c, CUresult rc, const char *what,
                     struct ckpt_err *err);

/* Wait, some seconds, for all that is queued. */
bool ckpt_cuda_drain(struct ckpt_cuda *c);

/* Forget all that was kept; the device is entered. */
void ckpt_cuda_unpin_all(struct ckpt_cuda *c);

/* The members of struct ckpt_device_ops. */
void ckpt_cuda_adopt(struct ckpt_device *d);
int ckpt_cuda_alloc(struct ckpt_device *d, size_t len, void **ret, struct ckpt_err *err);
void ckpt_cuda_dealloc(struct ckpt_device *d, void *ptr);
int ckpt_cuda_pin(struct ckpt_device *d, size_t len, void **ret, struct ckpt_err *err);
void ckpt_cuda_unpin(struct ckpt_device *d, void *ptr);
bool ckpt_cuda_reaches(struct ckpt_device *d, const void *ptr);
int ckpt_cuda_fetch(struct ckpt_device *d, void *dst, const void *src, size_t len,
                    struct ckpt_err *err);
int ckpt_cuda_begin(struct ckpt_device *d, struct ckpt_err *err);
int ckpt_cuda_upload(struct ckpt_device *d, void *dst, const void *src, size_t len,
                     struct ckpt_err *err);
int ckpt_cuda_fence(struct ckpt_device *d, struct ckpt_err *err);
int ckpt_cuda_follow(struct ckpt_device *d, struct ckpt_err *err);
int ckpt_cuda_copy(struct ckpt_device *d, const struct ckpt_device_copy *list, uint32_t n,
                   uint32_t nblock, struct ckpt_err *err);
int ckpt_cuda_download(struct ckpt_device *d, void *dst, const void *src, size_t len,
                       struct ckpt_err *err);
int ckpt_cuda_mark(struct ckpt_device *d, uint32_t i, struct ckpt_err *err);
int ckpt_cuda_reached(struct ckpt_device *d, uint32_t i, struct ckpt_err *err);

#endif
