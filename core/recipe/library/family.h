/* SPDX-License-Identifier: Apache-2.0 */
/* Model files, which describe a Hugging Face model family for all frameworks: config keys, named
 * sizes, and its tensors in the order in which transformers saves them. */
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include "base/err.h"
#include "base/json.h"
#include "base/map.h"
#include "base/mem.h"
#include "recipe/language/expr.h"
#include "recipe/language/field.h"
#include "recipe/language/name.h"
#include "recipe/language/pattern.h"

enum { CKPT_FAMILY_DIMS = 64, CKPT_FAMILY_LOOPS = 4 };

struct ckpt_dim {
    const char *name;
    const struct ckpt_expr **expr; /* expressions, of which the first known one counts */
    size_t nexpr;
    const char *option; /* the config key that a user can give, or NULL */
};

struct ckpt_model_item;

struct ckpt_model_items {
    const struct ckpt_model_item *item;
    size_t n;
};

/* A tensor, or a group: for each value of its loop, if its condition holds, one of its lists. */
struct ckpt_model_item {
    /* of a tensor */
    const struct ckpt_scope *scope; /* NULL: it is a group */
    const struct ckpt_name *name;
    const char *text;
    struct ckpt_pattern shape;
    bool optional;
    /* of a group: loops nest, the outermost is number 0; a name's axes are loops by name */
    const char *loop; /* or NULL */
    bool block;
    const struct ckpt_expr *when; /* or NULL */
    const char *tied; /* if the condition is false, the list's tensors are copies of this tensor; or
                         NULL */
    const struct ckpt_model_items *list; /* several: the checkpoint fits one of them */
    size_t nlist;
};

struct ckpt_family {
    const char *name;        /* "models/llama" */
    struct ckpt_texts types; /* model_type values that this family describes */
    json_t *config;          /* fixed members of config.json; the family owns it */
    struct ckpt_texts needs;
    struct ckpt_map keys; /* every config key the file names */
    struct ckpt_dim dim[CKPT_FAMILY_DIMS];
    size_t ndim;
    struct ckpt_model_items tensors;
    bool given; /* the file is from the user's directory */
    bool open;  /* no list: the tensors are those of the checkpoint */
};

/* Parse text[0..len), or a parsed value, into the arena; `name` is used in errors.
 * ckpt_family_release releases the config. */
int ckpt_family_parse(struct ckpt_arena *arena, const char *name, const char *text, size_t len,
                      struct ckpt_family **ret, struct ckpt_err *err);
int ckpt_family_from_json(struct ckpt_arena *arena, const char *name, const json_t *j,
                          struct ckpt_family **ret, struct ckpt_err *err);
void ckpt_family_release(struct ckpt_family *f);

/* Does the model file name this size, this config key, or this model_type? */
bool ckpt_family_has_dim(const struct ckpt_family *f, const char *name);
bool ckpt_family_has_key(const struct ckpt_family *f, const char *key);
bool ckpt_family_has_type(const struct ckpt_family *f, const char *model_type);
