/* SPDX-License-Identifier: Apache-2.0 */
/* ckpt_comm_step: all ranks load the step that rank 0 chooses. */
#include <inttypes.h>
#include <string.h>
#include <unistd.h>

#include "base/ckd.h"
#include "base/clock.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/str.h"
#include "comm/comm.h"

enum {
    SEEN_MS = 35 * 1000, /* NFS clients may show an old list of steps for 30 s, while they cache
                            attributes; with half of it such ranks fail the load */
    LOOK_MS = 200,       /* between two looks at the list */
};

/* The name of the step that this rank asks for; NULL: it leaves the choice to rank 0. A step that
 * this rank does not see (yet) is taken for a name as it is. */
static int own_step(struct ckpt_run *run, const char *step, bool first, char **ret,
                    struct ckpt_err *err)
{
    struct ckpt_err why = {0};

    *ret = NULL;
    if (!step && !first)
        return 0;
    if (ckpt_run_find_step(run, step, ret, &why) == 0)
        return 0;
    if (first || why.code != CKPT_MISSING)
        return ckpt_err_move(err, &why);
    return (*ret = strdup(step)) ? 0 : ckpt_nomem(err);
}

static int has_step(struct ckpt_run *run, const char *name, bool *ret, struct ckpt_err *err)
{
    struct ckpt_step *step = NULL;
    size_t n = 0;

    if (ckpt_run_steps(run, &step, &n, err) < 0)
        return -1;
    *ret = false;
    for (size_t i = 0; i < n && !*ret; i++)
        *ret = strcmp(step[i].name, name) == 0;
    ckpt_steps_free(step, n);
    return 0;
}

/* Wait until this rank sees the step, too. */
static int await_step(struct ckpt_run *run, const char *name, uint32_t timeout_ms,
                      struct ckpt_err *err)
{
    const uint64_t until = ckpt_now_ms() + ckpt_min_u64(SEEN_MS, timeout_ms / 4);
    bool seen = false;

    for (;;) {
        if (has_step(run, name, &seen, err) < 0)
            return -1;
        if (seen)
            return 0;
        if (ckpt_now_ms() >= until)
            return ckpt_fail(err, CKPT_MISSING, "the run has no step '%s' here, which rank 0 loads",
                             name);
        (void)usleep(LOOK_MS * 1000);
        if (ckpt_run_scan(run, NULL, err) < 0)
            return -1;
    }
}

static int reduce_step(void *ctx, const unsigned char *const *data, const size_t *len,
                       struct ckpt_str *answer, struct ckpt_err *err)
{
    const struct ckpt_comm *comm = ctx;

    for (uint32_t r = 1; r < comm->x->size; r++)
        if (len[r] && (len[r] != len[0] || memcmp(data[r], data[0], len[0]) != 0))
            return ckpt_fail(err, CKPT_CONFLICT,
                             "rank %" PRIu32 " was told to load step '%.*s', rank 0 loads '%.*s'",
                             r, (int)ckpt_min_u64(len[r], 200), (const char *)data[r], (int)len[0],
                             (const char *)data[0]);
    ckpt_str_append(answer, (const char *)data[0], len[0]);
    return answer->failed ? ckpt_nomem(err) : 0;
}

int ckpt_comm_step(struct ckpt_comm *comm, struct ckpt_run *run, const char *step,
                   uint32_t timeout_ms, char **ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *own = NULL;
    ckpt_cleanup(ckpt_freep) unsigned char *answer = NULL;
    const bool first = comm->x->rank == 0;
    int rc = own_step(run, step, first, &own, err);
    struct ckpt_round round = {.comm = comm,
                               .timeout_ms = timeout_ms,
                               .own = own,
                               .own_len = own ? strlen(own) : 0,
                               .reduce = reduce_step,
                               .ctx = comm};
    size_t len = 0;

    if (ckpt_round_run(&round, rc, &answer, &len, err) < 0)
        return -1;
    answer[len] = '\0'; /* ckpt_round_run leaves room for one more byte */
    rc = first ? 0 : await_step(run, (char *)answer, timeout_ms, err);
    if (ckpt_comm_agree(comm, rc, timeout_ms, err) < 0)
        return -1;
    *ret = (char *)ckpt_steal(&answer);
    return 0;
}
