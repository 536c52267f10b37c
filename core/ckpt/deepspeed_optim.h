/* SPDX-License-Identifier: Apache-2.0 */
/* What one rank's optimizer file of DeepSpeed holds: flat partitions of masters and of moments. */
#ifndef CKPT_CKPT_DEEPSPEED_OPTIM_H
#define CKPT_CKPT_DEEPSPEED_OPTIM_H

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"
#include "base/mem.h"
#include "base/vec.h"
#include "ckpt/deepspeed_file.h"

/* A one-dimensional tensor. */
struct ckpt_ds_flat {
    enum ckpt_dtype dtype;
    uint64_t n, off;
};

struct ckpt_ds_moment {
    uint64_t group;
    const char *key; /* "exp_avg" */
    struct ckpt_ds_flat at;
};

struct ckpt_ds_group_step {
    uint64_t group;
    double step;
};

struct ckpt_ds_optim {
    struct ckpt_source *source;
    uint32_t index; /* in the catalogue, once it is there */
    struct ckpt_arena names;
    bool zero3;                             /* fp32_flat_groups: cut parameter by parameter */
    CKPT_VEC(struct ckpt_ds_flat) master;   /* by group */
    CKPT_VEC(uint64_t) count;               /* partition_count, by group; of zero3 one for all */
    CKPT_VEC(struct ckpt_ds_moment) moment; /* what has a group's length, as far as one can see */
    CKPT_VEC(struct ckpt_ds_group_step) step;
    CKPT_VEC(uint64_t)
    padding; /* param_alignment_paddings, all groups in turn: n, then n numbers;
                empty: there are none */
};

/* `states`: the moments too. */
int ckpt_ds_optim_read(struct ckpt_dir *dir, const char *name, struct ckpt_fdpool *pool,
                       bool states, struct ckpt_ds_optim *ret, struct ckpt_err *err);
void ckpt_ds_optim_release(struct ckpt_ds_optim *o);

#endif
