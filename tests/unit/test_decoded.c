/* SPDX-License-Identifier: Apache-2.0 */
/* What is decoded is kept in memory, or in a temporary file. */
#include "test.h"

#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#include <zstd.h>

#include "base/mem.h"
#include "container/decoded.h"
#include "container/zstd.h"

enum { LEN = 300 * 1000, PIECE = 7000 };

/* A part whose bytes are a function of their place. */
struct made {
    struct ckpt_decoded_part part;
    int number;
    atomic_int calls, fails;
    sem_t *begun, *goes_on; /* NULL, or decoding posts one and waits for the other */
};

static unsigned char byte_at(int number, size_t i)
{
    return (unsigned char)(i * 7 + (i >> 8)) ^ number;
}

static int decode(const struct ckpt_decoded_part *part, ckpt_decoded_put *put, void *to,
                  struct ckpt_err *err)
{
    struct made *m = (struct made *)part;
    unsigned char buf[PIECE];

    atomic_fetch_add(&m->calls, 1);
    if (m->begun) {
        (void)sem_post(m->begun);
        (void)sem_wait(m->goes_on);
    }
    for (size_t at = 0; at < LEN; at += PIECE) {
        const size_t n = LEN - at < PIECE ? LEN - at : PIECE;
        if (atomic_load(&m->fails) && at > LEN / 2)
            return ckpt_fail(err, CKPT_IO, "part %d", m->number);
        for (size_t i = 0; i < n; i++)
            buf[i] = byte_at(m->number, at + i);
        if (!put(to, buf, n))
            return 1;
    }
    return 0;
}

struct fixture {
    char folder[64];
    int warnings;
    char warning[1000]; /* the last */
    struct ckpt_spill *spill;
    struct ckpt_decoded *place;
    struct made part[2];
};

static void line(void *ctx, enum ckpt_log_level level, const char *text)
{
    struct fixture *f = ctx;

    assert_int_equal(level, CKPT_LOG_WARNING);
    f->warnings++;
    (void)snprintf(f->warning, sizeof f->warning, "%s", text);
}

static void setup(struct fixture *f, size_t budget, bool has_folder)
{
    struct ckpt_err err = {0};

    *f = (struct fixture){.folder = "/tmp/ckptfs-test-XXXXXX"};
    const struct ckpt_log log = {line, f};
    assert_non_null(mkdtemp(f->folder));
    if (!has_folder)
        assert_int_equal(rmdir(f->folder), 0);
    assert_int_equal(ckpt_spill_new(f->folder, &log, &f->spill, &err), 0);
    assert_int_equal(ckpt_decoded_new(budget, f->spill, &f->place, &err), 0);
    for (int i = 0; i < 2; i++) {
        f->part[i].part.len = LEN;
        f->part[i].part.decode = decode;
        f->part[i].number = i;
        ckpt_decoded_add(f->place, &f->part[i].part);
    }
}

static void teardown(struct fixture *f)
{
    for (int i = 0; i < 2; i++)
        ckpt_decoded_forget(f->place, &f->part[i].part);
    ckpt_decoded_unref(f->place);
    ckpt_spill_unref(f->spill);
    (void)rmdir(f->folder); /* fails if something is left in it */
    assert_int_equal(access(f->folder, F_OK), -1);
}

static int read_range(struct fixture *f, int number, size_t lo, size_t hi, struct ckpt_err *err)
{
    static _Thread_local unsigned char got[LEN];
    const size_t half = (hi - lo) / 2;
    struct iovec iov[2] = {{got + lo, half}, {got + lo + half, hi - lo - half}};
    const struct ckpt_source_run run = {lo, iov, 2};
    const struct ckpt_source_way way = {CKPT_READ_AHEAD, NULL};

    if (ckpt_decoded_read(f->place, &f->part[number].part, &way, &run, 1, err) < 0)
        return -1;
    for (size_t i = lo; i < hi; i++)
        if (got[i] != byte_at(number, i))
            return ckpt_fail(err, CKPT_FORMAT, "byte %zu of part %d is wrong", i, number);
    return 0;
}

static void *read_both(void *arg)
{
    struct ckpt_err err = {0};

    for (size_t i = 0; i < 40; i++) {
        const size_t lo = i * 7919 % LEN, hi = lo + (i * 104729) % (LEN - lo) + 1;
        if (read_range(arg, (int)(i % 2), lo, hi, &err) < 0)
            return strdup(err.text);
    }
    return NULL;
}

static void read_by_eight(struct fixture *f)
{
    pthread_t thread[8];

    for (int i = 0; i < 8; i++)
        assert_int_equal(pthread_create(&thread[i], NULL, read_both, f), 0);
    for (int i = 0; i < 8; i++) {
        void *failed;
        (void)pthread_join(thread[i], &failed);
        if (failed)
            fail_msg("%s", (char *)failed);
    }
}

TEST(decoded, parts_beyond_the_budget_are_decoded_once_into_the_file)
{
    struct fixture f;

    setup(&f, LEN, true);
    read_by_eight(&f);
    CHECK(f.part[0].calls == 1 && f.part[1].calls == 1);
    CHECK_EQ(ckpt_decoded_bytes(f.place), 0);
    CHECK_EQ(f.warnings, 0);
    teardown(&f);
}

TEST(decoded, parts_within_the_budget_stay_in_memory)
{
    struct fixture f;

    setup(&f, 2 * LEN, false);
    read_by_eight(&f);
    CHECK(f.part[0].calls == 1 && f.part[1].calls == 1);
    CHECK_EQ(f.warnings, 0); /* that there is no folder */
    teardown(&f);
}

TEST(decoded, without_a_folder_or_room_memory_is_used_with_a_warning)
{
    struct fixture f;

    setup(&f, LEN, false);
    read_by_eight(&f);
    CHECK_EQ(f.warnings, 1);
    CHECK(strstr(f.warning, f.folder) && strstr(f.warning, "No such file") &&
          strstr(f.warning, "cache_dir=DIR"));
    teardown(&f);
    setup(&f, LEN, true);
    ckpt_spill_leave(f.spill, UINT64_MAX);
    read_by_eight(&f);
    CHECK_EQ(f.warnings, 1);
    CHECK(strstr(f.warning, "has no room for 300000 more bytes (the rest of the disk is left"));
    teardown(&f);
}

TEST(decoded, a_part_that_cannot_be_decoded_is_tried_again)
{
    struct ckpt_err err = {0};
    struct fixture f;

    for (size_t budget = LEN; budget <= 2 * LEN; budget += LEN) {
        setup(&f, budget, true);
        atomic_store(&f.part[1].fails, 1);
        CHECK_OK(read_range(&f, 0, 0, LEN, &err));
        CHECK_FAILS(read_range(&f, 1, 0, 9, &err), CKPT_IO, "part 1");
        CHECK_FAILS(read_range(&f, 1, 0, 9, &err), CKPT_IO, "part 1");
        atomic_store(&f.part[1].fails, 0);
        CHECK_OK(read_range(&f, 1, 0, LEN, &err));
        CHECK_OK(read_range(&f, 0, 0, LEN, &err));
        CHECK_EQ(f.part[1].calls, 3);
        teardown(&f);
    }
}

TEST(decoded, a_part_that_was_prepared_is_not_decoded_again)
{
    struct ckpt_err err = {0};
    struct fixture f;

    for (size_t budget = LEN; budget <= 4 * LEN; budget += 3 * LEN) { /* the file, or memory */
        setup(&f, budget, true);
        for (int i = 0; i < 2; i++) {
            atomic_store(&f.part[i].fails, i);
            CHECK_EQ(ckpt_decoded_prepare(f.place, &f.part[i].part),
                     i ? CKPT_PREPARED_NOT : CKPT_PREPARED_NOW);
        }
        CHECK_EQ(ckpt_decoded_prepare(f.place, &f.part[0].part), CKPT_PREPARED_BEFORE);
        CHECK_OK(read_range(&f, 0, 0, LEN, &err));
        CHECK_EQ(f.part[0].calls, 1);
        CHECK_FAILS(read_range(&f, 1, 0, 9, &err), CKPT_IO, "part 1");
        teardown(&f);
    }
}

static void *prepare_first(void *arg)
{
    struct fixture *f = arg;

    return (void *)(intptr_t)ckpt_decoded_prepare(f->place, &f->part[0].part);
}

TEST(decoded, who_prepares_does_not_wait_for_another_thread)
{
    for (size_t budget = LEN; budget <= 4 * LEN; budget += 3 * LEN) {
        struct fixture f;
        pthread_t thread;
        sem_t begun, goes_on;
        void *result;

        setup(&f, budget, true);
        assert_int_equal(sem_init(&begun, 0, 0) | sem_init(&goes_on, 0, 0), 0);
        f.part[0].begun = &begun;
        f.part[0].goes_on = &goes_on;
        assert_int_equal(pthread_create(&thread, NULL, prepare_first, &f), 0);
        (void)sem_wait(&begun);
        CHECK_EQ(ckpt_decoded_prepare(f.place, &f.part[0].part), CKPT_PREPARED_BUSY);
        CHECK_EQ(ckpt_decoded_prepare(f.place, &f.part[1].part), CKPT_PREPARED_NOW);
        (void)sem_post(&goes_on);
        (void)pthread_join(thread, &result);
        CHECK_EQ((intptr_t)result, CKPT_PREPARED_NOW);
        CHECK_EQ(ckpt_decoded_prepare(f.place, &f.part[0].part), CKPT_PREPARED_BEFORE);
        CHECK(f.part[0].calls == 1 && f.part[1].calls == 1);
        (void)sem_destroy(&begun);
        (void)sem_destroy(&goes_on);
        teardown(&f);
    }
}

TEST(decoded, bytes_in_the_page_cache_are_only_those_of_the_file)
{
    const struct ckpt_source_way cached = {CKPT_READ_CACHED, NULL};
    struct ckpt_err err = {0};
    unsigned char got[5];
    struct fixture f;

    setup(&f, LEN, true);
    for (int i = 0; i < 2; i++) {
        struct iovec iov = {got, sizeof got};
        const struct ckpt_source_run run = {1000, &iov, 1};
        const int rc = ckpt_decoded_read(f.place, &f.part[0].part, &cached, &run, 1, &err);
        CHECK(i ? rc == 1 || (rc == 0 && got[4] == byte_at(0, 1004)) : rc == 1);
        CHECK_OK(read_range(&f, 0, 0, 1, &err));
    }
    teardown(&f);
}

/* A child may live longer, and its parent may give back what the child still reads. */
TEST(decoded, a_fork_decodes_for_itself)
{
    struct ckpt_err err = {0};
    struct fixture f;
    int status = -1;

    setup(&f, LEN, true);
    CHECK_OK(read_range(&f, 0, 0, LEN, &err));
    const pid_t pid = fork();
    if (pid == 0) {
        const bool good = read_range(&f, 0, 0, LEN, &err) == 0 && f.part[0].calls == 2 &&
                          read_range(&f, 1, 0, LEN, &err) == 0;
        ckpt_decoded_forget(f.place, &f.part[0].part);
        _exit(good ? 0 : 1);
    }
    CHECK(waitpid(pid, &status, 0) == pid && status == 0);
    CHECK_OK(read_range(&f, 0, 0, LEN, &err));
    CHECK_OK(read_range(&f, 1, 0, LEN, &err));
    CHECK(f.part[0].calls == 1 && f.part[1].calls == 1);
    teardown(&f);
}

/* ---- large frames ---- */

enum { LARGE = 512 << 20, STEP = 1 << 20 };

/* A frame of so many bytes, of which each MiB has another value. */
static void *compress_large(size_t *ret_len)
{
    const size_t cap = 4 << 20;
    unsigned char *plain = malloc(STEP), *packed = malloc(cap);
    ZSTD_CCtx *c = ZSTD_createCCtx();
    ZSTD_outBuffer out = {packed, cap, 0};

    for (int i = 0; i < LARGE / STEP; i++) {
        memset(plain, i * 3, STEP);
        ZSTD_inBuffer in = {plain, STEP, 0};
        while (in.pos < in.size)
            assert_false(ZSTD_isError(ZSTD_compressStream2(c, &out, &in, ZSTD_e_continue)));
    }
    ZSTD_inBuffer none = {NULL, 0, 0};
    while (ZSTD_compressStream2(c, &out, &none, ZSTD_e_end))
        ;
    (void)ZSTD_freeCCtx(c);
    free(plain);
    *ret_len = out.pos;
    return packed;
}

static long most_kib(void)
{
    struct rusage usage;

    (void)getrusage(RUSAGE_SELF, &usage);
    return usage.ru_maxrss;
}

TEST(decoded, a_large_frame_is_streamed)
{
    struct ckpt_source *file, *s;
    struct ckpt_err err = {0};
    struct fixture f;
    size_t len = 0;
    void *packed = compress_large(&len);
    unsigned char got[2];

    setup(&f, LEN, true);
    CHECK_OK(ckpt_source_mem_new("file", packed, len, &file, &err));
    CHECK_OK(ckpt_source_zstd_of_size(f.place, file, 0, len, LARGE, &s, &err));
    const long before = most_kib();
    for (int i = LARGE / STEP; i-- > 1;) {
        CHECK_OK(ckpt_source_pread(s, got, 2, (uint64_t)i * STEP - 1, &err));
        CHECK(got[0] == (unsigned char)((i - 1) * 3) && got[1] == (unsigned char)(i * 3));
    }
    CHECK(most_kib() - before < 64 * 1024);
    CHECK_EQ(f.warnings, 0);
    ckpt_source_unref(s);
    ckpt_source_unref(file);
    free(packed);
    teardown(&f);
}

TESTS(T(decoded, parts_beyond_the_budget_are_decoded_once_into_the_file),
      T(decoded, parts_within_the_budget_stay_in_memory),
      T(decoded, without_a_folder_or_room_memory_is_used_with_a_warning),
      T(decoded, a_part_that_cannot_be_decoded_is_tried_again),
      T(decoded, a_part_that_was_prepared_is_not_decoded_again),
      T(decoded, who_prepares_does_not_wait_for_another_thread),
      T(decoded, bytes_in_the_page_cache_are_only_those_of_the_file),
      T(decoded, a_fork_decodes_for_itself), T(decoded, a_large_frame_is_streamed), )
