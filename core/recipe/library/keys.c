/* SPDX-License-Identifier: Apache-2.0 */
/* Looking a key up in the embedded model files. */
#include "recipe/library/keys.h"

#include <string.h>

#include "base/json.h"
#include "base/mem.h"
#include "base/str.h"
#include "recipe/library/files.h"

static bool lists(const json_t *list, const char *key)
{
    for (size_t i = 0; i < json_array_size(list); i++) {
        const char *s = json_string_value(json_array_get(list, i));
        if (s && strcmp(s, key) == 0)
            return true;
    }
    return false;
}

static bool names(const struct ckpt_recipe_blob *b, const char *key)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *j = NULL;

    if (ckpt_json_parse((const char *)b->data, b->len, b->name, &j, NULL) < 0)
        return false;
    const json_t *fixed = json_object_get(json_object_get(j, "config"), key);
    return lists(json_object_get(j, "needs"), key) || lists(json_object_get(j, "takes"), key) ||
           (fixed && !json_is_array(fixed) && !json_is_object(fixed));
}

bool ckpt_keys_known(const char *key)
{
    for (size_t i = 0; i < ckpt_recipe_nblobs; i++)
        if (ckpt_has_prefix(ckpt_recipe_blobs[i].name, "models/") &&
            names(&ckpt_recipe_blobs[i], key))
            return true;
    return false;
}
