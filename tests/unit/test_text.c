/* SPDX-License-Identifier: Apache-2.0 */
#include "view/text.h"

#include "test.h"

/* Entries of very different length, empty ones too. */
static void put(const void *ctx, size_t i, struct ckpt_str *out)
{
    (void)ctx;
    for (size_t k = 0; k < i * i % 23; k++)
        ckpt_str_putc(out, (char)('a' + (i + k) % 26));
}

static void put_nothing(const void *ctx, size_t i, struct ckpt_str *out)
{
    (void)ctx;
    (void)i;
    (void)out;
}

static bool reads(const struct ckpt_text *t, const struct ckpt_str *whole, size_t len, uint64_t off)
{
    char buf[8192];
    struct ckpt_err err = {0};

    return ckpt_text_pread(t, buf, len, off, &err) == 0 && memcmp(buf, whole->ptr + off, len) == 0;
}

TEST(text, any_range_reads_as_the_whole)
{
    static const size_t counts[] = {3, 63, 64, 65, 128, 500},
                        steps[] = {CKPT_TEXT_SHORT, CKPT_TEXT_ARCHIVES};

    for (size_t k = 0; k < 2 * sizeof counts / sizeof *counts; k++) {
        const size_t c = k / 2, step = steps[k % 2];
        ckpt_cleanup(ckpt_arena_release) struct ckpt_arena arena = {0};
        ckpt_cleanup(ckpt_str_release) struct ckpt_str whole = {0};
        struct ckpt_text t;
        struct ckpt_err err = {0};

        for (size_t i = 0; i < counts[c]; i++)
            put(NULL, i, &whole);
        CHECK_OK(ckpt_text_init(&t, put, NULL, counts[c], step, &arena, &err));
        CHECK_EQ(t.len, whole.len);
        CHECK(reads(&t, &whole, whole.len, 0));
        CHECK(reads(&t, &whole, 0, whole.len));
        for (size_t off = 0; off < whole.len; off++) {
            CHECK(reads(&t, &whole, 1, off));
            CHECK(reads(&t, &whole, whole.len - off, off));
            CHECK(reads(&t, &whole, (whole.len - off) / 2, off));
        }
    }
}

TEST(text, a_text_of_nothing_is_empty)
{
    ckpt_cleanup(ckpt_arena_release) struct ckpt_arena arena = {0};
    struct ckpt_text t;
    struct ckpt_err err = {0};

    CHECK_OK(ckpt_text_init(&t, put, NULL, 0, CKPT_TEXT_SHORT, &arena, &err));
    CHECK_EQ(t.len, 0);
    CHECK_OK(ckpt_text_pread(&t, NULL, 0, 0, &err));
    CHECK_OK(ckpt_text_init(&t, put_nothing, NULL, 1000, CKPT_TEXT_SHORT, &arena, &err));
    CHECK_EQ(t.len, 0);
    CHECK_OK(ckpt_text_pread(&t, NULL, 0, 0, &err));
}

static void count(const void *ctx, size_t i, struct ckpt_str *out)
{
    ++*(size_t *)ctx;
    put(NULL, i, out);
}

TEST(text, only_entries_that_are_read_are_written_where_each_offset_is_kept)
{
    ckpt_cleanup(ckpt_arena_release) struct ckpt_arena arena = {0};
    struct ckpt_text t;
    struct ckpt_err err = {0};
    size_t written = 0;
    char buf[64];

    CHECK_OK(ckpt_text_init(&t, count, &written, 500, CKPT_TEXT_ARCHIVES, &arena, &err));
    written = 0;
    CHECK_OK(ckpt_text_pread(&t, buf, (size_t)(t.mark[5] - t.mark[3]), t.mark[3], &err));
    CHECK_EQ(written, 2);
}

TESTS(T(text, any_range_reads_as_the_whole), T(text, a_text_of_nothing_is_empty),
      T(text, only_entries_that_are_read_are_written_where_each_offset_is_kept))
