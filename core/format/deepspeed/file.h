/* SPDX-License-Identifier: Apache-2.0 */
/* What the torch.save files of a DeepSpeed tag say. */
#pragma once

#include "base/err.h"
#include "base/map.h"
#include "base/mem.h"
#include "base/vec.h"
#include "container/torch_file.h"

/* Does a file of the model list `name` as a buffer? */
bool ckpt_ds_is_buffer(const struct ckpt_torch_file *model, const char *name);
/* The parameter that this one is tied to, by shared_params of the model file; NULL: not tied. */
const char *ckpt_ds_owner(const struct ckpt_torch_file *model, const char *name);

/* Names from which the word of torch's checkpoint_wrapper was taken. */
struct ckpt_ds_unwrapped {
    struct ckpt_map by_name;         /* numbers of their originals */
    CKPT_VEC(const char *) original; /* with the wrapper */
};

/* Take the wrapper's word out of a model file's lists of parameters. The wrapper itself takes it
 * out of the names of a state dict, so that they would differ. Names are the file's. */
int ckpt_ds_file_unwrap(struct ckpt_torch_file *f, struct ckpt_ds_unwrapped *ret,
                        struct ckpt_err *err);
void ckpt_ds_unwrapped_release(struct ckpt_ds_unwrapped *u);
/* The name from which the wrapper's word was taken, or the name itself. */
const char *ckpt_ds_unwrapped_original(const struct ckpt_ds_unwrapped *u, const char *name);

/* Parse a tensor's size (a torch.Size, tuple or list of integers). */
int ckpt_ds_file_shape(struct ckpt_torch_file *f, ckpt_pv v, uint64_t *dim, uint32_t *ret_rank,
                       struct ckpt_err *err);

/* Get a member that is a non-negative integer; false: there is none. */
bool ckpt_ds_file_u64(const struct ckpt_torch_file *f, ckpt_pv dict, const char *key,
                      uint64_t *ret);
