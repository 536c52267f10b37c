/* SPDX-License-Identifier: Apache-2.0 */
/* universal_checkpoint_info: how the parts of tensor-parallel ranks join, parameter by parameter.
 */
#ifndef CKPT_CKPT_DEEPSPEED_RULES_H
#define CKPT_CKPT_DEEPSPEED_RULES_H

#include "base/err.h"
#include "base/regex.h"
#include "base/vec.h"
#include "ckpt/deepspeed_file.h"

enum ckpt_ds_join {
    CKPT_DS_CAT_0,      /* no pattern: concatenate the rows */
    CKPT_DS_CAT_1,      /* ... the columns */
    CKPT_DS_REPLICATED, /* all ranks have the same */
    CKPT_DS_VOCABULARY, /* rows, cut to the true size of the vocabulary */
    CKPT_DS_HALVES,     /* each part is two, one above the other, which are joined by themselves */
    CKPT_DS_AVERAGE,
    CKPT_DS_SUB_PARAMS,
    CKPT_DS_AFFINE, /* entry `map` of the affine_map says it */
};

struct ckpt_ds_rule {
    struct ckpt_regex *regex;
    enum ckpt_ds_join join;
    ckpt_pv map;
};

struct ckpt_ds_rules {
    CKPT_VEC(struct ckpt_ds_rule) rule; /* the affine map's first */
    bool has_vocabulary;
    uint64_t vocabulary; /* original_vocab_size */
};

/* UNSUPPORTED: the file has none, or of a version that is not known. */
int ckpt_ds_rules_read(const struct ckpt_ds_file *f, struct ckpt_ds_rules *ret,
                       struct ckpt_err *err);
void ckpt_ds_rules_release(struct ckpt_ds_rules *r);

/* The rule of a parameter; *ret->regex is NULL if no pattern matches. CONFLICT: two do. */
int ckpt_ds_rules_find(const struct ckpt_ds_rules *r, const char *name, struct ckpt_ds_rule *ret,
                       struct ckpt_err *err);

#endif
