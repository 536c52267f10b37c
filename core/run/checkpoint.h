/* SPDX-License-Identifier: Apache-2.0 */
/* One checkpoint, opened: reader -> catalogue -> recipe -> dtypes -> tree of virtual files. */
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
    atomic_bool watched;  /* ckpt_run_watch */
    pthread_mutex_t eval; /* evaluating expressions counts references to shared JSON */
};

int ckpt_shared_new(const struct ckpt_options *opt, struct ckpt_shared **ret, struct ckpt_err *err);
void ckpt_shared_unref(struct ckpt_shared *s);

/* Immutable but for the count and what became of its files. */
struct ckpt_view {
    atomic_uint refs;
    atomic_bool stale; /* a read found a shard changed: the run opens another view, this one goes on
                          with the shards that it still has */
    atomic_bool mixed; /* it was opened in the middle of a save: no read succeeds any more */
    struct ckpt_shared *shared;
    struct ckpt_save *save;
    struct ckpt_dir *dir;
    struct ckpt_catalog *cat;     /* of the view: HF names, or the framework's if raw */
    struct ckpt_catalog *adapter; /* while it is opened: what is merged into cat; or NULL */
    struct ckpt_vtree *tree;
    struct ckpt_reading reading;
    json_t *base_names; /* while it is opened: {tensor: its name in the base} where that differs */
    struct ckpt_facts facts; /* while it is opened: what the reader says of how to show it */
    struct ckpt_decision decision;
    json_t *about;  /* facts of the format, from the reader */
    json_t *config; /* config.json as the view shows it; NULL if it shows none */
    json_t *warnings;
    char *recipe;        /* NULL: none was used */
    bool config_changed; /* config is not to the letter what was read: no quantisation any more,
                            another vocabulary */
    bool cast;           /* a tensor has another dtype than it is stored in */
    bool ordered;        /* cat is in the order of a state dict */
    char *source;        /* "nanotron 1.4, step 20" */
    char *name;          /* the step's, or that of a single checkpoint's directory, without links */
    uint64_t generation;
};

/* Open the checkpoint in dir (referenced). `step` is its name in the run ("" for a single one); it
 * goes into the generation. `before`: the save that lay there when it was last opened, or NULL
 * (run/save.h). STALE: it was saved at this moment, try again. */
int ckpt_checkpoint_open(struct ckpt_shared *shared, struct ckpt_dir *dir, const char *step,
                         const struct ckpt_save *before, struct ckpt_view **ret,
                         struct ckpt_err *err);

/* Before each read: STALE if the view is of two saves. */
int ckpt_checkpoint_check(const struct ckpt_view *view, struct ckpt_err *err);

/* Which rule made a tensor of the view from which stored ones, as ckpt_recipe_explain says it; the
 * checkpoint is read again for that. *ret is NULL if no recipe was used. */
int ckpt_checkpoint_explain(struct ckpt_view *view, const char *tensor, json_t **ret,
                            struct ckpt_err *err);

/* What model files say of the view's tensors under a layout; the view is borrowed. */
int ckpt_checkpoint_marker(const struct ckpt_view *view, struct ckpt_marker **ret,
                           struct ckpt_err *err);

/* What the checkpoint holds beside tensors, as ckpt_reader.objects gives it; it is read now. *ret
 * is a new object. */
int ckpt_checkpoint_objects(const struct ckpt_view *view, json_t **ret, struct ckpt_err *err);

#endif
