/* SPDX-License-Identifier: Apache-2.0 */
/* One checkpoint, opened: reader -> catalogue -> recipe -> dtypes -> tree of virtual files. */
#ifndef CKPT_RUN_CHECKPOINT_H
#define CKPT_RUN_CHECKPOINT_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

#include "base/err.h"
#include "base/json.h"
#include "io/dir.h"
#include "io/fdpool.h"
#include "recipe/recipe.h"
#include "run/base.h"
#include "run/options.h"
#include "run/remarks.h"
#include "run/rename.h"
#include "tensor/catalog.h"
#include "tensor/read.h"
#include "tensor/slab.h"
#include "view/view.h"

/* What all views of a run share; counted, since a view may outlive its run. Immutable but for what
 * locks itself. */
struct ckpt_shared {
    atomic_uint refs;
    struct ckpt_options *opt;
    struct ckpt_fdpool *pool;
    struct ckpt_slabs *slabs;
    struct ckpt_recipes *recipes;
    struct ckpt_base *base;       /* or NULL */
    struct ckpt_renames *renames; /* of the option key_mapping; or NULL */
    struct ckpt_read_stats stats;
    atomic_ullong errors; /* failed reads */
    struct ckpt_remarks remarks;
    pthread_mutex_t eval; /* evaluating expressions counts references to shared JSON */
};

int ckpt_shared_new(const struct ckpt_options *opt, struct ckpt_shared **ret, struct ckpt_err *err);
void ckpt_shared_unref(struct ckpt_shared *s);

/* Immutable but for the count. */
struct ckpt_view {
    atomic_uint refs;
    struct ckpt_shared *shared;
    struct ckpt_dir *dir;
    struct ckpt_catalog *cat;     /* of the view: HF names, or the framework's if raw */
    struct ckpt_catalog *adapter; /* while it is opened: what is merged into cat; or NULL */
    struct ckpt_vtree *tree;
    struct ckpt_reading reading;
    json_t *base_names; /* while it is opened: {tensor: its name in the base} where that differs */
    json_t *about;      /* facts of the format, from the reader */
    json_t *config;     /* config.json as the view shows it; NULL if it shows none */
    json_t *warnings;
    char *recipe;        /* NULL: none was used */
    bool config_changed; /* config is not to the letter what was read: no quantisation any more,
                            another vocabulary */
    bool own_names;      /* the tensors had their Hugging Face names */
    bool ordered;        /* cat is in the order of a state dict */
    char *source;        /* "nanotron 1.4, step 20" */
    char *name;          /* the step's, or that of a single checkpoint's directory, without links */
    uint64_t generation;
};

/* Open the checkpoint in dir (referenced). `step` is its name in the run ("" for a single one); it
 * goes into the generation. */
int ckpt_checkpoint_open(struct ckpt_shared *shared, struct ckpt_dir *dir, const char *step,
                         struct ckpt_view **ret, struct ckpt_err *err);

/* Which rule made a tensor of the view from which stored ones, as ckpt_recipe_explain says it; the
 * checkpoint is read again for that. *ret is NULL if no recipe was used. */
int ckpt_checkpoint_explain(struct ckpt_view *view, const char *tensor, json_t **ret,
                            struct ckpt_err *err);

/* What the checkpoint holds beside tensors, as ckpt_reader.objects gives it; it is read now. *ret
 * is a new object. */
int ckpt_checkpoint_objects(const struct ckpt_view *view, json_t **ret, struct ckpt_err *err);

#endif
