/* SPDX-License-Identifier: Apache-2.0 */
/* One tensor rearranged by a pair of axis patterns, outside of any recipe. */
#ifndef CKPT_RECIPE_REARRANGE_H
#define CKPT_RECIPE_REARRANGE_H

#include "base/err.h"
#include "tensor/catalog.h"

/* *ret becomes t, a tensor over cat's sources, rearranged: "e n g b" to "e g b n", "(e=4 r) h" to
 * "e r h". Each element of t is one of *ret. It is not added to the catalogue, but its name is t's
 * and its pieces are the catalogue's. CONFLICT: the sizes do not fit. UNSUPPORTED: t is computed,
 * or its pieces are no boxes. */
int ckpt_rearrange(struct ckpt_catalog *cat, const struct ckpt_tensor *t, const char *from,
                   const char *to, struct ckpt_tensor *ret, struct ckpt_err *err);

#endif
