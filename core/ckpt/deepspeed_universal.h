/* SPDX-License-Identifier: Apache-2.0 */
/* Universal checkpoints (deepspeed/checkpoint/ds_to_universal.py): a folder for each parameter. */
#ifndef CKPT_CKPT_DEEPSPEED_UNIVERSAL_H
#define CKPT_CKPT_DEEPSPEED_UNIVERSAL_H

#include "ckpt/deepspeed_zero.h"

/* Tensors of zero/NAME/fp32.pt, to be shown in the dtype that the copied module has; what the
 * optimizer did not know (buffers, frozen parameters) comes from the module. nmp: how many
 * tensor-parallel ranks the copied model files are of; the parameters are whole already. */
int ckpt_ds_universal_read(struct ckpt_ds_zero *z, uint64_t nmp, struct ckpt_ds_parts *weights,
                           struct ckpt_ds_parts *moments, struct ckpt_err *err);

#endif
