/* SPDX-License-Identifier: Apache-2.0 */
/* Restoring the order of registration. */
#include "recipe/library/order.h"

#include <string.h>

#include "base/sort.h"
#include "base/str.h"

static size_t place_of(const struct ckpt_texts *order, const char *part, size_t len)
{
    size_t i = 0;

    while (i < order->n && (strlen(order->text[i]) != len || memcmp(order->text[i], part, len)))
        i++;
    return i;
}

int ckpt_order_cmp(const struct ckpt_texts *order, const char *a, const char *b)
{
    const char *x = a, *y = b;

    for (;;) {
        size_t n = strcspn(x, "."), m = strcspn(y, ".");
        if (n != m || memcmp(x, y, n) != 0) {
            size_t p = place_of(order, x, n), q = place_of(order, y, m);
            return p != q ? ckpt_u64_cmp(p, q) : ckpt_natural_cmp(x, y);
        }
        x += n;
        y += m;
        if (!*x || !*y)
            return (*x != 0) - (*y != 0);
        x++;
        y++;
    }
}
