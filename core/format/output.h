/* SPDX-License-Identifier: Apache-2.0 */
/* An output says how a view is laid out: as a Hugging Face model directory, or as a checkpoint of a
 * training framework, cut for so many ranks. It describes what is written only, never the
 * checkpoint that is read. */
#pragma once

#include <stdint.h>

struct ckpt_writer;

/* The dimensions of a layout, and the options of their names. */
enum ckpt_cut_by {
    CKPT_CUT_TP,
    CKPT_CUT_PP,
    CKPT_CUT_EP,
    CKPT_CUT_ETP,
    CKPT_CUT_VPP,
    CKPT_CUT_RANKS,
    CKPT_CUT_VOCAB, /* not a dimension: the number of the vocabulary's rows on each
                       tensor-parallel rank is a multiple of it */
    CKPT_CUT_BATCH, /* nor is this: samples of one training step */
    CKPT_NCUT,
};

enum { CKPT_CUT_MOST = 1 << 20 }; /* ranks along one dimension */

enum ckpt_output_names {
    CKPT_OUTPUT_NAMES_UNSAID, /* those of the hub */
    CKPT_OUTPUT_NAMES_HUB,
    CKPT_OUTPUT_NAMES_MEMORY, /* those that the model's class has in memory */
};

/* The parameters whose states a view with an optimizer has, where the framework's models fuse q, k
 * and v in memory, but save their weights apart. */
enum ckpt_output_fused {
    CKPT_OUTPUT_FUSED_UNSAID, /* those of the run, if that is the same framework's; else one of each
                                 weight */
    CKPT_OUTPUT_FUSED,        /* one of q, k and v */
    CKPT_OUTPUT_FUSED_NOT,    /* one of each weight */
};

/* All zero: a Hugging Face model directory. */
struct ckpt_output {
    const struct ckpt_writer *writer; /* of a framework's format; NULL: a model directory */
    uint32_t cut[CKPT_NCUT];          /* 0: not given */
    enum ckpt_output_names names;
    enum ckpt_output_fused fuse_qkv;
};

/* The number of parts along a dimension: 1 where the option was not given. */
uint32_t ckpt_output_parts(const struct ckpt_output *t, enum ckpt_cut_by cut);

extern const char *const ckpt_output_keys[CKPT_NCUT]; /* "tp" ... */
