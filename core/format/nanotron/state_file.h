/* SPDX-License-Identifier: Apache-2.0 */
/* One file of nanotron's optimizer states: a torch.save of
 *
 *     {"state": {NUMBER: {KEY: tensor}}, "names": {NUMBER: PARAMETER},
 *      "gradient_accumulator": {PARAMETER: tensor}, ...}
 *
 * Every tensor is located when the file is read, because that costs one read per tensor and files
 * are read in parallel. */
#pragma once

#include "base/vec.h"
#include "container/torch_file.h"

/* One tensor of the file; names are borrowed from its pickle. */
struct ckpt_nt_state {
    const char *param;
    const char *key; /* NULL: the tensor is the parameter in F32 */
    ckpt_pv value;
    struct ckpt_torch_tensor at;
    bool found; /* false: `at` is not set, and ckpt_torch_file_tensor says why */
};

struct ckpt_nt_state_file {
    struct ckpt_torch_file file;
    CKPT_VEC(struct ckpt_nt_state)
    states; /* values that are no tensors, or have no name, are
               left out */
};

/* Read the file `name`. Safe from many threads. *ret can be released after a failure too. */
int ckpt_nt_state_file_read(struct ckpt_dir *dir, const char *name, struct ckpt_fdpool *pool,
                            struct ckpt_nt_state_file *ret, struct ckpt_err *err);
void ckpt_nt_state_file_release(struct ckpt_nt_state_file *f);
