/* SPDX-License-Identifier: Apache-2.0 */
/* Models without a head: recognising them, and the word that their names lack. */
#include "model/bare.h"

#include <string.h>

#include "base/mem.h"
#include "base/str.h"
#include "recipe/language/field.h"

/* Return the model's class by its config; "": that does not say it. */
static const char *class_of(const json_t *config)
{
    const char *name = ckpt_config_class(config);

    return name ? name : "";
}

/* Is the class that the config names (NULL: none) one without a head? The classes have the names
 * XModel; with a head also XHeadModel and XHeadsModel. */
static bool is_bare(const json_t *config)
{
    const char *name = class_of(config);

    return ckpt_has_suffix(name, "Model") && !ckpt_has_suffix(name, "HeadModel") &&
           !ckpt_has_suffix(name, "HeadsModel");
}

const char *ckpt_bare_anchor(const struct ckpt_type *type, const json_t *config)
{
    const char *model_type = ckpt_json_str(config, "model_type"), *class = class_of(config);

    if (!model_type || !is_bare(config) || ckpt_texts_have(&type->headed, class, strlen(class)))
        return NULL;
    for (size_t i = 0; i < type->bare.n; i++)
        if (strcmp(type->bare.pair[i].from, model_type) == 0)
            return type->bare.pair[i].to;
    return NULL;
}

/* The length of the first word, with its dot, that the model with a head puts before all names but
 * the head's. 0: it has none. */
static size_t word_len(const struct ckpt_type *type)
{
    const char *name = type->embedding.n ? type->embedding.text[0] : "";
    const char *dot = strchr(name, '.');

    return dot && strchr(dot + 1, '.') ? (size_t)(dot + 1 - name) : 0;
}

const char *ckpt_bare_name(const struct ckpt_type *type, const char *name)
{
    const size_t len = word_len(type);

    return len && strncmp(name, type->embedding.text[0], len) == 0 ? name + len : name;
}

int ckpt_bare_set_word(struct ckpt_catalog *cat, const struct ckpt_type *type, bool with,
                       struct ckpt_err *err)
{
    const int len = (int)word_len(type);
    ckpt_cleanup(ckpt_freep) const char **name = ckpt_catalog_names(cat);

    if (!name)
        return ckpt_nomem(err);
    for (size_t i = 0; len && i < cat->tensors.len; i++)
        if (!(name[i] = with ? ckpt_field_text(&cat->arena, err, "%.*s%s", len,
                                               type->embedding.text[0], name[i])
                             : ckpt_bare_name(type, name[i])))
            return -1;
    return ckpt_catalog_select(cat, name, err);
}

int ckpt_bare_check(const struct ckpt_catalog *cat, const json_t *config, const char *prefix,
                    struct ckpt_err *err)
{
    const json_t *roots = json_object_get(cat->about, "roots"), *root;
    const char *model_type = ckpt_json_str(config, "model_type");
    size_t i;

    if (!is_bare(config))
        return 0;
    json_array_foreach(roots, i, root) {
        const char *key = json_string_value(root);
        for (size_t k = 0; k < cat->tensors.len; k++) {
            const char *name = cat->tensors.ptr[k].name;
            if (strncmp(name, prefix, strlen(prefix)) == 0 && strlen(prefix) <= strlen(key) &&
                ckpt_has_prefix(name, key) && name[strlen(key)] == '.')
                return ckpt_fail(err, CKPT_UNSUPPORTED,
                                 "config.json describes a '%s', a model without a head, and how "
                                 "transformers saves that of model type '%s' is not known ('%s' "
                                 "is a key of the saved dict, not a part of the names; view=raw "
                                 "shows the tensors)",
                                 class_of(config), model_type ? model_type : "?", key);
        }
    }
    return 0;
}
