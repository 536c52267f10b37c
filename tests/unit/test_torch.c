/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>

#include "base/crc32.h"
#include "base/str.h"
#include "container/torch.h"
#include "container/torch_file.h"
#include "test.h"

/* An archive as torch.save writes it: data descriptors, padding to 64, a zip64 end. */
struct archive {
    struct ckpt_str bytes, directory;
    unsigned n;
    bool crc; /* torch's default */
};

static void le(struct ckpt_str *out, uint64_t v, int n)
{
    for (int i = 0; i < n; i++)
        ckpt_str_putc(out, i < 8 ? (char)(v >> 8 * i) : 0);
}

static void member(struct archive *a, const char *name, const void *data, size_t len)
{
    uint64_t at = a->bytes.len, start = at + 30 + strlen(name) + 4;
    const uint32_t crc = a->crc ? ckpt_crc32(0, data, len) : 0;
    size_t pad = (size_t)(-start % 64);

    le(&a->bytes, 0x04034b50, 4);
    le(&a->bytes, 0, 2);
    le(&a->bytes, 0x0808, 2);
    le(&a->bytes, 0, 18);
    le(&a->bytes, strlen(name), 2);
    le(&a->bytes, 4 + pad, 2);
    ckpt_str_puts(&a->bytes, name);
    ckpt_str_puts(&a->bytes, "FB");
    le(&a->bytes, pad, 2);
    for (size_t i = 0; i < pad; i++)
        ckpt_str_putc(&a->bytes, 'Z');
    ckpt_str_append(&a->bytes, data, len);
    le(&a->bytes, 0x08074b50, 4);
    le(&a->bytes, crc, 4);
    le(&a->bytes, len, 4);
    le(&a->bytes, len, 4);

    le(&a->directory, 0x02014b50, 4);
    le(&a->directory, 0, 4);
    le(&a->directory, 0x0808, 2);
    le(&a->directory, 0, 6);
    le(&a->directory, crc, 4);
    le(&a->directory, len, 4);
    le(&a->directory, len, 4);
    le(&a->directory, strlen(name), 2);
    le(&a->directory, 0, 12);
    le(&a->directory, at, 4);
    ckpt_str_puts(&a->directory, name);
    a->n++;
}

static void finish(struct archive *a)
{
    uint64_t off = a->bytes.len, end64 = off + a->directory.len;

    ckpt_str_append(&a->bytes, ckpt_str_get(&a->directory), a->directory.len);
    le(&a->bytes, 0x06064b50, 4);
    le(&a->bytes, 44, 8);
    le(&a->bytes, 0x002d031e, 4);
    le(&a->bytes, 0, 8);
    le(&a->bytes, a->n, 8);
    le(&a->bytes, a->n, 8);
    le(&a->bytes, a->directory.len, 8);
    le(&a->bytes, off, 8);
    le(&a->bytes, 0x07064b50, 4);
    le(&a->bytes, 0, 4);
    le(&a->bytes, end64, 8);
    le(&a->bytes, 1, 4);
    le(&a->bytes, 0x06054b50, 4);
    le(&a->bytes, 0, 4);
    le(&a->bytes, a->n, 2);
    le(&a->bytes, a->n, 2);
    le(&a->bytes, a->directory.len, 4);
    le(&a->bytes, off, 4);
    le(&a->bytes, 0, 2);
}

static void archive_release(struct archive *a)
{
    ckpt_str_release(&a->bytes);
    ckpt_str_release(&a->directory);
}

/* _rebuild_tensor_v2(storage 0 of 6 floats, offset, (2, 3), (stride, 1), False, OrderedDict()) */
static const char pickle[] =
    "\x80\x02"
    "ctorch._utils\n_rebuild_tensor_v2\n((X\7\0\0\0storagectorch\nFloatStorage\n"
    "X\1\0\0\0"
    "0X\3\0\0\0cpuK\6tQK\0K\2K\3\x86K\3K\1\x86\x89"
    "ccollections\nOrderedDict\n)RtR.";

static void make(struct archive *a, const char *pkl, size_t len, const char *order)
{
    static const float data[6] = {0, 1, 2, 3, 4, 5};

    member(a, "archive/data.pkl", pkl, len);
    member(a, "archive/byteorder", order, strlen(order));
    member(a, "archive/data/0", data, sizeof data);
    member(a, "archive/version", "3\n", 2);
    finish(a);
}

static int read_item(const struct archive *a, size_t len, struct ckpt_torch_tensor *ret,
                     struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_torch_memo_release) struct ckpt_torch_memo memo = {0};
    ckpt_cleanup(ckpt_source_unrefp) struct ckpt_source *s = NULL;
    /* the item does not begin where its file does */
    ckpt_cleanup(ckpt_freep) char *file = malloc(len + 5);

    memset(file, 'x', len + 5);
    memcpy(file + 5, a->bytes.ptr, len);
    return ckpt_source_mem_new("item", file, len + 5, &s, err) < 0
               ? -1
               : ckpt_torch_item(s, 5, len, &memo, ret, err);
}

/* One past the last byte of a tensor that is not empty. */
static uint64_t end_of(const struct ckpt_torch_tensor *t)
{
    uint64_t end = t->off + ckpt_dtype_size(t->dtype);

    for (uint32_t d = 0; d < t->rank; d++)
        end += (t->dim[d] - 1) * t->stride[d];
    return end;
}

TEST(torch, a_tensor_is_found)
{
    ckpt_cleanup(archive_release) struct archive a = {0};
    struct ckpt_torch_tensor t;
    struct ckpt_err err = {0};

    make(&a, pickle, sizeof pickle - 1, "little");
    CHECK_OK(read_item(&a, a.bytes.len, &t, &err));
    CHECK(t.dtype == CKPT_F32 && t.rank == 2 && t.dim[0] == 2 && t.dim[1] == 3 && t.contiguous);
    CHECK_EQ((t.off - 5) % 64, 0);
    float third;
    memcpy(&third, a.bytes.ptr + t.off - 5 + 8, sizeof third);
    CHECK(third == 2);
}

TEST(torch, an_archive_that_was_cut_anywhere_is_refused)
{
    ckpt_cleanup(archive_release) struct archive a = {0};
    struct ckpt_torch_tensor t;

    make(&a, pickle, sizeof pickle - 1, "little");
    for (size_t len = 0; len < a.bytes.len; len++) {
        struct ckpt_err err = {0};
        CHECK(read_item(&a, len, &t, &err) < 0 && err.code == CKPT_FORMAT);
    }
}

TEST(torch, a_crc_is_that_of_the_zip_format)
{
    /* the check value of CRC-32/ISO-HDLC; and in parts */
    CHECK_EQ(ckpt_crc32(0, "123456789", 9), 0xcbf43926);
    CHECK_EQ(ckpt_crc32(ckpt_crc32(0, "1234", 4), "56789", 5), 0xcbf43926);
    CHECK_EQ(ckpt_crc32(0, "", 0), 0);
}

/* Whatever bit of the archive is another one: the same tensor is found, at the same place, or none.
 */
TEST(torch, a_flipped_bit_gives_the_same_tensor_or_an_error)
{
    ckpt_cleanup(archive_release) struct archive a = {.crc = true};
    struct ckpt_torch_tensor t = {0}, was = {0};
    struct ckpt_err none = {0}, err = none;
    unsigned same = 0;

    make(&a, pickle, sizeof pickle - 1, "little");
    CHECK_OK(read_item(&a, a.bytes.len, &was, &err));
    for (size_t i = 0; i < a.bytes.len; i++)
        for (int bit = 0; bit < 8; bit++) {
            err = none;
            a.bytes.ptr[i] ^= (char)(1 << bit);
            if (read_item(&a, a.bytes.len, &t, &err) < 0) {
                CHECK(err.code != CKPT_OK);
            } else {
                same++;
                if (t.off != was.off || t.rank != was.rank || t.dtype != was.dtype ||
                    memcmp(t.dim, was.dim, t.rank * sizeof *t.dim) != 0 ||
                    memcmp(t.stride, was.stride, t.rank * sizeof *t.stride) != 0)
                    fail_msg("byte %zu, bit %d", i, bit);
            }
            a.bytes.ptr[i] ^= (char)(1 << bit);
        }
    CHECK(same > 0 && same < a.bytes.len * 8);
}

/* And without CRCs, as set_crc32_options(False) writes them, what is found lies in the archive. */
TEST(torch, without_crcs_a_flipped_bit_leaves_a_tensor_within_the_item)
{
    ckpt_cleanup(archive_release) struct archive a = {0};
    struct ckpt_torch_tensor t;

    make(&a, pickle, sizeof pickle - 1, "little");
    for (size_t i = 0; i < a.bytes.len; i++)
        for (int bit = 0; bit < 8; bit++) {
            struct ckpt_err err = {0};
            a.bytes.ptr[i] ^= (char)(1 << bit);
            if (read_item(&a, a.bytes.len, &t, &err) == 0)
                CHECK(t.numel == 0 || (t.off >= 5 && end_of(&t) - 5 <= a.bytes.len));
            else
                CHECK(err.code != CKPT_OK);
            a.bytes.ptr[i] ^= (char)(1 << bit);
        }
}

/* What replaces a part of the pickle, and what is said of it. */
static const struct lie {
    const char *from, *to;
    size_t len;
    const char *order;
    enum ckpt_code code;
    const char *says;
} lies[] = {
    {"X\1", "X\1", 2, "big", CKPT_UNSUPPORTED, "byte order 'big'"},
    {"FloatStorage", "ComplexDouble", 12, "little", CKPT_UNSUPPORTED, "dtype"},
    {"K\2K\3\x86", "K\2K\4\x86", 5, "little", CKPT_FORMAT, "needs 28"},
    {"K\0K\2", "K\1K\2", 4, "little", CKPT_FORMAT, "needs 28"},
    {"\x86K\3K\1", "\x86K\xffK\1", 5, "little", CKPT_FORMAT, "has 24 bytes"},
    {"K\2K\3\x86K\3K\1\x86", "K\2K\3\x86K\3K\1\x85", 10, "little", CKPT_FORMAT, "size and stride"},
    {"0X\3", "1X\3", 3, "little", CKPT_FORMAT, "storage '1' is not in the archive"},
    {"_rebuild_tensor_v2", "_rebuild_qtensor_2", 18, "little", CKPT_UNSUPPORTED,
     "_rebuild_qtensor_2"},
    {"_rebuild_tensor_v2", "_rebuild_tensor_v3", 18, "little", CKPT_FORMAT, "not a tensor's"},
};

TEST(torch, lies_are_refused)
{
    for (size_t i = 0; i < sizeof lies / sizeof lies[0]; i++) {
        ckpt_cleanup(archive_release) struct archive a = {0};
        struct ckpt_torch_tensor t;
        struct ckpt_err err = {0};
        char own[sizeof pickle];
        memcpy(own, pickle, sizeof own);
        char *at = memmem(own, sizeof own, lies[i].from, lies[i].len);
        CHECK(at != NULL);
        memcpy(at, lies[i].to, lies[i].len);
        make(&a, own, sizeof own - 1, lies[i].order);
        CHECK_FAILS(read_item(&a, a.bytes.len, &t, &err), lies[i].code, lies[i].says);
    }
}

TEST(torch, globals_that_only_an_attack_needs_are_refused)
{
    static const struct ckpt_pickle_global none[] = {{NULL}};
    static const struct ckpt_pickle_rules rules = {none, true};
    static const struct {
        const char *module, *name;
        bool is_attack;
    } each[] = {
        {"os", "system", true},
        {"subprocess", "Popen", true},
        {"builtins", "eval", true},
        {"__builtin__", "__import__", true},
        /* what old pickles of sets and of ranges have, and names that mean something else there */
        {"builtins", "set", false},
        {"__builtin__", "range", false},
        {"pathlib", "open", false},
        {"my_model", "compile", false},
    };

    for (size_t i = 0; i < sizeof each / sizeof *each; i++) {
        struct ckpt_pickle p;
        struct ckpt_err err = {0};
        char text[64];
        (void)snprintf(text, sizeof text,
                       "\x80\x02"
                       "c%s\n%s\n.",
                       each[i].module, each[i].name);
        CHECK_OK(ckpt_pickle_parse(text, strlen(text), &rules, &p, &err));
        if (each[i].is_attack)
            CHECK_FAILS(ckpt_torch_refuse_attack(&p, &err), CKPT_UNSUPPORTED,
                        "which no checkpoint needs: refused");
        else
            CHECK_OK(ckpt_torch_refuse_attack(&p, &err));
        ckpt_pickle_release(&p);
    }
}

TESTS(T(torch, globals_that_only_an_attack_needs_are_refused), T(torch, a_tensor_is_found),
      T(torch, an_archive_that_was_cut_anywhere_is_refused),
      T(torch, a_crc_is_that_of_the_zip_format),
      T(torch, a_flipped_bit_gives_the_same_tensor_or_an_error),
      T(torch, without_crcs_a_flipped_bit_leaves_a_tensor_within_the_item),
      T(torch, lies_are_refused))
