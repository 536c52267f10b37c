/* SPDX-License-Identifier: Apache-2.0 */
/* A view of one checkpoint, and the data that all views of a run share. */
#ifndef CKPT_MODEL_VIEW_H
#define CKPT_MODEL_VIEW_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

#include "base/json.h"
#include "format/reader.h"
#include "io/dir.h"
#include "io/fdpool.h"
#include "model/base.h"
#include "model/decide.h"
#include "model/options.h"
#include "model/remarks.h"
#include "model/rename.h"
#include "recipe/library/recipe.h"
#include "tensor/catalog.h"
#include "tensor/read.h"
#include "tensor/slab.h"
#include "view/view.h"

struct ckpt_save;

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
    json_t *about;     /* facts of the format, from the reader */
    json_t *framework; /* for a writer: the config of the checkpoint's framework, until a recipe
                          makes the one of the format that is written */
    json_t *config;    /* config.json as the view shows it; NULL if it shows none */
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

#endif
