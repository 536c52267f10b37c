/* SPDX-License-Identifier: Apache-2.0 */
/* serde_json's spelling of a safetensors header. */
#include "container/st_header.h"

#include <string.h>

int ckpt_st_check_name(const char *name, struct ckpt_err *err)
{
    if (!ckpt_utf8_ok(name))
        return ckpt_fail(err, CKPT_FORMAT, "tensor '%s': the name is not UTF-8", name);
    if (strcmp(name, "__metadata__") == 0)
        return ckpt_fail(err, CKPT_FORMAT, "a tensor cannot be named '%s' in a safetensors file",
                         name);
    return 0;
}

/* serde_json escapes what it must and nothing else: DEL and non-ASCII stay as they are. */
void ckpt_st_put_string(struct ckpt_str *out, const char *s)
{
    static const char short_escape[] = "\"\\\b\f\n\r\t", letter[] = "\"\\bfnrt";

    ckpt_str_putc(out, '"');
    while (*s) {
        size_t plain = 0;
        while ((unsigned char)s[plain] >= 0x20 && s[plain] != '"' && s[plain] != '\\')
            plain++;
        ckpt_str_append(out, s, plain);
        s += plain;
        if (!*s)
            break;
        const char *esc = strchr(short_escape, *s);
        if (esc)
            ckpt_str_printf(out, "\\%c", letter[esc - short_escape]);
        else
            ckpt_str_printf(out, "\\u%04x", (unsigned char)*s);
        s++;
    }
    ckpt_str_putc(out, '"');
}

int ckpt_st_cmp(const struct ckpt_tensor *a, const struct ckpt_tensor *b)
{
    return a->dtype != b->dtype ? (int)b->dtype - (int)a->dtype : strcmp(a->name, b->name);
}

void ckpt_st_header_begin(struct ckpt_str *out, bool bare)
{
    ckpt_str_puts(out, bare ? "{" : "{\"__metadata__\":{\"format\":\"pt\"}");
}

void ckpt_st_header_part(struct ckpt_str *out, const struct ckpt_tensor *t, const uint64_t *dim,
                         uint64_t off, uint64_t len, bool first)
{
    if (!first)
        ckpt_str_putc(out, ',');
    ckpt_st_put_string(out, t->name);
    ckpt_str_puts(out, ":{\"dtype\":\"");
    ckpt_str_puts(out, ckpt_dtype_name(t->dtype));
    ckpt_str_puts(out, "\",\"shape\":[");
    for (unsigned d = 0; d < t->rank; d++) {
        if (d)
            ckpt_str_putc(out, ',');
        ckpt_str_put_u64(out, dim[d]);
    }
    ckpt_str_puts(out, "],\"data_offsets\":[");
    ckpt_str_put_u64(out, off);
    ckpt_str_putc(out, ',');
    ckpt_str_put_u64(out, off + len);
    ckpt_str_puts(out, "]}");
}

void ckpt_st_header_tensor(struct ckpt_str *out, const struct ckpt_tensor *t, uint64_t off,
                           bool first)
{
    ckpt_st_header_part(out, t, t->dim, off, ckpt_tensor_nbytes(t), first);
}

void ckpt_st_header_end(struct ckpt_str *out) { ckpt_str_putc(out, '}'); }

size_t ckpt_st_header_bound(const struct ckpt_tensor *t)
{
    size_t bound = sizeof ",\"\":{\"dtype\":\"F8_E4M3FNUZ\",\"shape\":[],\"data_offsets\":[,]}";

    for (const char *s = t->name; *s; s++)
        bound += (unsigned char)*s < 0x20 ? 6 : *s == '"' || *s == '\\' ? 2 : 1;
    return bound + 21 * ((size_t)t->rank + 2); /* 20 digits and a comma */
}

size_t ckpt_st_header_pad(uint64_t len) { return (size_t)(-len % 8); }

const void *ckpt_st_header_mem(struct ckpt_str *text, struct ckpt_arena *arena, uint64_t *ret_len)
{
    unsigned char *mem;

    for (size_t pad = ckpt_st_header_pad(text->len); pad > 0; pad--)
        ckpt_str_putc(text, ' ');
    if (text->failed || !(mem = ckpt_arena_alloc(arena, 8 + text->len)))
        return NULL;
    for (int i = 0; i < 8; i++)
        mem[i] = (unsigned char)((uint64_t)text->len >> 8 * i);
    memcpy(mem + 8, text->ptr, text->len);
    *ret_len = 8 + text->len;
    return mem;
}
