/* SPDX-License-Identifier: Apache-2.0 */
/* The ranks of a legacy Megatron checkpoint: a directory each, mp_rank_TT[_PPP][_EEE] or NeMo's
 * tp_rank_TT_pp_rank_PPP, with one file in it; and the mesh that they are the places of. */
#ifndef CKPT_CKPT_MEGATRON_MESH_H
#define CKPT_CKPT_MEGATRON_MESH_H

#include <stdbool.h>
#include <stdint.h>

#include "base/vec.h"
#include "ckpt/megatron_state.h"
#include "ckpt/reader.h"
#include "container/torch.h"

struct ckpt_megatron_rank {
    char *folder, *path;
    uint64_t field[2]; /* the numbers behind mp_rank_TT */
    uint32_t nfield;
    uint64_t tp, pp, ep;
    struct ckpt_source *source;
    struct ckpt_torch torch;
    struct ckpt_pickle p;
    bool opened, parsed;
    uint32_t index; /* in the catalogue; the reader's */
};

/* Begin with the first three, borrowed, and all else zero. */
struct ckpt_megatron_mesh {
    struct ckpt_dir *dir;
    const struct ckpt_reader_options *opt;
    struct ckpt_megatron_state *st;
    CKPT_VEC(struct ckpt_megatron_rank) ranks; /* once placed: ascending by pp, ep, tp */
    uint64_t ntp, npp, nep, netp;              /* netp: tensor parallel of experts */
};

void ckpt_megatron_mesh_release(struct ckpt_megatron_mesh *m);

/* Read all ranks' pickles, and add to m->st what they say of the run. MISSING if there are none. */
int ckpt_megatron_mesh_read(struct ckpt_megatron_mesh *m, struct ckpt_err *err);

/* Give every rank its place, and check that all are there. Ranks that the run did not have are left
 * out, of which cat is told. */
int ckpt_megatron_mesh_place(struct ckpt_megatron_mesh *m, struct ckpt_catalog *cat,
                             struct ckpt_err *err);

/* The state dict in a rank's file: `model`, or `modelN` of virtual stage N. It may be no dict. */
ckpt_pv ckpt_megatron_rank_model(const struct ckpt_megatron_rank *r, uint32_t stage, bool numbered);

#endif
