/* SPDX-License-Identifier: Apache-2.0 */
/* The option average=: the mean of several steps' models, which is a better model than the last one
 * at the end of many trainings. Each step's model is made as ever; then each tensor becomes the
 * mean of the tensors of its name (tensor/value.h). */
#pragma once

#include "base/err.h"
#include "base/json.h"
#include "tensor/catalog.h"

/* A step's model under the view's names, before any tensor is cast. */
struct ckpt_mean_step {
    const char *name;         /* of the step */
    struct ckpt_catalog *cat; /* owned; NULL once another catalogue keeps it */
    json_t *config;           /* owned, or NULL */
};

/* Make the first step's tensors the means of those of all n steps, which are given newest first and
 * added oldest first. Its catalogue keeps the others.
 * Names, shapes, dtypes and configs must agree, and tensors that are no floating-point numbers must
 * be equal, which is read to find out. CONFLICT, UNSUPPORTED: the first that does not, with step
 * and tensor. */
int ckpt_mean_make(struct ckpt_mean_step *step, size_t n, struct ckpt_err *err);
