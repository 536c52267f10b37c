/* SPDX-License-Identifier: Apache-2.0 */
/* Merging LoRA: weights plus scaled products of two thin matrices, as values.
 *
 * The arithmetic is that of PEFT's merge_and_unload on a CPU: F32; each element of B A is summed
 * over the rank in ascending order with fused multiply-adds (what MKL does up to rank 128), scaled,
 * added to the weight, and rounded once: to the weight's type, or to that of a cast. The changes of
 * embeddings and of PEFT's stacked experts are rounded to the weight's type before they are added;
 * NeMo Automodel's are not. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "tensor/catalog.h"

/* The deltas of a stack of matrices (experts; of one, usually). Tensors of the catalogue, or over
 * its sources; castable; copied. */
struct ckpt_lora {
    const struct ckpt_tensor *a;         /* [stack, rank, columns] */
    const struct ckpt_tensor *b;         /* [stack, rows, rank] */
    const struct ckpt_tensor *magnitude; /* DoRA: [rows]; else NULL. Only of a stack of one */
    double scale;
    bool rounded; /* the change, before it is added */
};

/* Add to tensor `index` of cat, whose last dimension is `columns`, rows [first, first + its rows)
 * of the stack (stack * rows in all). UNSUPPORTED: types; CONFLICT: shapes. */
int ckpt_value_lora(struct ckpt_catalog *cat, size_t index, const struct ckpt_lora *lora,
                    uint64_t first, struct ckpt_err *err);

/* Add scale * bias, a tensor of the same shape, to tensor `index`. */
int ckpt_value_lora_bias(struct ckpt_catalog *cat, size_t index, const struct ckpt_tensor *bias,
                         double scale, struct ckpt_err *err);
