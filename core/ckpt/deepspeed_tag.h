/* SPDX-License-Identifier: Apache-2.0 */
/* The files of a DeepSpeed tag, as deepspeed/runtime/engine.py names them, and where tags lie. */
#ifndef CKPT_CKPT_DEEPSPEED_TAG_H
#define CKPT_CKPT_DEEPSPEED_TAG_H

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
    uint64_t dp; /* D, or X: the data-parallel rank, whatever "pp_rank" says */
    uint64_t mp; /* TT, or MM: the tensor-parallel rank, or the pipeline stage */
    uint64_t layer, expert;
    bool old_expert; /* without a layer: DeepSpeed of before 0.5 */
};

/* False if it is no such file. */
bool ckpt_ds_file_name_parse(const char *name, struct ckpt_ds_file_name *ret);

struct ckpt_ds_entry {
    char *name;
    struct ckpt_ds_file_name is;
};

struct ckpt_ds_tag {
    CKPT_VEC(struct ckpt_ds_entry) files; /* by role, mp, layer, expert, dp */
    bool universal;                       /* zero/, or tmp/ of a conversion, lies there */
};

int ckpt_ds_tag_read(struct ckpt_dir *dir, struct ckpt_ds_tag *ret, struct ckpt_err *err);
void ckpt_ds_tag_release(struct ckpt_ds_tag *t);

/* The first file of that role with these numbers; NULL. */
const struct ckpt_ds_entry *ckpt_ds_tag_find(const struct ckpt_ds_tag *t, enum ckpt_ds_role role,
                                             uint64_t mp, uint64_t dp);

/* How many files have that role; the first of them, where they are neighbours. */
size_t ckpt_ds_tag_count(const struct ckpt_ds_tag *t, enum ckpt_ds_role role,
                         const struct ckpt_ds_entry **ret_first);

/* Does the folder hold the files of a tag, or a universal checkpoint? */
bool ckpt_ds_is_tag(struct ckpt_dir *dir);

/* What `latest` says, or, without it, `latest_universal`; new. NULL: there is neither, or it is no
 * name of a folder. */
char *ckpt_ds_latest(struct ckpt_dir *run);

#endif
