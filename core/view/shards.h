/* SPDX-License-Identifier: Apache-2.0 */
/* Distributing tensors over files.
 *
 * By size, as huggingface_hub's split_torch_state_dict_into_shards: items in order; one that is
 * larger than the limit gets a file of its own, numbered before the file being filled, which stays
 * open; one that does not fit closes the file being filled. An item is a tensor, or a block:
 * neighbours with the same block number that is not 0 (in memory they are views of one storage,
 * which counts once and whole, where its first tensor stands). Unlike there, a file is also closed
 * when its header would become longer than the safetensors library reads, of which it leaves
 * CKPT_ST_MAX_KEPT bytes for __metadata__. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "base/json.h"
#include "base/mem.h"
#include "container/weight_map.h"
#include "tensor/catalog.h"
#include "view/text.h"

/* The default of transformers 5 is "50GB". Its units are decimal. */
#define CKPT_DEFAULT_SHARD_SIZE 50000000000u

/* A size as transformers takes it: bytes ("5000000"), or a number with KB, MB, GB or TB (powers of
 * 1000, either case): "5GB", "1.5 gb". False if the text is not a size, or the size is 0 or does
 * not fit 63 bits. */
bool ckpt_shards_parse_size(const char *text, uint64_t *ret_size);

struct ckpt_shards {
    struct ckpt_arena arena; /* of the names */
    const char **name;       /* of each file, in order */
    size_t nfile;            /* 0 for a catalogue without tensors */
    bool mapped;             /* a map has named the files */
    uint32_t *file;          /* of each tensor of the catalogue */
    uint64_t total_bytes;
    uint64_t total_numel;
};

/* Free the names and numbers. */
void ckpt_shards_release(struct ckpt_shards *s);

/* Split by size. One file is "model.safetensors", more are "model-00001-of-00002.safetensors" and
 * so on; `stem` (NULL: that one) is their name's beginning. With sorted, blocks are taken in the
 * order of ckpt_fqn_cmp of their first tensors instead of the catalogue's. */
int ckpt_shards_split(const struct ckpt_catalog *cat, uint64_t max_size, bool sorted,
                      const char *stem, struct ckpt_shards *ret, struct ckpt_err *err);

/* Split by the map of an index. Tensors that it does not name go into the
 * last of its files (by name) that is used; files without tensors are left out. MISSING: it names
 * none of the tensors, or there are none. FORMAT: a file is not a "*.safetensors" in the model's
 * directory or in folders of it. */
int ckpt_shards_by_map(const struct ckpt_catalog *cat, const struct ckpt_weight_map *map,
                       struct ckpt_shards *ret, struct ckpt_err *err);

/* By the map if it knows any of the tensors (one that knows none is another model's), else by size;
 * 0 is transformers' default. */
int ckpt_shards_choose(const struct ckpt_catalog *cat, const struct ckpt_weight_map *map,
                       uint64_t max_size, bool sorted, const char *stem, struct ckpt_shards *ret,
                       struct ckpt_err *err);

/* ---- model.safetensors.index.json, as transformers writes it ---- */

/* The text of an index is made from these members, which are all borrowed and must live as long as
 * the text. */
struct ckpt_index {
    const struct ckpt_catalog *cat;
    const struct ckpt_shards *shards;
    const uint32_t
        *by_name; /* the tensors' indices, by name (strcmp, which is Python's order for UTF-8) */
};

/* The catalogue may not be empty (assert). */
int ckpt_index_text(const struct ckpt_index *index, struct ckpt_arena *arena, struct ckpt_text *ret,
                    struct ckpt_err *err);
