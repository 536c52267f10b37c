/* SPDX-License-Identifier: Apache-2.0 */
/* Opening a checkpoint: what is known and made on the way from a directory to a view, and lives no
 * longer. The way is a straight line:
 *
 *     read        the reader's catalogue and facts     ckpt_opening_read
 *                 the model's config and tokenizer     home.h
 *     identify    whose names, which adapter           identify.h
 *     decide      every choice, as a pure function     decide.h
 *     make        names, values, dtypes, config        model.h
 *     lay out     the files                            files.h
 *
 * run/checkpoint.c walks it, and gives what was made to the view. */
#ifndef CKPT_MODEL_OPENING_H
#define CKPT_MODEL_OPENING_H

#include <stdbool.h>

#include "base/err.h"
#include "base/json.h"
#include "format/reader.h"
#include "model/decide.h"
#include "model/dtypes.h"
#include "model/home.h"
#include "model/view.h"
#include "recipe/library/recipe.h"
#include "recipe/library/types.h"
#include "tensor/catalog.h"

struct ckpt_opening {
    /* what is opened: borrowed, and given by the caller */
    struct ckpt_shared *shared;
    struct ckpt_dir *dir;
    struct ckpt_dir *above; /* the folder of its run; or NULL */
    const char *step;       /* its name in the run; "" for a single checkpoint */
    /* what is found out */
    const struct ckpt_reader *reader;
    struct ckpt_facts facts; /* the reader's; then also what the names say */
    struct ckpt_home home;   /* of the model; none if a base or the reader has its config */
    struct ckpt_decision decision;
    struct ckpt_catalog *cat;     /* the reader's; then the model's */
    struct ckpt_catalog *adapter; /* the adapter that is merged into cat; or NULL */
    json_t *base_names;           /* {tensor: its name in the base} where they differ; or NULL */
    json_t *framework;   /* for a writer: the config of the checkpoint's framework, until a recipe
                            makes the one of the format that is written; or NULL */
    bool config_changed; /* config differs from the file that was read (quantisation removed,
                            another vocabulary) */
    bool cast;           /* at least one tensor has another dtype than it is stored in */
    bool ordered;        /* cat is in the order of the model's state dict */
    /* what the view takes over; its members of these names say more */
    struct ckpt_vtree *tree;
    json_t *about, *config, *warnings;
    char *recipe, *name;
};

/* Find the reader of the checkpoint. All but the members that the caller gives is zero before. The
 * caller releases the opening, after a failure too. */
int ckpt_opening_begin(struct ckpt_opening *o, struct ckpt_err *err);

/* Read the catalogue and the facts, and find the model's home. */
int ckpt_opening_read(struct ckpt_opening *o, struct ckpt_err *err);
void ckpt_opening_release(struct ckpt_opening *o);

/* The facts about the model type that o->config names. */
const struct ckpt_type *ckpt_opening_type(const struct ckpt_opening *o);

/* By which rules the dtypes of the tensors are chosen. Borrows from the opening. */
struct ckpt_dtypes ckpt_opening_dtypes(const struct ckpt_opening *o);

/* The config of a model under transformers' names: the base's, or else the checkpoint's own, or one
 * that was found beside it; or NULL. */
const json_t *ckpt_opening_model_config(const struct ckpt_opening *o);

/* The same of a model under a framework's names, whose own config is the framework's. */
const json_t *ckpt_opening_base_config(const struct ckpt_opening *o);

/* The options for recipes that rename the tensors: transformers' conversions for a model with the
 * names in memory, else the rules for the framework's names. */
struct ckpt_recipe_options ckpt_opening_recipe_options(const struct ckpt_opening *o);

/* Add the catalogue's warnings to those of the view, without repeating any: one catalogue is made
 * of another and may have its warnings too. */
int ckpt_opening_keep_warnings(struct ckpt_opening *o, struct ckpt_err *err);

#endif
