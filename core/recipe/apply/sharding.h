/* SPDX-License-Identifier: Apache-2.0 */
/* The sharding annotations in model files, for the tensors of one model: which layer and expert a
 * tensor belongs to, and which parts of its dimensions are divided over tp and ep. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "base/json.h"
#include "recipe/language/pattern.h"

struct ckpt_catalog;
struct ckpt_recipes;
struct ckpt_tensor;

/* ---- shares ---- */

enum ckpt_way { CKPT_TP, CKPT_EP, CKPT_FSDP, CKPT_DP, CKPT_PP, CKPT_WAYS }; /* WAYS: none */

enum { CKPT_SHARES = 64 };

/* How [lo, lo+n) of a dimension is divided over the ranks of `way` (WAYS: not divided). `groups` is
 * a number of equal groups (such as heads) that must each stay whole, or 0. If it is shared,
 * several ranks may have the same group: key and value heads, state groups. */
struct ckpt_share {
    uint64_t lo, n, groups;
    enum ckpt_way way;
    bool shared;
    bool of_experts;  /* the ranks are those that divide an expert, which are TP's of their own */
    const char *what; /* name of the groups, for messages */
};

struct ckpt_shares {
    struct ckpt_share share[CKPT_SHARES];
    size_t n;
};

/* Is the factor, or one inside it, annotated? */
bool ckpt_factor_is_marked(const struct ckpt_factor *f);

/* Get the shares of a dimension of n elements with the pattern f; NULL: it is not divided. A dim
 * whose size is not known is solved for. `tensor` is for messages. MISSING: a size is not known.
 * CONFLICT: the sizes do not give n. */
int ckpt_shares_of(const struct ckpt_factor *f, uint64_t n, struct ckpt_sizes *sizes,
                   const char *tensor, struct ckpt_shares *ret, struct ckpt_err *err);

/* The number of different parts among `tp` ranks: less than tp if heads are shared; 0: the division
 * is not possible. */
uint32_t ckpt_share_parts(const struct ckpt_share *s, uint32_t tp);

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
CKPT_CLEANUP_BY(ckpt_annotations_free, struct ckpt_annotations)

/* Does the model have an output matrix of its own? */
bool ckpt_annotations_has_head(const struct ckpt_annotations *m);

/* Get the annotations of a tensor for tp and ep ranks. Release *ret after a failure too. */
int ckpt_annotations_find(const struct ckpt_annotations *m, const struct ckpt_tensor *t,
                          uint32_t tp, uint32_t ep, struct ckpt_sharding *ret,
                          struct ckpt_err *err);
void ckpt_sharding_release(struct ckpt_sharding *m);
