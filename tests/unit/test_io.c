/* SPDX-License-Identifier: Apache-2.0 */
/* Directories, descriptors and files that change under us. */
#include "test.h"

#include "io/cursor.h"
#include "io/direct.h"
#include "tensor/strided.h"
#include "tree.h"

struct fixture {
    struct tree t;
    struct ckpt_dir *dir;
    struct ckpt_fdpool *pool;
};

static void begin(struct fixture *f, size_t max_open)
{
    struct ckpt_err err = {0};
    tree_open(&f->t);
    TREE_MUST(ckpt_dir_open(f->t.path, CKPT_LINKS_BENEATH, &f->dir, &err) == 0);
    TREE_MUST(ckpt_fdpool_new(max_open, &f->pool, &err) == 0);
}

static void end(struct fixture *f)
{
    ckpt_fdpool_unref(f->pool);
    ckpt_dir_unref(f->dir);
    tree_close(&f->t);
}

static struct ckpt_source *source(struct fixture *f, const char *name)
{
    struct ckpt_err err = {0};
    struct ckpt_source *s;
    if (ckpt_source_file_new(f->dir, name, f->pool, &s, &err) < 0)
        fail_msg("%s", err.text);
    return s;
}

TEST(dir, names_that_are_no_names_below_are_refused)
{
    static const char *const names[] = {"",     "/",      "/etc/passwd", "..", "../x",
                                        "a/..", "a/../b", "a//b",        "a/", "/a"};
    struct ckpt_err err = {0};
    struct fixture f;
    int fd;
    begin(&f, 4);
    tree_text(&f.t, "a/b", "x");
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        CHECK_FAILS(ckpt_dir_open_file(f.dir, names[i], &fd, NULL, &err), CKPT_FORMAT,
                    "not a path below");
    end(&f);
}

TEST(dir, what_is_no_regular_file_is_refused_without_waiting)
{
    struct ckpt_err err = {0};
    struct fixture f;
    int fd;
    begin(&f, 4);
    tree_fifo(&f.t, "fifo");
    tree_dirs(&f.t, "dir/");
    tree_link(&f.t, "nowhere", "dangling");
    CHECK_FAILS(ckpt_dir_open_file(f.dir, "fifo", &fd, NULL, &err), CKPT_FORMAT, "a FIFO");
    CHECK_FAILS(ckpt_dir_open_file(f.dir, "dir", &fd, NULL, &err), CKPT_FORMAT, "a directory");
    CHECK_FAILS(ckpt_dir_open_file(f.dir, "dangling", &fd, NULL, &err), CKPT_MISSING, "dangling");
    CHECK_FAILS(ckpt_dir_open_file(f.dir, "none", &fd, NULL, &err), CKPT_MISSING, "none");
    CHECK(!ckpt_dir_has_file(f.dir, "fifo") && ckpt_dir_has_dir(f.dir, "dir"));
    end(&f);
}

TEST(dir, links_lead_anywhere_below_and_nowhere_else)
{
    struct ckpt_err err = {0};
    struct fixture f;
    char absolute[5000];
    int fd;
    begin(&f, 4);
    tree_text(&f.t, "sub/file", "x");
    tree_link(&f.t, "sub/file", "down");
    tree_link(&f.t, "../sub/file", "other/across");
    tree_link(&f.t, "/etc/passwd", "out");
    tree_link(&f.t, "../../../../../../../../etc/passwd", "far_out");
    tree_link(&f.t, "/etc", "etc");
    (void)snprintf(absolute, sizeof absolute, "%s/sub/file", f.t.path);
    tree_link(&f.t, absolute, "absolute");
    static const char *const good[] = {"down", "other/across", "absolute"};
    for (size_t i = 0; i < 3; i++) {
        CHECK_OK(ckpt_dir_open_file(f.dir, good[i], &fd, NULL, &err));
        (void)close(fd);
    }
    static const char *const bad[] = {"out", "far_out", "etc/passwd"};
    for (size_t i = 0; i < 3; i++)
        CHECK_FAILS(ckpt_dir_open_file(f.dir, bad[i], &fd, NULL, &err), CKPT_UNSUPPORTED,
                    "leads out of");
    end(&f);
}

TEST(dir, a_hub_snapshot_reaches_the_blobs_of_its_model)
{
    struct ckpt_err err = {0};
    struct ckpt_dir *dir;
    struct tree t;
    char path[5000];
    int fd;
    tree_open(&t);
    tree_text(&t, "models--a--b/blobs/1234", "x");
    tree_text(&t, "models--a--c/blobs/1234", "x");
    tree_link(&t, "../../blobs/1234", "models--a--b/snapshots/main/good");
    tree_link(&t, "../../../models--a--c/blobs/1234", "models--a--b/snapshots/main/bad");
    (void)snprintf(path, sizeof path, "%s/models--a--b/snapshots/main", t.path);
    CHECK_OK(ckpt_dir_open(path, CKPT_LINKS_BENEATH, &dir, &err));
    CHECK_OK(ckpt_dir_open_file(dir, "good", &fd, NULL, &err));
    (void)close(fd);
    CHECK_FAILS(ckpt_dir_open_file(dir, "bad", &fd, NULL, &err), CKPT_UNSUPPORTED, "leads out");
    ckpt_dir_unref(dir);
    tree_close(&t);
}

TEST(fdpool, no_more_files_are_open_than_the_budget)
{
    struct ckpt_source *s[10];
    struct ckpt_err err = {0};
    struct fixture f;
    begin(&f, 3);
    for (int i = 0; i < 10; i++) {
        char name[16], text[16];
        (void)snprintf(name, sizeof name, "f%d", i);
        (void)snprintf(text, sizeof text, "text%d", i);
        tree_text(&f.t, name, text);
        s[i] = source(&f, name);
    }
    for (int i = 0; i < 100; i++) {
        char buf[5];
        CHECK_OK(ckpt_source_pread(s[i * 7 % 10], buf, 5, 0, &err));
        CHECK(memcmp(buf, "text", 4) == 0 && buf[4] == '0' + i * 7 % 10);
        CHECK(ckpt_fdpool_open_count(f.pool) <= 3);
    }
    for (int i = 0; i < 10; i++)
        ckpt_source_unref(s[i]);
    CHECK_EQ(ckpt_fdpool_open_count(f.pool), 0);
    end(&f);
}

/* Make it lose its descriptor. */
static void evict(struct fixture *f)
{
    struct ckpt_err err = {0};
    char buf;
    tree_text(&f->t, "other", "o");
    struct ckpt_source *s = source(f, "other");
    TREE_MUST(ckpt_source_pread(s, &buf, 1, 0, &err) == 0);
    ckpt_source_unref(s);
}

static int read_checked(struct ckpt_source *s, char *buf, struct ckpt_err *err)
{
    struct ckpt_batch b;
    ckpt_batch_init(&b, CKPT_READ_AHEAD);
    int result = ckpt_batch_add(&b, s, buf, 4, 0, err) < 0 ? -1 : ckpt_batch_finish(&b, err);
    ckpt_batch_release(&b);
    return result;
}

TEST(source_file, a_file_that_shrank_or_was_rewritten_is_stale)
{
    struct ckpt_err err = {0};
    struct fixture f;
    char buf[4];
    begin(&f, 1);
    tree_text(&f.t, "a", "0123456789");
    struct ckpt_source *s = source(&f, "a");
    CHECK_OK(read_checked(s, buf, &err));
    tree_truncate(&f.t, "a", 8);
    CHECK_FAILS(read_checked(s, buf, &err), CKPT_STALE, "/a'");
    tree_text(&f.t, "a", "9876543210");
    CHECK_FAILS(read_checked(s, buf, &err), CKPT_STALE, "changed since");
    evict(&f);
    CHECK_FAILS(read_checked(s, buf, &err), CKPT_STALE, "changed since");
    ckpt_source_unref(s);
    end(&f);
}

TEST(source_file, one_renamed_over_or_unlinked_serves_old_bytes_until_it_is_closed)
{
    struct ckpt_err err = {0};
    struct fixture f;
    char buf[4];
    begin(&f, 1);
    for (int how = 0; how < 2; how++) {
        tree_text(&f.t, "a", "0123456789");
        struct ckpt_source *s = source(&f, "a");
        CHECK_OK(read_checked(s, buf, &err));
        tree_text(&f.t, "new", "9876543210");
        if (how == 0)
            TREE_MUST(renameat(f.t.fd, "new", f.t.fd, "a") == 0);
        else
            tree_delete(&f.t, "a");
        CHECK_OK(read_checked(s, buf, &err));
        CHECK(memcmp(buf, "0123", 4) == 0);
        evict(&f);
        CHECK_FAILS(read_checked(s, buf, &err), CKPT_STALE, "/a'");
        ckpt_source_unref(s);
    }
    end(&f);
}

static int read_by(struct ckpt_source *s, struct iovec *iov, int n, uint64_t off,
                   const struct ckpt_route *route, struct ckpt_err *err)
{
    const struct ckpt_source_way way = {CKPT_READ_AHEAD, route};
    const struct ckpt_source_run run = {off, iov, n};

    return ckpt_source_read(s, &way, &run, 1, err);
}

/* Where the file system has no O_DIRECT, these are ordinary reads. */
TEST(source_file, reads_past_the_page_cache_give_the_same_bytes)
{
    enum { LEN = (5 << 20) + 123 };
    static const struct {
        uint64_t off, len;
    } range[] = {{0, LEN},           {1, LEN - 1},           {4095, 300000}, {4096, 1 << 20},
                 {12345, 3 << 20},   {LEN - 262144, 262144}, {LEN - 5, 5},   {8191, (1 << 20) + 2},
                 {1 << 20, 4 << 20}, {777, 262143}};
    static const enum ckpt_direct which[] = {CKPT_DIRECT_NONE, CKPT_DIRECT_COLD, CKPT_DIRECT_ALL};
    struct ckpt_bounce bounce[2];
    struct ckpt_err err = {0};
    struct fixture f;
    unsigned char *want = malloc(LEN), *got = malloc(LEN);

    CHECK(want && got);
    CHECK_OK(ckpt_bounce_init(&bounce[0], CKPT_BOUNCE_ALIGN, &err));
    CHECK_OK(ckpt_bounce_init(&bounce[1], (1 << 20) + 5, &err));
    begin(&f, 8);
    for (size_t i = 0; i < LEN; i++)
        want[i] = (unsigned char)(i * 2654435761u >> 13);
    tree_put(&f.t, "big", want, LEN);
    struct ckpt_source *s = source(&f, "big");
    for (size_t k = 0; k < 3 * (sizeof range / sizeof *range); k++) {
        const uint64_t off = range[k / 3].off, len = range[k / 3].len;
        struct iovec iov[3] = {
            {got, (size_t)len / 3}, {got + len / 3, 1}, {got + len / 3 + 1, len - len / 3 - 1}};
        const struct ckpt_route route = {which[k % 3], k < 3 ? NULL : &bounce[k % 2]};
        memset(got, 0, LEN);
        CHECK_OK(read_by(s, iov, 3, off, &route, &err));
        CHECK(memcmp(got, want + off, len) == 0);
    }
    const struct ckpt_route all = {CKPT_DIRECT_ALL, &bounce[1]};
    struct iovec beyond = {got, 1 << 20};
    CHECK_FAILS(read_by(s, &beyond, 1, LEN - 1000, &all, &err), CKPT_FORMAT, "needs bytes");
    tree_truncate(&f.t, "big", LEN / 2);
    beyond = (struct iovec){got, 1 << 20};
    CHECK_FAILS(read_by(s, &beyond, 1, LEN - (1 << 20), &all, &err), CKPT_STALE, "ends at byte");
    ckpt_source_unref(s);
    ckpt_bounce_release(&bounce[0]);
    ckpt_bounce_release(&bounce[1]);
    free(want);
    free(got);
    end(&f);
}

/* Is there nothing but zeros in it? */
static bool untouched(const struct ckpt_bounce *b)
{
    bool zero = true;

    for (size_t i = 0; i < b->len; i++)
        zero &= b->buf[i] == 0;
    return zero;
}

TEST(direct, memory_that_lies_as_the_file_is_filled_without_the_bounce_buffer)
{
    enum { LEN = 3 << 20, PAGE = 4096 };
    struct ckpt_err err = {0};
    struct ckpt_bounce bounce;
    struct fixture f;
    void *mem = NULL;
    unsigned char *want = malloc(LEN);

    CHECK(want && posix_memalign(&mem, PAGE, LEN) == 0);
    CHECK_OK(ckpt_bounce_init(&bounce, 1 << 20, &err));
    begin(&f, 8);
    for (size_t i = 0; i < LEN; i++)
        want[i] = (unsigned char)(i * 2654435761u >> 13 | 1);
    tree_put(&f.t, "big", want, LEN);
    const int fd = openat(f.t.fd, "big", O_RDONLY | O_CLOEXEC);
    const uint32_t align = fd < 0 ? 0 : ckpt_direct_begin(fd);
    /* whole blocks; an edge on each side; the same in two; not aligned */
    for (size_t i = 0; i < 4 && align && align <= PAGE; i++) {
        const uint64_t off = i == 0 ? PAGE : 777, len = i == 0 ? 2 << 20 : (2 << 20) + 5;
        unsigned char *to = (unsigned char *)mem + (i == 3 ? 778 : off % PAGE);
        const struct iovec iov[2] = {{to, 1000000}, {to + 1000000, len - 1000000}};
        const struct iovec one = {to, len};
        memset(mem, 0, LEN);
        memset(bounce.buf, 0, bounce.len);
        if (!ckpt_direct_read(fd, align, i == 2 ? iov : &one, i == 2 ? 2 : 1, off, &bounce))
            break; /* a file system without O_DIRECT */
        CHECK(memcmp(to, want + off, len) == 0);
        CHECK(to[len] == 0 && (to == mem || to[-1] == 0));
        CHECK(untouched(&bounce) == (i == 0));
        memset(bounce.buf, 0, 2 * PAGE); /* of an edge */
        CHECK(untouched(&bounce) == (i < 3));
    }
    (void)close(fd);
    ckpt_bounce_release(&bounce);
    free(want);
    free(mem);
    end(&f);
}

TEST(batch, neighbours_are_one_read)
{
    struct ckpt_err err = {0};
    struct ckpt_source *s;
    struct ckpt_batch b;
    char out[12] = {0};
    CHECK_OK(ckpt_source_mem_new("m", "abcdefghijkl", 12, &s, &err));
    ckpt_batch_init(&b, CKPT_READ_AHEAD);
    CHECK_OK(ckpt_batch_add(&b, s, out, 3, 0, &err));
    CHECK_OK(ckpt_batch_add(&b, s, out + 3, 3, 3, &err));
    CHECK_OK(ckpt_batch_add(&b, s, out + 9, 3, 6, &err));
    CHECK_OK(ckpt_batch_add(&b, s, out + 6, 3, 0, &err));
    CHECK_OK(ckpt_batch_finish(&b, &err));
    CHECK(memcmp(out, "abcdefabcghi", 12) == 0);
    CHECK(b.nread == 2 && b.nbyte == 12);
    ckpt_batch_release(&b);
    ckpt_source_unref(s);
}

TEST(window, it_ends_where_it_was_said_to)
{
    struct ckpt_err err = {0};
    struct ckpt_source *s, *w;
    char buf[8];
    CHECK_OK(ckpt_source_mem_new("m", "abcdefgh", 8, &s, &err));
    CHECK_OK(ckpt_source_window_new(s, 2, 4, &w, &err));
    CHECK_OK(ckpt_source_pread(w, buf, 4, 0, &err));
    CHECK(memcmp(buf, "cdef", 4) == 0);
    CHECK_FAILS(ckpt_source_pread(w, buf, 4, 1, &err), CKPT_FORMAT, "'m'");
    CHECK_FAILS(ckpt_source_pread(w, buf, 1, UINT64_MAX, &err), CKPT_FORMAT, "'m'");
    ckpt_source_unref(w);
    CHECK_FAILS(ckpt_source_window_new(s, 5, 4, &w, &err), CKPT_FORMAT, "do not fit");
    CHECK_FAILS(ckpt_source_window_new(s, UINT64_MAX, 2, &w, &err), CKPT_FORMAT, "do not fit");
    ckpt_source_unref(s);
}

/* A source in memory is read in one way; more runs than a window hands on at once. */
TEST(window, runs_anywhere_in_a_source_of_one_way_arrive)
{
    enum { RUNS = 200 };
    const struct ckpt_source_way ahead = {CKPT_READ_AHEAD, NULL}, cached = {CKPT_READ_CACHED, NULL};
    struct ckpt_source_run run[RUNS + 1];
    struct iovec iov[RUNS + 1];
    struct ckpt_err err = {0};
    struct ckpt_source *s, *w;
    char data[RUNS + 1], got[RUNS + 1];

    for (int i = 0; i <= RUNS; i++) {
        data[i] = (char)i;
        iov[i] = (struct iovec){got + i, 1};
        run[i] = (struct ckpt_source_run){(uint64_t)(RUNS - 1 - i), &iov[i], 1};
    }
    CHECK_OK(ckpt_source_mem_new("m", data, sizeof data, &s, &err));
    CHECK_OK(ckpt_source_window_new(s, 1, RUNS, &w, &err));
    CHECK_EQ(ckpt_source_read(w, &ahead, run, RUNS, &err), 0);
    for (int i = 0; i < RUNS; i++)
        CHECK_EQ(got[i], data[RUNS - i]);
    CHECK_EQ(ckpt_source_read(w, &cached, run, RUNS, &err), 1);
    CHECK(ckpt_source_prefetch(w, 0, RUNS) && ckpt_source_prefetch(w, RUNS, UINT64_MAX));
    run[RUNS].off = RUNS;
    CHECK_FAILS(ckpt_source_read(w, &ahead, run, RUNS + 1, &err), CKPT_FORMAT, "needs bytes");
    ckpt_source_unref(w);
    ckpt_source_unref(s);
}

TEST(cursor, it_is_sticky)
{
    struct ckpt_err err = {0};
    struct ckpt_cursor c;
    ckpt_cursor_init(&c, "\x01\x02\x03", 3, 100, "f");
    CHECK_EQ(ckpt_cursor_le16(&c), 0x201);
    CHECK_EQ(ckpt_cursor_le32(&c), 0);
    CHECK(c.failed && ckpt_cursor_u8(&c) == 0 && ckpt_cursor_left(&c) == 0);
    CHECK_FAILS(ckpt_cursor_report(&c, &err), CKPT_FORMAT, "'f' ends at byte 103");
}

TESTS(T(dir, names_that_are_no_names_below_are_refused),
      T(dir, what_is_no_regular_file_is_refused_without_waiting),
      T(dir, links_lead_anywhere_below_and_nowhere_else),
      T(dir, a_hub_snapshot_reaches_the_blobs_of_its_model),
      T(fdpool, no_more_files_are_open_than_the_budget),
      T(source_file, a_file_that_shrank_or_was_rewritten_is_stale),
      T(source_file, one_renamed_over_or_unlinked_serves_old_bytes_until_it_is_closed),
      T(source_file, reads_past_the_page_cache_give_the_same_bytes),
      T(direct, memory_that_lies_as_the_file_is_filled_without_the_bounce_buffer),
      T(batch, neighbours_are_one_read), T(window, it_ends_where_it_was_said_to),
      T(window, runs_anywhere_in_a_source_of_one_way_arrive), T(cursor, it_is_sticky))
