/* SPDX-License-Identifier: Apache-2.0 */
/* One file of nanotron's optimizer states: a torch.save of
 *
 *     {"state": {NUMBER: {KEY: tensor}}, "names": {NUMBER: PARAMETER},
 *      "gradient_accumulator": {PARAMETER: tensor}, ...}
 *
 * The position of each tensor's storage is found when the file is read, because that costs one read
 * per tensor and files are read in parallel. */
#ifndef CKPT_FORMAT_NANOTRON_STATE_FILE_H
#define CKPT_FORMAT_NANOTRON_STATE_FILE_H

#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "base/vec.h"
#include "container/pickle.h"
#include "container/torch.h"
#include "io/dir.h"
#include "io/fdpool.h"

struct ckpt_nt_state_file {
    struct ckpt_source *source;
    struct ckpt_torch torch;
    struct ckpt_pickle pickle;
    CKPT_VEC(uint64_t) storage; /* position of each tensor's storage, in the order of tensors */
};

/* One tensor of the file; all members are borrowed. */
struct ckpt_nt_state {
    const char *param;
    const char *key; /* NULL: the tensor is the parameter in F32 */
    ckpt_pv value;
    size_t at; /* number of tensors before this one */
};

typedef int ckpt_nt_state_fn(void *ctx, const struct ckpt_nt_state *s, struct ckpt_err *err);

/* Read the file `name`. Safe from many threads. *ret can be released after a failure too. */
int ckpt_nt_state_file_read(struct ckpt_dir *dir, const char *name, struct ckpt_fdpool *pool,
                            struct ckpt_nt_state_file *ret, struct ckpt_err *err);
void ckpt_nt_state_file_release(struct ckpt_nt_state_file *f);

/* Call fn for each tensor until it fails. Values that are not tensors, or that have no name, are
 * skipped. */
int ckpt_nt_state_file_each(const struct ckpt_nt_state_file *f, ckpt_nt_state_fn *fn, void *ctx,
                            struct ckpt_err *err);

/* Get the layout of a tensor in its storage, and the offset of the storage in the source. */
int ckpt_nt_state_layout(const struct ckpt_nt_state_file *f, const struct ckpt_nt_state *s,
                         struct ckpt_torch_layout *ret, uint64_t *ret_storage,
                         struct ckpt_err *err);

#endif
