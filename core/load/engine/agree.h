/* SPDX-License-Identifier: Apache-2.0 */
/* The ranks of a load agree on one plan. */
#pragma once

#include "load/load_inner.h"

/* COLLECTIVE. Agree on a plan; the result is the same on all ranks. The wants of all ranks are
 * exchanged unless parts.job_wants is there already (reload). rc and *err are the result of what
 * this rank did before: if it is negative on any rank, all ranks fail. */
int ckpt_load_agree(struct ckpt_load *load, int rc, struct ckpt_err *err);
