/* SPDX-License-Identifier: Apache-2.0 */
/* The life of a comm, and control messages. */
#include "comm/comm.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/ckd.h"
#include "base/clock.h"
#include "base/err.h"
#include "base/mem.h"

enum {
    /* The pause between two heartbeats; less where the timeout is short (ckpt_comm_heartbeat). A
     * rank has at most 33 neighbours in the tree, so this is nothing to a network, and 1/60 of the
     * usual timeout, so that some may be late. */
    HEARTBEAT_MS = 5000,
    SAY_MS = 10 * 1000,       /* a wait is told to the user after so long, ... */
    SAY_AGAIN_MS = 30 * 1000, /* ... and then so often */
    LISTED = 8,               /* ranks of a list in a message */
};

/* ---- life ---- */

int ckpt_comm_wrap(struct ckpt_xport *x, struct ckpt_comm **ret, struct ckpt_err *err)
{
    struct ckpt_comm *comm = calloc(1, sizeof *comm);

    if (comm)
        comm->peer = calloc(x->size, sizeof *comm->peer);
    if (!comm || !comm->peer) {
        x->ops->free(x);
        free(comm);
        return ckpt_nomem(err);
    }
    comm->x = x;
    *ret = comm;
    return 0;
}

void ckpt_ctl_free(struct ckpt_ctl_message *m)
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
        ckpt_ctl_free(m);
    }
    free(comm->x->host);
    comm->x->ops->free(comm->x);
    free(comm->peer);
    free(comm->doing);
    free(comm);
}

void ckpt_comm_name_hosts(struct ckpt_comm *comm, const char *const *host)
{
    const uint32_t n = comm->x->size;
    size_t len = n * sizeof *host;

    for (uint32_t r = 0; r < n; r++)
        len += strlen(host[r]) + 1;
    free(comm->x->host);
    if (!(comm->x->host = malloc(len))) /* the pointers, and then the names */
        return;
    char *at = (char *)(comm->x->host + n);
    for (uint32_t r = 0; r < n; r++) {
        comm->x->host[r] = at;
        at = stpcpy(at, host[r]) + 1;
    }
}

struct ckpt_xport *ckpt_comm_xport(const struct ckpt_comm *comm) { return comm->x; }

uint32_t ckpt_comm_rank(const struct ckpt_comm *comm) { return comm->x->rank; }

uint32_t ckpt_comm_size(const struct ckpt_comm *comm) { return comm->x->size; }

const char *ckpt_comm_transport(const struct ckpt_comm *comm) { return comm->x->ops->name; }

void ckpt_comm_set_log(struct ckpt_comm *comm, ckpt_comm_log *log, void *ctx)
{
    comm->log = log;
    comm->log_ctx = ctx;
}

void ckpt_comm_set_doing(struct ckpt_comm *comm, const char *what, const char *name)
{
    free(comm->doing);
    comm->doing = what ? ckpt_asprintf("%s '%s'", what, name) : NULL;
}

/* ---- waits ---- */

void ckpt_wait_begin(struct ckpt_wait *w)
{
    w->since_ms = ckpt_now_ms();
    w->next_ms = w->since_ms + SAY_MS;
}

bool ckpt_wait_is_long(struct ckpt_wait *w)
{
    if (ckpt_now_ms() < w->next_ms)
        return false;
    w->next_ms += SAY_AGAIN_MS;
    return true;
}

void ckpt_list_rank(struct ckpt_str *list, uint32_t n, uint32_t rank)
{
    if (n < LISTED)
        ckpt_str_printf(list, "%s%" PRIu32, n ? ", " : "rank ", rank);
    else if (n == LISTED)
        ckpt_str_puts(list, " ...");
}

/* ---- messages ---- */

void ckpt_comm_send(struct ckpt_comm *comm, uint32_t peer, enum ckpt_ctl type, const void *data,
                    size_t len)
{
    const struct ckpt_ctl_head head = {type, comm->epoch};
    ckpt_cleanup(ckpt_freep) unsigned char *msg = malloc(sizeof head + len);

    if (!msg)
        return;
    memcpy(msg, &head, sizeof head);
    memcpy(msg + sizeof head, data, len);
    (void)comm->x->ops->ctl_send(comm->x, peer, msg, sizeof head + len, NULL);
}

static void take_heartbeat(struct ckpt_comm *comm, uint32_t peer, const void *data)
{
    struct ckpt_heartbeat beat;

    memcpy(&beat, data, sizeof beat);
    comm->peer[peer].rounds = beat.rounds;
    if (beat.idle_ms < comm->peer[peer].heard_ms)
        comm->busy_ms = ckpt_max_u64(comm->busy_ms, comm->peer[peer].heard_ms - beat.idle_ms);
}

/* Keep a message in comm->held until somebody waits for it. */
static void hold(struct ckpt_comm *comm, struct ckpt_ctl_message *m)
{
    struct ckpt_ctl_message **at = &comm->held;

    while (*at)
        at = &(*at)->next;
    m->next = NULL;
    *at = m;
}

/* Receive one control message; takes it. */
static void take_in(struct ckpt_comm *comm, struct ckpt_ctl_message *m)
{
    struct ckpt_ctl_head head = {0};

    comm->peer[m->peer].heard_ms = ckpt_now_ms();
    if (m->len >= sizeof head)
        memcpy(&head, m->data, sizeof head);
    if (head.type == CKPT_CTL_HEARTBEAT && m->len == sizeof head + sizeof(struct ckpt_heartbeat))
        take_heartbeat(comm, m->peer, m->data + sizeof head);
    if (head.type == CKPT_CTL_ROUND || head.type == CKPT_CTL_ANSWER ||
        (head.type != CKPT_CTL_HEARTBEAT &&
         head.epoch > comm->epoch)) { /* a load that other ranks have begun */
        hold(comm, m);
        return;
    }
    if (head.type != CKPT_CTL_HEARTBEAT && head.epoch == comm->epoch && comm->on_message)
        comm->on_message(comm->ctx, m->peer, m->data, m->len);
    ckpt_ctl_free(m);
}

int ckpt_comm_poll(struct ckpt_comm *comm, bool *ret_moved, struct ckpt_err *err)
{
    struct ckpt_xport *x = comm->x;
    struct ckpt_ctl_message *m;
    bool moved = false;
    int got, rc = x->ops->progress(x, &moved, err);

    comm->npoll++;
    while ((got = x->ops->ctl_recv(x, &m, err)) > 0) {
        moved = true;
        take_in(comm, m);
    }
    if (got < 0)
        return -1;
    *ret_moved = moved;
    return rc;
}

void ckpt_comm_begin(struct ckpt_comm *comm,
                     void (*on_message)(void *ctx, uint32_t peer, const unsigned char *data,
                                        size_t len),
                     void *ctx)
{
    comm->epoch++;
    comm->busy = true;
    comm->on_message = on_message;
    comm->ctx = ctx;
    ckpt_comm_restart_clocks(comm);
    comm->begun_ms = comm->busy_ms;
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
        if (on_message)
            on_message(ctx, m->peer, m->data, m->len);
        ckpt_ctl_free(m);
    }
}

void ckpt_comm_end(struct ckpt_comm *comm)
{
    comm->on_message = NULL;
    comm->busy = false;
}

void ckpt_comm_renew(struct ckpt_comm *comm)
{
    if (!comm->failed)
        return;
    comm->failed = false;
    comm->renewed++;
    (void)comm->x->ops->cancel(comm->x); /* a rank whose own load succeeded has not cancelled */
    if (comm->x->ops->renew)
        comm->x->ops->renew(comm->x);
}

void ckpt_comm_heartbeat(struct ckpt_comm *comm, uint32_t timeout_ms)
{
    const uint64_t now = ckpt_now_ms(), every = ckpt_min_u64(HEARTBEAT_MS, timeout_ms / 16);
    const struct ckpt_heartbeat beat = {comm->said,
                                        (uint32_t)ckpt_min_u64(now - comm->busy_ms, UINT32_MAX)};

    if (comm->x->size == 1 || now - comm->beat_ms < every)
        return;
    comm->beat_ms = now;
    for (uint32_t i = 0, peer; ckpt_tree_neighbour(comm->x->rank, comm->x->size, i, &peer); i++)
        ckpt_comm_send(comm, peer, CKPT_CTL_HEARTBEAT, &beat, sizeof beat);
}

int ckpt_comm_check_heard(const struct ckpt_comm *comm, uint32_t peer, uint32_t timeout_ms,
                          struct ckpt_err *err)
{
    return ckpt_now_ms() <= comm->peer[peer].heard_ms + timeout_ms
               ? 0
               : ckpt_fail(err, CKPT_TIMEOUT, "%s sent nothing for %.1f s%s%s",
                           ckpt_xport_rank_text(comm->x, peer).text, timeout_ms / 1000.0,
                           comm->doing ? "; it is waited for to " : "",
                           comm->doing ? comm->doing : "");
}

void ckpt_comm_restart_clocks(struct ckpt_comm *comm)
{
    comm->busy_ms = ckpt_now_ms();
    for (uint32_t r = 0; r < comm->x->size; r++)
        comm->peer[r].heard_ms = comm->busy_ms;
}

bool ckpt_comm_lost(struct ckpt_comm *comm, uint32_t peer)
{
    if (!comm->x->ops->gone || !comm->x->ops->gone(comm->x, peer))
        return false;
    if (comm->peer[peer].gone_poll == 0)
        comm->peer[peer].gone_poll = comm->npoll;
    return comm->npoll > comm->peer[peer].gone_poll;
}

struct ckpt_rank_text ckpt_xport_rank_text(const struct ckpt_xport *x, uint32_t rank)
{
    struct ckpt_rank_text ret;

    (void)snprintf(ret.text, sizeof ret.text, "rank %" PRIu32 "%s%s", rank, x->host ? " on " : "",
                   x->host ? x->host[rank] : "");
    return ret;
}

int ckpt_xport_check_nomem(const struct ckpt_xport *x, uint32_t peer, struct ckpt_err *err)
{
    return x->nomem_peer != peer + 1
               ? 0
               : ckpt_fail(err, CKPT_NOMEM,
                           "rank %" PRIu32 ": out of memory for a message of rank %" PRIu32,
                           x->rank, peer);
}

int ckpt_xport_fail_gone(const struct ckpt_xport *x, uint32_t peer, struct ckpt_err *err)
{
    if (ckpt_xport_check_nomem(x, peer, err) < 0)
        return -1;
    return ckpt_fail(err, CKPT_PEER, "%s is gone", ckpt_xport_rank_text(x, peer).text);
}
