/* SPDX-License-Identifier: Apache-2.0 */
/* A file of torch.save that a writer adds to a view: a pickled object whose tensors are those of
 * the view. The writer pushes the object with `p`, and adds each record that the object names. */
#pragma once

#include "base/str.h"
#include "container/torch_out.h"
#include "format/writer.h"

struct ckpt_torch_records {
    struct ckpt_str pickle;                      /* of the object */
    struct ckpt_pickle_out p;                    /* writes to it */
    CKPT_VEC(const struct ckpt_tensor *) tensor; /* per record; NULL: it is empty */
    CKPT_VEC(uint64_t) nbytes;
};

/* The structure stays where it is until it is released. */
void ckpt_torch_records_init(struct ckpt_torch_records *r);
void ckpt_torch_records_release(struct ckpt_torch_records *r);

/* The tensor as it is pushed. */
struct ckpt_torch_out ckpt_torch_records_shape(const struct ckpt_tensor *t);

/* Add the record of a tensor, which outlives the view's files; NULL: an empty one. Its key is the
 * number of those before it. */
int ckpt_torch_records_add(struct ckpt_torch_records *r, const struct ckpt_tensor *t,
                           struct ckpt_err *err);

/* Add the file to the view. `folder` is that of the records in it: "archive/". */
int ckpt_torch_records_write(const struct ckpt_torch_records *r, const struct ckpt_writing *w,
                             const char *path, const char *folder, struct ckpt_err *err);
