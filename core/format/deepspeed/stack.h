/* SPDX-License-Identifier: Apache-2.0 */
/* The layers of Megatron-DeepSpeed's pipeline module (GPTModelPipe), which are numbered and not
 * named:
 *
 *     1.word_embeddings.weight                    -> embedding.word_embeddings.weight
 *     2.self_attention.dense.weight               -> decoder.layers.0.self_attention.dense.weight
 *     ...
 *     N.weight                                    -> decoder.final_layernorm.weight
 *     N+1.lm_head.weight                          -> output_layer.weight
 *     tied_modules.embed.word_embeddings.weight   -> embedding.word_embeddings.weight (universal
 *                                                    checkpoints of a tied embedding)
 *
 * The numbers between them depend on the code's version, which puts functions among the layers, so
 * the names inside a layer decide what it is. */
#ifndef CKPT_FORMAT_DEEPSPEED_STACK_H
#define CKPT_FORMAT_DEEPSPEED_STACK_H

#include "base/str.h"
#include "format/deepspeed/part.h"

struct ckpt_ds_stack {
    uint64_t embedding, first, last, norm; /* numbers of the layers; first, last: of transformer
                                              layers, which are consecutive */
    bool has_head, tied; /* the last layer is an output layer, or a copy of the embedding */
    uint64_t head;
};

/* Find out which layer is what, by the names LL.NAME. UNSUPPORTED: they are not such a model's;
 * MISSING: a layer that the model must have, with `nlayer` transformer layers, is not there. */
int ckpt_ds_stack_read(const struct ckpt_ds_parts *parts, uint64_t nlayer,
                       struct ckpt_ds_stack *ret, struct ckpt_err *err);

/* Write the name of a layer's tensor in the whole model; false: the tensor is a tied copy. */
bool ckpt_ds_stack_name(const struct ckpt_ds_stack *stack, const char *name, struct ckpt_str *out);

#endif
