/* SPDX-License-Identifier: Apache-2.0 */
/* Where a config key comes from: the right-hand sides of a recipe's "config".
 *
 *     "rope_theta"                                 an expression over the framework's config
 *     ["num_query_groups", "num_attention_heads"]  the first that is known
 *     {"when": "x = 1", "is": ...}                 known only if the condition is true
 *     {"rope_theta": ..., "rope_type": ...}        an object of those members that are known
 *     1, true, null                                itself (null: the key is there and null) */
#ifndef CKPT_RECIPE_LIBRARY_ORIGIN_H
#define CKPT_RECIPE_LIBRARY_ORIGIN_H

#include <stddef.h>

#include "base/err.h"
#include "base/json.h"
#include "base/mem.h"
#include "recipe/language/expr.h"

struct ckpt_origin;

/* Parse j into the arena. Literals are added to `keep`, an array that must live as long as the
 * origin. */
int ckpt_origin_parse(struct ckpt_arena *arena, const char *where, const json_t *j, json_t *keep,
                      const struct ckpt_origin **ret, struct ckpt_err *err);

/* Evaluate the origin to a new reference; NULL: unknown. */
json_t *ckpt_origin_eval(const struct ckpt_origin *o, const struct ckpt_expr_env *env);

#endif
