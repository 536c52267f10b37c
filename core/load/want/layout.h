/* SPDX-License-Identifier: Apache-2.0 */
/* The wants of a layout such as "tp=2,pp=2". */
#pragma once

#include <stdint.h>

#include "load/want/want.h"
#include "run/checkpoint.h"

/* How many ranks a layout is for. USAGE: not a layout, or of too many ranks. */
int ckpt_layout_ranks(const char *layout, uint32_t *ret, struct ckpt_err *err);

/* The class of a rank: all ranks of a class have the same table of wants. USAGE: not a layout, or
 * not one of nrank ranks. */
int ckpt_layout_class(const char *layout, uint32_t rank, uint32_t nrank, uint32_t *ret,
                      struct ckpt_err *err);

/* Add to w the wants of a rank (ckpt_load_want_layout). On failure w may have some of them. */
int ckpt_layout_wants(const struct ckpt_view *view, const char *layout, uint32_t rank,
                      uint32_t nrank, struct ckpt_wants *w, struct ckpt_err *err);
