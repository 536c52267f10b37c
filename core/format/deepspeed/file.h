/* SPDX-License-Identifier: Apache-2.0 */
/* These functions interpret the names and the content of the torch.save files of a DeepSpeed
 * tag. */
#pragma once

#include "base/err.h"
#include "base/map.h"
#include "base/mem.h"
#include "base/vec.h"
#include "container/torch_file.h"
#include "io/dir.h"

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

/* ---- the files of a tag ---- */

/* The files of a DeepSpeed tag, with the names of deepspeed/runtime/engine.py, and the folders that
 * contain tags. */

enum ckpt_ds_role {
    CKPT_DS_MODEL,       /* mp_rank_TT_model_states.pt */
    CKPT_DS_ZERO3_MODEL, /* zero_pp_rank_D_mp_rank_TT_model_states.pt */
    CKPT_DS_OPTIM,       /* [bf16_]zero_pp_rank_D_mp_rank_TT_optim_states.pt */
    CKPT_DS_LAYER,       /* layer_LL[-model_MM]-model_states.pt */
    CKPT_DS_EXPERT,      /* [layer_L_]expert_E_mp_rank_TT_model_states.pt */
    CKPT_DS_EXPERT_OPTIM /* expp_rank_X_mp_rank_TT_optim_states.pt */
};

struct ckpt_ds_file_name {
    enum ckpt_ds_role role;
    uint64_t dp; /* D, or X: the data-parallel rank, although the name says "pp_rank" */
    uint64_t mp; /* TT, or MM: the tensor-parallel rank, or the pipeline stage */
    uint64_t layer, expert;
    bool old_expert; /* the name has no layer: DeepSpeed before 0.5 */
};

struct ckpt_ds_entry {
    char *name;
    struct ckpt_ds_file_name is;
};

struct ckpt_ds_tag {
    CKPT_VEC(struct ckpt_ds_entry) files; /* sorted by role, mp, layer, expert, dp */
    bool universal;                       /* the folder zero/ exists, or tmp/ of a conversion */
};

/* List the files of the tag in `dir`. Only names are read. */
int ckpt_ds_tag_read(struct ckpt_dir *dir, struct ckpt_ds_tag *ret, struct ckpt_err *err);
/* Free the list. */
void ckpt_ds_tag_release(struct ckpt_ds_tag *t);

/* Find the first file with that role and these numbers; NULL: none. */
const struct ckpt_ds_entry *ckpt_ds_tag_find(const struct ckpt_ds_tag *t, enum ckpt_ds_role role,
                                             uint64_t mp, uint64_t dp);

/* The number of files with that role. The first of them, if the files are consecutive, is returned
 * too. */
size_t ckpt_ds_tag_count(const struct ckpt_ds_tag *t, enum ckpt_ds_role role,
                         const struct ckpt_ds_entry **ret_first);

/* Does the folder contain the files of a tag, or a universal checkpoint? */
bool ckpt_ds_is_tag(struct ckpt_dir *dir);

/* The content of the file `latest` or else `latest_universal`, as a new string. NULL: neither
 * exists, or the content is not a valid name of a folder. */
char *ckpt_ds_latest(struct ckpt_dir *run);
