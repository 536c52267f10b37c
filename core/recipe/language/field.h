/* SPDX-License-Identifier: Apache-2.0 */
/* Reading the JSON of recipes and model files. Errors say where in the file, and unknown keys are
 * errors. */
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include "base/err.h"
#include "base/json.h"
#include "base/mem.h"

/* A list of texts. */
struct ckpt_texts {
    const char *const *text;
    size_t n;
};

/* Is the word among them? */
bool ckpt_texts_have(const struct ckpt_texts *w, const char *word, size_t len);

/* Make a formatted string in the arena. NULL, with NOMEM: out of memory. */
char *ckpt_field_text(struct ckpt_arena *arena, struct ckpt_err *err, const char *fmt, ...)
    CKPT_PRINTF(3, 4);

/* j must be an object whose keys are all among `known` (ends with NULL). */
int ckpt_field_object(const json_t *j, const char *where, const char *const *known,
                      struct ckpt_err *err);

/* Read a member that is a string or a list of strings into the arena; absent: no texts. key NULL:
 * obj itself is that. */
int ckpt_field_strings(struct ckpt_arena *arena, const json_t *obj, const char *key,
                       const char *where, struct ckpt_texts *ret, struct ckpt_err *err);

/* Read an optional string member; *ret is NULL if it is absent. Copied into the arena. */
int ckpt_field_string(struct ckpt_arena *arena, const json_t *obj, const char *key,
                      const char *where, const char **ret, struct ckpt_err *err);

/* Is the word among the strings of a list? */
bool ckpt_field_lists(const json_t *list, const char *word);
