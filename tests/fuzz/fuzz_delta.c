/* SPDX-License-Identifier: Apache-2.0 */
/* A version that holds changes, beside others; and version 0. */
#include "fuzz_reader.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    fuzz_step = "v2";
    reads_may_fail = true;
    return fuzz_reader(&ckpt_reader_delta, data, size);
}
