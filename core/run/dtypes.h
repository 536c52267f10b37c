/* SPDX-License-Identifier: Apache-2.0 */
/* Which dtype a view gives a tensor. The first that speaks decides: the option `dtype=`; the
 * checkpoint's own mapping; the base's header for that name; the base's config where it says a type
 * of 16 bits and the tensor is a weight stored as F32 (a config alone never widens); the file. */
#ifndef CKPT_RUN_DTYPES_H
#define CKPT_RUN_DTYPES_H

#include <stdbool.h>

#include "base/json.h"
#include "recipe/types.h"
#include "run/base.h"
#include "run/options.h"
#include "tensor/catalog.h"

/* All borrowed. */
struct ckpt_dtypes {
    const struct ckpt_options *opt;
    const struct ckpt_base *base; /* or NULL */
    const json_t *mapping;    /* {tensor: safetensors' name} of the checkpoint itself; or NULL */
    const json_t *base_names; /* {tensor: its name in the base} where that differs; or NULL */
    const struct ckpt_texts *keeps;   /* ends of names whose dtype no cast changes; or NULL */
    const struct ckpt_texts *buffers; /* ends of names of buffers; or NULL */
    bool hf_names;                    /* the checkpoint's own names are those of the view */
};

/* What tensor t of the view shall be; its own dtype if nobody says, or if we cannot convert it. */
enum ckpt_dtype ckpt_dtypes_wanted(const struct ckpt_dtypes *d, const struct ckpt_tensor *t);

/* Is t a floating tensor that the checkpoint's mapping, although there is one, does not name, nor
 * the base? */
bool ckpt_dtypes_unknown(const struct ckpt_dtypes *d, const struct ckpt_tensor *t);

/* The rule of NeMo Automodel's export (its `_output_dtype`): `stored` in the shard, `mapped` in the
 * base (NULL: not known), `cast` asked for (NULL: nothing). */
enum ckpt_dtype ckpt_dtypes_export(enum ckpt_dtype stored, const enum ckpt_dtype *mapped,
                                   const enum ckpt_dtype *cast);

#endif
