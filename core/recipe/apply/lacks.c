/* SPDX-License-Identifier: Apache-2.0 */
/* The list of a model file is walked through as for a checkpoint that is to be written. */
#include "recipe/library/recipe.h"

#include <stdlib.h>
#include <string.h>

#include "recipe/apply/apply.h"
#include "recipe/library/recipes.h"

/* Why a model with this config is not checked; NULL: it is. */
static const char *why_unchecked(const json_t *config)
{
    const char *class =
        json_string_value(json_array_get(json_object_get(config, "architectures"), 0));

    if (json_object_get(config, "quantization_config"))
        return "the model is quantised";
    if (!class || !ckpt_json_str(config, "model_type"))
        return "config.json does not name the model's class";
    return ckpt_has_suffix(class, "ForCausalLM") ? NULL : "no list has the tensors of its class";
}

/* A list that cannot be walked through, because a number is not known, says nothing. */
static int count(const struct ckpt_family *f, const struct ckpt_catalog *cat, const json_t *config,
                 struct ckpt_lacks *ret, struct ckpt_err *err)
{
    const struct ckpt_recipe_options opt = {.allow_partial = true, .allow_leftover = true};
    const struct ckpt_recipe recipe = {.name = f->name, .family = f, .backwards = true};
    ckpt_cleanup(ckpt_catalog_freep) struct ckpt_catalog *remarks = NULL;
    ckpt_cleanup(ckpt_freep) bool *used = calloc(cat->tensors.len + 1, sizeof *used);
    struct ckpt_err own = {0};
    struct ckpt_apply ap = {.recipe = &recipe,
                            .src = cat,
                            .opt = &opt,
                            .used = used,
                            .lacks = &ret->names,
                            .err = &own};

    if (!used)
        return ckpt_nomem(err);
    if (ckpt_catalog_new(&remarks, err) < 0)
        return -1;
    int rc = ckpt_settings_of_config(&ap.set, f, config, err);
    ap.cat = remarks;
    ap.set.src = cat;
    if (rc == 0 && ckpt_apply_check(&ap, &f->tensors) < 0 && own.code == CKPT_NOMEM)
        rc = ckpt_nomem(err);
    ret->n = ap.nleft;
    if (own.code && own.code != CKPT_LIMIT)
        ret->unchecked = "config.json lacks a number of the model";
    else if (!memchr(used, true, cat->tensors.len))
        ret->unchecked = "it has none of the model's tensors under their names";
    ckpt_settings_release(&ap.set);
    ckpt_str_release(&ap.name);
    return rc;
}

void ckpt_lacks_release(struct ckpt_lacks *l) { ckpt_str_release(&l->names); }

int ckpt_recipe_lacks(const struct ckpt_recipes *set, const struct ckpt_catalog *cat,
                      const json_t *config, struct ckpt_lacks *ret, struct ckpt_err *err)
{
    const struct ckpt_family *f = NULL;

    if ((ret->unchecked = why_unchecked(config)))
        return 0;
    if (ckpt_recipes_family(set, ckpt_json_str(config, "model_type"), &f, err) < 0)
        return -1;
    if (!f)
        ret->unchecked = "no list has the tensors of its model type";
    else if (count(f, cat, config, ret, err) < 0)
        return -1;
    if (ret->unchecked)
        ret->n = 0;
    else if (ret->n > CKPT_APPLY_LACKS)
        ckpt_str_puts(&ret->names, ", ...");
    return ret->names.failed ? ckpt_nomem(err) : 0;
}
