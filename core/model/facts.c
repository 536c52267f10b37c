/* SPDX-License-Identifier: Apache-2.0 */
#include "model/facts.h"

#include "recipe/library/recipe.h"

const struct ckpt_type *ckpt_view_type(const struct ckpt_view *v)
{
    return ckpt_types_find(ckpt_recipes_types(v->shared->recipes),
                           ckpt_json_str(v->config, "model_type"));
}

struct ckpt_dtypes ckpt_view_dtypes(const struct ckpt_view *v)
{
    return (struct ckpt_dtypes){.opt = v->shared->opt,
                                .base = v->decision.use_base_dtypes ? v->shared->base : NULL,
                                .mapping = v->facts.dtypes,
                                .base_names = v->base_names,
                                .keeps = &ckpt_view_type(v)->keeps_dtype,
                                .buffers = &ckpt_view_type(v)->buffers,
                                .hf_names = v->facts.names == CKPT_NAMES_HUB};
}

const json_t *ckpt_view_base_config(const struct ckpt_view *v)
{
    const struct ckpt_base *base = v->shared->base;
    return base && base->config ? base->config : v->facts.lent_config;
}

int ckpt_view_add_warnings(json_t *all, const json_t *more)
{
    size_t i, k;
    json_t *text, *old;

    json_array_foreach(more, i, text) {
        bool known = false;
        json_array_foreach(all, k, old)
            known |= json_equal(text, old);
        if (!known && json_array_append(all, text) < 0)
            return -1;
    }
    return 0;
}
