/* SPDX-License-Identifier: Apache-2.0 */
/* The input is a list of nodes of an OCDBT database, which get headers and checksums here: all keys
 * of what is accepted ascend and are found, and their values lie inside the files.
 *
 *     node = kind (u8: 0 the manifest, 1 of a B+tree, 2 of versions, 3 a value)
 *            compression (u8)  length (u16, little-endian)  bytes */
#include "fuzz.h"

#include "base/crc32.h"
#include "container/ocdbt.h"

enum { MOST_NODES = 64, ROOM = 1 << 18 };

struct file {
    uint8_t bytes[ROOM];
    size_t len;
};

static struct file manifest, data;

static void put(struct file *f, const void *bytes, size_t len)
{
    MUST(len <= ROOM - f->len);
    if (len)
        memcpy(f->bytes + f->len, bytes, len);
    f->len += len;
}

static void put_le(struct file *f, uint64_t v, unsigned n)
{
    for (unsigned i = 0; i < n; i++) {
        const uint8_t byte = (uint8_t)(v >> (8 * i));
        put(f, &byte, 1);
    }
}

static void put_node(struct file *f, uint8_t kind, uint8_t compression, const uint8_t *body,
                     size_t len)
{
    static const char *const magic[] = {"\x0c\xdb\x3a\x2a", "\x0c\xdb\x20\xde", "\x0c\xdb\x12\x34"};
    const size_t begin = f->len;

    put(f, magic[kind], 4);
    put_le(f, len + 4 + 8 + 2 + 4, 8);
    put_le(f, 0, 1);
    put(f, &compression, 1);
    put(f, body, len);
    put_le(f, ckpt_crc32c(0, f->bytes + begin, f->len - begin), 4);
}

static void make_files(const uint8_t *bytes, size_t size)
{
    struct input in = {bytes, size};

    manifest.len = data.len = 0;
    for (int i = 0; i < MOST_NODES && in.left; i++) {
        const uint8_t kind = input_u8(&in) & 3, compression = input_u8(&in);
        size_t len = input_u16(&in);
        const uint8_t *body = input_take(&in, len, &len);
        struct file *f = kind == 0 ? &manifest : &data;
        if (len > ROOM - f->len - 64 || f->len > ROOM - 64)
            continue;
        if (kind == 0)
            f->len = 0;
        if (kind == 3)
            put(f, body, len);
        else
            put_node(f, kind, compression, body, len);
    }
}

static int open_file(void *ctx, const char *path, struct ckpt_source **ret, struct ckpt_err *err)
{
    const struct file *f = strcmp(path, CKPT_OCDBT_MANIFEST) == 0 ? &manifest : &data;

    (void)ctx;
    if (f == &data && strcmp(path, "d/a") != 0)
        return ckpt_fail(err, CKPT_MISSING, "'%s' is not there", path);
    return ckpt_source_mem_new(path, f->bytes, f->len, ret, err);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size)
{
    struct ckpt_ocdbt db = {.generation = 0};
    struct ckpt_err err = {0};

    make_files(bytes, size);
    if (ckpt_ocdbt_read(open_file, NULL, &db, &err) < 0) {
        check_err(&err);
        ckpt_ocdbt_release(&db);
        return 0;
    }
    for (size_t i = 0; i < db.values.len; i++) {
        const struct ckpt_ocdbt_value *v = &db.values.ptr[i];
        char first;
        MUST(i == 0 || strcmp(v[-1].key, v->key) < 0);
        MUST(ckpt_ocdbt_find(&db, v->key) == v && v->source);
        MUST(ckpt_range_ok(v->off, v->len, v->source->size));
        MUST(!v->len || ckpt_source_pread(v->source, &first, 1, v->off + v->len - 1, &err) == 0);
    }
    MUST(!ckpt_ocdbt_find(&db, "\xff no such key"));
    ckpt_ocdbt_release(&db);
    return 0;
}
