/* SPDX-License-Identifier: Apache-2.0 */
/* Reading and checking the index of a Hugging Face model. */
#include "format/huggingface/weight_map.h"

#include <string.h>

#include "base/map.h"
#include "container/config.h"

enum { MAX_INDEX_BYTES = 512 * 1024 * 1024 };

int ckpt_weight_map_read(const struct ckpt_dir *dir, const char *name, json_t **ret,
                         struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *index = NULL;
    const char *tensor;
    json_t *map, *file;

    if (ckpt_config_read(dir, name, MAX_INDEX_BYTES, &index, err) < 0)
        return -1;
    map = json_object_get(index, "weight_map");
    if (!json_is_object(map) || json_object_size(map) == 0)
        return ckpt_fail(err, CKPT_FORMAT, "'%s/%s' has no weight_map", ckpt_dir_path(dir), name);
    json_object_foreach(map, tensor, file)
        if (!json_is_string(file))
            return ckpt_fail(err, CKPT_FORMAT, "'%s/%s': the file of '%s' is not a name",
                             ckpt_dir_path(dir), name, tensor);
    *ret = ckpt_steal(&index);
    return 0;
}

/* Check that a file is there, once for each. */
static int check_file(struct ckpt_map *seen, const char *file, const char *index,
                      const struct ckpt_dir *dir, struct ckpt_err *err)
{
    uint32_t at;
    bool is_new;

    if (ckpt_map_put(seen, file, strlen(file), 0, &at, &is_new) < 0)
        return ckpt_nomem(err);
    return !is_new || ckpt_dir_has_file(dir, file)
               ? 0
               : ckpt_fail(err, CKPT_MISSING, "'%s/%s' names the file '%s', which is not there",
                           ckpt_dir_path(dir), index, file);
}

int ckpt_weight_map_check(const json_t *index, const char *name, const struct ckpt_dir *dir,
                          const struct ckpt_reader_options *opt, struct ckpt_catalog *cat,
                          struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_map_release) struct ckpt_map seen = {0};
    const char *tensor;
    json_t *value;

    json_object_foreach(json_object_get(index, "weight_map"), tensor, value) {
        const char *file = json_string_value(value);
        if (check_file(&seen, file, name, dir, err) < 0)
            return -1;
        if (ckpt_catalog_find(cat, tensor))
            continue;
        if (!opt->allow_partial)
            return ckpt_fail(err, CKPT_MISSING,
                             "'%s/%s' lacks tensor '%s', which the index maps to it",
                             ckpt_dir_path(dir), file, tensor);
        ckpt_catalog_warn(cat, "left out: '%s' is not in '%s'", tensor, file);
    }
    return 0;
}
