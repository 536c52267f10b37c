/* SPDX-License-Identifier: Apache-2.0 */
/* Opcodes of protocol 2. */
#include "container/pickle_out.h"

#include <string.h>

static void put_le(struct ckpt_str *out, uint64_t n, int bytes)
{
    for (int i = 0; i < bytes; i++)
        ckpt_str_putc(out, (char)(n >> 8 * i));
}

void ckpt_pickle_out_op(struct ckpt_pickle_out *p, int op) { ckpt_str_putc(p->out, (char)op); }

void ckpt_pickle_out_begin(struct ckpt_pickle_out *p)
{
    ckpt_str_append(p->out, "\x80\x02", 2);
    p->memo = 0;
}

void ckpt_pickle_out_global(struct ckpt_pickle_out *p, const char *module, const char *name)
{
    ckpt_str_putc(p->out, 'c');
    ckpt_str_puts(p->out, module);
    ckpt_str_putc(p->out, '\n');
    ckpt_str_puts(p->out, name);
    ckpt_str_putc(p->out, '\n');
}

/* LONG1: two's complement in as few bytes as hold the sign, too. */
static void put_long(struct ckpt_str *out, uint64_t n)
{
    int bytes = 4;

    while (bytes < 8 && n >> (8 * bytes - 1))
        bytes++;
    if (n >> 63)
        bytes = 9;
    ckpt_str_putc(out, (char)0x8a);
    ckpt_str_putc(out, (char)bytes);
    put_le(out, n, bytes < 9 ? bytes : 8);
    if (bytes == 9)
        ckpt_str_putc(out, 0);
}

void ckpt_pickle_out_u64(struct ckpt_pickle_out *p, uint64_t n)
{
    if (n < 1 << 8) {
        ckpt_str_putc(p->out, 'K');
        put_le(p->out, n, 1);
    } else if (n < 1 << 16) {
        ckpt_str_putc(p->out, 'M');
        put_le(p->out, n, 2);
    } else if (n <= INT32_MAX) {
        ckpt_str_putc(p->out, 'J');
        put_le(p->out, n, 4);
    } else {
        put_long(p->out, n);
    }
}

void ckpt_pickle_out_text(struct ckpt_pickle_out *p, const char *text)
{
    const size_t len = strlen(text);

    ckpt_str_putc(p->out, 'X');
    put_le(p->out, len, 4);
    ckpt_str_append(p->out, text, len);
}

/* An entry's number follows in one byte or in four. */
static void put_entry(struct ckpt_pickle_out *p, char small, char large, uint32_t entry)
{
    ckpt_str_putc(p->out, entry < 256 ? small : large);
    put_le(p->out, entry, entry < 256 ? 1 : 4);
}

void ckpt_pickle_out_put(struct ckpt_pickle_out *p) { put_entry(p, 'q', 'r', p->memo++); }

void ckpt_pickle_out_get(struct ckpt_pickle_out *p, uint32_t entry)
{
    put_entry(p, 'h', 'j', entry);
}

void ckpt_pickle_out_tuple(struct ckpt_pickle_out *p, const uint64_t *n, uint32_t count, bool put)
{
    static const int close[] = {CKPT_PICKLE_OUT_EMPTY_TUPLE, 0x85, 0x86, 0x87};

    if (count > 3)
        ckpt_pickle_out_op(p, CKPT_PICKLE_OUT_MARK);
    for (uint32_t i = 0; i < count; i++)
        ckpt_pickle_out_u64(p, n[i]);
    ckpt_pickle_out_op(p, count > 3 ? CKPT_PICKLE_OUT_TUPLE : close[count]);
    if (put && count)
        ckpt_pickle_out_put(p);
}
