/* SPDX-License-Identifier: Apache-2.0 */
/* Lies of a tar archive, told to a sound one of three blocks: a header, one file's bytes, the end.
 */
#include "defects.h"

#include "base/mem.h"
#include "container/archive.h"
#include "tree.h"

enum {
    BLOCK = 512,
    MOST = (1 << 20) + 64 * BLOCK,
    SIZE_AT = 124,
    CHECKSUM_AT = 148,
    TYPE_AT = 156,
    LINK_AT = 157
};

struct made {
    unsigned char bytes[MOST];
    size_t len;
};

static void checksum(unsigned char *header)
{
    unsigned sum = 0;

    memset(header + CHECKSUM_AT, ' ', 8);
    for (size_t i = 0; i < BLOCK; i++)
        sum += header[i];
    (void)snprintf((char *)header + CHECKSUM_AT, 8, "%06o", sum);
}

/* Append a member with text as its bytes; returns its header. */
static unsigned char *add(struct made *m, char type, const char *name, const char *text)
{
    unsigned char *header = m->bytes + m->len;
    const size_t len = strlen(text);

    memcpy(header, name, strlen(name));
    (void)snprintf((char *)header + SIZE_AT, 12, "%011o", (unsigned)len % (1U << 30));
    header[TYPE_AT] = (unsigned char)type;
    memcpy(header + 257, "ustar\00000", 8);
    checksum(header);
    memcpy(header + BLOCK, text, len);
    m->len += BLOCK + (len + BLOCK - 1) / BLOCK * BLOCK;
    return header;
}

static void end(struct made *m) { m->len += 2 * BLOCK; }

static void sound(struct made *m)
{
    (void)add(m, '0', "config.json", "{}");
    end(m);
}

static void set(struct made *m, size_t at, const char *text)
{
    memcpy(m->bytes + at, text, strlen(text) + 1);
    checksum(m->bytes);
}

static void nothing_wrong(struct made *m) { sound(m); }
static void no_end(struct made *m) { (void)add(m, '0', "a", "b"); }

static void half_an_end(struct made *m)
{
    sound(m);
    m->len -= BLOCK;
}

static void a_block_of_zeros(struct made *m)
{
    (void)add(m, '0', "a", "b");
    m->len += BLOCK;
    (void)add(m, '0', "c", "d");
    end(m);
}

static void checksum_wrong(struct made *m)
{
    (void)add(m, '0', "a", "b");
    add(m, '0', "c", "d")[0] ^= 1;
    end(m);
}

static void size_no_number(struct made *m)
{
    sound(m);
    set(m, SIZE_AT, "0000000000x");
}

static void size_too_large(struct made *m)
{
    sound(m);
    set(m, SIZE_AT, "77777777777");
}

static void size_binary(struct made *m, unsigned char first, unsigned char rest)
{
    sound(m);
    memset(m->bytes + SIZE_AT, rest, 12);
    m->bytes[SIZE_AT] = first;
    checksum(m->bytes);
}

static void size_negative(struct made *m) { size_binary(m, 0xff, 0xff); }
static void size_wraps(struct made *m) { size_binary(m, 0x80, 0xff); }

static void size_2_64(struct made *m)
{
    sound(m);
    memset(m->bytes + SIZE_AT, 0, 12);
    m->bytes[SIZE_AT] = 0x80;
    memset(m->bytes + SIZE_AT + 4, 0xff, 8);
    checksum(m->bytes);
}

static void a_name(struct made *m, const char *name)
{
    (void)add(m, '0', name, "x");
    end(m);
}

static void name_above(struct made *m) { a_name(m, "../evil"); }
static void name_above_inside(struct made *m) { a_name(m, "a/../../evil"); }

static void file_and_folder(struct made *m)
{
    (void)add(m, '0', "a", "x");
    (void)add(m, '0', "a/b", "x");
    end(m);
}

static void folder_and_file(struct made *m)
{
    (void)add(m, '0', "a/b", "x");
    (void)add(m, '0', "a", "x");
    end(m);
}

static void file_below_link(struct made *m)
{
    unsigned char *h = add(m, '2', "a", "");

    memcpy(h + LINK_AT, "..", 3);
    checksum(h);
    (void)add(m, '0', "a/b", "x");
    end(m);
}

static void hard_link_to_nothing(struct made *m)
{
    unsigned char *h = add(m, '1', "a", "");

    memcpy(h + LINK_AT, "none", 5);
    checksum(h);
    end(m);
}

static void a_type(struct made *m, char type)
{
    (void)add(m, type, "a", "x");
    end(m);
}

static void sparse(struct made *m) { a_type(m, 'S'); }
static void next_volume(struct made *m) { a_type(m, 'M'); }
static void unknown_type(struct made *m) { a_type(m, 'Q'); }

static void pax(struct made *m, char type, const char *text)
{
    (void)add(m, type, "pax", text);
    (void)add(m, '0', "a", "x");
    end(m);
}

static void pax_length(struct made *m) { pax(m, 'x', "99 path=b\n"); }
static void pax_length_zero(struct made *m) { pax(m, 'x', "0 path=b\n"); }
static void pax_no_length(struct made *m) { pax(m, 'x', "path=b\n"); }
static void pax_huge_length(struct made *m) { pax(m, 'x', "99999999999999999999999 path=b\n"); }
static void pax_no_equals(struct made *m) { pax(m, 'x', "8 pathb\n"); }
static void pax_size_word(struct made *m) { pax(m, 'x', "10 size=z\n"); }
static void pax_size_large(struct made *m) { pax(m, 'x', "29 size=18446744073709551615\n"); }
static void pax_sparse(struct made *m) { pax(m, 'x', "22 GNU.sparse.major=1\n"); }
static void pax_name_above(struct made *m) { pax(m, 'x', "13 path=../b\n"); }
static void pax_global_name(struct made *m) { pax(m, 'g', "10 path=b\n"); }

static void long_name_huge(struct made *m)
{
    unsigned char *h = add(m, 'L', "long", "x");

    (void)snprintf((char *)h + SIZE_AT, 12, "%011o", (1 << 20) + 1);
    checksum(h);
    m->len = (1 << 20) + 4 * BLOCK;
}

static void gzipped(struct made *m)
{
    memcpy(m->bytes, "\x1f\x8b\x08", 3);
    m->len = 100;
}

static void zstd(struct made *m)
{
    memcpy(m->bytes, "\x28\xb5\x2f\xfd", 4);
    m->len = 100;
}

static void zeros(struct made *m) { m->len = 20 * BLOCK; }
static void empty(struct made *m) { m->len = 0; }

static void zip_cut(struct made *m)
{
    memcpy(m->bytes, "PK\3\4", 4);
    m->len = 100;
}

static const struct lie {
    const char *name;
    void (*make)(struct made *m);
    enum ckpt_code code;
    const char *needle;
} lies[] = {
    {"nothing_wrong", nothing_wrong, CKPT_OK, ""},
    {"no_end", no_end, CKPT_FORMAT, "ends at byte 1024 without the mark"},
    {"half_an_end", half_an_end, CKPT_FORMAT, "ends at byte 1536 without the mark"},
    {"a_block_of_zeros", a_block_of_zeros, CKPT_FORMAT, "zeros at byte 1024"},
    {"checksum_wrong", checksum_wrong, CKPT_FORMAT, "no tar header at byte 1024"},
    {"size_no_number", size_no_number, CKPT_FORMAT, "size that is not a number"},
    {"size_too_large", size_too_large, CKPT_FORMAT, "needs 8589934591 bytes"},
    {"size_negative", size_negative, CKPT_FORMAT, "size that is not a number"},
    {"size_wraps", size_wraps, CKPT_FORMAT, "size that is not a number"},
    {"size_2_64", size_2_64, CKPT_FORMAT, "'config.json' needs 18446744073709551615 bytes"},
    {"name_above", name_above, CKPT_FORMAT, "outside the folder"},
    {"name_above_inside", name_above_inside, CKPT_FORMAT, "outside the folder"},
    {"file_and_folder", file_and_folder, CKPT_FORMAT, "'a/b' lies below a member"},
    {"folder_and_file", folder_and_file, CKPT_FORMAT, "'a' is a folder and no folder"},
    {"file_below_link", file_below_link, CKPT_FORMAT, "'a/b' lies below a member"},
    {"hard_link_to_nothing", hard_link_to_nothing, CKPT_FORMAT, "'a' is a hard link"},
    {"sparse", sparse, CKPT_UNSUPPORTED, "'a' of the tar archive is a sparse file"},
    {"next_volume", next_volume, CKPT_UNSUPPORTED, "another volume"},
    {"unknown_type", unknown_type, CKPT_UNSUPPORTED, "type 0x51"},
    {"pax_length", pax_length, CKPT_FORMAT, "length is wrong"},
    {"pax_length_zero", pax_length_zero, CKPT_FORMAT, "length is wrong"},
    {"pax_no_length", pax_no_length, CKPT_FORMAT, "length is wrong"},
    {"pax_huge_length", pax_huge_length, CKPT_FORMAT, "length is wrong"},
    {"pax_no_equals", pax_no_equals, CKPT_FORMAT, "without '='"},
    {"pax_size_word", pax_size_word, CKPT_FORMAT, "size that is not a number"},
    {"pax_size_large", pax_size_large, CKPT_FORMAT, "'a' needs 18446744073709551615 bytes"},
    {"pax_sparse", pax_sparse, CKPT_UNSUPPORTED, "sparse file"},
    {"pax_name_above", pax_name_above, CKPT_FORMAT, "outside the folder"},
    {"pax_global_name", pax_global_name, CKPT_FORMAT, "gives all members one name"},
    {"long_name_huge", long_name_huge, CKPT_LIMIT, "at most 1048576 are expected"},
    {"gzipped", gzipped, CKPT_UNSUPPORTED, "tar -xzf"},
    {"zstd", zstd, CKPT_UNSUPPORTED, "tar --zstd -xf"},
    {"zeros", zeros, CKPT_MISSING, "without any file"},
    {"empty", empty, CKPT_USAGE, "is a file"},
    {"zip_cut", zip_cut, CKPT_FORMAT, "truncated"},
};

static void tell(struct judge *j, const struct lie *lie)
{
    ckpt_cleanup(ckpt_freep) struct made *m = calloc(1, sizeof *m);
    ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *dir = NULL;
    struct ckpt_err err = {0};
    char path[5000];
    struct tree t;

    TREE_MUST(m);
    lie->make(m);
    tree_open(&t);
    tree_put(&t, "a.tar", m->bytes, m->len);
    (void)snprintf(path, sizeof path, "%s/a.tar", t.path);
    clock_t begin = clock();
    const int result = ckpt_archive_open(path, &(struct ckpt_access){0}, &dir, &err);
    judge(j, lie->name, result, &err, lie->code, "a.tar", lie->needle, begin);
    tree_close(&t);
}

int main(int argc, char **argv)
{
    struct judge j = {.filter = argc > 1 ? argv[1] : NULL};

    for (size_t i = 0; i < sizeof lies / sizeof *lies; i++)
        if (wanted(&j, lies[i].name))
            tell(&j, &lies[i]);
    return verdict(&j);
}
