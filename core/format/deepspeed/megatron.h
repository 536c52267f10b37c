/* SPDX-License-Identifier: Apache-2.0 */
/* Models that Megatron-DeepSpeed trained, in DeepSpeed's files: their catalogue is that of a legacy
 * Megatron checkpoint, so that Megatron's recipes apply. The arguments of the run are in the model
 * files, and the parts of tensor-parallel ranks are not joined: only a recipe can do it. */
#ifndef CKPT_FORMAT_DEEPSPEED_MEGATRON_H
#define CKPT_FORMAT_DEEPSPEED_MEGATRON_H

#include "format/deepspeed/zero.h"
#include "format/megatron/state.h"

/* What the model file of the first rank says about the run. */
struct ckpt_ds_megatron {
    struct ckpt_megatron_state st;
    uint64_t tp, pp; /* sizes of tensor and pipeline parallelism */
};

/* Does the model file have Megatron's arguments and, unless it is a pipeline's, a model with
 * Megatron's names? */
bool ckpt_ds_megatron_is(const struct ckpt_ds_zero *z, bool pipeline);

/* Read the facts, and add them to the catalogue: its config and `about`. CONFLICT, MISSING: the
 * arguments say another number of ranks than there are files. */
int ckpt_ds_megatron_read(const struct ckpt_ds_zero *z, bool pipeline, struct ckpt_ds_megatron *ret,
                          struct ckpt_err *err);
/* Read the facts of a universal checkpoint, in which the ranks are joined already. UNSUPPORTED: it
 * is known that the conversion joined them wrongly. */
int ckpt_ds_megatron_read_joined(const struct ckpt_ds_zero *z, bool pipeline,
                                 struct ckpt_ds_megatron *ret, struct ckpt_err *err);
void ckpt_ds_megatron_release(struct ckpt_ds_megatron *m);

/* Add the tensors of m->tp ranks to the catalogue: names LL.NAME of a pipeline's layers, or a
 * module's names. */
int ckpt_ds_megatron_add(const struct ckpt_ds_job *job, const struct ckpt_ds_megatron *m,
                         bool pipeline, const struct ckpt_ds_parts *parts, struct ckpt_err *err);

#endif
