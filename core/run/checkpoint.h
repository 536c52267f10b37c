/* SPDX-License-Identifier: Apache-2.0 */
/* Opening one checkpoint as a view (model/opening.h), and the check that it is of one save. */
#pragma once

#include "base/err.h"
#include "io/dir.h"
#include "model/view.h"

/* Where a checkpoint is. All is borrowed; the view references what it needs. */
struct ckpt_checkpoint_place {
    struct ckpt_dir *dir;
    struct ckpt_dir *above;  /* the folder of its run; or NULL */
    struct ckpt_dir *around; /* the step's folder, if dir is one inside (run/inner.h); or NULL */
    const char *step;        /* its name in the run; "" for a single checkpoint */
};

/* Open a checkpoint. The step's name is a part of the view's generation. `before` is the save that
 * was there when the step was last opened, or NULL (run/save.h). STALE: the checkpoint is being
 * saved; try again.
 */
int ckpt_checkpoint_open(struct ckpt_shared *shared, const struct ckpt_checkpoint_place *at,
                         const struct ckpt_save *before, struct ckpt_view **ret,
                         struct ckpt_err *err);

/* Open the mean of n steps (model/mean.h), of which the first has the config, the other files and
 * the save that counts. */
int ckpt_checkpoint_open_mean(struct ckpt_shared *shared, const struct ckpt_checkpoint_place *at,
                              size_t n, struct ckpt_view **ret, struct ckpt_err *err);

/* To be called before each read. STALE: the view mixes two saves. */
int ckpt_checkpoint_check(const struct ckpt_view *view, struct ckpt_err *err);
