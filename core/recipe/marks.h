/* SPDX-License-Identifier: Apache-2.0 */
/* What model files say of a model's tensors under a layout: which layer and expert one belongs to,
 * and which parts of its dimensions are divided over tp and ep. */
#ifndef CKPT_RECIPE_MARKS_H
#define CKPT_RECIPE_MARKS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "base/json.h"

struct ckpt_catalog;
struct ckpt_recipes;
struct ckpt_tensor;

enum ckpt_way { CKPT_TP, CKPT_EP, CKPT_FSDP, CKPT_DP, CKPT_PP, CKPT_WAYS }; /* WAYS: none */

enum { CKPT_SHARES = 64 };

/* [lo, lo+n) of a dimension is divided over `way`, or not at all (WAYS). `groups` is a number of
 * equal groups that must not be torn apart (heads), or 0. Several ranks may have the same group if
 * it is shared: key and value heads, state groups. */
struct ckpt_share {
    uint64_t lo, n, groups;
    enum ckpt_way way;
    bool shared;
    const char *what; /* the groups, for messages */
};

struct ckpt_shares {
    struct ckpt_share share[CKPT_SHARES];
    size_t n;
};

/* Of one tensor. */
struct ckpt_marks {
    bool found; /* a model file speaks of it */
    bool has_layer, has_expert;
    uint64_t layer, layers, expert, experts;
    bool first;              /* before the layers */
    bool embedding;          /* of tokens: where tied, the output matrix too */
    struct ckpt_shares *dim; /* per dimension */
};

struct ckpt_marker;

/* For the tensors of a catalogue with Hugging Face's names and their config.json (NULL: names are
 * other ones, and none is known). All are borrowed. It goes by the model file of the config's
 * model_type, and by the common one. */
int ckpt_marker_new(const struct ckpt_recipes *set, const struct ckpt_catalog *cat,
                    const json_t *config, struct ckpt_marker **ret, struct ckpt_err *err);
void ckpt_marker_free(struct ckpt_marker *m);

/* Does the model have an output matrix of its own? */
bool ckpt_marker_has_head(const struct ckpt_marker *m);

/* The marks of a tensor where tp and ep divide by so many. Release them whatever comes of it. */
int ckpt_marker_find(const struct ckpt_marker *m, const struct ckpt_tensor *t, uint32_t tp,
                     uint32_t ep, struct ckpt_marks *ret, struct ckpt_err *err);
void ckpt_marks_release(struct ckpt_marks *m);

/* Over how many groups of `tp` ranks a share is divided: fewer than tp where heads are shared; 0
 * if that can't be done. */
uint32_t ckpt_share_parts(const struct ckpt_share *s, uint32_t tp);

#endif
