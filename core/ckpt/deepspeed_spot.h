/* SPDX-License-Identifier: Apache-2.0 */
/* Are masters and 16-bit weights of one save? A master that is rounded is the weight. */
#ifndef CKPT_CKPT_DEEPSPEED_SPOT_H
#define CKPT_CKPT_DEEPSPEED_SPOT_H

#include "ckpt/deepspeed_zero.h"

/* Compare a few elements of the masters, the tensors of `masters` that z has parameters for, with
 * those of the module: of every extent, up to a few hundred of them. CONFLICT: they differ. */
int ckpt_ds_spot_check(const struct ckpt_ds_zero *z, ckpt_pv module,
                       const struct ckpt_ds_parts *masters, struct ckpt_err *err);

/* One tensor: elements [at, at + n) of a master, in `source` from byte `off` on, and of the
 * module's own tensor of that name. False: they differ. */
struct ckpt_ds_spot {
    struct ckpt_source *source;
    enum ckpt_dtype dtype;
    uint64_t off, at, n;
};
int ckpt_ds_spot_same(const struct ckpt_ds_file *f, const struct ckpt_ds_stored *s,
                      const struct ckpt_ds_spot *spot, bool *ret, struct ckpt_err *err);

#endif
