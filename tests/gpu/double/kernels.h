/* SPDX-License-Identifier: Apache-2.0 */
/* The kernels that the double can run: their bodies are C. */
#ifndef CKPT_GPU_DOUBLE_KERNELS_H
#define CKPT_GPU_DOUBLE_KERNELS_H

#include "double.h"

enum { GPU_MOST_ARGS = 4 };

/* How many blocks, and threads of each. */
struct gpu_grid {
    unsigned block[3], thread[3];
};

struct gpu_kernel {
    const char *name;
    size_t arg[GPU_MOST_ARGS]; /* sizes; 0: no more */
    /* All blocks and threads of a launch, in the stream's thread. */
    void (*run)(const unsigned char (*arg)[16], const struct gpu_grid *grid, int device);
};

/* NULL: unknown. */
const struct gpu_kernel *gpu_kernel_find(const char *name);

#endif
