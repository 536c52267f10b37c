/* SPDX-License-Identifier: Apache-2.0 */
/* The experts of DeepSpeed-MoE, each of which has a file, and their masters and moments, which are
 * partitioned over fewer ranks than those of the other parameters. */
#ifndef CKPT_FORMAT_DEEPSPEED_EXPERTS_H
#define CKPT_FORMAT_DEEPSPEED_EXPERTS_H

#include "format/deepspeed/zero.h"

/* Add the experts of the module z under the names in their files: masters and moments too if the
 * options ask for them and the optimizer's files, which z must have read before, are there.
 * MISSING: an expert that the model file counts. */
int ckpt_ds_experts_read(struct ckpt_ds_zero *z, struct ckpt_ds_parts *weights,
                         struct ckpt_ds_parts *moments, struct ckpt_err *err);

#endif
