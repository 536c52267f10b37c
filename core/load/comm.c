/* SPDX-License-Identifier: Apache-2.0 */
/* Rounds over control messages. Messages to rank 0 go straight; its answers go down a binomial
 * tree. */
#include "load/comm.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/ckd.h"
#include "base/clock.h"
#include "base/err.h"
#include "base/mem.h"

enum { SLEEP_MS = 50, ALIVE_MS = 5000 };

/* ---- life ---- */

static void comm_release(struct ckpt_comm *comm)
{
    if (!comm)
        return;
    free(comm->heard_ms);
    free(comm->gone_poll);
    free(comm->begun);
    free(comm);
}

int ckpt_comm_wrap(struct ckpt_xport *x, struct ckpt_comm **ret, struct ckpt_err *err)
{
    struct ckpt_comm *comm = calloc(1, sizeof *comm);

    if (comm) {
        comm->x = x;
        comm->heard_ms = calloc(x->size, sizeof *comm->heard_ms);
        comm->gone_poll = calloc(x->size, sizeof *comm->gone_poll);
        comm->begun = calloc(x->size, sizeof *comm->begun);
    }
    if (!comm || !comm->heard_ms || !comm->gone_poll || !comm->begun) {
        x->ops->free(x);
        comm_release(comm);
        return ckpt_nomem(err);
    }
    *ret = comm;
    return 0;
}

static void message_free(struct ckpt_ctl_message *m)
{
    if (m)
        free(m->data);
    free(m);
}

void ckpt_comm_free(struct ckpt_comm *comm)
{
    if (!comm)
        return;
    while (comm->held) {
        struct ckpt_ctl_message *m = comm->held;
        comm->held = m->next;
        message_free(m);
    }
    comm->x->ops->free(comm->x);
    comm_release(comm);
}

int ckpt_comm_threads(uint32_t n, struct ckpt_comm **ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) struct ckpt_xport **x = calloc((size_t)n + 1, sizeof *x);
    int rc = 0;

    if (n == 0)
        return ckpt_fail(err, CKPT_USAGE, "a comm of no ranks");
    if (!x)
        return ckpt_nomem(err);
    if (ckpt_xport_threads(n, x, err) < 0)
        return -1;
    for (uint32_t r = 0; r < n; r++) {
        ret[r] = NULL;
        if (rc == 0)
            rc = ckpt_comm_wrap(x[r], &ret[r], err);
        else
            x[r]->ops->free(x[r]);
    }
    for (uint32_t r = 0; r < n && rc < 0; r++) {
        ckpt_comm_free(ret[r]);
        ret[r] = NULL;
    }
    return rc;
}

int ckpt_comm_self(struct ckpt_comm **ret, struct ckpt_err *err)
{
    return ckpt_comm_threads(1, ret, err);
}

struct ckpt_xport *ckpt_comm_xport(const struct ckpt_comm *comm) { return comm->x; }

void ckpt_comm_replace(struct ckpt_comm *comm, struct ckpt_xport *x) { comm->x = x; }

uint32_t ckpt_comm_rank(const struct ckpt_comm *comm) { return comm->x->rank; }

uint32_t ckpt_comm_size(const struct ckpt_comm *comm) { return comm->x->size; }

const char *ckpt_comm_transport(const struct ckpt_comm *comm) { return comm->x->ops->name; }

/* ---- messages ---- */

int ckpt_comm_send(struct ckpt_comm *comm, uint32_t peer, enum ckpt_ctl type, const void *data,
                   size_t len, struct ckpt_err *err)
{
    const struct ckpt_ctl_head head = {type, comm->epoch};
    ckpt_cleanup(ckpt_freep) unsigned char *msg = malloc(sizeof head + len);

    if (!msg)
        return ckpt_nomem(err);
    memcpy(msg, &head, sizeof head);
    if (len)
        memcpy(msg + sizeof head, data, len);
    return comm->x->ops->ctl_send(comm->x, peer, msg, sizeof head + len, err);
}

static int hold(struct ckpt_comm *comm, uint32_t peer, void *data, size_t len, struct ckpt_err *err)
{
    struct ckpt_ctl_message *m = malloc(sizeof *m), **at = &comm->held;

    if (!m) {
        free(data);
        return ckpt_nomem(err);
    }
    *m = (struct ckpt_ctl_message){.peer = peer, .len = len, .data = data};
    while (*at)
        at = &(*at)->next;
    *at = m;
    return 0;
}

/* Takes data. */
static int take_in(struct ckpt_comm *comm, uint32_t peer, void *data, size_t len,
                   struct ckpt_err *err)
{
    struct ckpt_ctl_head head = {0};

    comm->heard_ms[peer] = ckpt_now_ms();
    if (len >= sizeof head)
        memcpy(&head, data, sizeof head);
    if (head.type == CKPT_CTL_ALIVE && len == sizeof head + sizeof *comm->begun)
        memcpy(&comm->begun[peer], (unsigned char *)data + sizeof head, sizeof *comm->begun);
    if (head.type == CKPT_CTL_ROUND || head.type == CKPT_CTL_ANSWER ||
        (head.type != CKPT_CTL_ALIVE && head.epoch > comm->epoch)) /* a load that others began */
        return hold(comm, peer, data, len, err);
    if (head.type != CKPT_CTL_ALIVE && head.epoch == comm->epoch && comm->on_message)
        comm->on_message(comm->ctx, peer, data, len);
    free(data);
    return 0;
}

int ckpt_comm_poll(struct ckpt_comm *comm, bool *ret_moved, struct ckpt_err *err)
{
    struct ckpt_xport *x = comm->x;
    bool moved = false;
    int rc = x->ops->progress(x, &moved, err);

    comm->npoll++;
    for (;;) {
        uint32_t peer;
        void *data;
        size_t len;
        int got = x->ops->ctl_recv(x, &peer, &data, &len, err);
        if (got < 0)
            return -1;
        if (got == 0)
            break;
        moved = true;
        if (take_in(comm, peer, data, len, err) < 0)
            return -1;
    }
    *ret_moved = moved;
    return rc;
}

void ckpt_comm_begin(struct ckpt_comm *comm,
                     void (*on_message)(void *ctx, uint32_t peer, const unsigned char *data,
                                        size_t len),
                     void *ctx)
{
    const uint64_t now = ckpt_now_ms();

    comm->epoch++;
    comm->busy = true;
    comm->on_message = on_message;
    comm->ctx = ctx;
    for (uint32_t r = 0; r < comm->x->size; r++)
        comm->heard_ms[r] = now;
    for (struct ckpt_ctl_message **at = &comm->held; *at;) {
        struct ckpt_ctl_message *m = *at;
        struct ckpt_ctl_head head;
        memcpy(&head, m->data, sizeof head);
        if (head.type == CKPT_CTL_ROUND || head.type == CKPT_CTL_ANSWER ||
            head.epoch != comm->epoch) {
            at = &m->next;
            continue;
        }
        *at = m->next;
        on_message(ctx, m->peer, m->data, m->len);
        message_free(m);
    }
}

void ckpt_comm_end(struct ckpt_comm *comm)
{
    comm->on_message = NULL;
    comm->busy = false;
}

void ckpt_comm_begin_again(struct ckpt_comm *comm)
{
    ckpt_comm_end(comm);
    comm->epoch--;
}

void ckpt_comm_tell_alive(struct ckpt_comm *comm, uint32_t peer)
{
    (void)ckpt_comm_send(comm, peer, CKPT_CTL_ALIVE, &comm->round, sizeof comm->round, NULL);
}

void ckpt_comm_alive(struct ckpt_comm *comm, uint32_t timeout_ms)
{
    const uint64_t now = ckpt_now_ms(), every = ckpt_min_u64(ALIVE_MS, timeout_ms / 4);

    if (comm->x->size == 1 || now - comm->alive_ms < every)
        return;
    comm->alive_ms = now;
    if (comm->x->rank != 0)
        ckpt_comm_tell_alive(comm, 0);
    for (uint32_t r = 1; comm->x->rank == 0 && r < comm->x->size; r++)
        ckpt_comm_tell_alive(comm, r);
}

/* ---- rounds ---- */

/* [ctl head][number][code][text length][text][data] */
static int round_message(struct ckpt_comm *comm, enum ckpt_ctl type, uint32_t number,
                         const struct ckpt_err *why, const void *data, size_t len,
                         struct ckpt_str *out)
{
    const uint32_t text_len = why ? (uint32_t)strlen(why->text) : 0;
    const uint32_t words[5] = {type, comm->epoch, number, why ? (uint32_t)why->code : 0, text_len};

    ckpt_str_append(out, (const char *)words, sizeof words);
    if (text_len)
        ckpt_str_append(out, why->text, text_len);
    if (len)
        ckpt_str_append(out, data, len);
    return out->failed ? -1 : 0;
}

/* False: not a whole message. */
static bool round_parse(const struct ckpt_ctl_message *m, uint32_t *ret_number,
                        struct ckpt_err *ret_why, const unsigned char **ret_data, size_t *ret_len)
{
    uint32_t words[5];

    if (m->len < sizeof words)
        return false;
    memcpy(words, m->data, sizeof words);
    if (words[4] > m->len - sizeof words || words[4] >= CKPT_ERR_TEXT ||
        words[3] > CKPT_CANCELLED || (words[3] != CKPT_OK && words[4] == 0))
        return false;
    *ret_number = words[2];
    ret_why->code = (enum ckpt_code)words[3];
    memcpy(ret_why->text, m->data + sizeof words, words[4]);
    ret_why->text[words[4]] = '\0';
    *ret_data = m->data + sizeof words + words[4];
    *ret_len = m->len - sizeof words - words[4];
    return true;
}

/* Is it of this type, and which round's? */
static bool is_of(const struct ckpt_ctl_message *m, enum ckpt_ctl type, uint32_t *ret_number)
{
    uint32_t words[3];

    if (m->len < sizeof words)
        return false;
    memcpy(words, m->data, sizeof words);
    *ret_number = words[2];
    return words[0] == (uint32_t)type;
}

static bool is_held(const struct ckpt_comm *comm, enum ckpt_ctl type, uint32_t number)
{
    uint32_t its;

    for (const struct ckpt_ctl_message *m = comm->held; m; m = m->next)
        if (is_of(m, type, &its) && its == number)
            return true;
    return false;
}

/* Take out of comm->held the message of this type and round. */
static struct ckpt_ctl_message *take_held(struct ckpt_comm *comm, enum ckpt_ctl type,
                                          uint32_t number)
{
    for (struct ckpt_ctl_message **at = &comm->held; *at; at = &(*at)->next) {
        struct ckpt_ctl_message *m = *at;
        uint32_t its;
        if (!is_of(m, type, &its) || its != number)
            continue;
        *at = m->next;
        m->next = NULL;
        return m;
    }
    return NULL;
}

/* The answer goes on to the ranks below: r + 2^k for every 2^k above r. */
static int hand_on(struct ckpt_comm *comm, const void *msg, size_t len, struct ckpt_err *err)
{
    const uint32_t rank = comm->x->rank, size = comm->x->size;
    int rc = 0;

    for (uint64_t step = 1; step < size; step *= 2) /* one that is gone is no reason not to tell */
        if (step > rank && rank + step < size &&
            comm->x->ops->ctl_send(comm->x, (uint32_t)(rank + step), msg, len, err) < 0)
            rc = -1;
    return rc;
}

static uint32_t parent_of(uint32_t rank)
{
    uint32_t step = 1;

    while (step <= rank / 2)
        step *= 2;
    return rank - step;
}

/* Verdicts that came after a hasty answer. */
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
        message_free(m);
    }
}

/* Does the message say that a rank has failed? */
static bool is_failure(const struct ckpt_ctl_message *m)
{
    struct ckpt_err why = {0};
    const unsigned char *data;
    uint32_t number;
    size_t len;

    return !round_parse(m, &number, &why, &data, &len) || why.code != CKPT_OK;
}

int ckpt_round_start(struct ckpt_round *r, struct ckpt_comm *comm, int rc, const void *data,
                     size_t len, uint32_t timeout_ms, const struct ckpt_err *why,
                     struct ckpt_err *err)
{
    const uint64_t now = ckpt_now_ms();
    struct ckpt_str s = {0};
    const struct ckpt_err unknown = {CKPT_IO, "failed"};

    if (rc < 0 && (!why || why->code == CKPT_OK))
        why = &unknown;
    r->comm = comm;
    r->number = comm->round++;
    drop_late(comm, r->number);
    r->timeout_ms = timeout_ms;
    r->begin_ms = now;
    r->done = false;
    r->nfrom = 0;
    r->answer = NULL;
    r->from = NULL;
    for (uint32_t k = 0; k < comm->x->size; k++)
        comm->heard_ms[k] = now;
    if (comm->x->rank == 0 && !(r->from = calloc(comm->x->size, sizeof *r->from)))
        return ckpt_nomem(err);
    if (round_message(comm, CKPT_CTL_ROUND, r->number, rc < 0 ? why : NULL, data, len, &s) < 0) {
        ckpt_str_release(&s);
        return ckpt_nomem(err);
    }
    if (comm->x->rank == 0) {
        return hold(comm, 0, s.ptr, s.len, err);
    }
    struct ckpt_err gone = {0};
    rc = comm->x->ops->ctl_send(comm->x, 0, s.ptr, s.len, &gone);
    ckpt_str_release(&s);
    if (rc < 0 &&
        !is_held(comm, CKPT_CTL_ANSWER, r->number)) /* rank 0 may have answered and gone */
        return ckpt_fail(err, gone.code, "%s", gone.text);
    return 0;
}

void ckpt_round_release(struct ckpt_round *r)
{
    for (uint32_t k = 0; r->from && k < r->comm->x->size; k++)
        message_free(r->from[k]);
    free(r->from);
    r->from = NULL;
    message_free(r->answer);
    r->answer = NULL;
}

bool ckpt_comm_lost(struct ckpt_comm *comm, uint32_t peer)
{
    if (!comm->x->ops->gone || !comm->x->ops->gone(comm->x, peer))
        return false;
    if (comm->gone_poll[peer] == 0)
        comm->gone_poll[peer] = comm->npoll;
    return comm->npoll > comm->gone_poll[peer];
}

/* Who is not heard of: gone, silent too long, or waiting for us in vain (messages of a rank come in
 * their order). */
static int check_peer(struct ckpt_round *r, uint32_t peer, struct ckpt_err *err)
{
    struct ckpt_comm *comm = r->comm;

    if (ckpt_comm_lost(comm, peer))
        return ckpt_fail(err, CKPT_PEER, "rank %" PRIu32 " is gone", peer);
    if (comm->begun[peer] > r->number)
        return ckpt_fail(err, CKPT_FORMAT, "a message of rank %" PRIu32 " was lost", peer);
    if (ckpt_now_ms() - comm->heard_ms[peer] > r->timeout_ms)
        return ckpt_fail(err, CKPT_TIMEOUT, "rank %" PRIu32 " did not answer within %.1f s", peer,
                         r->timeout_ms / 1000.0);
    return 0;
}

/* Rank 0: all have been heard, or somebody never will be. */
static int make_answer(struct ckpt_round *r, struct ckpt_err *missing, struct ckpt_str *out)
{
    const uint32_t size = r->comm->x->size;
    ckpt_cleanup(ckpt_freep) const unsigned char **data = calloc(size, sizeof *data);
    ckpt_cleanup(ckpt_freep) size_t *len = calloc(size, sizeof *len);
    struct ckpt_str body = {0};
    struct ckpt_err why = {0};

    if (!data || !len)
        (void)ckpt_nomem(&why);
    for (uint32_t k = 0; k < size && data && len; k++) {
        struct ckpt_err verdict = {0};
        uint32_t number;
        if (!r->from[k])
            continue;
        if (!round_parse(r->from[k], &number, &verdict, &data[k], &len[k]))
            (void)ckpt_fail(&why, CKPT_FORMAT, "rank %" PRIu32 " sent a broken message", k);
        else if (verdict.code != CKPT_OK && why.code == CKPT_OK)
            why = verdict;
    }
    if (why.code == CKPT_OK && missing->code != CKPT_OK)
        why = *missing;
    if (why.code == CKPT_OK && r->judge && r->judge(r->ctx, data, len, &body, &why) < 0 &&
        why.code == CKPT_OK)
        (void)ckpt_nomem(&why);
    bool failed = why.code != CKPT_OK;
    int rc = body.failed ? -1
                         : round_message(r->comm, CKPT_CTL_ANSWER, r->number, failed ? &why : NULL,
                                         body.ptr, failed ? 0 : body.len, out);
    ckpt_str_release(&body);
    return rc;
}

static int step_root(struct ckpt_round *r, struct ckpt_err *err)
{
    const uint32_t size = r->comm->x->size;
    struct ckpt_ctl_message *m;
    struct ckpt_err missing = {0};
    struct ckpt_str out = {0};
    bool failed = false;

    while ((m = take_held(r->comm, CKPT_CTL_ROUND, r->number))) {
        if (r->from[m->peer]) {
            message_free(m);
            continue;
        }
        r->from[m->peer] = m;
        r->nfrom++;
    }
    for (uint32_t k = 0; k < size && r->hasty; k++)
        failed |= r->from[k] && is_failure(r->from[k]);
    for (uint32_t k = 0; k < size && r->nfrom < size; k++)
        if (!r->from[k] && check_peer(r, k, &missing) < 0)
            break;
    if (r->nfrom < size && missing.code == CKPT_OK && !failed)
        return 1;
    if (make_answer(r, &missing, &out) < 0) {
        ckpt_str_release(&out);
        return ckpt_nomem(err);
    }
    (void)hand_on(r->comm, out.ptr, out.len, NULL);
    if (!(r->answer = calloc(1, sizeof *r->answer))) {
        ckpt_str_release(&out);
        return ckpt_nomem(err);
    }
    r->answer->data = (unsigned char *)out.ptr;
    r->answer->len = out.len;
    return 0;
}

/* Others: wait for the answer from above, and hand it on; also that none will come. */
static int step_below(struct ckpt_round *r, struct ckpt_err *err)
{
    struct ckpt_comm *comm = r->comm;
    const uint32_t up = parent_of(comm->x->rank);
    struct ckpt_str out = {0};

    if ((r->answer = take_held(comm, CKPT_CTL_ANSWER, r->number))) {
        (void)hand_on(comm, r->answer->data, r->answer->len, NULL);
        return 0;
    }
    /* rank 0 notices first who is missing, and says so: it gets more time */
    if (ckpt_comm_lost(comm, up))
        (void)ckpt_fail(err, CKPT_PEER, "rank %" PRIu32 " is gone", up);
    else if (ckpt_now_ms() - comm->heard_ms[0] > (uint64_t)r->timeout_ms * 3 / 2 + 1000)
        (void)ckpt_fail(err, CKPT_TIMEOUT, "rank 0 did not answer within %.1f s",
                        r->timeout_ms * 1.5 / 1000 + 1);
    else
        return 1;
    if (round_message(comm, CKPT_CTL_ANSWER, r->number, err, NULL, 0, &out) == 0)
        (void)hand_on(comm, out.ptr, out.len, NULL);
    ckpt_str_release(&out);
    return -1;
}

int ckpt_round_step(struct ckpt_round *r, const unsigned char **ret_data, size_t *ret_len,
                    struct ckpt_err *err)
{
    struct ckpt_err why = {0};
    uint32_t number;

    if (!r->answer && r->comm->x->rank == 0) {
        int rc = step_root(r, err);
        if (rc != 0)
            return rc;
    } else if (!r->answer) {
        int rc = step_below(r, err);
        if (rc != 0)
            return rc;
    }
    r->done = true;
    if (!round_parse(r->answer, &number, &why, ret_data, ret_len))
        return ckpt_fail(err, CKPT_FORMAT, "rank 0 sent a broken message");
    return why.code == CKPT_OK ? 0 : ckpt_fail(err, why.code, "%s", why.text);
}

int ckpt_round_run(struct ckpt_round *r, struct ckpt_comm *comm, int rc, const void *data,
                   size_t len, uint32_t timeout_ms, unsigned char **ret_data, size_t *ret_len,
                   struct ckpt_err *err)
{
    const struct ckpt_err why = rc < 0 && err ? *err : (struct ckpt_err){0};
    struct ckpt_err own = {0};
    const unsigned char *answer = NULL;
    size_t answer_len = 0;

    rc = ckpt_round_start(r, comm, rc, data, len, timeout_ms, &why, &own);
    while (rc == 0) {
        bool moved;
        (void)ckpt_comm_poll(comm, &moved, NULL);
        int step = ckpt_round_step(r, &answer, &answer_len, &own);
        if (step <= 0) {
            rc = step;
            break;
        }
        if (!moved)
            comm->x->ops->wait(comm->x, SLEEP_MS);
    }
    if (rc == 0 && ret_data) {
        *ret_len = answer_len;
        *ret_data = malloc(answer_len + 1);
        if (*ret_data)
            memcpy(*ret_data, answer, answer_len);
        else
            rc = ckpt_nomem(&own);
    }
    ckpt_round_release(r);
    if (rc < 0 && err)
        *err = own;
    return rc;
}

struct shared {
    const void *data;
    size_t len;
};

static int judge_share(void *ctx, const unsigned char *const *data, const size_t *len,
                       struct ckpt_str *answer, struct ckpt_err *err)
{
    const struct shared *s = ctx;

    (void)data, (void)len;
    ckpt_str_append(answer, s->data, s->len);
    return answer->failed ? ckpt_nomem(err) : 0;
}

int ckpt_comm_share(struct ckpt_comm *comm, int rc, void *data, size_t len, uint32_t timeout_ms,
                    struct ckpt_err *err)
{
    struct shared s = {data, len};
    struct ckpt_round round = {.judge = judge_share, .ctx = &s};
    unsigned char *answer = NULL;
    size_t got = 0;

    rc = ckpt_round_run(&round, comm, rc, NULL, 0, timeout_ms, &answer, &got, err);
    if (rc == 0 && got != len)
        rc = ckpt_fail(err, CKPT_CONFLICT, "rank 0 runs another version of ckptfs");
    if (rc == 0)
        memcpy(data, answer, len);
    free(answer);
    return rc;
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
            return ckpt_fail(err, CKPT_PEER, "rank %" PRIu32 " is gone", r);
    return 0;
}

int ckpt_comm_agree(struct ckpt_comm *comm, int rc, uint32_t timeout_ms, struct ckpt_err *err)
{
    struct ckpt_round round = {.hasty = true};
    struct ckpt_err own = {0};

    if (rc < 0 && err && comm->x->size > 1) {
        (void)ckpt_fail(&own, err->code ? err->code : CKPT_IO, "rank %" PRIu32 ": %s",
                        comm->x->rank, err->text);
        *err = own;
    }
    return ckpt_round_run(&round, comm, rc, NULL, 0, timeout_ms, NULL, NULL, err);
}
