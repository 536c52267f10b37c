/* SPDX-License-Identifier: Apache-2.0 */
/* Checking that a checkpoint fits its model. Formats that do not record the shapes of whole tensors
 * (HF-sharded DCP) give no sign if shards are missing; a comparison with the base and config.json
 * does. */
#ifndef CKPT_MODEL_CHECK_H
#define CKPT_MODEL_CHECK_H

#include <stdbool.h>

#include "base/err.h"
#include "base/json.h"
#include "model/base.h"
#include "recipe/library/types.h"
#include "tensor/catalog.h"

/* The arguments of a check. All are borrowed, and each but the type may be NULL. */
struct ckpt_check {
    const struct ckpt_type *type; /* facts about the model's type */
    const struct ckpt_base *base;
    const json_t *base_names; /* {tensor: its name in the base} where that differs */
    const json_t *config;     /* the checkpoint's config, or the one that it takes from the base */
    bool complete;            /* the format lists all tensors, so none can be missing unnoticed */
    bool allow_partial;       /* tensors that are certainly missing are not an error */
};

/* Compare the tensors of cat, which have Hugging Face's names. CONFLICT: shapes differ. MISSING:
 * cat lacks a tensor that the base has, although it has the same tensor of other layers or experts
 * (if the checkpoint is complete: any tensor that the base has). The text lists all differences. A
 * difference that may be intended is a warning of cat. */
int ckpt_check_model(const struct ckpt_check *c, struct ckpt_catalog *cat, struct ckpt_err *err);

#endif
