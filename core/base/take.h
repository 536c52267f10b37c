/* SPDX-License-Identifier: Apache-2.0 */
/* Parsing a text from left to right: file names, keys, shapes written as text. Each function moves
 * *s past what it has parsed; if it returns false, *s is unchanged. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

/* Exactly this text. */
bool ckpt_take_text(const char **s, const char *text);

/* Decimal digits, at least one. */
bool ckpt_take_u64(const char **s, uint64_t *ret);
