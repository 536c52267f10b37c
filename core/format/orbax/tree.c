/* SPDX-License-Identifier: Apache-2.0 */
/* Reading _METADATA, in which Orbax keeps the tree of dictionaries, lists and tuples that was
 * saved:
 *
 *     {"tree_metadata": {"('a', '0')": {"key_metadata": [{"key": "a", "key_type": 2}, ...],
 *                                       "value_metadata": {"value_type": "jax.Array", ...}}, ...},
 *      "use_ocdbt": true, "use_zarr3": true, "store_array_data_equal_to_fill_value": true} */
#include <string.h>

#include "base/str.h"
#include "container/config.h"
#include "container/ocdbt.h"
#include "format/orbax/load.h"

enum { MAX_TREE = 256 << 20, MAX_DEPTH = 256, IN_A_LIST = 1 /* key_type */ };

static bool is_array(const json_t *value)
{
    return strcmp(ckpt_json_str_or(value, "value_type", ""), "string") != 0 &&
           !ckpt_json_bool(value, "skip_deserialize", false);
}

static int read_leaf(struct ckpt_orbax_tree *tree, const char *text, const json_t *entry,
                     struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_str_release) struct ckpt_str name = {0};
    const json_t *path = json_object_get(entry, "key_metadata"), *key;
    const json_t *value = json_object_get(entry, "value_metadata");
    struct ckpt_orbax_leaf *leaf;
    size_t i;

    if (!json_is_array(path) || !json_array_size(path) || json_array_size(path) > MAX_DEPTH)
        return ckpt_fail(err, CKPT_FORMAT, "entry %.200s has no 'key_metadata' of 1 to %d keys",
                         text, MAX_DEPTH);
    json_array_foreach(path, i, key) {
        const json_t *k = json_object_get(key, "key");
        if (!json_is_string(k) && !json_is_integer(k))
            return ckpt_fail(err, CKPT_FORMAT, "entry %.200s: key %zu is neither text nor a number",
                             text, i);
        if (i)
            ckpt_str_putc(&name, '.');
        if (json_is_string(k))
            ckpt_str_puts(&name, json_string_value(k));
        else
            ckpt_str_printf(&name, "%" JSON_INTEGER_FORMAT, json_integer_value(k));
    }
    if (name.failed || ckpt_vec_add(&tree->leaves, &leaf) < 0 ||
        !(leaf->name = ckpt_arena_strdup(&tree->arena, ckpt_str_get(&name))))
        return ckpt_nomem(err);
    leaf->path = path;
    leaf->is_array = is_array(value);
    return 0;
}

int ckpt_orbax_tree_read(struct ckpt_dir *item, struct ckpt_orbax_tree *ret, struct ckpt_err *err)
{
    const json_t *entries;
    const char *key;
    json_t *entry;

    if (ckpt_config_read(item, CKPT_ORBAX_TREE, MAX_TREE, &ret->json, err) < 0)
        return -1;
    entries = json_object_get(ret->json, "tree_metadata");
    if (!json_is_object(entries))
        return ckpt_fail(err, CKPT_FORMAT, "'%s/" CKPT_ORBAX_TREE "' has no 'tree_metadata'",
                         ckpt_dir_path(item));
    json_object_foreach((json_t *)entries, key, entry)
        if (read_leaf(ret, key, entry, err) < 0)
            return ckpt_err_in(err, "'%s/" CKPT_ORBAX_TREE "'", ckpt_dir_path(item));
    ret->ocdbt =
        ckpt_json_bool(ret->json, "use_ocdbt", ckpt_dir_has_file(item, CKPT_OCDBT_MANIFEST));
    ret->zarr3 = ckpt_json_bool(ret->json, "use_zarr3", false);
    ret->every_chunk = ckpt_json_bool(ret->json, "store_array_data_equal_to_fill_value", false);
    return 0;
}

void ckpt_orbax_tree_release(struct ckpt_orbax_tree *tree)
{
    ckpt_vec_release(&tree->leaves);
    ckpt_arena_release(&tree->arena);
    ckpt_json_decrefp(&tree->json);
}

const char *ckpt_orbax_key(const struct ckpt_orbax_leaf *leaf, size_t i, bool *ret_number)
{
    const json_t *entry = json_array_get(leaf->path, i);
    uint64_t type = 0;

    (void)ckpt_json_u64(entry, "key_type", &type);
    *ret_number = type == IN_A_LIST;
    return ckpt_json_str(entry, "key");
}
