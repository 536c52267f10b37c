/* SPDX-License-Identifier: Apache-2.0 */
/* One decoder for all floating types, by the widths of their fields; it is called for elements that
 * differ only, so it need not be fast. */
#include "tool/values.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* How a floating type uses its greatest exponent: for infinity and NaN (IEEE 754); for numbers, but
 * for one NaN (OCP's E4M3); for numbers, where NaN is the negative zero; or the type has nothing
 * but an exponent (OCP's E8M0). */
enum kind { INTEGER, NATURAL, IEEE, FINITE, NO_ZERO_SIGN, POWER };

static const struct number {
    const char *dtype;
    enum kind kind;
    int mantissa, exponent, bias; /* bits of the fields; an integer has `mantissa` bits */
} numbers[] = {
    {"BOOL", NATURAL, 8, 0, 0},
    {"U8", NATURAL, 8, 0, 0},
    {"U16", NATURAL, 16, 0, 0},
    {"U32", NATURAL, 32, 0, 0},
    {"U64", NATURAL, 64, 0, 0},
    {"I8", INTEGER, 8, 0, 0},
    {"I16", INTEGER, 16, 0, 0},
    {"I32", INTEGER, 32, 0, 0},
    {"I64", INTEGER, 64, 0, 0},
    {"F16", IEEE, 10, 5, 15},
    {"BF16", IEEE, 7, 8, 127},
    {"F32", IEEE, 23, 8, 127},
    {"F64", IEEE, 52, 11, 1023},
    {"F8_E5M2", IEEE, 2, 5, 15},
    {"F8_E4M3", FINITE, 3, 4, 7},
    {"F8_E5M2FNUZ", NO_ZERO_SIGN, 2, 5, 16},
    {"F8_E4M3FNUZ", NO_ZERO_SIGN, 3, 4, 8},
    {"F8_E8M0", POWER, 0, 8, 127},
};

static const struct number *find(const char *dtype)
{
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        if (strcmp(numbers[i].dtype, dtype) == 0)
            return &numbers[i];
    return NULL;
}

static long double float_of(const struct number *t, uint64_t bits)
{
    const uint64_t mantissas = (UINT64_C(1) << t->mantissa) - 1,
                   exponents = (UINT64_C(1) << t->exponent) - 1;
    const uint64_t mantissa = bits & mantissas, exponent = bits >> t->mantissa & exponents;
    const bool negative = bits >> t->mantissa >> t->exponent;

    if (t->kind == IEEE && exponent == exponents)
        return mantissa ? (long double)NAN : negative ? -(long double)INFINITY : INFINITY;
    if ((t->kind == FINITE && exponent == exponents && mantissa == mantissas) ||
        (t->kind == NO_ZERO_SIGN && negative && !exponent && !mantissa) ||
        (t->kind == POWER && exponent == exponents))
        return NAN;
    const bool subnormal = exponent == 0 && t->kind != POWER;
    const long double value =
        ldexpl((long double)(subnormal ? mantissa : mantissa | (mantissas + 1)),
               (subnormal ? 1 : (int)exponent) - t->bias - t->mantissa);
    return negative ? -value : value;
}

static long double value_of(const struct number *t, uint64_t bits)
{
    if (t->kind == NATURAL)
        return (long double)bits;
    if (t->kind == INTEGER)
        return (long double)((int64_t)(bits << (64 - t->mantissa)) >> (64 - t->mantissa));
    return float_of(t, bits);
}

static uint64_t bits_of(const unsigned char *element, size_t size)
{
    uint64_t bits = 0;

    for (size_t i = size; i-- > 0;) /* little-endian */
        bits = bits << 8 | element[i];
    return bits;
}

/* Keep an element if it differs more than the one that is kept. */
static void consider(struct ckpt_gap *gap, const struct ckpt_gap *one)
{
    const bool first = gap->differing + gap->within == 0;

    if (first || one->max > gap->max || (!(one->max < gap->max) && one->at < gap->at)) {
        gap->at = one->at;
        gap->max = one->max;
        gap->a = one->a;
        gap->b = one->b;
    }
}

void ckpt_gap_add(struct ckpt_gap *gap, const struct ckpt_gap *part)
{
    if (part->differing + part->within == 0)
        return;
    consider(gap, part);
    gap->differing += part->differing;
    gap->within += part->within;
    gap->nan += part->nan;
}

void ckpt_values_compare(const struct ckpt_values *v, const void *a, const void *b, size_t n,
                         size_t size, uint64_t first, struct ckpt_gap *gap)
{
    const unsigned char *x = a, *y = b;
    const struct number *t = find(v->dtype);

    for (size_t i = 0; i < n; i++, x += size, y += size) {
        struct ckpt_gap one = {.at = first + i, .max = -1};
        if (memcmp(x, y, size) == 0)
            continue;
        bool equal = false;
        if (t) {
            one.a = value_of(t, bits_of(x, size));
            one.b = value_of(t, bits_of(y, size));
            one.nan = isnan(one.a) != isnan(one.b);
            if (!isnan(one.a) && !isnan(one.b))
                one.max = fabsl(one.a - one.b);
            equal = v->tolerance > 0 && !one.nan && one.max <= v->tolerance;
        }
        one.within = equal;
        one.differing = !equal;
        ckpt_gap_add(gap, &one);
    }
}

bool ckpt_value_is_known(const char *dtype) { return find(dtype) != NULL; }

const char *ckpt_value_text(const char *dtype, long double value, char buf[CKPT_VALUE])
{
    const struct number *t = find(dtype);

    if (t && t->kind <= NATURAL)
        (void)snprintf(buf, CKPT_VALUE, "%.0Lf", value);
    else
        (void)snprintf(buf, CKPT_VALUE, "%.*Lg", t && t->mantissa > 23 ? 17 : 9, value);
    return buf;
}
