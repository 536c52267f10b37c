/* SPDX-License-Identifier: Apache-2.0 */
/* Universal checkpoints (deepspeed/checkpoint/ds_to_universal.py), which have a folder for each
 * parameter. */
#ifndef CKPT_FORMAT_DEEPSPEED_UNIVERSAL_H
#define CKPT_FORMAT_DEEPSPEED_UNIVERSAL_H

#include "format/deepspeed/pipe.h"
#include "format/deepspeed/zero.h"

/* Add the tensors of zero/NAME/fp32.pt, to be shown in the dtype of the copied module. Tensors that
 * the optimizer did not have (buffers, frozen parameters) are read from the module. nmp is the
 * number of tensor-parallel ranks whose model files were copied; the parameters are already whole.
 * If `pipe` is not NULL, there is no module, but the pipeline of which z is the first rank; names
 * are those of the model files, LL.NAME or tied_modules.KEY.NAME. */
int ckpt_ds_universal_read(struct ckpt_ds_zero *z, uint64_t nmp, const struct ckpt_ds_pipe *pipe,
                           struct ckpt_ds_parts *weights, struct ckpt_ds_parts *moments,
                           struct ckpt_err *err);

#endif
