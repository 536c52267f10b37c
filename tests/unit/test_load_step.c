/* SPDX-License-Identifier: Apache-2.0 */
/* Which step all ranks load: the one that rank 0 chooses, and no other. */
#include <ckptfs/load.h>

#include "load_team.h"
#include "tree.h"

enum { RANKS = 3 };

static const struct tree *run_of[RANKS];
static bool is_late; /* the last rank's step 12 is saved after it has opened its run */
static uint32_t timeout_ms;
static const char *asked[RANKS]; /* the step that each rank asks for; NULL: none */
static char *chosen[RANKS];

static void play_step(struct member *m)
{
    struct ckpt_run *run = NULL;

    m->rc = ckpt_run_open(run_of[m->rank]->path, NULL, &run, &m->err);
    if (is_late && m->rank == RANKS - 1)
        nt_checkpoint(run_of[m->rank], "12/");
    if (m->rc == 0)
        m->rc = ckpt_comm_step(m->comm, run, asked[m->rank], timeout_ms, &chosen[m->rank], &m->err);
    if (run)
        ckpt_run_close(run);
}

/* Let all ranks choose; the steps of the run are 1, 10 and 12. */
static void choose(const char *zero, const char *one, const char *two, struct member *m)
{
    struct tree t;

    tree_open(&t);
    nt_checkpoint(&t, "1/");
    nt_checkpoint(&t, "10/");
    nt_checkpoint(&t, "12/");
    run_of[0] = run_of[1] = run_of[2] = &t;
    is_late = false;
    timeout_ms = DEADLINE_MS;
    asked[0] = zero;
    asked[1] = one;
    asked[2] = two;
    memset(chosen, 0, sizeof chosen);
    team(false, RANKS, NULL, 0, play_step, m);
    tree_close(&t);
}

TEST(step, all_ranks_load_what_rank_0_asks_for_or_its_latest)
{
    static const struct {
        const char *asked[RANKS], *want;
    } each[] = {
        {{NULL, NULL, NULL}, "12"}, {{"10", NULL, NULL}, "10"}, {{"10", "10", NULL}, "10"},
        {{"1", NULL, "1"}, "1"},    {{NULL, "12", "12"}, "12"},
    };
    struct member m[MOST];

    for (size_t i = 0; i < sizeof each / sizeof *each; i++) {
        choose(each[i].asked[0], each[i].asked[1], each[i].asked[2], m);
        check_good(m, RANKS);
        for (uint32_t r = 0; r < RANKS; r++) {
            CHECK_STR(chosen[r], each[i].want);
            CHECK_EQ(m[r].err.code, CKPT_OK); /* what succeeds leaves no error behind */
            free(chosen[r]);
        }
    }
}

TEST(step, a_rank_that_asks_for_another_one_is_told_to_all)
{
    static const struct {
        const char *asked[RANKS], *says;
    } each[] = {
        /* of one length, a longer and a shorter one that begin alike, and one that is not there */
        {{"10", NULL, "12"}, "rank 2 was told to load step '12', rank 0 loads '10'"},
        {{"1", "10", NULL}, "rank 1 was told to load step '10', rank 0 loads '1'"},
        {{"10", "10", "1"}, "rank 2 was told to load step '1', rank 0 loads '10'"},
        {{NULL, "10", "12"}, "rank 1 was told to load step '10', rank 0 loads '12'"},
        {{"12", NULL, "13"}, "rank 2 was told to load step '13', rank 0 loads '12'"},
    };
    struct member m[MOST];

    for (size_t i = 0; i < sizeof each / sizeof *each; i++) {
        choose(each[i].asked[0], each[i].asked[1], each[i].asked[2], m);
        for (uint32_t r = 0; r < RANKS; r++) {
            CHECK_EQ(m[r].rc, -1);
            CHECK_EQ(m[r].err.code, CKPT_CONFLICT);
            if (!strstr(m[r].err.text, each[i].says))
                fail_msg("'%s' does not say '%s'", m[r].err.text, each[i].says);
            CHECK(!chosen[r]);
        }
    }
}

TEST(step, a_rank_waits_until_it_sees_the_step_and_not_for_ever)
{
    struct member m[MOST];
    struct tree t, other;

    memset(asked, 0, sizeof asked);
    for (int late = 0; late < 2; late++) {
        tree_open(&t);
        tree_open(&other);
        nt_checkpoint(&t, "12/");
        nt_checkpoint(&other, "1/");
        run_of[0] = run_of[1] = &t;
        run_of[2] = &other;
        is_late = late;
        timeout_ms = late ? DEADLINE_MS : 1000; /* it waits for a quarter of that */
        memset(chosen, 0, sizeof chosen);
        team(false, RANKS, NULL, 0, play_step, m);
        tree_close(&t);
        tree_close(&other);
        for (uint32_t r = 0; r < RANKS; r++) {
            CHECK_EQ(m[r].rc, late ? 0 : -1);
            if (late)
                CHECK_STR(chosen[r], "12");
            else if (m[r].err.code != CKPT_MISSING ||
                     !strstr(m[r].err.text, "the run has no step '12' here, which rank 0 loads"))
                fail_msg("rank %u: %s", r, m[r].err.text);
            free(chosen[r]);
        }
    }
}

TESTS(T(step, a_rank_waits_until_it_sees_the_step_and_not_for_ever),
      T(step, all_ranks_load_what_rank_0_asks_for_or_its_latest),
      T(step, a_rank_that_asks_for_another_one_is_told_to_all))
