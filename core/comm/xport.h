/* SPDX-License-Identifier: Apache-2.0 */
/* The contract of a transport, which moves bytes between ranks. Each member is one file, and a
 * library of its own if it needs other libraries.
 *
 * There are two kinds of traffic between a pair of ranks. Data transfers: both ranks know the sizes
 * from the plan, and the n-th send to a peer matches the peer's n-th receive. Control messages: of
 * any size, and unexpected. Except where a member says otherwise, one thread at a time calls it. */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <ckptfs/err.h>

struct ckpt_comm;
struct ckpt_xport;
struct ckpt_device;
struct ckpt_device_division;

enum { CKPT_GATHER_UNIT = 64 }; /* all-gathers are of so many bytes, or a multiple */

/* A send or a receive. The caller owns it, and must not move it before it is done. */
struct ckpt_xfer {
    void *buf; /* a send only reads it */
    size_t len;
    uint32_t peer;
    bool send;
    const void *there; /* set before done, of a receive: the bytes are not in buf but here, in the
                          sender's memory, until `fetched` */
    atomic_bool done;  /* set by post, by progress or by another thread */
    /* for the transport: */
    size_t at;
    struct ckpt_xfer *next;
    void *priv;
};

/* Transfers in the order of posting. */
struct ckpt_xfer_queue {
    struct ckpt_xfer *head, **tail;
};

static inline void ckpt_queue_init(struct ckpt_xfer_queue *q)
{
    q->head = NULL;
    q->tail = &q->head;
}

static inline void ckpt_queue_push(struct ckpt_xfer_queue *q, struct ckpt_xfer *t)
{
    t->next = NULL;
    *q->tail = t;
    q->tail = &t->next;
}

static inline void ckpt_queue_pop(struct ckpt_xfer_queue *q)
{
    if (!(q->head = q->head->next))
        q->tail = &q->head;
}

/* A control message that was received. */
struct ckpt_ctl_message {
    struct ckpt_ctl_message *next;
    uint32_t peer; /* the sender */
    size_t len;
    unsigned char *data;
};

/* Free a message and its data; m may be NULL. */
void ckpt_ctl_free(struct ckpt_ctl_message *m);

struct ckpt_xport_ops {
    const char *name;
    /* Start a data transfer. The members up to `send` are set, the rest is zero. */
    int (*post)(struct ckpt_xport *x, struct ckpt_xfer *t, struct ckpt_err *err);
    /* COLLECTIVE. Make the communicators that a load needs and that no earlier load has made. comm
     * is this transport's; division has CKPT_DIVISIONS entries (device.h). The member is NULL if
     * the transport has no communicators. */
    int (*connect)(struct ckpt_xport *x, struct ckpt_comm *comm,
                   const struct ckpt_device_division *division, struct ckpt_err *err);
    /* Start an all-gather of the communicator of a division (struct ckpt_collective.division):
     * t->len bytes of each member, in t->buf; but this one's are at `own`, which may be their place
     * in t->buf or lie elsewhere, and are not copied. All is aligned to CKPT_GATHER_UNIT. The
     * members of a communicator start the same all-gathers in the same order. The member is NULL if
     * the transport has none in host memory. */
    int (*gather)(struct ckpt_xport *x, uint8_t division, const void *own, struct ckpt_xfer *t,
                  struct ckpt_err *err);
    /* Move as many bytes as possible without blocking. PEER: a rank is gone that a transfer waits
     * for. *ret_moved: something happened. */
    int (*progress)(struct ckpt_xport *x, bool *ret_moved, struct ckpt_err *err);
    /* The bytes of a transfer that are `there` are used up. From any thread. */
    void (*fetched)(struct ckpt_xport *x, const struct ckpt_xfer *t);
    /* Memory for the buffers of a load, of which ranks of this node can map them (shm.h).
     * NULL: no memory. The member is NULL if any memory will do. ckpt_shm_unmap gives it back. */
    void *(*shm)(struct ckpt_xport *x, uint64_t len);
    /* Sleep until progress may have something to do, kick is called, or the time is over. */
    void (*wait)(struct ckpt_xport *x, uint32_t timeout_ms);
    /* Wake the thread that is in wait. From any thread. */
    void (*kick)(struct ckpt_xport *x);
    /* Send a copy of a control message. Never blocks. LIMIT: it is longer than the transport's
     * messages can be, and was not sent. */
    int (*ctl_send)(struct ckpt_xport *x, uint32_t peer, const void *msg, size_t len,
                    struct ckpt_err *err);
    /* Receive a control message. 1: *ret is malloc'ed, and the caller's; 0: there is none. */
    int (*ctl_recv)(struct ckpt_xport *x, struct ckpt_ctl_message **ret, struct ckpt_err *err);
    /* Has the peer closed its connection, or died? Messages that it sent before may still have to
     * be received. The member is NULL if the death of a rank ends the whole job (MPI). */
    bool (*gone)(struct ckpt_xport *x, uint32_t peer);
    /* Abandon all transfers. False: some buffers may still be written to, and must never be freed.
     * The caller starts no transfer after this before renew. */
    bool (*cancel)(struct ckpt_xport *x);
    /* After a load failed, all ranks call this, after cancel and before the next load: bytes of old
     * transfers that are still in flight must not be taken for new ones. NULL: nothing to do. */
    void (*renew)(struct ckpt_xport *x);
    void (*free)(struct ckpt_xport *x);
};

/* A transport. Members embed this first. */
struct ckpt_xport {
    const struct ckpt_xport_ops *ops;
    uint32_t rank, size;
    const char *remark;  /* a static text that the user should see once; or NULL */
    bool same_host;      /* ranks of a node pass bytes on in one step: they share memory */
    uint64_t moved;      /* bytes that transfers have sent and received so far, where known */
    uint32_t nomem_peer; /* 1 + the last peer for whose message this rank had no memory; 0: none */
    const char **host;   /* per rank: the name of its machine, for messages; or NULL. The comm's */
    /* If destinations are in device memory: the device, which also exchanges data in place of post
     * (device.h). NULL: they are in host memory. */
    struct ckpt_device *device;
};

/* Holds what messages call a rank. */
struct ckpt_rank_text {
    char text[96];
};

/* Names a rank for messages: "rank 2", and " on HOST" if that is known (ckpt_comm_name_hosts). */
struct ckpt_rank_text ckpt_xport_rank_text(const struct ckpt_xport *x, uint32_t rank);

/* NOMEM if this rank had no memory for what the other one sent. */
int ckpt_xport_check_nomem(const struct ckpt_xport *x, uint32_t peer, struct ckpt_err *err);

/* Fail with PEER because this rank is gone, or with NOMEM if this rank had no memory for what the
 * other one sent. */
int ckpt_xport_fail_gone(const struct ckpt_xport *x, uint32_t peer, struct ckpt_err *err);

/* Make a comm of a transport, which belongs to the comm then; also freed after a failure. For
 * transports in libraries of their own, as are the functions that follow. */
CKPT_PUBLIC int ckpt_comm_wrap(struct ckpt_xport *x, struct ckpt_comm **ret, struct ckpt_err *err);

/* The transport of a comm. */
CKPT_PUBLIC struct ckpt_xport *ckpt_comm_xport(const struct ckpt_comm *comm);

/* COLLECTIVE. Broadcast rank 0's len bytes into `data`, unless a rank has failed: rc and *err are
 * this rank's status, as in ckpt_comm_agree. */
CKPT_PUBLIC int ckpt_comm_broadcast(struct ckpt_comm *comm, int rc, void *data, size_t len,
                                    uint32_t timeout_ms, struct ckpt_err *err);

/* Make progress while the caller waits for something else. -1 and PEER: a rank is gone. 1: another
 * rank has failed, and will report that in the next ckpt_comm_agree. */
CKPT_PUBLIC int ckpt_comm_look(struct ckpt_comm *comm, struct ckpt_err *err);

/* The function that a transport's library exports under the name CKPT_XPORT_OPEN: make a transport
 * from what the launcher has put into the environment. */
typedef int ckpt_xport_open(struct ckpt_xport **ret, struct ckpt_err *err);
#define CKPT_XPORT_OPEN "ckpt_xport_open_from_env"

/* The function that NCCL's library exports under the name CKPT_COMM_DEVICE: make a comm whose
 * destinations are in device memory. It takes ctl, which carries the control messages, on success.
 */
typedef int ckpt_comm_device(struct ckpt_comm *ctl, struct ckpt_comm **ret, struct ckpt_err *err);
#define CKPT_COMM_DEVICE "ckpt_comm_device_from_env"
