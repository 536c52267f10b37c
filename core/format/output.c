/* SPDX-License-Identifier: Apache-2.0 */
/* The dimensions of a layout, by the names of their options. */
#include "format/output.h"

const char *const ckpt_output_keys[CKPT_NCUT] = {
    [CKPT_CUT_TP] = "tp",
    [CKPT_CUT_PP] = "pp",
    [CKPT_CUT_EP] = "ep",
    [CKPT_CUT_ETP] = "etp",
    [CKPT_CUT_VPP] = "vpp",
    [CKPT_CUT_RANKS] = "ranks",
    [CKPT_CUT_VOCAB] = "make_vocab_size_divisible_by",
};

uint32_t ckpt_output_parts(const struct ckpt_output *t, enum ckpt_cut_by cut)
{
    return t->cut[cut] ? t->cut[cut] : 1;
}
