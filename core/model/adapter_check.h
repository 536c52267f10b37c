/* SPDX-License-Identifier: Apache-2.0 */
/* Does an adapter do what its config says? One that changes nothing loads without an error
 * elsewhere, and the model is the base. */
#pragma once

#include <stdbool.h>

#include "base/err.h"
#include "base/json.h"
#include "model/base.h"
#include "recipe/library/types.h"
#include "tensor/catalog.h"

/* An adapter is compared with these facts. All are borrowed. */
struct ckpt_adapter_facts {
    const json_t *config;         /* adapter_config.json; NULL: it is not known */
    const struct ckpt_base *base; /* or NULL */
    const struct ckpt_type *type; /* the facts about the base's model type */
    bool allow_partial;           /* half a pair of matrices is a warning */
};

/* Check the tensors of an adapter, under PEFT's names. MISSING: it has no tensors, none of LoRA's
 * although the config says LoRA, or one matrix of a pair. CONFLICT: a tensor is empty, has another
 * rank than the config says or another shape than the base, or none of its modules is one that the
 * config targets. Modules that the config targets by name, that the base has, and that have no pair
 * of matrices, are a warning of cat. */
int ckpt_adapter_check(struct ckpt_catalog *cat, const struct ckpt_adapter_facts *f,
                       struct ckpt_err *err);
