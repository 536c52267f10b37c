/* SPDX-License-Identifier: Apache-2.0 */
/* The dtype of each tensor of a view. The first of these that names a dtype decides: the option
 * `dtype=`; the checkpoint's own mapping; the base's header for that tensor; the base's config, if
 * it states a 16-bit type and the tensor is a weight stored as F32 (a config alone never widens);
 * the stored dtype. */
#ifndef CKPT_MODEL_DTYPES_H
#define CKPT_MODEL_DTYPES_H

#include <stdbool.h>

#include "base/json.h"
#include "model/base.h"
#include "model/options.h"
#include "recipe/library/types.h"
#include "tensor/catalog.h"

/* The facts that decide. All are borrowed. */
struct ckpt_dtypes {
    const struct ckpt_options *opt;
    const struct ckpt_base *base; /* or NULL */
    const json_t *mapping; /* the checkpoint's own mapping {tensor: safetensors' name}; or NULL */
    const json_t *base_names;       /* {tensor: its name in the base} where that differs; or NULL */
    const struct ckpt_texts *keeps; /* suffixes of tensors that are never cast; or NULL */
    const struct ckpt_texts *buffers; /* suffixes of buffers; or NULL */
    bool hf_names;                    /* the stored names are those of the view */
};

/* The dtype of tensor t in the view; its stored dtype if nothing names another one, or if there is
 * no conversion to it. */
enum ckpt_dtype ckpt_dtypes_wanted(const struct ckpt_dtypes *d, const struct ckpt_tensor *t);

/* True if the checkpoint has a mapping, but neither it nor the base names the floating-point tensor
 * t. */
bool ckpt_dtypes_unknown(const struct ckpt_dtypes *d, const struct ckpt_tensor *t);

#endif
