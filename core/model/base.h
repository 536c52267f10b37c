/* SPDX-License-Identifier: Apache-2.0 */
/* The base model (option `base=`): a Hugging Face directory from which a view takes the config, the
 * tokenizer, the split into files and the dtypes that the checkpoint lacks. */
#pragma once

#include "base/err.h"
#include "base/json.h"
#include "container/archive.h"
#include "format/reader.h"
#include "io/dir.h"
#include "io/source.h"
#include "recipe/library/types.h"
#include "tensor/catalog.h"

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

/* The name of the base in adapter_config.json of the adapter in `dir`, or with `below` of the first
 * in one of its folders; *ret is new, or NULL: there is no adapter, or it names none on this
 * machine. */
int ckpt_base_named(struct ckpt_dir *dir, bool below, char **ret, struct ckpt_err *err);
/* The i-th name of a model's tensors: in its catalogue or, if that is NULL, in its index. NULL:
 * there are no more. */
const char *ckpt_base_name_at(const struct ckpt_catalog *cat, const struct ckpt_weight_map *map,
                              size_t i);

/* Return the base's split into files whose names are not those of a single file of transformers;
 * NULL: there is none. Borrowed. */
const struct ckpt_weight_map *ckpt_base_map(const struct ckpt_base *base);

/* Copy the catalogue of a base, which has one. The copy points into the base's, which must outlive
 * it. */
int ckpt_base_catalog(const struct ckpt_base *base, struct ckpt_catalog **ret,
                      struct ckpt_err *err);

/* The config and the tokenizer of the model, where nobody says which: a trainer, or its user, puts
 * them into the checkpoint, into a folder inside it, or into the folder of the run. They do what a
 * base's would do, but for dtypes and split. One rule for all formats. */
struct ckpt_home {
    struct ckpt_dir *dir; /* with the model's config.json and its tokenizer; NULL: none was found */
    json_t *config;
    char *other; /* the first config.json that describes no model, such as a trainer's; or NULL */
};

/* Find the first config.json with a `model_type` or `architectures`: of the checkpoint in `dir`, of
 * its inner folders, then of the folders `outer`, which end with NULL, and of theirs. A config.json
 * that cannot be read is an error. *ret is all zero before, and is released after a failure too. */
int ckpt_home_find(struct ckpt_dir *dir, struct ckpt_dir *const *outer, struct ckpt_home *ret,
                   struct ckpt_err *err);
void ckpt_home_release(struct ckpt_home *home);

/* Renaming a base's tensors from the hub's names to those that a run saves (the names in memory),
 * as NeMo Automodel's key_mapping does: a list of patterns, of which the first match renames. */
struct ckpt_renames;

/* Load the patterns from a JSON object {pattern: replacement} at `path`. */
int ckpt_renames_load(const char *path, struct ckpt_renames **ret, struct ckpt_err *err);

/* The patterns by which transformers renames a model type's tensors when it loads them; *ret is
 * NULL if the names are the same. */
int ckpt_renames_of_type(const struct ckpt_type *type, struct ckpt_renames **ret,
                         struct ckpt_err *err);
void ckpt_renames_free(struct ckpt_renames *r);

/* Rename one name. *ret_name is new; it equals name if no pattern matches. */
int ckpt_renames_apply(const struct ckpt_renames *r, const char *name, char **ret_name,
                       struct ckpt_err *err);

/* If a name is renamed, add it to the object {new name: name}. */
int ckpt_renames_note(const struct ckpt_renames *r, const char *name, json_t *map,
                      struct ckpt_err *err);
