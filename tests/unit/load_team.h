/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks of one process, over memory and over TCP, that play the same function, each in a thread. */
#ifndef CKPT_TESTS_UNIT_LOAD_TEAM_H
#define CKPT_TESTS_UNIT_LOAD_TEAM_H

#include <pthread.h>
#include <stdlib.h>

#include <ckptfs/load.h>

#include "base/err.h"
#include "test.h"

enum { MOST = 64, MEET_MS = 20000, DEADLINE_MS = 20000 };

struct member;
typedef void play_fn(struct member *m);

struct member {
    struct ckpt_comm *comm;
    struct ckpt_view *view;
    uint32_t rank, size;
    play_fn *play;
    int step; /* of the test */
    /* what came of it */
    int rc;
    struct ckpt_err err;
    struct ckpt_load_stats stats;
    uint32_t pauses; /* before the end */
};

static inline struct ckpt_view *open_view(const char *name)
{
    struct ckpt_run *run;
    struct ckpt_view *view;
    struct ckpt_err err = {0};
    char path[4096];
    const char *source = getenv("CKPTFS_SOURCE");

    (void)snprintf(path, sizeof path, "%s/tests/golden/%s", source ? source : ".", name);
    if (ckpt_run_open(path, NULL, &run, &err) < 0 || ckpt_run_view(run, NULL, &view, &err) < 0)
        fail_msg("%s", err.text);
    ckpt_run_close(run);
    return view;
}

/* ---- teams ---- */

struct connecting {
    struct ckpt_tcp *tcp;
    const char *root;
    uint32_t rank, size;
    struct ckpt_comm *comm;
    int rc;
    struct ckpt_err err;
};

static inline void *connect_one(void *arg)
{
    struct connecting *c = arg;

    c->rc = ckpt_tcp_connect(c->tcp, c->rank, c->size, c->root, MEET_MS, &c->comm, &c->err);
    return NULL;
}

static inline void connect_all(uint32_t n, struct ckpt_comm **comm)
{
    struct connecting c[MOST];
    pthread_t thread[MOST];
    struct ckpt_err err = {0};

    for (uint32_t r = 0; r < n; r++) {
        c[r] = (struct connecting){.rank = r, .size = n};
        if (ckpt_tcp_listen("127.0.0.1", &c[r].tcp, &err) < 0)
            fail_msg("%s", err.text);
        c[r].root = ckpt_tcp_address(c[0].tcp);
    }
    for (uint32_t r = 0; r < n; r++)
        assert_int_equal(pthread_create(&thread[r], NULL, connect_one, &c[r]), 0);
    for (uint32_t r = 0; r < n; r++) {
        (void)pthread_join(thread[r], NULL);
        if (c[r].rc < 0)
            fail_msg("rank %u: %s", r, c[r].err.text);
        comm[r] = c[r].comm;
    }
}

static inline void make_comms(bool tcp, uint32_t n, struct ckpt_comm **comm)
{
    struct ckpt_err err = {0};

    if (tcp)
        connect_all(n, comm);
    else if (ckpt_comm_threads(n, comm, &err) < 0)
        fail_msg("%s", err.text);
}

static inline void *play_one(void *arg)
{
    struct member *m = arg;

    m->play(m);
    ckpt_comm_free(m->comm);
    return NULL;
}

/* Everybody plays, in a thread of its own. */
static inline void team(bool tcp, uint32_t n, struct ckpt_view *view, int step, play_fn *play,
                        struct member *m)
{
    struct ckpt_comm *comm[MOST];
    pthread_t thread[MOST];

    make_comms(tcp, n, comm);
    for (uint32_t r = 0; r < n; r++)
        m[r] = (struct member){
            .comm = comm[r], .view = view, .rank = r, .size = n, .play = play, .step = step};
    for (uint32_t r = 0; r < n; r++)
        assert_int_equal(pthread_create(&thread[r], NULL, play_one, &m[r]), 0);
    for (uint32_t r = 0; r < n; r++)
        (void)pthread_join(thread[r], NULL);
}

/* ---- loads ---- */

struct loading {
    struct ckpt_load *load;
    unsigned char **mem;
    size_t n;
};

static inline void loading_end(struct loading *l)
{
    ckpt_load_free(l->load);
    for (size_t i = 0; i < l->n; i++)
        free(l->mem[i]);
    free(l->mem);
}

/* Declare a layout and give it memory. */
static inline int loading_begin(struct member *m, const char *layout,
                                const struct ckpt_load_options *more, struct loading *l)
{
    struct ckpt_load_options opt = more ? *more : (struct ckpt_load_options){0};

    opt.size = sizeof opt;
    if (opt.readers == CKPT_READERS_AUTO)
        opt.readers = CKPT_READERS_ONCE;
    if (opt.exchange_timeout_ms == 0)
        opt.exchange_timeout_ms = DEADLINE_MS;
    *l = (struct loading){0};
    if (ckpt_load_new(m->view, m->comm, &opt, &l->load, &m->err) < 0 ||
        ckpt_load_want_layout(l->load, layout, &m->err) < 0)
        return -1;
    l->n = ckpt_load_wants(l->load);
    l->mem = calloc(l->n + 1, sizeof *l->mem);
    for (size_t i = 0; i < l->n; i++) {
        struct ckpt_want_info info = {.size = sizeof info};
        (void)ckpt_load_want_info(l->load, i, &info, NULL);
        l->mem[i] = malloc(info.nbytes + 1);
        const struct ckpt_dest dest = {.size = sizeof dest, .ptr = l->mem[i]};
        if (ckpt_load_set_dest(l->load, i, &dest, &m->err) < 0)
            return -1;
    }
    return 0;
}

static inline int check_bytes(struct member *m, const struct loading *l)
{
    for (size_t i = 0; i < l->n; i++) {
        struct ckpt_want_info info = {.size = sizeof info};
        size_t index;
        (void)ckpt_load_want_info(l->load, i, &info, NULL);
        unsigned char *want = malloc(info.nbytes + 1);
        bool good = ckpt_view_find_tensor(m->view, info.tensor, &index) &&
                    (info.nbytes == 0 ||
                     (ckpt_view_box_pread(m->view, index, info.lo, info.n, want, &m->err) == 0 &&
                      memcmp(want, l->mem[i], info.nbytes) == 0));
        free(want);
        if (!good) {
            (void)snprintf(m->err.text, sizeof m->err.text, "'%s' is wrong", info.tensor);
            m->err.code = CKPT_CONFLICT;
            return -1;
        }
    }
    return 0;
}

static inline int load_once(struct member *m, const char *layout,
                            const struct ckpt_load_options *opt)
{
    struct loading l;
    int rc = loading_begin(m, layout, opt, &l);

    if (rc == 0)
        rc = ckpt_load_plan(l.load, &m->err);
    if (rc == 0)
        rc = ckpt_load_start(l.load, &m->err);
    while (rc == 0 && (rc = ckpt_load_wait(l.load, 0, &m->err)) == 1)
        rc = ckpt_load_wait(l.load, 5, &m->err) < 0 ? -1 : 0; /* both ways to look */
    if (rc == 0)
        rc = check_bytes(m, &l);
    m->stats.size = sizeof m->stats;
    (void)ckpt_load_stats(l.load, NULL, &m->stats, NULL);
    loading_end(&l);
    return rc;
}

static inline void check_good(const struct member *m, uint32_t n)
{
    for (uint32_t r = 0; r < n; r++)
        if (m[r].rc < 0)
            fail_msg("rank %u: %s", r, m[r].err.text);
}

#endif
