/* SPDX-License-Identifier: Apache-2.0 */
/* Does a checkpoint fit the model that it is said to be? Formats that write no shape of a whole
 * tensor (HF-sharded DCP) lose shards without a trace; the base and config.json know better. */
#ifndef CKPT_RUN_CHECK_H
#define CKPT_RUN_CHECK_H

#include <stdbool.h>

#include "base/err.h"
#include "base/json.h"
#include "recipe/types.h"
#include "run/base.h"
#include "tensor/catalog.h"

/* All borrowed; each may be NULL but the type. */
struct ckpt_check {
    const struct ckpt_type *type; /* what is known of the model's type */
    const struct ckpt_base *base;
    const json_t *base_names; /* {tensor: its name in the base} where that differs */
    const json_t *config;     /* the checkpoint's own, or what it borrows */
    bool complete;            /* the format says which tensors there are: none can be lost */
    bool allow_partial;       /* tensors that are surely lost are no error */
};

/* Compare the tensors of cat, which has Hugging Face's names. CONFLICT if shapes differ, MISSING if
 * the base has a tensor that cat lacks while it has the same one of other layers or experts, or any
 * if the checkpoint is complete; both with all that differs in one text. What may well be right is
 * added to `warnings`. */
int ckpt_check_model(const struct ckpt_check *c, const struct ckpt_catalog *cat, json_t *warnings,
                     struct ckpt_err *err);

#endif
