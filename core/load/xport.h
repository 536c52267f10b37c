/* SPDX-License-Identifier: Apache-2.0 */
/* Transports: how ranks send each other bytes. One file a member, each in its own library where it
 * needs one.
 *
 * Two kinds of traffic between each pair of ranks. Data: buffers whose sizes both sides know from
 * the plan, matched in the order of posting. Control: small messages of any size that nobody needs
 * to expect. One thread at a time calls in, but for kick. */
#ifndef CKPT_LOAD_XPORT_H
#define CKPT_LOAD_XPORT_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <ckptfs/err.h>

struct ckpt_xport;
struct ckpt_device;

/* A send or receive; the caller's, at the same address until it is done. */
struct ckpt_xfer {
    void *buf; /* read only for sends */
    size_t len;
    uint32_t peer;
    bool send;
    bool there;       /* set with done: it lies in the sender's memory, to be fetched */
    atomic_bool done; /* set by post or progress, or another thread */
    size_t at;        /* the transport's own, as are these */
    struct ckpt_xfer *next;
    union {
        void *ptr;
        uint64_t word;
    } priv;
};

struct ckpt_xport_ops {
    const char *name;
    /* Post a data transfer; the fields up to `send` are set, the rest is zero. */
    int (*post)(struct ckpt_xport *x, struct ckpt_xfer *t, struct ckpt_err *err);
    /* Move what can be moved; sets `done`. PEER if a rank is gone that a transfer waits for.
     * *ret_moved: something happened. */
    int (*progress)(struct ckpt_xport *x, bool *ret_moved, struct ckpt_err *err);
    /* Copy len bytes of what is `there`, from byte off on. From any thread. False: the sender is
     * gone, and progress will say so. NULL: nothing ever is. */
    bool (*fetch)(struct ckpt_xport *x, const struct ckpt_xfer *t, void *buf, size_t len,
                  size_t off);
    /* Let the sender know that all of it has been copied. From any thread. */
    void (*fetched)(struct ckpt_xport *x, const struct ckpt_xfer *t);
    /* Sleep until something may have happened, or kick, or the time is over. */
    void (*wait)(struct ckpt_xport *x, uint32_t timeout_ms);
    /* Wake wait, from any thread. */
    void (*kick)(struct ckpt_xport *x);
    /* Send a copy of msg. Never blocks. */
    int (*ctl_send)(struct ckpt_xport *x, uint32_t peer, const void *msg, size_t len,
                    struct ckpt_err *err);
    /* The next control message, if there is one: 1, malloc'ed; 0: none. */
    int (*ctl_recv)(struct ckpt_xport *x, uint32_t *ret_peer, void **ret_msg, size_t *ret_len,
                    struct ckpt_err *err);
    /* Has the rank closed its side, or died? What it sent before may still be unread. NULL: that
     * ends the whole job. */
    bool (*gone)(struct ckpt_xport *x, uint32_t peer);
    /* Why it is gone (static), as far as that is known; else NULL. The member may be NULL, too. */
    const char *(*why_gone)(struct ckpt_xport *x, uint32_t peer);
    /* From now on the other ranks of this node may read this process's memory, as far as the system
     * asks for that, or not any more. NULL: they never do, or need no permission. */
    void (*permit)(struct ckpt_xport *x, bool on);
    /* Give up all transfers. False: some buffers may still be touched, and must be kept for ever.
     * Afterwards no data is posted before renew. */
    bool (*cancel)(struct ckpt_xport *x);
    /* A load has failed on all ranks, and all call this after cancel and before the next one: what
     * was left of the old transfers must not be taken for new ones. NULL: nothing to do. */
    void (*renew)(struct ckpt_xport *x);
    void (*free)(struct ckpt_xport *x);
};

/* Members embed this first. */
struct ckpt_xport {
    const struct ckpt_xport_ops *ops;
    uint32_t rank, size;
    bool driven;        /* only the thread that called ckpt_load_wait may call in */
    const char *remark; /* to be shown to the user once (static); or NULL */
    bool same_host;     /* ranks of this node read each other's memory: one can serve all of them */
    /* Where destinations lie, and what moves data instead of post (device.h); NULL: the host. */
    struct ckpt_device *device;
};

/* Make a comm of it; it takes x. For transports in libraries of their own. */
struct ckpt_comm;
CKPT_PUBLIC int ckpt_comm_wrap(struct ckpt_xport *x, struct ckpt_comm **ret, struct ckpt_err *err);

/* For transports over another one: that of a comm, and another in its place. */
CKPT_PUBLIC struct ckpt_xport *ckpt_comm_xport(const struct ckpt_comm *comm);
CKPT_PUBLIC void ckpt_comm_replace(struct ckpt_comm *comm, struct ckpt_xport *x);

/* How long ranks wait for each other to come, of CKPTFS_MEET_TIMEOUT; USAGE if that is no number of
 * seconds. */
CKPT_PUBLIC int ckpt_comm_rendezvous_ms(uint32_t *ret, struct ckpt_err *err);

/* USAGE if CKPTFS_SECRET is set, which a transport with connections of its own cannot honour. */
CKPT_PUBLIC int ckpt_comm_no_secret(const char *transport, struct ckpt_err *err);

/* COLLECTIVE. Rank 0's bytes to all, if all ranks are well: rc and err are this rank's verdict, as
 * in ckpt_comm_agree. */
CKPT_PUBLIC int ckpt_comm_share(struct ckpt_comm *comm, int rc, void *data, size_t len,
                                uint32_t timeout_ms, struct ckpt_err *err);

/* Look after the comm while something else is waited for. -1: PEER, a rank is gone. 1: another rank
 * has failed, and says so in the ckpt_comm_agree that comes next. */
CKPT_PUBLIC int ckpt_comm_look(struct ckpt_comm *comm, struct ckpt_err *err);

/* What such a library has under the name CKPT_XPORT_OPEN: the transport as the environment says. */
typedef int ckpt_xport_open(struct ckpt_xport **ret, struct ckpt_err *err);
#define CKPT_XPORT_OPEN "ckpt_xport_open_from_env"

/* And one that gives a comm devices, under the name CKPT_COMM_DEVICE; it takes ctl with success. */
typedef int ckpt_comm_device(struct ckpt_comm *ctl, struct ckpt_comm **ret, struct ckpt_err *err);
#define CKPT_COMM_DEVICE "ckpt_comm_device_from_env"

/* The members of libckptfs_load itself. */
int ckpt_xport_threads(uint32_t n, struct ckpt_xport **ret, struct ckpt_err *err);

#endif
