/* SPDX-License-Identifier: Apache-2.0 */
/* The order of a run's steps by their names, which says which of them is the latest. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "io/dir.h"
#include "run/save.h"

struct ckpt_found_step {
    char *name;
    uint64_t generation; /* changes when the step is saved again */
    int64_t mtime_ns;
    struct ckpt_save_marker marker;
    bool is_model;    /* a finished model (Hugging Face's) that is not named like a step */
    bool is_training; /* it is of a format of checkpoints, not of finished models */
    struct ckpt_file_id folder; /* the folder as it was before the step was last looked at */
    bool settled; /* the folder was the same before the look before that one: nothing can have
                     happened in it within one tick of its clock */
};

/* How the last step of an order was found. */
enum ckpt_order {
    CKPT_ORDER_NAMES,   /* it has the highest number, and its name is the last in natural order */
    CKPT_ORDER_NUMBERS, /* it has the highest number of steps that are named in several ways, but
                           its name is not the last in natural order */
    CKPT_ORDER_TIMES,   /* none of several steps has a number: it is the newest */
};

/* Put n steps into their order, oldest first. A step has a number if its name ends in a whole one
 * ("checkpoint-100", but not "best_f1_0.91"), or differs from another step's in its numbers only
 * ("step1000-unsharded"). Steps without a number ("checkpoint-best") come first, in the order of
 * their times. Steps that are named alike but for their numbers stay together, in natural order; of
 * several such groups, the one with the highest whole number comes last. */
int ckpt_steps_order(struct ckpt_found_step *step, size_t n, enum ckpt_order *ret,
                     struct ckpt_err *err);
