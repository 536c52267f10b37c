/* SPDX-License-Identifier: Apache-2.0 */
/* The saves that a run's steps held when they were last opened: a bounded number, the least
 * recently opened ones go first. Not safe from several threads. */
#ifndef CKPT_RUN_SAVES_H
#define CKPT_RUN_SAVES_H

#include <stdint.h>

#include "base/vec.h"
#include "run/save.h"
#include "run/steps.h"

struct ckpt_kept_save {
    char *step;
    struct ckpt_save *save; /* referenced */
    uint64_t used;          /* tick of the last opening */
};

struct ckpt_saves {
    CKPT_VEC(struct ckpt_kept_save) kept;
};

/* The save of the step, referenced for the caller; NULL: it was not opened yet. */
struct ckpt_save *ckpt_saves_find(const struct ckpt_saves *s, const char *step);

/* The step was opened at this tick, and held this save. Without memory it is forgotten: then the
 * step's times decide, as at first sight. */
void ckpt_saves_keep(struct ckpt_saves *s, const char *step, struct ckpt_save *save, uint64_t tick);

/* Drop those of steps that are not there any more. */
void ckpt_saves_forget(struct ckpt_saves *s, const struct ckpt_steps_found *steps);
void ckpt_saves_release(struct ckpt_saves *s);

#endif
