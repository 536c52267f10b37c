/* SPDX-License-Identifier: Apache-2.0 */
/* Looking at UTF-8, byte by byte. */
#include "base/utf8.h"

#include <string.h>

size_t ckpt_utf8_len(const char *text)
{
    const unsigned char *s = (const unsigned char *)text;
    size_t n = s[0] < 0x80 ? 1 : s[0] >= 0xf0 && s[0] < 0xf5 ? 4 : s[0] >= 0xe0 ? 3 : 2;
    if (s[0] >= 0xf5 || (s[0] >= 0x80 && s[0] < 0xc2))
        return 0;
    for (size_t i = 1; i < n; i++)
        if ((s[i] & 0xc0) != 0x80)
            return 0;
    if ((s[0] == 0xe0 && s[1] < 0xa0) || (s[0] == 0xed && s[1] > 0x9f) ||
        (s[0] == 0xf0 && s[1] < 0x90) || (s[0] == 0xf4 && s[1] > 0x8f))
        return 0;
    return n;
}

bool ckpt_utf8_ok(const char *s)
{
    while (*s) {
        size_t n = (unsigned char)*s < 0x80 ? 1 : ckpt_utf8_len(s);
        if (n == 0)
            return false;
        s += n;
    }
    return true;
}

size_t ckpt_utf8_show(const char *s, char out[CKPT_UTF8_SHOWN], size_t *ret_len)
{
    static const char hex[] = "0123456789abcdef";
    const size_t n = ckpt_utf8_len(s);
    const unsigned char c = (unsigned char)*s;

    if (n > 0 && c >= 0x20 && c != 0x7f) {
        memcpy(out, s, n);
        *ret_len = n;
        return n;
    }
    memcpy(out, (const char[]){'\\', 'x', hex[c >> 4], hex[c & 0xf]}, CKPT_UTF8_SHOWN);
    *ret_len = CKPT_UTF8_SHOWN;
    return 1;
}
