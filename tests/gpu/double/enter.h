/* SPDX-License-Identifier: Apache-2.0 */
/* What the driver's calls begin with. */
#ifndef CKPT_GPU_DOUBLE_ENTER_H
#define CKPT_GPU_DOUBLE_ENTER_H

#include "double.h"

/* For calls that need no context. */
CUresult gpu_enter_without(const char *call);

/* For calls that put no work on a stream. Without a current context the program ends. */
CUresult gpu_enter(const char *call);

/* For those that do: 1 if a fault took the work's place. */
int gpu_enter_stream(const char *call, CUstream stream, CUresult *ret);

/* The end of the program, if this call could disturb a capture of another thread's. */
void gpu_check_capture(const char *call);

size_t gpu_module_leaks(void);

#endif
