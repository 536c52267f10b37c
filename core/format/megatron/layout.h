/* SPDX-License-Identifier: Apache-2.0 */
/* Which Megatron format a directory is of, and where its parts lie: Megatron's own layout, and
 * those that NeMo puts around it.
 *
 *     iter_0000010/                     metadata.json, or mp_rank_*, or a DCP's .metadata
 *     CKPT/weights/, CKPT/context/      NeMo 2
 *     CKPT/model_weights/               NeMo 1, unpacked; CKPT/model_config.yaml */
#pragma once

#include "base/err.h"
#include "io/dir.h"

enum ckpt_megatron_format {
    CKPT_MEGATRON_NONE,
    CKPT_MEGATRON_DIST,       /* torch_dist */
    CKPT_MEGATRON_ZARR,       /* zarr */
    CKPT_MEGATRON_RANKS,      /* torch: one file per rank */
    CKPT_MEGATRON_DCP,        /* torch_dcp, fsdp_dtensor */
    CKPT_MEGATRON_OTHER,      /* metadata.json names another back end */
    CKPT_MEGATRON_UNFINISHED, /* files of a format, but no metadata.json, so the save is not
                                 finished */
};

struct ckpt_megatron_layout {
    enum ckpt_megatron_format format;
    const char *below; /* folder of the weights: "", "weights" ... */
};

/* Recognise the layout. Reads names, metadata.json and the beginning of .metadata. */
struct ckpt_megatron_layout ckpt_megatron_layout_of(struct ckpt_dir *dir);

/* Open the part ("optimizer", "extra") of a save of verl whose weights are in another directory, if
 * it is there and finished; else *ret is NULL. */
int ckpt_megatron_beside(struct ckpt_dir *dir, const struct ckpt_megatron_layout *layout,
                         const char *part, struct ckpt_dir **ret, struct ckpt_err *err);
