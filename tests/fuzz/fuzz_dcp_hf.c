/* SPDX-License-Identifier: Apache-2.0 */
/* A whole checkpoint of HF-sharded files, with what NeMo Automodel adds. */
#include "fuzz_reader.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    return fuzz_reader(&ckpt_reader_dcp_hf, data, size);
}
