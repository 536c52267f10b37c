/* SPDX-License-Identifier: Apache-2.0 */
/* Joining the parts of tensor-parallel ranks (DeepSpeed's AutoTP, Megatron-DeepSpeed). */
#ifndef CKPT_CKPT_DEEPSPEED_TP_H
#define CKPT_CKPT_DEEPSPEED_TP_H

#include "ckpt/deepspeed_zero.h"

/* Add to the catalogue the tensors that parts[0..n) of the ranks make together, as the model file
 * of rank 0 says (universal_checkpoint_info); the order and names are those of rank 0. */
int ckpt_ds_tp_join(const struct ckpt_ds_zero *rank0, const struct ckpt_ds_parts *parts, uint64_t n,
                    struct ckpt_catalog *cat, struct ckpt_err *err);

#endif
