/* SPDX-License-Identifier: Apache-2.0 */
/* Weights that are not in the model file but in files of their own, each a state dict: the layers
 * of a pipeline module. */
#pragma once

#include "format/deepspeed/zero.h"

/* Add the layers of a pipeline, whose stages' model files are open, under the names LL.NAME; also
 * masters and moments if the options ask for them. MISSING: there is no file for a layer, and the
 * model files do not prove that the layer has no parameters. */
int ckpt_ds_layers_read(const struct ckpt_ds_job *job, struct ckpt_ds_zero *stage, uint64_t n,
                        struct ckpt_ds_parts *weights, struct ckpt_ds_parts *moments,
                        struct ckpt_err *err);

/* Call fn for all tensors of a file that is a state dict; it becomes a source of the catalogue. */
typedef int ckpt_ds_add_fn(void *ctx, const char *name, const struct ckpt_torch_file *f,
                           const struct ckpt_torch_tensor *s, uint32_t source,
                           struct ckpt_err *err);
int ckpt_ds_layers_each(const struct ckpt_ds_job *job, const char *file, ckpt_ds_add_fn *fn,
                        void *ctx, struct ckpt_err *err);
