/* SPDX-License-Identifier: Apache-2.0 */
/* The archive of torch.save: caffe2/serialize/inline_container.cc, over miniz.
 *
 * Records are stored, not compressed. Each begins at a multiple of 64 bytes, by a field of padding
 * in its local header, and ends with a descriptor of its size. */
#include "container/torch_out.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "container/torch.h"
#include "tensor/box.h"

/* ---- pickles: opcodes of protocol 2 ---- */

static void put_le(struct ckpt_str *out, uint64_t n, int bytes)
{
    char le[8];

    for (int i = 0; i < bytes; i++)
        le[i] = (char)(n >> 8 * i);
    ckpt_str_append(out, le, (size_t)bytes);
}

void ckpt_pickle_out_ops(struct ckpt_pickle_out *p, const char *ops) { ckpt_str_puts(p->out, ops); }

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

void ckpt_pickle_out_ordered(struct ckpt_pickle_out *p)
{
    ckpt_pickle_out_global(p, "collections", "OrderedDict");
    ckpt_pickle_out_ops(p, CKPT_PICKLE_OUT_EMPTY_TUPLE CKPT_PICKLE_OUT_REDUCE CKPT_PICKLE_OUT_MARK);
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
        if (json_object_get(j, "$tuple")) {
            ckpt_pickle_out_ops(p, CKPT_PICKLE_OUT_MARK);
            json_array_foreach(json_object_get(j, "$tuple"), i, value)
                ckpt_pickle_out_json(p, value);
            ckpt_pickle_out_ops(p, CKPT_PICKLE_OUT_TUPLE);
            break;
        }
        ckpt_pickle_out_ops(p, CKPT_PICKLE_OUT_EMPTY_DICT CKPT_PICKLE_OUT_MARK);
        json_object_foreach((json_t *)j, key, value) {
            ckpt_pickle_out_text(p, key);
            ckpt_pickle_out_json(p, value);
        }
        ckpt_pickle_out_ops(p, CKPT_PICKLE_OUT_SETITEMS);
        break;
    case JSON_ARRAY:
        ckpt_pickle_out_ops(p, CKPT_PICKLE_OUT_EMPTY_LIST CKPT_PICKLE_OUT_MARK);
        json_array_foreach(j, i, value)
            ckpt_pickle_out_json(p, value);
        ckpt_pickle_out_ops(p, CKPT_PICKLE_OUT_APPENDS);
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
        ckpt_pickle_out_ops(p, json_is_true(j)    ? CKPT_PICKLE_OUT_TRUE
                               : json_is_false(j) ? CKPT_PICKLE_OUT_FALSE
                                                  : CKPT_PICKLE_OUT_NONE);
    }
}

/* An entry's number follows in one byte or in four. */
static void put_memo(struct ckpt_pickle_out *p, char small, char large, uint32_t entry)
{
    ckpt_str_putc(p->out, entry < 256 ? small : large);
    put_le(p->out, entry, entry < 256 ? 1 : 4);
}

void ckpt_pickle_out_put(struct ckpt_pickle_out *p) { put_memo(p, 'q', 'r', p->memo++); }

void ckpt_pickle_out_get(struct ckpt_pickle_out *p, uint32_t entry)
{
    put_memo(p, 'h', 'j', entry);
}

void ckpt_pickle_out_tuple(struct ckpt_pickle_out *p, const uint64_t *n, uint32_t count, bool put)
{
    static const char *const close[] = {CKPT_PICKLE_OUT_EMPTY_TUPLE, CKPT_PICKLE_OUT_TUPLE1, "\x86",
                                        "\x87"};

    if (count > 3)
        ckpt_pickle_out_ops(p, CKPT_PICKLE_OUT_MARK);
    for (uint32_t i = 0; i < count; i++)
        ckpt_pickle_out_u64(p, n[i]);
    ckpt_pickle_out_ops(p, count > 3 ? CKPT_PICKLE_OUT_TUPLE : close[count]);
    if (put && count)
        ckpt_pickle_out_put(p);
}

enum {
    ALIGNMENT = 64,
    LOCAL_HEADER = 30,
    EXTRA_HEADER = 4,
    UTF8 = 0x0800,       /* names are UTF-8 */
    DESCRIPTOR = 0x0008, /* a descriptor follows the record */
    MADE_BY = 0x031e,
    NEEDS = 45,
    RECORDS = 7, /* besides further tensors */
    NAME = 32,
};

/* Its first 20 digits are a hash of the records' names, the others one of their CRCs, which are 0
 * here; a record without bytes is not counted. Those of an archive of one tensor, and of none,
 * which archives of several have, too: torch does not read it. */
static const char serialization_id[] = "1572819951185464302603005401530805769991",
                  serialization_id_of_empty[] = "1572819951185464302600046082544174525093";

struct record {
    char name[NAME]; /* below the folder */
    uint64_t off, size;
};

struct archive {
    struct ckpt_str *out; /* all but the bytes of tensors */
    const char *folder;   /* of the records, with the slash */
    size_t begin;         /* of the archive in `out` */
    uint64_t tensors;     /* bytes of tensors so far */
    struct record *record;
    size_t n;
};

/* The next place in the archive. */
static uint64_t place(const struct archive *a) { return a->out->len - a->begin + a->tensors; }

static void put_name(struct archive *a, const char *name)
{
    ckpt_str_append(a->out, a->folder, strlen(a->folder));
    ckpt_str_append(a->out, name, strlen(name));
}

static bool is_large(uint64_t n) { return n >= UINT32_MAX; }

static void put_padding(struct archive *a, size_t n)
{
    static const char letters[] =
        "ZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZ";

    assert(n < ALIGNMENT);
    ckpt_str_append(a->out, "FB", 2);
    put_le(a->out, n, 2);
    ckpt_str_append(a->out, letters, n);
}

/* Records without bytes have no descriptor. */
static unsigned flags_of(uint64_t size) { return size ? UTF8 | DESCRIPTOR : UTF8; }

/* The bytes that a record needs in a field for numbers that do not fit 32 bits; 0: no field. */
static size_t large_bytes(uint64_t off, uint64_t size)
{
    return (is_large(size) ? 16 : 0) + (is_large(off) ? 8 : 0);
}

/* `stored` is the size that the field gives as that of the stored bytes: a local header does not
 * know it yet. */
static void put_large(struct archive *a, uint64_t off, uint64_t size, uint64_t stored)
{
    const size_t n = large_bytes(off, size);

    if (!n)
        return;
    put_le(a->out, 1, 2);
    put_le(a->out, n, 2);
    if (is_large(size)) {
        put_le(a->out, size, 8);
        put_le(a->out, stored, 8);
    }
    if (is_large(off))
        put_le(a->out, off, 8);
}

/* With its header. */
static size_t large_field(uint64_t off, uint64_t size)
{
    const size_t n = large_bytes(off, size);

    return n ? n + EXTRA_HEADER : 0;
}

/* The local header; the record's bytes follow. */
static void begin(struct archive *a, const char *name, uint64_t size)
{
    const uint64_t off = place(a);
    const size_t len = strlen(a->folder) + strlen(name), large = large_field(off, size);
    const size_t pad = (size_t)(-(off + LOCAL_HEADER + len + large + EXTRA_HEADER) % ALIGNMENT);

    (void)snprintf(a->record[a->n].name, NAME, "%s", name);
    a->record[a->n].off = off;
    a->record[a->n++].size = size;
    ckpt_str_append(a->out, "PK\3\4", 4);
    put_le(a->out, 0, 2); /* version needed */
    put_le(a->out, flags_of(size), 2);
    put_le(a->out, 0, 2); /* stored */
    put_le(a->out, 0, 4); /* no date */
    put_le(a->out, 0, 4); /* CRC and sizes: in the descriptor */
    put_le(a->out, 0, 8);
    put_le(a->out, len, 2);
    put_le(a->out, large + EXTRA_HEADER + pad, 2);
    put_name(a, name);
    put_large(a, off, size, 0);
    put_padding(a, pad);
}

/* The descriptor. */
static void end(struct archive *a)
{
    const uint64_t size = a->record[a->n - 1].size, off = a->record[a->n - 1].off;
    const int width = large_bytes(off, size) ? 8 : 4;

    if (!size)
        return;
    ckpt_str_append(a->out, "PK\7\10", 4);
    put_le(a->out, 0, 4); /* CRC */
    put_le(a->out, size, width);
    put_le(a->out, size, width);
}

static void put_record(struct archive *a, const char *name, const void *bytes, size_t len)
{
    begin(a, name, len);
    ckpt_str_append(a->out, bytes, len);
    end(a);
}

static void put_text(struct archive *a, const char *name, const char *text)
{
    put_record(a, name, text, strlen(text));
}

static void put_entry(struct archive *a, const char *name, uint64_t off, uint64_t size)
{
    ckpt_str_append(a->out, "PK\1\2", 4);
    put_le(a->out, 0, 4); /* versions */
    put_le(a->out, flags_of(size), 2);
    put_le(a->out, 0, 2); /* stored */
    put_le(a->out, 0, 8); /* date, CRC */
    put_le(a->out, is_large(size) ? UINT32_MAX : size, 4);
    put_le(a->out, is_large(size) ? UINT32_MAX : size, 4);
    put_le(a->out, strlen(a->folder) + strlen(name), 2);
    put_le(a->out, large_field(off, size), 2);
    put_le(a->out, 0, 2); /* comment */
    put_le(a->out, 0, 8); /* disk, attributes */
    put_le(a->out, is_large(off) ? UINT32_MAX : off, 4);
    put_name(a, name);
    put_large(a, off, size, size);
}

/* The central directory; torch writes the records of 64 bits always. */
static void finish(struct archive *a)
{
    const uint64_t directory = place(a);

    for (size_t i = 0; i < a->n; i++)
        put_entry(a, a->record[i].name, a->record[i].off, a->record[i].size);
    const uint64_t last = place(a), len = last - directory;
    ckpt_str_append(a->out, "PK\6\6", 4);
    put_le(a->out, 44, 8);
    put_le(a->out, MADE_BY, 2);
    put_le(a->out, NEEDS, 2);
    put_le(a->out, 0, 8); /* disks */
    put_le(a->out, a->n, 8);
    put_le(a->out, a->n, 8);
    put_le(a->out, len, 8);
    put_le(a->out, directory, 8);
    ckpt_str_append(a->out, "PK\6\7", 4);
    put_le(a->out, 0, 4);
    put_le(a->out, last, 8);
    put_le(a->out, 1, 4);
    ckpt_str_append(a->out, "PK\5\6", 4);
    put_le(a->out, 0, 4);
    put_le(a->out, a->n, 2);
    put_le(a->out, a->n, 2);
    put_le(a->out, len, 4);
    put_le(a->out, is_large(directory) ? UINT32_MAX : directory, 4);
    put_le(a->out, 0, 2); /* comment */
}

/* ---- data.pkl ---- */

/* ("storage", class, key, location, number of elements); in bytes for storages without a type. */
static void put_storage(struct ckpt_pickle_out *p, const struct ckpt_torch_out *t,
                        const char *storage, const char *key)
{
    const uint64_t n = t->nbytes / (storage ? ckpt_dtype_size(t->dtype) : 1);

    ckpt_pickle_out_ops(p, CKPT_PICKLE_OUT_MARK);
    ckpt_pickle_out_text(p, "storage");
    ckpt_pickle_out_put(p);
    if (storage)
        ckpt_pickle_out_global(p, "torch", storage);
    else
        ckpt_pickle_out_global(p, "torch.storage", "UntypedStorage");
    ckpt_pickle_out_put(p);
    ckpt_pickle_out_text(p, key);
    ckpt_pickle_out_put(p);
    ckpt_pickle_out_text(p, "cpu");
    ckpt_pickle_out_put(p);
    ckpt_pickle_out_u64(p, n);
    ckpt_pickle_out_ops(p, CKPT_PICKLE_OUT_TUPLE);
    ckpt_pickle_out_put(p);
    ckpt_pickle_out_ops(p, CKPT_PICKLE_OUT_PERSID);
}

/* torch's strides of an empty tensor are those of one whose empty dimensions are 1. */
static void put_strides(struct ckpt_pickle_out *p, const struct ckpt_torch_out *t)
{
    uint64_t stride[CKPT_MAX_RANK], n = 1;

    for (uint32_t d = t->rank; d-- > 0;) {
        stride[d] = n;
        n *= t->dim[d] ? t->dim[d] : 1;
    }
    ckpt_pickle_out_tuple(p, stride, t->rank, true);
}

/* _rebuild_tensor_v2(storage, offset, size, stride, requires_grad, backward_hooks), or v3 with the
 * dtype behind, where a storage has no type of its own. */
void ckpt_torch_out_tensor(struct ckpt_pickle_out *p, const struct ckpt_torch_out *t,
                           const char *key)
{
    const char *storage = ckpt_torch_storage_name(t->dtype);

    ckpt_pickle_out_global(p, "torch._utils",
                           storage ? "_rebuild_tensor_v2" : "_rebuild_tensor_v3");
    ckpt_pickle_out_put(p);
    ckpt_pickle_out_ops(p, CKPT_PICKLE_OUT_MARK);
    put_storage(p, t, storage, key);
    ckpt_pickle_out_u64(p, 0);
    ckpt_pickle_out_tuple(p, t->dim, t->rank, true);
    put_strides(p, t);
    ckpt_pickle_out_ops(p, CKPT_PICKLE_OUT_FALSE);
    ckpt_pickle_out_global(p, "collections", "OrderedDict");
    ckpt_pickle_out_put(p);
    ckpt_pickle_out_ops(p, CKPT_PICKLE_OUT_EMPTY_TUPLE CKPT_PICKLE_OUT_REDUCE);
    ckpt_pickle_out_put(p);
    if (!storage) {
        ckpt_pickle_out_global(p, "torch", ckpt_dtype_torch_name(t->dtype));
        ckpt_pickle_out_put(p);
    }
    ckpt_pickle_out_ops(p, CKPT_PICKLE_OUT_TUPLE);
    ckpt_pickle_out_put(p);
    ckpt_pickle_out_ops(p, CKPT_PICKLE_OUT_REDUCE);
    ckpt_pickle_out_put(p);
}

int ckpt_torch_out_file(const struct ckpt_torch_archive *f, struct ckpt_str *text, size_t *ret_at,
                        struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) struct record *record = calloc(RECORDS + f->n, sizeof *record);
    struct archive a = {.out = text, .folder = f->folder, .begin = text->len, .record = record};
    char name[NAME];

    if (!record)
        return ckpt_nomem(err);
    put_record(&a, "data.pkl", f->pickle, f->len);
    put_text(&a, ".format_version", "1");
    put_text(&a, ".storage_alignment", "64");
    put_text(&a, "byteorder", "little");
    for (size_t i = 0; i < f->n; i++) {
        (void)snprintf(name, sizeof name, "data/%zu", i);
        begin(&a, name, f->nbytes[i]);
        ret_at[i] = text->len - a.begin;
        a.tensors += f->nbytes[i];
        end(&a);
    }
    put_text(&a, "version", "3\n");
    put_text(&a, ".data/serialization_id",
             f->n == 1 && f->nbytes[0] ? serialization_id : serialization_id_of_empty);
    finish(&a);
    return text->failed ? ckpt_nomem(err) : 0;
}

void ckpt_torch_out(const struct ckpt_torch_out *t, struct ckpt_str *text, size_t *ret_at)
{
    ckpt_cleanup(ckpt_str_release) struct ckpt_str pickle = {0};
    struct ckpt_torch_archive f = {.folder = "archive/", .nbytes = &t->nbytes, .n = 1};
    struct ckpt_pickle_out p = {.out = &pickle};

    assert(t->rank <= CKPT_MAX_RANK);
    ckpt_pickle_out_begin(&p);
    ckpt_torch_out_tensor(&p, t, "0");
    ckpt_pickle_out_ops(&p, CKPT_PICKLE_OUT_STOP);
    f.pickle = ckpt_str_get(&pickle);
    f.len = pickle.len;
    *ret_at = 0;
    if (pickle.failed || ckpt_torch_out_file(&f, text, ret_at, NULL) < 0)
        text->failed = true;
}

void ckpt_torch_out_pickle(const char *folder, const char *pickle, size_t len, struct ckpt_str *out)
{
    const struct ckpt_torch_archive f = {.folder = folder, .pickle = pickle, .len = len};

    if (ckpt_torch_out_file(&f, out, NULL, NULL) < 0)
        out->failed = true;
}

void ckpt_torch_out_json(const json_t *j, struct ckpt_str *out)
{
    ckpt_cleanup(ckpt_str_release) struct ckpt_str pickle = {0};
    struct ckpt_pickle_out p = {.out = &pickle};

    ckpt_pickle_out_begin(&p);
    ckpt_pickle_out_json(&p, j);
    ckpt_pickle_out_ops(&p, CKPT_PICKLE_OUT_STOP);
    if (pickle.failed)
        out->failed = true;
    else
        ckpt_torch_out_pickle("archive/", ckpt_str_get(&pickle), pickle.len, out);
}

void ckpt_torch_out_none(struct ckpt_str *out)
{
    static const char list[] = "\x80\x02]q\0Na.";

    ckpt_torch_out_pickle("archive/", list, sizeof list - 1, out);
}
