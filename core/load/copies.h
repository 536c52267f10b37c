/* SPDX-License-Identifier: Apache-2.0 */
/* Lists of copies that a device does in one launch, from boxes: place.h for memory that the host
 * does not reach. */
#ifndef CKPT_LOAD_COPIES_H
#define CKPT_LOAD_COPIES_H

#include <stdint.h>

#include "base/err.h"
#include "load/copy_kernel.h"
#include "load/place.h"

/* Room for `cap` descriptors, the owner's. Addresses are the device's, and only numbers here. */
struct ckpt_copies {
    struct ckpt_device_copy *ptr;
    uint32_t n, cap;
    uint32_t nblock; /* of the launch that is being filled */
};

/* Most descriptors that a copy of this box takes. */
uint64_t ckpt_copies_most(const struct ckpt_box *part);

/* Append what ckpt_place would do. LIMIT: no room, or too large a part. */
int ckpt_copies_place(struct ckpt_copies *c, const struct ckpt_target *target,
                      const struct ckpt_box *part, const void *src, const struct ckpt_box *src_box,
                      enum ckpt_dtype src_dtype, struct ckpt_err *err);

#endif
