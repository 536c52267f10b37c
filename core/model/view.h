/* SPDX-License-Identifier: Apache-2.0 */
/* A view of one checkpoint, and the data that all views of a run share. */
#pragma once

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

#include "base/err.h"
#include "base/json.h"
#include "base/log.h"
#include "io/dir.h"
#include "io/source.h"
#include "io/spill.h"
#include "model/base.h"
#include "model/options.h"
#include "recipe/library/recipe.h"
#include "tensor/catalog.h"
#include "tensor/read.h"
#include "tensor/slab.h"
#include "view/view.h"

/* The warnings and notes of all views that a run has opened. Each is logged once, however often its
 * step is opened. Safe from many threads. */
struct ckpt_remarks {
    pthread_mutex_t lock;
    /* [{"step": name, "text": warning}, ...]; "step" is "" of a single checkpoint */
    json_t *list, *notes;
};

/* Add the warnings (an array of strings) of a step's view, or its notes (CKPT_LOG_INFO); those that
 * are new are logged. */
void ckpt_remarks_add(struct ckpt_remarks *r, const struct ckpt_log *log, enum ckpt_log_level level,
                      const char *step, const json_t *lines);

/* The list of warnings as JSON text, which the caller frees. */
int ckpt_remarks_text(struct ckpt_remarks *r, char **ret_json, struct ckpt_err *err);

struct ckpt_save;

/* The data that all views of a run share. Counted, since a view may outlive its run. Immutable,
 * except for members that have their own lock. */
struct ckpt_shared {
    atomic_uint refs;
    struct ckpt_options *opt;
    struct ckpt_fdpool *pool;
    struct ckpt_slabs *slabs;
    struct ckpt_spill *spill; /* for what readers decode; or NULL */
    struct ckpt_recipes *recipes;
    struct ckpt_base *base;       /* or NULL */
    struct ckpt_renames *renames; /* from the option key_mapping; or NULL */
    struct ckpt_read_stats stats;
    atomic_ullong errors; /* number of failed reads */
    atomic_bool told;     /* one of them has been logged */
    struct ckpt_remarks remarks;
    atomic_bool watched; /* set by ckpt_run_watch */
};

/* Make the shared data with one reference, for which the base and the recipes are opened; take, and
 * give back, a reference. */
int ckpt_shared_new(const struct ckpt_options *opt, struct ckpt_shared **ret, struct ckpt_err *err);
struct ckpt_shared *ckpt_shared_ref(struct ckpt_shared *s);
void ckpt_shared_unref(struct ckpt_shared *s);

/* A view: what serves reads. Immutable, except for its reference count and the state of its files.
 * ckpt_view_hold and ckpt_view_release count the references (run/checkpoint.c). */
struct ckpt_view {
    atomic_uint refs;
    atomic_bool stale; /* a read found a changed shard: the run opens another view, while this one
                          continues with the descriptors that it holds */
    atomic_bool mixed; /* the view was opened during a save: every further read fails */
    struct ckpt_shared *shared;
    struct ckpt_save *save;
    struct ckpt_dir *dir, *above; /* of the checkpoint, and of its run (or NULL) */
    struct ckpt_dir *around; /* the step's folder, if the checkpoint lies in one inside; or NULL */
    /* tensors of the view, under Hugging Face's names, or the framework's if raw */
    struct ckpt_catalog *cat;
    struct ckpt_vtree *tree;
    struct ckpt_reading reading;
    json_t *config; /* config.json as the view shows it; NULL if it shows none */
    json_t *groups; /* with an optimizer: its groups of parameters (format/writer.h); or NULL */
    char *recipe;   /* the recipe that named the tensors; NULL: none was used */
    char *source;   /* format and step: "nanotron 1.4, step 20" */
    char *name; /* name of the step, or of a single checkpoint's directory after resolving links */
    uint64_t generation;
};
