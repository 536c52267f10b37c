/* SPDX-License-Identifier: Apache-2.0 */
/* The slab cache, and a source that fails at its n-th read. */
#include "test.h"

#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

#include "base/mem.h"
#include "tensor/read.h"

enum { SLAB = 1000 };

struct filler {
    atomic_int calls;
    bool fails;
};

static int fill(const void *ctx, void *buf, size_t len, uint64_t slab, struct ckpt_err *err)
{
    struct filler *f = (struct filler *)ctx;
    atomic_fetch_add(&f->calls, 1);
    (void)usleep(1000);
    memset(buf, (int)slab + 1, len);
    return f->fails ? ckpt_fail(err, CKPT_IO, "no slab %d", (int)slab) : 0;
}

static struct ckpt_slab slab_of(struct filler *f, const void *group, uint64_t number)
{
    return (struct ckpt_slab){group, f, number, SLAB, fill, f, NULL};
}

struct reader {
    struct ckpt_slabs *slabs;
    struct filler *f;
    int failed;
};

static void *read_slab(void *arg)
{
    struct reader *r = arg;
    struct ckpt_err err = {0};
    char buf[10] = {0};
    struct ckpt_slab slab = slab_of(r->f, r, 4);
    r->failed = ckpt_slabs_read(r->slabs, &slab, buf, 10, 990, &err) < 0;
    r->failed |= !r->f->fails && (buf[0] != 5 || buf[9] != 5);
    return NULL;
}

static int read_by_eight(struct ckpt_slabs *slabs, struct filler *f)
{
    pthread_t thread[8];
    struct reader each[8];
    int failed = 0;
    for (int i = 0; i < 8; i++) {
        each[i] = (struct reader){slabs, f, 0};
        assert_int_equal(pthread_create(&thread[i], NULL, read_slab, &each[i]), 0);
    }
    for (int i = 0; i < 8; i++) {
        (void)pthread_join(thread[i], NULL);
        failed += each[i].failed;
    }
    return failed;
}

static int read_one(struct ckpt_slabs *slabs, const void *group, struct filler *f, uint64_t n)
{
    struct ckpt_err err = {0};
    struct ckpt_slab slab = slab_of(f, group, n);
    char c;
    return ckpt_slabs_read(slabs, &slab, &c, 1, 0, &err) < 0 ? -1 : c;
}

static void *read_same(void *arg)
{
    struct reader *r = arg;
    r->failed = read_one(r->slabs, NULL, r->f, 4) != 5;
    return NULL;
}

TEST(slab, many_who_want_one_fill_it_once)
{
    struct filler f = {0};
    struct ckpt_slabs *slabs;
    struct ckpt_err err = {0};
    pthread_t thread[8];
    struct reader each[8];
    CHECK_OK(ckpt_slabs_new(1 << 20, &slabs, &err));
    for (int i = 0; i < 8; i++) {
        each[i] = (struct reader){slabs, &f, 0};
        CHECK_EQ(pthread_create(&thread[i], NULL, read_same, &each[i]), 0);
    }
    for (int i = 0; i < 8; i++) {
        (void)pthread_join(thread[i], NULL);
        CHECK_EQ(each[i].failed, 0);
    }
    CHECK_EQ(f.calls, 1);
    CHECK_EQ(ckpt_slabs_bytes(slabs), SLAB);
    ckpt_slabs_unref(slabs);
}

TEST(slab, a_failure_reaches_all_and_is_not_kept)
{
    struct filler f = {.fails = true};
    struct ckpt_slabs *slabs;
    struct ckpt_err err = {0};
    CHECK_OK(ckpt_slabs_new(1 << 20, &slabs, &err));
    CHECK_EQ(read_by_eight(slabs, &f), 8);
    CHECK_EQ(ckpt_slabs_bytes(slabs), 0);
    f.fails = false;
    CHECK_EQ(read_by_eight(slabs, &f), 0);
    ckpt_slabs_unref(slabs);
}

TEST(slab, the_budget_holds_and_the_oldest_goes)
{
    struct filler f = {0};
    struct ckpt_slabs *slabs;
    struct ckpt_err err = {0};
    CHECK_OK(ckpt_slabs_new(3 * SLAB, &slabs, &err));
    for (uint64_t i = 0; i < 10; i++) {
        CHECK_EQ(read_one(slabs, NULL, &f, i), i + 1);
        CHECK(ckpt_slabs_bytes(slabs) <= 3 * SLAB);
    }
    CHECK_EQ(f.calls, 10);
    CHECK_EQ(read_one(slabs, NULL, &f, 7), 8);
    CHECK_EQ(f.calls, 10);
    CHECK_EQ(read_one(slabs, NULL, &f, 0), 1);
    CHECK_EQ(read_one(slabs, NULL, &f, 7), 8);
    CHECK_EQ(f.calls, 11);
    ckpt_slabs_unref(slabs);
}

TEST(slab, a_group_is_forgotten_as_a_whole)
{
    struct filler f = {0};
    struct ckpt_slabs *slabs;
    struct ckpt_err err = {0};
    int a, b;
    CHECK_OK(ckpt_slabs_new(1 << 20, &slabs, &err));
    CHECK_EQ(read_one(slabs, &a, &f, 1), 2);
    CHECK_EQ(read_one(slabs, &a, &f, 2), 3);
    CHECK_EQ(read_one(slabs, &b, &f, 1), 2);
    ckpt_slabs_forget(slabs, &a);
    CHECK_EQ(ckpt_slabs_bytes(slabs), SLAB);
    CHECK_EQ(read_one(slabs, &b, &f, 1), 2);
    CHECK_EQ(f.calls, 3);
    ckpt_slabs_unref(slabs);
}

TEST(slab, one_is_prepared_if_that_evicts_nothing_unread)
{
    struct filler f = {0};
    struct ckpt_slabs *slabs;
    struct ckpt_err err = {0};
    struct ckpt_slab slab[4];
    char buf[SLAB];
    CHECK_OK(ckpt_slabs_new(4 * SLAB, &slabs, &err));
    for (uint64_t i = 0; i < 4; i++)
        slab[i] = slab_of(&f, NULL, i);
    CHECK_EQ(ckpt_slabs_prepare(slabs, &slab[0]), CKPT_PREPARED_NOW);
    CHECK_EQ(ckpt_slabs_prepare(slabs, &slab[0]), CKPT_PREPARED_BEFORE);
    CHECK_EQ(ckpt_slabs_prepare(slabs, &slab[1]), CKPT_PREPARED_NOW);
    CHECK_EQ(ckpt_slabs_prepare(slabs, &slab[2]), CKPT_PREPARED_FULL);
    CHECK_EQ(f.calls, 2);
    CHECK_OK(ckpt_slabs_read(slabs, &slab[0], buf, SLAB - 1, 0, &err));
    CHECK_EQ(ckpt_slabs_prepare(slabs, &slab[2]), CKPT_PREPARED_FULL);
    CHECK_OK(ckpt_slabs_read(slabs, &slab[0], buf, 1, SLAB - 1, &err));
    CHECK_EQ(ckpt_slabs_prepare(slabs, &slab[2]), CKPT_PREPARED_NOW);
    CHECK_EQ(read_one(slabs, NULL, &f, 1), 2);
    CHECK_EQ(read_one(slabs, NULL, &f, 2), 3);
    CHECK_EQ(f.calls, 3);
    ckpt_slabs_unref(slabs);
}

TEST(slab, one_that_cannot_be_prepared_is_tried_again_when_it_is_read)
{
    struct filler f = {.fails = true};
    struct ckpt_slabs *slabs;
    struct ckpt_err err = {0};
    CHECK_OK(ckpt_slabs_new(4 * SLAB, &slabs, &err));
    const struct ckpt_slab slab = slab_of(&f, NULL, 4);
    CHECK_EQ(ckpt_slabs_prepare(slabs, &slab), CKPT_PREPARED_NOT);
    CHECK_EQ(ckpt_slabs_bytes(slabs), 0);
    f.fails = false;
    CHECK_EQ(read_one(slabs, NULL, &f, 4), 5);
    CHECK_EQ(f.calls, 2);
    ckpt_slabs_unref(slabs);
}

/* ---- filling ahead ---- */

enum { AHEAD = 24, PARTS = 8, LARGE = 9 << 20 };

struct ahead {
    struct ckpt_slabs *slabs;
    struct filler f[AHEAD];
    atomic_int ticket, wrong;
};

static int fill_large(const void *ctx, void *buf, size_t len, uint64_t slab, struct ckpt_err *err)
{
    struct filler *f = (struct filler *)ctx;
    (void)err;
    atomic_fetch_add(&f->calls, 1);
    (void)usleep(slab % 3 == 0 ? 3000 : 300);
    memset(buf, (int)slab + 1, len);
    return 0;
}

static struct ckpt_slab large(struct filler *f, uint64_t number);

static bool next_large(const void *ctx, struct ckpt_slab *ret)
{
    struct filler *f = (struct filler *)ctx;
    const uint64_t number = ret->number + 1;
    if (number < AHEAD)
        *ret = large(f + 1, number);
    return number < AHEAD;
}

static struct ckpt_slab large(struct filler *f, uint64_t number)
{
    return (struct ckpt_slab){NULL, f, number, LARGE - number, fill_large, f, next_large};
}

static void *read_in_order(void *arg)
{
    struct ahead *a = arg;
    unsigned char *buf = malloc(LARGE);
    for (int k; (k = atomic_fetch_add(&a->ticket, 1)) < AHEAD * PARTS;) {
        const struct ckpt_slab s = large(&a->f[k / PARTS], (uint64_t)(k / PARTS));
        const size_t part = (s.len + PARTS - 1) / PARTS, off = part * (size_t)(k % PARTS);
        const size_t len = k % PARTS == PARTS - 1 ? s.len - off : part;
        struct ckpt_err err = {0};
        if (ckpt_slabs_read(a->slabs, &s, buf, len, off, &err) < 0 || buf[0] != s.number + 1 ||
            memcmp(buf, buf + 1, len - 1) != 0)
            atomic_fetch_add(&a->wrong, 1);
    }
    free(buf);
    return NULL;
}

/* Whatever the number of threads, slabs are not filled in vain, and the budget holds. */
TEST(slab, threads_that_read_in_order_fill_ahead)
{
    for (int threads = 1; threads <= 8; threads++) {
        struct ahead *a = calloc(1, sizeof *a);
        pthread_t thread[8];
        struct ckpt_err err = {0};
        CHECK_OK(ckpt_slabs_new((size_t)4 * LARGE, &a->slabs, &err));
        for (int i = 0; i < threads; i++)
            CHECK_EQ(pthread_create(&thread[i], NULL, read_in_order, a), 0);
        for (int i = 0; i < threads; i++)
            (void)pthread_join(thread[i], NULL);
        CHECK_EQ(a->wrong, 0);
        int calls = 0;
        for (int i = 0; i < AHEAD; i++)
            calls += a->f[i].calls;
        CHECK(calls >= AHEAD && calls <= AHEAD + threads); /* again for a thread that came late */
        /* what is read makes room at a quarter; the others have not read what was made again */
        const size_t again = (size_t)(calls - AHEAD);
        CHECK(ckpt_slabs_bytes(a->slabs) <= (again > 1 ? again : 1) * LARGE);
        ckpt_slabs_unref(a->slabs);
        free(a);
    }
}

/* ---- a source that fails ---- */

struct faulty {
    struct ckpt_source source;
    struct ckpt_source *of;
    int until, checks;
};

static int faulty_preadv(struct ckpt_source *s, struct iovec *iov, int n, uint64_t off,
                         struct ckpt_err *err)
{
    struct faulty *f = (struct faulty *)s;
    if (f->until-- == 0)
        return ckpt_fail(err, CKPT_IO, "the disk is gone");
    return ckpt_source_preadv(f->of, iov, n, off, err);
}

static int faulty_check(struct ckpt_source *s, struct ckpt_err *err)
{
    struct faulty *f = (struct faulty *)s;
    return f->checks-- == 0 ? ckpt_fail(err, CKPT_STALE, "it changed") : 0;
}

static char *faulty_name(const struct ckpt_source *s)
{
    (void)s;
    return strdup("faulty");
}

static void faulty_free(struct ckpt_source *s) { ckpt_source_unref(((struct faulty *)s)->of); }

static const struct ckpt_source_ops faulty_ops = {
    .preadv = faulty_preadv, .check = faulty_check, .name = faulty_name, .free = faulty_free};

/* An eight-way interleaved tensor, and a transposed one that goes through slabs. */
TEST(fault, whatever_read_fails_the_request_fails)
{
    enum { ROWS = 1024, COLS = 1024, BYTES = ROWS * COLS * 2, MOST = 64 };
    uint64_t dim[] = {ROWS, COLS};
    unsigned char *data = malloc(BYTES), *want = malloc(BYTES), *got = malloc(BYTES);
    struct ckpt_err err = {0};
    struct faulty f = {.source = {.ops = &faulty_ops, .size = BYTES}, .until = -1, .checks = -1};
    struct ckpt_catalog *cat;
    size_t index;
    for (size_t i = 0; i < BYTES; i++)
        data[i] = (unsigned char)(i * 7 + (i >> 9));
    CHECK_OK(ckpt_source_mem_new("m", data, BYTES, &f.of, &err));
    atomic_init(&f.source.refs, 1);
    CHECK_OK(ckpt_catalog_new(&cat, &err));
    CHECK_EQ(ckpt_catalog_add_source(cat, &f.source, &err), 0);
    for (int transposed = 0; transposed < 2; transposed++) {
        struct ckpt_piece_draft piece[8];
        size_t n = transposed ? 1 : 8;
        for (uint64_t w = 0; w < n; w++) {
            struct ckpt_box b = {.rank = 2, .lo = {0, w * COLS / n}, .n = {ROWS, COLS / n}};
            uint64_t stride[] = {transposed ? 2 : COLS / n * 2, transposed ? ROWS * 2 : 2};
            ckpt_piece_from_box(dim, &b, 0, w * BYTES / n, stride, &piece[w]);
        }
        const char *name = transposed ? "transposed" : "interleaved";
        CHECK_OK(ckpt_catalog_add(cat, name, CKPT_BF16, dim, 2, &index, &err));
        CHECK_OK(ckpt_catalog_set_pieces(cat, index, piece, n, &err));
        const struct ckpt_tensor *t = ckpt_catalog_find(cat, name);
        CHECK_OK(ckpt_tensor_pread(t, NULL, want, BYTES, 0, &err));
        int succeeded = 0;
        for (int at = 0; at < MOST && !succeeded; at++) {
            struct ckpt_reading rd = {0};
            CHECK_OK(ckpt_slabs_new(16 << 20, &rd.slabs, &err));
            f.until = at;
            err = (struct ckpt_err){0};
            if (ckpt_tensor_pread(t, &rd, got, BYTES, 0, &err) == 0) {
                succeeded = at;
            } else {
                CHECK(err.code == CKPT_IO && strstr(err.text, "the disk is gone"));
                f.until = -1; /* the disk is back: nothing of the failure was kept */
                err = (struct ckpt_err){0};
                CHECK_OK(ckpt_tensor_pread(t, &rd, got, BYTES, 0, &err));
            }
            CHECK(memcmp(got, want, BYTES) == 0);
            ckpt_slabs_unref(rd.slabs);
        }
        CHECK(succeeded > 0);
        f.until = -1;
        f.checks = 0;
        CHECK_FAILS(ckpt_tensor_pread(t, NULL, got, BYTES, 0, &err), CKPT_STALE, "it changed");
        f.checks = -1;
        err = (struct ckpt_err){0};
    }
    ckpt_catalog_free(cat);
    ckpt_source_unref(&f.source);
    free(data);
    free(want);
    free(got);
}

TESTS(T(slab, many_who_want_one_fill_it_once), T(slab, a_failure_reaches_all_and_is_not_kept),
      T(slab, the_budget_holds_and_the_oldest_goes), T(slab, a_group_is_forgotten_as_a_whole),
      T(slab, one_is_prepared_if_that_evicts_nothing_unread),
      T(slab, one_that_cannot_be_prepared_is_tried_again_when_it_is_read),
      T(slab, threads_that_read_in_order_fill_ahead),
      T(fault, whatever_read_fails_the_request_fails))
