/* SPDX-License-Identifier: Apache-2.0 */
/* Answers to the readers' questions about names (struct ckpt_naming), from the facts about model
 * types. */
#pragma once

#include "format/reader.h"
#include "recipe/library/types.h"

/* The answers that follow from `types`, which is borrowed. */
struct ckpt_naming ckpt_naming_of(const struct ckpt_types *types);
