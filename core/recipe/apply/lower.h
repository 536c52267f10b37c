/* SPDX-License-Identifier: Apache-2.0 */
/* Converting an instance of a rule to pieces: the terms of its target are intersected with the
 * boxes of its sources. */
#pragma once

#include "recipe/apply/instance.h"

typedef CKPT_VEC(struct ckpt_piece_draft) ckpt_drafts;

/* Append the target's pieces to out. They cover every element of the target exactly once (checked).
 */
int ckpt_instance_lower(struct ckpt_instance *in, const uint64_t *dim, uint32_t rank,
                        ckpt_drafts *out, struct ckpt_err *err);

/* Free the scratch memory; everything else is borrowed. */
void ckpt_instance_release(struct ckpt_instance *in);
