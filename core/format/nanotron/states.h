/* SPDX-License-Identifier: Apache-2.0 */
/* nanotron's optimizer states (nanotron/serialize/optimizer.py):
 *
 *     optimizer/optimizer_pp-P-of-PP[_dp-D-of-DP]_tp-T-of-TP[_exp-E-of-EP].pt
 *
 * Each file holds, for the parameters of these ranks, tensors of the parameter's local shape, or
 * with ZeRO-1 (dp) of an interval of it (nanotron_zero.h). The parameter's own file says which
 * slice of the whole parameter that is. In the catalogue they are optimizer.state.PARAMETER.KEY and
 * optimizer.gradient_accumulator.PARAMETER (the parameters in F32). */
#ifndef CKPT_FORMAT_NANOTRON_STATES_H
#define CKPT_FORMAT_NANOTRON_STATES_H

#include "format/nanotron/slices.h"
#include "format/reader.h"

/* The part of a parameter that some ranks hold; borrowed. */
struct ckpt_nt_part {
    const uint64_t *dim, *local_dim;
    uint32_t rank;
    const struct ckpt_nt_pair *pair;
    size_t npair;
    bool sharded, has_ep;
};

typedef bool ckpt_nt_find(void *ctx, const char *param, uint32_t tp, uint32_t ep,
                          struct ckpt_nt_part *ret);

/* The save that the states belong to; all members are borrowed. */
struct ckpt_nt_save {
    struct ckpt_dir *dir;
    const struct ckpt_reader_options *opt;
    uint32_t npp, ntp;  /* numbers of ranks; 0: any */
    ckpt_nt_find *find; /* called with ctx */
    void *ctx;
};

/* Add all optimizer states of the save to the catalogue. Those that cannot be read are left out,
 * with a warning. */
int ckpt_nt_states_add(const struct ckpt_nt_save *save, struct ckpt_catalog *cat,
                       struct ckpt_err *err);

#endif
