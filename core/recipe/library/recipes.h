/* SPDX-License-Identifier: Apache-2.0 */
/* The set of recipes, and the choice of the one for a checkpoint. This is the internal part of
 * recipe.h. */
#pragma once

#include "base/mem.h"
#include "base/vec.h"
#include "recipe/library/file.h"
#include "recipe/library/files.h"
#include "recipe/library/recipe.h"
#include "recipe/library/types.h"

/* The recipes of one folder of files, parsed as far as they are chosen by (ckpt_recipe_begin), and
 * the model files that they name. */
struct ckpt_recipe_folder {
    struct ckpt_arena arena;
    CKPT_VEC(struct ckpt_recipe *) recipes;
    CKPT_VEC(struct ckpt_family *) families;
    bool parsed;
};

/* Get the recipes for checkpoints of one format, which are parsed at the first call; if a recipe
 * was given, that one. Safe from many threads; the result is valid as long as the set. */
int ckpt_recipes_of(const struct ckpt_recipes *set, const char *format,
                    const struct ckpt_recipe_folder **ret, struct ckpt_err *err);

/* Parse the rest of one of the set's recipes, if that was not done. Safe from many threads. */
int ckpt_recipes_finish(const struct ckpt_recipes *set, struct ckpt_recipe *r,
                        struct ckpt_err *err);

/* Get all model files; if a recipe was given, its own. */
int ckpt_recipes_models(const struct ckpt_recipes *set, const struct ckpt_recipe_folder **ret,
                        struct ckpt_err *err);

/* Find the model file that lists the tensors of a model_type; *ret is NULL if there is none. The
 * user's goes before the others. */
int ckpt_recipes_family(const struct ckpt_recipes *set, const char *model_type,
                        const struct ckpt_family **ret, struct ckpt_err *err);

/* Get models/common.json, which has names and sizes that most model types have in common. */
int ckpt_recipes_common(const struct ckpt_recipes *set, const struct ckpt_family **ret,
                        struct ckpt_err *err);

/* Load a recipe from memory, as ckpt_recipes_load does from a path; only embedded files can be
 * included. */
int ckpt_recipes_parse(const char *name, const char *text, size_t len, struct ckpt_recipes **ret,
                       struct ckpt_err *err);

/* Choose the only recipe that matches, and parse all of it. MISSING: none does. CONFLICT: several
 * do. */
int ckpt_recipes_choose(const struct ckpt_recipes *set, const struct ckpt_catalog *src,
                        const struct ckpt_recipe_options *opt, const struct ckpt_recipe **ret,
                        struct ckpt_err *err);

/* The first name in the recipe's "has" that no tensor of the catalogue has, as the recipe file
 * spells it; NULL: the catalogue has all of them. */
const char *ckpt_recipe_evidence_lacks(const struct ckpt_recipe *r, const struct ckpt_catalog *cat);
