/* SPDX-License-Identifier: Apache-2.0 */
/* The base model (option `base=`): a Hugging Face directory from which a view takes the config, the
 * tokenizer, the split into files and the dtypes that the checkpoint lacks. */
#pragma once

#include "base/err.h"
#include "base/json.h"
#include "container/archive.h"
#include "format/reader.h"
#include "io/dir.h"
#include "io/fdpool.h"
#include "tensor/catalog.h"

struct ckpt_recording;

/* Immutable after it is opened. */
struct ckpt_base {
    struct ckpt_dir *dir;
    json_t *config;           /* config.json; NULL if there is none */
    struct ckpt_catalog *cat; /* headers of its weights; NULL if it has none */
    struct ckpt_facts facts;  /* the reader's facts about cat */
    /* {tensor: file}, which may name weights that do not exist; NULL: no index */
    struct ckpt_weight_map *weight_map;
};

/* Open the base `name`: a directory, or ORG/NAME, which means the snapshot that refs/main names in
 * the local hub cache (HF_HUB_CACHE, HF_HOME/hub, ~/.cache/huggingface/hub). Never uses the
 * network. The directory is opened with `recording` (NULL: none). */
int ckpt_base_open(const char *name, const struct ckpt_access *how, struct ckpt_fdpool *pool,
                   struct ckpt_base **ret, struct ckpt_err *err);
/* Find the directory that `name` means; *ret_path is new. MISSING: `name` is neither a directory
 * nor in the cache. */
int ckpt_base_find(const char *name, char **ret_path, struct ckpt_err *err);
void ckpt_base_free(struct ckpt_base *base);
