/* SPDX-License-Identifier: Apache-2.0 */
/* A whole checkpoint of torch.distributed.checkpoint: .metadata and the files that it speaks of. At
 * a distance headers of items are read with their data. */
#include "fuzz_reader.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    fuzz_far = true;
    return fuzz_reader(&ckpt_reader_dcp, data, size);
}
