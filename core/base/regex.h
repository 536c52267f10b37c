/* SPDX-License-Identifier: Apache-2.0 */
/* Python's re.subn for one pattern and its replacement, by PCRE2. */
#pragma once

#include "base/err.h"

struct ckpt_regex;

/* Compile a pattern in Python's syntax (on text, not on bytes) with a replacement template: \1,
 * \g<1>, \g<name>, \n and the like. USAGE for what Python would refuse, with the place. */
int ckpt_regex_new(const char *pattern, const char *replacement, struct ckpt_regex **ret,
                   struct ckpt_err *err);
void ckpt_regex_free(struct ckpt_regex *r);

/* Replace every match in text. *ret_text is malloc'ed, or NULL: nothing matched. LIMIT if matching
 * takes too long. Safe from many threads. */
int ckpt_regex_sub(const struct ckpt_regex *r, const char *text, char **ret_text,
                   struct ckpt_err *err);
