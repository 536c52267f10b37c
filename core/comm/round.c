/* SPDX-License-Identifier: Apache-2.0 */
/* Rounds: each rank sends the data of its subtree to its parent in one message, and rank 0's answer
 * travels down the tree. */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "base/clock.h"
#include "base/err.h"
#include "base/mem.h"
#include "comm/comm.h"
#include "comm/env.h"
#include "comm/secret.h"

enum {
    SLEEP_MS = 50, /* the longest sleep between two looks at clocks and peers; messages wake it */
    WORDS = 6,     /* words before the text of a message */
    RECORD = 12,   /* bytes before a rank's data: its number, the length */
};

/* ---- messages: six words (head, number of the round, error code, length of its text, the rank
 * that failed), the text, data ---- */

static int round_message(struct ckpt_comm *comm, enum ckpt_ctl type, uint32_t number,
                         const struct ckpt_status *v, const void *data, size_t len,
                         struct ckpt_str *out)
{
    const bool failed = v->why.code != CKPT_OK;
    const uint32_t text_len = failed ? (uint32_t)strlen(v->why.text) : 0;
    const uint32_t words[WORDS] = {type,     comm->epoch, number, (uint32_t)v->why.code,
                                   text_len, v->rank};

    ckpt_str_append(out, (const char *)words, sizeof words);
    ckpt_str_append(out, v->why.text, text_len);
    if (!failed)
        ckpt_str_append(out, data, len);
    return out->failed ? -1 : 0;
}

/* False: the message is broken. */
static bool round_parse(const struct ckpt_ctl_message *m, struct ckpt_status *ret,
                        const unsigned char **ret_data, size_t *ret_len)
{
    uint32_t words[WORDS];

    *ret = (struct ckpt_status){0};
    if (m->len < sizeof words)
        return false;
    memcpy(words, m->data, sizeof words);
    if (words[4] > m->len - sizeof words || words[4] >= CKPT_ERR_TEXT ||
        words[3] > CKPT_CANCELLED || (words[3] != CKPT_OK && words[4] == 0))
        return false;
    ret->why.code = (enum ckpt_code)words[3];
    memcpy(ret->why.text, m->data + sizeof words, words[4]);
    ret->why.text[words[4]] = '\0';
    ret->rank = words[5];
    *ret_data = m->data + sizeof words + words[4];
    *ret_len = m->len - sizeof words - words[4];
    return true;
}

/* Is it of this type? *ret_number: the round it belongs to. */
static bool is_of(const struct ckpt_ctl_message *m, enum ckpt_ctl type, uint32_t *ret_number)
{
    uint32_t words[3];

    if (m->len < sizeof words)
        return false;
    memcpy(words, m->data, sizeof words);
    *ret_number = words[2];
    return words[0] == (uint32_t)type;
}

/* Where comm->held has the message of this type and round; NULL stands there if there is none. */
static struct ckpt_ctl_message **find_held(struct ckpt_comm *comm, enum ckpt_ctl type,
                                           uint32_t number)
{
    struct ckpt_ctl_message **at = &comm->held;
    uint32_t its;

    while (*at && (!is_of(*at, type, &its) || its != number))
        at = &(*at)->next;
    return at;
}

/* Remove it from there. */
static struct ckpt_ctl_message *take_held(struct ckpt_comm *comm, enum ckpt_ctl type,
                                          uint32_t number)
{
    struct ckpt_ctl_message **at = find_held(comm, type, number), *m = *at;

    if (m)
        *at = m->next;
    return m;
}

/* Drop statuses of older rounds, which arrived after a hasty answer. */
static void drop_late(struct ckpt_comm *comm, uint32_t number)
{
    for (struct ckpt_ctl_message **at = &comm->held; *at;) {
        struct ckpt_ctl_message *m = *at;
        uint32_t its;
        if (!is_of(m, CKPT_CTL_ROUND, &its) || its >= number) {
            at = &m->next;
            continue;
        }
        *at = m->next;
        ckpt_ctl_free(m);
    }
}

/* Does the message report a failure? */
static bool is_failure(const struct ckpt_ctl_message *m)
{
    struct ckpt_status v;
    const unsigned char *data;
    size_t len;

    return !round_parse(m, &v, &data, &len) || v.why.code != CKPT_OK;
}

/* Send the answer to the children. If one of them is gone, the others still get it. LIMIT: it is
 * too long for all of them. */
static int send_down(struct ckpt_comm *comm, const void *msg, size_t len, struct ckpt_err *err)
{
    for (uint32_t k = 0; k < ckpt_tree_children(comm->x->rank, comm->x->size); k++) {
        struct ckpt_err gone = {0};
        if (comm->x->ops->ctl_send(comm->x, ckpt_tree_child(comm->x->rank, k), msg, len, &gone) <
                0 &&
            gone.code == CKPT_LIMIT)
            return ckpt_err_move(err, &gone);
    }
    return 0;
}

/* ---- beginning ---- */

/* Append a rank's data: its number, the length, the bytes. */
static void add_record(struct ckpt_str *s, uint32_t rank, const void *data, size_t len)
{
    const uint64_t length = len;

    ckpt_str_append(s, (const char *)&rank, sizeof rank);
    ckpt_str_append(s, (const char *)&length, sizeof length);
    ckpt_str_append(s, data, len);
}

/* Name this rank where it lacks memory, which says nothing about the other ranks. */
static void name_rank(const struct ckpt_comm *comm, struct ckpt_err *err)
{
    if (err->code == CKPT_NOMEM && comm->x->size > 1 && strncmp(err->text, "rank ", 5) != 0)
        (void)ckpt_err_in(err, "rank %" PRIu32, comm->x->rank);
}

/* A rank that has not begun the load yet gets its time from now on, unless this one has failed. */
static void restart_clocks(const struct ckpt_round *r, bool failed)
{
    struct ckpt_comm *comm = r->comm;

    if (!r->live)
        ckpt_comm_restart_clocks(comm);
    for (uint32_t k = 0; k < comm->x->size && !failed; k++)
        if (comm->peer[k].heard_ms <= comm->begun_ms)
            comm->peer[k].heard_ms = ckpt_now_ms();
}

int ckpt_round_start(struct ckpt_round *r, int rc, const struct ckpt_err *why, struct ckpt_err *err)
{
    struct ckpt_comm *comm = r->comm;
    const struct ckpt_err unknown = {CKPT_IO, "failed"};

    r->number = comm->round++;
    drop_late(comm, r->number);
    r->nfrom = 0;
    r->nchild = ckpt_tree_children(comm->x->rank, comm->x->size);
    r->answer = NULL;
    r->sent = false;
    r->data = (struct ckpt_str){0};
    r->status = (struct ckpt_status){.rank = comm->x->rank};
    if (rc < 0)
        r->status.why = why && why->code != CKPT_OK ? *why : unknown;
    name_rank(comm, &r->status.why);
    restart_clocks(r, rc < 0);
    r->from = calloc((size_t)r->nchild + 1, sizeof *r->from);
    add_record(&r->data, comm->x->rank, r->own, r->own_len);
    if (!r->from) {
        ckpt_round_release(r);
        return ckpt_nomem(err);
    }
    return 0;
}

void ckpt_round_release(struct ckpt_round *r)
{
    for (uint32_t k = 0; r->from && k < r->nchild; k++)
        ckpt_ctl_free(r->from[k]);
    free(r->from);
    r->from = NULL;
    ckpt_ctl_free(r->answer);
    r->answer = NULL;
    ckpt_str_release(&r->data);
    r->data = (struct ckpt_str){0};
}

/* ---- going up ---- */

/* Fail because a message of this peer was lost. */
static int fail_message(const struct ckpt_comm *comm, uint32_t peer, struct ckpt_err *err)
{
    if (ckpt_xport_check_nomem(comm->x, peer, err) < 0)
        return -1;
    return ckpt_fail(err, CKPT_FORMAT, "a message of rank %" PRIu32 " was lost", peer);
}

/* Fail if a message of this peer will not come: the peer is gone, was silent too long, or has sent
 * the message already (messages of a rank arrive in order, so that one was lost). */
static int check_peer(struct ckpt_round *r, uint32_t peer, struct ckpt_err *err)
{
    struct ckpt_comm *comm = r->comm;

    if (ckpt_comm_lost(comm, peer))
        return ckpt_xport_fail_gone(comm->x, peer, err);
    if (comm->peer[peer].rounds.up > r->number)
        return fail_message(comm, peer, err);
    return ckpt_comm_check_heard(comm, peer, r->timeout_ms, err);
}

/* The order in which errors explain a failure: codes that are often the consequence of another
 * rank's error come last. */
static int echo_of(enum ckpt_code code)
{
    switch (code) {
    case CKPT_OK:
        return 3;
    case CKPT_PEER:
        return 2;
    case CKPT_TIMEOUT:
    case CKPT_CANCELLED:
        return 1;
    default:
        return 0;
    }
}

/* Keep the error that explains most; of several, that of the lowest rank. */
static void add_status(struct ckpt_round *r, const struct ckpt_status *v)
{
    const int less = echo_of(v->why.code) - echo_of(r->status.why.code);

    if (less < 0 || (less == 0 && v->rank < r->status.rank))
        r->status = *v;
}

/* Take the message of a child, which is about its whole subtree. */
static void take_child(struct ckpt_round *r, uint32_t k)
{
    const struct ckpt_ctl_message *m = r->from[k];
    struct ckpt_status v;
    const unsigned char *data;
    size_t len;

    if (!round_parse(m, &v, &data, &len)) {
        v.rank = ckpt_tree_child(r->comm->x->rank, k);
        (void)ckpt_fail(&v.why, CKPT_FORMAT, "rank %" PRIu32 " sent a broken message", v.rank);
    } else if (len) {
        ckpt_str_append(&r->data, (const char *)data, len);
    }
    add_status(r, &v);
}

/* Receive the children's messages. False: some are missing, and may still come. */
static bool receive_children(struct ckpt_round *r)
{
    struct ckpt_comm *comm = r->comm;
    struct ckpt_ctl_message *m;
    struct ckpt_status missing = {.rank = UINT32_MAX};

    while ((m = take_held(comm, CKPT_CTL_ROUND, r->number))) {
        const uint32_t k = m->peer - ckpt_tree_child(comm->x->rank, 0);
        if (m->peer == 0 || k >= r->nchild || r->from[k]) {
            ckpt_ctl_free(m);
            continue;
        }
        r->from[k] = m;
        r->nfrom++;
        take_child(r, k);
    }
    if (r->nfrom == r->nchild || (r->hasty && r->status.why.code != CKPT_OK))
        return true;
    for (uint32_t k = 0; k < r->nchild; k++)
        if (!r->from[k] && check_peer(r, ckpt_tree_child(comm->x->rank, k), &missing.why) < 0)
            break;
    if (missing.why.code == CKPT_OK)
        return false;
    if (r->status.why.code == CKPT_OK)
        r->status = missing;
    return true;
}

/* Send this subtree's message to the parent. -1: the parent is gone. */
static int send_up(struct ckpt_round *r, struct ckpt_err *err)
{
    struct ckpt_comm *comm = r->comm;
    ckpt_cleanup(ckpt_str_release) struct ckpt_str s = {0};
    struct ckpt_err gone = {0};
    struct ckpt_status nomem = {.rank = comm->x->rank};

    if (r->data.failed) {
        (void)ckpt_nomem(&nomem.why);
        name_rank(comm, &nomem.why);
        add_status(r, &nomem);
    }
    if (round_message(comm, CKPT_CTL_ROUND, r->number, &r->status, r->data.ptr, r->data.len, &s) <
        0)
        return ckpt_nomem(err);
    r->sent = true;
    comm->said.up = r->number + 1;
    int rc = comm->x->ops->ctl_send(comm->x, ckpt_tree_parent(comm->x->rank), s.ptr, s.len, &gone);
    ckpt_str_release(&s);
    if (rc < 0 && gone.code == CKPT_LIMIT) { /* the error, which all ranks get, is short */
        struct ckpt_status more = {gone, comm->x->rank};
        (void)ckpt_err_in(&more.why, "rank %" PRIu32, comm->x->rank);
        add_status(r, &more);
        return send_up(r, err);
    }
    if (rc < 0 &&
        !*find_held(comm, CKPT_CTL_ANSWER, r->number)) /* it may have answered and ended */
        return ckpt_err_move(err, &gone);
    return 0;
}

/* ---- rank 0 ---- */

/* Find each rank's data in what has arrived. */
static int find_data(const struct ckpt_round *r, const unsigned char **data, size_t *len,
                     struct ckpt_err *err)
{
    const unsigned char *at = (const unsigned char *)r->data.ptr;
    const uint32_t size = r->comm->x->size;
    size_t left = r->data.len;
    uint32_t count = 0;

    while (left >= RECORD) {
        uint32_t rank;
        uint64_t n;
        memcpy(&rank, at, sizeof rank);
        memcpy(&n, at + sizeof rank, sizeof n);
        if (rank >= size || n > left - RECORD || data[rank])
            break;
        data[rank] = at + RECORD;
        len[rank] = n;
        at += RECORD + n;
        left -= RECORD + n;
        count++;
    }
    return left || count != size ? ckpt_fail(err, CKPT_FORMAT, "a rank sent a broken message") : 0;
}

/* Make the answer: all data has arrived, or some never will. */
static int make_answer(struct ckpt_round *r, struct ckpt_str *out)
{
    const uint32_t size = r->comm->x->size;
    ckpt_cleanup(ckpt_freep) const unsigned char **data = calloc(size, sizeof *data);
    ckpt_cleanup(ckpt_freep) size_t *len = calloc(size, sizeof *len);
    struct ckpt_err *why = &r->status.why;
    ckpt_cleanup(ckpt_str_release) struct ckpt_str body = {0};

    if (!data || !len || r->data.failed)
        (void)ckpt_nomem(why);
    else if (why->code == CKPT_OK)
        (void)find_data(r, data, len, why);
    if (why->code == CKPT_OK && r->reduce && r->reduce(r->ctx, data, len, &body, why) < 0 &&
        why->code == CKPT_OK)
        (void)ckpt_nomem(why);
    if (body.failed) /* the others get the error, which needs less */
        (void)ckpt_nomem(why);
    name_rank(r->comm, why);
    return round_message(r->comm, CKPT_CTL_ANSWER, r->number, &r->status, body.ptr, body.len, out);
}

static int answer_all(struct ckpt_round *r, struct ckpt_err *err)
{
    struct ckpt_str out = {0};

    r->sent = true;
    if (make_answer(r, &out) < 0 || !(r->answer = calloc(1, sizeof *r->answer))) {
        ckpt_str_release(&out);
        return ckpt_nomem(err);
    }
    if (send_down(r->comm, out.ptr, out.len, &r->status.why) < 0) { /* now the answer is that */
        (void)ckpt_err_in(&r->status.why, "rank 0");
        ckpt_str_release(&out);
        free(ckpt_steal(&r->answer));
        return answer_all(r, err);
    }
    r->comm->said.down = r->number + 1;
    r->answer->data = (unsigned char *)out.ptr;
    r->answer->len = out.len;
    return 0;
}

/* ---- going down ---- */

/* Forward the parent's answer to the children, or the error that there will be none. 1: not yet. */
static int await_answer(struct ckpt_round *r, struct ckpt_err *err)
{
    struct ckpt_comm *comm = r->comm;
    const uint32_t up = ckpt_tree_parent(comm->x->rank);
    struct ckpt_status none = {.rank = comm->x->rank};
    ckpt_cleanup(ckpt_str_release) struct ckpt_str out = {0};

    if ((r->answer = take_held(comm, CKPT_CTL_ANSWER, r->number))) {
        (void)send_down(comm, r->answer->data, r->answer->len, NULL);
        comm->said.down = r->number + 1;
        return 0;
    }
    if (ckpt_comm_lost(comm, up))
        (void)ckpt_xport_fail_gone(comm->x, up, err);
    else if (comm->peer[up].rounds.down > r->number)
        (void)fail_message(comm, up, err);
    else if (ckpt_comm_check_heard(comm, up, r->timeout_ms, err) == 0)
        return 1;
    if (r->status.why.code != CKPT_OK) /* the parent may be gone because of that */
        *err = r->status.why;
    none.why = *err;
    if (round_message(comm, CKPT_CTL_ANSWER, r->number, &none, NULL, 0, &out) == 0)
        (void)send_down(comm, out.ptr, out.len, NULL);
    return -1;
}

/* While children are awaited: is the parent still there? */
static int check_above(const struct ckpt_round *r, struct ckpt_err *err)
{
    const uint32_t up = ckpt_tree_parent(r->comm->x->rank);

    return ckpt_comm_lost(r->comm, up) ? ckpt_xport_fail_gone(r->comm->x, up, err) : 1;
}

int ckpt_round_step(struct ckpt_round *r, const unsigned char **ret_data, size_t *ret_len,
                    struct ckpt_err *err)
{
    struct ckpt_status v;
    const bool root = r->comm->x->rank == 0;
    int rc = 0;

    if (!r->sent && *find_held(r->comm, CKPT_CTL_ANSWER, r->number))
        r->sent = true; /* another rank has failed: nobody waits for this rank's message */
    if (!r->sent && !receive_children(r))
        rc = root ? 1 : check_above(r, err);
    else if (!r->sent)
        rc = root ? answer_all(r, err) : send_up(r, err);
    if (rc == 0 && !r->answer)
        rc = await_answer(r, err);
    if (rc != 0)
        return rc;
    if (!round_parse(r->answer, &v, ret_data, ret_len))
        return ckpt_fail(err, CKPT_FORMAT, "rank 0 sent a broken message");
    return v.why.code == CKPT_OK ? 0 : ckpt_fail(err, v.why.code, "%s", v.why.text);
}

/* ---- a whole round ---- */

/* On rank 0: say which children's messages are missing. */
static void say_missing(const struct ckpt_round *r, const struct ckpt_wait *wait)
{
    const struct ckpt_comm *comm = r->comm;
    ckpt_cleanup(ckpt_str_release) struct ckpt_str text = {0};
    uint32_t n = 0;

    ckpt_str_puts(&text, "waiting for ");
    for (uint32_t k = 0; k < r->nchild; k++)
        if (!r->from[k])
            ckpt_list_rank(&text, n++, ckpt_tree_child(0, k));
    ckpt_str_printf(&text, "%s for %.0f s now%s%s",
                    comm->x->size > CKPT_TREE_FAN + 1 ? " (or ranks that wait there)" : "",
                    (double)(ckpt_now_ms() - wait->since_ms) / 1000, comm->doing ? ", to " : "",
                    comm->doing ? comm->doing : "");
    if (n && !text.failed)
        comm->log(comm->log_ctx, text.ptr);
}

int ckpt_round_run(struct ckpt_round *r, int rc, unsigned char **ret, size_t *ret_len,
                   struct ckpt_err *err)
{
    const struct ckpt_err why = rc < 0 && err ? *err : (struct ckpt_err){0};
    struct ckpt_err own = {0};
    const unsigned char *answer = NULL;
    size_t answer_len = 0;
    struct ckpt_wait wait;

    ckpt_wait_begin(&wait);
    rc = ckpt_round_start(r, rc, &why, &own);
    while (rc == 0) {
        bool moved;
        (void)ckpt_comm_poll(r->comm, &moved, NULL);
        int step = ckpt_round_step(r, &answer, &answer_len, &own);
        if (step <= 0) {
            rc = step;
            break;
        }
        ckpt_comm_heartbeat(r->comm, r->timeout_ms);
        if (r->comm->x->rank == 0 && r->comm->log && ckpt_wait_is_long(&wait))
            say_missing(r, &wait);
        if (!moved)
            r->comm->x->ops->wait(r->comm->x, SLEEP_MS);
    }
    if (rc == 0 && ret) { /* in the message's own memory: a rank without more must not fail alone */
        *ret_len = answer_len;
        *ret = ckpt_steal(&r->answer->data);
        memmove(*ret, answer, answer_len);
    }
    ckpt_round_release(r);
    if (rc < 0 && err)
        *err = own;
    return rc;
}

/* The answer is what rank 0 has given. */
static int reduce_broadcast(void *ctx, const unsigned char *const *data, const size_t *len,
                            struct ckpt_str *answer, struct ckpt_err *err)
{
    (void)ctx;
    ckpt_str_append(answer, (const char *)data[0], len[0]);
    return answer->failed ? ckpt_nomem(err) : 0;
}

int ckpt_comm_broadcast(struct ckpt_comm *comm, int rc, void *data, size_t len, uint32_t timeout_ms,
                        struct ckpt_err *err)
{
    const size_t own_len = comm->x->rank == 0 ? len : 0;
    struct ckpt_round round = {.comm = comm,
                               .timeout_ms = timeout_ms,
                               .own = data,
                               .own_len = own_len,
                               .reduce = reduce_broadcast};
    ckpt_cleanup(ckpt_freep) unsigned char *answer = NULL;
    size_t got = 0;

    if (ckpt_round_run(&round, rc, &answer, &got, err) < 0)
        return -1;
    if (got != len)
        return ckpt_fail(err, CKPT_CONFLICT, "rank 0 runs another version of ckptfs");
    memcpy(data, answer, len);
    return 0;
}

/* A rank that has rank 0's secret proves it by a keyed hash of these bytes: rank 0's random number,
 * and the rank itself. */
struct membership {
    unsigned char nonce[CKPT_NONCE_BYTES];
    uint32_t rank, size;
};

static int reduce_proofs(void *ctx, const unsigned char *const *data, const size_t *len,
                         struct ckpt_str *answer, struct ckpt_err *err)
{
    struct membership *of = ctx;
    unsigned char proof[CKPT_PROOF_BYTES];
    ckpt_cleanup(ckpt_str_release) struct ckpt_str others = {0};
    uint32_t n = 0;

    (void)answer;
    for (of->rank = 0; of->rank < of->size; of->rank++) {
        ckpt_secret_prove("member", of, sizeof *of, proof);
        if (len[of->rank] != sizeof proof || !ckpt_secret_equal(proof, data[of->rank]))
            ckpt_list_rank(&others, n++, of->rank);
    }
    return n ? ckpt_fail(err, CKPT_CONFLICT,
                         "%s: another CKPTFS_SECRET than on rank 0, or none: set the same one on "
                         "all ranks",
                         ckpt_str_get(&others))
             : 0;
}

/* Compare the secrets of all ranks. */
static int prove_membership(struct ckpt_comm *comm, struct ckpt_err *err)
{
    struct membership own = {.rank = comm->x->rank, .size = comm->x->size}, of = own;
    unsigned char proof[CKPT_PROOF_BYTES];
    struct ckpt_round round = {
        .comm = comm, .own = proof, .own_len = sizeof proof, .reduce = reduce_proofs, .ctx = &of};
    uint32_t ms = 60 * 1000; /* if CKPTFS_MEET_TIMEOUT is wrong, all ranks hear of that */
    bool set;
    int rc = ckpt_secret_is_set(&set, err);

    if (rc == 0)
        rc = ckpt_comm_rendezvous_ms(&ms, err);
    if (rc == 0 && getrandom(own.nonce, sizeof own.nonce, 0) != sizeof own.nonce)
        rc = ckpt_fail_errno(err, errno, "random numbers");
    if (rc < 0)
        (void)ckpt_err_in(err, "rank %" PRIu32, own.rank);
    if (ckpt_comm_broadcast(comm, rc, own.nonce, sizeof own.nonce, ms, err) < 0)
        return -1;
    of = own;
    ckpt_secret_prove("member", &own, sizeof own, proof);
    round.timeout_ms = ms;
    return ckpt_round_run(&round, 0, NULL, NULL, err);
}

int ckpt_comm_wrap_members(struct ckpt_xport *x, struct ckpt_comm **ret, struct ckpt_err *err)
{
    struct ckpt_comm *comm;

    if (ckpt_comm_wrap(x, &comm, err) < 0)
        return -1;
    if (prove_membership(comm, err) < 0) {
        ckpt_comm_free(comm);
        return -1;
    }
    *ret = comm;
    return 0;
}

int ckpt_comm_agree(struct ckpt_comm *comm, int rc, uint32_t timeout_ms, struct ckpt_err *err)
{
    struct ckpt_round round = {.comm = comm, .timeout_ms = timeout_ms, .hasty = true};
    struct ckpt_err own = {0};

    if (rc < 0 && err && comm->x->size > 1) {
        (void)ckpt_fail(&own, err->code ? err->code : CKPT_IO, "rank %" PRIu32 ": %s",
                        comm->x->rank, err->text);
        *err = own;
    }
    return ckpt_round_run(&round, rc, NULL, NULL, err);
}

int ckpt_comm_look(struct ckpt_comm *comm, struct ckpt_err *err)
{
    bool moved;

    (void)ckpt_comm_poll(comm, &moved, NULL);
    for (const struct ckpt_ctl_message *m = comm->held; m; m = m->next) {
        uint32_t its;
        if ((is_of(m, CKPT_CTL_ROUND, &its) || is_of(m, CKPT_CTL_ANSWER, &its)) &&
            its == comm->round && is_failure(m))
            return 1;
    }
    for (uint32_t r = 0; r < comm->x->size; r++)
        if (r != comm->x->rank && ckpt_comm_lost(comm, r))
            return ckpt_xport_fail_gone(comm->x, r, err);
    return 0;
}
