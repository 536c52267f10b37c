/* SPDX-License-Identifier: Apache-2.0 */
/* Names of a Megatron checkpoint's tensors, in the one form that recipes speak of: that of
 * torch_dist.
 *
 *     module.decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight
 *         -> decoder.layers.4.mlp.experts.experts.5.linear_fc1.weight   of layers from 4, experts
 * from 4 module.decoder.layers.0.mlp.experts.linear_fc1.weight1_w
 *         -> decoder.layers.0.mlp.experts.experts.1.linear_fc1.weight_w */
#ifndef CKPT_CKPT_MEGATRON_NAME_H
#define CKPT_CKPT_MEGATRON_NAME_H

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"
#include "base/mem.h"
#include "base/str.h"

/* What the numbers of one rank's file begin with. */
struct ckpt_megatron_place {
    uint64_t layer, expert;
};

/* The name, without what wrappers put before it, with global numbers, into out; false: it is none
 * of the model's weights. Out of memory shows in out->failed. */
bool ckpt_megatron_name(const char *name, const struct ckpt_megatron_place *at,
                        struct ckpt_str *out);

/* The name without what wrappers put before it; part of `name`. */
const char *ckpt_megatron_strip(const char *name);

/* The number behind "decoder.layers." in a stripped name; false: there is none. */
bool ckpt_megatron_layer(const char *name, uint64_t *ret);

/* Is it a weight of an adapter (LoRA), or of what an adapter is wrapped around? */
/* Is it an array of an optimizer's state? */
bool ckpt_megatron_is_state(const char *name);

bool ckpt_megatron_is_adapter(const char *name);

#endif
