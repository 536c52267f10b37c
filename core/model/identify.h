/* SPDX-License-Identifier: Apache-2.0 */
/* Finding out what a checkpoint is, as far as its reader could not say it: LoRA tensors, and a
 * transformers model below a prefix, occur in checkpoints of any format. */
#ifndef CKPT_MODEL_IDENTIFY_H
#define CKPT_MODEL_IDENTIFY_H

#include "base/err.h"
#include "model/opening.h"

/* Set o->facts.names and, with lora=merge, o->adapter; leave in o->cat the tensors of the model (or
 * of the adapter) without the prefix of a trainer; then make o->decision. Called once, after
 * ckpt_opening_read. */
int ckpt_opening_identify(struct ckpt_opening *o, struct ckpt_err *err);

#endif
