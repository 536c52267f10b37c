/* SPDX-License-Identifier: Apache-2.0 */
/* What readers are told about names, by the facts of model types. */
#ifndef CKPT_RUN_NAMING_H
#define CKPT_RUN_NAMING_H

#include "ckpt/reader.h"
#include "recipe/types.h"

/* `types` is borrowed. */
struct ckpt_naming ckpt_naming_of(const struct ckpt_types *types);

#endif
