/* SPDX-License-Identifier: Apache-2.0 */
/* File names of nanotron's weights (nanotron/serialize/utils.py):
 *
 *     model_LEAF.safetensors
 *     model_LEAF_pp-rank-P-of-PP_tp-rank-T-of-TP[_exp-rank-E-of-EP].safetensors
 *     model_model_LEAF.safetensors_pp-rank-P-of-PP_tp-rank-T-of-TP[_exp-rank-E-of-EP].safetensors
 *
 * The last form is that of the code of 2024-03-06 to 2024-04-25 (versions 1.2 and 1.3), for sharded
 * files only. It is read without the suffix at its end, too.
 */
#ifndef CKPT_CKPT_NANOTRON_NAME_H
#define CKPT_CKPT_NANOTRON_NAME_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct ckpt_nt_rank {
    uint32_t rank, size;
};

struct ckpt_nt_name {
    const char *leaf; /* points into the name */
    size_t leaf_len;
    bool sharded;
    bool has_ep;
    bool broken; /* the doubled form */
    struct ckpt_nt_rank pp, tp, ep;
};

/* False if it is no weight's file name. */
bool ckpt_nt_name_parse(const char *name, struct ckpt_nt_name *ret);

#endif
