/* SPDX-License-Identifier: Apache-2.0 */
/* Lists of strided copies and casts, which one launch of the copy kernel executes: what
 * tensor/ndcopy.h does in host memory, for device memory. The loader fills a list per read slot and
 * per window (load/engine/pump_device.c). */
#pragma once

#include <stdint.h>

#include "base/err.h"
#include "device/copy_kernel.h"
#include "tensor/ndcopy.h"

/* A list of n descriptors in an array of cap, which the caller owns. Addresses in it are the
 * device's: the host never dereferences them. */
struct ckpt_copies {
    struct ckpt_device_copy *ptr;
    uint32_t n, cap;
    uint32_t nblock; /* blocks of threads that the launch needs so far */
};

/* The largest number of descriptors that copying this box can take. */
uint64_t ckpt_copies_most(const struct ckpt_box *part);

/* Append the descriptors that do what ckpt_place does. LIMIT: the array is full, or the part has
 * more elements than a launch can count. */
int ckpt_copies_place(struct ckpt_copies *c, const struct ckpt_target *target,
                      const struct ckpt_box *part, const void *src, const struct ckpt_box *src_box,
                      enum ckpt_dtype src_dtype, struct ckpt_err *err);
