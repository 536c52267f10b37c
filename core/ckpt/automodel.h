/* SPDX-License-Identifier: Apache-2.0 */
/* A run folder of NeMo Automodel: epoch_E_step_S directories, LATEST, and .incomplete in those that
 * are being written. What is in model/ is for several readers. */
#ifndef CKPT_CKPT_AUTOMODEL_H
#define CKPT_CKPT_AUTOMODEL_H

#include <stdbool.h>

#include "base/json.h"
#include "io/dir.h"
#include "tensor/catalog.h"

/* As struct ckpt_reader has them. */
char *ckpt_automodel_latest(struct ckpt_dir *run);
bool ckpt_automodel_finished(struct ckpt_dir *dir, const char *name, const char *latest);
extern const char *const ckpt_automodel_rewrites[], *const ckpt_automodel_links[];

/* "epoch" and "step" of the directory's name, if it has such a one. */
int ckpt_automodel_describe_step(const struct ckpt_dir *dir, json_t *about, struct ckpt_err *err);

/* A save that was opened by its own name although it is not finished. */
void ckpt_automodel_warn(const struct ckpt_dir *dir, struct ckpt_catalog *cat);

#endif
