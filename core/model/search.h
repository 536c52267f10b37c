/* SPDX-License-Identifier: Apache-2.0 */
/* The search for a transformers model in a checkpoint of any format: what is known and found on the
 * way from stored names to the model's. names.c walks it. */
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include "base/err.h"
#include "base/json.h"
#include "model/base.h"
#include "model/fit.h"
#include "recipe/library/recipe.h"
#include "recipe/library/types.h"
#include "tensor/catalog.h"

/* All but the members of the first part is zero before. */
struct ckpt_search {
    /* given and borrowed */
    struct ckpt_catalog *cat;
    const struct ckpt_recipes *recipes;
    const struct ckpt_base *base;
    const json_t *config;
    const struct ckpt_type *type;
    const struct ckpt_type *any; /* the facts about a type that no file lists */
    bool allow_leftover;
    bool fills; /* tensors of the base stand in for missing ones */
    /* found */
    const char *bare;  /* the tensor that shows a model without a head; NULL: it may have one */
    const char **name; /* name without wrappers; NULL: the tensor is not the model's */
    char *prefix;
    const char *anchor; /* the embedding; NULL: nobody knows which it is */
    /* the base's tensors under its own names, and under those in memory, if these are others */
    struct ckpt_fit_model hub, memory;
    struct ckpt_catalog *in_memory;      /* of the latter; or NULL */
    const struct ckpt_fit_model *follow; /* the one whose names the checkpoint has; NULL: none */
    bool unsure;  /* the names in memory are not known, though they may be others */
    bool as_base; /* these are the names of the base, and nothing is to be converted */
};

/* Free what the search has made. */
void ckpt_search_release(struct ckpt_search *s);

/* Find s->prefix, s->anchor and s->follow, by the names of the base or else by the facts about the
 * type; s->prefix stays NULL where there is no evidence of a model. CONFLICT: there are two models.
 */
int ckpt_search_prefix(struct ckpt_search *s, struct ckpt_err *err);

/* Return the place of the tensor of this name, without the prefix; SIZE_MAX: there is none. */
size_t ckpt_search_find(const struct ckpt_search *s, const char *name);

/* Leave out tied tensors. CONFLICT (with allow_leftover a warning): config.json ties a tensor that
 * has other values. */
int ckpt_search_drop_tied(struct ckpt_search *s, struct ckpt_err *err);

/* Leave out, with a warning, tensors that the base has not because it has the same values under
 * another name: a model has them twice in memory, and save_pretrained writes them once. */
int ckpt_search_drop_copies(struct ckpt_search *s, struct ckpt_err *err);
