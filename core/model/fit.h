/* SPDX-License-Identifier: Apache-2.0 */
/* Where in a checkpoint the tensors of another model are: the prefix below which most of their
 * names stand, with their shapes. Which class the model is of does not matter. */
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include "base/err.h"
#include "base/map.h"
#include "base/mem.h"
#include "container/weight_map.h"
#include "tensor/catalog.h"

/* The names that are looked for: those of a catalogue or, without one, of an index, which has no
 * shapes. */
struct ckpt_fit_model {
    const struct ckpt_catalog *cat;    /* or NULL */
    const struct ckpt_weight_map *map; /* for a model without a catalogue; or NULL */
    bool packed; /* its weights are quantised: other tensors of a module stand for its weight */
    struct ckpt_map modules; /* of a model that is packed: its modules, by name */
};

/* Fill in m->modules of a model that is packed. */
int ckpt_fit_model_init(struct ckpt_fit_model *m, struct ckpt_err *err);
/* Free what ckpt_fit_model_init made. */
void ckpt_fit_model_release(struct ckpt_fit_model *m);
/* The number of names. */
size_t ckpt_fit_model_len(const struct ckpt_fit_model *m);
/* Has the model a tensor of this name, or what stands for it? */
bool ckpt_fit_model_has(const struct ckpt_fit_model *m, const char *name);

/* Has cat the weight of which `packed` is a part in a model whose weights are quantised: the weight
 * of its module ("q_proj.weight" for "q_proj.weight_packed"), or a tensor of whose name it is a
 * continuation ("q_proj.weight" for "q_proj.weight.absmax")? */
bool ckpt_fit_stands_for(const struct ckpt_catalog *cat, const char *packed);

/* A place in the checkpoint. */
struct ckpt_fit {
    const char *at;  /* a name that begins with the prefix, which has no end of its own */
    size_t len;      /* of the prefix */
    size_t named;    /* names that are there */
    size_t shaped;   /* those whose tensors have the model's shape, too */
    const char *two; /* a name below a second prefix, where as good as all is a second time; NULL */
    size_t two_len;
};

/* Find the place where most of the model's tensors are among those of `cat`, whose names are name[]
 * (NULL: not a model's). False in *ret_found: there is none at which more than half of either the
 * model's or the checkpoint's tensors are. */
int ckpt_fit_find(const struct ckpt_catalog *cat, const char *const *name,
                  const struct ckpt_fit_model *model, struct ckpt_fit *ret, bool *ret_found,
                  struct ckpt_err *err);

/* Is a a better place than b? */
bool ckpt_fit_better(const struct ckpt_fit *a, const struct ckpt_fit *b);

/* Has the tensor the shape that the model's has, as far as that tells? Packed weights have another
 * one than the weights that they stand for. */
bool ckpt_fit_shape(const struct ckpt_tensor *t, const struct ckpt_tensor *model);
