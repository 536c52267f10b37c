/* SPDX-License-Identifier: Apache-2.0 */
/* Recipe files: one framework's tensors and config as one Hugging Face family. */
#pragma once

#include <stdbool.h>

#include "base/err.h"
#include "base/json.h"
#include "base/mem.h"
#include "base/regex.h"
#include "base/vec.h"
#include "recipe/language/expr.h"
#include "recipe/language/name.h"
#include "recipe/language/rule.h"
#include "recipe/library/family.h"
#include "recipe/library/files.h"

/* An entry of "has" or "lacks": all spellings of a tensor's name. */
struct ckpt_evidence_name {
    const char *text;
    const struct ckpt_name *name;
    uint32_t n;
};
typedef CKPT_VEC(struct ckpt_evidence_name) ckpt_evidence;

/* An entry of "refuse" or "warn": a text that is given if the condition is true. {key} in the text
 * is replaced by the key's value. */
struct ckpt_remark {
    const struct ckpt_expr *when;
    const char *why;
};

/* An entry of "prefixes", for models without a list: names that no rule uses begin with `to`
 * instead of `from`. Both have one number, written {l}, or none. */
struct ckpt_prefix {
    const struct ckpt_name *from, *to;
};

/* "ties": where the config ties word embeddings, the framework stores the model's tensor `original`
 * as `copy`, too, which a Hugging Face model lacks. */
struct ckpt_tie {
    const char *copy, *original;
};

/* "ignores": tensors of the checkpoint that the Hugging Face model has no place for, by a regular
 * expression that is searched in their names, and the reason, which the user is told. Of a recipe
 * that is read backwards: what it cannot make. */
struct ckpt_ignored {
    struct ckpt_regex *names;
    const char *text; /* the expression */
    const char *why;
};

/* "pipeline": a block of the framework's model, in the order of its modules: the beginning of its
 * tensors' names ("model.decoder.{layer}."), and what computing it costs. */
struct ckpt_pipeline_block {
    const struct ckpt_name *name; /* has a number: there is a block for each layer */
    const struct ckpt_expr *cost; /* NULL: nothing */
};

/* "fused": a tensor MODULE + PREFIX + x, where the model has no MODULE + "weight", is called ALONE
 * + x. Or, if a WITNESS is given: where it has no tensor that is called so in MODULE's place. */
struct ckpt_fused {
    const char *module, *prefix, *alone, *witness; /* witness may be NULL */
};

struct ckpt_config_key {
    const char *key;
    const struct ckpt_expr *origin;
};
typedef CKPT_VEC(struct ckpt_config_key) ckpt_config_keys;
typedef CKPT_VEC(struct ckpt_remark) ckpt_remarks;

struct ckpt_recipe {
    const char *name;   /* "nanotron/llama" */
    const char *format; /* format of the checkpoints; NULL: a fragment, for "include" only */
    const char *back;   /* the same file read backwards is a recipe for this format; or NULL */
    bool backwards;     /* it is read so: sources and targets have changed places */
    const char *model; /* name of its model file; NULL: the model file is inline, or the recipe only
                          refuses */
    json_t *inline_model; /* the model file itself, in the recipe; or NULL */
    const struct ckpt_family *family;
    CKPT_VEC(const struct ckpt_expr *)
    when;          /* conditions on the framework's config, all of which must hold */
    bool fallback; /* used only if no other recipe matches */
    bool given;    /* the file is the user's */
    struct ckpt_texts
        may_lack;      /* keys that the model needs but that some checkpoints do not record */
    ckpt_evidence has; /* read backwards: what the result must have */
    ckpt_evidence lacks;
    ckpt_config_keys config; /* read backwards: those that begin with '_' only */
    ckpt_config_keys makes;  /* read backwards: keys of the framework's config */
    CKPT_VEC(struct ckpt_pipeline_block) pipeline; /* read backwards */
    CKPT_VEC(struct ckpt_fused) fused;             /* read backwards */
    ckpt_remarks refuse, warn;
    ckpt_rules rules;
    CKPT_VEC(struct ckpt_ignored) ignores;
    CKPT_VEC(struct ckpt_prefix) prefixes; /* the first match counts */
    CKPT_VEC(struct ckpt_tie) ties;        /* read backwards only */
    json_t *keep;                          /* literals of the config */
    bool finished;                         /* its rules and all the rest are parsed, too */
    struct ckpt_arena *arena;              /* from here on: for ckpt_recipe_finish */
    struct ckpt_file file;
    struct ckpt_beside beside;
};

/* Parse of a recipe what it is chosen by: format, back, fallback, model, "when", "has" and "lacks".
 * Its includes are `beside` it, except for the model file, which the caller finds by ret->model,
 * and then sets ret->family. What `file` and `beside` point to stays until ckpt_recipe_finish.
 * backwards: sources and targets are exchanged, the format is ret->back, and the names in "has" and
 * "lacks" are evidence of what is made, not of what is read. */
int ckpt_recipe_begin(struct ckpt_arena *arena, const struct ckpt_file *file, bool backwards,
                      const struct ckpt_beside *beside, struct ckpt_recipe **ret,
                      struct ckpt_err *err);

/* Parse all the rest, unless that was done, and check the rules: every size whose name has two
 * letters or more must be one of the family's dims. Threads do not call this for one recipe at
 * once. */
int ckpt_recipe_finish(struct ckpt_recipe *r, struct ckpt_err *err);
void ckpt_recipe_release(struct ckpt_recipe *r);
