/* SPDX-License-Identifier: Apache-2.0 */
/* The table of device and pinned memory, as the CUDA calls need it. */
#ifndef CKPT_GPU_DOUBLE_MEMORY_H
#define CKPT_GPU_DOUBLE_MEMORY_H

#include "double.h"

enum { GPU_MOST_DEVICES = 1024 };

CUresult gpu_memory_device(void **ret, size_t len, int device);
CUresult gpu_memory_pinned(void **ret, size_t len, int device, bool apart);
CUresult gpu_memory_register(void *p, size_t len, int device);
CUresult gpu_memory_free(void *p, enum gpu_where where, bool registered, const char *call);
void gpu_memory_info(int device, size_t *ret_free, size_t *ret_total);

/* Says what is left. */
size_t gpu_memory_leaks(void);

#endif
