/* SPDX-License-Identifier: Apache-2.0 */
/* The framework's config is read forwards, and the result is compared with the model's config. */
#include "recipe/library/recipe.h"

#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "recipe/apply/apply.h"
#include "recipe/library/recipes.h"
#include "recipe/library/settings.h"

/* Null says as little as nothing does. 1 and 1.0 are the same number. Members that only `got` has
 * are additions, not losses. */
static bool same_value(const json_t *want, const json_t *got)
{
    const char *key;
    json_t *v;
    size_t i;

    if (!want || json_is_null(want))
        return !got || json_is_null(got);
    if (json_is_number(want))
        return json_is_number(got) && json_number_value(want) == json_number_value(got);
    if (!got || json_typeof(want) != json_typeof(got) ||
        json_array_size(want) != json_array_size(got))
        return false;
    if (!json_is_array(want) && !json_is_object(want))
        return json_equal(want, got);
    json_array_foreach(want, i, v)
        if (!same_value(v, json_array_get(got, i)))
            return false;
    json_object_foreach((json_t *)want, key, v)
        if (!same_value(v, json_object_get(got, key)))
            return false;
    return true;
}

/* The rotary embedding in transformers 5's spelling, of a config in the older one: a new
 * reference. */
static json_t *rope_parameters_of(const json_t *config)
{
    const json_t *scaling = json_object_get(config, "rope_scaling");
    json_t *rope = json_is_object(scaling) ? json_deep_copy(scaling)
                                           : json_pack("{s:s}", "rope_type", "default");

    ckpt_json_set(&rope, "rope_theta", json_deep_copy(json_object_get(config, "rope_theta")));
    return rope;
}

/* A size that follows from others (head_dim) need not be said. */
static bool follows(const struct ckpt_settings *s, const char *key, const json_t *want)
{
    uint64_t dim;

    for (size_t i = 0; s->family && i < s->family->ndim; i++) {
        const struct ckpt_dim *d = &s->family->dim[i];
        if (d->option && strcmp(d->option, key) == 0 && ckpt_settings_dim(s, d->name, &dim))
            return json_is_integer(want) && json_integer_value(want) == (json_int_t)dim;
    }
    return false;
}

static bool kept(const char *key, const json_t *want, const struct ckpt_settings *again)
{
    static const char *const not_the_model[] = {"transformers_version", "torch_dtype", "dtype",
                                                "_name_or_path"};
    const json_t *value = json_object_get(again->hf, key);

    for (size_t i = 0; i < sizeof not_the_model / sizeof *not_the_model; i++)
        if (strcmp(key, not_the_model[i]) == 0)
            return true;
    if (strcmp(key, "rope_parameters") == 0 && !value) {
        ckpt_cleanup(ckpt_json_decrefp) json_t *rope = rope_parameters_of(again->hf);
        return same_value(want, rope);
    }
    return same_value(want, value) || (!value && follows(again, key, want));
}

/* The config of the model that the checkpoint is for whoever has nothing else; NULL in *ret if no
 * recipe can tell which family it is of. */
static int read_again(const struct ckpt_recipes *set, const struct ckpt_catalog *cat,
                      const struct ckpt_recipe_options *opt, struct ckpt_settings *ret,
                      struct ckpt_err *err)
{
    struct ckpt_err ignored = {0};
    const struct ckpt_recipe *recipe;

    if (ckpt_recipes_choose(set, cat, opt, &recipe, &ignored) < 0)
        return 0;
    return ckpt_settings_draft(ret, recipe, cat, opt, err);
}

int ckpt_recipe_lost(const struct ckpt_recipes *set, const struct ckpt_model *made,
                     const json_t *config, const char *format, struct ckpt_str *out,
                     struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *about = json_pack("{s:s}", "format", format);
    const struct ckpt_recipe_options opt = {.format = format};
    struct ckpt_catalog cat = *made->catalog; /* as a reader would make it */
    ckpt_cleanup(ckpt_settings_release) struct ckpt_settings again = {0};
    const char *key;
    json_t *value;

    if (!about)
        return ckpt_nomem(err);
    cat.config = made->made;
    cat.about = about;
    if (read_again(set, &cat, &opt, &again, err) < 0)
        return -1;
    json_object_foreach((json_t *)config, key, value)
        if (!json_is_null(value) && !kept(key, value, &again))
            ckpt_str_printf(out, "%s%s", *ckpt_str_get(out) ? ", " : "", key);
    return out->failed ? ckpt_nomem(err) : 0;
}
