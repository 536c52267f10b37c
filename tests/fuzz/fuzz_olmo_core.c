/* SPDX-License-Identifier: Apache-2.0 */
/* A whole step of OLMo-core's: a DCP and config.json. */
#include "fuzz_reader.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    return fuzz_reader(&ckpt_reader_olmo_core, data, size);
}
