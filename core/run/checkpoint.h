/* SPDX-License-Identifier: Apache-2.0 */
/* Opening one checkpoint as a view: reader -> catalogue -> recipe -> dtypes -> tree of virtual
 * files. */
#ifndef CKPT_RUN_CHECKPOINT_H
#define CKPT_RUN_CHECKPOINT_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

#include "base/err.h"
#include "base/json.h"
#include "ckpt/reader.h"
#include "io/dir.h"
#include "io/fdpool.h"
#include "recipe/marks.h"
#include "recipe/recipe.h"
#include "run/base.h"
#include "run/decide.h"
#include "run/options.h"
#include "run/remarks.h"
#include "run/rename.h"
#include "run/save.h"
#include "tensor/catalog.h"
#include "tensor/read.h"
#include "tensor/slab.h"
#include "view/view.h"

/* The data that all views of a run share. Counted, since a view may outlive its run. Immutable,
 * except for members that have their own lock. */
struct ckpt_shared {
    atomic_uint refs;
    struct ckpt_options *opt;
    struct ckpt_fdpool *pool;
    struct ckpt_slabs *slabs;
    struct ckpt_recipes *recipes;
    struct ckpt_base *base;       /* or NULL */
    struct ckpt_renames *renames; /* from the option key_mapping; or NULL */
    struct ckpt_read_stats stats;
    atomic_ullong errors; /* number of failed reads */
    struct ckpt_remarks remarks;
    atomic_bool watched;  /* set by ckpt_run_watch */
    pthread_mutex_t eval; /* held while expressions are evaluated, because that counts references to
                             shared JSON values */
};

/* Make the shared data with one reference, for which the base and the recipes are opened; and give
 * a reference back. */
int ckpt_shared_new(const struct ckpt_options *opt, struct ckpt_shared **ret, struct ckpt_err *err);
void ckpt_shared_unref(struct ckpt_shared *s);

/* A view. Immutable, except for its reference count and the state of its files. */
struct ckpt_view {
    atomic_uint refs;
    atomic_bool stale; /* a read found a changed shard: the run opens another view, while this one
                          continues with the descriptors that it holds */
    atomic_bool mixed; /* the view was opened during a save: every further read fails */
    struct ckpt_shared *shared;
    struct ckpt_save *save;
    struct ckpt_dir *dir;
    /* tensors of the view, under Hugging Face's names, or the framework's if raw */
    struct ckpt_catalog *cat;
    /* only while opening: the adapter that is merged into cat; or NULL */
    struct ckpt_catalog *adapter;
    struct ckpt_vtree *tree;
    struct ckpt_reading reading;
    json_t *base_names; /* only while opening: {tensor: its name in the base} where they differ */
    struct ckpt_facts facts; /* only while opening: the reader's facts */
    struct ckpt_decision decision;
    json_t *about;  /* facts of the format, from the reader */
    json_t *config; /* config.json as the view shows it; NULL if it shows none */
    json_t *warnings;
    char *recipe;        /* NULL: none was used */
    bool config_changed; /* config differs from the file that was read (quantisation removed,
                            another vocabulary) */
    bool cast;           /* at least one tensor has another dtype than it is stored in */
    bool ordered;        /* cat is in the order of the model's state dict */
    char *source;        /* format and step: "nanotron 1.4, step 20" */
    char *name; /* name of the step, or of a single checkpoint's directory after resolving links */
    uint64_t generation;
};

/* Open the checkpoint in dir (referenced). `step` is its name in the run ("" for a single
 * checkpoint), which is a part of the view's generation. `before` is the save that was there when
 * the step was last opened, or NULL (run/save.h). STALE: the checkpoint is being saved; try again.
 */
int ckpt_checkpoint_open(struct ckpt_shared *shared, struct ckpt_dir *dir, const char *step,
                         const struct ckpt_save *before, struct ckpt_view **ret,
                         struct ckpt_err *err);

/* To be called before each read. STALE: the view mixes two saves. */
int ckpt_checkpoint_check(const struct ckpt_view *view, struct ckpt_err *err);

/* Explain which rule made a tensor of the view from which stored tensors, in the form of
 * ckpt_recipe_explain. The checkpoint is read again for it. *ret is NULL if no recipe was used. */
int ckpt_checkpoint_explain(struct ckpt_view *view, const char *tensor, json_t **ret,
                            struct ckpt_err *err);

/* The sharding annotations of the view's tensors, from the model files; the view is borrowed. */
int ckpt_checkpoint_marker(const struct ckpt_view *view, struct ckpt_marker **ret,
                           struct ckpt_err *err);

/* The values that the checkpoint holds besides tensors, as ckpt_reader.objects returns them, read
 * at the time of the call. *ret is a new object. */
int ckpt_checkpoint_objects(const struct ckpt_view *view, json_t **ret, struct ckpt_err *err);

#endif
