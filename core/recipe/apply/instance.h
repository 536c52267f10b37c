/* SPDX-License-Identifier: Apache-2.0 */
/* A rule applied to certain tensors: the sizes of its axes, and the shape of its target. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "base/vec.h"
#include "recipe/language/rule.h"
#include "recipe/library/settings.h"
#include "tensor/catalog.h"

/* A source tensor of a rule instance. */
struct ckpt_source_use {
    const struct ckpt_tensor *tensor;
    uint32_t side, spelling;
    uint32_t bound; /* axes that its name fixes */
    uint64_t at[CKPT_SCOPE_AXES];
};

/* A rule applied to certain tensors: one target, its sources, and the values of the axes that names
 * fix. */
struct ckpt_instance {
    const struct ckpt_rule *rule;
    uint32_t side; /* number of the target side */
    const char *target;
    struct ckpt_sizes sizes;
    uint32_t bound; /* axes that the target's name fixes */
    uint64_t at[CKPT_SCOPE_AXES];
    CKPT_VEC(struct ckpt_source_use) use;
    uint64_t rest[CKPT_MAX_RANK]; /* the dimensions that "..." represents */
    uint32_t nrest;
    bool has_rest;
    /* not 0: a checkpoint is made of a model; target dimensions with a `_pad` are multiples of this
     */
    uint64_t pad_to;
    uint32_t zeros;             /* the source of zeros for a target's padding; of the catalogue */
    uint64_t padded;            /* elements of zeros in the target */
    struct ckpt_cutter *cutter; /* scratch memory, made when it is needed */
};

/* Solve the sizes from the sources' shapes, and check that all match. CONFLICT or MISSING names the
 * tensor, the dimension, the sizes and the option. */
int ckpt_instance_solve(struct ckpt_instance *in, const struct ckpt_settings *s,
                        struct ckpt_err *err);

/* Compute the target's shape, after the sizes were solved. */
int ckpt_instance_shape(struct ckpt_instance *in, uint64_t dim[CKPT_MAX_RANK], uint32_t *ret_rank,
                        struct ckpt_err *err);

/* The dimensions of "..." are represented by axes whose numbers follow those of the scope. */
enum {
    CKPT_REST_AXIS = CKPT_SCOPE_AXES,
    CKPT_ALL_AXES = CKPT_SCOPE_AXES + CKPT_MAX_RANK,
};

/* The dimensions of one side of a rule for a tensor of a certain rank. */
struct ckpt_dims {
    struct {
        const struct ckpt_factor *f; /* NULL: one of the dimensions of "..." */
        uint32_t rest;               /* which of them */
    } d[CKPT_MAX_RANK];
    uint32_t n, nrest;
    struct ckpt_factor lead; /* the leading axis that only this spelling of the name has */
};

/* Spell out the dimensions of a side for a tensor of this rank; false if the side does not have
 * that many. `out` points into itself: do not copy it. */
bool ckpt_dims_of(const struct ckpt_side *side, uint32_t spelling, uint32_t rank,
                  struct ckpt_dims *out);

/* CONFLICT: the source tensor has another rank than its side of the rule. */
int ckpt_instance_rank_error(const struct ckpt_instance *in, const struct ckpt_source_use *u,
                             struct ckpt_err *err);

/* ---- pieces ---- */

typedef CKPT_VEC(struct ckpt_piece_draft) ckpt_drafts;

/* Append the target's pieces to out. They cover every element of the target exactly once (checked).
 */
int ckpt_instance_lower(struct ckpt_instance *in, const uint64_t *dim, uint32_t rank,
                        ckpt_drafts *out, struct ckpt_err *err);

/* Free the scratch memory; everything else is borrowed. */
void ckpt_instance_release(struct ckpt_instance *in);

/* ---- one tensor by a pair of axis patterns, without a recipe ---- */

/* Make *ret a rearrangement of t, a tensor over cat's sources: for example "e n g b" to "e g b n",
 * or "(e=4 r) h" to "e r h". Every element of t occurs once in *ret. *ret has t's name and is not
 * added to the catalogue, but its pieces are in the catalogue's memory. CONFLICT: the sizes do not
 * match. UNSUPPORTED: t is computed, or its pieces are not boxes. */
int ckpt_rearrange(struct ckpt_catalog *cat, const struct ckpt_tensor *t, const char *from,
                   const char *to, struct ckpt_tensor *ret, struct ckpt_err *err);

/* ---- pieces of pieces ---- */

/* A tensor that a recipe made has pieces of several axes in a dimension; to map
 * it again they are taken as boxes, and what the boxes give is folded into few pieces, so that a
 * tensor that is mapped twice is read in as few calls as one that is mapped once. */

/* Call `take` for the boxes that a piece of t is made of: pieces with one axis per dimension, of
 * unit step. Stops where it returns -1. UNSUPPORTED if they are not boxes, or too many. */
int ckpt_compose_boxes(const struct ckpt_tensor *t, const struct ckpt_piece *piece,
                       int (*take)(void *ctx, const struct ckpt_piece *box, struct ckpt_err *err),
                       void *ctx, struct ckpt_err *err);

/* Join neighbours of piece[0..n), which lie in a tensor of that shape, into pieces of more axes;
 * returns how many are left. */
size_t ckpt_compose_fold(struct ckpt_piece_draft *piece, size_t n, const uint64_t *dim,
                         uint32_t rank);
