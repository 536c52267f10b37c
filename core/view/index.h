/* SPDX-License-Identifier: Apache-2.0 */
/* model.safetensors.index.json, as transformers writes it. */
#pragma once

#include <stdint.h>

#include "tensor/catalog.h"
#include "view/shards.h"
#include "view/text.h"

/* What the text is made of; all borrowed, must live as long as the text. */
struct ckpt_index {
    const struct ckpt_catalog *cat;
    const struct ckpt_shards *shards;
    const uint32_t
        *by_name; /* the tensors' indices, by name (strcmp, which is Python's order for UTF-8) */
};

/* The catalogue may not be empty (assert). */
int ckpt_index_text(const struct ckpt_index *index, struct ckpt_arena *arena, struct ckpt_text *ret,
                    struct ckpt_err *err);
