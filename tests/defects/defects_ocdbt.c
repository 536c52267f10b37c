/* SPDX-License-Identifier: Apache-2.0 */
/* Lies of an OCDBT database: manifest, nodes of the B+tree and of versions, and what they refer to.
 */
#include "defects.h"

#include <stdlib.h>

#include "base/crc32.h"
#include "container/ocdbt.h"
#include "container/zstd.h"

enum {
    ROOM = 1 << 16,
    MANIFEST = 0,
    BTREE = 1,
    VERSIONS = 2,
    AROUND = 18 /* bytes of a node besides its body */
};

struct bytes {
    unsigned char at[ROOM];
    size_t len;
};

static void put(struct bytes *b, const void *data, size_t len)
{
    if (len)
        memcpy(b->at + b->len, data, len);
    b->len += len;
}

static void byte(struct bytes *b, int value) { put(b, &(unsigned char){(unsigned char)value}, 1); }

static void varint(struct bytes *b, uint64_t v)
{
    for (; v > 127; v >>= 7)
        byte(b, (int)(v & 127) | 128);
    byte(b, (int)v);
}

static void le(struct bytes *b, uint64_t v, int n)
{
    for (int i = 0; i < n; i++)
        byte(b, (int)(v >> 8 * i & 255));
}

/* ---- a database; what a lie changes stands here ---- */

static struct says {
    /* the manifest */
    uint64_t kind, compression, root_off, root_len, root_file, nkey, generation, nroot;
    int height, version, packed;
    size_t cut, extra; /* bytes that the manifest has less, and more */
    const char *path;
    uint64_t path_len, base;
    /* the leaf */
    uint64_t nentry, own, value_kind, value_off, value_len, value_file, shared, inline_len;
    int leaf_height;
    const char *first, *second; /* its keys; the second has its value in the file */
    /* all */
    bool flip, magic, size, nodes, loop, missing;
} says;

static struct bytes data, manifest;

static void node(struct bytes *out, int kind, int version, int compression,
                 const struct bytes *body)
{
    static const char *const magics[] = {"\x0c\xdb\x3a\x2a", "\x0c\xdb\x20\xde",
                                         "\x0c\xdb\x12\x34"};
    const size_t begin = out->len;

    put(out, says.magic ? magics[(kind + 1) % 3] : magics[kind], 4);
    le(out, body->len + AROUND + says.size, 8);
    byte(out, version);
    byte(out, compression);
    put(out, body->at, body->len);
    le(out, ckpt_crc32c(0, out->at + begin, out->len - begin), 4);
    if (says.flip)
        out->at[begin + 20] ^= 4;
}

static void files(struct bytes *b)
{
    varint(b, 1);
    varint(b, says.path_len ? says.path_len : strlen(says.path));
    varint(b, says.base);
    put(b, says.path, strlen(says.path));
}

static void leaf(struct bytes *b)
{
    byte(b, says.leaf_height);
    files(b);
    varint(b, says.nentry);
    varint(b, says.shared);
    varint(b, strlen(says.first));
    varint(b, says.own ? says.own : strlen(says.second));
    put(b, says.first, strlen(says.first));
    put(b, says.second, strlen(says.second));
    varint(b, says.inline_len);
    varint(b, says.value_len);
    varint(b, 0);
    varint(b, says.value_kind);
    varint(b, says.value_file);
    varint(b, says.value_off);
    put(b, "xyz", 3);
}

/* A node that refers twice to the one at `off`: with many of them, one above the other, a leaf is
 * reached by more ways than can be walked. */
static void twice(struct bytes *b, int height, size_t off, size_t len)
{
    byte(b, height);
    files(b);
    varint(b, 2);
    varint(b, 0);
    for (int i = 0; i < 2; i++)
        varint(b, 1);
    for (int i = 0; i < 2; i++)
        varint(b, 0);
    put(b, "ab", 2);
    for (int i = 0; i < 2; i++)
        varint(b, 0);
    for (int i = 0; i < 2; i++)
        varint(b, off);
    for (int i = 0; i < 2; i++)
        varint(b, len);
    for (int i = 0; i < 6; i++)
        varint(b, 0);
}

static void make(void)
{
    static struct bytes body;

    data.len = manifest.len = body.len = 0;
    put(&data, "VALUE", 5);
    leaf(&body);
    size_t off = data.len, len = body.len + AROUND;
    node(&data, BTREE, 0, 0, &body);
    for (int h = 1; says.loop && h < 60; h++) {
        body.len = 0;
        twice(&body, h, h == 1 ? 1 : off, h == 1 ? 1 : len);
        if (h == 1) { /* in the place of the leaf: an empty one */
            body.len = 0;
            byte(&body, 0);
            files(&body);
            varint(&body, 0);
        } else {
            body.at[0] = (unsigned char)(h - 1);
        }
        off = data.len;
        len = body.len + AROUND;
        node(&data, BTREE, 0, 0, &body);
    }
    body.len = 0;
    put(&body, "0123456789abcdef", 16);
    varint(&body, says.kind);
    varint(&body, 1024);
    varint(&body, 100000000);
    byte(&body, 4);
    varint(&body, says.compression);
    if (says.compression == 1)
        le(&body, 0, 4);
    files(&body);
    varint(&body, says.nroot);
    for (uint64_t i = 0; i < says.nroot && says.nroot < 3; i++)
        varint(&body, i ? says.generation : 1);
    for (uint64_t i = 0; i < says.nroot && says.nroot < 3; i++)
        byte(&body, says.loop ? 58 : says.height);
    for (int column = 0; column < 6; column++)
        for (uint64_t i = 0; i < says.nroot && says.nroot < 3; i++)
            varint(&body, column == 0   ? says.root_file
                          : column == 1 ? says.root_off ? says.root_off : off
                          : column == 2 ? says.root_len ? says.root_len : len
                          : column == 3 ? (says.loop ? 0 : says.nkey)
                                        : 1);
    for (uint64_t i = 0; i < says.nroot && says.nroot < 3; i++)
        le(&body, 1, 8);
    if (says.nodes) { /* one of the tree of versions, which is none */
        varint(&body, 1);
        varint(&body, 1);
        varint(&body, 0);
        varint(&body, off);
        varint(&body, len);
        varint(&body, 1);
        le(&body, 1, 8);
        byte(&body, 0);
    } else {
        varint(&body, 0);
    }
    for (size_t i = 0; i < says.extra; i++)
        byte(&body, 0);
    body.len -= says.cut;
    node(&manifest, MANIFEST, says.version, says.packed, &body);
}

static int open_file(void *ctx, const char *path, struct ckpt_source **ret, struct ckpt_err *err)
{
    const struct bytes *b = strcmp(path, CKPT_OCDBT_MANIFEST) == 0 ? &manifest : &data;

    (void)ctx;
    if (b == &data && (says.missing || strcmp(path, "d/file") != 0))
        return ckpt_fail(err, CKPT_MISSING, "'%s' is not there", path);
    return ckpt_source_mem_new(path, b->at, b->len, ret, err);
}

/* ---- lies ---- */

#define LIE(NAME, STATEMENT)                                                                       \
    static void NAME(void) { STATEMENT; }

LIE(nothing, (void)0)
LIE(flipped, says.flip = true)
LIE(other_magic, says.magic = true)
LIE(other_size, says.size = true)
LIE(version_1, says.version = 1)
LIE(compression_2, says.packed = 2)
LIE(not_zstd, says.packed = 1)
LIE(divided, says.kind = 1)
LIE(config_compression, says.compression = 7)
LIE(cut, says.cut = 3)
LIE(extra, says.extra = 2)
LIE(many_versions, says.nroot = UINT64_C(1) << 60)
LIE(no_version, says.nroot = 0)
LIE(generations, (says.nroot = 2, says.generation = 1))
LIE(two_versions, (says.nroot = 2, says.generation = 9))
LIE(root_past_end, says.root_off = 9999)
LIE(root_wraps, says.root_off = UINT64_MAX - 3)
LIE(root_huge, says.root_len = UINT64_C(1) << 40)
LIE(root_short, says.root_len = 7)
LIE(no_root, (says.root_off = says.root_len = UINT64_MAX, says.nkey = 0))
LIE(root_in_no_file, says.root_file = 1)
LIE(root_height, says.height = 1)
LIE(leaf_height, says.leaf_height = 3)
LIE(fewer_keys, says.nkey = 3)
LIE(lost_file, says.missing = true)
LIE(other_path, says.path = "d/none")
LIE(path_leaves, says.path = "../file")
LIE(path_long, says.path_len = 70000)
LIE(path_past_end, says.path_len = 9000)
LIE(path_base, says.base = 40)
LIE(many_entries, says.nentry = UINT64_C(1) << 62)
LIE(shared_too_much, says.shared = 9)
LIE(key_past_end, says.own = 60000)
LIE(keys_equal, says.second = "a")
LIE(keys_descend, says.second = "A")
LIE(value_kind, says.value_kind = 2)
LIE(value_past_end, says.value_len = 90000)
LIE(value_wraps, says.value_off = UINT64_MAX)
LIE(value_in_no_file, says.value_file = 5)
LIE(inline_past_end, says.inline_len = 50)
LIE(not_of_versions, (says.nroot = 0, says.nodes = true))
LIE(again_and_again, says.loop = true)

static const struct {
    const char *name;
    void (*make)(void);
    enum ckpt_code code;
    const char *file, *needle;
} lies[] = {
    {"sound", nothing, CKPT_OK, NULL, NULL},
    {"two_versions", two_versions, CKPT_OK, NULL, NULL},
    {"no_version", no_version, CKPT_OK, NULL, NULL},
    {"no_root", no_root, CKPT_OK, NULL, NULL},
    {"flipped", flipped, CKPT_FORMAT, "manifest.ocdbt", "checksum"},
    {"other_magic", other_magic, CKPT_FORMAT, "manifest.ocdbt", "magic number"},
    {"other_size", other_size, CKPT_FORMAT, "manifest.ocdbt", "says that it has"},
    {"version_1", version_1, CKPT_UNSUPPORTED, "manifest.ocdbt", "version 1"},
    {"compression_2", compression_2, CKPT_UNSUPPORTED, "manifest.ocdbt", "compression 2"},
    {"not_zstd", not_zstd, CKPT_FORMAT, "manifest.ocdbt", "zstd"},
    {"divided", divided, CKPT_UNSUPPORTED, "manifest.ocdbt", "several files"},
    {"config_compression", config_compression, CKPT_UNSUPPORTED, "manifest.ocdbt", "compression 7"},
    {"cut", cut, CKPT_FORMAT, "manifest.ocdbt", "end at byte"},
    {"extra", extra, CKPT_FORMAT, "manifest.ocdbt", "follow its last entry"},
    {"many_versions", many_versions, CKPT_FORMAT, "manifest.ocdbt", "entries in"},
    {"generations", generations, CKPT_FORMAT, "manifest.ocdbt", "do not ascend"},
    {"root_past_end", root_past_end, CKPT_FORMAT, "d/file", "should lie at byte 9999"},
    {"root_wraps", root_wraps, CKPT_FORMAT, "d/file", "should lie at byte"},
    {"root_huge", root_huge, CKPT_FORMAT, "d/file", "a node of 1099511627776"},
    {"root_short", root_short, CKPT_FORMAT, "d/file", "magic number"},
    {"root_in_no_file", root_in_no_file, CKPT_FORMAT, "manifest.ocdbt", "data file 1 of 1"},
    {"root_height", root_height, CKPT_FORMAT, "d/file", "height 0, where 1"},
    {"leaf_height", leaf_height, CKPT_FORMAT, "d/file", "height 3, where 0"},
    {"fewer_keys", fewer_keys, CKPT_CONFLICT, "d/file", "holds 2 keys"},
    {"lost_file", lost_file, CKPT_MISSING, "d/file", "is not there"},
    {"other_path", other_path, CKPT_MISSING, "d/none", "is not there"},
    {"path_leaves", path_leaves, CKPT_MISSING, "../file", "is not there"},
    {"path_long", path_long, CKPT_FORMAT, "manifest.ocdbt", "more than 65535"},
    {"path_past_end", path_past_end, CKPT_FORMAT, "manifest.ocdbt", "end at byte"},
    {"path_base", path_base, CKPT_FORMAT, "manifest.ocdbt", "longer than it"},
    {"many_entries", many_entries, CKPT_FORMAT, "d/file", "entries in"},
    {"shared_too_much", shared_too_much, CKPT_FORMAT, "d/file", "shares more"},
    {"key_past_end", key_past_end, CKPT_FORMAT, "d/file", "end at byte"},
    {"keys_equal", keys_equal, CKPT_FORMAT, "d/file", "key 'a' comes after 'a'"},
    {"keys_descend", keys_descend, CKPT_FORMAT, "d/file", "key 'A' comes after 'a'"},
    {"value_kind", value_kind, CKPT_UNSUPPORTED, "d/file", "a way (2)"},
    {"value_past_end", value_past_end, CKPT_FORMAT, "d/file", "the value of 'b'"},
    {"value_wraps", value_wraps, CKPT_FORMAT, "d/file", "the value of 'b'"},
    {"value_in_no_file", value_in_no_file, CKPT_FORMAT, "d/file", "data file 5 of 1"},
    {"inline_past_end", inline_past_end, CKPT_FORMAT, "d/file", "end at byte"},
    {"not_of_versions", not_of_versions, CKPT_FORMAT, "d/file", "magic number 0cdb1234"},
    {"again_and_again", again_and_again, CKPT_LIMIT, "d/file", "again and again"},
};

int main(int argc, char **argv)
{
    struct judge j = {.filter = argc > 1 ? argv[1] : NULL};

    for (size_t i = 0; i < sizeof lies / sizeof lies[0]; i++) {
        struct ckpt_ocdbt db = {.generation = 0};
        struct ckpt_err err = {0};
        if (!wanted(&j, lies[i].name))
            continue;
        says = (struct says){.nkey = 2,
                             .generation = 1,
                             .nroot = 1,
                             .path = "d/file",
                             .nentry = 2,
                             .value_kind = 1,
                             .value_len = 5,
                             .inline_len = 3,
                             .first = "a",
                             .second = "b"};
        lies[i].make();
        make();
        const clock_t begin = clock();
        int result = ckpt_ocdbt_read(open_file, NULL, &db, &err);
        if (result == 0 && says.nkey == 2 && says.nroot) {
            const struct ckpt_ocdbt_value *a = ckpt_ocdbt_find(&db, "a"),
                                          *b = ckpt_ocdbt_find(&db, "b");
            char text[6] = "";
            result = a && b && !ckpt_ocdbt_find(&db, "ab") &&
                             ckpt_source_pread(a->source, text, 3, a->off, &err) == 0 &&
                             strcmp(text, "xyz") == 0 &&
                             ckpt_source_pread(b->source, text, 5, b->off, &err) == 0 &&
                             strcmp(text, "VALUE") == 0
                         ? 0
                         : -1;
        }
        judge(&j, lies[i].name, result, &err, lies[i].code, lies[i].file, lies[i].needle, begin);
        ckpt_ocdbt_release(&db);
    }
    return verdict(&j);
}
