/* SPDX-License-Identifier: Apache-2.0 */
/* The tree of an expression, for its parser and its evaluator. */
#pragma once

#include <stdint.h>

#include "base/json.h"
#include "recipe/language/name.h"

enum ckpt_expr_op {
    CKPT_OP_INT,
    CKPT_OP_REAL,
    CKPT_OP_TEXT,
    CKPT_OP_TRUE,
    CKPT_OP_FALSE,
    CKPT_OP_NULL,
    CKPT_OP_KEY,
    CKPT_OP_OR,
    CKPT_OP_AND,
    CKPT_OP_NOT,
    CKPT_OP_NEGATE,
    CKPT_OP_ADD,
    CKPT_OP_SUB,
    CKPT_OP_MUL,
    CKPT_OP_DIV,
    CKPT_OP_MOD,
    CKPT_OP_EQ,
    CKPT_OP_NE,
    CKPT_OP_LT,
    CKPT_OP_LE,
    CKPT_OP_GT,
    CKPT_OP_GE,
    CKPT_OP_IN,
    CKPT_OP_CALL,
    CKPT_OP_LITERAL, /* these two are written as JSON only */
    CKPT_OP_OBJECT,
};

enum ckpt_expr_call {
    CKPT_CALL_SHAPE,
    CKPT_CALL_DTYPE,
    CKPT_CALL_LAYERS,
    CKPT_CALL_HAS,
    CKPT_CALL_FLOAT,
    CKPT_CALL_INT,
    CKPT_CALL_KNOWN,
    CKPT_CALL_DEFAULT,
    CKPT_CALL_IF,
    CKPT_CALL_EACH,
    CKPT_CALL_WHERE,
    CKPT_CALL_LEN,
    CKPT_CALL_JOIN,
    CKPT_CALL_CONTAINS,
    CKPT_CALL_AT,
    CKPT_CALL_PART,
    CKPT_CALL_SQRT,
    CKPT_CALL_ROUNDED,
};

struct ckpt_expr {
    enum ckpt_expr_op op;
    enum ckpt_expr_call call;
    uint32_t narg;
    const struct ckpt_expr **args;
    const char **key; /* the members of an object */
    json_t *literal;
    const char *text; /* CKPT_OP_TEXT, CKPT_OP_KEY, the word of each/where */
    json_int_t i;
    double r;
    const struct ckpt_name *name; /* of calls on tensors: all spellings */
    uint32_t nname;
};
