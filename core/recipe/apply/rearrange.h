/* SPDX-License-Identifier: Apache-2.0 */
/* Rearranging one tensor by a pair of axis patterns, without a recipe. */
#pragma once

#include "base/err.h"
#include "tensor/catalog.h"

/* Make *ret a rearrangement of t, a tensor over cat's sources: for example "e n g b" to "e g b n",
 * or "(e=4 r) h" to "e r h". Every element of t occurs once in *ret. *ret has t's name and is not
 * added to the catalogue, but its pieces are in the catalogue's memory. CONFLICT: the sizes do not
 * match. UNSUPPORTED: t is computed, or its pieces are not boxes. */
int ckpt_rearrange(struct ckpt_catalog *cat, const struct ckpt_tensor *t, const char *from,
                   const char *to, struct ckpt_tensor *ret, struct ckpt_err *err);
