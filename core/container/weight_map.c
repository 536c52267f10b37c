/* SPDX-License-Identifier: Apache-2.0 */
/* Making, reading and searching weight maps. */
#include "container/weight_map.h"

#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "container/stand_in.h"

enum {
    MAX_INDEX_BYTES = 512 * 1024 * 1024,
    LEAST_LINE = 64, /* bytes of a tensor's name and its file's, as a rule */
};

int ckpt_weight_map_new(struct ckpt_weight_map **ret, struct ckpt_err *err)
{
    if (!(*ret = calloc(1, sizeof **ret)))
        return ckpt_nomem(err);
    atomic_init(&(*ret)->refs, 1);
    return 0;
}

struct ckpt_weight_map *ckpt_weight_map_ref(struct ckpt_weight_map *map)
{
    if (map)
        (void)atomic_fetch_add(&map->refs, 1);
    return map;
}

void ckpt_weight_map_unref(struct ckpt_weight_map *map)
{
    if (!map || atomic_fetch_sub(&map->refs, 1) > 1)
        return;
    ckpt_vec_release(&map->files);
    ckpt_vec_release(&map->tensors);
    ckpt_map_release(&map->by_tensor);
    ckpt_map_release(&map->by_file);
    ckpt_arena_release(&map->arena);
    free(map);
}

/* The number of a file, which is added if it is new; CKPT_NONE: no memory. */
static uint32_t add_file(struct ckpt_weight_map *map, const char *file)
{
    const uint32_t known = ckpt_map_find(&map->by_file, file);

    if (known != CKPT_NONE || !(file = ckpt_arena_strdup(&map->arena, file)) ||
        ckpt_vec_push(&map->files, file) < 0)
        return known;
    return ckpt_map_add(&map->by_file, file, (uint32_t)map->files.len - 1);
}

int ckpt_weight_map_put(struct ckpt_weight_map *map, const char *tensor, const char *file,
                        struct ckpt_err *err)
{
    const size_t len = strlen(tensor);
    struct ckpt_mapped m;
    uint32_t at;
    bool is_new;

    if ((m.file = add_file(map, file)) == CKPT_NONE ||
        !(m.tensor = ckpt_arena_strndup(&map->arena, tensor, len)) ||
        ckpt_map_put(&map->by_tensor, m.tensor, len, m.file, &at, &is_new) < 0 ||
        (is_new && ckpt_vec_push(&map->tensors, m) < 0))
        return ckpt_nomem(err);
    return 0;
}

int ckpt_weight_map_copy(const struct ckpt_weight_map *map, struct ckpt_weight_map **ret,
                         struct ckpt_err *err)
{
    if (ckpt_weight_map_new(ret, err) < 0)
        return -1;
    for (size_t i = 0; i < map->tensors.len; i++)
        if (ckpt_weight_map_put(*ret, map->tensors.ptr[i].tensor,
                                map->files.ptr[map->tensors.ptr[i].file], err) < 0)
            return -1;
    return 0;
}

uint32_t ckpt_weight_map_find(const struct ckpt_weight_map *map, const char *tensor)
{
    return map ? ckpt_map_find(&map->by_tensor, tensor) : CKPT_NONE;
}

static int parse_map(struct ckpt_json_pull *p, struct ckpt_weight_map *map, struct ckpt_err *err)
{
    const char *tensor, *file;

    if (ckpt_json_pull_peek(p) != '{')
        return ckpt_fail(err, CKPT_FORMAT, "its weight_map is not an object");
    (void)ckpt_json_pull_object(p);
    while ((tensor = ckpt_json_pull_member(p))) {
        const size_t before = map->tensors.len;
        const char next = ckpt_json_pull_peek(p);
        if (next && next != '"')
            return ckpt_fail(err, CKPT_FORMAT, "the file of '%s' is not a name", tensor);
        if (!(file = ckpt_json_pull_string(p)))
            return 0;
        if (ckpt_weight_map_put(map, tensor, file, err) < 0)
            return -1;
        if (map->tensors.len == before)
            return ckpt_fail(err, CKPT_FORMAT, "duplicate tensor '%s'", tensor);
    }
    return 0;
}

/* Ask about the keys of an index's metadata; NULL: none of them is refused. */
static const char *refused(struct ckpt_json_pull *p, ckpt_index_refuse_fn *refuse)
{
    const char *key, *why = NULL;

    if (ckpt_json_pull_peek(p) != '{') {
        ckpt_json_pull_skip(p);
        return NULL;
    }
    (void)ckpt_json_pull_object(p);
    while ((key = ckpt_json_pull_member(p))) {
        why = why ? why : refuse(key);
        ckpt_json_pull_skip(p);
    }
    return why;
}

static int parse(char *text, size_t len, ckpt_index_refuse_fn *refuse, struct ckpt_weight_map *map,
                 struct ckpt_err *err)
{
    struct ckpt_json_pull p;
    const char *key, *why = NULL;

    ckpt_json_pull_init(&p, text, len, "the index");
    if (ckpt_json_pull_peek(&p) != '{')
        return ckpt_fail(err, CKPT_FORMAT, "not a JSON object");
    (void)ckpt_json_pull_object(&p);
    while ((key = ckpt_json_pull_member(&p))) {
        if (strcmp(key, "metadata") == 0)
            why = why ? why : refused(&p, refuse);
        else if (strcmp(key, "weight_map") != 0)
            ckpt_json_pull_skip(&p);
        else if (parse_map(&p, map, err) < 0)
            return -1;
    }
    if (ckpt_json_pull_end(&p, err) < 0)
        return -1;
    if (why)
        return ckpt_fail(err, CKPT_UNSUPPORTED, "%s", why);
    return map->tensors.len ? 0 : ckpt_fail(err, CKPT_FORMAT, "it has no weight_map");
}

int ckpt_weight_map_read(const struct ckpt_dir *dir, const char *name, ckpt_index_refuse_fn *refuse,
                         struct ckpt_weight_map **ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_weight_map_unrefp) struct ckpt_weight_map *map = NULL;
    ckpt_cleanup(ckpt_freep) char *text = NULL;
    size_t len;

    if (ckpt_dir_read_file(dir, name, MAX_INDEX_BYTES, &text, &len, err) < 0 ||
        ckpt_weight_map_new(&map, err) < 0)
        return -1;
    if (ckpt_map_reserve(&map->by_tensor, len / LEAST_LINE) < 0)
        return ckpt_nomem(err);
    if (ckpt_refuse_stand_in(text, len, err) < 0 || parse(text, len, refuse, map, err) < 0)
        return ckpt_err_in(err, "'%s/%s'", ckpt_dir_path(dir), name);
    *ret = ckpt_steal(&map);
    return 0;
}
