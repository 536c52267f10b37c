/* SPDX-License-Identifier: Apache-2.0 */
/* How a checkpoint is to be shown. */
#include "ckpt/reader.h"

void ckpt_facts_release(struct ckpt_facts *facts)
{
    json_decref(facts->weight_map);
    json_decref(facts->dtypes);
    *facts = (struct ckpt_facts){0};
}

int ckpt_facts_map_all(struct ckpt_facts *facts, const struct ckpt_catalog *cat, const char *file,
                       struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *map = json_object();

    if (!map)
        return ckpt_nomem(err);
    for (size_t i = 0; i < cat->tensors.len; i++)
        if (json_object_set_new(map, cat->tensors.ptr[i].name, json_string(file)) < 0)
            return ckpt_nomem(err);
    json_decref(facts->weight_map);
    facts->weight_map = ckpt_steal(&map);
    return 0;
}
