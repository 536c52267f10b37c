/* SPDX-License-Identifier: Apache-2.0 */
/* The options of a load. */
#pragma once

#include <ckptfs/load.h>

/* Copy the caller's options, whose struct may be older and shorter (NULL: none are given), and fill
 * in defaults. *to is zero-initialised. USAGE: the size or an option is out of range. */
int ckpt_load_take_options(struct ckpt_load_options *to, const struct ckpt_load_options *from,
                           struct ckpt_err *err);
