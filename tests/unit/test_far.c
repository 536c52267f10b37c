/* SPDX-License-Identifier: Apache-2.0 */
/* Files that are read as those of storage at a distance, and folders that are listed once. */
#include "test.h"

#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/mem.h"
#include "base/par.h"
#include "io/far/calls.h"
#include "io/far/dir_listed.h"
#include "io/source.h"
#include "random.h"
#include "tree.h"

enum { SIZE = 21 * 1024 * 1024 + 4321, READS = 400, THREADS = 8 };

struct fixture {
    struct tree t;
    struct ckpt_dir *dir;
    struct ckpt_fdpool *pool;
    struct ckpt_source *s;
    unsigned char *data;
};

static void write_file(struct fixture *f, uint64_t seed)
{
    for (size_t i = 0; i < SIZE; i++)
        f->data[i] = (unsigned char)(i % 8 ? f->data[i - 1] * 5U + 1 : random_next(&seed));
    tree_put(&f->t, "file", f->data, SIZE);

    /* out of the page cache, so that O_DIRECT is used where the filesystem has it */
    char path[5000];
    (void)snprintf(path, sizeof path, "%s/file", f->t.path);
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    TREE_MUST(fd >= 0 && fsync(fd) == 0 && posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED) == 0);
    (void)close(fd);
}

static void begin(struct fixture *f, enum ckpt_far_rule rule)
{
    struct ckpt_err err = {0};

    tree_open(&f->t);
    TREE_MUST((f->data = malloc(SIZE)));
    write_file(f, 1);
    TREE_MUST(ckpt_dir_open(f->t.path, CKPT_LINKS_BENEATH, &f->dir, &err) == 0);
    ckpt_dir_set_far(f->dir, &(struct ckpt_far_options){.rule = rule});
    TREE_MUST(ckpt_fdpool_new(4, &f->pool, &err) == 0);
    TREE_MUST(ckpt_source_file_new(f->dir, "file", f->pool, &f->s, &err) == 0);
}

static void end(struct fixture *f)
{
    ckpt_source_unref(f->s);
    ckpt_fdpool_unref(f->pool);
    ckpt_dir_unref(f->dir);
    tree_close(&f->t);
    free(f->data);
}

/* One read anywhere, of any size, in any way; they are told apart by i. */
static int read_somewhere(void *ctx, size_t i, struct ckpt_err *err)
{
    static const size_t most[] = {100, 4096, 200 * 1024, 3 << 20, 9 << 20};
    const struct fixture *f = ctx;
    uint64_t seed = i * 2654435761 + 1;
    const uint64_t off = random_range(&seed, 0, SIZE - 1);
    size_t len = (size_t)random_range(&seed, 1, most[i % 5]);

    len = len > SIZE - off ? (size_t)(SIZE - off) : len;
    unsigned char *buf = malloc(len);
    const struct ckpt_source_way way = {i % 3 == 0   ? CKPT_READ_EXACT
                                        : i % 3 == 1 ? CKPT_READ_AHEAD
                                                     : CKPT_READ_CACHED,
                                        NULL};
    struct iovec iov[2] = {{buf, len / 3}, {buf + len / 3, len - len / 3}};
    const struct ckpt_source_run run = {off, iov, 2};
    if (i % 7 == 0)
        (void)ckpt_source_prefetch(f->s, random_range(&seed, 0, SIZE), 6 << 20);
    int rc = ckpt_source_read(f->s, &way, &run, 1, err);
    if (rc == 0 && memcmp(buf, f->data + off, len) != 0)
        rc = ckpt_fail(err, CKPT_IO, "read %zu: %zu bytes at %llu differ", i, len,
                       (unsigned long long)off);
    free(buf);
    return rc < 0 ? -1 : 0;
}

TEST(far, all_reads_by_many_threads_give_the_bytes_of_the_file)
{
    struct ckpt_err err = {0};
    struct fixture f;

    begin(&f, CKPT_FAR_ALWAYS);
    CHECK(ckpt_source_is_far(f.s));
    CHECK_OK(ckpt_parallel(READS, THREADS, read_somewhere, &f, &err));
    CHECK_OK(ckpt_source_check(f.s, &err));
    end(&f);
}

/* What is fetched ahead is there without waiting, once it has come. */
TEST(far, what_is_fetched_ahead_is_read_without_waiting)
{
    static unsigned char buf[5 << 20];
    const struct ckpt_source_way cached = {CKPT_READ_CACHED, NULL};
    struct iovec iov = {buf, sizeof buf};
    struct ckpt_source_run run = {12345, &iov, 1};
    struct ckpt_err err = {0};
    struct fixture f;

    begin(&f, CKPT_FAR_ALWAYS);
    CHECK(ckpt_source_prefetch(f.s, 12345, sizeof buf));
    for (int i = 0; i < 2000; i++) {
        iov = (struct iovec){buf, sizeof buf};
        if (ckpt_source_read(f.s, &cached, &run, 1, &err) == 0)
            break;
        (void)usleep(5000);
    }
    CHECK_EQ(memcmp(buf, f.data + 12345, sizeof buf), 0);
    end(&f);
}

/* A child has none of its parent's threads, nor of what they were fetching. */
TEST(far, a_child_reads_what_its_parent_was_fetching)
{
    struct ckpt_err err = {0};
    struct fixture f;
    int status;

    begin(&f, CKPT_FAR_ALWAYS);
    CHECK(ckpt_source_prefetch(f.s, 0, SIZE));
    const pid_t child = fork();
    if (child == 0) {
        int rc = 0;
        for (size_t i = 0; i < 10 && rc == 0; i++)
            rc = read_somewhere(&f, 3 * i, &err);
        _exit(rc == 0 ? 0 : 1);
    }
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK_OK(read_somewhere(&f, 3, &err));
    end(&f);
}

/* Bytes that are held belong to the file as it was opened. */
TEST(far, a_file_that_was_rewritten_is_stale_and_the_new_one_has_its_own_bytes)
{
    struct ckpt_err err = {0};
    struct ckpt_source *now;
    struct fixture f;

    begin(&f, CKPT_FAR_ALWAYS);
    CHECK_OK(ckpt_parallel(20, THREADS, read_somewhere, &f, &err));
    (void)usleep(20 * 1000); /* another time of change */
    write_file(&f, 2);
    CHECK_FAILS(ckpt_source_check(f.s, &err), CKPT_STALE, "file' changed");
    CHECK_OK(ckpt_source_file_new(f.dir, "file", f.pool, &now, &err));
    ckpt_source_unref(f.s);
    f.s = now;
    CHECK_OK(ckpt_parallel(READS / 4, THREADS, read_somewhere, &f, &err));
    CHECK_OK(ckpt_source_check(f.s, &err));
    end(&f);
}

TEST(far, a_file_that_shrank_names_itself)
{
    static unsigned char buf[1 << 20];
    struct ckpt_err err = {0};
    struct fixture f;
    char path[5000];

    begin(&f, CKPT_FAR_ALWAYS);
    (void)snprintf(path, sizeof path, "%s/file", f.t.path);
    assert_int_equal(truncate(path, SIZE / 2), 0);
    CHECK_FAILS(ckpt_source_pread(f.s, buf, sizeof buf, SIZE - sizeof buf, &err), CKPT_STALE,
                "file' ends at byte");
    end(&f);
}

/* The last part is no whole number of blocks; a source may end before its file does, as in an
 * archive. */
TEST(far, the_last_part_is_read_whole)
{
    struct ckpt_err err = {0};
    struct fixture f;

    begin(&f, CKPT_FAR_ALWAYS);
    const size_t len = SIZE % (4 << 20);
    unsigned char *buf = malloc(len);
    assert_non_null(buf);
    for (int i = 0; i < 3; i++) {
        CHECK_OK(ckpt_source_pread(f.s, buf, len, SIZE - len, &err));
        CHECK_EQ(memcmp(buf, f.data + SIZE - len, len), 0);
    }
    free(buf);
    end(&f);
}

TEST(far, local_files_are_near_unless_the_rule_says_otherwise)
{
    struct fixture f;

    begin(&f, CKPT_FAR_AUTO);
    CHECK(!ckpt_source_is_far(f.s) && !ckpt_dir_is_far(f.dir));
    ckpt_dir_set_far(f.dir, &(struct ckpt_far_options){.rule = CKPT_FAR_ALWAYS});
    CHECK(ckpt_source_is_far(f.s) && ckpt_dir_is_far(f.dir));
    ckpt_dir_set_far(f.dir, &(struct ckpt_far_options){.rule = CKPT_FAR_NEVER});
    CHECK(!ckpt_source_is_far(f.s) && !ckpt_dir_is_far(f.dir));
    end(&f);
}

/* ---- folders ---- */

static int count(void *ctx, const struct ckpt_entry *e, struct ckpt_err *err)
{
    (void)e, (void)err;
    ++*(int *)ctx;
    return 0;
}

static int nlisted(const struct ckpt_dir *dir, const char *below)
{
    ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *d = NULL;
    struct ckpt_err err = {0};
    int n = 0;

    if (ckpt_dir_open_below((struct ckpt_dir *)dir, below, &d, &err) < 0 ||
        ckpt_dir_list(d, count, &n, &err) < 0)
        return -1;
    return n;
}

TEST(listed, what_appears_is_there_after_a_refresh)
{
    struct ckpt_err err = {0};
    struct ckpt_dir *dir;
    struct tree t;

    tree_open(&t);
    tree_text(&t, "a/b/one", "x");
    tree_link(&t, "a/b", "link");
    CHECK_OK(ckpt_dir_open(t.path, CKPT_LINKS_BENEATH, &dir, &err));
    CHECK_OK(ckpt_dir_keep_lists(dir, &err));
    CHECK(ckpt_dir_has_file(dir, "a/b/one") && ckpt_dir_has_file(dir, "link/one"));
    CHECK(!ckpt_dir_has_file(dir, "a/b/two") && !ckpt_dir_has_file(dir, "c/none"));
    CHECK(!ckpt_dir_has_file(dir, "a/b/one/none") && ckpt_dir_has_dir(dir, "."));
    CHECK_EQ(nlisted(dir, "a/b"), 1);
    tree_text(&t, "a/b/two", "x");
    tree_text(&t, "c/none", "x");
    CHECK(!ckpt_dir_has_file(dir, "a/b/two"));
    ckpt_dir_refresh(dir);
    CHECK(ckpt_dir_has_file(dir, "a/b/two") && ckpt_dir_has_file(dir, "c/none"));
    CHECK_EQ(nlisted(dir, "a/b"), 2);
    CHECK_OK(ckpt_dir_trouble(dir, &err));
    ckpt_dir_unref(dir);
    tree_close(&t);
}

/* Once so many folders were asked for that all are listed at once, all answers are the same. */
TEST(listed, many_folders_are_as_they_are)
{
    struct ckpt_err err = {0};
    struct ckpt_dir *dir;
    struct tree t;
    char path[100];

    tree_open(&t);
    for (int i = 0; i < 40; i++)
        for (int k = 0; k <= i % 3; k++) {
            (void)snprintf(path, sizeof path, "model/%d/%d/w", i, k);
            tree_text(&t, path, "x");
        }
    CHECK_OK(ckpt_dir_open(t.path, CKPT_LINKS_BENEATH, &dir, &err));
    CHECK_OK(ckpt_dir_keep_lists(dir, &err));
    for (int i = 0; i < 40; i++) {
        (void)snprintf(path, sizeof path, "model/%d", i);
        CHECK_EQ(nlisted(dir, path), i % 3 + 1);
        (void)snprintf(path, sizeof path, "model/%d/%d/w", i, i % 3);
        CHECK(ckpt_dir_has_file(dir, path));
        (void)snprintf(path, sizeof path, "model/%d/%d/w", i, i % 3 + 1);
        CHECK(!ckpt_dir_has_file(dir, path));
    }
    ckpt_dir_unref(dir);
    tree_close(&t);
}

/* ---- calls that hang ---- */

enum { SOON_MS = 400 };

/* A call that returns when it may. */
struct hung_call {
    struct ckpt_call call;
    sem_t *may_end;
    atomic_uint *freed;
};

static void hang(struct ckpt_call *c) { (void)sem_wait(((struct hung_call *)c)->may_end); }

static void count_freed(struct ckpt_call *c)
{
    atomic_fetch_add(((struct hung_call *)c)->freed, 1);
    free(c);
}

static int call(sem_t *may_end, atomic_uint *freed, struct ckpt_err *err)
{
    static const struct ckpt_call_ops ops = {.make = hang, .free = count_freed};
    const struct ckpt_far_options opt = {.timeout_ms = SOON_MS};
    struct hung_call *c = calloc(1, sizeof *c);

    TREE_MUST(c);
    *c = (struct hung_call){.call = {.ops = &ops}, .may_end = may_end, .freed = freed};
    const int rc = ckpt_call_make(&c->call, &opt, err);
    if (rc == 0)
        count_freed(&c->call);
    return rc;
}

TEST(calls, that_hang_are_given_up_and_keep_what_they_have)
{
    atomic_uint freed = 0;
    struct ckpt_err err;
    sem_t may_end;

    (void)sem_init(&may_end, 0, 0);
    const uint64_t begin = ckpt_now_ms();
    CHECK_FAILS(call(&may_end, &freed, &err), CKPT_TIMEOUT, "no answer for 0.4 s");
    const uint64_t first = ckpt_now_ms();
    CHECK(first - begin >= SOON_MS);
    CHECK_FAILS(call(&may_end, &freed, &err), CKPT_TIMEOUT, "no answer");
    CHECK(ckpt_now_ms() - first < SOON_MS); /* less patient, as one hangs */
    CHECK_EQ(freed, 0);

    for (int i = 0; i < 3; i++)
        (void)sem_post(&may_end);
    while (freed < 2) /* the kernel has returned: they are their threads' to free */
        (void)usleep(1000);
    CHECK_EQ(call(&may_end, &freed, NULL), 0);
    CHECK_EQ(freed, 3);
}

TEST(calls, are_slow_and_do_not_hang_while_others_are_answered)
{
    struct ckpt_storage *s = NULL;
    struct stat st;

    TREE_MUST(stat("/", &st) == 0);
    ckpt_cleanup(ckpt_closep) int fd = open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    TREE_MUST((s = ckpt_storage_of(fd, st.st_dev)));
    const uint64_t now = ckpt_now_ms();
    CHECK(ckpt_storage_hangs(s, now - 2000, 1000)); /* it has answered nothing */
    CHECK(!ckpt_storage_hangs(s, now - 500, 1000));
    ckpt_storage_heard(s, now - 2000);
    CHECK(!ckpt_storage_hangs(s, now - 2000, 1000));
    CHECK(!ckpt_storage_is_silent(s, 1000));
    ckpt_storage_heard(s, now - 900); /* made so much later, and answered */
    CHECK(ckpt_storage_hangs(s, now - 2000, 1000));
    CHECK(!ckpt_storage_hangs(s, now - 1500, 1000));
}

TESTS(T(calls, that_hang_are_given_up_and_keep_what_they_have),
      T(calls, are_slow_and_do_not_hang_while_others_are_answered),
      T(far, all_reads_by_many_threads_give_the_bytes_of_the_file),
      T(far, what_is_fetched_ahead_is_read_without_waiting),
      T(far, a_child_reads_what_its_parent_was_fetching),
      T(far, a_file_that_was_rewritten_is_stale_and_the_new_one_has_its_own_bytes),
      T(far, a_file_that_shrank_names_itself), T(far, the_last_part_is_read_whole),
      T(far, local_files_are_near_unless_the_rule_says_otherwise),
      T(listed, what_appears_is_there_after_a_refresh), T(listed, many_folders_are_as_they_are))
