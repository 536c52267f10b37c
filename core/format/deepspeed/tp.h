/* SPDX-License-Identifier: Apache-2.0 */
/* Joining the parts of the tensor-parallel ranks (DeepSpeed's AutoTP). */
#ifndef CKPT_FORMAT_DEEPSPEED_TP_H
#define CKPT_FORMAT_DEEPSPEED_TP_H

#include "format/deepspeed/zero.h"

/* Join parts[0..n) of the n ranks into whole tensors, by the rules in rank 0's model file
 * (universal_checkpoint_info), and add them to the catalogue. Order and names are those of rank 0.
 */
int ckpt_ds_tp_join(const struct ckpt_ds_zero *rank0, const struct ckpt_ds_parts *parts, uint64_t n,
                    struct ckpt_catalog *cat, struct ckpt_err *err);

#endif
