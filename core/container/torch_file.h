/* SPDX-License-Identifier: Apache-2.0 */
/* A torch.save file that is open for reading: its archive, and its pickle as data. */
#pragma once

#include "base/json.h"
#include "container/torch.h"
#include "io/dir.h"
#include "io/fdpool.h"

enum { CKPT_TORCH_MAX_PICKLE = 1 << 30 }; /* bytes */

/* All zero: nothing is open. */
struct ckpt_torch_file {
    struct ckpt_source *source;
    struct ckpt_torch archive;
    struct ckpt_pickle p;
};

/* Open a file below dir, whose name errors have; or the archive s, which is referenced. *ret is all
 * zero before, and can be released after a failure too. */
int ckpt_torch_file_open(struct ckpt_dir *dir, const char *name, struct ckpt_fdpool *pool,
                         struct ckpt_torch_file *ret, struct ckpt_err *err);
int ckpt_torch_file_read(struct ckpt_source *s, struct ckpt_torch_file *ret, struct ckpt_err *err);
void ckpt_torch_file_release(struct ckpt_torch_file *f);

/* Find out where tensor v of the file is stored. */
int ckpt_torch_file_tensor(const struct ckpt_torch_file *f, ckpt_pv v,
                           struct ckpt_torch_tensor *ret, struct ckpt_err *err);

/* UNSUPPORTED if the pickle asks for a call that only an attack needs ("os.system"). No function is
 * ever called here, but the pickle was made to call it where it is loaded with Python. */
int ckpt_torch_refuse_attack(const struct ckpt_pickle *p, struct ckpt_err *err);

/* Add the value of the archive s to the object `out` under a name, as container/pickle_value.h
 * writes values; or, if `leaves`, the members of the dict that it is, or that is
 * alone in the list that it is. STALE if the file changed since it was opened. */
int ckpt_torch_object(struct ckpt_source *s, const char *name, bool leaves, json_t *out,
                      struct ckpt_err *err);

/* Add the members of the dict in a file below dir; `prefix` as in ckpt_pickle_leaves. */
int ckpt_torch_objects_of(struct ckpt_dir *dir, const char *file, struct ckpt_fdpool *pool,
                          const char *prefix, json_t *out, struct ckpt_err *err);
