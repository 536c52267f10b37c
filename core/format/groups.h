/* SPDX-License-Identifier: Apache-2.0 */
/* An optimizer's groups of parameters and their hyper-parameters, in one form for all formats:
 *
 *     [{"params": ["layers.0.weight"], "lr": 0.001, "betas": [0.9, 0.95], "eps": 1e-08,
 *       "weight_decay": 0.1, "step": 20, "initial_lr": 0.002, "amsgrad": false, ...}]
 *
 * A member that the run does not state is absent. "params" are parameters as ckpt_state.parameter
 * calls them; without it, "vectors" says that a group has those of one dimension and biases (true),
 * or all others (false); without both, nothing says which parameters a group has. "wd_mult" is a
 * reader's own. */
#pragma once

#include <stdbool.h>

#include "base/err.h"
#include "base/json.h"
#include "io/dir.h"
#include "io/source.h"

/* The hyper-parameters of a group. The last two are a scheduler's, which not all have: the highest
 * learning rate, and the lowest one, which may be null. */
enum ckpt_hyper {
    CKPT_HYPER_LR,
    CKPT_HYPER_BETAS,
    CKPT_HYPER_EPS,
    CKPT_HYPER_DECAY,
    CKPT_HYPER_INITIAL_LR,
    CKPT_HYPER_MIN_LR,
    CKPT_NHYPER
};
/* The key of each. */
extern const char *const ckpt_hyper_keys[CKPT_NHYPER];

/* Further members of a group of torch's AdamW that say how it computes; the default of each is
 * null, false or true. */
struct ckpt_hyper_flag {
    const char *key;
    bool is_null, is_true;
};
/* They end with a key that is NULL. */
extern const struct ckpt_hyper_flag ckpt_hyper_flags[];

/* Add to the array `out` the groups among the values of a checkpoint (ckpt_reader.objects), whose
 * names are those of state dicts, nested or flattened:
 *
 *     [PREFIX.]param_groups.0.lr        [PREFIX.]param_groups.layers.0.weight.lr
 */
int ckpt_groups_of_torch(const json_t *objects, json_t *out, struct ckpt_err *err);

/* Add the groups in a file of torch.save, by the names of its values; with the step that the state
 * dict with the groups says, if all that it says agree. */
int ckpt_groups_of_file(struct ckpt_dir *dir, const char *file, struct ckpt_fdpool *pool,
                        json_t *out, struct ckpt_err *err);

/* Read a file of torch.save whose only value is a number of steps: a number, or a tensor of one
 * F32. *ret is new. UNSUPPORTED: it is something else. */
int ckpt_groups_step_of_file(struct ckpt_dir *dir, const char *file, struct ckpt_fdpool *pool,
                             json_t **ret, struct ckpt_err *err);

/* Are the groups alike but for their parameters? */
bool ckpt_groups_alike(const json_t *a, const json_t *b);
