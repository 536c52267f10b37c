/* SPDX-License-Identifier: Apache-2.0 */
/* Do two tensors hold the same values? For weights that a checkpoint may store twice. */
#ifndef CKPT_TENSOR_SAME_H
#define CKPT_TENSOR_SAME_H

#include <stdbool.h>

#include "base/err.h"
#include "tensor/catalog.h"

/* Compare two tensors, whose catalogues have the same sources in the same order. Dtype and shape
 * must be equal. Equal pieces are the same bytes, and nothing is read; otherwise up to 16 places,
 * spread over the whole tensor, first and last bytes included, are read from both and compared.
 * *ret_same is a sample's answer then: two tensors that differ elsewhere only are taken for equal.
 * Fails only if a source cannot be read. */
int ckpt_tensor_same(const struct ckpt_tensor *a, const struct ckpt_tensor *b, bool *ret_same,
                     struct ckpt_err *err);

#endif
