/* SPDX-License-Identifier: Apache-2.0 */
/* Reading boxes of stored tensors: finds the part of each piece that is in the box, as strided
 * regions of sources. No other code walks the pieces of a tensor to read it. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"
#include "tensor/box.h"
#include "tensor/catalog.h"
#include "tensor/strided.h"

/* The box, which lies inside the tensor, goes to buf in row-major order without holes. A box of
 * rank 1 is a range of elements in row-major order, whatever the rank of the tensor. */
struct ckpt_box_read {
    const struct ckpt_tensor *tensor;
    struct ckpt_box box;
    void *buf;
};

/* Queue the reads of a box, which is not empty, of a tensor that has pieces. The bytes are
 * in buf after ckpt_batch_finish. Sets the reader's element size. */
int ckpt_stored_read(struct ckpt_strided_reader *reader, const struct ckpt_box_read *read,
                     struct ckpt_err *err);

/* Find element `at` (row-major): the catalogue's source and the offset in it. False for computed
 * tensors, and if nothing is stored there. */
bool ckpt_tensor_place(const struct ckpt_tensor *t, uint64_t at, uint32_t *ret_source,
                       uint64_t *ret_off);
