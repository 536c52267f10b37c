/* SPDX-License-Identifier: Apache-2.0 */
/* What people read: sizes, lists of numbers, and the bar of a command that takes long. */
#include "test.h"

#include <stdlib.h>
#include <unistd.h>

#include "base/clock.h"
#include "out.h"

enum { CELLS = 24 };

/* What a bar that has come so far writes to stderr, which is no terminal and has 80 columns. */
static void drawn(uint64_t already, uint64_t done, uint64_t total, char *ret, size_t cap)
{
    const struct ckpt_progress p = {
        .shown = true, .begin = ckpt_now_ns(), .already = already, .total = total};
    FILE *file = tmpfile();
    const int own = dup(STDERR_FILENO);

    assert_non_null(file);
    assert_int_equal(dup2(fileno(file), STDERR_FILENO), STDERR_FILENO);
    ckpt_progress_draw(&p, done, "a file");
    assert_int_equal(dup2(own, STDERR_FILENO), STDERR_FILENO);
    (void)close(own);
    rewind(file);
    ret[fread(ret, 1, cap - 1, file)] = '\0';
    (void)fclose(file);
}

TEST(out, a_bar_is_as_full_as_what_is_done)
{
    char got[1024], want[64];

    for (unsigned i = 0; i <= CELLS; i++) {
        drawn(0, i * 100, CELLS * 100, got, sizeof got);
        (void)snprintf(want, sizeof want, "\r[%.*s%.*s] %3u%%  ", (int)i,
                       "########################", (int)(CELLS - i), "........................",
                       i * 100 / CELLS);
        if (strncmp(got, want, strlen(want)) != 0)
            fail_msg("'%s' does not begin with '%s'", got, want);
    }
    drawn(0, 0, 0, got, sizeof got); /* nothing is to be done */
    CHECK(strstr(got, "[########################] 100%  0 B of 0 B"));
}

TEST(out, a_bar_tells_the_bytes_and_the_file_and_no_time_before_it_has_a_rate)
{
    char got[1024];

    drawn(3 << 20, 3 << 20, 12 << 20, got, sizeof got);
    CHECK_STR(got, "\r[######..................]  25%  3.0 MiB of 12.0 MiB  0 B/s  ETA -  a file"
                   "\033[K");
    drawn(3 << 20, 4 << 20, 12 << 20, got, sizeof got);
    CHECK(strstr(got, "  ETA 0:0") && !strstr(got, "0 B/s"));
}

TEST(out, sizes_and_numbers)
{
    char buf[CKPT_OUT_SIZE];
    char *text = ckpt_out_numbers((const uint64_t[]){1, 20, 300}, 3, ", ");

    CHECK_STR(ckpt_out_size(0, buf), "0 B");
    CHECK_STR(ckpt_out_size(1023, buf), "1023 B");
    CHECK_STR(ckpt_out_size(1024, buf), "1.0 KiB");
    CHECK_STR(ckpt_out_size(1536 << 10, buf), "1.5 MiB");
    CHECK_STR(ckpt_out_size(UINT64_MAX, buf), "16.0 EiB");
    CHECK_STR(text, "1, 20, 300");
    free(text);
}

TESTS(T(out, a_bar_is_as_full_as_what_is_done),
      T(out, a_bar_tells_the_bytes_and_the_file_and_no_time_before_it_has_a_rate),
      T(out, sizes_and_numbers))
