/* SPDX-License-Identifier: Apache-2.0 */
/* The tensors of a DeepSpeed tag. */
#ifndef CKPT_FORMAT_DEEPSPEED_LOAD_H
#define CKPT_FORMAT_DEEPSPEED_LOAD_H

#include "format/deepspeed/zero.h"

/* Fill job->cat with the tensors of job->tag, and its `about` with the facts about the run. */
int ckpt_ds_load(const struct ckpt_ds_job *job, struct ckpt_err *err);

#endif
