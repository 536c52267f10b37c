/* SPDX-License-Identifier: Apache-2.0 */
/* File names of nanotron's weights (nanotron/serialize/utils.py):
 *
 *     model_LEAF.safetensors
 *     model_LEAF_pp-rank-P-of-PP_tp-rank-T-of-TP[_exp-rank-E-of-EP].safetensors
 *     model_model_LEAF.safetensors_pp-rank-P-of-PP_tp-rank-T-of-TP[_exp-rank-E-of-EP].safetensors
 *
 * The last form was written by the code of 2024-03-06 to 2024-04-25 (versions 1.2 and 1.3), for
 * sharded files only. It is also accepted without the suffix at its end. */
#ifndef CKPT_CKPT_NANOTRON_NAME_H
#define CKPT_CKPT_NANOTRON_NAME_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct ckpt_nt_rank {
    uint32_t rank, size;
};

struct ckpt_nt_name {
    const char *leaf; /* a part of the name */
    size_t leaf_len;
    bool sharded;
    bool has_ep;
    bool broken; /* the name has the last form */
    struct ckpt_nt_rank pp, tp, ep;
};

/* Parse a name; false if it is not a weight's. */
bool ckpt_nt_name_parse(const char *name, struct ckpt_nt_name *ret);

#endif
