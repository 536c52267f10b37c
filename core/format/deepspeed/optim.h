/* SPDX-License-Identifier: Apache-2.0 */
/* The content of one rank's optimizer file of DeepSpeed: flat partitions of masters and of moments.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"
#include "base/mem.h"
#include "base/vec.h"
#include "format/deepspeed/file.h"

/* A one-dimensional tensor. */
struct ckpt_ds_flat {
    enum ckpt_dtype dtype;
    uint64_t n, off;
};

struct ckpt_ds_moment {
    uint64_t group;
    const char *key; /* for example "exp_avg" */
    struct ckpt_ds_flat at;
};

struct ckpt_ds_group_step {
    uint64_t group;
    double step;
};

struct ckpt_ds_optim {
    struct ckpt_source *source;
    uint32_t index; /* number of the source in the catalogue, once added */
    struct ckpt_arena names;
    bool zero3; /* the file has fp32_flat_groups, which are divided parameter by parameter */
    CKPT_VEC(struct ckpt_ds_flat) master; /* one per group */
    CKPT_VEC(uint64_t) count; /* partition_count, one per group; with ZeRO 3 one for all */
    CKPT_VEC(struct ckpt_ds_moment) moment; /* tensors that seem to have the length of a group */
    CKPT_VEC(struct ckpt_ds_group_step) step;
    CKPT_VEC(uint64_t)
    padding; /* param_alignment_paddings of all groups in turn: n, then n numbers; empty: there are
                none */
    bool elastic; /* it has states in another form, that of elastic_checkpoint */
};

/* Read the file. states: read the moments too. */
int ckpt_ds_optim_read(struct ckpt_dir *dir, const char *name, struct ckpt_fdpool *pool,
                       bool states, struct ckpt_ds_optim *ret, struct ckpt_err *err);
void ckpt_ds_optim_release(struct ckpt_ds_optim *o);
