/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks of one process, over memory and over TCP: several loads on one comm, what comes after a
 * failure, who leaves early, cancelling from elsewhere, waiting. */
#include <dirent.h>
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

#include <ckptfs/load.h>

#include "base/clock.h"
#include "base/err.h"
#include "comm/comm.h"
#include "comm/secret.h"
#include "comm/xport.h"
#include "load/want/job_wants.h"
#include "load_team.h"
#include "test.h"

/* ---- several loads ---- */

static void play_several(struct member *m)
{
    static const char *const layout[] = {"fsdp=4", "tp=2,pp=2", "tp=4", "dp=4"};
    static const enum ckpt_readers readers[] = {CKPT_READERS_ONCE, CKPT_READERS_EACH,
                                                CKPT_READERS_NODE};

    for (int i = 0; i < 12 && m->rc == 0; i++) {
        const struct ckpt_load_options opt = {.readers = readers[i % 3], .verify = i % 2};
        m->rc = load_once(m, layout[i % 4], &opt);
    }
}

TEST(load, one_comm_serves_many_loads)
{
    struct ckpt_view *view = open_view("nanotron/llama_tp2_pp2_tied");
    struct member m[MOST];

    for (int tcp = 0; tcp < 2; tcp++) {
        team(tcp, 4, view, 0, play_several, m);
        check_good(m, 4);
        CHECK(m[0].stats.unique_bytes > 0);
    }
    ckpt_view_release(view);
}

/* ---- statistics ---- */

static struct ckpt_load_stats of_rank[MOST];

static void play_counting(struct member *m)
{
    const struct ckpt_load_options opt = {.readers = CKPT_READERS_ONCE};
    struct ckpt_load_stats *own = &of_rank[m->rank];
    struct loading l;

    own->size = m->stats.size = sizeof *own;
    m->rc = loading_begin(m, "dp=4", &opt, &l);
    if (m->rc == 0)
        m->rc = ckpt_load_plan(l.load, &m->err);
    if (m->rc == 0)
        m->rc = ckpt_load_start(l.load, &m->err);
    if (m->rc == 0)
        m->rc = ckpt_load_wait(l.load, UINT32_MAX, &m->err);
    if (m->rc == 0)
        m->rc = ckpt_load_stats(l.load, own, &m->stats, &m->err);
    loading_end(&l);
}

TEST(load, the_numbers_of_a_job_are_the_sums_of_those_of_its_ranks)
{
    struct ckpt_view *view = open_view("nanotron/llama_tp2_pp2_tied");
    struct member m[MOST];

    for (int tcp = 0; tcp < 2; tcp++) {
        struct ckpt_load_stats sum = {0};
        team(tcp, 4, view, 0, play_counting, m);
        check_good(m, 4);
        for (uint32_t r = 0; r < 4; r++) {
            sum.needed_bytes += of_rank[r].needed_bytes;
            sum.read_bytes += of_rank[r].read_bytes;
            sum.reads += of_rank[r].reads;
            sum.sent_bytes += of_rank[r].sent_bytes;
            sum.received_bytes += of_rank[r].received_bytes;
            sum.asked_bytes += of_rank[r].asked_bytes;
        }
        CHECK(sum.received_bytes > 0);
        for (uint32_t r = 0; r < 4; r++) {
            CHECK_EQ(m[r].stats.needed_bytes, sum.needed_bytes);
            CHECK_EQ(m[r].stats.needed_bytes, 4 * m[r].stats.unique_bytes);
            CHECK_EQ(m[r].stats.read_bytes, sum.read_bytes);
            CHECK_EQ(m[r].stats.reads, sum.reads);
            CHECK_EQ(m[r].stats.sent_bytes, sum.sent_bytes);
            CHECK_EQ(m[r].stats.received_bytes, sum.received_bytes);
            CHECK_EQ(m[r].stats.asked_bytes, sum.asked_bytes);
        }
    }
    ckpt_view_release(view);
}

/* ---- messages have a longest length ---- */

static size_t longest; /* of a control message */
static struct ckpt_xport_ops long_ops, short_ops;

static int short_send(struct ckpt_xport *x, uint32_t peer, const void *msg, size_t len,
                      struct ckpt_err *err)
{
    if (len > longest)
        return ckpt_fail(err, CKPT_LIMIT, "a message of %zu bytes is longer than %zu", len,
                         longest);
    return long_ops.ctl_send(x, peer, msg, len, err);
}

/* Each rank wants as many boxes of its own as it can. */
static void play_boxes(struct member *m)
{
    const struct ckpt_load_options opt = {.size = sizeof opt, .exchange_timeout_ms = DEADLINE_MS};
    struct ckpt_load *load = NULL;

    m->comm->x->ops = &short_ops;
    m->rc = ckpt_load_new(m->view, m->comm, &opt, &load, &m->err);
    for (uint64_t i = 0; i < 400 && m->rc == 0; i++) {
        const uint64_t lo[2] = {i % 40, m->rank}, n[2] = {1 + i / 40, 1};
        m->rc = ckpt_load_want(load, "model.embed_tokens.weight", lo, n, NULL, NULL, &m->err);
    }
    if (m->rc == 0)
        m->rc = ckpt_load_plan(load, &m->err);
    ckpt_load_free(load);
}

TEST(load, wants_that_fit_no_message_are_an_error_of_all)
{
    static const size_t most[] = {1 << 20, 4000, 1000}; /* all; all but the answer; neither */
    struct ckpt_view *view = open_view("nanotron/llama_tp2_pp2_tied");
    struct ckpt_comm *comm[2];
    struct ckpt_err err = {0};
    struct member m[MOST];

    CHECK_OK(ckpt_comm_threads(2, comm, &err));
    short_ops = long_ops = *comm[0]->x->ops;
    short_ops.ctl_send = short_send;
    ckpt_comm_free(comm[0]);
    ckpt_comm_free(comm[1]);
    for (int i = 0; i < 3; i++) {
        longest = most[i];
        team(false, 4, view, 0, play_boxes, m);
        for (uint32_t r = 0; r < 4 && i > 0; r++) {
            CHECK_EQ(m[r].err.code, CKPT_LIMIT);
            CHECK(strstr(m[r].err.text, "ranks want too many different boxes: where"));
            CHECK(strstr(m[r].err.text, i == 1 ? "rank 0: a message of" : "rank 1: a message of"));
        }
        if (i == 0)
            check_good(m, 4);
    }
    ckpt_view_release(view);
}

/* ---- after a failure ---- */

static void play_refused(struct member *m)
{
    struct ckpt_load_options opt = {.host_bytes = m->rank == 2 ? 1 << 20 : 2 << 20};
    struct ckpt_err first;

    m->rc = load_once(m, "fsdp=3", &opt); /* the ranks differ in their options */
    first = m->err;
    if (m->rc == 0 || first.code != CKPT_CONFLICT || !strstr(first.text, "rank 2"))
        return;
    opt.host_bytes = 0;
    memset(&m->err, 0, sizeof m->err);
    m->rc = load_once(m, m->rank == 1 ? "fsdp=4" : "fsdp=3", &opt); /* one has no layout */
    if (m->rank == 1)
        m->rc = ckpt_comm_agree(m->comm, m->rc, DEADLINE_MS, &m->err);
}

TEST(load, a_plan_that_is_refused_leaves_the_comm_whole)
{
    struct ckpt_view *view = open_view("nanotron/llama_tp2_pp2_tied");
    struct member m[MOST];

    for (int tcp = 0; tcp < 2; tcp++) {
        team(tcp, 3, view, 0, play_refused, m);
        for (uint32_t r = 0; r < 3; r++) {
            CHECK_EQ(m[r].rc, -1);
            CHECK_EQ(m[r].err.code, CKPT_USAGE);
            CHECK(strstr(m[r].err.text, "fsdp=4") != NULL);
        }
    }
    ckpt_view_release(view);
}

/* A load that fails on all ranks: one cancels it at once, or has no memory for a want. */
static int load_badly(struct member *m, bool starts)
{
    struct loading l;
    int rc = loading_begin(m, "dp=4", NULL, &l);

    if (rc == 0 && m->rank == 1 && !starts)
        rc = ckpt_load_set_dest(l.load, 0, &(struct ckpt_dest){.size = sizeof(struct ckpt_dest)},
                                &m->err);
    if (rc == 0)
        rc = ckpt_load_plan(l.load, &m->err);
    if (rc == 0)
        rc = ckpt_load_start(l.load, &m->err);
    if (rc == 0 && m->rank == 1)
        ckpt_load_cancel(l.load);
    if (rc == 0)
        rc = ckpt_load_wait(l.load, UINT32_MAX, &m->err);
    loading_end(&l);
    return rc;
}

static void play_again(struct member *m)
{
    static const struct ckpt_load_options opt = {.host_bytes = 400 << 10};

    for (int i = 0; i < 8 && m->rc == 0; i++) {
        const bool starts = i % 2;
        struct ckpt_err *e = &m->err;
        m->rc = load_badly(m, starts);
        if (m->rc == 0 || e->code != (starts ? CKPT_CANCELLED : CKPT_USAGE) ||
            !strstr(e->text, "rank 1")) {
            m->rc = -1;
            return;
        }
        memset(e, 0, sizeof *e);
        m->rc = load_once(m, i % 4 < 2 ? "dp=4" : "tp=2,pp=2", &opt);
    }
}

TEST(load, a_comm_serves_loads_after_one_that_failed)
{
    struct ckpt_view *view = open_view("nanotron/llama_tp2_pp2_tied");
    struct member m[MOST];

    for (int tcp = 0; tcp < 3; tcp++) {
        bool secret;
        if (tcp == 2) /* with a secret, where it can be used */
            (void)setenv("CKPTFS_SECRET", "sixteen characters at least", 1);
        if (ckpt_secret_is_set(&secret, NULL) < 0)
            (void)unsetenv("CKPTFS_SECRET");
        team(tcp, 4, view, 0, play_again, m);
        (void)unsetenv("CKPTFS_SECRET");
        check_good(m, 4);
        CHECK(m[0].stats.unique_bytes > 0);
    }
    ckpt_view_release(view);
}

static void play_budget(struct member *m)
{
    struct ckpt_load_options opt = {.host_bytes = 1000, .verify = m->step & 1};
    const char *least;

    opt.readers = m->step & 2 ? CKPT_READERS_EACH : CKPT_READERS_ONCE;
    opt.direct = m->step & 4 ? CKPT_LOAD_DIRECT_ALWAYS : CKPT_LOAD_DIRECT_AUTO;
    for (int tries = 0; tries < 20; tries++) {
        memset(&m->err, 0, sizeof m->err);
        m->rc = load_once(m, "fsdp=3", &opt);
        if (m->rc == 0 && m->stats.buffer_bytes > opt.host_bytes)
            m->rc = ckpt_fail(&m->err, CKPT_LIMIT, "more memory than host_bytes");
        /* the least budget is what such a load takes, in whole pages */
        if (m->rc == 0 && opt.readers == CKPT_READERS_EACH &&
            m->stats.buffer_bytes <= opt.host_bytes - 4096)
            m->rc = ckpt_fail(&m->err, CKPT_CONFLICT, "not all buffers are counted");
        if (m->rc == 0 || m->err.code != CKPT_LIMIT || tries > 1 ||
            !(least = strstr(m->err.text, "at least ")))
            return;
        opt.host_bytes = strtoull(least + strlen("at least "), NULL, 10);
    }
}

TEST(load, the_least_budget_that_an_error_names_is_enough)
{
    struct ckpt_view *view = open_view("nanotron/llama_tp2_pp2_tied");
    struct member m[MOST];

    for (int way = 0; way < 8; way++) {
        team(false, 3, view, way, play_budget, m);
        check_good(m, 3);
    }
    CHECK(m[0].stats.unique_bytes > 0);
    ckpt_view_release(view);
}

/* ---- leaving ---- */

/* Rank 1 goes: before it says anything, after planning, or after it has started. */
static void play_leaving(struct member *m)
{
    struct loading l;

    if (m->rank == 1 && m->step == 0)
        return;
    m->rc = loading_begin(m, "fsdp=3", NULL, &l);
    if (m->rc == 0)
        m->rc = ckpt_load_plan(l.load, &m->err);
    if (m->rc == 0 && !(m->rank == 1 && m->step == 1))
        m->rc = ckpt_load_start(l.load, &m->err);
    if (m->rc == 0 && m->rank != 1)
        m->rc = ckpt_load_wait(l.load, UINT32_MAX, &m->err);
    loading_end(&l);
}

TEST(load, who_leaves_is_missed_at_once)
{
    struct ckpt_view *view = open_view("nanotron/llama_tp2_pp2_tied");
    struct member m[MOST];

    for (int tcp = 0; tcp < 2; tcp++)
        for (int step = 0; step < 3; step++) {
            team(tcp, 3, view, step, play_leaving, m);
            for (uint32_t r = 0; r < 3; r += 2) /* who had all before may be done */
                if (step < 2 || m[r].rc < 0) {
                    if (m[r].rc != -1 ||
                        (m[r].err.code != CKPT_PEER && m[r].err.code != CKPT_CANCELLED))
                        fail_msg("tcp %d, step %d, rank %u: %d %s", tcp, step, r, m[r].rc,
                                 m[r].err.text);
                    if (!strstr(m[r].err.text, "rank 1"))
                        fail_msg("tcp %d, step %d, rank %u: %s", tcp, step, r, m[r].err.text);
                }
        }
    CHECK(ckpt_view_tensors(view) > 0);
    ckpt_view_release(view);
}

/* ---- cancelling ---- */

static void *cancel_soon(void *load)
{
    (void)usleep(300);
    ckpt_load_cancel(load);
    return NULL;
}

static void play_cancel(struct member *m)
{
    const struct ckpt_load_options opt = {.readers =
                                              m->step % 2 ? CKPT_READERS_EACH : CKPT_READERS_ONCE};
    struct loading l;
    pthread_t thread;

    m->rc = loading_begin(m, "fsdp=3", &opt, &l);
    if (m->rc == 0)
        m->rc = ckpt_load_plan(l.load, &m->err);
    if (m->rc == 0)
        m->rc = ckpt_load_start(l.load, &m->err);
    const bool cancels = m->rc == 0 && (int)m->rank == m->step % 3;
    if (cancels && pthread_create(&thread, NULL, cancel_soon, l.load) != 0)
        m->rc = -1;
    if (m->rc == 0)
        m->rc = ckpt_load_wait(l.load, UINT32_MAX, &m->err);
    if (cancels)
        (void)pthread_join(thread, NULL);
    loading_end(&l);
}

TEST(load, cancelled_from_another_thread_ends_everywhere)
{
    struct ckpt_view *view = open_view("nanotron/llama_tp2_pp2_tied");
    struct member m[MOST];

    for (int step = 0; step < 24; step++) {
        team(step % 4 == 3, 3, view, step, play_cancel, m);
        for (uint32_t r = 0; r < 3; r++) {
            CHECK_EQ(m[r].rc, m[0].rc);
            if (m[r].rc < 0 && m[r].err.code != CKPT_CANCELLED)
                fail_msg("rank %u: %s", r, m[r].err.text);
        }
    }
    ckpt_view_release(view);
}

/* ---- many ranks ---- */

static unsigned open_sockets(void)
{
    DIR *d = opendir("/proc/self/fd");
    struct dirent *e;
    unsigned n = 0;

    while (d && (e = readdir(d))) {
        char path[300], link[64] = "";
        (void)snprintf(path, sizeof path, "/proc/self/fd/%s", e->d_name);
        n += readlink(path, link, sizeof link - 1) > 0 && strncmp(link, "socket:", 7) == 0;
    }
    if (d)
        (void)closedir(d);
    return n;
}

/* All are still connected when any of them has counted: they agree after it. */
static void play_counted(struct member *m)
{
    m->rc = load_once(m, "fsdp=32,dp=2", NULL);
    m->step = (int)open_sockets();
    if (m->rc == 0)
        m->rc = ckpt_comm_agree(m->comm, 0, DEADLINE_MS, &m->err);
}

/* Each talks to the neighbours in the tree, and to the one rank that wants the same: of all pairs
 * there are 2,016. */
TEST(load, ranks_connect_to_those_that_they_talk_to)
{
    struct ckpt_view *view = open_view("nanotron/llama_tp2_pp2_tied");
    struct member m[MOST];

    CHECK(view);
    team(true, MOST, view, 0, play_counted, m);
    check_good(m, MOST);
    for (uint32_t r = 0; r < MOST; r++) /* a listener each; both ends of what is connected */
        assert_in_range(m[r].step, MOST + 2 * (MOST - 1), MOST + 2 * (MOST - 1) + MOST);
    ckpt_view_release(view);
}

/* ---- a rank without memory while ranks agree ---- */

int __real_ckpt_job_wants_init(struct ckpt_job_wants *r, const struct ckpt_catalog *cat,
                               uint32_t nrank, uint32_t *class_of, struct ckpt_wants *table,
                               uint32_t nclass, struct ckpt_err *err);
int __wrap_ckpt_job_wants_init(struct ckpt_job_wants *r, const struct ckpt_catalog *cat,
                               uint32_t nrank, uint32_t *class_of, struct ckpt_wants *table,
                               uint32_t nclass, struct ckpt_err *err);
static _Thread_local bool refuse_wants;

int __wrap_ckpt_job_wants_init(struct ckpt_job_wants *r, const struct ckpt_catalog *cat,
                               uint32_t nrank, uint32_t *class_of, struct ckpt_wants *table,
                               uint32_t nclass, struct ckpt_err *err)
{
    int rc = __real_ckpt_job_wants_init(r, cat, nrank, class_of, table, nclass, err);

    if (rc == 0 && refuse_wants) {
        ckpt_job_wants_release(r);
        return ckpt_nomem(err);
    }
    return rc;
}

static void play_without_memory(struct member *m)
{
    refuse_wants = m->rank == 2;
    m->rc = load_once(m, "tp=4", NULL);
}

TEST(load, what_one_rank_lacks_is_told_to_all_at_once)
{
    struct ckpt_view *view = open_view("nanotron/llama_tp2_pp2_tied");
    struct member m[4];
    const uint64_t begin = ckpt_now_ms();

    CHECK(view);
    team(true, 4, view, 0, play_without_memory, m);
    for (uint32_t r = 0; r < 4; r++) {
        CHECK(m[r].rc < 0);
        CHECK_EQ(m[r].err.code, CKPT_NOMEM);
        CHECK_STR(m[r].err.text, "rank 2: out of memory");
    }
    CHECK(ckpt_now_ms() - begin < DEADLINE_MS);
    ckpt_view_release(view);
}

static int reduce_without_memory(void *ctx, const unsigned char *const *data, const size_t *len,
                                 struct ckpt_str *answer, struct ckpt_err *err)
{
    (void)ctx, (void)data, (void)len;
    answer->failed = true;
    return ckpt_nomem(err);
}

static void play_round(struct member *m)
{
    struct ckpt_round round = {
        .comm = m->comm, .timeout_ms = DEADLINE_MS, .reduce = reduce_without_memory};
    unsigned char *answer = NULL;
    size_t len;

    m->rc = ckpt_round_run(&round, 0, &answer, &len, &m->err);
    free(answer);
}

/* Rank 0 has no memory for the answer of all ranks: it sends the error, which needs less. */
TEST(load, an_answer_without_memory_is_an_error_on_all_ranks)
{
    struct member m[4];

    for (int tcp = 0; tcp < 2; tcp++) {
        team(tcp, 4, NULL, 0, play_round, m);
        for (uint32_t r = 0; r < 4; r++) {
            CHECK(m[r].rc < 0);
            CHECK_EQ(m[r].err.code, CKPT_NOMEM);
            CHECK_STR(m[r].err.text, "rank 0: out of memory");
        }
    }
}

/* What rank r of step s fails with: the last rank alone knows the cause. */
static const enum ckpt_code failures[][4] = {
    {CKPT_PEER, CKPT_TIMEOUT, CKPT_CANCELLED, CKPT_STALE},
    {CKPT_PEER, CKPT_PEER, CKPT_OK, CKPT_TIMEOUT},
    {CKPT_TIMEOUT, CKPT_OK, CKPT_PEER, CKPT_IO},
};

static void play_failures(struct member *m)
{
    struct ckpt_round round = {.comm = m->comm, .timeout_ms = DEADLINE_MS};
    const enum ckpt_code code = failures[m->step][m->rank];

    if (code != CKPT_OK)
        m->rc = ckpt_fail(&m->err, code, "rank %u failed", m->rank);
    m->rc = ckpt_round_run(&round, m->rc, NULL, NULL, &m->err);
}

TEST(load, a_cause_is_reported_whatever_its_rank_and_not_its_consequences)
{
    struct member m[4];

    for (int step = 0; step < 3; step++) {
        team(true, 4, NULL, step, play_failures, m);
        for (uint32_t r = 0; r < 4; r++) {
            CHECK(m[r].rc < 0);
            CHECK_EQ(m[r].err.code, failures[step][3]);
            CHECK_STR(m[r].err.text, "rank 3 failed");
        }
    }
}

/* ---- bytes that never arrive, from ranks that are alive ---- */

static struct ckpt_xport_ops lossy[2];
static const struct ckpt_xport_ops *whole[2];

static int post_lost(struct ckpt_xport *x, struct ckpt_xfer *t, struct ckpt_err *err)
{
    if (!t->send)
        return whole[x->rank]->post(x, t, err);
    t->done = true;
    return 0;
}

static void play_lossy(struct member *m)
{
    const struct ckpt_load_options opt = {.exchange_timeout_ms = 2000};
    struct ckpt_xport *x = ckpt_comm_xport(m->comm);

    whole[m->rank] = x->ops;
    lossy[m->rank] = *x->ops;
    lossy[m->rank].post = post_lost;
    if ((int)m->rank <= m->step)
        x->ops = &lossy[m->rank];
    m->rc = load_once(m, "dp=2", &opt);
    x->ops = whole[m->rank];
}

/* Over memory the rank whose bytes are lost has finished; over TCP two ranks wait for each other.
 */
TEST(load, bytes_that_never_arrive_end_in_a_timeout)
{
    struct ckpt_view *view = open_view("nanotron/llama_tp2_pp2_tied");
    struct member m[2];

    CHECK(view);
    for (int tcp = 0; tcp < 2; tcp++) {
        const uint64_t begin = ckpt_now_ms();
        team(tcp, 2, view, tcp, play_lossy, m);
        for (uint32_t r = 0; r < 2; r++) {
            CHECK(m[r].rc < 0);
            CHECK_EQ(m[r].err.code, CKPT_TIMEOUT);
            CHECK(strstr(m[r].err.text, "no rank has read or moved anything for 4.0 s"));
        }
        CHECK(ckpt_now_ms() - begin < DEADLINE_MS);
    }
    ckpt_view_release(view);
}

TESTS(T(load, wants_that_fit_no_message_are_an_error_of_all),
      T(load, the_numbers_of_a_job_are_the_sums_of_those_of_its_ranks),
      T(load, ranks_connect_to_those_that_they_talk_to),
      T(load, bytes_that_never_arrive_end_in_a_timeout),
      T(load, what_one_rank_lacks_is_told_to_all_at_once),
      T(load, an_answer_without_memory_is_an_error_on_all_ranks),
      T(load, a_cause_is_reported_whatever_its_rank_and_not_its_consequences),
      T(load, one_comm_serves_many_loads), T(load, a_plan_that_is_refused_leaves_the_comm_whole),
      T(load, a_comm_serves_loads_after_one_that_failed),
      T(load, the_least_budget_that_an_error_names_is_enough),
      T(load, who_leaves_is_missed_at_once), T(load, cancelled_from_another_thread_ends_everywhere))
