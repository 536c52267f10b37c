/* SPDX-License-Identifier: Apache-2.0 */
/* Recipes: data files that map a framework's tensors to a Hugging Face model's, by pairs of axis
 * patterns.
 *
 * The notation and its rules are described in contrib/RECIPES.md. The recipes of the tree are
 * embedded at build time (core/recipe/data); a file or a directory can be given instead. */
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include "base/err.h"
#include "base/json.h"
#include "base/map.h"
#include "base/str.h"
#include "tensor/catalog.h"

struct ckpt_recipes;
struct ckpt_types;

/* Load the embedded recipes and model files, which are parsed when a checkpoint of their format is
 * first opened, once for all runs of the process; if `path` is a file, that recipe (JSON; a model
 * file that it names and that is not embedded must be in the same directory) is parsed now and is
 * the only candidate; if it is a directory, laid out as core/recipe/data, its files go before the
 * embedded ones, and replace those of the same name. Errors name file, rule and character.
 * Afterwards the set is immutable to its users and can be shared by threads. */
int ckpt_recipes_load(const char *path, struct ckpt_recipes **ret, struct ckpt_err *err);
void ckpt_recipes_free(struct ckpt_recipes *r);
CKPT_CLEANUP_BY(ckpt_recipes_free, struct ckpt_recipes)

/* Was a single recipe given as a file? */
bool ckpt_recipes_forced(const struct ckpt_recipes *r);

/* The facts about model types (recipe/library/types.h) of a loaded set. */
const struct ckpt_types *ckpt_recipes_types(const struct ckpt_recipes *r);

/* The checkpoint that is made of a model, by a recipe that is read backwards. */
struct ckpt_recipe_output {
    const char *view;     /* the word of the option view */
    uint32_t tp, pp;      /* the number of ranks */
    uint64_t pad_to;      /* dimensions that may be padded are multiples of this */
    bool fuse_qkv;        /* the tensors are an optimizer's, of parameters that have q, k and v */
    const json_t *config; /* the framework's config of the checkpoint that is read, if that is of
                             the same framework; or NULL */
};

struct ckpt_recipe_options {
    const json_t *base_config; /* config.json of the base model, or NULL */
    const json_t *overrides;   /* options in the HF config's spelling ({"num_attention_heads": 4}),
                                  and the recipes' own `_x` names
                                  ({"_rope": "interleaved"}); an object or NULL */
    const char *format;        /* choose among the recipes of this format; NULL: the checkpoint's */
    bool back;                 /* the recipe is read backwards */
    const struct ckpt_recipe_output *output; /* read backwards: what is made; NULL: names only */
    bool
        allow_partial; /* leave out tensors of which a source is missing, with a warning for each */
    bool allow_missing;  /* the same without a word: the caller has them */
    bool allow_leftover; /* leave out tensors that the model does not have, with a warning */
    bool layout_only;    /* the tensors are no weights: leave out the rules' arithmetic */
};

/* A Hugging Face model, the result of a recipe. */
struct ckpt_model {
    struct ckpt_catalog
        *catalog;   /* HF names, in the order of the model's state dict; shares the sources */
    json_t *config; /* config.json's members, without dtype ones that depend on the view
                       (torch_dtype, dtype) */
    json_t *made;   /* read backwards: the framework's config, or NULL */
    char *recipe;   /* "nanotron/llama": which recipe was used */
};

/* Free the model with its catalogue; the second form is for ckpt_cleanup. */
void ckpt_model_free(struct ckpt_model *m);
CKPT_CLEANUP_BY(ckpt_model_free, struct ckpt_model)

/* Does any recipe match src? For a family without recipes, "no" is a normal answer and not an
 * error. */
int ckpt_recipe_fits(const struct ckpt_recipes *r, const struct ckpt_catalog *src,
                     const struct ckpt_recipe_options *opt, bool *ret, struct ckpt_err *err);

/* Choose the recipe for src (by src->about.format, config, names) and apply it. MISSING: no recipe
 * fits, or a tensor or number that the model must have is not there; CONFLICT: several fit (they
 * are listed), or src holds tensors that the model does not have (see recipe/apply/leftover.h);
 * UNSUPPORTED: the recipe refuses it and says why. src may be freed afterwards. */
int ckpt_recipe_apply(const struct ckpt_recipes *r, const struct ckpt_catalog *src,
                      const struct ckpt_recipe_options *opt, struct ckpt_model **ret,
                      struct ckpt_err *err);

/* Explain target tensor `name` as a new JSON object {"recipe", "rule", "sources": [{"tensor",
 * "pattern"}...]}. */
int ckpt_recipe_explain(const struct ckpt_recipes *r, const struct ckpt_catalog *src,
                        const struct ckpt_recipe_options *opt, const char *name, json_t **ret,
                        struct ckpt_err *err);

/* Which facts about a model are lost in a framework's checkpoint that was made of it? Append to
 * `out` the keys of config.json that would change, or be missing, if the checkpoint
 * `made` were read as a Hugging Face model again: "eos_token_id, use_cache". `format` is that of
 * the recipes. Keys that say nothing about the model (the version of transformers) do not count,
 * nor does the dtype, which the tensors have. */
int ckpt_recipe_lost(const struct ckpt_recipes *set, const struct ckpt_model *made,
                     const json_t *config, const char *format, struct ckpt_str *out,
                     struct ckpt_err *err);

/* Where a model under the hub's names contradicts its config: tensors that it lacks, and tensors of
 * another shape. The measure of the first is what transformers' from_pretrained reports as missing:
 * model files list what it needs, and mark as optional what it can do without. */
struct ckpt_lacks {
    size_t n;               /* the number of missing tensors */
    struct ckpt_str names;  /* the first of them: "'a', 'b', 'c', ..." */
    const char *unchecked;  /* why nothing can be said of missing tensors, a static text; NULL: they
                               were counted */
    size_t nshape;          /* the number of tensors of another shape than the list gives them */
    struct ckpt_str shapes; /* the first of them: "'a' in 'FILE' is [8], not [16]; ..." */
    bool listed;    /* there is a list of the type's tensors, and they were compared with it */
    bool none;      /* there is a list, and none of its names is among the tensors, in whole or in
                       part */
    bool own_class; /* the class that config.json names is none of transformers' for the type */
    bool quantized; /* given by the caller: only vectors keep their shape, and names may differ */
    bool related;   /* used while names are compared: it has them below other prefixes */
    bool behind;    /* the same: those prefixes come before the whole of the listed names */
    struct ckpt_map *tails; /* used while names are compared; or NULL */
};

/* Release the names. */
void ckpt_lacks_release(struct ckpt_lacks *l);

/* Count tensor t as one of another shape than want[0..rank). */
int ckpt_lacks_add_shape(struct ckpt_lacks *l, const struct ckpt_tensor *t, const uint64_t *want,
                         uint32_t rank, struct ckpt_err *err);

/* Append "'NAME' in 'FILE' is [SHAPE]"; the file is left out where the tensor has no bytes. NOMEM.
 */
int ckpt_lacks_put_tensor(struct ckpt_str *out, const struct ckpt_tensor *t, struct ckpt_err *err);

/* Compare the tensors of cat with the model file of the config's model_type. All of *ret but what
 * the caller gives is zero before; the caller releases it, on failure too. -1: out of memory, or a
 * model file is wrong. */
int ckpt_recipe_lacks(const struct ckpt_recipes *set, const struct ckpt_catalog *cat,
                      const json_t *config, struct ckpt_lacks *ret, struct ckpt_err *err);
