/* SPDX-License-Identifier: Apache-2.0 */
/* The steps that the option average= names, and the one step that they are together. */
#pragma once

#include <stddef.h>

#include "base/err.h"
#include "run/steps.h"

/* All zero: there is no average. */
struct ckpt_average {
    char **step; /* names, in the order of the run's steps, oldest first */
    size_t n;
};

/* Choose the steps: "last:K", the last K finished ones, or names with '+' between them, in which a
 * '+' is written "\+". USAGE: the text is neither. MISSING: there is no such step, or fewer than K.
 * CONFLICT: a step is named twice. */
int ckpt_average_choose(const char *text, const struct ckpt_steps_found *steps,
                        struct ckpt_average *ret, struct ckpt_err *err);
void ckpt_average_release(struct ckpt_average *a);

/* Make *ret a list of one step, named "" as that of a single checkpoint is, which is as new as the
 * newest of the average's steps and has changed when one of them has; an empty one if one has gone.
 */
int ckpt_average_step(const struct ckpt_average *a, const struct ckpt_steps_found *steps,
                      struct ckpt_steps_found *ret, struct ckpt_err *err);
