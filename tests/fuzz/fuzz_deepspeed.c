/* SPDX-License-Identifier: Apache-2.0 */
/* A whole DeepSpeed tag, or the folder above one. */
#include "fuzz_reader.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    return fuzz_reader(&ckpt_reader_deepspeed, data, size);
}
