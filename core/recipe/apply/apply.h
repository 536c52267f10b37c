/* SPDX-License-Identifier: Apache-2.0 */
/* Applying a recipe, in three parts: one tensor of the model (target.c), the tensors that a model
 * file lists (items.c), and, for models without a list, those that the checkpoint has (sources.c).
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "base/json.h"
#include "base/str.h"
#include "recipe/apply/instance.h"
#include "recipe/apply/resolve.h"
#include "recipe/library/family.h"
#include "recipe/library/file.h"
#include "recipe/library/recipes.h"
#include "recipe/library/settings.h"
#include "tensor/catalog.h"

/* Limits, and the number of leftovers that a message lists. */
enum {
    CKPT_APPLY_TARGETS = 1 << 24,
    CKPT_APPLY_LEFT = 1 << 20,
    CKPT_APPLY_SHOWN = 20,
    CKPT_APPLY_LACKS = 3,
};

/* ---- tensors that a recipe did not use: none may be dropped silently ---- */

/* used[i] says whether tensor i of src became a part of the model. A tensor that matches one of the
 * recipe's `ignores` is left out, with a warning in `model` that gives the reason. Any other unused
 * tensor is CONFLICT (with `allow` a warning); the text has the first names, likely causes and a
 * remedy. */
int ckpt_leftover_check(const struct ckpt_recipe *recipe, const struct ckpt_catalog *src,
                        const bool *used, bool allow, struct ckpt_catalog *model,
                        struct ckpt_err *err);

/* Tensors that the model's config ties to others but that the checkpoint stores too. They are left
 * out, but must be equal copies. */
struct ckpt_tied_copies {
    struct ckpt_catalog *cat; /* the copies, over the model's sources; NULL: there are none */
    CKPT_VEC(const char *)
    original; /* for each copy the name of the original in the model; borrowed */
};

/* Free the list and its catalogue. */
void ckpt_tied_copies_release(struct ckpt_tied_copies *c);

/* Report that tensor `copy`, which the config ties to `original`, has other values: CONFLICT, or
 * with `allow` a warning of cat that it is left out. */
int ckpt_copy_differs(struct ckpt_catalog *cat, const char *copy, const char *original, bool allow,
                      struct ckpt_err *err);

/* Check that each copy has the same values as its original in `model` (ckpt_tensor_same); if not,
 * it is CONFLICT, or with `allow`, or if the recipe ignores the copy's name, a warning of `model`.
 * A copy whose original is not in the model counts as unused. */
int ckpt_tied_copies_check(const struct ckpt_tied_copies *c, const struct ckpt_recipe *recipe,
                           bool allow, struct ckpt_catalog *model, struct ckpt_err *err);

/* ---- stages of a pipeline ---- */

struct ckpt_pipeline {
    const struct ckpt_recipe *recipe; /* NULL: all tensors are of stage 0 */
    uint32_t *stage;                  /* of each block */
    uint64_t layers;
};

/* The stage of a tensor; 0 if it belongs to no block. */
uint32_t ckpt_pipeline_find(const struct ckpt_pipeline *st, const char *name);

struct ckpt_apply {
    const struct ckpt_recipe *recipe;
    const struct ckpt_catalog *src;
    const struct ckpt_recipe_options *opt;
    struct ckpt_settings set;
    struct ckpt_pipeline pipeline;
    struct ckpt_resolver rs;
    struct ckpt_catalog *cat,
        *joined; /* the model; src with its ranked tensors joined, if it has any */
    bool *used;  /* tensors of src */
    struct ckpt_instance in;
    ckpt_drafts drafts;
    struct ckpt_str name;
    struct {
        const char *name;
        uint64_t at;
    } loop[CKPT_FAMILY_LOOPS];
    size_t nloop;
    uint32_t blocks, block;   /* number of blocks so far; block of the tensors being added, or 0 */
    size_t ntarget, nleft;    /* numbers of targets that were added and left out */
    struct ckpt_lacks *lacks; /* not NULL: it is told what is missing or has another shape, instead
                                 of warnings and errors */
    const char *tied; /* while tied tensors are left out: the tensor that they are copies of */
    struct ckpt_tied_copies copies;
    const char *explain; /* the target to explain, or NULL */
    json_t *explanation;
    struct ckpt_err *err;
};

/* Set ap->name to the name of a model's tensor, with the numbers of the enclosing loops. */
int ckpt_apply_name(struct ckpt_apply *ap, const struct ckpt_model_item *it,
                    struct ckpt_sizes *sizes);

/* Set ap->in to the instance that makes ap->name. all: as in ckpt_resolve. */
int ckpt_apply_resolve(struct ckpt_apply *ap, bool all, struct ckpt_resolution *ret);

/* Record an error for a resolution without the sources of ap->name. Returns -1. */
int ckpt_apply_missing(struct ckpt_apply *ap, const struct ckpt_resolution *r);

/* Add the result of ap->in to the model, under ap->name, with the shape of the model file's item
 * (NULL: any shape). */
int ckpt_apply_add(struct ckpt_apply *ap, const struct ckpt_model_item *it,
                   const struct ckpt_sizes *sizes);

/* Add the result as ckpt_apply_add does, but for a tensor that the config ties to another: it is
 * not added to the model, but must be a copy. */
int ckpt_apply_add_copy(struct ckpt_apply *ap, const struct ckpt_model_item *it,
                        const struct ckpt_sizes *sizes);

/* Add the tensors of a model file's list. */
int ckpt_apply_items(struct ckpt_apply *ap, const struct ckpt_model_items *list);

/* For a recipe that is read backwards: MISSING if the checkpoint lacks a tensor of the list (a
 * warning with allow_partial). Copies of tied tensors must be equal, and are marked as used. */
int ckpt_apply_check(struct ckpt_apply *ap, const struct ckpt_model_items *list);

/* Look whether the catalogue has a listed tensor below another prefix, by the tails of its names,
 * of which the table exists, with their tensors' numbers. */
void ckpt_lacks_relate(struct ckpt_lacks *l, const struct ckpt_catalog *cat, const char *name);

/* Add the tensors of the checkpoint that are not marked as used yet and whose names begin with one
 * of the recipe's prefixes: parts that a list does not describe. */
int ckpt_apply_kept(struct ckpt_apply *ap);

/* Add the tensors of the checkpoint that are not marked as used yet, in the order in which
 * transformers saves converted tensors: that of the names before the conversion. */
int ckpt_apply_sources(struct ckpt_apply *ap);
