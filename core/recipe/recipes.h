/* SPDX-License-Identifier: Apache-2.0 */
/* The set of recipes, and which of them fits a checkpoint. Inner face of recipe.h. */
#ifndef CKPT_RECIPE_RECIPES_H
#define CKPT_RECIPE_RECIPES_H

#include "base/mem.h"
#include "base/vec.h"
#include "recipe/file.h"
#include "recipe/files.h"
#include "recipe/recipe.h"
#include "recipe/types.h"

struct ckpt_recipes {
    struct ckpt_arena arena;
    CKPT_VEC(struct ckpt_recipe *) recipes;
    CKPT_VEC(struct ckpt_family *) families;
    struct ckpt_files files;             /* of the whole set; a folder's borrows them */
    struct ckpt_types *types;            /* NULL: of a folder, or of a recipe from memory */
    bool given;                          /* by path: the only candidate, whatever its evidence */
    struct ckpt_recipe_folders *folders; /* the embedded ones, each parsed when it is asked for */
};

/* The recipes for checkpoints of one format, parsed now if nobody has asked before; those of a
 * given recipe are that one. Safe from many threads; what is returned lives as long as the set. */
int ckpt_recipes_of(const struct ckpt_recipes *set, const char *format,
                    const struct ckpt_recipes **ret, struct ckpt_err *err);

/* All model files that recipes may name; of a given recipe, its own. */
int ckpt_recipes_models(const struct ckpt_recipes *set, const struct ckpt_recipes **ret,
                        struct ckpt_err *err);

/* Is the file of that name ("models/llama") of the user's directory? */
bool ckpt_recipes_has_given(const struct ckpt_recipes *set, const char *name);

/* As ckpt_recipes_load with a path, from memory: no files beside it, only the embedded ones. */
int ckpt_recipes_parse(const char *name, const char *text, size_t len, struct ckpt_recipes **ret,
                       struct ckpt_err *err);

/* The one recipe that fits. MISSING or CONFLICT. */
int ckpt_recipes_choose(const struct ckpt_recipes *set, const struct ckpt_catalog *src,
                        const struct ckpt_recipe_options *opt, const struct ckpt_recipe **ret,
                        struct ckpt_err *err);

/* A model file that no recipe need name, parsed into the arena; release it with
 * ckpt_family_release. */
int ckpt_model_file(const struct ckpt_recipes *set, struct ckpt_arena *arena, const char *model,
                    struct ckpt_family **ret, struct ckpt_err *err);

#endif
