/* SPDX-License-Identifier: Apache-2.0 */
/* The parts of the TCP transport share these declarations: xport.c moves bytes,
 * same_host.c moves them between processes of one machine, connect.c makes and accepts connections,
 * and rendezvous.c lets ranks find each other with them. */
#pragma once

#include <pthread.h>
#include <stdint.h>

#include <ckptfs/load.h>

#include "base/vec.h"
#include "comm/comm.h"
#include "comm/shm.h"
#include "comm/tcp/handshake.h"
#include "comm/tcp/socket.h"
#include "comm/xport.h"

/* A rank's listener. `address` is a text with everything that other ranks must know to connect:
 * host, port, token, and where its shared memory is. Only ranks of the job get it, so a peer that
 * knows the token is one of them. */
struct ckpt_tcp {
    int fd;
    char address[CKPT_TCP_ADDRESS];
    uint64_t token[2]; /* random */
    struct ckpt_shm shm;
};

/* ckpt_tcp_parse finds these parts in an address. */
struct ckpt_tcp_contact {
    char host[CKPT_HOST_BYTES];
    uint32_t port, nport; /* the first of nport ports where the rank may listen */
    uint64_t token[2];
    struct ckpt_shm_place shm;
};

/* USAGE: it is no address of ckpt_tcp_listen. */
int ckpt_tcp_parse(const char *address, struct ckpt_tcp_contact *ret, struct ckpt_err *err);

/* ---- the transport ---- */

/* Remove the transfer with this number; NULL: there is none. */
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

/* How a control message begins on the wire. */
struct ckpt_tcp_frame {
    uint32_t len;      /* bytes that follow */
    uint32_t from, to; /* ranks; the ranks between them in the tree forward the message */
};

/* A control message that waits to be sent to a neighbour. */
struct ckpt_tcp_outgoing {
    struct ckpt_tcp_outgoing *next;
    size_t len, at;       /* bytes of data; those that are sent */
    unsigned char data[]; /* the frame and the message */
};

/* Two ranks that map each other's shared memory send notes over their data connection, in place of
 * bytes. A note from the sender of a transfer says where its bytes are; one from the receiver, with
 * offset 0, is the acknowledgement that it needs them no more. */
struct ckpt_tcp_note {
    uint64_t number; /* of the transfer, counted from 0 for each direction */
    uint64_t off;    /* in the sender's shared memory */
};

/* A peer on the same machine, while the two ranks map each other's shared memory. */
struct ckpt_tcp_same_host {
    bool active;              /* the two ranks do so on this data connection */
    struct ckpt_shm_place of; /* where the peer's memory is */
    struct ckpt_shm_view view;
    uint64_t nsend, nrecv;              /* transfers posted so far */
    CKPT_VEC(uint64_t) early;           /* offsets of transfers whose receives are not posted yet */
    size_t nearly;                      /* the first of them that is unused */
    CKPT_VEC(struct ckpt_tcp_note) out; /* notes to be sent */
    size_t out_at;                      /* bytes of `out` that are sent */
    struct ckpt_tcp_note in;            /* the note that is being received */
    size_t in_at;                       /* bytes of it so far */
    CKPT_VEC(struct ckpt_tcp_note)
    used;             /* acknowledgements that workers add, under the transport's lock */
    atomic_bool lost; /* there was no memory for one of these */
};

/* A connection to another rank. */
struct ckpt_tcp_link {
    enum {
        CKPT_TCP_UNCONNECTED, /* or the other rank dials, and has not arrived */
        CKPT_TCP_DIALLING,
        CKPT_TCP_OPEN,
        CKPT_TCP_CLOSED,
    } state;
    int fd;            /* if it is open */
    bool refused;      /* the two ranks do not have the same secret */
    uint64_t since_ms; /* when this rank first dialled; 0: never */
    uint64_t retry_ms; /* when it may dial again */
    uint32_t attempt;  /* see ckpt_socket_begin */
};

/* A rank that this one communicates with. */
struct ckpt_tcp_peer {
    uint32_t rank;
    struct ckpt_tcp_link data, ctl;
    struct ckpt_tcp_link rendezvous; /* with rank 0. CLOSED: this rank knows its parent's address */
    struct ckpt_xfer_queue send, recv;
    struct ckpt_tcp_same_host same_host;
    struct ckpt_tcp_outgoing *out, **out_tail;
    struct ckpt_tcp_frame in_frame; /* of the control message that is being received */
    size_t in_at;                   /* bytes of frame and message received so far */
    unsigned char *in;              /* in_cap bytes: the message */
    size_t in_cap;
};

/* A rank needs these members until all ranks have found each other. */
struct ckpt_tcp_rendezvous {
    struct ckpt_tcp_contact root; /* where rank 0 listens, and the token of this rendezvous */
    int listener;                 /* rank 0: a second listener, which is at that place; or -1 */
    int *waiting; /* rank 0: per rank, its connection, while its parent has not registered; or -1 */
    bool *unproven; /* rank 0: per rank, has a peer claimed to be it, and not proved that? */
    uint32_t count; /* rank 0: the ranks that have registered */
    char parent[CKPT_TCP_ADDRESS]; /* of the other ranks: the parent's address, as it is received */
    size_t parent_at;              /* bytes of it so far */
};

/* The most handshakes at a time. Each takes a descriptor, and unauthenticated peers can take all of
 * them for a handshake's deadline; further connections wait in the listener's backlog, which is as
 * long (socket.c). */
enum { CKPT_TCP_HANDSHAKES = 4096 };

/* The transport. */
struct ckpt_xport_tcp {
    struct ckpt_xport x;
    struct ckpt_tcp *tcp;
    char **address;                          /* per rank; NULL: not known yet */
    struct ckpt_tcp_peer **peer;             /* per rank; NULL: not needed so far */
    CKPT_VEC(struct ckpt_tcp_peer *) active; /* the peers that are not NULL */
    CKPT_VEC(struct ckpt_handshake)
    handshakes; /* they go on; no connection is accepted while there
                 * are CKPT_TCP_HANDSHAKES */
    struct ckpt_tcp_rendezvous rendezvous;
    struct ckpt_ctl_message *in, **in_tail; /* that were received */
    CKPT_VEC(struct pollfd) poll;
    int event;            /* an eventfd, which kick writes to */
    uint32_t connect_ms;  /* how long this rank tries to connect to one that it has data for */
    bool cancelled;       /* until renew */
    uint32_t renewed;     /* how often; data connections of another number are refused */
    pthread_mutex_t lock; /* see struct ckpt_tcp_same_host */
};

/* The peer for a rank, made if there is none. NULL: no memory. */
struct ckpt_tcp_peer *ckpt_tcp_peer(struct ckpt_xport_tcp *m, uint32_t rank);

/* Continue all handshakes, accept connections, and dial those whom this rank needs: rank 0 and the
 * parent at first, and peers that transfers wait for. -1: one of them can't be reached (PEER), or
 * this rank can't listen. */
int ckpt_tcp_progress_connections(struct ckpt_xport_tcp *m, bool *moved, struct ckpt_err *err);

/* Forget what is needed for the rendezvous only. */
void ckpt_tcp_end_rendezvous(struct ckpt_xport_tcp *m);

/* Fail because the rank is not at that place. */
int ckpt_tcp_fail_unreached(enum ckpt_code code, uint32_t rank, const struct ckpt_tcp_contact *c,
                            struct ckpt_err *err);

/* Take the addresses of all ranks, each with its NUL, that are not known yet, and find out whether
 * this rank can map the shared memory of all ranks of this node (x.same_host). */
int ckpt_tcp_know(struct ckpt_xport_tcp *m, const char *text, size_t len, struct ckpt_err *err);

/* ---- same_host.c ---- */

/* Post a transfer with a peer of the same host. *ret_done: the transfer is done already, and must
 * not be queued. */
int ckpt_tcp_same_host_post(struct ckpt_xport_tcp *m, struct ckpt_tcp_peer *p, struct ckpt_xfer *t,
                            bool *ret_done, struct ckpt_err *err);
/* The connection is open: queue notes about the transfers that were posted before. */
int ckpt_tcp_same_host_open(struct ckpt_xport_tcp *m, struct ckpt_tcp_peer *p,
                            struct ckpt_err *err);
/* Send and receive notes. -1: the connection ended, or the peer's memory can't be mapped. */
int ckpt_tcp_same_host_move(struct ckpt_xport_tcp *m, struct ckpt_tcp_peer *p, bool *moved);
/* Forget all notes; after a failed load, and at the end. */
void ckpt_tcp_same_host_clear(struct ckpt_xport_tcp *m, struct ckpt_tcp_same_host *n);

/* Implement ckpt_xport_ops.fetched: the bytes of a transfer are used up. From any thread. */
void ckpt_tcp_fetched(struct ckpt_xport *x, const struct ckpt_xfer *t);

/* ---- xport.c ---- */

/* Make a transport without connections. tcp: NULL if the rank does not listen yet. Takes tcp, also
 * when it fails. */
int ckpt_tcp_new(struct ckpt_tcp *tcp, uint32_t rank, uint32_t size, struct ckpt_xport_tcp **ret,
                 struct ckpt_err *err);
