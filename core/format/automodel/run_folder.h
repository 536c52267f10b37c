/* SPDX-License-Identifier: Apache-2.0 */
/* Run folders of NeMo Automodel: directories epoch_E_step_S, a link LATEST, and a file .incomplete
 * in directories that are being written. The directory model/ in a step has one of several formats,
 * each with its own reader. */
#pragma once

#include <stdbool.h>

#include "base/json.h"
#include "io/dir.h"
#include "tensor/catalog.h"

/* Implementations of the functions of the same names in struct ckpt_reader. */
char *ckpt_automodel_latest(struct ckpt_dir *run);
bool ckpt_automodel_finished(struct ckpt_dir *dir, const char *name, const char *latest);
extern const char *const ckpt_automodel_rewrites[], *const ckpt_automodel_links[];

/* Add "epoch" and "step", from the directory's name if it has that form, to cat->about; and warn if
 * the save, which was opened by its own name, is not finished. */
void ckpt_automodel_describe_step(const struct ckpt_dir *dir, struct ckpt_catalog *cat);
