/* SPDX-License-Identifier: Apache-2.0 */
/* The directories of a checkpoint of HF-sharded files: where it keeps shards, config and tokenizer,
 * file split, dtypes.
 *
 *     shard-*                                  torch: HuggingFaceStorageWriter
 *     sharded/shard-*, model-*, its index      torch: enable_consolidation (also torchtitan's last
 *                                              step; with checkpoint_id= all in one folder)
 *     model/shard-*                            NeMo Automodel 0.1 ... 0.7
 *     model/.hf_metadata/                        config.json, tokenizer, *.py, and since 0.2
 *                                                fqn_to_file_index_mapping.json, since 0.5
 *                                                fqn_to_dtype_mapping.json
 *     model/consolidated/                        the finished model, if it was made; before 0.5
 *                                                .hf_metadata's files moved into it */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"
#include "base/json.h"
#include "container/safetensors.h"
#include "format/reader.h"
#include "io/dir.h"
#include "io/source.h"

struct ckpt_hfs_layout {
    /* folder of the shards below the checkpoint; "": the checkpoint itself; static */
    const char *shards;
    json_t *file_index; /* {tensor: number of its file}; NULL: none */
};

/* Find only the folder of the shards, by names alone; NULL: there are no shards. */
const char *ckpt_hfs_layout_shards(struct ckpt_dir *dir);

/* Read the whole layout: also the model's config.json, if there is one, and in *facts where it is,
 * the dtypes, the name of the index and the finished model's weight map. The caller releases all of
 * it, on failure too. MISSING: there are no shards. */
int ckpt_hfs_layout_read(struct ckpt_dir *dir, struct ckpt_hfs_layout *ret,
                         struct ckpt_facts *facts, json_t **ret_config, struct ckpt_err *err);

/* ---- one file, `shard-R-model-I-of-N.safetensors` ---- */

/* It is a safetensors file whose metadata gives the position of each box in the whole tensor:
 * DCP_SHARDING_INFO is JSON text, {"name": {"saved_offsets": [3, 0]}, ...}. The size of the box is
 * the tensor's shape in the file; the shape of the whole tensor is not recorded anywhere. */
struct ckpt_hfs_name {
    uint64_t rank;  /* rank of the writer, from 1 */
    uint64_t file;  /* number of the finished model's file, from 1 to nfile */
    uint64_t nfile; /* 1 also if the writer was not given a split */
};

/* Parse a name; false if it is not the name of such a file. */
bool ckpt_hfs_name_parse(const char *name, struct ckpt_hfs_name *ret);

struct ckpt_hfs_shard {
    const char *name; /* borrowed */
    struct ckpt_hfs_name id;
    struct ckpt_source *source;
    struct ckpt_st st;
    const uint64_t *
        *lo; /* for each tensor of st, the position of its first element; memory of st's arena */
};

/* Read the header of s->source. On failure the error names the file. */
int ckpt_hfs_shard_read(struct ckpt_hfs_shard *s, struct ckpt_err *err);
void ckpt_hfs_shard_release(struct ckpt_hfs_shard *s);
