/* SPDX-License-Identifier: Apache-2.0 */
/* A whole checkpoint of torch.distributed.checkpoint: .metadata and the files that it speaks of. */
#include "fuzz_reader.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    return fuzz_reader(&ckpt_reader_dcp, data, size);
}
