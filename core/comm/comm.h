/* SPDX-License-Identifier: Apache-2.0 */
/* A comm is a transport, and what ranks do together besides moving data: control messages,
 * heartbeats, and rounds (a round collects bytes from all ranks at rank 0, and sends rank 0's
 * answer to all, within a deadline). All of them travel along a tree of ranks (tree.h). One thread
 * at a time uses a comm, except where a function says otherwise. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <ckptfs/load.h>

#include "base/str.h"
#include "comm/tree.h"
#include "comm/xport.h"

/* The types of control messages. */
enum ckpt_ctl {
    CKPT_CTL_ROUND = 1, /* to the parent: the data and statuses of the sender's subtree */
    CKPT_CTL_ANSWER,    /* to the children: rank 0's answer */
    CKPT_CTL_HEARTBEAT, /* a heartbeat: struct ckpt_heartbeat */
    CKPT_CTL_ABORT,     /* the load has failed */
    CKPT_CTL_PAUSE,     /* to the parent: the last window that the sender's subtree has opened */
    CKPT_CTL_PAUSE_AT,  /* to the children: the window after which all ranks pause */
};

/* How every control message begins. */
struct ckpt_ctl_head {
    uint32_t type, epoch; /* enum ckpt_ctl; the number of the load, or 0 before the first */
};

/* The number of rounds in which a rank has sent data to its parent (up), and has sent the answer to
 * its children (down). */
struct ckpt_rounds {
    uint32_t up, down;
};

/* A heartbeat carries these numbers. */
struct ckpt_heartbeat {
    struct ckpt_rounds rounds; /* of the sender */
    uint32_t idle_ms;          /* how long ago some rank last did something, as far as the sender
                                  knows: ranks pass on the least that they have heard */
};

/* A comm knows this of each other rank. */
struct ckpt_comm_peer {
    uint64_t heard_ms;         /* when its last message arrived */
    struct ckpt_rounds rounds; /* its progress, as its last heartbeat told */
    uint64_t gone_poll;        /* the poll count when it was first found closed; 0: it was not */
};

struct ckpt_comm {
    struct ckpt_xport *x;
    uint32_t epoch;                /* the number of the current load */
    uint32_t round;                /* the number of the next round */
    struct ckpt_rounds said;       /* the progress of this rank */
    struct ckpt_ctl_message *held; /* messages that arrived before somebody waited for them */
    struct ckpt_comm_peer *peer;   /* per rank */
    uint64_t npoll;                /* how often ckpt_comm_poll was called */
    uint64_t begun_ms;             /* when the current load began on this rank */
    uint64_t beat_ms;              /* when this rank last sent heartbeats */
    uint64_t busy_ms;   /* when some rank last did something, as far as this rank knows */
    ckpt_comm_log *log; /* to which rank 0 says whom it waits for; or NULL */
    void *log_ctx;
    char *doing; /* what ranks wait for each other to do, such as "open '/run'", for messages; or
                    NULL */
    bool failed; /* the last load failed: the transport must be renewed before the next one */
    uint32_t renewed;     /* how often it was renewed; the same number on all ranks */
    bool busy;            /* a load runs */
    double exchange_rate; /* of the last load (ckpt_load_stats), the same on all ranks; 0: none */
    /* Called with messages of the current load that belong to no round; may be NULL. data is
     * borrowed. */
    void (*on_message)(void *ctx, uint32_t peer, const unsigned char *data, size_t len);
    void *ctx;
};

/* COLLECTIVE. ckpt_comm_wrap for a transport whose ranks somebody else has admitted, such as MPI's
 * launcher: ranks that do not have the same CKPTFS_SECRET are an error that names them. */
CKPT_PUBLIC int ckpt_comm_wrap_members(struct ckpt_xport *x, struct ckpt_comm **ret,
                                       struct ckpt_err *err);

/* Set comm->doing to `what` and the name in quotes; what == NULL: to NULL. If there is no memory,
 * messages do not tell it. */
void ckpt_comm_set_doing(struct ckpt_comm *comm, const char *what, const char *name);

/* Keep the names of all ranks' machines, host[0..size), so that errors about a rank have them, too.
 * Without memory they do not. */
void ckpt_comm_name_hosts(struct ckpt_comm *comm, const char *const *host);

/* A wait that is told to the user after 10 s, and then every 30 s. */
struct ckpt_wait {
    uint64_t since_ms, next_ms;
};

/* The wait begins now. */
void ckpt_wait_begin(struct ckpt_wait *w);

/* True: it is time to say that the wait goes on. */
bool ckpt_wait_is_long(struct ckpt_wait *w);

/* Append a rank to a list of missing ranks, of which there were n before: "rank 2, 5, 7". Only the
 * first ones are listed. */
void ckpt_list_rank(struct ckpt_str *list, uint32_t n, uint32_t rank);

/* A load begins: on_message (may be NULL) is called from now on, first with the messages of this
 * load that arrived already. ckpt_comm_end: the load is over. */
void ckpt_comm_begin(struct ckpt_comm *comm,
                     void (*on_message)(void *ctx, uint32_t peer, const unsigned char *data,
                                        size_t len),
                     void *ctx);
void ckpt_comm_end(struct ckpt_comm *comm);

/* COLLECTIVE, but does not wait for other ranks. If the last load failed, make the transport usable
 * for the next one. */
void ckpt_comm_renew(struct ckpt_comm *comm);

/* Make progress: move data, and receive control messages. *ret_moved: something happened. -1 and
 * PEER: a rank is gone that a transfer waits for. */
int ckpt_comm_poll(struct ckpt_comm *comm, bool *ret_moved, struct ckpt_err *err);

/* Is the connection to the rank closed, and were all messages received that it had sent before? */
bool ckpt_comm_lost(struct ckpt_comm *comm, uint32_t peer);

/* Send a heartbeat to the neighbours in the tree, unless the last one is recent: they are sent
 * every 5 s, or every sixteenth of timeout_ms if that is less. */
void ckpt_comm_heartbeat(struct ckpt_comm *comm, uint32_t timeout_ms);

/* TIMEOUT if the last message of this rank is older than timeout_ms. Only neighbours in the tree
 * send heartbeats to each other. */
int ckpt_comm_check_heard(const struct ckpt_comm *comm, uint32_t peer, uint32_t timeout_ms,
                          struct ckpt_err *err);

/* Begin to wait: take all ranks for heard, and busy, now. */
void ckpt_comm_restart_clocks(struct ckpt_comm *comm);

/* Send a control message of the current load, unless that fails. Never blocks; data is copied. */
void ckpt_comm_send(struct ckpt_comm *comm, uint32_t peer, enum ckpt_ctl type, const void *data,
                    size_t len);

/* Whether a rank has failed, and why. */
struct ckpt_status {
    struct ckpt_err why; /* code OK: it has not */
    uint32_t rank;       /* the rank that has failed */
};

/* A round. Every rank gives a status (an error or none) and some bytes. Rank 0 makes the answer
 * from the bytes of all ranks, and every rank gets the answer. If a rank's status is an error, or
 * a rank sends no heartbeat for timeout_ms, all ranks get that error instead. Of several errors
 * it is the one of the lowest rank, but PEER, TIMEOUT and CANCELLED, which may be consequences of
 * another rank's error, only if no rank has another one. The caller sets the members up to `hasty`.
 */
struct ckpt_round {
    struct ckpt_comm *comm;
    uint32_t timeout_ms;
    const void *own; /* own_len bytes of this rank, copied when the round starts; NULL: none */
    size_t own_len;
    /* Called on rank 0: append the answer, given the bytes of each rank r (data[r], len[r]). NULL:
     * the answer is empty. */
    int (*reduce)(void *ctx, const unsigned char *const *data, const size_t *len,
                  struct ckpt_str *answer, struct ckpt_err *err);
    void *ctx;
    bool hasty; /* an error is passed on at once, without waiting for the other ranks' statuses */
    bool live;  /* this is the end of a load, during which ranks have sent heartbeats: the clocks
                   of those that were heard are not restarted */

    uint32_t number;
    struct ckpt_ctl_message **from; /* nchild: the message of each child, or NULL */
    uint32_t nfrom, nchild;
    struct ckpt_status status; /* of this rank's subtree, as far as it was received */
    struct ckpt_str data;      /* the bytes of this rank's subtree, likewise */
    bool sent;                 /* to the parent; on rank 0: the answer, to the children */
    struct ckpt_ctl_message *answer;
};

/* Start a round. A negative rc is this rank's status, and *why its error. Nothing is sent yet. */
int ckpt_round_start(struct ckpt_round *r, int rc, const struct ckpt_err *why,
                     struct ckpt_err *err);

/* Continue a round; call it after each ckpt_comm_poll. Does not wait. 1: the answer has not arrived
 * yet; 0: it has, and *ret_data is valid until ckpt_round_release; -1: the round's error. */
int ckpt_round_step(struct ckpt_round *r, const unsigned char **ret_data, size_t *ret_len,
                    struct ckpt_err *err);

/* Free what a round holds; may be called at any time after ckpt_round_start. */
void ckpt_round_release(struct ckpt_round *r);

/* A whole round, waiting included. A negative rc is this rank's status, and *err its error. *ret
 * gets the answer (malloc'ed, with room for one more byte) unless ret is NULL. */
int ckpt_round_run(struct ckpt_round *r, int rc, unsigned char **ret, size_t *ret_len,
                   struct ckpt_err *err);
