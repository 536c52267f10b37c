/* SPDX-License-Identifier: Apache-2.0 */
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
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"

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
