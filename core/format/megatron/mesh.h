/* SPDX-License-Identifier: Apache-2.0 */
/* The ranks of a legacy Megatron checkpoint: a directory each, mp_rank_TT[_PPP][_EEE] or NeMo's
 * tp_rank_TT_pp_rank_PPP, with one file in it; and the mesh of ranks that they form. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/vec.h"
#include "container/torch_file.h"
#include "format/megatron/load.h"
#include "format/reader.h"

struct ckpt_megatron_rank {
    const char *folder;
    char *path;
    uint64_t field[2]; /* the numbers after mp_rank_TT */
    uint32_t nfield;
    uint64_t tp, pp, ep;
    struct ckpt_torch_file file;
    uint32_t index; /* number of its source in the catalogue; set by the reader */
};

/* Set the first three members, which are borrowed, and all others to zero. */
struct ckpt_megatron_mesh {
    struct ckpt_dir *dir;
    const struct ckpt_reader_options *opt;
    struct ckpt_megatron_state *st;
    CKPT_VEC(struct ckpt_megatron_rank)
    ranks;                        /* sorted by pp, ep, tp after ckpt_megatron_mesh_place */
    uint64_t ntp, npp, nep, netp; /* sizes; netp: expert tensor parallelism */
};

/* Free the ranks with their pickles. */
void ckpt_megatron_mesh_release(struct ckpt_megatron_mesh *m);

/* Read the pickles of all ranks, and add the facts about the run to m->st. MISSING: there are none.
 */
int ckpt_megatron_mesh_read(struct ckpt_megatron_mesh *m, struct ckpt_err *err);

/* Assign coordinates to every rank, and check that no rank is missing. Files of ranks that the run
 * did not have are left out, with a warning in cat. */
int ckpt_megatron_mesh_place(struct ckpt_megatron_mesh *m, struct ckpt_catalog *cat,
                             struct ckpt_err *err);

/* The state dict in a rank's file: `model`, or `modelN` for virtual stage N. The value may be
 * another type than a dict. */
ckpt_pv ckpt_megatron_rank_model(const struct ckpt_megatron_rank *r, uint32_t stage, bool numbered);
