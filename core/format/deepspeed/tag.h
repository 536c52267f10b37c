/* SPDX-License-Identifier: Apache-2.0 */
/* The files of a DeepSpeed tag, with the names of deepspeed/runtime/engine.py, and the folders that
 * contain tags. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"
#include "base/vec.h"
#include "io/dir.h"

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
