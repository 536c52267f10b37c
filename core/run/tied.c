/* SPDX-License-Identifier: Apache-2.0 */
/* Names that the model's class has for tensors that are stored under another name. */
#include <string.h>

#include "base/json.h"
#include "base/mem.h"
#include "recipe/library/types.h"
#include "run/checkpoint.h"

/* The input embedding's name in this view; NULL: it has none. */
static const char *embedding_of(const struct ckpt_view *v, const struct ckpt_type *type)
{
    for (size_t i = 0; i < type->embedding.n; i++)
        if (ckpt_catalog_find(v->cat, type->embedding.text[i]))
            return type->embedding.text[i];
    return NULL;
}

json_t *ckpt_checkpoint_tied(const struct ckpt_view *v)
{
    const struct ckpt_type *type = ckpt_types_find(ckpt_recipes_types(v->shared->recipes),
                                                   ckpt_json_str(v->config, "model_type"));
    const bool is_known = type != ckpt_types_any(ckpt_recipes_types(v->shared->recipes));
    json_t *tied = json_object();

    if (!ckpt_json_bool(v->config, "tie_word_embeddings", false))
        return tied;
    for (size_t i = 0; i < type->ties.n && tied; i++) {
        const struct ckpt_text_pair *tie = &type->ties.pair[i];
        const char *to = tie->to ? tie->to : embedding_of(v, type);
        /* for a type without facts of its own the list has the names of all types */
        if (!is_known && (!type->output.n || strcmp(tie->from, type->output.text[0]) != 0))
            continue;
        if (!to || ckpt_catalog_find(v->cat, tie->from) || !ckpt_catalog_find(v->cat, to))
            continue;
        if (json_object_set_new(tied, tie->from, json_string(to)) < 0) {
            json_decref(tied);
            return NULL;
        }
    }
    return tied;
}
