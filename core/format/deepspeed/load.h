/* SPDX-License-Identifier: Apache-2.0 */
/* Loading the tensors of a DeepSpeed tag: all of them, and those of one layout. */
#pragma once

#include "format/deepspeed/pipe.h"
#include "format/deepspeed/zero.h"

/* Fill job->cat with the tensors of job->tag, and its `about` with the facts about the run. */
int ckpt_ds_load(const struct ckpt_ds_job *job, struct ckpt_err *err);

/* ---- experts of DeepSpeed-MoE, each of which has a file; their masters and moments are
 * partitioned over fewer ranks than those of the other parameters ---- */

/* Add the experts of the module z under the names in their files: masters and moments too if the
 * options ask for them and the optimizer's files, which z must have read before, are there.
 * MISSING: an expert that the model file counts. */
int ckpt_ds_experts_read(struct ckpt_ds_zero *z, struct ckpt_ds_parts *weights,
                         struct ckpt_ds_parts *moments, struct ckpt_err *err);

/* ---- tensor-parallel ranks (DeepSpeed's AutoTP) ---- */

/* Join parts[0..n) of the n ranks into whole tensors, by the rules in rank 0's model file
 * (universal_checkpoint_info), and add them to the catalogue. Order and names are those of rank 0.
 */
int ckpt_ds_tp_join(const struct ckpt_ds_zero *rank0, const struct ckpt_ds_parts *parts, uint64_t n,
                    struct ckpt_catalog *cat, struct ckpt_err *err);

/* ---- universal checkpoints (deepspeed/checkpoint/ds_to_universal.py), which have a folder for
 * each parameter ---- */

/* Add the tensors of zero/NAME/fp32.pt, to be shown in the dtype of the copied module. Tensors that
 * the optimizer did not have (buffers, frozen parameters) are read from the module. nmp is the
 * number of tensor-parallel ranks whose model files were copied; the parameters are already whole.
 * If `pipe` is not NULL, there is no module, but the pipeline of which z is the first rank; names
 * are those of the model files, LL.NAME or tied_modules.KEY.NAME. */
int ckpt_ds_universal_read(struct ckpt_ds_zero *z, uint64_t nmp, const struct ckpt_ds_pipe *pipe,
                           struct ckpt_ds_parts *weights, struct ckpt_ds_parts *moments,
                           struct ckpt_err *err);
