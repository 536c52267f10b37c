/* SPDX-License-Identifier: Apache-2.0 */
/* Where a base keeps the experts' weights that transformers 5 holds as one parameter in memory. */
#ifndef CKPT_RUN_EXPERTS_H
#define CKPT_RUN_EXPERTS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"
#include "base/json.h"
#include "base/vec.h"
#include "recipe/types.h"
#include "tensor/catalog.h"

/* One parameter [count, rows, cols]: a tensor of the catalogue, or matrices that are it end to end.
 */
struct ckpt_experts {
    uint64_t count, rows, cols;
    CKPT_VEC(uint32_t) tensor; /* indices in the catalogue */
};

void ckpt_experts_release(struct ckpt_experts *x);

/* The tensor of cat that is `name` in memory, also under the base's own name ({name in memory: name
 * in the base}, may be NULL); SIZE_MAX if there is none. */
size_t ckpt_experts_tensor(const struct ckpt_catalog *cat, const json_t *base_names,
                           const char *name);

/* The parameter of that name of `module` ("model.layers.0.mlp.experts"), in the layouts that are
 * known of the type. Zeroed before; release after failure too. MISSING: it is in none of them;
 * CONFLICT: experts differ. */
int ckpt_experts_find(const struct ckpt_catalog *cat, const struct ckpt_type *type,
                      const json_t *base_names, const char *module, const char *parameter,
                      struct ckpt_experts *ret, struct ckpt_err *err);

/* Is it the name of a parameter that holds a layer's experts in memory? */
bool ckpt_experts_is_fused(const struct ckpt_type *type, const char *name);

#endif
