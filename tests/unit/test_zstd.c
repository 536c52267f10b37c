/* SPDX-License-Identifier: Apache-2.0 */
/* Decompressed sources, against what libzstd itself compressed. */
#include "test.h"

#include <stdlib.h>
#include <string.h>
#include <zstd.h>

#include "container/zstd.h"

enum { LEN = 700 * 1000, FRAMES = 3, BEFORE = 5 };

struct fixture {
    unsigned char *plain, *packed;
    size_t packed_len;
    struct ckpt_source *file;
    struct ckpt_decoded *store;
};

/* Several frames, one after the other, of which one has no bytes. */
static void setup(struct fixture *f, size_t budget)
{
    struct ckpt_err err = {0};
    const size_t cap = BEFORE + FRAMES * ZSTD_compressBound(LEN);
    const size_t at[FRAMES + 1] = {0, LEN / 3, LEN / 3, LEN};

    f->plain = malloc(LEN);
    f->packed = calloc(1, cap);
    f->packed_len = BEFORE;
    for (size_t i = 0; i < LEN; i++)
        f->plain[i] = (unsigned char)(i * 7 + (i >> 9) * (i >> 3));
    for (int i = 0; i < FRAMES; i++)
        f->packed_len += ZSTD_compress(f->packed + f->packed_len, cap - f->packed_len,
                                       f->plain + at[i], at[i + 1] - at[i], 3);
    assert_int_equal(ckpt_source_mem_new("file", f->packed, f->packed_len, &f->file, &err), 0);
    assert_int_equal(ckpt_decoded_new(budget, NULL, &f->store, &err), 0);
}

static void teardown(struct fixture *f)
{
    ckpt_source_unref(f->file);
    ckpt_decoded_unref(f->store);
    free(f->plain);
    free(f->packed);
}

static void check_ranges(const struct fixture *f, struct ckpt_source *s)
{
    static unsigned char got[LEN];
    const size_t ends[] = {0,       1,           100,         65535,   65536, 65537,
                           LEN / 2, LEN - 65537, LEN - 65536, LEN - 1, LEN};
    const size_t n = sizeof ends / sizeof *ends;
    struct ckpt_err err = {0};

    for (size_t i = 0; i < n; i++)
        for (size_t k = i; k < n; k++) {
            if (ckpt_source_pread(s, got, ends[k] - ends[i], ends[i], &err) < 0)
                fail_msg("%s", err.text);
            assert_memory_equal(got, f->plain + ends[i], ends[k] - ends[i]);
        }
}

TEST(zstd, every_range_has_the_bytes_that_were_compressed)
{
    struct ckpt_err err = {0};
    struct ckpt_source *s;
    struct fixture f;

    for (size_t budget = 0; budget <= LEN; budget += LEN) {
        setup(&f, budget);
        CHECK(ckpt_zstd_is_frame(f.packed + BEFORE) && !ckpt_zstd_is_frame(f.packed));
        CHECK_OK(
            ckpt_source_zstd_new(f.store, f.file, BEFORE, f.packed_len - BEFORE, LEN, &s, &err));
        CHECK_EQ(s->size, LEN);
        check_ranges(&f, s);
        ckpt_source_zstd_settle(s);
        check_ranges(&f, s);
        ckpt_source_unref(s);
        teardown(&f);
    }
}

TEST(zstd, what_is_cut_short_damaged_or_too_long_is_refused)
{
    struct ckpt_err err = {0};
    struct ckpt_source *s;
    struct fixture f;

    setup(&f, LEN);
    for (size_t cut = 0; cut < f.packed_len - BEFORE; cut += 1 + cut / 4)
        CHECK_FAILS(ckpt_source_zstd_new(f.store, f.file, BEFORE, cut, LEN, &s, &err), CKPT_FORMAT,
                    "they end within a frame");
    CHECK_FAILS(
        ckpt_source_zstd_new(f.store, f.file, BEFORE, f.packed_len - BEFORE, LEN - 1, &s, &err),
        CKPT_FORMAT, "more than 699999 bytes");
    CHECK_FAILS(ckpt_source_zstd_new(f.store, f.file, 0, f.packed_len, LEN, &s, &err), CKPT_FORMAT,
                "damaged near byte");
    teardown(&f);
}

TEST(zstd, bytes_whose_length_is_known_are_decompressed_when_they_are_read)
{
    struct ckpt_err err = {0};
    struct ckpt_source *s;
    struct fixture f;
    size_t len = 0;
    void *plain;
    char byte;

    setup(&f, LEN);
    const uint64_t packed = f.packed_len - BEFORE;
    CHECK_OK(ckpt_source_zstd_of_size(f.store, f.file, BEFORE, packed, LEN, &s, &err));
    CHECK_EQ(ckpt_decoded_bytes(f.store), 0);
    check_ranges(&f, s);
    ckpt_source_unref(s);
    for (int more = -1; more <= 1; more += 2) {
        CHECK_OK(ckpt_source_zstd_of_size(f.store, f.file, BEFORE, packed, (uint64_t)(LEN + more),
                                          &s, &err));
        CHECK_FAILS(ckpt_source_pread(s, &byte, 1, 9, &err), CKPT_FORMAT,
                    more < 0 ? "are more than" : "are fewer than");
        ckpt_source_unref(s);
    }
    CHECK_FAILS(ckpt_source_zstd_of_size(f.store, f.file, BEFORE, 9, UINT64_C(1) << 40, &s, &err),
                CKPT_FORMAT, "cannot be 1099511627776");
    CHECK_OK(ckpt_zstd_decompress(f.packed + BEFORE, packed, LEN, &plain, &len, &err));
    CHECK(len == LEN && memcmp(plain, f.plain, LEN) == 0);
    free(plain);
    CHECK_FAILS(ckpt_zstd_decompress(f.packed + BEFORE, packed, LEN - 1, &plain, &len, &err),
                CKPT_FORMAT, "more than 699999 bytes");
    CHECK_FAILS(ckpt_zstd_decompress(f.packed + BEFORE, packed - 1, LEN, &plain, &len, &err),
                CKPT_FORMAT, "end within a frame");
    teardown(&f);
}

/* A frame that asks for a window of more memory than we give. */
TEST(zstd, a_frame_that_wants_much_memory_is_refused)
{
    static const unsigned char frame[] = {0x28, 0xb5, 0x2f, 0xfd, 0x00, 0xa8, 1, 0, 0};
    struct ckpt_err err = {0};
    struct ckpt_source *file, *s;
    struct ckpt_decoded *store;

    CHECK_OK(ckpt_source_mem_new("file", frame, sizeof frame, &file, &err));
    CHECK_OK(ckpt_decoded_new(0, NULL, &store, &err));
    CHECK_FAILS(ckpt_source_zstd_new(store, file, 0, sizeof frame, LEN, &s, &err), CKPT_FORMAT,
                "too much memory");
    ckpt_source_unref(file);
    ckpt_decoded_unref(store);
}

TESTS(T(zstd, every_range_has_the_bytes_that_were_compressed),
      T(zstd, what_is_cut_short_damaged_or_too_long_is_refused),
      T(zstd, bytes_whose_length_is_known_are_decompressed_when_they_are_read),
      T(zstd, a_frame_that_wants_much_memory_is_refused), )
