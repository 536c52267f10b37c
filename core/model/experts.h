/* SPDX-License-Identifier: Apache-2.0 */
/* Finding, in a base, the experts' weights that transformers 5 holds as one parameter in memory. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"
#include "base/json.h"
#include "base/vec.h"
#include "recipe/library/types.h"
#include "tensor/catalog.h"

/* One parameter [count, rows, cols]: a tensor of the catalogue, or several matrices that form it
 * when concatenated. */
struct ckpt_experts {
    uint64_t count, rows, cols;
    CKPT_VEC(uint32_t) tensor; /* indices in the catalogue */
};

/* Free the list. */
void ckpt_experts_release(struct ckpt_experts *x);

/* The tensor of cat whose name in memory is `name`; base_names ({name in memory: name in the base},
 * may be NULL) translates names. SIZE_MAX: there is none. */
size_t ckpt_experts_tensor(const struct ckpt_catalog *cat, const json_t *base_names,
                           const char *name);

/* Find that parameter of `module` ("model.layers.0.mlp.experts") in one of the layouts that are
 * known for the type. *ret is zeroed by the caller, and must be released after a failure too.
 * MISSING: no layout fits. CONFLICT: the experts differ from each other. */
int ckpt_experts_find(const struct ckpt_catalog *cat, const struct ckpt_type *type,
                      const json_t *base_names, const char *module, const char *parameter,
                      struct ckpt_experts *ret, struct ckpt_err *err);

/* Is `name` a parameter that holds the experts of a layer in memory? */
bool ckpt_experts_is_fused(const struct ckpt_type *type, const char *name);
