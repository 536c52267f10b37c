/* SPDX-License-Identifier: Apache-2.0 */
/* nanotron's optimizer states (nanotron/serialize/optimizer.py):
 *
 *     optimizer/optimizer_pp-P-of-PP[_dp-D-of-DP]_tp-T-of-TP[_exp-E-of-EP].pt
 *
 * Each file holds, for the parameters of these ranks, tensors of the parameter's local shape, or
 * with ZeRO-1 (dp) of an interval of it (format/nanotron/slices.h). The parameter's own file says
 * which slice of the whole parameter that is. In the catalogue they are
 * optimizer.state.PARAMETER.KEY and optimizer.gradient_accumulator.PARAMETER (the parameters in
 * F32). */
#pragma once

#include "format/nanotron/shards.h"

/* Add all optimizer states of the save to the catalogue: of the parameters in `set`, which is of
 * this topology (0: any). Those that cannot be read are left out, with a warning. */
int ckpt_nt_states_add(const struct ckpt_nt_shards *set, const struct ckpt_nt_topology *t,
                       struct ckpt_catalog *cat, struct ckpt_err *err);
