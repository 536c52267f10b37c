/* SPDX-License-Identifier: Apache-2.0 */
/* A rule: source sides and target sides that share a scope of axes, checked so that every term has
 * one partner.
 *
 * One rule of a file becomes several of these where it has groups of words ({gate|up}). */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"
#include "base/vec.h"
#include "recipe/language/expr.h"
#include "recipe/language/name.h"
#include "recipe/language/pattern.h"
#include "tensor/value.h"

enum { CKPT_RULE_SIDES = 32, CKPT_RULE_WHENS = 8 };

struct ckpt_side {
    const char *text;             /* as written, prefix included */
    const struct ckpt_name *name; /* its spellings; a target has only one */
    uint32_t nname;
    struct ckpt_pattern pattern;
};

struct ckpt_rule {
    const char *where; /* "nanotron/dense.json: rules[2].rules[0]" */
    const struct ckpt_scope *scope;
    const struct ckpt_side *from, *to;
    uint32_t nfrom, nto;
    const struct ckpt_expr *when[CKPT_RULE_WHENS]; /* all must hold */
    uint32_t nwhen;
    /* operator that is applied to the gathered elements; or NULL */
    const struct ckpt_value_ops *value;
    const struct ckpt_expr *by; /* the number that the operator takes; or NULL */
};

typedef CKPT_VEC(struct ckpt_rule) ckpt_rules;

/* The context of a rule in its file. */
struct ckpt_rule_context {
    struct ckpt_arena *arena;
    const char *where;
    const char *from_at, *to_at; /* prefixes */
    const struct ckpt_expr *when[CKPT_RULE_WHENS];
    uint32_t nwhen;
    const struct ckpt_value_ops *value;
    const struct ckpt_expr *by;
    bool backwards; /* of a target's spellings the first is what is written */
};

/* Compile the sides (as in the file), and append the resulting rules to out. */
int ckpt_rule_parse(const struct ckpt_rule_context *cx, const char *const *from, uint32_t nfrom,
                    const char *const *to, uint32_t nto, ckpt_rules *out, struct ckpt_err *err);
