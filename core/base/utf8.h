/* SPDX-License-Identifier: Apache-2.0 */
/* UTF-8: what is well-formed, and how other bytes are shown. */
#pragma once

#include <stdbool.h>
#include <stddef.h>

/* Length of the well-formed UTF-8 sequence at s (0 if it is not one). Overlong forms and surrogates
 * are malformed. */
size_t ckpt_utf8_len(const char *s);

/* Is the whole string well-formed UTF-8? */
bool ckpt_utf8_ok(const char *s);

enum { CKPT_UTF8_SHOWN = 4 }; /* bytes of a character as it is shown, at most */

/* Write the character at s so that it can stand in one line of text: control bytes, and bytes that
 * are not UTF-8, become "\xNN". *ret_len bytes are written to out, without a NUL. Returns how many
 * bytes of s they stand for. */
size_t ckpt_utf8_show(const char *s, char out[CKPT_UTF8_SHOWN], size_t *ret_len);
