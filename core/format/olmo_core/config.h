/* SPDX-License-Identifier: Apache-2.0 */
/* OLMo-core's config.json. Its member `model` says how the blocks of the model are built: one
 * description for all, several with a pattern, or one with exceptions. Recipes need to know what
 * each layer is, so the blocks are laid out here, as olmo_core/nn/transformer/config.py's
 * resolve_block_configs does and olmo_core/nn/attention's SlidingWindowAttentionConfig. */
#pragma once

#include "base/err.h"
#include "base/json.h"
#include "io/dir.h"

/* Read `config.json` of the directory of a step. *ret, which is new, is its member `model` with
 *
 *     block             the first layer's; what attends is always called sequence_mixer
 *     windows           how far each layer attends: a number, or -1 if it attends to everything
 *     window_rope       the rotary embedding of the first layer with a window
 *     full_rope         the rotary embedding of the first layer without one
 *     layers_differ     true: the layers differ in more than their windows and these two
 *     tokenizer         the data's
 *     sequence_length   the data's, or the trainer's
 *
 * as far as the file says it. It stays NULL if there is no such file. FORMAT: the file is not
 * OLMo-core's, or contradicts itself. */
int ckpt_olmo_config_read(const struct ckpt_dir *dir, json_t **ret, struct ckpt_err *err);
