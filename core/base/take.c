/* SPDX-License-Identifier: Apache-2.0 */
/* Parsing texts from left to right. */
#include "base/take.h"

#include <string.h>

#include "base/str.h"

bool ckpt_take_text(const char **s, const char *text)
{
    if (!ckpt_has_prefix(*s, text))
        return false;
    *s += strlen(text);
    return true;
}

bool ckpt_take_u64(const char **s, uint64_t *ret)
{
    const size_t n = strspn(*s, "0123456789");
    unsigned long long value;

    if (!ckpt_parse_u64(*s, n, &value))
        return false;
    *s += n;
    *ret = value;
    return true;
}
