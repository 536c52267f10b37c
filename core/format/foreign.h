/* SPDX-License-Identifier: Apache-2.0 */
/* Formats that no reader reads, but whose names people will want to hear: what a folder holds, and
 * what to do with it. */
#pragma once

#include "base/err.h"
#include "io/dir.h"

/* For a folder in which no reader found a checkpoint: -1 and UNSUPPORTED if one of its entries
 * shows what it holds instead, else 0. */
int ckpt_foreign_check(const struct ckpt_dir *dir, struct ckpt_err *err);

/* For a tensor of a checkpoint that torch saved: -1 and UNSUPPORTED if its name is that of FSDP1's
 * flat parameters, else 0. */
int ckpt_foreign_tensor(const char *name, struct ckpt_err *err);
