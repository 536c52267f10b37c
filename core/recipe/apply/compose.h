/* SPDX-License-Identifier: Apache-2.0 */
/* Pieces of pieces. A tensor that a recipe made has pieces of several axes in a dimension; to map
 * it again they are taken as boxes, and what the boxes give is folded into few pieces, so that a
 * tensor that is mapped twice is read in as few calls as one that is mapped once. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "base/vec.h"
#include "tensor/piece.h"

struct ckpt_tensor;

/* Call `take` for the boxes that a piece of t is made of: pieces with one axis per dimension, of
 * unit step. Stops where it returns -1. UNSUPPORTED if they are not boxes, or too many. */
int ckpt_compose_boxes(const struct ckpt_tensor *t, const struct ckpt_piece *piece,
                       int (*take)(void *ctx, const struct ckpt_piece *box, struct ckpt_err *err),
                       void *ctx, struct ckpt_err *err);

/* Join neighbours of piece[0..n), which lie in a tensor of that shape, into pieces of more axes;
 * returns how many are left. */
size_t ckpt_compose_fold(struct ckpt_piece_draft *piece, size_t n, const uint64_t *dim,
                         uint32_t rank);
