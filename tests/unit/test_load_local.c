/* SPDX-License-Identifier: Apache-2.0 */
/* Local loads: the roster of all ranks' files, and ranks as threads that have a part each. */
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

#include "comm/tcp/service.h"
#include "load/local/answers.h"
#include "load/local/roster.h"
#include "load_team.h"
#include "test.h"
#include "tree.h"

enum { RANKS = 4 };

/* ---- the roster ---- */

static void add(struct ckpt_str *out, const char *path, uint64_t size, int64_t time)
{
    const bool is_dir = size == 0;

    ckpt_seen_put(
        out, &(struct ckpt_seen){
                 path, is_dir ? CKPT_ENTRY_DIR : CKPT_ENTRY_FILE, false, {1, size, time, time}});
}

/* Three ranks: two with parts, one without a directory. */
static void make_roster(struct ckpt_str *out)
{
    struct ckpt_str list[3] = {{0}};
    struct ckpt_err err = {0};

    add(&list[0], ".", 0, 1);
    add(&list[0], "step-10", 0, 5);
    add(&list[0], "step-10/b", 100, 1);
    add(&list[0], "step-10/both", 50, 1);
    add(&list[0], "step-10/copy", 50, 1);
    add(&list[0], "step-10/size", 50, 1);
    add(&list[2], ".", 0, 2);
    add(&list[2], "step-9", 0, 1);
    add(&list[2], "step-10", 0, 7);
    add(&list[2], "step-10/both", 50, 1);
    add(&list[2], "step-10/copy", 50, 2);
    add(&list[2], "step-10/size", 51, 1);
    add(&list[2], "step-10/a", 100, 1);
    const unsigned char *data[3];
    size_t len[3];
    for (int r = 0; r < 3; r++) {
        data[r] = (const unsigned char *)list[r].ptr;
        len[r] = list[r].len;
    }
    if (ckpt_roster_merge(data, len, 3, out, &err) < 0)
        fail_msg("%s", err.text);
    for (int r = 0; r < 3; r++)
        ckpt_str_release(&list[r]);
}

static void check_list(const struct ckpt_roster *r, const char *path, const char *expected)
{
    struct ckpt_str list = {0}, names = {0};
    struct ckpt_entry e;

    ckpt_roster_list(r, path, &list);
    for (const char *at = ckpt_str_get(&list), *end = at + list.len;
         ckpt_listed_next(&at, end, &e);)
        ckpt_str_printf(&names, "%s ", e.name);
    assert_string_equal(ckpt_str_get(&names), expected);
    ckpt_str_release(&list);
    ckpt_str_release(&names);
}

TEST(local, a_roster_says_who_has_what)
{
    struct ckpt_str bytes = {0};
    struct ckpt_roster r = {0};
    struct ckpt_err err = {0};

    make_roster(&bytes);
    CHECK_OK(ckpt_roster_decode(bytes.ptr, bytes.len, 3, &r, &err));
    check_list(&r, ".", "step-9 step-10 ");
    check_list(&r, "step-10", "a b both copy size ");
    check_list(&r, "step-9", "");
    CHECK(!ckpt_roster_find(&r, "step-10/c"));
    CHECK(!ckpt_roster_find(&r, "a"));
    const struct ckpt_roster_entry *a = ckpt_roster_find(&r, "step-10/a");
    CHECK(a && !ckpt_roster_has(&r, a, 0) && !ckpt_roster_has(&r, a, 1) &&
          ckpt_roster_has(&r, a, 2));
    const struct ckpt_roster_entry *both = ckpt_roster_find(&r, "step-10/both");
    CHECK(both && both->nholder == 2 && !r.holder.ptr[both->holder + 1].is_copy);
    const struct ckpt_roster_entry *copy = ckpt_roster_find(&r, "step-10/copy");
    CHECK(copy && copy->nholder == 2 && r.holder.ptr[copy->holder + 1].is_copy);
    const struct ckpt_roster_entry *size = ckpt_roster_find(&r, "step-10/size");
    CHECK(size && size->nholder == 1 && size->differs == 2);
    const struct ckpt_roster_entry *step = ckpt_roster_find(&r, "step-10");
    CHECK(step && step->is.id.mtime_ns == 7);
    ckpt_roster_release(&r);
    ckpt_str_release(&bytes);
}

TEST(local, a_damaged_roster_is_refused)
{
    struct ckpt_str bytes = {0};
    size_t refused = 0;

    make_roster(&bytes);
    for (size_t i = 0; i < bytes.len; i++) {
        struct ckpt_roster cut = {0}, changed = {0};
        struct ckpt_err err = {0};
        refused += ckpt_roster_decode(bytes.ptr, i, 3, &cut, &err) < 0;
        bytes.ptr[i] ^= 0x55;
        (void)ckpt_roster_decode(bytes.ptr, bytes.len, 3, &changed, NULL);
        bytes.ptr[i] ^= 0x55;
        ckpt_roster_release(&cut);
        ckpt_roster_release(&changed);
    }
    CHECK(refused > bytes.len - 16); /* some are the end of an entry */
    ckpt_str_release(&bytes);
}

/* ---- loads ---- */

static const char *const WHOLE = "nanotron/llama_tp2_pp2_tied";

static struct tree parts;
static struct ckpt_view *whole;
static size_t nfile;

/* Copy every fourth file to the folder of one rank. */
static int copy_one(const char *path, const struct stat *st, int kind, struct FTW *ftw)
{
    char name[4096];
    const char *below = strstr(path, WHOLE) + strlen(WHOLE);
    void *data = malloc((size_t)st->st_size + 1);
    const int fd = kind == FTW_F ? open(path, O_RDONLY | O_CLOEXEC) : -1;

    (void)ftw;
    TREE_MUST(data);
    (void)snprintf(name, sizeof name, "%zu%s", nfile % RANKS, below);
    if (fd >= 0) {
        TREE_MUST(read(fd, data, (size_t)st->st_size) == st->st_size);
        tree_put(&parts, name, data, (size_t)st->st_size);
        nfile++;
        (void)close(fd);
    }
    free(data);
    return 0;
}

static void make_parts(void)
{
    const char *source = getenv("CKPTFS_SOURCE");
    char path[4096];

    tree_open(&parts);
    (void)snprintf(path, sizeof path, "%s/tests/golden/%s", source ? source : ".", WHOLE);
    TREE_MUST(nftw(path, copy_one, 64, FTW_PHYS) == 0);
    whole = open_view(WHOLE);
}

static void end_parts(void)
{
    ckpt_view_release(whole);
    tree_close(&parts);
}

/* Compare the whole of all tensors, which are read from all ranks, with the whole run's. */
static int compare_all(struct member *m)
{
    for (size_t i = 0; i < ckpt_view_tensors(whole); i++) {
        struct ckpt_tensor_info t = {.size = sizeof t};
        size_t k;
        if (ckpt_view_tensor(whole, i, &t, &m->err) < 0 ||
            !ckpt_view_find_tensor(m->view, t.name, &k))
            return -1;
        unsigned char *a = malloc(t.nbytes + 1), *b = malloc(t.nbytes + 1);
        const bool good = a && b && ckpt_view_box_pread(whole, i, NULL, NULL, a, &m->err) == 0 &&
                          ckpt_view_box_pread(m->view, k, NULL, NULL, b, &m->err) == 0 &&
                          memcmp(a, b, t.nbytes) == 0;
        free(a);
        free(b);
        if (!good)
            return -1;
    }
    return 0;
}

static void play_local(struct member *m)
{
    char path[4200];

    (void)snprintf(path, sizeof path, "%s/{rank}", parts.path);
    m->view = NULL;
    m->rc =
        ckpt_load_open_local(m->comm, path, NULL, NULL, DEADLINE_MS, NULL, NULL, &m->view, &m->err);
    for (int i = 0; i < 3 && m->rc == 0; i++) {
        static const char *const layout[] = {"tp=2,dp=2", "fsdp=4", "dp=4"};
        const struct ckpt_load_options opt = {.readers = (enum ckpt_readers)(i + 1)};
        m->rc = load_once(m, layout[i], &opt);
    }
    if (m->rc == 0)
        m->rc = compare_all(m);
    m->rc = ckpt_comm_agree(m->comm, m->rc, DEADLINE_MS, &m->err); /* others still ask this one */
    ckpt_view_release(m->view);
}

TEST(local, every_rank_gets_what_only_others_have)
{
    struct member m[MOST];

    make_parts();
    for (int tcp = 0; tcp < 2; tcp++) {
        team(tcp, RANKS, NULL, 0, play_local, m);
        for (uint32_t r = 0; r < RANKS; r++)
            if (m[r].rc < 0)
                fail_msg("rank %u: %s", r, m[r].err.text);
    }
    CHECK(nfile > RANKS);
    end_parts();
}

/* ---- requests ---- */

TEST(local, damaged_requests_are_refused)
{
    struct {
        struct ckpt_local_request head;
        struct ckpt_local_run run[2];
        char path[8];
    } q;
    struct ckpt_comm *comm = NULL;
    struct ckpt_service *s = NULL;
    struct ckpt_dir *dir = NULL;
    struct ckpt_err err = {0};
    struct ckpt_dir_found found;
    struct tree t;
    char buf[64];
    struct iovec iov = {buf, 8};

    tree_open(&t);
    tree_text(&t, "a", "0123456789abcdef");
    CHECK_OK(ckpt_comm_self(&comm, &err));
    CHECK_OK(ckpt_dir_open(t.path, CKPT_LINKS_BENEATH, &dir, &err));
    CHECK_OK(ckpt_dir_look(dir, "a", &found, &err));
    CHECK_OK(ckpt_answers_open(comm, dir, "rank 0 here", &s, &err));
    memset(&q, 0, sizeof q);
    q.head = (struct ckpt_local_request){found.id.size, found.id.mtime_ns, found.id.ctime_ns, 2, 0};
    q.run[0] = (struct ckpt_local_run){10, 4};
    q.run[1] = (struct ckpt_local_run){2, 4};
    q.path[0] = 'a';
    const size_t len = offsetof(__typeof__(q), path);
    const char *at = ckpt_service_address(s);
    CHECK_OK(ckpt_service_ask(s, 0, at, &q, len + 1, &iov, 1, DEADLINE_MS, &err));
    CHECK(memcmp(buf, "abcd2345", 8) == 0);
    CHECK_FAILS(ckpt_service_ask(s, 0, at, &q, len, &iov, 1, DEADLINE_MS, &err), CKPT_FORMAT,
                "damaged request");
    CHECK_FAILS(ckpt_service_ask(s, 0, at, &q, 7, &iov, 1, DEADLINE_MS, &err), CKPT_FORMAT,
                "damaged request");
    q.run[1].len = 5;
    CHECK_FAILS(ckpt_service_ask(s, 0, at, &q, len + 1, &iov, 1, DEADLINE_MS, &err), CKPT_FORMAT,
                "damaged request");
    q.run[1].len = UINT64_MAX - 3;
    CHECK_FAILS(ckpt_service_ask(s, 0, at, &q, len + 1, &iov, 1, DEADLINE_MS, &err), CKPT_FORMAT,
                "damaged request");
    q.run[1] = (struct ckpt_local_run){UINT64_MAX - 1, 4};
    CHECK_FAILS(ckpt_service_ask(s, 0, at, &q, len + 1, &iov, 1, DEADLINE_MS, &err), CKPT_FORMAT,
                "the file has");
    q.run[1] = (struct ckpt_local_run){0, 4};
    memcpy(q.path, "../a", 4);
    CHECK_FAILS(ckpt_service_ask(s, 0, at, &q, len + 4, &iov, 1, DEADLINE_MS, &err), CKPT_FORMAT,
                "rank 0 here");
    q.path[0] = 'a';
    q.head.mtime_ns++;
    CHECK_FAILS(ckpt_service_ask(s, 0, at, &q, len + 1, &iov, 1, DEADLINE_MS, &err), CKPT_STALE,
                "changed since");
    ckpt_service_close(s);
    ckpt_dir_unref(dir);
    ckpt_comm_free(comm);
    tree_close(&t);
}

/* ---- how many are answered at the same time ---- */

enum { ASKERS = 3 * CKPT_SERVICE_ANSWERS };

struct crowd {
    atomic_uint now, most; /* requests that are being answered, and the most that were */
};

static int answer_slowly(void *ctx, const void *request, size_t len, void *reply, size_t reply_len,
                         struct ckpt_err *err)
{
    struct crowd *c = ctx;
    const unsigned now = atomic_fetch_add(&c->now, 1) + 1;
    unsigned most = atomic_load(&c->most);

    (void)err;
    while (now > most && !atomic_compare_exchange_weak(&c->most, &most, now))
        ;
    (void)usleep(20000);
    memcpy(reply, request, len < reply_len ? len : reply_len);
    atomic_fetch_sub(&c->now, 1);
    return 0;
}

static void leave(void *ctx) { (void)ctx; }

struct asker {
    struct ckpt_service *own, *asked;
    uint32_t number, back;
    struct ckpt_err err;
    int rc;
};

static void *ask_once(void *arg)
{
    struct asker *a = arg;
    const struct iovec iov = {&a->back, sizeof a->back};

    a->rc = ckpt_service_ask(a->own, 0, ckpt_service_address(a->asked), &a->number,
                             sizeof a->number, &iov, 1, DEADLINE_MS, &a->err);
    return NULL;
}

TEST(local, few_requests_are_answered_at_the_same_time)
{
    static const struct ckpt_service_ops slow = {.answer = answer_slowly, .free = leave};
    struct ckpt_comm *comm = NULL;
    struct ckpt_service *s = NULL;
    struct asker asker[ASKERS];
    pthread_t thread[ASKERS];
    struct crowd crowd = {0};
    struct ckpt_err err = {0};

    CHECK_OK(ckpt_comm_self(&comm, &err));
    CHECK_OK(ckpt_service_open(comm, &slow, &crowd, &s, &err));
    for (uint32_t i = 0; i < ASKERS; i++) { /* each has connections of its own */
        asker[i] = (struct asker){.asked = s, .number = i + 1};
        CHECK_OK(ckpt_service_open(comm, &slow, &crowd, &asker[i].own, &err));
        CHECK_EQ(pthread_create(&thread[i], NULL, ask_once, &asker[i]), 0);
    }
    for (uint32_t i = 0; i < ASKERS; i++) {
        CHECK_EQ(pthread_join(thread[i], NULL), 0);
        if (asker[i].rc < 0 || asker[i].back != i + 1)
            fail_msg("request %u: %s", i, asker[i].err.text);
        ckpt_service_close(asker[i].own);
    }
    CHECK(atomic_load(&crowd.most) > 1 && atomic_load(&crowd.most) <= CKPT_SERVICE_ANSWERS);
    ckpt_service_close(s);
    ckpt_comm_free(comm);
}

TESTS(T(local, a_roster_says_who_has_what), T(local, a_damaged_roster_is_refused),
      T(local, every_rank_gets_what_only_others_have), T(local, damaged_requests_are_refused),
      T(local, few_requests_are_answered_at_the_same_time))
