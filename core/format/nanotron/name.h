/* SPDX-License-Identifier: Apache-2.0 */
/* File names of nanotron's weights (nanotron/serialize/utils.py):
 *
 *     model_LEAF.safetensors
 *     model_LEAF_pp-rank-P-of-PP_tp-rank-T-of-TP[_exp-rank-E-of-EP].safetensors
 *     model_model_LEAF.safetensors_pp-rank-P-of-PP_tp-rank-T-of-TP[_exp-rank-E-of-EP].safetensors
 *
 * The last form was written by the code of 2024-03-06 to 2024-04-25 (versions 1.2 and 1.3), for
 * sharded files only. It is also accepted without the suffix at its end. */
#pragma once

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

/* The number of ranks of each kind in a save. */
struct ckpt_nt_topology {
    uint32_t pp, tp, ep; /* ep 0: no file name has an expert rank */
};

/* Parse a name; false if it is not a weight's. */
bool ckpt_nt_name_parse(const char *name, struct ckpt_nt_name *ret);

/* Parse "_tp-rank-3-of-8", where the axis is "tp" and the separator "-rank-", and move *s past it.
 * False: the text is different, or the rank is not less than its size. */
bool ckpt_nt_take_rank(const char **s, const char *axis, const char *separator,
                       struct ckpt_nt_rank *ret);

/* The topology of the save that a sharded file belongs to, by its name. */
struct ckpt_nt_topology ckpt_nt_name_topology(const struct ckpt_nt_name *name);

/* Can both be of one save? A number that is 0 matches any, as that of files without an expert rank.
 */
bool ckpt_nt_topology_fits(const struct ckpt_nt_topology *a, const struct ckpt_nt_topology *b);
