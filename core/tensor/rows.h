/* SPDX-License-Identifier: Apache-2.0 */
/* A matrix of which some rows are another tensor's, as a value: an embedding whose trained tokens
 * lie beside it. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "tensor/catalog.h"

/* Replace in tensor `index` of cat, a matrix, row row[i] by row i of `rows` (of the catalogue, or
 * over its sources; copied), cast to the matrix's dtype. The n numbers ascend, each once, and are
 * copied. UNSUPPORTED: types; CONFLICT: shapes, or a row that the matrix has not. */
int ckpt_value_rows(struct ckpt_catalog *cat, size_t index, const struct ckpt_tensor *rows,
                    const uint64_t *row, size_t n, struct ckpt_err *err);
