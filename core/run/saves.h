/* SPDX-License-Identifier: Apache-2.0 */
/* The saves that a run's steps held when they were last opened. Their number is bounded; the least
 * recently opened are dropped first. Not safe from several threads. */
#pragma once

#include "base/vec.h"
#include "run/save.h"
#include "run/steps.h"

struct ckpt_kept_save {
    char *step;
    struct ckpt_save *save; /* referenced */
};

struct ckpt_saves {
    CKPT_VEC(struct ckpt_kept_save) kept; /* the last opened at the end */
};

/* The recorded save of the step, referenced for the caller; NULL: none is recorded. */
struct ckpt_save *ckpt_saves_find(const struct ckpt_saves *s, const char *step);

/* Record that the step was opened and held this save. If there is no memory, nothing
 * is recorded; the next opening then goes by the times of the files, like a first one. */
void ckpt_saves_keep(struct ckpt_saves *s, const char *step, struct ckpt_save *save);

/* Drop the saves of steps that no longer exist. */
void ckpt_saves_forget(struct ckpt_saves *s, const struct ckpt_steps_found *steps);
void ckpt_saves_release(struct ckpt_saves *s);
