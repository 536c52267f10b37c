/* SPDX-License-Identifier: Apache-2.0 */
/* These functions answer questions about the checkpoint of an open view that the view's files do
 * not answer. */
#pragma once

#include "base/err.h"
#include "base/json.h"
#include "model/view.h"
#include "recipe/apply/sharding.h"

/* Explain which rule made a tensor of the view from which stored tensors, in the form of
 * ckpt_recipe_explain. The checkpoint is read again for it. *ret is NULL if no recipe was used. */
int ckpt_describe_rule(const struct ckpt_view *view, const char *tensor, json_t **ret,
                       struct ckpt_err *err);

/* The sharding annotations of the view's tensors, from the model files; the view is borrowed. */
int ckpt_describe_sharding(const struct ckpt_view *view, struct ckpt_annotations **ret,
                           struct ckpt_err *err);

/* The values that the checkpoint holds besides tensors, as ckpt_reader.objects returns them, read
 * at the time of the call. *ret is a new object. */
int ckpt_describe_objects(const struct ckpt_view *view, json_t **ret, struct ckpt_err *err);

/* List the states of the parameters, as ckpt_state_list does. The checkpoint is read again for it,
 * with what its optimizer left. *ret is a new object. */
int ckpt_describe_states(const struct ckpt_view *view, json_t **ret, struct ckpt_err *err);

/* The paths of stored names in the nested state dict that was saved, as ckpt_reader.paths returns
 * them. *ret is a new object; {} if the format keeps none. */
int ckpt_describe_paths(const struct ckpt_view *view, json_t **ret, struct ckpt_err *err);

/* The names that the class of the model with this config has for tensors of cat besides their own,
 * as in
 * {"lm_head.weight": "model.embed_tokens.weight"}: what the config ties. A new object; NULL: out of
 * memory. */
json_t *ckpt_describe_ties(const struct ckpt_shared *shared, const struct ckpt_catalog *cat,
                           const json_t *config);
