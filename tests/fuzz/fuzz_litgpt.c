/* SPDX-License-Identifier: Apache-2.0 */
/* A whole checkpoint of LitGPT's: one torch.save file and YAML. */
#include "fuzz_reader.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    return fuzz_reader(&ckpt_reader_litgpt, data, size);
}
