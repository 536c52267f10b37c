/* SPDX-License-Identifier: Apache-2.0 */
/* The set of recipes, and the choice of the one for a checkpoint. This is the internal part of
 * recipe.h. */
#ifndef CKPT_RECIPE_LIBRARY_RECIPES_H
#define CKPT_RECIPE_LIBRARY_RECIPES_H

#include "base/mem.h"
#include "base/vec.h"
#include "recipe/library/file.h"
#include "recipe/library/files.h"
#include "recipe/library/recipe.h"
#include "recipe/library/types.h"

struct ckpt_recipes {
    struct ckpt_arena arena;
    CKPT_VEC(struct ckpt_recipe *) recipes;
    CKPT_VEC(struct ckpt_family *) families;
    struct ckpt_files files;  /* files of the whole set; a folder borrows them */
    struct ckpt_types *types; /* NULL for a folder, or for a recipe from memory */
    bool given; /* given by its path: the only candidate, without checking its conditions */
    struct ckpt_recipe_folders *folders; /* the embedded recipes, each parsed when it is needed */
};

/* Get the recipes for checkpoints of one format, which are parsed at the first call; if a recipe
 * was given, that one. Safe from many threads; the result is valid as long as the set. */
int ckpt_recipes_of(const struct ckpt_recipes *set, const char *format,
                    const struct ckpt_recipes **ret, struct ckpt_err *err);

/* Get all model files that recipes may name; if a recipe was given, its own. */
int ckpt_recipes_models(const struct ckpt_recipes *set, const struct ckpt_recipes **ret,
                        struct ckpt_err *err);

/* Is the file of that name ("models/llama") from the user's directory? */
bool ckpt_recipes_has_given(const struct ckpt_recipes *set, const char *name);

/* As ckpt_recipes_load with a path, but from memory, so that only embedded files can be included.
 */
int ckpt_recipes_parse(const char *name, const char *text, size_t len, struct ckpt_recipes **ret,
                       struct ckpt_err *err);

/* Choose the only recipe that matches. MISSING: none does. CONFLICT: several do. */
int ckpt_recipes_choose(const struct ckpt_recipes *set, const struct ckpt_catalog *src,
                        const struct ckpt_recipe_options *opt, const struct ckpt_recipe **ret,
                        struct ckpt_err *err);

/* The first name in the recipe's "has" that no tensor of the catalogue has, as the recipe file
 * spells it; NULL: the catalogue has all of them. */
const char *ckpt_recipe_evidence_lacks(const struct ckpt_recipe *r, const struct ckpt_catalog *cat);

/* Parse a model file, even one that no recipe names, into the arena; release it with
 * ckpt_family_release. */
int ckpt_model_file(const struct ckpt_recipes *set, struct ckpt_arena *arena, const char *model,
                    struct ckpt_family **ret, struct ckpt_err *err);

#endif
