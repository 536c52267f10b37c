/* SPDX-License-Identifier: Apache-2.0 */
/* TCP between processes, from inside: xport_tcp.c (what moves), tcp_connect.c (who is connected),
 * tcp_rendezvous.c (how ranks find each other). */
#ifndef CKPT_LOAD_TCP_H
#define CKPT_LOAD_TCP_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

#include <ckptfs/load.h>

#include "base/vec.h"
#include "load/handshake.h"
#include "load/same_host.h"
#include "load/socket.h"
#include "load/xport.h"

/* A rank's listener, and all that others must know of it; in `address`, as text, so that strangers
 * don't. */
struct ckpt_tcp {
    int fd;
    char address[CKPT_TCP_ADDRESS];
    uint64_t token[2];
    uint64_t first;     /* the word of the first loads, as the address has it */
    atomic_ullong word; /* peers may read our buffers; 0: not any more */
};

/* Descriptors that a rank needs at most, but for data connections; rank 0 while ranks come. */
uint64_t ckpt_tcp_files(uint32_t rank, uint32_t size);

/* ---- the transport ---- */

struct ckpt_xfer_queue {
    struct ckpt_xfer *head, **tail;
};

static inline void ckpt_queue_init(struct ckpt_xfer_queue *q)
{
    q->head = NULL;
    q->tail = &q->head;
}

static inline void ckpt_queue_pop(struct ckpt_xfer_queue *q)
{
    if (!(q->head = q->head->next))
        q->tail = &q->head;
}

static inline struct ckpt_xfer *ckpt_queue_take(struct ckpt_xfer_queue *q, uint64_t number)
{
    struct ckpt_xfer **at = &q->head, *t;

    while (*at && (*at)->at != number)
        at = &(*at)->next;
    if (!(t = *at))
        return NULL;
    if (!(*at = t->next))
        q->tail = at;
    return t;
}

/* A control message on its way. */
struct ckpt_tcp_frame {
    uint32_t len, from, to;
};
struct ckpt_tcp_outgoing {
    struct ckpt_tcp_outgoing *next;
    size_t len, at;
    bool sealed;
    unsigned char data[]; /* with its frame in front, and room for a seal */
};
struct ckpt_tcp_incoming {
    struct ckpt_tcp_incoming *next;
    uint32_t from;
    size_t len;
    void *data;
};

/* A word about the transfer of that number: it lies at this address, or (0) it was taken. */
struct ckpt_tcp_note {
    uint64_t number, address;
};

struct ckpt_sealed_note {
    struct ckpt_tcp_note note;
    unsigned char seal[CKPT_SEAL_BYTES]; /* if there is a secret */
};

/* A peer whose memory we read. Transfers are counted each way. */
struct ckpt_tcp_same_host {
    bool is;
    struct ckpt_same_host of;
    uint64_t nsend, nrecv;
    CKPT_VEC(uint64_t) early;    /* addresses that came before their receives were posted */
    size_t nearly;               /* of which so many are used */
    CKPT_VEC(unsigned char) out; /* notes, each with its seal */
    size_t out_at;               /* bytes of it that are sent */
    struct ckpt_sealed_note in;
    size_t in_at;
    CKPT_VEC(struct ckpt_tcp_note) taken; /* under the lock: by workers, to be said */
    bool lost;                            /* the same: its memory can't be read any more */
    bool failed;                          /* the pump knows it */
};

/* A rank that this one talks to. */
struct ckpt_tcp_peer {
    uint32_t rank;
    int data, ctl;
    enum {
        CKPT_TCP_UNCONNECTED, /* or the other side dials */
        CKPT_TCP_DIALLING,
        CKPT_TCP_OPEN,
        CKPT_TCP_CLOSED,
    } state;                     /* of data */
    uint64_t since_ms, retry_ms; /* it is dialled since then; and again then */
    struct ckpt_handshake dialling;
    bool refused; /* it does not have our secret, or we not its */
    struct ckpt_seal data_out, data_in, ctl_out, ctl_in;
    unsigned char seal_out[CKPT_SEAL_BYTES], seal_in[CKPT_SEAL_BYTES]; /* of transfers */
    bool sealed; /* seal_out is that of the transfer that is being sent */
    bool forged; /* a message from it had a wrong seal */
    bool gone;   /* its control connection ended */
    struct ckpt_xfer_queue send, recv;
    struct ckpt_tcp_same_host same_host;
    struct ckpt_tcp_outgoing *out, **out_tail;
    struct ckpt_tcp_frame in_frame; /* of the control message that comes in */
    size_t in_at;                   /* bytes of frame, message and seal so far */
    unsigned char *in;              /* message and seal, as far as there is room yet */
    size_t in_cap;
};

struct ckpt_xport_tcp {
    struct ckpt_xport x;
    struct ckpt_tcp *tcp;
    char **address;                          /* of each rank, as far as it is known */
    struct ckpt_tcp_peer **peer;             /* per rank; NULL: nothing was to do with it */
    CKPT_VEC(struct ckpt_tcp_peer *) active; /* those that are not */
    CKPT_VEC(struct ckpt_handshake) callers; /* who has connected, and is to say who it is */
    struct ckpt_tcp_incoming *in, **in_tail;
    CKPT_VEC(struct pollfd) poll;
    int event;
    uint64_t ancestor; /* of this node's ranks, if they have to permit being read; or 0 */
    bool permits;      /* they are permitted now */
    uint32_t meet_ms;  /* how long a rank is called */
    bool cancelled;
    uint32_t renewed;     /* how often: data connections of other times are refused */
    pthread_mutex_t lock; /* near.taken, near.lost */
};

/* NULL: no memory. */
struct ckpt_tcp_peer *ckpt_tcp_peer(struct ckpt_xport_tcp *m, uint32_t rank);

/* Take in callers, and go on calling those whom transfers wait for. -1 and PEER: one can't be
 * reached. */
int ckpt_tcp_progress_connections(struct ckpt_xport_tcp *m, bool *moved, struct ckpt_err *err);

/* COLLECTIVE. Connect to the ranks right above and below in the tree. above: the address of the
 * former (NULL on rank 0). Takes tcp, whatever comes of it. */
int ckpt_tcp_join(struct ckpt_tcp *tcp, uint32_t rank, uint32_t size, const char *above,
                  uint32_t timeout_ms, struct ckpt_xport_tcp **ret, struct ckpt_err *err);

/* The addresses of all ranks. Ranks of this node are permitted to read our memory. */
int ckpt_tcp_know(struct ckpt_xport_tcp *m, const char *const *address, struct ckpt_err *err);

/* COLLECTIVE, when all know all addresses: look whether we read the memory of all ranks of this
 * node. Takes back the permission, and makes m a comm. */
int ckpt_tcp_finish(struct ckpt_xport_tcp *m, struct ckpt_comm *comm, int rc, uint32_t timeout_ms,
                    struct ckpt_err *err);

/* As in ckpt_xport_ops. */
void ckpt_tcp_permit(struct ckpt_xport *x, bool on);

/* ---- tcp_near.c ---- */

/* Post a transfer with a near peer. *ret_done: it need not be queued. */
int ckpt_tcp_same_host_post(struct ckpt_tcp_peer *p, struct ckpt_xfer *t, bool *ret_done,
                            struct ckpt_err *err);
/* What was posted before the peer was connected is said now. */
int ckpt_tcp_same_host_open(struct ckpt_tcp_peer *p, struct ckpt_err *err);
/* -1: the connection is over, or its memory can't be read. */
int ckpt_tcp_same_host_move(struct ckpt_xport_tcp *m, struct ckpt_tcp_peer *p, bool *moved);
void ckpt_tcp_same_host_clear(struct ckpt_xport_tcp *m, struct ckpt_tcp_same_host *n);

/* As in ckpt_xport_ops. */
bool ckpt_tcp_fetch(struct ckpt_xport *x, const struct ckpt_xfer *t, void *buf, size_t len,
                    size_t off);
void ckpt_tcp_fetched(struct ckpt_xport *x, const struct ckpt_xfer *t);

/* ---- xport_tcp.c ---- */

/* A new transport, not connected. */
int ckpt_tcp_new(struct ckpt_tcp *tcp, uint32_t rank, uint32_t size, struct ckpt_xport_tcp **ret,
                 struct ckpt_err *err);

#endif
