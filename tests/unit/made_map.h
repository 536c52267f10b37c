/* SPDX-License-Identifier: Apache-2.0 */
/* A weight map for a test, from {tensor: file}, which is taken. */
#ifndef CKPT_TESTS_MADE_MAP_H
#define CKPT_TESTS_MADE_MAP_H

#include <stdlib.h>

#include "base/json.h"
#include "container/weight_map.h"

static inline struct ckpt_weight_map *made_map(json_t *json)
{
    struct ckpt_weight_map *map = NULL;
    const char *tensor;
    json_t *file;

    if (!json)
        return NULL;
    if (ckpt_weight_map_new(&map, NULL) < 0)
        abort();
    json_object_foreach(json, tensor, file)
        if (ckpt_weight_map_put(map, tensor, json_string_value(file), NULL) < 0)
            abort();
    json_decref(json);
    return map;
}

#endif
