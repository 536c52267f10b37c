// SPDX-License-Identifier: Apache-2.0
// The kernel around copy_kernel.h.
#include "device/copy_kernel.h"

extern "C" __global__ void __launch_bounds__(CKPT_COPY_THREADS)
    ckpt_copy_list(const struct ckpt_device_copy *list, uint32_t n)
{
    ckpt_copy_thread(list, n, blockIdx.x, threadIdx.x);
}
