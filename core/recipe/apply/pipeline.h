/* SPDX-License-Identifier: Apache-2.0 */
/* The stages of a pipeline: which rank has which blocks of a framework's model, by the costs that a
 * recipe states ("pipeline"). */
#pragma once

#include <stdint.h>

#include "recipe/library/settings.h"

struct ckpt_pipeline {
    const struct ckpt_recipe *recipe; /* NULL: all tensors are of stage 0 */
    uint32_t *stage;                  /* of each block */
    uint64_t layers;
};

/* Divide the blocks as nanotron does (models/base.py, build_model): a stage ends with the block at
 * which the costs so far exceed its share of the whole. *st is zeroed by the caller, and must be
 * released after a failure too. USAGE: there are more stages than layers. */
int ckpt_pipeline_init(struct ckpt_pipeline *st, const struct ckpt_recipe *recipe,
                       struct ckpt_settings *set, uint32_t pp, struct ckpt_err *err);
void ckpt_pipeline_release(struct ckpt_pipeline *st);

/* The stage of a tensor; 0 if it belongs to no block. */
uint32_t ckpt_pipeline_find(const struct ckpt_pipeline *st, const char *name);
