/* SPDX-License-Identifier: Apache-2.0 */
/* The options of a run, parsed: what include/ckptfs/ckptfs.h keeps opaque. */
#ifndef CKPT_RUN_OPTIONS_H
#define CKPT_RUN_OPTIONS_H

#include <stdbool.h>
#include <stdint.h>

#include <ckptfs/ckptfs.h>

#include "base/json.h"
#include "base/log.h"
#include "tensor/dtype.h"

/* What to show of a checkpoint that holds LoRA's matrices. */
enum ckpt_lora_rule {
    CKPT_LORA_AUTO,    /* the adapter; a warning says so if the checkpoint holds the base too */
    CKPT_LORA_ADAPTER, /* the adapter */
    CKPT_LORA_MERGE,   /* adapter and base as one model */
    CKPT_LORA_BASE,    /* the base without the adapter */
};

enum ckpt_dtype_rule { CKPT_DTYPE_AUTO, CKPT_DTYPE_STORED, CKPT_DTYPE_CAST };

struct ckpt_options {
    char *base;        /* directory, or ORG/NAME of the local hub cache */
    char *recipe;      /* path */
    char *key_mapping; /* path of a JSON object {pattern: replacement}: base's names -> ours */
    enum ckpt_dtype_rule dtype_rule;
    enum ckpt_dtype dtype;   /* CAST */
    uint64_t max_shard_size; /* 0: not given */
    bool raw;
    bool memory; /* names as transformers has them in memory, not on the hub */
    enum ckpt_lora_rule lora;
    bool dequantize; /* block-scaled weights become ordinary ones */
    bool allow_partial;
    bool allow_leftover; /* leave out tensors that the model does not have */
    bool allow_mixed; /* a step whose shards are of two saves, or which is being saved, is opened */
    bool follow_symlinks;
    bool wait;         /* a folder without a step is no error */
    json_t *overrides; /* object: numbers of the model, and the recipes' own "_rope" */
    struct ckpt_log log;
};

int ckpt_options_copy(const struct ckpt_options *opt, struct ckpt_options **ret,
                      struct ckpt_err *err);
void ckpt_options_freep(struct ckpt_options **opt);

/* The first override that is a key of config.json (the recipes' own begin with '_'); NULL: none. */
const char *ckpt_options_override(const struct ckpt_options *opt);

/* A hash of everything that can change a view's bytes. */
uint64_t ckpt_options_hash(const struct ckpt_options *opt);

#endif
