/* SPDX-License-Identifier: Apache-2.0 */
/* Do two tensors hold the same values? For weights that a checkpoint may store twice. */
#pragma once

#include <stdbool.h>

#include "base/err.h"
#include "tensor/catalog.h"

/* CONFLICT unless both have the same dtype and shape; the message says where each is ("step 3"). */
int ckpt_tensor_same_kind(const struct ckpt_tensor *a, const char *in_a,
                          const struct ckpt_tensor *b, const char *in_b, struct ckpt_err *err);

/* True: both are known to hold the same bytes without reading any: they are made of the same bytes
 * of the same files, in the same way. */
bool ckpt_tensor_unchanged(const struct ckpt_tensor *a, const struct ckpt_tensor *b);

/* Compare two tensors. Dtype and shape must be equal. Nothing is read if they are known to be the
 * same; otherwise up to 16 places, spread over the whole tensor, first and last bytes included, are
 * read from both and compared.
 * *ret_same is a sample's answer then: two tensors that differ elsewhere only are taken for equal.
 * Fails only if a source cannot be read. */
int ckpt_tensor_same(const struct ckpt_tensor *a, const struct ckpt_tensor *b, bool *ret_same,
                     struct ckpt_err *err);
