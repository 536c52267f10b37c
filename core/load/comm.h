/* SPDX-License-Identifier: Apache-2.0 */
/* A comm: a transport, and the few things that ranks do together besides moving data: rounds, in
 * which rank 0 hears all and answers all, with deadlines. Control messages go along a tree: rank r
 * has the rank (r - 1) / CKPT_TREE_FAN above it. */
#ifndef CKPT_LOAD_COMM_H
#define CKPT_LOAD_COMM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <ckptfs/load.h>

#include "base/str.h"
#include "load/xport.h"

enum { CKPT_TREE_FAN = 32 };

static inline uint32_t ckpt_tree_parent(uint32_t rank) { return (rank - 1) / CKPT_TREE_FAN; }

static inline uint32_t ckpt_tree_child(uint32_t rank, uint32_t k)
{
    return rank * CKPT_TREE_FAN + 1 + k;
}

/* How many ranks are right below one. */
static inline uint32_t ckpt_tree_children(uint32_t rank, uint32_t size)
{
    const uint64_t first = (uint64_t)rank * CKPT_TREE_FAN + 1;
    const uint64_t n = first < size ? size - first : 0;

    return n < CKPT_TREE_FAN ? (uint32_t)n : CKPT_TREE_FAN;
}

/* The i-th of the ranks right above and below one; false: there are no more. */
static inline bool ckpt_tree_neighbour(uint32_t rank, uint32_t size, uint32_t i, uint32_t *ret)
{
    const uint32_t above = rank > 0;

    *ret = i < above ? ckpt_tree_parent(rank) : ckpt_tree_child(rank, i - above);
    return i < above + ckpt_tree_children(rank, size);
}

/* The first word of a control message; the second is the load's number. */
enum ckpt_ctl {
    CKPT_CTL_ROUND = 1, /* to the rank above, about all below */
    CKPT_CTL_ANSWER,    /* rank 0's, handed on to the ranks below */
    CKPT_CTL_ALIVE,     /* and how far its rounds are (struct ckpt_rounds) */
    CKPT_CTL_ABORT,
    CKPT_CTL_ASSIST, /* read this for me */
    CKPT_CTL_ASSISTED,
    CKPT_CTL_PAUSE,    /* to the rank above: how far this rank and all below are */
    CKPT_CTL_PAUSE_AT, /* to the ranks below: how far all go on */
};

struct ckpt_ctl_head {
    uint32_t type, epoch;
};

struct ckpt_ctl_message {
    struct ckpt_ctl_message *next;
    uint32_t peer;
    size_t len;
    unsigned char *data; /* after the head too: whole */
};

/* In how many rounds a rank has sent up what it has to say, and handed down the answer. */
struct ckpt_rounds {
    uint32_t up, down;
};

struct ckpt_comm {
    struct ckpt_xport *x;
    uint32_t epoch;                /* of the load that runs */
    uint32_t round;                /* number of the next round */
    struct ckpt_rounds said;       /* of this rank */
    struct ckpt_ctl_message *held; /* that nobody waited for yet */
    uint64_t *heard_ms;            /* per rank: the last message */
    struct ckpt_rounds *said_by;   /* per rank: as it told when it lived */
    uint64_t *gone_poll; /* per rank: the poll count when the peer was first found closed */
    uint64_t npoll;
    uint64_t alive_ms; /* when we last said that we live */
    bool failed;       /* the last load failed: the transport is renewed before the next one */
    uint32_t renewed;  /* how often it was; the same on all ranks */
    bool busy;         /* a load runs */
    /* For the other types of messages; may be NULL. data is borrowed. */
    void (*on_message)(void *ctx, uint32_t peer, const unsigned char *data, size_t len);
    void *ctx;
};

/* A variable of the environment, a number of at most `most`; USAGE names the variable. */
int ckpt_env_number(const char *name, uint32_t most, uint32_t *ret, struct ckpt_err *err);

/* As ckpt_comm_from_env for RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. */
int ckpt_comm_tcp_env(struct ckpt_comm **ret, struct ckpt_err *err);

/* A load begins: messages of it that came already are handed over now. And ends. */
void ckpt_comm_begin(struct ckpt_comm *comm,
                     void (*on_message)(void *ctx, uint32_t peer, const unsigned char *data,
                                        size_t len),
                     void *ctx);
void ckpt_comm_end(struct ckpt_comm *comm);

/* Other ranks of the node may read this process's memory from now on, or not any more: from the
 * agreement on a plan to the end of the load. */
void ckpt_comm_permit(struct ckpt_comm *comm, bool on);

/* COLLECTIVE, without waiting. If the last load failed, make the transport good for another. */
void ckpt_comm_renew(struct ckpt_comm *comm);

/* It did not begin after all; the next one has its number. */
void ckpt_comm_begin_again(struct ckpt_comm *comm);

/* Move data, and take in messages. */
int ckpt_comm_poll(struct ckpt_comm *comm, bool *ret_moved, struct ckpt_err *err);

/* Is the rank gone, and has all that it said before been taken in (a poll ago)? */
bool ckpt_comm_lost(struct ckpt_comm *comm, uint32_t peer);

/* Fail with PEER because a rank is gone: why, if that is known. */
int ckpt_comm_fail_lost(struct ckpt_comm *comm, uint32_t peer, struct ckpt_err *err);

/* Keep a message until somebody waits for it; takes data, whatever comes of it. */
int ckpt_comm_hold(struct ckpt_comm *comm, uint32_t peer, void *data, size_t len,
                   struct ckpt_err *err);
void ckpt_ctl_free(struct ckpt_ctl_message *m);

/* Tell those who may wait for us that we live, if it is time to. */
void ckpt_comm_alive(struct ckpt_comm *comm, uint32_t timeout_ms);

/* Tell one of them now. */
void ckpt_comm_tell_alive(struct ckpt_comm *comm, uint32_t peer);

int ckpt_comm_send(struct ckpt_comm *comm, uint32_t peer, enum ckpt_ctl type, const void *data,
                   size_t len, struct ckpt_err *err);

/* How a rank sees things; code OK: well. */
struct ckpt_verdict {
    struct ckpt_err why;
    uint32_t rank; /* that has failed */
};

/* A round. Every rank gives a verdict (rc, and err if negative) and some bytes; rank 0 makes the
 * answer from all of them; every rank gets it. If any rank's verdict is negative, or somebody is
 * not heard of for timeout_ms, all get that error instead. The caller sets the first part. */
struct ckpt_round {
    struct ckpt_comm *comm;
    uint32_t timeout_ms;
    const void *own; /* this rank's bytes, copied when the round starts; NULL: none */
    size_t own_len;
    /* On rank 0: append the answer. data[r], len[r] are rank r's. NULL: an empty answer. */
    int (*judge)(void *ctx, const unsigned char *const *data, const size_t *len,
                 struct ckpt_str *answer, struct ckpt_err *err);
    void *ctx;
    bool hasty; /* failures are told at once, not when all were heard */

    uint32_t number;
    struct ckpt_ctl_message **from; /* of the ranks right below */
    uint32_t nfrom, nchild;
    struct ckpt_verdict verdict; /* of this rank and all below, as far as they are heard */
    struct ckpt_str data;        /* theirs */
    bool sent;                   /* up, or (rank 0) answered */
    struct ckpt_ctl_message *answer;
};

/* why: if rc is negative. */
int ckpt_round_start(struct ckpt_round *r, int rc, const struct ckpt_err *why,
                     struct ckpt_err *err);
/* 1: not yet; 0: done, *ret_data borrowed until ckpt_round_release; -1. Does not sleep. */
int ckpt_round_step(struct ckpt_round *r, const unsigned char **ret_data, size_t *ret_len,
                    struct ckpt_err *err);
void ckpt_round_release(struct ckpt_round *r);

/* All of it; err says why if rc is negative. *ret (may be NULL) is malloc'ed and has room for one
 * more byte. */
int ckpt_round_run(struct ckpt_round *r, int rc, unsigned char **ret, size_t *ret_len,
                   struct ckpt_err *err);

#endif
