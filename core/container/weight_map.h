/* SPDX-License-Identifier: Apache-2.0 */
/* The weight_map of a Hugging Face model's index (model.safetensors.index.json): which file has
 * each tensor. Models have up to millions of tensors, so it is kept as a table, not as JSON. */
#pragma once

#include <stdatomic.h>
#include <stdint.h>

#include "base/err.h"
#include "base/map.h"
#include "base/mem.h"
#include "base/vec.h"
#include "io/dir.h"

/* Counted. While it is being made it belongs to one thread; afterwards it is read by many. */
struct ckpt_weight_map {
    atomic_uint refs;
    struct ckpt_arena arena;      /* of the names */
    CKPT_VEC(const char *) files; /* in the order in which they are first named */
    CKPT_VEC(struct ckpt_mapped {
        const char *tensor;
        uint32_t file; /* its number in files */
    })
    tensors; /* in the order of the index */
    struct ckpt_map by_tensor, by_file;
};

/* Make an empty map with one reference. NOMEM. */
int ckpt_weight_map_new(struct ckpt_weight_map **ret, struct ckpt_err *err);

/* References; NULL is none. */
struct ckpt_weight_map *ckpt_weight_map_ref(struct ckpt_weight_map *map);
void ckpt_weight_map_unref(struct ckpt_weight_map *map);
CKPT_CLEANUP_BY(ckpt_weight_map_unref, struct ckpt_weight_map)

/* Say that a tensor is in a file (both copied). A tensor that has one already stays there. NOMEM.
 */
int ckpt_weight_map_put(struct ckpt_weight_map *map, const char *tensor, const char *file,
                        struct ckpt_err *err);

/* Make a copy, to add to it. NOMEM. */
int ckpt_weight_map_copy(const struct ckpt_weight_map *map, struct ckpt_weight_map **ret,
                         struct ckpt_err *err);

/* The number of a tensor's file; UINT32_MAX: the map (or NULL) does not have the tensor. */
uint32_t ckpt_weight_map_find(const struct ckpt_weight_map *map, const char *tensor);

/* Why do an index's files hold no tensors of a model, if its metadata has this key? A static text;
 * NULL: the key says no such thing. */
typedef const char *ckpt_index_refuse_fn(const char *key);

/* Read the index `name` of the directory. UNSUPPORTED: `refuse` has an answer. FORMAT: it has no
 * weight_map, an empty one, one with a value that is not a file's name, or one that names a tensor
 * twice. */
int ckpt_weight_map_read(const struct ckpt_dir *dir, const char *name, ckpt_index_refuse_fn *refuse,
                         struct ckpt_weight_map **ret, struct ckpt_err *err);
