/* SPDX-License-Identifier: Apache-2.0 */
/* A whole Megatron checkpoint: zarr arrays, ranks' files, torch_dist, and what stands beside. */
#include "fuzz_reader.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    return fuzz_reader(&ckpt_reader_megatron, data, size);
}
