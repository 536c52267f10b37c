/* SPDX-License-Identifier: Apache-2.0 */
/* The option `dequantize`: a model's block-scaled weights as ordinary ones. */
#pragma once

#include <stdbool.h>

#include "base/err.h"
#include "base/json.h"
#include "container/weight_map.h"
#include "tensor/catalog.h"

/* Replace each pair of tensors of cat (which have Hugging Face's names) by the tensor that it
 * represents:
 *
 *     X, X_scale_inv          FP8 in blocks, of quantization_config.weight_block_size (128 x 128)
 *     X_blocks, X_scales      MXFP4: X
 *
 * in the dtype that `config` (may be NULL) says, else BF16; a cast of it later rounds only once.
 * weight_map (may be NULL) follows. MISSING: one without the other; CONFLICT, UNSUPPORTED: shape,
 * type. On failure the catalogue is only good for freeing. */
int ckpt_dequantize(struct ckpt_catalog *cat, const json_t *config, struct ckpt_weight_map *map,
                    struct ckpt_err *err);

/* Has cat tensors that a config's quantization_config may speak of: integers, 8-bit floats? */
bool ckpt_is_quantized(const struct ckpt_catalog *cat);

/* Has cat such tensors, or matrices of 32-bit integers, into which weights are packed? For models
 * whose config says that they are quantised: others may have such a table. */
bool ckpt_is_packed(const struct ckpt_catalog *cat);
