/* SPDX-License-Identifier: Apache-2.0 */
/* Streams and events, as the CUDA calls need them. */
#ifndef CKPT_GPU_DOUBLE_STREAM_H
#define CKPT_GPU_DOUBLE_STREAM_H

#include "double.h"

cudaError_t gpu_stream_new(cudaStream_t *ret, int device);
cudaError_t gpu_stream_free(cudaStream_t stream);
bool gpu_stream_idle(cudaStream_t stream);
cudaError_t gpu_stream_wait(cudaStream_t stream); /* for all of its work, or a lost device */

cudaError_t gpu_event_new(cudaEvent_t *ret, int device, bool timed);
cudaError_t gpu_event_free(cudaEvent_t event);
void gpu_event_record(cudaEvent_t event, cudaStream_t stream);
bool gpu_event_done(cudaEvent_t event);
cudaError_t gpu_event_between(cudaEvent_t from, cudaEvent_t to, float *ret_ms);
cudaError_t gpu_event_wait(cudaEvent_t event);
void gpu_stream_await(cudaStream_t stream, cudaEvent_t event);

/* Work that never ends, and work that loses the device. */
void gpu_stream_push_hang(cudaStream_t stream, const char *call);
void gpu_stream_push_loss(cudaStream_t stream, const char *call);

/* This thread's device. */
extern _Thread_local int gpu_device;

size_t gpu_stream_leaks(void);

#endif
