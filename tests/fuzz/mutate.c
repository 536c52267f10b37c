/* SPDX-License-Identifier: Apache-2.0 */
/* Structure-aware mutations. */
#include "mutate.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "base/crc32.h"

static uint64_t get(const uint8_t *p, unsigned n)
{
    uint64_t v = 0;

    for (unsigned i = n; i-- > 0;)
        v = v << 8 | p[i];
    return v;
}

static void put(uint8_t *p, unsigned n, uint64_t v)
{
    for (unsigned i = 0; i < n; i++, v >>= 8)
        p[i] = (uint8_t)v;
}

/* A generator of its own: the same seed makes the same mutation. */
static unsigned next(unsigned *seed) { return *seed = *seed * 1664525u + 1013904223u, *seed >> 8; }

/* Values at which parsers err: edges of types, and neighbours of what was there. */
static uint64_t edge(uint64_t old, unsigned *seed)
{
    const uint64_t values[] = {0,          1,         old + 1,    old - 1,
                               old * 2,    old / 2,   0x7f,       0xff,
                               0xffff,     1u << 31,  UINT32_MAX, 1ull << 32,
                               1ull << 62, INT64_MAX, UINT64_MAX, old ^ 1ull << next(seed) % 63};

    return values[next(seed) % (sizeof values / sizeof *values)];
}

/* ---- safetensors ---- */

/* Replace one number of the text by another; *len is the text's length, room its most. */
static void change_number(uint8_t *text, size_t *len, size_t room, unsigned *seed)
{
    size_t at = *len ? next(seed) % *len : 0, end;
    char digits[24];

    while (at < *len && (text[at] < '0' || text[at] > '9'))
        at++;
    for (end = at; end < *len && text[end] >= '0' && text[end] <= '9';)
        end++;
    if (at == end)
        return;
    uint64_t v = edge(
        strtoull((const char *)memcpy(digits, text + at, end - at < 23 ? end - at : 23), NULL, 10),
        seed);
    size_t n = 0;
    do
        digits[n++] = (char)('0' + v % 10);
    while ((v /= 10) && n < 20);
    if (*len - (end - at) + n > room)
        return;
    memmove(text + at + n, text + end, *len - end);
    for (size_t i = 0; i < n; i++)
        text[at + i] = (uint8_t)digits[n - 1 - i];
    *len += n - (end - at);
}

size_t mutate_safetensors(uint8_t *data, size_t size, size_t max, unsigned seed)
{
    const uint64_t header = size >= 8 ? get(data, 8) : 0;

    if (header == 0 || header > size - 8 || next(&seed) % 3 == 0)
        return LLVMFuzzerMutate(data, size, max);
    const size_t tail = size - 8 - (size_t)header, room = max - 8 - tail;
    uint8_t *text = malloc(room + 1);
    size_t len = (size_t)header;
    if (!text)
        return size;
    memcpy(text, data + 8, len);
    text[len] = 0;
    if (next(&seed) % 2)
        change_number(text, &len, room, &seed);
    else
        len = LLVMFuzzerMutate(text, len, room);
    memmove(data + 8 + len, data + 8 + header, tail);
    memcpy(data + 8, text, len);
    put(data, 8, len);
    free(text);
    return 8 + len + tail;
}

/* ---- pickles ---- */

/* The length of an operation and its argument; 0: it is none that torch or pickle writes. */
static size_t op_length(const uint8_t *p, size_t left)
{
    static const char fixed[][2] = {"K\2", "M\3", "J\5", "G\11",   "h\2",
                                    "j\5", "q\2", "r\5", "\x80\2", "\x95\11"};
    static const char plain[] = ".()]}al0120tbRQNo\x81\x85\x86\x87\x88\x89\x8f\x90\x91\x93\x94sued";
    const uint8_t op = p[0];
    size_t n = 0;

    for (size_t i = 0; i < sizeof fixed / sizeof *fixed; i++)
        if (op == (uint8_t)fixed[i][0])
            n = (size_t)fixed[i][1];
    if (!n && op && memchr(plain, op, sizeof plain - 1))
        n = 1;
    if (op == 'c') { /* two lines */
        const uint8_t *first = memchr(p, '\n', left);
        const uint8_t *second =
            first ? memchr(first + 1, '\n', left - (size_t)(first + 1 - p)) : NULL;
        n = second ? (size_t)(second + 1 - p) : 0;
    }
    const unsigned width = op == 'U' || op == 'C' || op == 0x8c || op == 0x8a  ? 1
                           : op == 'X' || op == 'T' || op == 'B' || op == 0x8b ? 4
                           : op == 0x8d || op == 0x8e                          ? 8
                                                                               : 0;
    if (width && left > width && get(p + 1, width) <= left - 1 - width)
        n = 1 + width + (size_t)get(p + 1, width);
    return n <= left ? n : 0;
}

enum { MOST_OPS = 4096 };

/* Where operations begin; the number of them. */
static size_t find_ops(const uint8_t *data, size_t size, size_t at[MOST_OPS + 1])
{
    size_t n = 0, p = 0, len;

    while (n < MOST_OPS && p < size && (len = op_length(data + p, size - p))) {
        at[n++] = p;
        p += len;
    }
    at[n] = p;
    return n;
}

static size_t splice(uint8_t *data, size_t size, size_t max, const size_t cut[2],
                     const uint8_t *from, size_t len)
{
    uint8_t copy[256];

    if (len > sizeof copy || size - (cut[1] - cut[0]) + len > max)
        return size;
    memcpy(copy, from, len);
    memmove(data + cut[0] + len, data + cut[1], size - cut[1]);
    memcpy(data + cut[0], copy, len);
    return size - (cut[1] - cut[0]) + len;
}

size_t mutate_pickle(uint8_t *data, size_t size, size_t max, unsigned seed)
{
    static const char *const others[] = {"N",
                                         "(",
                                         ")",
                                         "]",
                                         "}",
                                         "0",
                                         "2",
                                         "t",
                                         "s",
                                         "u",
                                         "e",
                                         "a",
                                         "R",
                                         "b",
                                         "Q",
                                         "K\x07",
                                         "J\xff\xff\xff\xff",
                                         "h\x01",
                                         "\x88",
                                         "\x85",
                                         "\x86",
                                         "\x87"};
    static size_t at[MOST_OPS + 1];
    const size_t n = size ? find_ops(data, size, at) : 0;

    if (n < 2 || next(&seed) % 4 == 0)
        return LLVMFuzzerMutate(data, size, max);
    const size_t i = next(&seed) % n, k = next(&seed) % n;
    const size_t cut[2] = {at[i], at[i + 1]}, none[2] = {at[i], at[i]};
    const char *other = others[next(&seed) % (sizeof others / sizeof *others)];
    switch (next(&seed) % 5) {
    case 0:
        return splice(data, size, max, cut, data, 0);
    case 1:
        return splice(data, size, max, none, data + at[k], at[k + 1] - at[k]);
    case 2:
        return splice(data, size, max, cut, data + at[k], at[k + 1] - at[k]);
    case 3:
        return splice(data, size, max, cut, (const uint8_t *)other, strlen(other));
    default: /* the argument of one operation */
        if (cut[1] - cut[0] > 1)
            data[cut[0] + 1 + next(&seed) % (cut[1] - cut[0] - 1)] = (uint8_t)next(&seed);
        return size;
    }
}

/* ---- zips ---- */

enum { LOCAL = 30, CENTRAL = 46 };

static bool is_sign(const uint8_t *p, const char *sign) { return memcmp(p, sign, 4) == 0; }

/* Put a new CRC-32 wherever the old one stands in a header. */
static void replace_crc(uint8_t *data, size_t size, uint32_t old, uint32_t now)
{
    for (size_t p = 0; p + 20 <= size; p++) {
        const size_t at = is_sign(data + p, "PK\3\4")     ? p + 14
                          : is_sign(data + p, "PK\1\2")   ? p + 16
                          : is_sign(data + p, "PK\7\x08") ? p + 4
                                                          : 0;
        if (at && old && get(data + at, 4) == old)
            put(data + at, 4, now);
    }
}

/* Change one number of a header: sizes, offsets, flags, counts. */
static void change_field(uint8_t *data, size_t size, unsigned *seed)
{
    size_t p = next(seed) % size;

    while (p + LOCAL <= size && !is_sign(data + p, "PK\3\4") && !is_sign(data + p, "PK\1\2") &&
           !is_sign(data + p, "PK\5\6") && !is_sign(data + p, "PK\6\6"))
        p++;
    if (p + CENTRAL > size)
        return;
    const unsigned width = next(seed) % 2 ? 2 : 4;
    uint8_t *field = data + p + 4 + next(seed) % (CENTRAL - 8);
    put(field, width, edge(get(field, width), seed));
}

size_t mutate_zip(uint8_t *data, size_t size, size_t max, unsigned seed)
{
    const unsigned what = next(&seed) % 4;

    if (size < LOCAL || !is_sign(data, "PK\3\4") || what == 0)
        return LLVMFuzzerMutate(data, size, max);
    if (what == 1) {
        change_field(data, size, &seed);
        return size;
    }
    const size_t begin = LOCAL + (size_t)get(data + 26, 2) + (size_t)get(data + 28, 2);
    size_t end = begin;
    while (end + 4 <= size && !is_sign(data + end, "PK\7\x08") && !is_sign(data + end, "PK\1\2") &&
           !is_sign(data + end, "PK\3\4"))
        end++;
    if (begin >= end || end > size)
        return LLVMFuzzerMutate(data, size, max);
    const uint32_t old = ckpt_crc32(0, data + begin, end - begin);
    uint8_t *member = malloc(end - begin);
    if (!member)
        return size;
    memcpy(member, data + begin, end - begin);
    const size_t len = mutate_pickle(member, end - begin, end - begin, seed);
    memset(data + begin, '.', end - begin); /* what a shorter pickle leaves: STOP */
    memcpy(data + begin, member, len);
    free(member);
    replace_crc(data, size, old, ckpt_crc32(0, data + begin, end - begin));
    return size;
}
