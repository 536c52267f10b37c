/* SPDX-License-Identifier: Apache-2.0 */
/* Recipe files: one framework's tensors and config as one Hugging Face family. */
#ifndef CKPT_RECIPE_FILE_H
#define CKPT_RECIPE_FILE_H

#include <stdbool.h>
#include <stddef.h>

#include "base/err.h"
#include "base/json.h"
#include "base/mem.h"
#include "base/regex.h"
#include "base/vec.h"
#include "recipe/expr.h"
#include "recipe/family.h"
#include "recipe/name.h"
#include "recipe/origin.h"
#include "recipe/rule.h"

/* "has" or "lacks": a tensor name, all spellings. */
struct ckpt_evidence_name {
    const char *text;
    const struct ckpt_name *name;
    uint32_t n;
};

/* "refuse" or "warn": a reason, given when the condition is true. {key} in the text is its value.
 */
struct ckpt_remark {
    const struct ckpt_expr *when;
    const char *why;
};

/* "prefixes" of a model without a list: names that no rule takes begin with `to` instead of `from`.
 */
struct ckpt_prefix {
    const char *from, *to;
};

/* "ignores": tensors of the checkpoint that the Hugging Face model has no place for, by a regular
 * expression that is searched in their names, and the reason, which the user is told. */
struct ckpt_ignored {
    struct ckpt_regex *names;
    const char *why;
};

struct ckpt_config_key {
    const char *key;
    const struct ckpt_origin *origin;
};

struct ckpt_recipe {
    const char *name;   /* "nanotron/llama" */
    const char *format; /* of the checkpoints; NULL: a fragment, for "include" only */
    const char *back;   /* the same file read backwards is a recipe for this format; or NULL */
    const char
        *model; /* name of its model file; NULL: it is inline, or the recipe can only refuse */
    json_t *inline_model; /* the model file itself, in the recipe; or NULL */
    const struct ckpt_family *family;
    CKPT_VEC(const struct ckpt_expr *) when; /* over the framework's config; all must hold */
    bool fallback;                           /* fits only where no other recipe does */
    bool given;                              /* it is of the user's directory */
    const char *const *may_lack; /* keys that the model needs, but some checkpoints do not say */
    size_t nmay_lack;
    CKPT_VEC(struct ckpt_evidence_name) has;
    CKPT_VEC(struct ckpt_evidence_name) lacks;
    CKPT_VEC(struct ckpt_config_key) config;
    CKPT_VEC(struct ckpt_remark) refuse;
    CKPT_VEC(struct ckpt_remark) warn;
    ckpt_rules rules;
    CKPT_VEC(struct ckpt_ignored) ignores;
    CKPT_VEC(struct ckpt_prefix) prefixes; /* the first that fits counts */
    json_t *keep;                          /* literals of the config */
};

/* How other files are found: the text of recipe or fragment `name`, beside the file that includes
 * it. *ret_free is what the caller frees afterwards, or NULL. */
struct ckpt_file_finder {
    int (*find)(void *ctx, const char *name, const char **ret_text, size_t *ret_len,
                char **ret_free, struct ckpt_err *err);
    void *ctx;
};

/* Parse text[0..len): everything but the model file, which the caller finds by ret->model; then
 * ckpt_recipe_check. `backwards`: sources and targets change places, the format is ret->back, and
 * nothing is evidence. */
int ckpt_recipe_parse(struct ckpt_arena *arena, const char *name, const char *text, size_t len,
                      bool backwards, const struct ckpt_file_finder *finder,
                      struct ckpt_recipe **ret, struct ckpt_err *err);
void ckpt_recipe_release(struct ckpt_recipe *r);

/* Set the family and check the rules against it: every size with a name of two letters is one of
 * its dims. */
int ckpt_recipe_set_family(struct ckpt_recipe *r, const struct ckpt_family *f,
                           struct ckpt_err *err);

#endif
