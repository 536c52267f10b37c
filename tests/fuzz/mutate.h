/* SPDX-License-Identifier: Apache-2.0 */
/* Mutators that know a format: what they change is what a parser looks at behind its first checks,
 * and lengths and checksums fit again afterwards. A target defines LLVMFuzzerCustomMutator with one
 * of them. Each changes data[0..size) in place, which has room for max bytes, and returns the new
 * size; every other time or so it leaves the work to libFuzzer's own, which breaks everything. */
#ifndef CKPT_TESTS_FUZZ_MUTATE_H
#define CKPT_TESTS_FUZZ_MUTATE_H

#include <stddef.h>
#include <stdint.h>

/* libFuzzer's own. */
size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t max);

/* A safetensors file: its JSON header, or one number in it; the length before it fits. */
size_t mutate_safetensors(uint8_t *data, size_t size, size_t max, unsigned seed);

/* A pickle: operations are removed, repeated, exchanged and replaced as a whole. */
size_t mutate_pickle(uint8_t *data, size_t size, size_t max, unsigned seed);

/* A zip of stored members: the first one (torch's data.pkl) is mutated as a pickle at its size, and
 * its CRC-32 fits again wherever it stands; or one number of a header is changed. */
size_t mutate_zip(uint8_t *data, size_t size, size_t max, unsigned seed);

#endif
