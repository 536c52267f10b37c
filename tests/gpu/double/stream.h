/* SPDX-License-Identifier: Apache-2.0 */
/* Streams and events, as the CUDA calls need them. */
#ifndef CKPT_GPU_DOUBLE_STREAM_H
#define CKPT_GPU_DOUBLE_STREAM_H

#include "double.h"

CUresult gpu_stream_new(CUstream *ret, int device);
CUresult gpu_stream_free(CUstream stream);
bool gpu_stream_idle(CUstream stream);
CUresult gpu_stream_wait(CUstream stream); /* for all of its work, or a lost device */

CUresult gpu_event_new(CUevent *ret, int device, bool timed);
CUresult gpu_event_free(CUevent event);
void gpu_event_record(CUevent event, CUstream stream);
bool gpu_event_done(CUevent event);
CUresult gpu_event_between(CUevent from, CUevent to, float *ret_ms);
CUresult gpu_event_wait(CUevent event);
void gpu_stream_await(CUstream stream, CUevent event);

/* Work that never ends, and work that loses the device. */
void gpu_stream_push_hang(CUstream stream, const char *call);
void gpu_stream_push_loss(CUstream stream, const char *call);

/* The device of this thread's current context; -1: it has none. */
extern _Thread_local int gpu_device;

size_t gpu_stream_leaks(void);

#endif
