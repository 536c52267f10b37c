/* SPDX-License-Identifier: Apache-2.0 */
/* The folder of a step in which its model lies.
 *
 * Most trainers write the model into the step's folder itself. Some put a folder around it, with
 * other things beside the model: OLMo-core (step10/model_and_optim), NeMo-RL
 * (step_10/policy/weights), prime-rl (step_10/trainer), verl (global_step_10/actor), SkyRL
 * (global_step_10/policy). So a step is a folder with one model in it: where a folder named like a
 * step is no checkpoint itself, and exactly one folder in it, at most two levels down, is one, that
 * is the step. Folders with a trainer's state do not count. Where none is, such a folder may hold a
 * format's own steps, of which the one that its pointer file names, or the only one, is the model:
 * NeMo-RL with Megatron writes step_10/policy/weights/iter_0000000. That is looked for last, and by
 * a listing of each folder, so that a step whose model is found before costs nothing more. */
#pragma once

#include <stdbool.h>

#include "base/err.h"
#include "format/reader.h"
#include "io/dir.h"

/* Does a name look like a step's: is it a number ("100"), a word for a step with one ("iter_100"),
 * or a format's name? */
bool ckpt_step_is_name(const char *name);

/* Find the reader of *dir, or of the folder inside with the model, which then replaces *dir.
 *
 * part: the folder inside that the user has chosen (the option part=); NULL, or no checkpoint: the
 * choice is made here. is_step: the folder is a step by its name (or a pointer file names it), so
 * that folders inside which no format knows are looked at. *place, which may be NULL or point to
 * NULL, is where another step of the run has its model ("policy/weights"): that place is looked at
 * first. It is replaced by where this one has it; the caller frees it. Errors are those of
 * ckpt_reader_probe; CONFLICT also if there are two models. */
const struct ckpt_reader *ckpt_step_probe(struct ckpt_dir **dir, const char *part, bool is_step,
                                          char **place, struct ckpt_err *err);
