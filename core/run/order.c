/* SPDX-License-Identifier: Apache-2.0 */
/* Sorting steps by the form and the numbers of their names. */
#include "run/order.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/sort.h"
#include "base/str.h"

struct ordered {
    struct ckpt_found_step step;
    const char *highest; /* the last name of its form, in natural order; NULL: it has no number */
};

static bool is_digit(char c) { return c >= '0' && c <= '9'; }

static const char *skip_digits(const char *s)
{
    while (is_digit(*s))
        s++;
    return s;
}

/* Compare two names as if every number in them were the same. */
static int form_cmp(const char *a, const char *b)
{
    for (;;) {
        const bool x = is_digit(*a), y = is_digit(*b);
        if (x != y)
            return x ? 1 : -1;
        if (!x && (*a != *b || !*a))
            return (unsigned char)*a - (unsigned char)*b;
        a = x ? skip_digits(a) : a + 1;
        b = x ? skip_digits(b) : b + 1;
    }
}

/* The last whole number in a name before `end`, and its end, or NULL. A decimal fraction is a
 * metric ("best_f1_0.91"), which says nothing about when the step was saved. */
static const char *whole_number(const char *name, const char *end, const char **ret_end)
{
    const char *begin;

    for (; end > name; end = begin) {
        while (end > name && !is_digit(end[-1]))
            end--;
        for (begin = end; begin > name && is_digit(begin[-1]); begin--)
            ;
        const bool follows = begin > name + 1 && begin[-1] == '.' && is_digit(begin[-2]),
                   leads = end[0] == '.' && is_digit(end[1]);
        if (begin < end && !follows && !leads) {
            *ret_end = end;
            return begin;
        }
    }
    return NULL;
}

static bool ends_in_number(const char *name)
{
    const char *last = name + strlen(name), *end;

    return whole_number(name, last, &end) && end == last;
}

/* The last whole number in a name, without leading zeros, and its digits; 0 digits: there is none,
 * or it is 0. */
static const char *last_number(const char *name, size_t *ret_digits)
{
    const char *end = name, *begin = whole_number(name, name + strlen(name), &end);

    begin = begin ? begin : end;
    while (begin < end && *begin == '0')
        begin++;
    *ret_digits = (size_t)(end - begin);
    return begin;
}

static int number_cmp(const char *a, const char *b)
{
    size_t na, nb;
    const char *x = last_number(a, &na), *y = last_number(b, &nb);

    return na != nb ? ckpt_u64_cmp(na, nb) : memcmp(x, y, na);
}

static int by_form(const void *a, const void *b)
{
    const struct ordered *x = a, *y = b;
    const int c = form_cmp(x->step.name, y->step.name);

    return c ? c : ckpt_natural_cmp(x->step.name, y->step.name);
}

static int by_age(const void *a, const void *b)
{
    const struct ordered *x = a, *y = b;
    const int64_t s = x->step.mtime_ns, t = y->step.mtime_ns;
    int c = 0;

    if (!x->highest != !y->highest)
        return x->highest ? 1 : -1;
    if (!x->highest)
        c = (s > t) - (s < t);
    else if ((c = number_cmp(x->highest, y->highest)) == 0)
        c = form_cmp(x->highest, y->highest);
    return c ? c : ckpt_natural_cmp(x->step.name, y->step.name);
}

/* Find the highest name of each form; the steps are sorted by it. */
static void find_highest(struct ordered *o, size_t n)
{
    for (size_t i = 0, end; i < n; i = end) {
        const char *name = o[i].step.name;
        for (end = i + 1; end < n && form_cmp(name, o[end].step.name) == 0; end++)
            ;
        const bool has_number =
            ends_in_number(name) || (end - i > 1 && strpbrk(name, "0123456789"));
        for (size_t k = i; k < end && has_number; k++)
            o[k].highest = o[end - 1].step.name;
    }
}

static enum ckpt_order how_found(const struct ordered *o, size_t n)
{
    if (n < 2)
        return CKPT_ORDER_NAMES;
    if (!o[n - 1].highest)
        return CKPT_ORDER_TIMES;
    for (size_t i = 0; i < n; i++)
        if (o[i].highest && ckpt_natural_cmp(o[i].step.name, o[n - 1].step.name) > 0)
            return CKPT_ORDER_NUMBERS;
    return CKPT_ORDER_NAMES;
}

int ckpt_steps_order(struct ckpt_found_step *step, size_t n, enum ckpt_order *ret,
                     struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) struct ordered *o = calloc(n + 1, sizeof *o);

    if (!o)
        return ckpt_nomem(err);
    for (size_t i = 0; i < n; i++)
        o[i].step = step[i];
    ckpt_sort(o, n, by_form);
    find_highest(o, n);
    ckpt_sort(o, n, by_age);
    for (size_t i = 0; i < n; i++)
        step[i] = o[i].step;
    *ret = how_found(o, n);
    return 0;
}
