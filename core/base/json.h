/* SPDX-License-Identifier: Apache-2.0 */
/* The only module that uses jansson: parsing with limits, typed look-ups that never guess, and
 * output as Python's json writes it. Objects keep the order of insertion. Functions that return
 * json_t * give a borrowed reference unless they say "new". */
#pragma once

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"

/* json_decref for ckpt_cleanup. */
void ckpt_json_decrefp(json_t **j);

/* Parse text[0..len) as Python's json.loads does, because Python wrote it: of equal keys the last
 * counts; numbers that are no long long or double become an object with one of the two members
 * below; a lone surrogate comes back when it is dumped. Refused: invalid UTF-8, NUL in strings,
 * depth > 64. `what` names the text in errors. *ret is new. */
int ckpt_json_parse(const char *text, size_t len, const char *what, json_t **ret,
                    struct ckpt_err *err);

/* {"__float__": "Infinity"}, also "-Infinity" and "NaN", as transformers 5 writes them
 * (configuration_utils.py, _FLOAT_TAG_KEY). */
#define CKPT_JSON_SPECIAL_FLOAT "__float__"
/* {"__int__": "123..."}, an integer that does not fit; it is dumped as the number again. */
#define CKPT_JSON_BIG_INTEGER "__int__"

/* Parse JSON that people write for us: strict (also Python's NaN and Infinity are refused), no
 * equal keys. Otherwise as ckpt_json_parse. */
int ckpt_json_parse_strict(const char *text, size_t len, const char *what, json_t **ret,
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

/* Returns a string member as ckpt_json_str does, and `absent` where that returns NULL. */
const char *ckpt_json_str_or(const json_t *obj, const char *key, const char *absent);

/* A boolean member; `absent` if it is absent, null or of another type. */
bool ckpt_json_bool(const json_t *obj, const char *key, bool absent);

/* Are two values equal? 10000 and 10000.0 are. */
bool ckpt_json_same(const json_t *a, const json_t *b);

/* Reading JSON in place, value by value, in the order of the text: a header of a million tensors,
 * or a million headers, without a tree of values.
 *
 * Accepts what ckpt_json_parse accepts, except that equal keys of an object are the caller's to
 * refuse. Sticky: after the first failure everything fails, and ckpt_json_pull_end reports it, so a
 * caller may check once.
 *
 *     ckpt_json_pull_object(&p);
 *     while ((key = ckpt_json_pull_member(&p)))
 *         if (strcmp(key, "shape") == 0)
 *             for (ckpt_json_pull_array(&p); ckpt_json_pull_element(&p);)
 *                 ... ckpt_json_pull_u64(&p, &dim[n++]) ...
 *         else
 *             ckpt_json_pull_skip(&p);
 *     if (ckpt_json_pull_end(&p, err) < 0) ... */
struct ckpt_json_pull {
    char *begin, *at, *end; /* *end is NUL */
    const char *what;       /* names the text in errors; borrowed */
    unsigned depth;
    bool first;    /* at the first member or element, if there is one */
    bool too_deep; /* the failure is that */
    bool failed;
    size_t failed_at; /* offset of the byte that failed, and what it is */
    unsigned char found;
    const char *expected;
};

/* text[0..len) is borrowed and changed; text[len] must be NUL. */
void ckpt_json_pull_init(struct ckpt_json_pull *p, char *text, size_t len, const char *what);

/* The first byte of the next value: one of {["-0123456789tfn where the text is valid; NUL at its
 * end, or after a failure. */
char ckpt_json_pull_peek(struct ckpt_json_pull *p);

/* Begin an object; false if the next value is not an object. */
bool ckpt_json_pull_object(struct ckpt_json_pull *p);

/* The next key of the object, as ckpt_json_pull_string; its value comes next. NULL after the last
 * one. */
const char *ckpt_json_pull_member(struct ckpt_json_pull *p);

/* Begin an array; false if the next value is not an array. */
bool ckpt_json_pull_array(struct ckpt_json_pull *p);
/* Has the array another element, which comes next? */
bool ckpt_json_pull_element(struct ckpt_json_pull *p);

/* A string without its escapes; it lies in the text and holds no NUL. NULL if the next value is
 * not a string. */
const char *ckpt_json_pull_string(struct ckpt_json_pull *p);

/* True: the next value was an integer that is not negative. False: it was another, which is
 * skipped; that alone is no failure. */
bool ckpt_json_pull_u64(struct ckpt_json_pull *p, uint64_t *ret);

/* Skip a value of any kind. */
void ckpt_json_pull_skip(struct ckpt_json_pull *p);

/* Has all been valid, and does nothing but white space follow? Else FORMAT, or LIMIT if it nests
 * too deeply. */
int ckpt_json_pull_end(struct ckpt_json_pull *p, struct ckpt_err *err);
