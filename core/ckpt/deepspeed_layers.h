/* SPDX-License-Identifier: Apache-2.0 */
/* Weights that are not in the model file: the layers of a pipeline module, and the experts of
 * DeepSpeed-MoE. */
#ifndef CKPT_CKPT_DEEPSPEED_LAYERS_H
#define CKPT_CKPT_DEEPSPEED_LAYERS_H

#include "ckpt/deepspeed_zero.h"

/* Add the layers of `nstage` pipeline stages, whose files are checked, under the names LL.NAME;
 * also masters and moments if the options ask for them. MISSING: there is no file for a layer, and
 * the model files do not prove that the layer has no parameters. */
int ckpt_ds_layers_read(const struct ckpt_ds_job *job, struct ckpt_ds_zero *stage, uint64_t nstage,
                        struct ckpt_ds_parts *weights, struct ckpt_ds_parts *moments,
                        struct ckpt_err *err);

/* Add the experts, under the names in their files. MISSING: an expert that the model file z counts.
 */
int ckpt_ds_experts_read(const struct ckpt_ds_zero *z, struct ckpt_ds_parts *weights,
                         struct ckpt_err *err);

#endif
