/* SPDX-License-Identifier: Apache-2.0 */
/* A hash map from strings to 32-bit numbers (usually indices into an array). Keys are borrowed:
 * they must outlive the map. An all-zero struct is an empty map. Concurrent look-ups are safe while
 * nobody inserts. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/vec.h"

struct ckpt_map_slot {
    const char *key; /* NULL: empty */
    uint32_t len;
    uint32_t value;
};

struct ckpt_map {
    struct ckpt_map_slot *slot;
    size_t cap; /* power of two, or 0 */
    size_t len;
};

/* Free the table, not the keys; the map is empty afterwards. */
void ckpt_map_release(struct ckpt_map *m);

/* False: not there (*ret_value untouched). */
bool ckpt_map_get(const struct ckpt_map *m, const char *key, size_t len, uint32_t *ret_value);

/* Make room for n more keys at once. 0 or -1 (no memory). */
int ckpt_map_reserve(struct ckpt_map *m, size_t n);

/* Insert, or find what is there: *ret_value is the value now in the map, *ret_new whether it was
 * inserted. 0 or -1 (no memory). */
int ckpt_map_put(struct ckpt_map *m, const char *key, size_t len, uint32_t value,
                 uint32_t *ret_value, bool *ret_new);

/* These two take keys that end with a NUL, and return the value that is now in the map; CKPT_NONE:
 * there is none, or no memory. */
uint32_t ckpt_map_find(const struct ckpt_map *m, const char *key);
uint32_t ckpt_map_add(struct ckpt_map *m, const char *key, uint32_t value);

/* Number n keys of two words: equal keys get the same number, in the order of their first. ret[i]
 * is the number of key i, first[k] (may be NULL) the first index with number k, *ret_n how many
 * different keys there are. 0 or -1 (no memory). */
int ckpt_map_number(const uint64_t (*key)[2], uint32_t n, uint32_t *ret, uint32_t *first,
                    uint32_t *ret_n);
