/* SPDX-License-Identifier: Apache-2.0 */
/* Dequantisation of block-scaled weights: values whose operands are codes and scales. Both
 * operators compute in F32 and round once. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "tensor/catalog.h"
#include "tensor/dtype.h"

/* Multiply tensor `index` of cat, F8_E4M3 of [..., rows, columns], by its scales. Each block of
 * block[0] x block[1] elements has one scale; the blocks at the edges may be smaller. `scale` is a
 * tensor of cat (copied) of [..., ceil(rows / block[0]), ceil(columns / block[1])] elements, F32,
 * BF16, F16 or F8_E8M0. UNSUPPORTED for other types, CONFLICT for other shapes. */
int ckpt_value_fp8(struct ckpt_catalog *cat, size_t index, const struct ckpt_tensor *scale,
                   const uint64_t block[2], enum ckpt_dtype dtype, struct ckpt_err *err);

/* Make tensor `index` of cat, MXFP4 blocks U8 of [experts, out, groups, 16] with scales U8 of
 * [experts, out, groups], a tensor of [experts, groups * 32, out]: transposed, as Hugging Face's
 * GPT-OSS has it in memory. A byte holds two codes, the low one first; a scale is a power of two
 * (E8M0: 2^(s - 127), 255 is NaN). The operands come with `out` already last: `blocks` of [experts,
 * groups, 16, out] and `scales` of [experts, groups, out] (copied). */
int ckpt_value_mxfp4(struct ckpt_catalog *cat, size_t index, const struct ckpt_tensor *blocks,
                     const struct ckpt_tensor *scales, enum ckpt_dtype dtype, struct ckpt_err *err);
