/* SPDX-License-Identifier: Apache-2.0 */
/* Opening one checkpoint as a view: reader -> catalogue -> recipe -> dtypes -> tree of virtual
 * files. */
#ifndef CKPT_RUN_CHECKPOINT_H
#define CKPT_RUN_CHECKPOINT_H

#include "base/err.h"
#include "base/json.h"
#include "io/dir.h"
#include "model/view.h"
#include "recipe/apply/sharding.h"

/* Make the shared data with one reference, for which the base and the recipes are opened; and give
 * a reference back. */
int ckpt_shared_new(const struct ckpt_options *opt, struct ckpt_shared **ret, struct ckpt_err *err);
void ckpt_shared_unref(struct ckpt_shared *s);

/* Open the checkpoint in dir (referenced). `step` is its name in the run ("" for a single
 * checkpoint), which is a part of the view's generation. `before` is the save that was there when
 * the step was last opened, or NULL (run/save.h). STALE: the checkpoint is being saved; try again.
 */
int ckpt_checkpoint_open(struct ckpt_shared *shared, struct ckpt_dir *dir, const char *step,
                         const struct ckpt_save *before, struct ckpt_view **ret,
                         struct ckpt_err *err);

/* To be called before each read. STALE: the view mixes two saves. */
int ckpt_checkpoint_check(const struct ckpt_view *view, struct ckpt_err *err);

/* Explain which rule made a tensor of the view from which stored tensors, in the form of
 * ckpt_recipe_explain. The checkpoint is read again for it. *ret is NULL if no recipe was used. */
int ckpt_checkpoint_explain(struct ckpt_view *view, const char *tensor, json_t **ret,
                            struct ckpt_err *err);

/* The sharding annotations of the view's tensors, from the model files; the view is borrowed. */
int ckpt_checkpoint_annotations(const struct ckpt_view *view, struct ckpt_annotations **ret,
                                struct ckpt_err *err);

/* The values that the checkpoint holds besides tensors, as ckpt_reader.objects returns them, read
 * at the time of the call. *ret is a new object. */
int ckpt_checkpoint_objects(const struct ckpt_view *view, json_t **ret, struct ckpt_err *err);

/* The names that the model's class has for stored tensors besides their own, as in
 * {"lm_head.weight": "model.embed_tokens.weight"}: what the config ties. A new object; NULL: out of
 * memory. */
json_t *ckpt_checkpoint_tied(const struct ckpt_view *view);

#endif
