/* SPDX-License-Identifier: Apache-2.0 */
/* The settings that a recipe derives from a checkpoint's config: the Hugging Face config, the
 * recipe's own `_x` values and the dims.
 *
 * Conditions and origins read keys in two ways. Before the HF config is there (the recipe's `when`,
 * `config`): `_x`, then the framework's config. After (rules, refuse, warn, the model file): `_x`,
 * the HF config, the dims, then the framework's config. `about.x` is a fact of the reader and
 * option.x what the user gave, in both. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"
#include "base/json.h"
#include "recipe/library/file.h"
#include "recipe/library/recipe.h"
#include "tensor/catalog.h"

struct ckpt_settings {
    const struct ckpt_catalog *src;
    const struct ckpt_family *family;
    const json_t *framework; /* the framework's config: the source's, or the one that is made */
    const json_t *source;    /* read backwards: the framework's config of what is read, or NULL */
    const json_t *overrides;
    const char *type; /* `_model_type`: the family that the user or the base names, or NULL */
    json_t *hf;
    json_t *own;  /* `_x` */
    json_t *made; /* read backwards: the framework's config */
    uint64_t dim[CKPT_FAMILY_DIMS];
    bool known[CKPT_FAMILY_DIMS];
    size_t ndim; /* computed so far */
};

/* The model type in the options. */
const char *ckpt_settings_type(const struct ckpt_recipe_options *opt);

/* Environments; ctx is the settings. */
json_t *ckpt_settings_before(void *ctx, const char *key);
json_t *ckpt_settings_after(void *ctx, const char *key);

/* Compute only config and dims, without remarks and checks of needed keys. *s is zeroed by the
 * caller, and must be released after a failure too. */
int ckpt_settings_draft(struct ckpt_settings *s, const struct ckpt_recipe *r,
                        const struct ckpt_catalog *src, const struct ckpt_recipe_options *opt,
                        struct ckpt_err *err);

/* Compute the settings. *s is zeroed by the caller, and must be released after a failure too.
 * MISSING: a key that the model needs is not known. UNSUPPORTED: the recipe refuses. Warnings are
 * added to `warnings`. */
int ckpt_settings_init(struct ckpt_settings *s, const struct ckpt_recipe *r,
                       const struct ckpt_catalog *src, const struct ckpt_recipe_options *opt,
                       struct ckpt_catalog *warnings, struct ckpt_err *err);

/* Compute the dims of a family from a model's own config.json, without framework and recipe; the
 * config is a copy, with the family's own members. As ckpt_settings_init. */
int ckpt_settings_of_config(struct ckpt_settings *s, const struct ckpt_family *f,
                            const json_t *config, struct ckpt_err *err);
void ckpt_settings_release(struct ckpt_settings *s);

/* The dim's value; false if unknown. */
bool ckpt_settings_dim(const struct ckpt_settings *s, const char *name, uint64_t *ret);

/* "; give num_attention_heads=..." for a dim that comes from such a key, "" otherwise. The caller's
 * buffer. */
const char *ckpt_settings_hint(const struct ckpt_settings *s, const char *dim, char *buf,
                               size_t cap);

/* Values of the scope's dims; locals are unknown. */
void ckpt_settings_sizes(const struct ckpt_settings *s, const struct ckpt_scope *scope,
                         struct ckpt_sizes *out);
