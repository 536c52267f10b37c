/* SPDX-License-Identifier: Apache-2.0 */
/* Functions that readers share: facts, pointer files, and leaving out tensors. */
#include "format/reader.h"

#include <string.h>

#include "base/ckd.h"

enum { MAX_POINTER = 4096 };

void ckpt_facts_release(struct ckpt_facts *facts)
{
    ckpt_weight_map_unref(facts->weight_map);
    ckpt_dir_unref(facts->home);
    json_decref(facts->dtypes);
    json_decref(facts->adapter_config);
    *facts = (struct ckpt_facts){0};
}

int ckpt_facts_map_all(struct ckpt_facts *facts, const struct ckpt_catalog *cat, const char *file,
                       struct ckpt_err *err)
{
    ckpt_weight_map_unref(ckpt_steal(&facts->weight_map));
    if (ckpt_weight_map_new(&facts->weight_map, err) < 0)
        return -1;
    for (size_t i = 0; i < cat->tensors.len; i++)
        if (ckpt_weight_map_put(facts->weight_map, cat->tensors.ptr[i].name, file, err) < 0)
            return -1;
    return 0;
}

int ckpt_reader_check_map(const struct ckpt_weight_map *map, const char *name,
                          const struct ckpt_dir *dir, const struct ckpt_reader_options *opt,
                          struct ckpt_catalog *cat, struct ckpt_err *err)
{
    for (size_t i = 0; i < map->files.len; i++)
        if (!ckpt_dir_has_file(dir, map->files.ptr[i]))
            return ckpt_fail(err, CKPT_MISSING, "'%s/%s' names the file '%s', which is not there",
                             ckpt_dir_path(dir), name, map->files.ptr[i]);
    for (size_t i = 0; i < map->tensors.len; i++) {
        const char *tensor = map->tensors.ptr[i].tensor;
        const char *file = map->files.ptr[map->tensors.ptr[i].file];
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

char *ckpt_reader_pointer(const struct ckpt_dir *run, const char *name)
{
    static const char blanks[] = " \t\r\n";
    ckpt_cleanup(ckpt_freep) char *text = NULL;
    size_t len;

    if (!ckpt_dir_has_file(run, name) ||
        ckpt_dir_read_file(run, name, MAX_POINTER, &text, &len, NULL) < 0)
        return NULL;
    while (len && strchr(blanks, text[len - 1]))
        len--;
    const size_t before = ckpt_min_u64(strspn(text, blanks), len);
    return strndup(text + before, len - before);
}

int ckpt_reader_add_each(const struct ckpt_reader_options *opt, struct ckpt_catalog *cat, size_t n,
                         int (*add)(void *ctx, size_t i, struct ckpt_err *err), void *ctx,
                         struct ckpt_err *err)
{
    for (size_t i = 0; i < n; i++) {
        struct ckpt_err why = {0};
        if (add(ctx, i, &why) == 0)
            continue;
        if (!opt->allow_partial || why.code != CKPT_MISSING)
            return ckpt_err_move(err, &why);
        ckpt_catalog_warn(cat, "left out: %s", why.text);
    }
    return 0;
}
