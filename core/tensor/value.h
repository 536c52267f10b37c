/* SPDX-License-Identifier: Apache-2.0 */
/* Computed tensors: an operator over other tensors (a cast, +1 on zero-centred norms,
 * dequantisation ...), which may themselves be computed or mapped, or be another catalogue's. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "tensor/dtype.h"

struct ckpt_catalog;
struct ckpt_reading;
struct ckpt_tensor;
struct ckpt_value;

struct ckpt_value_ops {
    const char *name; /* for `explain`, and "value" in recipes */
    /* For operators of one operand of the tensor's shape: compute n elements, each from the same
     * element of the operand. The buffers do not overlap. NULL: the operator has `compute`. */
    void (*elements)(const struct ckpt_value *v, void *dst, enum ckpt_dtype to, const void *src,
                     enum ckpt_dtype from, size_t n);
    /* For operators of several operands of the tensor's shape: compute n elements, each from the
     * same element of all operands, arg[i]'s of which are at src[i]. NULL likewise. */
    void (*combine)(void *dst, enum ckpt_dtype to, const void *const *src,
                    const struct ckpt_tensor *const *arg, uint32_t narg, size_t n);
    /* Compute elements [lo, hi) of tensor t (row-major) into buf, (hi - lo) * element size bytes.
     * Each element depends on the operands alone, never on lo and hi. Safe from many threads. */
    int (*compute)(const struct ckpt_tensor *t, struct ckpt_reading *rd, void *buf, uint64_t lo,
                   uint64_t hi, struct ckpt_err *err);
    /* The operator rounds its result to any castable dtype that t has, so a cast of t only changes
     * that dtype. */
    bool rounds;
    /* Not 0: computing a few elements takes as long as computing many, so spans of about this many
     * bytes are computed at once and kept (tensor/slab.h). */
    uint32_t slab_bytes;
    bool takes_number; /* a recipe says the number with which it computes (ckpt_value_apply) */
};

/* Lives in the arena of the catalogue whose tensor it belongs to. */
struct ckpt_value {
    const struct ckpt_value_ops *ops;
    uint32_t narg;
    const struct ckpt_tensor *const
        *arg;          /* of this catalogue, or of another one that outlives it */
    uint64_t param[3]; /* other data on which the elements depend, for digests */
};

/* Make t, whose dim and numel are set, the result of v, with this dtype. LIMIT: it would have 2^63
 * bytes or more. */
int ckpt_tensor_compute(struct ckpt_tensor *t, const struct ckpt_value *v, int dtype,
                        struct ckpt_err *err);

/* Operators of one operand that keep dtype and shape, which recipes can name. */
extern const struct ckpt_value_ops ckpt_value_plus_one; /* x + 1, in F32 at least, rounded once */

/* The operator of that name, or NULL. */
const struct ckpt_value_ops *ckpt_value_find(const char *name);

/* Replace tensor `index` of cat by the result of such an operator on it, with a number if it takes
 * one. UNSUPPORTED: its dtype is not castable (ckpt_dtype_is_castable). */
int ckpt_value_apply(struct ckpt_catalog *cat, size_t index, const struct ckpt_value_ops *ops,
                     double number, struct ckpt_err *err);

/* Make tensor `index` of cat the mean of itself and n - 1 others, whose dtypes and shapes are its
 * own and castable: the sum in F64, divided once, and rounded once. *arg (n of them, the first its
 * own copy) lies in cat's arena. */
int ckpt_value_mean(struct ckpt_catalog *cat, size_t index, const struct ckpt_tensor *const *arg,
                    uint32_t n, struct ckpt_err *err);

/* The dtype in which nothing is lost of what is stored, or computed: the operand's, if t is a cast;
 * F32 at least, if it is another operator's rounded result; else t's own. */
enum ckpt_dtype ckpt_value_unrounded(const struct ckpt_tensor *t);

/* Convert tensor `index` of cat to `dtype`. Does nothing if it has that dtype already. Both dtypes
 * must be castable (ckpt_dtype_is_castable; assert). */
int ckpt_value_cast(struct ckpt_catalog *cat, size_t index, int dtype, struct ckpt_err *err);
