/* SPDX-License-Identifier: Apache-2.0 */
/* Opcodes of protocol 2. */
#include "container/pickle_out.h"

#include <string.h>

#include "tensor/dtype.h"

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

void ckpt_pickle_out_float(struct ckpt_pickle_out *p, double x)
{
    uint64_t bits;

    memcpy(&bits, &x, sizeof bits);
    ckpt_str_putc(p->out, 'G');
    for (int i = 56; i >= 0; i -= 8)
        ckpt_str_putc(p->out, (char)(bits >> i));
}

static void put_int(struct ckpt_pickle_out *p, json_int_t n)
{
    if (n >= 0) {
        ckpt_pickle_out_u64(p, (uint64_t)n);
        return;
    }
    ckpt_str_append(p->out, "\x8a\x08", 2);
    put_le(p->out, (uint64_t)n, 8);
}

static void put_string(struct ckpt_pickle_out *p, const char *s)
{
    static const char prefix[] = "torch.";

    for (int t = 0; t < CKPT_NDTYPE && strncmp(s, prefix, sizeof prefix - 1) == 0; t++)
        if (strcmp(s + sizeof prefix - 1, ckpt_dtype_torch_name((enum ckpt_dtype)t)) == 0) {
            ckpt_pickle_out_global(p, "torch", s + sizeof prefix - 1);
            return;
        }
    ckpt_pickle_out_text(p, s);
}

void ckpt_pickle_out_json(struct ckpt_pickle_out *p, const json_t *j)
{
    const char *key;
    json_t *value;
    size_t i;

    switch (json_typeof(j)) {
    case JSON_OBJECT:
        ckpt_pickle_out_op(p, CKPT_PICKLE_OUT_EMPTY_DICT);
        ckpt_pickle_out_op(p, CKPT_PICKLE_OUT_MARK);
        json_object_foreach((json_t *)j, key, value) {
            ckpt_pickle_out_text(p, key);
            ckpt_pickle_out_json(p, value);
        }
        ckpt_pickle_out_op(p, CKPT_PICKLE_OUT_SETITEMS);
        break;
    case JSON_ARRAY:
        ckpt_pickle_out_op(p, CKPT_PICKLE_OUT_EMPTY_LIST);
        ckpt_pickle_out_op(p, CKPT_PICKLE_OUT_MARK);
        json_array_foreach(j, i, value)
            ckpt_pickle_out_json(p, value);
        ckpt_pickle_out_op(p, CKPT_PICKLE_OUT_APPENDS);
        break;
    case JSON_STRING:
        put_string(p, json_string_value(j));
        break;
    case JSON_INTEGER:
        put_int(p, json_integer_value(j));
        break;
    case JSON_REAL:
        ckpt_pickle_out_float(p, json_real_value(j));
        break;
    default:
        ckpt_pickle_out_op(p, json_is_true(j)    ? CKPT_PICKLE_OUT_TRUE
                              : json_is_false(j) ? CKPT_PICKLE_OUT_FALSE
                                                 : CKPT_PICKLE_OUT_NONE);
    }
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
