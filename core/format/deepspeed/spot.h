/* SPDX-License-Identifier: Apache-2.0 */
/* Checking by samples that masters and 16-bit weights are of one save: a master, rounded, is the
 * weight. */
#pragma once

#include "format/deepspeed/zero.h"

/* Compare up to a few hundred elements of every extent of those tensors of `masters` that are
 * parameters of z with the module's tensors. CONFLICT: they differ. */
int ckpt_ds_spot_check(const struct ckpt_ds_zero *z, ckpt_pv module,
                       const struct ckpt_ds_parts *masters, struct ckpt_err *err);

/* Is tensor `index` of `masters`, rounded, the tensor s of file f? Compares the first and the last
 * elements of every extent; *ret is true if nothing can be compared, too. */
int ckpt_ds_spot_same(const struct ckpt_ds_job *job, const struct ckpt_ds_parts *masters,
                      size_t index, const struct ckpt_torch_file *f,
                      const struct ckpt_torch_tensor *s, bool *ret, struct ckpt_err *err);

/* CONFLICT: it is not; the file's name is `file`. */
int ckpt_ds_spot_check_part(const struct ckpt_ds_job *job, const struct ckpt_torch_file *f,
                            const char *file, const struct ckpt_torch_tensor *s,
                            const struct ckpt_ds_parts *masters, size_t index,
                            struct ckpt_err *err);
