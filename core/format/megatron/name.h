/* SPDX-License-Identifier: Apache-2.0 */
/* Names of a Megatron checkpoint's tensors, converted to the form that recipes use, which is that
 * of torch_dist.
 *
 *     module.decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight
 *         -> decoder.layers.4.mlp.experts.experts.5.linear_fc1.weight   of layers from 4, experts
 * from 4 module.decoder.layers.0.mlp.experts.linear_fc1.weight1_w
 *         -> decoder.layers.0.mlp.experts.experts.1.linear_fc1.weight_w */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"
#include "base/mem.h"
#include "base/str.h"

/* The first global numbers of layers and experts in one rank's file. */
struct ckpt_megatron_place {
    uint64_t layer, expert;
};

/* Write into `out` the name without the prefixes of wrappers and with global numbers; false: the
 * name is not one of the model's weights. If memory runs out, out->failed is set. */
bool ckpt_megatron_name(const char *name, const struct ckpt_megatron_place *at,
                        struct ckpt_str *out);

/* The number after "decoder.layers." in a stripped name; false: there is none. */
bool ckpt_megatron_layer(const char *name, uint64_t *ret);

/* Does the name belong to an optimizer's state? */
bool ckpt_megatron_is_state(const char *name);

/* Does the name belong to an adapter of NeMo 1, or to a module that an adapter wraps? */
bool ckpt_megatron_is_wrapped(const char *name);
