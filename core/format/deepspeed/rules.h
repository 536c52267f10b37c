/* SPDX-License-Identifier: Apache-2.0 */
/* The rules in universal_checkpoint_info: how the parts of the tensor-parallel ranks are joined,
 * parameter by parameter. */
#pragma once

#include "base/err.h"
#include "base/regex.h"
#include "base/vec.h"
#include "format/deepspeed/file.h"

enum ckpt_ds_join {
    CKPT_DS_CAT_0,      /* no pattern: concatenate along dimension 0 */
    CKPT_DS_CAT_1,      /* concatenate along dimension 1 */
    CKPT_DS_REPLICATED, /* all ranks have the same tensor */
    CKPT_DS_VOCABULARY, /* concatenate along dimension 0, and truncate to the unpadded vocabulary */
    CKPT_DS_HALVES,     /* each part is two matrices, one above the other; each of the two is joined
                           separately */
    CKPT_DS_AVERAGE,
    CKPT_DS_SUB_PARAMS,
    CKPT_DS_AFFINE, /* as entry `map` of the affine_map says */
};

struct ckpt_ds_rule {
    struct ckpt_regex *regex;
    enum ckpt_ds_join join;
    ckpt_pv map;
};

struct ckpt_ds_rules {
    CKPT_VEC(struct ckpt_ds_rule) rule; /* those of the affine map come first */
    bool has_vocabulary;
    uint64_t vocabulary; /* original_vocab_size */
};

/* Read the rules. UNSUPPORTED: the file has none, or their version is not known. */
int ckpt_ds_rules_read(const struct ckpt_torch_file *f, struct ckpt_ds_rules *ret,
                       struct ckpt_err *err);
void ckpt_ds_rules_release(struct ckpt_ds_rules *r);

/* Find the rule of a parameter; *ret->regex is NULL if no pattern matches. CONFLICT: several
 * patterns match. */
int ckpt_ds_rules_find(const struct ckpt_ds_rules *r, const char *name, struct ckpt_ds_rule *ret,
                       struct ckpt_err *err);

/* Does a pattern of a list, which the key names, match the name? */
int ckpt_ds_rules_match(const struct ckpt_torch_file *f, const char *key, const char *name,
                        bool *ret, struct ckpt_err *err);
