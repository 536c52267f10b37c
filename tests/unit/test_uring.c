/* SPDX-License-Identifier: Apache-2.0 */
/* Rings: whatever is asked for arrives, and what goes wrong is told where it went wrong. */
#include "io/uring.h"

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/time.h>

#include "io/batch.h"
#include "io/iov.h"
#include "random.h"
#include "test.h"
#include "tree.h"

enum { LEN = (5 << 20) + 123, READS = 300, IOV = 5 };

struct fixture {
    struct tree t;
    unsigned char *data; /* of the file "big" */
    int fd, direct;
    uint32_t align; /* of direct; 0: it can't be had */
    struct ckpt_bounce bounce;
};

static void begin(struct fixture *f, size_t bounce)
{
    struct ckpt_err err = {0};

    tree_open(&f->t);
    TREE_MUST(f->data = malloc(LEN));
    for (size_t i = 0; i < LEN; i++)
        f->data[i] = tree_byte(i);
    tree_put(&f->t, "big", f->data, LEN);
    f->fd = openat(f->t.fd, "big", O_RDONLY | O_CLOEXEC);
    f->direct = openat(f->t.fd, "big", O_RDONLY | O_CLOEXEC);
    TREE_MUST(f->fd >= 0 && f->direct >= 0);
    f->align = ckpt_direct_begin(f->direct);
    if (ckpt_bounce_init(&f->bounce, bounce, true, &err) < 0)
        fail_msg("%s", err.text);
}

static void end(struct fixture *f)
{
    ckpt_bounce_release(&f->bounce);
    (void)close(f->fd);
    (void)close(f->direct);
    free(f->data);
    tree_close(&f->t);
}

/* ---- reads ---- */

struct wanted {
    struct ckpt_uring_read read;
    unsigned char *mem; /* len bytes, one behind the other */
    struct iovec iov[IOV];
    int done;
};

static int note(struct ckpt_uring_read *r, struct ckpt_err *err)
{
    struct wanted *w = (struct wanted *)r;

    w->done++;
    if (r->error || r->ended)
        return ckpt_fail(err, CKPT_IO, "%s at %llu", r->ended ? "end" : strerror(r->error),
                         (unsigned long long)r->at);
    return 0;
}

static void want(struct wanted *w, int fd, uint32_t align, uint64_t off, uint64_t len)
{
    memset(w, 0, sizeof *w);
    w->read = (struct ckpt_uring_read){
        .fd = fd, .align = align, .off = off, .len = len, .iov = w->iov, .done = note};
    TREE_MUST(w->mem = malloc(len));
    memset(w->mem, 0, len);
    for (int i = 0; i < IOV; i++) {
        const uint64_t lo = len * i / IOV, hi = len * (i + 1) / IOV;
        w->iov[i] = (struct iovec){w->mem + lo, hi - lo};
    }
}

static bool is_there(const struct fixture *f, const struct wanted *w)
{
    return w->done == 1 && memcmp(w->mem, f->data + w->read.off, w->read.len) == 0;
}

TEST(uring, many_more_reads_than_entries_arrive_whole_at_any_offset)
{
    static const size_t bounce[] = {CKPT_BOUNCE_ALIGN, 3 * CKPT_BOUNCE_ALIGN, 4 << 20};
    struct wanted *w = calloc(READS, sizeof *w);
    struct ckpt_err err = {0};
    uint64_t rng = 7;

    for (size_t k = 0; k < 3; k++) {
        struct fixture f;
        begin(&f, bounce[k]);
        for (int i = 0; i < READS; i++) {
            const uint64_t off = random_range(&rng, 0, LEN - 1);
            const uint64_t most = i % 50 ? 40000 : LEN;
            const uint64_t len = 1 + random_range(&rng, 0, ckpt_min_u64(most, LEN - off));
            const bool direct = f.align && i % 2;
            want(&w[i], direct ? f.direct : f.fd, direct ? f.align : 1, off, len);
            ckpt_uring_add(f.bounce.ring, &w[i].read);
        }
        CHECK_OK(ckpt_uring_wait(f.bounce.ring, &err));
        for (int i = 0; i < READS; i++) {
            CHECK(is_there(&f, &w[i]));
            free(w[i].mem);
        }
        CHECK_OK(ckpt_uring_wait(f.bounce.ring, &err)); /* nothing */
        end(&f);
    }
    free(w);
}

TEST(uring, the_end_of_a_file_is_told_where_it_is)
{
    struct ckpt_err err = {0};
    struct fixture f;
    struct wanted w;
    char text[32];

    begin(&f, 4 << 20);
    (void)snprintf(text, sizeof text, "end at %d", LEN);
    for (int direct = 0; direct < (f.align ? 2 : 1); direct++) {
        want(&w, direct ? f.direct : f.fd, direct ? f.align : 1, LEN - 700001, 800000);
        ckpt_uring_add(f.bounce.ring, &w.read);
        CHECK_FAILS(ckpt_uring_wait(f.bounce.ring, &err), CKPT_IO, text);
        CHECK_EQ(w.done, 1);
        free(w.mem);
        memset(&err, 0, sizeof err);
        CHECK_OK(ckpt_uring_wait(f.bounce.ring, &err)); /* it is told once */
    }
    end(&f);
}

TEST(uring, a_read_that_fails_leaves_the_others_alone)
{
    struct wanted *w = calloc(READS, sizeof *w);
    struct ckpt_err err = {0};
    struct fixture f;

    begin(&f, 8 * CKPT_BOUNCE_ALIGN);
    int shut = openat(f.t.fd, "big", O_WRONLY | O_CLOEXEC);
    for (int i = 0; i < READS; i++) {
        want(&w[i], i == READS / 2 ? shut : f.fd, 1, (uint64_t)i * 1001, 150000);
        ckpt_uring_add(f.bounce.ring, &w[i].read);
    }
    char text[64];
    (void)snprintf(text, sizeof text, "%s at %d", strerror(EBADF), READS / 2 * 1001);
    CHECK_FAILS(ckpt_uring_wait(f.bounce.ring, &err), CKPT_IO, text);
    for (int i = 0; i < READS; i++) {
        CHECK(i == READS / 2 ? w[i].done == 1 : is_there(&f, &w[i]));
        free(w[i].mem);
    }
    (void)close(shut);
    free(w);
    end(&f);
}

/* ---- a kernel that begins nothing ---- */

#ifdef CKPT_LIBURING

#include <liburing.h>

static unsigned refuse; /* every so many calls; 1: all of them */

int __real_io_uring_submit_and_wait(struct io_uring *ring, unsigned n);
int __wrap_io_uring_submit_and_wait(struct io_uring *ring, unsigned n);

int __wrap_io_uring_submit_and_wait(struct io_uring *ring, unsigned n)
{
    static unsigned calls;

    return refuse && ++calls % refuse == 0 ? -ENOMEM : __real_io_uring_submit_and_wait(ring, n);
}

TEST(uring, a_kernel_that_refuses_for_a_moment_is_asked_again)
{
    struct wanted *w = calloc(READS, sizeof *w);
    struct ckpt_err err = {0};
    struct fixture f;

    begin(&f, 8 * CKPT_BOUNCE_ALIGN);
    refuse = 3;
    for (int i = 0; i < READS; i++) {
        want(&w[i], f.fd, 1, (uint64_t)i * 1001, 15000);
        ckpt_uring_add(f.bounce.ring, &w[i].read);
    }
    CHECK_OK(ckpt_uring_wait(f.bounce.ring, &err));
    refuse = 0;
    for (int i = 0; i < READS; i++) {
        CHECK(is_there(&f, &w[i]));
        free(w[i].mem);
    }
    free(w);
    end(&f);
}

TEST(uring, a_kernel_that_refuses_for_good_is_an_error_of_each_read)
{
    struct ckpt_err err = {0};
    struct wanted w[3];
    struct fixture f;

    begin(&f, 2 * CKPT_BOUNCE_ALIGN);
    refuse = 1;
    for (int i = 0; i < 3; i++) {
        want(&w[i], f.fd, 1, 77, 1000000);
        ckpt_uring_add(f.bounce.ring, &w[i].read);
    }
    CHECK_FAILS(ckpt_uring_wait(f.bounce.ring, &err), CKPT_IO, "Cannot allocate memory at 77");
    refuse = 0;
    for (int i = 0; i < 3; i++) {
        CHECK(w[i].done == 1 && w[i].read.error == ENOMEM && w[i].read.at == 77);
        free(w[i].mem);
    }
    end(&f);
}

#define REFUSALS                                                                                   \
    T(uring, a_kernel_that_refuses_for_a_moment_is_asked_again),                                   \
        T(uring, a_kernel_that_refuses_for_good_is_an_error_of_each_read),

#else
#define REFUSALS
#endif

/* ---- short reads, and signals ---- */

static void nothing(int number) { (void)number; }

static void *write_slowly(void *arg)
{
    const struct fixture *f = arg;

    for (size_t off = 0; off < 100000;) {
        const size_t n = off % 7 ? 3000 : 100;
        const ssize_t put = write(f->direct, f->data + off, ckpt_min_u64(n, 100000 - off));
        TREE_MUST(put > 0);
        off += (size_t)put;
        (void)usleep(200);
    }
    return NULL;
}

TEST(uring, short_reads_and_interrupted_waits_are_continued)
{
    struct ckpt_err err = {0};
    struct fixture f;
    struct wanted w;
    pthread_t writer;
    int fd[2];

    const struct sigaction action = {.sa_handler = nothing}, ignored = {.sa_handler = SIG_IGN};
    const struct itimerval soon = {{0, 1000}, {0, 1000}}, never = {{0, 0}, {0, 0}};

    begin(&f, 4 << 20);
    TREE_MUST(sigaction(SIGALRM, &action, NULL) == 0);
    TREE_MUST(pipe(fd) == 0);
    (void)close(f.direct);
    f.direct = fd[1];
    TREE_MUST(pthread_create(&writer, NULL, write_slowly, &f) == 0);
    want(&w, fd[0], 1, 0, 100000);
    TREE_MUST(setitimer(ITIMER_REAL, &soon, NULL) == 0);
    ckpt_uring_add(f.bounce.ring, &w.read);
    CHECK_OK(ckpt_uring_wait(f.bounce.ring, &err));
    TREE_MUST(setitimer(ITIMER_REAL, &never, NULL) == 0);
    TREE_MUST(sigaction(SIGALRM, &ignored, NULL) == 0);
    CHECK(is_there(&f, &w));
    (void)pthread_join(writer, NULL);
    free(w.mem);
    (void)close(fd[0]);
    end(&f);
}

/* ---- sources and batches ---- */

static struct ckpt_source *source(struct fixture *f)
{
    struct ckpt_err err = {0};
    struct ckpt_fdpool *pool;
    struct ckpt_source *s;
    struct ckpt_dir *dir;

    TREE_MUST(ckpt_dir_open(f->t.path, CKPT_LINKS_BENEATH, &dir, &err) == 0);
    TREE_MUST(ckpt_fdpool_new(4, &pool, &err) == 0);
    TREE_MUST(ckpt_source_file_new(dir, "big", pool, &s, &err) == 0);
    ckpt_fdpool_unref(pool);
    ckpt_dir_unref(dir);
    return s;
}

TEST(uring, errors_are_those_of_system_calls)
{
    static const enum ckpt_direct which[] = {CKPT_DIRECT_NONE, CKPT_DIRECT_ALL};
    struct ckpt_err err = {0}, plain = {0};
    unsigned char *buf = malloc(LEN);
    struct fixture f;

    begin(&f, 4 << 20);
    struct ckpt_source *s = source(&f);
    tree_truncate(&f.t, "big", LEN / 2 + 5);
    CHECK_EQ(ckpt_source_pread(s, buf, LEN - 1000, 1000, &plain), -1);
    for (int i = 0; i < 2; i++) {
        const struct ckpt_route route = {which[i], &f.bounce};
        struct iovec iov = {buf, LEN - 1000};
        CHECK_OK(ckpt_source_preadv_by(s, &iov, 1, 1000, &route, &err));
        CHECK_FAILS(ckpt_uring_wait(f.bounce.ring, &err), CKPT_STALE, plain.text);
    }
    ckpt_source_unref(s);
    free(buf);
    end(&f);
}

TEST(uring, a_batch_reads_all_its_ranges_at_once)
{
    struct ckpt_err err = {0};
    struct ckpt_batch b;
    struct fixture f;
    unsigned char *buf = malloc(LEN);

    begin(&f, 4 << 20);
    struct ckpt_source *s = source(&f);
    ckpt_batch_init(&b);
    b.route.bounce = &f.bounce;
    for (uint64_t i = 0; i < 100; i++)
        CHECK_OK(ckpt_batch_add(&b, s, buf + i * 1000, 1000, i * 50001, &err));
    CHECK_OK(ckpt_batch_finish(&b, &err));
    for (uint64_t i = 0; i < 100; i++)
        CHECK(memcmp(buf + i * 1000, f.data + i * 50001, 1000) == 0);
    CHECK(b.nread == 100 && b.nbyte == 100000);
    ckpt_batch_release(&b);
    ckpt_source_unref(s);
    free(buf);
    end(&f);
}

TEST(uring, what_is_given_up_writes_nowhere_afterwards)
{
    struct ckpt_err err = {0};
    struct ckpt_batch b;
    struct fixture f;

    begin(&f, 4 << 20);
    struct ckpt_source *s = source(&f);
    for (int i = 0; i < 50; i++) {
        unsigned char *buf = malloc(LEN);
        ckpt_batch_init(&b);
        b.route = (struct ckpt_route){CKPT_DIRECT_ALL, &f.bounce};
        CHECK_OK(ckpt_batch_add(&b, s, buf, 3 << 20, 5, &err));
        CHECK_OK(ckpt_batch_add(&b, s, buf + (3 << 20), 1000, 5, &err)); /* the first begins */
        ckpt_batch_release(&b);
        free(buf);
    }
    ckpt_source_unref(s);
    end(&f);
}

/* A build without liburing lacks something; a kernel that refuses is as it is. */
static int without_rings(void)
{
    struct ckpt_err err = {0};

    if (ckpt_uring_probe(&err) == 0)
        return -1;
    (void)printf("%s\n", err.text);
    return strstr(err.text, "this build") ? 77 : 0;
}

TESTS_UNLESS(without_rings(),
             REFUSALS T(uring, many_more_reads_than_entries_arrive_whole_at_any_offset),
             T(uring, the_end_of_a_file_is_told_where_it_is),
             T(uring, a_read_that_fails_leaves_the_others_alone),
             T(uring, short_reads_and_interrupted_waits_are_continued),
             T(uring, errors_are_those_of_system_calls),
             T(uring, a_batch_reads_all_its_ranges_at_once),
             T(uring, what_is_given_up_writes_nowhere_afterwards))
