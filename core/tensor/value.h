/* SPDX-License-Identifier: Apache-2.0 */
/* Computed tensors: an operator over other tensors (a cast, +1 on zero-centred norms,
 * dequantisation ...). */
#ifndef CKPT_TENSOR_VALUE_H
#define CKPT_TENSOR_VALUE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"

struct ckpt_catalog;
struct ckpt_reading;
struct ckpt_tensor;
struct ckpt_value;

struct ckpt_value_ops {
    const char *name; /* for `explain` */
    /* Compute elements [lo, hi) of tensor t (row-major) into buf, (hi - lo) * element size bytes.
     * Safe from many threads. */
    int (*compute)(const struct ckpt_value *v, const struct ckpt_tensor *t, struct ckpt_reading *rd,
                   void *buf, uint64_t lo, uint64_t hi, struct ckpt_err *err);
};

/* Lives in the arena of the catalogue whose tensor it belongs to. */
struct ckpt_value {
    const struct ckpt_value_ops *ops;
    uint32_t narg;
    const struct ckpt_operand {
        const struct ckpt_catalog *cat; /* whose sources the pieces speak of; may be another one,
                                           which must outlive this */
        const struct ckpt_tensor *tensor;
    } * arg;
};

/* Make tensor `index` of cat deliver `dtype`, computed from what is stored. Nothing happens if it
 * has that dtype already. Both must be castable (ckpt_dtype_is_castable; assert). */
int ckpt_value_cast(struct ckpt_catalog *cat, size_t index, int dtype, struct ckpt_err *err);

/* Is it such a cast? Then its operand has the tensor's shape. */
bool ckpt_value_is_cast(const struct ckpt_value *v);

#endif
