/* SPDX-License-Identifier: Apache-2.0 */
/* The tensors of one tensor-parallel rank (or pipeline stage) of a DeepSpeed tag. */
#pragma once

#include "format/deepspeed/zero.h"

/* Add the module's tensors to `weights`, under its names and in its order: the masters if the
 * reader's options ask for them, else the 16-bit weights. With ZeRO 3, which stores masters only,
 * they are the masters, to be shown in the module's dtype. If the options ask for states, add the
 * optimizer's states to `moments` as optim.state.NAME.KEY. */
int ckpt_ds_module_read(struct ckpt_ds_zero *z, struct ckpt_ds_parts *weights,
                        struct ckpt_ds_parts *moments, struct ckpt_err *err);

/* ---- its parts, for modules that lie in layers ---- */

/* Read the optimizer files if the options, or ZeRO 3, need them. A warning lists what is not
 * available. */
int ckpt_ds_module_read_ranks(struct ckpt_ds_zero *z, bool *ret_read, struct ckpt_err *err);

/* Make the buffers of the masters, and check them. *ret must be freed after a failure too. */
int ckpt_ds_masters_new(const struct ckpt_ds_zero *z, struct ckpt_ds_buffer **ret,
                        struct ckpt_err *err);
void ckpt_ds_masters_free(const struct ckpt_ds_zero *z, struct ckpt_ds_buffer *b);

/* Add the moments of all parameters to out. */
int ckpt_ds_moments_add(struct ckpt_ds_zero *z, struct ckpt_ds_parts *out, struct ckpt_err *err);

/* Call fn for all tensors of the module in a model file, and for other values that are no dicts.
 * Megatron-DeepSpeed's state dicts are nested: the keys, joined by dots, are the names of the
 * parameters. */
typedef int ckpt_ds_value_fn(void *ctx, const char *name, ckpt_pv v, struct ckpt_err *err);
int ckpt_ds_module_each(const struct ckpt_torch_file *f, const char *file, ckpt_ds_value_fn *fn,
                        void *ctx, struct ckpt_err *err);
