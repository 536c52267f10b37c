/* SPDX-License-Identifier: Apache-2.0 */
/* The sharding annotations in model files, for the tensors of one model: which layer and expert a
 * tensor belongs to, and which parts of its dimensions are divided over tp and ep. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "base/json.h"
#include "recipe/apply/shares.h"

struct ckpt_catalog;
struct ckpt_recipes;
struct ckpt_tensor;

/* The annotations of one tensor. */
struct ckpt_sharding {
    bool found; /* a model file describes the tensor */
    bool has_layer, has_expert;
    uint64_t layer, layers, expert, experts;
    bool first;              /* it belongs before the layers */
    bool embedding;          /* it is the token embedding, and if tied also the output matrix */
    struct ckpt_shares *dim; /* per dimension */
};

struct ckpt_annotations;

/* Make the lookup for the tensors of a catalogue with Hugging Face's names and their config.json
 * (NULL: names are other ones, and no annotation is found). All arguments are borrowed. It uses the
 * model file of the config's model_type, and the common one. */
int ckpt_annotations_new(const struct ckpt_recipes *set, const struct ckpt_catalog *cat,
                         const json_t *config, struct ckpt_annotations **ret, struct ckpt_err *err);
void ckpt_annotations_free(struct ckpt_annotations *m);

/* Does the model have an output matrix of its own? */
bool ckpt_annotations_has_head(const struct ckpt_annotations *m);

/* Get the annotations of a tensor for tp and ep ranks. Release *ret after a failure too. */
int ckpt_annotations_find(const struct ckpt_annotations *m, const struct ckpt_tensor *t,
                          uint32_t tp, uint32_t ep, struct ckpt_sharding *ret,
                          struct ckpt_err *err);
void ckpt_sharding_release(struct ckpt_sharding *m);
