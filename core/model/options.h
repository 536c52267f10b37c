/* SPDX-License-Identifier: Apache-2.0 */
/* The parsed options of a run, which are opaque in include/ckptfs/ckptfs.h. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include <ckptfs/ckptfs.h>

#include "base/json.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/vec.h"
#include "container/archive.h"
#include "format/output.h"
#include "io/spill.h"
#include "tensor/dtype.h"

/* The option lora= says what to show of a checkpoint that contains LoRA matrices. */
enum ckpt_lora_rule {
    CKPT_LORA_AUTO,    /* the adapter; a warning says so if the checkpoint holds the base too */
    CKPT_LORA_ADAPTER, /* the adapter */
    CKPT_LORA_MERGE,   /* adapter and base as one model */
    CKPT_LORA_BASE,    /* the base without the adapter */
};

/* How the option dtype= chooses: by the rules of model/model.c, the stored dtype, or one dtype for
 * all. */
enum ckpt_dtype_rule { CKPT_DTYPE_AUTO, CKPT_DTYPE_STORED, CKPT_DTYPE_CAST };

/* The option missing= says what becomes of tensors that the checkpoint lacks. */
enum ckpt_lacks_rule { CKPT_LACKS_ERROR, CKPT_LACKS_FROM_BASE };

struct ckpt_option;

struct ckpt_options {
    char *base;            /* directory, or ORG/NAME of the local hub cache */
    char *base_named;      /* the adapter's config names the base so, and no option does; or NULL */
    char *part;            /* which model of a step: a folder, or the beginning of names; or NULL */
    char *state;           /* what is shown instead of the weights ("exp_avg"); or NULL */
    char *average;         /* the steps whose mean is shown: "last:3", "a+b"; or NULL */
    CKPT_VEC(char *) also; /* other directories with files of the run */
    char *variant;         /* of a Hugging Face directory's weights ("fp16"); or NULL */
    char *recipe;          /* path of the recipe file */
    char *key_mapping;     /* file with a JSON object {pattern: replacement} that renames the base's
                              tensors to ours */
    enum ckpt_dtype_rule dtype_rule;
    enum ckpt_dtype dtype;   /* for CKPT_DTYPE_CAST */
    uint64_t max_shard_size; /* 0: not given */
    bool raw;
    bool memory;               /* names as transformers has them in memory, not on the hub */
    struct ckpt_output output; /* view=dcp and the like: the format and its layout */
    enum ckpt_lora_rule lora;
    bool optimizer;  /* view=dcp and the like: also what the optimizer has of each parameter */
    bool dequantize; /* convert block-scaled weights to ordinary ones */
    bool allow_partial;
    bool allow_leftover; /* leave out tensors that the model does not have */
    enum ckpt_lacks_rule missing;
    bool allow_mixed; /* open a step although its shards are of two saves or it is being saved */
    bool follow_symlinks;
    bool compares_whole;    /* copies of a file in several directories are compared wholly */
    bool wait;              /* a folder without a step is not an error */
    enum ckpt_far_rule far; /* which files are read as those of storage at a distance */
    struct ckpt_bucket_settings bucket;
    char *cache_dir;               /* folder of a temporary file for what is decoded; or NULL */
    bool no_cache_dir;             /* there is to be none, whatever a program offers */
    bool cache_offered;            /* no user has named it, but a program */
    struct ckpt_spill *spill;      /* that file: ckpt_options_connect; or NULL */
    struct ckpt_client *connected; /* ckpt_options_connect; or NULL */
    json_t *overrides; /* a JSON object: settings of the model, and the recipes' "_rope" */
    struct ckpt_log log;
    struct ckpt_dir *dir; /* the run's directory, which is open already; borrowed, or NULL */
    struct ckpt_recording *recording; /* for the directories that are opened; borrowed, or NULL */
};

/* Make a copy whose base is `named` (copied), which the adapter's config says. */
int ckpt_options_take_base(const struct ckpt_options *opt, const char *named,
                           struct ckpt_options **ret, struct ckpt_err *err);

/* Make a deep copy, without the directory and the recording. */
int ckpt_options_copy(const struct ckpt_options *opt, struct ckpt_options **ret,
                      struct ckpt_err *err);
/* ckpt_options_free for ckpt_cleanup. */
CKPT_CLEANUP_BY(ckpt_options_free, struct ckpt_options)

/* Row i of the table of options; NULL: there are only i rows. */
const struct ckpt_option *ckpt_options_row(size_t i);

/* Do the options go together? USAGE, UNSUPPORTED. */
int ckpt_options_check(const struct ckpt_options *opt, struct ckpt_err *err);

/* How the run's, or base's, directories are opened. */
struct ckpt_access ckpt_options_access(const struct ckpt_options *opt);

/* Are the names to be those that the model's class has in memory? */
bool ckpt_options_memory(const struct ckpt_options *opt);

/* The first override that is a key of config.json (the recipes' own keys begin with '_'); NULL:
 * none. */
const char *ckpt_options_override(const struct ckpt_options *opt);

/* A hash of everything that can change a view's bytes. */
uint64_t ckpt_options_hash(const struct ckpt_options *opt);
