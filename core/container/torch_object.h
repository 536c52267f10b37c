/* SPDX-License-Identifier: Apache-2.0 */
/* Reading the values besides tensors in a torch.save archive: its pickle, as data. */
#ifndef CKPT_CONTAINER_TORCH_OBJECT_H
#define CKPT_CONTAINER_TORCH_OBJECT_H

#include "base/json.h"
#include "container/pickle.h"
#include "io/source.h"

enum { CKPT_TORCH_MAX_OBJECT = 256 * 1024 * 1024 }; /* bytes of its pickle */

/* The pickle of the archive s, for the caller to release. UNSUPPORTED:
 * it asks for a call that only an attack needs (nothing is ever called). */
int ckpt_torch_read(struct ckpt_source *s, struct ckpt_pickle *ret, struct ckpt_err *err);

/* Add its value to the object `out` under a name, as container/pickle_value.h writes values; or, if
 * `leaves`, the members of the dict that it is. STALE if the file changed since it was opened. */
int ckpt_torch_object(struct ckpt_source *s, const char *name, bool leaves, json_t *out,
                      struct ckpt_err *err);

#endif
