/* SPDX-License-Identifier: Apache-2.0 */
/* Expressions of recipes and model files: where a config key comes from, when a rule holds.
 *
 *     not tie_word_embeddings        default(rope_theta, 10000.0)       each(i, num_hidden_layers,
 * (i + 1) % no_rope_layer != 0)
 *
 * Values are JSON's. Unknown is a value of its own (a missing key, null, a division by zero, a text
 * plus a number): most operators give unknown for unknown, but `false and unknown` is false and
 * `true or unknown` is true. contrib/RECIPES.md has the list. */
#pragma once

#include "base/err.h"
#include "base/json.h"
#include "base/mem.h"
#include "tensor/catalog.h"

struct ckpt_expr;

/* Parse `text` into the arena. `what` names it in errors. */
int ckpt_expr_parse(struct ckpt_arena *arena, const char *what, const char *text,
                    const struct ckpt_expr **ret, struct ckpt_err *err);

/* Parse the JSON that says where a config key comes from into the arena. Literals are added to
 * `keep`, an array that must live as long as the expression.
 *
 *     "rope_theta"                                 an expression over the framework's config
 *     ["num_query_groups", "num_attention_heads"]  the first that is known
 *     {"when": "x = 1", "is": ...}                 known only if the condition is true
 *     {"rope_theta": ..., "rope_type": ...}        an object of those members that are known
 *     1, true, null                                itself (null: the key is there and null) */
int ckpt_expr_from_json(struct ckpt_arena *arena, const char *what, const json_t *j, json_t *keep,
                        const struct ckpt_expr **ret, struct ckpt_err *err);

struct ckpt_expr_env {
    json_t *(*get)(void *ctx, const char *key); /* a new reference, or NULL: unknown */
    void *ctx;
    const struct ckpt_catalog *cat; /* for shape(), dtype(), layers(), has(); NULL: unknown */
};

/* Evaluate the expression to a new reference; NULL: unknown. */
json_t *ckpt_expr_eval(const struct ckpt_expr *e, const struct ckpt_expr_env *env);

enum ckpt_truth { CKPT_FALSE, CKPT_TRUE, CKPT_UNKNOWN };

/* The truth of a condition: false, 0, '' and empty lists are false. */
enum ckpt_truth ckpt_expr_truth(const struct ckpt_expr *e, const struct ckpt_expr_env *env);

/* Call fn for every key that the expression reads; stops where it returns -1. */
int ckpt_expr_keys(const struct ckpt_expr *e, int (*fn)(void *ctx, const char *key), void *ctx);

/* The key, if the expression is a single key; else NULL. */
const char *ckpt_expr_key(const struct ckpt_expr *e);
