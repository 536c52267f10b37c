/* SPDX-License-Identifier: Apache-2.0 */
/* A whole step of Orbax's: an item with its tree, and arrays in files or in a database. */
#include "fuzz_reader.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    return fuzz_reader(&ckpt_reader_orbax, data, size);
}
