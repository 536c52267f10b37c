/* SPDX-License-Identifier: Apache-2.0 */
/* Loads that run again, and loads that pause. */
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#include <ckptfs/load.h>

#include "load_team.h"
#include "test.h"
#include "tree.h"

enum { ROWS = 512, COLUMNS = 1024, LATE_MS = 50 };

/* ---- reads that wait for the test ----
 *
 * While reads are held, every read of a file waits until they are let go, and a read that must not
 * wait finds nothing in the page cache. So a load whose reads are held is never over too early. */

static pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t opened = PTHREAD_COND_INITIALIZER;
static bool held;
static atomic_int waiting; /* reads that wait */

ssize_t __real_pread64(int fd, void *buf, size_t n, off_t off);
ssize_t __real_preadv64(int fd, const struct iovec *iov, int n, off_t off);
ssize_t __real_preadv64v2(int fd, const struct iovec *iov, int n, off_t off, int flags);
ssize_t __wrap_pread64(int fd, void *buf, size_t n, off_t off);
ssize_t __wrap_preadv64(int fd, const struct iovec *iov, int n, off_t off);
ssize_t __wrap_preadv64v2(int fd, const struct iovec *iov, int n, off_t off, int flags);

static void hold_reads(bool hold)
{
    (void)pthread_mutex_lock(&gate);
    held = hold;
    (void)pthread_cond_broadcast(&opened);
    (void)pthread_mutex_unlock(&gate);
}

static void *release_late(void *unused)
{
    (void)usleep(LATE_MS * 1000);
    hold_reads(false);
    return unused;
}

static void release_reads_later(void)
{
    pthread_t thread;

    assert_int_equal(pthread_create(&thread, NULL, release_late, NULL), 0);
    (void)pthread_detach(thread);
}

static void await_held_read(void)
{
    while (atomic_load(&waiting) == 0)
        (void)usleep(100);
}

static void wait_at_gate(void)
{
    atomic_fetch_add(&waiting, 1);
    (void)pthread_mutex_lock(&gate);
    while (held)
        (void)pthread_cond_wait(&opened, &gate);
    (void)pthread_mutex_unlock(&gate);
    atomic_fetch_sub(&waiting, 1);
}

ssize_t __wrap_pread64(int fd, void *buf, size_t n, off_t off)
{
    wait_at_gate();
    return __real_pread64(fd, buf, n, off);
}

ssize_t __wrap_preadv64(int fd, const struct iovec *iov, int n, off_t off)
{
    wait_at_gate();
    return __real_preadv64(fd, iov, n, off);
}

ssize_t __wrap_preadv64v2(int fd, const struct iovec *iov, int n, off_t off, int flags)
{
    (void)pthread_mutex_lock(&gate);
    const bool closed = held;
    (void)pthread_mutex_unlock(&gate);
    if (!closed)
        return __real_preadv64v2(fd, iov, n, off, flags);
    errno = EAGAIN;
    return -1;
}

/* ---- checkpoints ---- */

/* A model of three tensors, whose bytes begin with `first`. */
static struct ckpt_view *save(const struct tree *t, const char *name, unsigned first,
                              const char *dtype, unsigned rows)
{
    const size_t size = strcmp(dtype, "F16") == 0 ? 2 : 1;
    const size_t big = size * rows * COLUMNS, ndata = 2 * big + COLUMNS;
    unsigned char *data = malloc(ndata);
    char header[512], path[8192];
    struct ckpt_run *run;
    struct ckpt_view *view;
    struct ckpt_err err = {0};
    size_t len;

    for (size_t i = 0; i < ndata; i++)
        data[i] = (unsigned char)(tree_byte(i) + first);
    (void)snprintf(header, sizeof header,
                   "{\"a\":{\"dtype\":\"%s\",\"shape\":[%u,%d],\"data_offsets\":[0,%zu]},"
                   "\"b\":{\"dtype\":\"%s\",\"shape\":[%u,%d],\"data_offsets\":[%zu,%zu]},"
                   "\"c\":{\"dtype\":\"U8\",\"shape\":[%d],\"data_offsets\":[%zu,%zu]}}",
                   dtype, rows, COLUMNS, big, dtype, rows, COLUMNS, big, 2 * big, COLUMNS, 2 * big,
                   ndata);
    unsigned char *file = tree_st_bytes(header, ndata, &len);
    memcpy(file + len - ndata, data, ndata);
    (void)snprintf(path, sizeof path, "%s/model.safetensors", name);
    tree_put(t, path, file, len);
    (void)snprintf(path, sizeof path, "%s/config.json", name);
    tree_text(t, path, "{\"model_type\": \"odd\"}");
    free(file);
    free(data);
    (void)snprintf(path, sizeof path, "%s/%s", t->path, name);
    if (ckpt_run_open(path, NULL, &run, &err) < 0 || ckpt_run_view(run, NULL, &view, &err) < 0)
        fail_msg("%s", err.text);
    ckpt_run_close(run);
    return view;
}

/* ---- again ---- */

enum { FIRST, SECOND, OTHER_SHAPE, OTHER_DTYPE, VIEWS };
static struct ckpt_view *views[VIEWS];

/* Start, wait, compare with the view that is loaded. */
static int run(struct member *m, struct loading *l, struct ckpt_view *view)
{
    struct ckpt_load_stats s = {.size = sizeof s};

    for (size_t i = 0; i < l->n; i++) {
        struct ckpt_want_info info = {.size = sizeof info};
        (void)ckpt_load_want_info(l->load, i, &info, NULL);
        memset(l->mem[i], 0xee, info.nbytes);
    }
    m->view = view;
    if (ckpt_load_start(l->load, &m->err) < 0 || ckpt_load_wait(l->load, UINT32_MAX, &m->err) < 0 ||
        check_bytes(m, l) < 0)
        return -1;
    (void)ckpt_load_stats(l->load, NULL, &s, NULL);
    return s.read_bytes >= s.unique_bytes && s.read_bytes < 2 * s.unique_bytes && s.wall_s > 0
               ? 0
               : ckpt_fail(&m->err, CKPT_CONFLICT, "the statistics are not of this run");
}

/* It is refused on all ranks with this text. */
static int refused(struct member *m, struct loading *l, struct ckpt_view *view, enum ckpt_code code,
                   const char *text)
{
    struct ckpt_err err = {0};

    if (ckpt_load_reload(l->load, view, false, &err) < 0 && err.code == code &&
        strstr(err.text, text))
        return 0;
    return ckpt_fail(&m->err, CKPT_CONFLICT, "not refused as '%s', but '%s'", text, err.text);
}

/* All ranks come here, and go on together. */
static atomic_int arrivals;

static void meet(const struct member *m)
{
    const int mine = atomic_fetch_add(&arrivals, 1), size = (int)m->size;

    while (atomic_load(&arrivals) < (mine / size + 1) * size)
        (void)usleep(100);
}

/* A planned load starts on all ranks, and none of its reads returns before they are let go. */
static int start_held(struct member *m, struct loading *l)
{
    meet(m);
    hold_reads(true);
    meet(m);
    return ckpt_load_start(l->load, &m->err);
}

/* A run that is cancelled while every rank's reads are held. They return late: the load can be
 * reloaded all the same. */
static int cancelled(struct member *m, struct loading *l)
{
    struct ckpt_err err = {0};
    int rc = ckpt_load_reload(l->load, NULL, false, &m->err);

    if (rc < 0)
        return -1;
    if ((rc = start_held(m, l)) == 0 && m->rank == 1) {
        await_held_read();
        ckpt_load_cancel(l->load);
    }
    if (rc == 0 && ckpt_load_wait(l->load, UINT32_MAX, &err) == 0)
        rc = ckpt_fail(&m->err, CKPT_CONFLICT, "the load was not cancelled");
    meet(m);
    if (m->rank == 0)
        release_reads_later();
    return rc;
}

/* The same view again, what has changed only: nothing is read, sent or written. */
static int unchanged(struct member *m, struct loading *l)
{
    struct ckpt_load_stats s = {.size = sizeof s};
    struct ckpt_dest dest = {.size = sizeof dest, .ptr = l->mem[0]};
    struct ckpt_err err = {0};
    bool touched = false;

    if (ckpt_load_reload(l->load, NULL, true, &m->err) < 0)
        return -1;
    if (ckpt_load_set_dest(l->load, 0, &dest, &err) == 0 || err.code != CKPT_USAGE)
        return ckpt_fail(&m->err, CKPT_CONFLICT, "a destination moved");
    for (size_t i = 0; i < l->n; i++) {
        struct ckpt_want_info info = {.size = sizeof info};
        (void)ckpt_load_want_info(l->load, i, &info, NULL);
        memset(l->mem[i], 0xee, info.nbytes);
    }
    if (ckpt_load_start(l->load, &m->err) < 0 || ckpt_load_wait(l->load, UINT32_MAX, &m->err) < 0)
        return -1;
    for (size_t i = 0, want; i < l->n; i++) {
        struct ckpt_want_info info = {.size = sizeof info};
        (void)ckpt_load_want_info(l->load, i, &info, NULL);
        for (uint64_t k = 0; k < info.nbytes; k++)
            touched |= l->mem[i][k] != 0xee;
        touched |= ckpt_load_next(l->load, UINT32_MAX, &want, &m->err) != 0;
    }
    (void)ckpt_load_stats(l->load, NULL, &s, NULL);
    return !touched && s.skipped_tensors == 3 && s.skipped_bytes && !s.needed_bytes &&
                   !s.unique_bytes && !s.read_bytes && !s.sent_bytes
               ? 0
               : ckpt_fail(&m->err, CKPT_CONFLICT, "what has not changed was sent again");
}

static void play_again(struct member *m)
{
    static const struct ckpt_load_options opt = {.host_bytes = 1 << 20};
    struct loading l;

    m->view = views[FIRST];
    m->rc = -1;
    if (loading_begin(m, m->step ? "fsdp=2,dp=2" : "dp=4", &opt, &l) == 0 &&
        refused(m, &l, NULL, CKPT_USAGE, "planned before") == 0 &&
        ckpt_load_plan(l.load, &m->err) == 0 && run(m, &l, views[FIRST]) == 0 &&
        ckpt_load_reload(l.load, views[SECOND], false, &m->err) == 0 &&
        run(m, &l, views[SECOND]) == 0 &&
        refused(
            m, &l, views[OTHER_SHAPE], CKPT_CONFLICT,
            "'a' is U8 [512, 1024] in the view that the load was planned for, and U8 [256, 1024] "
            "in the new view") == 0 &&
        refused(m, &l, views[OTHER_DTYPE], CKPT_CONFLICT, "and F16 [512, 1024] in the new view") ==
            0 &&
        refused(m, &l, views[m->rank == 2 ? OTHER_SHAPE : FIRST], CKPT_CONFLICT, "'a' is U8") ==
            0 &&
        refused(m, &l, views[m->rank == 2 ? SECOND : FIRST], CKPT_CONFLICT, "same step") == 0 &&
        ckpt_load_reload(l.load, NULL, false, &m->err) == 0 && run(m, &l, views[SECOND]) == 0 &&
        cancelled(m, &l) == 0 && ckpt_load_reload(l.load, views[FIRST], true, &m->err) == 0 &&
        run(m, &l, views[FIRST]) == 0 && unchanged(m, &l) == 0 &&
        ckpt_load_reload(l.load, NULL, m->rank != 2, &m->err) == 0 &&
        run(m, &l, views[FIRST]) == 0 &&
        ckpt_load_reload(l.load, views[SECOND], true, &m->err) == 0 &&
        run(m, &l, views[SECOND]) == 0)
        m->rc = 0;
    loading_end(&l);
}

static void open_views(const struct tree *t)
{
    views[FIRST] = save(t, "10", 1, "U8", ROWS);
    views[SECOND] = save(t, "20", 2, "U8", ROWS);
    views[OTHER_SHAPE] = save(t, "30", 3, "U8", ROWS / 2);
    views[OTHER_DTYPE] = save(t, "40", 4, "F16", ROWS);
}

static void close_views(void)
{
    for (int i = 0; i < VIEWS; i++)
        ckpt_view_release(views[i]);
}

TEST(load, runs_again_with_other_steps)
{
    struct tree t;
    struct member m[MOST];

    tree_open(&t);
    open_views(&t);
    for (int way = 0; way < 4; way++) {
        atomic_store(&arrivals, 0);
        team(way & 1, 4, views[FIRST], way & 2, play_again, m);
        check_good(m, 4);
        CHECK_EQ(m[0].rc, 0);
    }
    close_views();
    tree_close(&t);
}

/* A load that is freed while it reads leaves no read behind, unless the read does not return. */
TEST(load, that_is_freed_waits_for_its_reads_but_not_for_ever)
{
    const struct ckpt_load_options short_reads = {.read_timeout_ms = 10};
    struct tree t;
    struct ckpt_comm *comm;
    struct ckpt_err err = {0};

    tree_open(&t);
    open_views(&t);
    CHECK_OK(ckpt_comm_self(&comm, &err));
    struct member m = {.comm = comm, .view = views[FIRST], .size = 1};
    for (int forever = 0; forever < 2; forever++) {
        struct loading l;
        CHECK_OK(loading_begin(&m, "dp=1", forever ? &short_reads : NULL, &l));
        CHECK_OK(ckpt_load_plan(l.load, &m.err));
        hold_reads(true);
        CHECK_OK(ckpt_load_start(l.load, &m.err));
        await_held_read();
        if (!forever)
            release_reads_later();
        loading_end(&l);
        CHECK(forever ? atomic_load(&waiting) > 0 : atomic_load(&waiting) == 0);
    }
    hold_reads(false);
    while (atomic_load(&waiting))
        (void)usleep(100);
    ckpt_comm_free(comm);
    close_views();
    tree_close(&t);
}

/* Two loads of one comm: rank 1 reloads the other one. */
static void play_mixed(struct member *m)
{
    struct loading l[2];

    m->rc = -1;
    for (int i = 0; i < 2; i++)
        if (loading_begin(m, i ? "fsdp=2" : "dp=2", NULL, &l[i]) < 0 ||
            ckpt_load_plan(l[i].load, &m->err) < 0 || run(m, &l[i], m->view) < 0)
            return;
    m->rc = ckpt_load_reload(l[m->rank].load, NULL, false, &m->err);
    loading_end(&l[0]);
    loading_end(&l[1]);
}

TEST(load, of_which_ranks_reload_different_ones_is_refused)
{
    struct tree t;
    struct member m[MOST];

    tree_open(&t);
    open_views(&t);
    team(true, 2, views[FIRST], 0, play_mixed, m);
    for (uint32_t r = 0; r < 2; r++)
        CHECK(m[r].rc == -1 && m[r].err.code == CKPT_CONFLICT &&
              strstr(m[r].err.text, "does not plan or reload the same load"));
    close_views();
    tree_close(&t);
}

/* ---- pausing ---- */

static atomic_int stray; /* something was sent while all ranks paused */

/* Nothing is exchanged between the return of pause on all ranks and the first resume. */
static int pause_once(struct member *m, struct loading *l, bool *ret_over)
{
    struct ckpt_load_stats before = {.size = sizeof before}, after = {.size = sizeof after};
    int rc;

    while ((rc = ckpt_load_pause(l->load, 3, &m->err)) == 1)
        ;
    if (rc < 0)
        return -1;
    *ret_over = ckpt_load_wait(l->load, 0, &m->err) == 0;
    (void)ckpt_load_stats(l->load, &before, NULL, NULL);
    if (ckpt_comm_rank(m->comm) % 2)
        (void)usleep(2000);
    meet(m);
    (void)ckpt_load_stats(l->load, &after, NULL, NULL);
    if (after.sent_bytes != before.sent_bytes || after.received_bytes != before.received_bytes)
        atomic_fetch_add(&stray, 1);
    return ckpt_load_resume(l->load, &m->err);
}

static void play_pauses(struct member *m)
{
    const struct ckpt_load_options opt = {.host_bytes = 1 << 20, .verify = m->step & 1};
    struct loading l;
    bool over = false;

    m->rc = loading_begin(m, m->step & 2 ? "fsdp=2,dp=2" : "dp=4", &opt, &l);
    if (m->rc == 0)
        m->rc = ckpt_load_plan(l.load, &m->err);
    if (m->rc == 0)
        m->rc = start_held(m, &l);
    if (m->rc == 0 && ckpt_load_resume(l.load, &m->err) < 0)
        m->rc = -1; /* nothing is paused: nothing happens */
    if (m->rc == 0 && ckpt_load_pause(l.load, 0, &m->err) < 0)
        m->rc = -1;
    meet(m);
    hold_reads(false);
    for (int i = 0; i < 5 && m->rc == 0; i++) {
        m->rc = pause_once(m, &l, &over);
        m->pauses += !over;
        (void)usleep(m->rank * 300);
    }
    if (m->rc == 0)
        m->rc = ckpt_load_wait(l.load, UINT32_MAX, &m->err);
    if (m->rc == 0)
        m->rc = check_bytes(m, &l);
    loading_end(&l);
}

TEST(load, pauses_between_the_same_windows_on_all_ranks)
{
    struct tree t;
    struct member m[MOST];
    uint32_t pauses = 0;

    tree_open(&t);
    open_views(&t);
    atomic_store(&stray, 0);
    for (int way = 0; way < 8; way++) {
        atomic_store(&arrivals, 0);
        team(way & 1, 4, views[FIRST], way >> 1, play_pauses, m);
        check_good(m, 4);
        pauses += m[0].pauses;
    }
    CHECK_EQ(atomic_load(&stray), 0);
    CHECK(pauses >= 8); /* the first of each way is before the end */
    close_views();
    tree_close(&t);
}

/* Begin a load of several windows, which reads nothing yet. */
static void begin_held(struct member *m, uint32_t exchange_timeout_ms, struct loading *l)
{
    const struct ckpt_load_options opt = {.host_bytes = 1 << 20,
                                          .exchange_timeout_ms = exchange_timeout_ms};

    m->rc = loading_begin(m, "dp=4", &opt, l);
    if (m->rc == 0)
        m->rc = ckpt_load_plan(l->load, &m->err);
    if (m->rc == 0)
        m->rc = start_held(m, l);
}

/* Do four ranks that play this all fail with that code, over memory and over TCP? */
static bool all_fail(play_fn *play, enum ckpt_code code, const char *text)
{
    struct tree t;
    struct member m[MOST];
    bool good = true;

    tree_open(&t);
    open_views(&t);
    for (int tcp = 0; tcp < 2; tcp++) {
        atomic_store(&arrivals, 0);
        team(tcp, 4, views[FIRST], 0, play, m);
        for (uint32_t r = 0; r < 4; r++)
            good &= m[r].rc == -1 && m[r].err.code == code && strstr(m[r].err.text, text);
    }
    close_views();
    tree_close(&t);
    return good;
}

/* A rank that fails while the others wait for it to pause ends the load on all. */
static void play_broken_pause(struct member *m)
{
    struct loading l;

    begin_held(m, 0, &l);
    if (m->rc == 0 && m->rank != 3 && ckpt_load_pause(l.load, 0, &m->err) != 1)
        m->rc = ckpt_fail(&m->err, CKPT_CONFLICT, "paused before the last rank was asked to");
    meet(m);
    if (m->rc == 0 && m->rank == 3)
        ckpt_load_cancel(l.load);
    else if (m->rc == 0)
        m->rc = ckpt_load_pause(l.load, UINT32_MAX, &m->err);
    if (m->rc == 0)
        m->rc = ckpt_load_wait(l.load, UINT32_MAX, &m->err);
    meet(m);
    hold_reads(false);
    loading_end(&l);
}

TEST(load, that_fails_while_ranks_pause_fails_on_all)
{
    CHECK(all_fail(play_broken_pause, CKPT_CANCELLED, ""));
}

/* One rank is not asked to pause: the others do not wait for it for ever, nor it for them. */
static void play_lone_pause(struct member *m)
{
    struct loading l;

    begin_held(m, 2000, &l);
    if (m->rc == 0 && m->rank != 3 && ckpt_load_pause(l.load, 0, &m->err) < 0)
        m->rc = -1;
    meet(m);
    hold_reads(false);
    if (m->rc == 0 && m->rank != 3)
        m->rc = ckpt_load_pause(l.load, DEADLINE_MS, &m->err);
    if (m->rc == 0)
        m->rc = ckpt_load_wait(l.load, DEADLINE_MS, &m->err);
    loading_end(&l);
}

TEST(load, that_not_all_ranks_pause_fails_in_time)
{
    CHECK(all_fail(play_lone_pause, CKPT_TIMEOUT, "not on all ranks"));
}

/* All ranks pause for longer than they would wait for each other, and nobody's read returns
 * meanwhile; they resume one after the other. */
static void play_long_pause(struct member *m)
{
    struct loading l;

    begin_held(m, 1000, &l);
    if (m->rc == 0 && ckpt_load_pause(l.load, 0, &m->err) < 0)
        m->rc = -1;
    meet(m);
    hold_reads(false);
    if (m->rc == 0)
        m->rc = ckpt_load_pause(l.load, DEADLINE_MS, &m->err);
    (void)usleep(1500 * 1000 + m->rank * 200 * 1000);
    if (m->rc == 0)
        m->rc = ckpt_load_resume(l.load, &m->err);
    if (m->rc == 0)
        m->rc = ckpt_load_wait(l.load, DEADLINE_MS, &m->err);
    if (m->rc == 0)
        m->rc = check_bytes(m, &l);
    loading_end(&l);
}

TEST(load, that_pauses_for_longer_than_the_timeout_goes_on)
{
    struct tree t;
    struct member m[MOST];

    tree_open(&t);
    open_views(&t);
    for (int tcp = 0; tcp < 2; tcp++) {
        atomic_store(&arrivals, 0);
        team(tcp, 4, views[FIRST], 0, play_long_pause, m);
        for (uint32_t r = 0; r < 4; r++)
            CHECK_EQ(m[r].rc, 0);
    }
    close_views();
    tree_close(&t);
}

TESTS(T(load, runs_again_with_other_steps),
      T(load, that_is_freed_waits_for_its_reads_but_not_for_ever),
      T(load, of_which_ranks_reload_different_ones_is_refused),
      T(load, pauses_between_the_same_windows_on_all_ranks),
      T(load, that_fails_while_ranks_pause_fails_on_all),
      T(load, that_not_all_ranks_pause_fails_in_time),
      T(load, that_pauses_for_longer_than_the_timeout_goes_on))
