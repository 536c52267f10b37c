/* SPDX-License-Identifier: Apache-2.0 */
/* Names split at dots. */
#include "tensor/fqn.h"

#include <stdbool.h>
#include <string.h>

#include "base/sort.h"
#include "base/str.h"

struct word {
    const char *text, *digits; /* digits: without leading zeros; NULL: none */
    size_t text_len, digits_len, len;
    bool number; /* digits only */
};

static bool is_digit(char c) { return c >= '0' && c <= '9'; }

/* The part up to the next dot. */
static struct word word_at(const char *s)
{
    struct word w = {.text = s, .len = strcspn(s, ".")};

    w.text_len = w.len;
    while (w.text_len && is_digit(s[w.text_len - 1]))
        w.text_len--;
    w.number = w.len && !w.text_len;
    if (w.text_len < w.len) {
        w.digits = s + w.text_len;
        w.digits_len = w.len - w.text_len;
        while (w.digits_len && *w.digits == '0') {
            w.digits++;
            w.digits_len--;
        }
    }
    return w;
}

static int word_cmp(const struct word *a, const struct word *b)
{
    int c;

    if (a->number != b->number)
        return a->number ? -1 : 1;
    if ((c = memcmp(a->text, b->text, a->text_len < b->text_len ? a->text_len : b->text_len)) ||
        (c = ckpt_u64_cmp(a->text_len, b->text_len)) ||
        (c = ckpt_u64_cmp(!!a->digits, !!b->digits)) ||
        (c = ckpt_u64_cmp(a->digits_len, b->digits_len)) || !a->digits)
        return c;
    return memcmp(a->digits, b->digits, a->digits_len);
}

int ckpt_fqn_cmp(const char *a, const char *b)
{
    for (;;) {
        struct word x = word_at(a), y = word_at(b);
        int c = word_cmp(&x, &y);
        a += x.len;
        b += y.len;
        if (c || !*a || !*b)
            return c ? c : (*a != 0) - (*b != 0);
        a++;
        b++;
    }
}

static size_t place_of(const char *const *words, size_t n, const char *part, size_t len)
{
    size_t i = 0;

    while (i < n && (strlen(words[i]) != len || memcmp(words[i], part, len)))
        i++;
    return i;
}

int ckpt_order_cmp(const char *const *words, size_t n, const char *a, const char *b)
{
    for (;;) {
        const size_t len = strcspn(a, "."), other = strcspn(b, ".");
        if (len != other || memcmp(a, b, len) != 0) {
            const size_t p = place_of(words, n, a, len), q = place_of(words, n, b, other);
            return p != q ? ckpt_u64_cmp(p, q) : ckpt_natural_cmp(a, b);
        }
        a += len;
        b += other;
        if (!*a || !*b)
            return (*a != 0) - (*b != 0);
        a++;
        b++;
    }
}
