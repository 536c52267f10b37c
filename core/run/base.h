/* SPDX-License-Identifier: Apache-2.0 */
/* The base model (`base=`): a Hugging Face directory that lends config, tokenizer, file split and
 * dtypes. */
#ifndef CKPT_RUN_BASE_H
#define CKPT_RUN_BASE_H

#include "base/err.h"
#include "base/json.h"
#include "ckpt/reader.h"
#include "io/dir.h"
#include "io/fdpool.h"
#include "tensor/catalog.h"

/* Immutable after it is opened. */
struct ckpt_base {
    struct ckpt_dir *dir;
    json_t *config;           /* config.json; NULL if there is none */
    struct ckpt_catalog *cat; /* the headers of its weights; NULL if it has none */
    struct ckpt_facts facts;  /* of cat */
    json_t *weight_map; /* {tensor: file}, also of weights that are not there; NULL: no index */
};

/* `name` is a directory, or ORG/NAME: then the newest snapshot that the local hub cache's refs/main
 * names (HF_HUB_CACHE, HF_HOME/hub,
 * ~/.cache/huggingface/hub); never the network. */
int ckpt_base_open(const char *name, enum ckpt_links links, struct ckpt_fdpool *pool,
                   struct ckpt_base **ret, struct ckpt_err *err);
/* The directory that `name` stands for, malloc'ed. MISSING: it is neither a directory nor in the
 * cache. */
int ckpt_base_find(const char *name, char **ret_path, struct ckpt_err *err);
void ckpt_base_free(struct ckpt_base *base);

#endif
