/* SPDX-License-Identifier: Apache-2.0 */
/* A whole checkpoint of torch.save files, one of each rank. */
#include "fuzz_reader.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    return fuzz_reader(&ckpt_reader_rank_files, data, size);
}
