/* SPDX-License-Identifier: Apache-2.0 */
/* The only module that uses jansson: parsing with limits, typed look-ups that never guess, and
 * output as Python's json writes it. Objects keep the order of insertion. Functions that return
 * json_t * give a borrowed reference unless they say "new". */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <jansson.h>

#include "base/err.h"

/* json_decref for ckpt_cleanup. */
void ckpt_json_decrefp(json_t **j);

/* Parse text[0..len): strict JSON (also Python's NaN and Infinity are refused), no duplicate keys,
 * valid UTF-8, no NUL in strings, depth <= 64. `what` names the text in errors. *ret is new. */
int ckpt_json_parse(const char *text, size_t len, const char *what, json_t **ret,
                    struct ckpt_err *err);

enum ckpt_json_style {
    CKPT_JSON_COMPACT, /* {"a":1} */
    CKPT_JSON_LINE,    /* {"a": 1, "b": 2}: json.dumps() */
    CKPT_JSON_PYTHON,  /* json.dumps(indent=2) + "\n": what transformers writes */
};

/* Append a value, or set a member, of a list or object that is being made; both take the value. If
 * there is no memory (also: value is NULL), *list or *obj becomes NULL and stays NULL, so that the
 * caller can check once, at the end. */
void ckpt_json_append(json_t **list, json_t *value);
void ckpt_json_set(json_t **obj, const char *key, json_t *value);

/* Serialise; floats in Python's repr ("1e-05", "10000.0"). The caller frees *ret_text. */
int ckpt_json_dump(const json_t *j, enum ckpt_json_style style, bool sort_keys, char **ret_text,
                   size_t *ret_len, struct ckpt_err *err);

/* Append a string (valid UTF-8) as json.dumps writes it: quoted, ASCII only. */
struct ckpt_str;
void ckpt_json_put_string(struct ckpt_str *out, const char *text);

/* A member by dotted path ("model.model_config"); NULL if any step is absent or not an object. JSON
 * null is returned as such. */
json_t *ckpt_json_at(const json_t *j, const char *path);

/* A non-negative integer member. False if absent, null, another type (also 3.0), or negative. */
bool ckpt_json_u64(const json_t *obj, const char *key, uint64_t *ret_value);

/* A string member, or NULL. Borrowed. */
const char *ckpt_json_str(const json_t *obj, const char *key);

/* A boolean member; `absent` if it is absent, null or of another type. */
bool ckpt_json_bool(const json_t *obj, const char *key, bool absent);
