/* SPDX-License-Identifier: Apache-2.0 */
/* Weights outside of the model file: a pipeline module's layers, DeepSpeed-MoE's experts. */
#ifndef CKPT_CKPT_DEEPSPEED_LAYERS_H
#define CKPT_CKPT_DEEPSPEED_LAYERS_H

#include "ckpt/deepspeed_zero.h"

/* Add the layers as LL.NAME, of `nstage` pipeline stages, whose files are checked; masters and
 * moments where the options ask for them. A hole between the layers is MISSING, unless the model
 * files prove that there is nothing. */
int ckpt_ds_layers_read(const struct ckpt_ds_job *job, struct ckpt_ds_zero *stage, uint64_t nstage,
                        struct ckpt_ds_parts *weights, struct ckpt_ds_parts *moments,
                        struct ckpt_err *err);

/* Add the experts, under the names that their files have. MISSING: one that the model file z
 * counts. */
int ckpt_ds_experts_read(const struct ckpt_ds_zero *z, struct ckpt_ds_parts *weights,
                         struct ckpt_err *err);

#endif
