/* SPDX-License-Identifier: Apache-2.0 */
/* A growing string. Sticky: once memory ran out every later append does nothing and `failed` stays
 * set, so that a caller checks once, at ckpt_str_steal. */
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include "base/err.h"
#include "base/utf8.h"

struct ckpt_str {
    char *ptr; /* NUL-terminated once anything was appended; else NULL */
    size_t len;
    size_t cap;
    bool failed;
};

/* Free the text; the string is empty afterwards. */
void ckpt_str_release(struct ckpt_str *s);
/* Append bytes, a NUL-terminated text, one character, or formatted text. */
void ckpt_str_append(struct ckpt_str *s, const char *ptr, size_t len);
void ckpt_str_puts(struct ckpt_str *s, const char *text);
void ckpt_str_putc(struct ckpt_str *s, char c);
void ckpt_str_printf(struct ckpt_str *s, const char *fmt, ...) CKPT_PRINTF(2, 3);
/* Make the string empty, and keep its memory for later appends. */
void ckpt_str_clear(struct ckpt_str *s);

/* Append in decimal; many times faster than printf. */
void ckpt_str_put_u64(struct ckpt_str *s, unsigned long long value);

/* The text so far, "" when empty; valid until the next change. */
const char *ckpt_str_get(const struct ckpt_str *s);

/* Gives the text (never NULL when 0 is returned) to the caller, who frees it; the string is empty
 * after. */
int ckpt_str_steal(struct ckpt_str *s, char **ret_text, struct ckpt_err *err);

/* A malloc'ed formatted string, or NULL. */
char *ckpt_asprintf(const char *fmt, ...) CKPT_PRINTF(1, 2);

/* A malloc'ed copy with each character as ckpt_utf8_show has it; NULL: no memory. */
char *ckpt_printable(const char *bytes);
bool ckpt_has_prefix(const char *s, const char *prefix);
bool ckpt_has_suffix(const char *s, const char *suffix);
bool ckpt_one_of(const char *s, const char *const *words); /* the last is NULL */

/* A remark for an error about a path that is not there: "", or that part of it is a scheme ("s3:/",
 * also behind the directory that made it absolute). Static storage. */
const char *ckpt_path_advice(const char *path);

/* Take every occurrence of `word`, which is not empty, out of the text, in place. */
void ckpt_remove_word(char *s, const char *word);

/* Decimal digits only, no sign, no blanks; all of s[0..len). False if it is not one or does not
 * fit. */
bool ckpt_parse_u64(const char *s, size_t len, unsigned long long *ret_value);

/* strcmp that orders runs of digits by value ("step-9" before "step-10"). Total: equal only for
 * equal strings. */
int ckpt_natural_cmp(const char *a, const char *b);
