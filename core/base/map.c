/* SPDX-License-Identifier: Apache-2.0 */
/* Open addressing with linear probing over xxHash. */
#include "base/map.h"

#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "base/mem.h"

void ckpt_map_release(struct ckpt_map *m)
{
    free(m->slot);
    *m = (struct ckpt_map){0};
}

static struct ckpt_map_slot *find(const struct ckpt_map *m, const char *key, size_t len)
{
    size_t i = (size_t)XXH3_64bits(key, len) & (m->cap - 1);

    for (;; i = (i + 1) & (m->cap - 1)) {
        struct ckpt_map_slot *s = &m->slot[i];
        if (!s->key || (s->len == len && memcmp(s->key, key, len) == 0))
            return s;
    }
}

bool ckpt_map_get(const struct ckpt_map *m, const char *key, size_t len, uint32_t *ret_value)
{
    if (!m->cap || len > UINT32_MAX)
        return false;
    const struct ckpt_map_slot *s = find(m, key, len);
    if (!s->key)
        return false;
    *ret_value = s->value;
    return true;
}

int ckpt_map_reserve(struct ckpt_map *m, size_t n)
{
    struct ckpt_map bigger = {.cap = m->cap ? m->cap : 16, .len = m->len};

    while (m->len + n > bigger.cap - bigger.cap / 4)
        bigger.cap *= 2;
    if (bigger.cap == m->cap)
        return 0;
    if (!(bigger.slot = calloc(bigger.cap, sizeof *bigger.slot)))
        return -1;
    for (size_t i = 0; i < m->cap; i++)
        if (m->slot[i].key)
            *find(&bigger, m->slot[i].key, m->slot[i].len) = m->slot[i];
    free(m->slot);
    *m = bigger;
    return 0;
}

int ckpt_map_put(struct ckpt_map *m, const char *key, size_t len, uint32_t value,
                 uint32_t *ret_value, bool *ret_new)
{
    if (len > UINT32_MAX || (m->len + 1 > m->cap - m->cap / 4 && ckpt_map_reserve(m, 1) < 0))
        return -1;
    struct ckpt_map_slot *s = find(m, key, len);
    *ret_new = !s->key;
    if (!s->key) {
        *s = (struct ckpt_map_slot){.key = key, .len = (uint32_t)len, .value = value};
        m->len++;
    }
    *ret_value = s->value;
    return 0;
}

uint32_t ckpt_map_find(const struct ckpt_map *m, const char *key)
{
    uint32_t value = CKPT_NONE;

    (void)ckpt_map_get(m, key, strlen(key), &value);
    return value;
}

uint32_t ckpt_map_add(struct ckpt_map *m, const char *key, uint32_t value)
{
    bool is_new;

    return ckpt_map_put(m, key, strlen(key), value, &value, &is_new) < 0 ? CKPT_NONE : value;
}

int ckpt_map_number(const uint64_t (*key)[2], uint32_t n, uint32_t *ret, uint32_t *first,
                    uint32_t *ret_n)
{
    ckpt_cleanup(ckpt_map_release) struct ckpt_map map = {0};
    bool is_new;

    *ret_n = 0;
    for (uint32_t i = 0; i < n; i++) {
        if (ckpt_map_put(&map, (const char *)key[i], sizeof key[i], *ret_n, &ret[i], &is_new) < 0)
            return -1;
        if (is_new && first)
            first[*ret_n] = i;
        *ret_n += is_new;
    }
    return 0;
}
